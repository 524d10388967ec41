"""What programs hand in, looked at before anything is begun.

What comes from a file or a client was checked where it was read; a program gets
the same words here, as an exception of its own call (E1, J7).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from router.errors import Fault, FaultKind, RequestFailed
from router.messages import Job
from router.ports import Worker
from router.settings import WorkerSettings

#: As ``[[worker]]`` has them.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_SLOTS_MAX: Final = 65_536
#: Settings of a worker that are lists of strings.
_LISTS: Final = ("models", "command")

_encode: Final = msgspec.json.Encoder().encode


def check_worker(worker: str | WorkerSettings | Worker) -> None:
    """Look at what a program names as a worker; its adapter checks the rest.

    Raises:
        ValueError: it is none, or has a setting that no file could have.
    """
    if isinstance(worker, str):
        return
    if isinstance(worker, WorkerSettings):
        for key, words in _faults(worker):
            raise ValueError(f"worker {worker.name!r}: {key}: {words}")
        return
    if not callable(getattr(worker, "open", None)):
        raise ValueError(  # noqa: TRY004 - one kind for whatever is of no use
            "a worker is a URL, WorkerSettings or an adapter of ports.Worker, "
            f"not {type(worker).__name__}"
        )


def _faults(worker: WorkerSettings) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    name: Any = worker.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        words = "needs 1 to 64 letters, digits, dots, dashes, underscores"
        found.append(("name", words))
    slots: Any = worker.slots
    if slots is not None and (type(slots) is not int or not 1 <= slots <= _SLOTS_MAX):
        found.append(("slots", f"needs a whole number from 1 to {_SLOTS_MAX}, or None"))
    for key in _LISTS:
        value: Any = getattr(worker, key)
        if value is not None and not _is_list_of_words(value):
            found.append((key, "needs a tuple of strings"))
    return found


def _is_list_of_words(value: object) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(entry, str) and entry for entry in value
    )


def check_job(job: Job) -> None:
    """Look whether *job* can be written down for an engine. Costs an encoding.

    Raises:
        RequestFailed: ``rejected``; it holds what JSON does not have.
    """
    held: Mapping[str, Any] = {
        "messages": job.messages,
        "extras": dict(job.extras),
        "params": job.params,
    }
    for name, value in held.items():
        try:
            _encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as why:
            words = f"The job's {name} are no JSON: {_said(why)}."
            raise RequestFailed(Fault(FaultKind.REJECTED, words)) from None


def _said(why: Exception) -> str:
    """Say what is wrong without what a message holds (X2)."""
    if isinstance(why, UnicodeEncodeError):
        return "half of a surrogate pair is no text"
    if isinstance(why, RecursionError):
        return "they nest too deep"
    return str(why)
