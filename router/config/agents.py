"""Faults of agents: a worker that is one, a host that is one, and who is let in.

Like ``contradictions``, on the raw document; what has the wrong type is passed
over here. What reaches beyond this host has a token or certificates (P1).
"""

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any, Final

#: Keys of a worker that an agent's engines have, each by itself.
_OF_ENGINES: Final = (
    "command",
    "port",
    "model",
    "env",
    "cwd",
    "engine",
    "health_url",
    "settle_ms",
    "pin_slots",
    "stop_grace_ms",
    "max_restarts",
    "restart_window_ms",
)
#: Characters of a token, at least: it is guessed at without a limit.
TOKEN_MIN: Final = 16
_TLS: Final = ("tls_cert", "tls_key", "tls_ca")


def agent_faults(
    document: Mapping[str, Any],
    workers: list[dict[str, Any]],
    environ: Mapping[str, str] | None,
) -> Iterator[str]:
    """Give all of them, each ``path: sentence``; arguments as ``config.load``."""
    for index, worker in enumerate(workers):
        if worker.get("agent") is not None:
            yield from _by_agent(f"worker[{index}]", worker, document)
            yield from _token(f"worker[{index}].api_key_env", worker, environ)
    for section in ("agent", "agents"):
        table = document.get(section)
        if isinstance(table, dict):
            yield from _pair(section, table)
            yield from _no_plain(section, table)
            yield from _token(f"{section}.token_env", table, environ)
            yield from _reach(section, table)
    own = document.get("agent")
    if isinstance(own, dict):
        if not own.get("listen") and not own.get("routers"):
            yield "agent.listen: is missing: where routers connect, or set routers"
        if document.get("agents"):
            yield "agents: an agent meets no agents: that is for a router's file"


def _by_agent(
    path: str, worker: Mapping[str, Any], document: Mapping[str, Any]
) -> Iterator[str]:
    if document.get("agent") is not None:
        yield f"{path}.agent: an agent has engines of its own: give url, or command"
    if "url" in worker:
        yield f"{path}.agent: there is a url too: one worker is one of both"
    for key in _OF_ENGINES:
        if key in worker:
            yield f"{path}.{key}: is set where its agent runs, in that host's file"


def _pair(section: str, table: Mapping[str, Any]) -> Iterator[str]:
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if one in table and other not in table:
            yield f"{section}.{other}: is missing: it goes with {one}"


def _no_plain(section: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Refuse to listen in plain TCP where TLS was asked for."""
    # One of the two without the other is told as a pair.
    if table.get("listen") and "tls_ca" in table and table.keys().isdisjoint(_TLS[:2]):
        yield f"{section}.tls_cert: is missing: who listens with tls_ca needs it"


def _token(
    path: str, table: Mapping[str, Any], environ: Mapping[str, str] | None
) -> Iterator[str]:
    name = table.get(path.rpartition(".")[2])
    if environ is None or not isinstance(name, str):
        return
    token = environ.get(name, "").strip()
    if token and len(token) < TOKEN_MIN:
        yield f"{path}: the token in {name} has less than {TOKEN_MIN} characters"


def _reach(section: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Refuse to be open to whoever reaches this host."""
    if "token_env" in table or all(key in table for key in _TLS):
        return
    listens = table.get("listen")
    found = [listens] if isinstance(listens, str) else listens
    for address in found if isinstance(found, list) else ():
        if isinstance(address, str) and not _is_loopback(address):
            yield (
                f"{section}.listen: {address} is reached from elsewhere: set "
                "token_env, or all of tls_cert, tls_key and tls_ca"
            )


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:"):
        return True  # no address at all here, which is told elsewhere
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
