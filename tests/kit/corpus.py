"""The corpus of raw HTTP/1.1 messages: data files, one for each class.

``tests/corpus/http1/requests`` and ``…/responses`` hold TOML files; in each,
``rfc`` names the section that rules its cases, and a ``[[case]]`` has a name,
its ``raw`` bytes and what must come of them. ``raw`` is a string, or a list
of strings and of ``{ fill, times }``, which repeats one. All strings stand for
bytes as Latin-1: ``\\u00FF`` is the byte FF.

A request case: ``messages`` that come out whole, as "METHOD PATH BODY"; then
``status`` if what follows is refused, or ``partial`` if it is unfinished.
``continues``: the last head waits for 100 Continue. ``head_max`` and
``body_max`` replace the default limits.

A response case: either ``status``, ``body``, ``complete`` (true unless said),
``keep_alive`` and ``excess``, or the ``fault``, "malformed" or "truncated".
``eof``: the worker closes behind ``raw``.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from router.http1.gate import HEAD_MAX
from router.http1.request import BODY_MAX

FOLDER: Final = Path(__file__).parent.parent / "corpus" / "http1"


@attrs.frozen
class RequestCase:
    """What a client sends, and what must come of it."""

    name: str
    rfc: str
    raw: bytes = attrs.field(repr=False)
    messages: tuple[bytes, ...] = ()
    """Whole requests: method, path and body with a space between."""
    status: int | None = None
    """The refusal that follows them; None: there is none."""
    partial: bool = False
    continues: bool = False
    head_max: int = HEAD_MAX
    body_max: int = BODY_MAX


@attrs.frozen
class ResponseCase:
    """What a worker sends, and what must come of it."""

    name: str
    rfc: str
    raw: bytes = attrs.field(repr=False)
    status: int | None = None
    body: bytes = b""
    complete: bool = True
    keep_alive: bool = False
    excess: bool = False
    eof: bool = False
    fault: str | None = None
    """``malformed`` or ``truncated``; None: it is an answer."""


def request_cases() -> list[RequestCase]:
    """Give every request case, sorted by class, in the order of its file."""
    found = []
    for name, rfc, case in _cases("requests"):
        messages = tuple(_bytes(message) for message in case.pop("messages", []))
        found.append(RequestCase(name, rfc, messages=messages, **case))
    return found


def response_cases() -> list[ResponseCase]:
    """Give every response case, sorted by class, in the order of its file."""
    found = []
    for name, rfc, case in _cases("responses"):
        body = _bytes(case.pop("body", ""))
        found.append(ResponseCase(name, rfc, body=body, **case))
    return found


def _cases(kind: str) -> list[tuple[str, str, dict[str, Any]]]:
    found = []
    for path in sorted((FOLDER / kind).glob("*.toml")):
        table = tomllib.loads(path.read_text())
        for case in table["case"]:
            name = f"{path.stem}: {case.pop('name')}"
            rfc = case.pop("rfc", table["rfc"])
            case["raw"] = _raw(case["raw"])
            found.append((name, rfc, case))
    return found


def _raw(raw: str | Sequence[str | Mapping[str, Any]]) -> bytes:
    if isinstance(raw, str):
        return _bytes(raw)
    return b"".join(
        [
            _bytes(part)
            if isinstance(part, str)
            else _bytes(part["fill"]) * part["times"]
            for part in raw
        ]
    )


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
