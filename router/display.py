"""What `fencepost status` draws of a router's status: tables for a terminal.

Names come from configuration and from engines, so they are drawn as plain
text: none of them can carry markup or control characters into a terminal.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STYLES: Final[Mapping[str, str]] = {
    "ready": "green",
    "suspect": "yellow",
    "starting": "cyan",
    "loading": "cyan",
    "draining": "magenta",
    "lost": "red",
    "failed": "red",
    "gone": "dim",
}
_NUMERIC: Final = frozenset(
    ["for", "busy", "settling", "attempt", "deltas", "age", "pid", "port", "restarts"]
)
#: Requests that are listed; of more, only the number is told.
REQUESTS_SHOWN: Final = 20


def draw_status(status: Mapping[str, Any]) -> RenderableType:
    """Draw ``/status``: one line in words, the workers, what waits, what runs."""
    parts: list[RenderableType] = [_headline(status), _workers(status["workers"])]
    run = [worker for worker in status["workers"] if worker.get("process")]
    if run:
        parts.append(_processes(run))
    far = [worker for worker in status["workers"] if worker.get("agent")]
    if far:
        parts.append(_agents(far))
    if status.get("agent"):
        parts.append(_guests(status["agent"]))
    queues = {model: depth for model, depth in status["queues"].items() if depth}
    if queues:
        parts.append(_queues(queues))
    if status["requests"]:
        parts.append(_requests(status["requests"]))
    return Group(*parts)


def _headline(status: Mapping[str, Any]) -> Text:
    workers = status["workers"]
    serving = sum(worker["state"] in {"ready", "suspect"} for worker in workers)
    if status["stopping"]:
        words, style = "stopping", "magenta"
    elif status["ready"]:
        words, style = "ready", "green"
    else:
        words, style = "not ready", "red"
    return Text.assemble(
        (words, f"bold {style}"),
        f" · {serving} of {len(workers)} workers serve"
        f" · {len(status['requests'])} requests",
    )


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("worker", "state", "for", "busy", "settling", "engine", "models")
    for worker in workers:
        state = str(worker["state"])
        reason = worker["detail"] or worker["reason"] or ""
        words = state if state == "ready" or not reason else f"{state}: {reason}"
        settling = worker["settling"] + worker["ghosts"]
        table.add_row(
            _plain(worker["name"]),
            Text(_plain(words).plain, style=_STYLES.get(state, "")),
            duration(worker["since_s"]),
            f"{worker['in_flight']}/{worker['slots']}",
            str(settling) if settling else "",
            _plain(" ".join(filter(None, (worker["engine"], worker["version"])))),
            _plain(", ".join(worker["models"])),
        )
    return table


def _processes(workers: Sequence[Mapping[str, Any]]) -> Table:
    """Draw the servers that the router runs itself (L8)."""
    table = _table("server of", "pid", "port", "restarts", "last line", "cause")
    for worker in workers:
        process = worker["process"]
        pid = process["pid"]
        if pid is None:
            again = process["again_s"]
            pid = "none" if again is None else f"in {duration(again)}"
        table.add_row(
            _plain(worker["name"]),
            str(pid),
            str(process["port"]),
            str(process["restarts"]),
            _plain(process["last_line"]),
            _plain(process["cause"]),
        )
    return table


def _agents(workers: Sequence[Mapping[str, Any]]) -> Table:
    """Draw what stands behind the workers that are agents."""
    table = _table("worker", "agent", "hosts", "state", "busy", "engine", "models")
    for worker in workers:
        agent = worker["agent"]
        where = agent.get("agent") or agent["address"] or ""
        if not agent["connected"]:
            words = Text("no connection", style="red")
            table.add_row(_plain(worker["name"]), _plain(where), "", words)
        for host in agent.get("hosts", ()):
            state = str(host["state"])
            words = Text(_plain(state).plain, style=_STYLES.get(state, ""))
            table.add_row(
                _plain(worker["name"]),
                _plain(where),
                _plain(host["name"]),
                words,
                f"{host['busy']}/{host['slots']}",
                _plain(" ".join(filter(None, (host["engine"], host["version"])))),
                _plain(", ".join(host["models"])),
            )
    return table


def _guests(agent: Mapping[str, Any]) -> Table:
    """Draw the routers of this agent."""
    words = "drains" if agent["draining"] else "agent"
    table = _table(words, "router", "for", "assignments")
    for router in agent["routers"]:
        table.add_row(
            _plain(agent["name"]),
            _plain(router["id"]),
            duration(router["since_s"]),
            str(router["assignments"]),
        )
    away = agent.get("away", ())
    for router in away:
        why = Text(f"away ({router['reason'] or 'not tried yet'})", style="yellow")
        table.add_row(_plain(agent["name"]), _plain(router["address"]), why)
    if not agent["routers"] and not away:
        table.add_row(_plain(agent["name"]), Text("none", style="dim"))
    return table


def _queues(queues: Mapping[str, int]) -> Table:
    table = _table("model", "waiting")
    for model, depth in queues.items():
        table.add_row(_plain(model), str(depth))
    return table


def _requests(requests: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("request", "model", "phase", "worker", "attempt", "deltas", "age")
    for request in requests[:REQUESTS_SHOWN]:
        attempts = request["attempts"]
        table.add_row(
            _plain(request["request"]),
            _plain(request["model"]),
            _plain(request.get("waiting") or request["phase"]),
            _plain(attempts[-1]["worker"] if attempts else ""),
            str(len(attempts) or ""),
            str(request["deltas"]),
            duration(request["total_s"]),
        )
    more = len(requests) - REQUESTS_SHOWN
    if more > 0:
        table.add_row(Text(f"and {more} more", style="dim"))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column, justify="right" if column in _NUMERIC else "left", overflow="fold"
        )
    return table


def _plain(value: object) -> Text:
    return Text("".join(c if c.isprintable() else "?" for c in str(value)))


def duration(seconds: float) -> str:
    """Write a time span in its two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    if minutes:
        return f"{minutes}m {rest}s"
    return f"{seconds:.1f}s"
