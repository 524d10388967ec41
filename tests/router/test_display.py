import io
from typing import Any

import pytest
from rich.console import Console

from router.display import REQUESTS_SHOWN, draw_status, duration

WORKER: dict[str, Any] = {
    "name": "w0",
    "state": "ready",
    "reason": None,
    "detail": "",
    "since_s": 12.34,
    "engine": "vllm",
    "version": "0.11",
    "models": ["m", "n"],
    "slots": 8,
    "in_flight": 3,
    "settling": 0,
    "ghosts": 0,
}
REQUEST: dict[str, Any] = {
    "request": "req_1",
    "model": "m",
    "phase": "committed",
    "attempts": [{"worker": "w1"}, {"worker": "w0"}],
    "deltas": 41,
    "total_s": 75.0,
}


def status(**changes: Any) -> dict[str, Any]:
    return {
        "ready": True,
        "stopping": False,
        "workers": [WORKER],
        "queues": {},
        "requests": [],
        **changes,
    }


def drawn(shown: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=120, markup=False).print(draw_status(shown))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_d1_a_worker_is_one_line() -> None:
    lines = drawn(status())

    assert lines[0] == "ready · 1 of 1 workers serve · 0 requests"
    assert lines[1].split() == [
        *("worker", "state", "for", "busy", "settling", "engine", "models")
    ]
    assert lines[2].split() == [
        *("w0", "ready", "12.3s", "3/8", "vllm", "0.11", "m,", "n")
    ]
    assert len(lines) == 3


def test_d1_a_worker_that_does_not_serve_says_why() -> None:
    lost = {**WORKER, "state": "lost", "reason": "WORKER_NOT_READY", "models": []}

    assert "not ready · 0 of 1" in drawn(status(workers=[lost], ready=False))[0]
    assert "lost: WORKER_NOT_READY" in drawn(status(workers=[lost]))[2]
    told = {**lost, "detail": "the connection was refused"}
    assert "lost: the connection was refused" in drawn(status(workers=[told]))[2]


PROCESS: dict[str, Any] = {
    "stage": "up",
    "pid": 4711,
    "port": 8081,
    "up_s": 3.0,
    "restarts": 2,
    "again_s": None,
    "last_line": "listening",
    "cause": "it was killed by SIGKILL",
}


def test_l8_a_server_that_is_run_has_a_line_of_its_own() -> None:
    lines = drawn(status(workers=[WORKER, {**WORKER, "process": PROCESS}]))

    assert lines[4].split() == [
        *("server", "of", "pid", "port", "restarts", "last", "line", "cause")
    ]
    assert lines[5].split() == [
        *("w0", "4711", "8081", "2", "listening"),
        *("it", "was", "killed", "by", "SIGKILL"),
    ]
    assert len(lines) == 6


@pytest.mark.parametrize(("again_s", "pid"), [(2.0, "in 2.0s"), (None, "none")])
def test_l8_a_server_that_is_down_says_whether_it_comes_again(
    again_s: float | None, pid: str
) -> None:
    down = {**PROCESS, "pid": None, "again_s": again_s}

    assert f" {pid} " in drawn(status(workers=[{**WORKER, "process": down}]))[4]


def test_l8_what_a_server_says_carries_nothing_into_a_terminal() -> None:
    odd = {**PROCESS, "last_line": "[red]\x1b[2Jx"}

    assert "[red]?[2Jx" in drawn(status(workers=[{**WORKER, "process": odd}]))[4]


def test_d1_slots_that_settle_or_haunt_are_shown() -> None:
    lines = drawn(status(workers=[{**WORKER, "settling": 1, "ghosts": 2}]))

    assert lines[2].split()[4] == "3"


def test_d1_queues_and_requests_are_shown_where_there_are_any() -> None:
    lines = drawn(status(queues={"m": 2, "n": 0}, requests=[REQUEST], stopping=True))

    assert lines[0] == "stopping · 1 of 1 workers serve · 1 requests"
    assert ["m", "2"] in [line.split() for line in lines]
    assert lines[-1].split() == [
        *("req_1", "m", "committed", "w0", "2", "41", "1m", "15s")
    ]


def test_d1_of_many_requests_the_first_are_shown() -> None:
    lines = drawn(status(requests=[REQUEST] * (REQUESTS_SHOWN + 5)))

    assert lines[-1] == "and 5 more"


def test_names_from_outside_cannot_steer_a_terminal() -> None:
    worker = {**WORKER, "models": ["\x1b[2J", "[bold]m[/bold]"]}
    shown = "\n".join(drawn(status(workers=[worker])))

    assert "\x1b" not in shown
    assert "[bold]m[/bold]" in shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0s"),
        (59.94, "59.9s"),
        (60, "1m 0s"),
        (3599, "59m 59s"),
        (3600, "1h 0m"),
        (86_399, "23h 59m"),
        (90_000, "1d 1h"),
    ],
)
def test_a_time_span_is_its_two_largest_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_d1_an_agent_is_shown_with_what_it_hosts() -> None:
    host = {
        "name": "gpu0",
        "state": "loading",
        "reason": "",
        "engine": "vllm",
        "version": "0.11",
        "slots": 4,
        "busy": 1,
        "models": ["m"],
    }
    met = {
        "agent": "h7",
        "address": "10.0.0.7:7700",
        "connected": True,
        "hosts": [host],
    }
    gone = {"address": "10.0.0.8:7700", "connected": False}
    workers = [
        {**WORKER, "agent": met},
        {**WORKER, "name": "w1", "agent": gone},
        {**WORKER, "name": "w2", "agent": None},
    ]
    lines = drawn(status(workers=workers))

    assert [line.split() for line in lines[5:]] == [
        ["worker", "agent", "hosts", "state", "busy", "engine", "models"],
        ["w0", "h7", "gpu0", "loading", "1/4", "vllm", "0.11", "m"],
        ["w1", "10.0.0.8:7700", "no", "connection"],
    ]


def test_d1_an_agent_shows_its_routers() -> None:
    agent = {
        "name": "h7",
        "draining": False,
        "routers": [{"id": "r-1", "since_s": 5.0, "assignments": 3}],
    }
    lines = drawn(status(agent=agent))
    assert lines[3].split() == ["agent", "router", "for", "assignments"]
    assert lines[4].split() == ["h7", "r-1", "5.0s", "3"]

    lines = drawn(status(agent={**agent, "draining": True, "routers": []}))
    assert lines[3].split() == ["drains", "router", "for", "assignments"]
    assert lines[4].split() == ["h7", "none"]
    away = [{"address": "r:7701", "reason": "unauthorized", "words": "a token"}]
    lines = drawn(status(agent={**agent, "away": away, "routers": []}))
    assert lines[-1].split() == ["h7", "r:7701", "away", "(unauthorized)"]
