"""docs/wire-vectors.json against the codec, and docs/wire.md against both."""

import hashlib
import hmac
import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from docs.make_vectors import FILE, MESSAGES, TOKEN, render, shown
from router.openai.document import DOCUMENT_MAX
from workers.wire import attempt, frames, gathering
from workers.wire.faults import DECLINES, OF_WORKERS, Decline
from workers.wire.frames import (
    AGENT_SENDS,
    FRAME_MAX,
    ROUTER_SENDS,
    Message,
    Reader,
    Reason,
    WireError,
)
from workers.wire.jobs import decode_job

VECTORS: Final[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
DOC: Final = (Path(__file__).parents[3] / "docs/wire.md").read_text(encoding="utf-8")
by_name = pytest.mark.parametrize(
    "vector", VECTORS["frames"], ids=lambda vector: str(vector["name"])
)


def reader(who: str) -> Reader:
    made = Reader(ROUTER_SENDS if who == "router" else AGENT_SENDS)
    made.most = FRAME_MAX
    return made


def test_the_file_is_not_stale() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), "run: make diagrams"


@by_name
def test_each_frame_decodes_to_its_fields(vector: dict[str, Any]) -> None:
    octets = bytes.fromhex(vector["hex"])
    read = reader(vector["from"])
    (frame,) = read.split(octets)

    message = read.decode(frame)
    assert message == MESSAGES[vector["name"]]
    assert shown(message) == vector["fields"]


@by_name
def test_each_frame_is_plain_msgpack_behind_a_length(vector: dict[str, Any]) -> None:
    """What a writer in another language does, without our types."""
    octets = bytes.fromhex(vector["hex"])
    body = octets[4:]
    assert int.from_bytes(octets[:4], "big") == len(body)

    found = msgspec.msgpack.decode(body)
    assert shown(found) == vector["fields"]


def test_every_message_has_a_vector() -> None:
    kinds = {type(message) for message in MESSAGES.values()}

    assert kinds | {frames.Hello, frames.Proof} == {*ROUTER_SENDS, *AGENT_SENDS}


def test_the_proofs_are_macs_over_both_hellos() -> None:
    """As docs/wire.md says it, step by step."""
    opening = VECTORS["opening"]
    assert opening["token"] == TOKEN.decode()
    router = bytes.fromhex(opening["router hello"])[4:]
    agent = bytes.fromhex(opening["agent hello"])[4:]
    for role, own, peer in (("router", router, agent), ("agent", agent, router)):
        said = b"".join(
            len(part).to_bytes(4, "big") + part
            for part in (b"fencepost wire 1 " + role.encode(), own, peer)
        )
        mac = hmac.digest(TOKEN, said, hashlib.sha256)
        frame = b"\x92\x01\xc4\x20" + mac
        assert opening[f"{role} proof"] == (b"\0\0\0\x24" + frame).hex()


def test_costs_are_counted_as_the_document_says() -> None:
    for entry in VECTORS["costs"]:
        if "text" in entry:
            text, more = entry["text"], 0
        else:
            message = MESSAGES[entry["frame"]]
            assert isinstance(message, frames.RichDelta | frames.Piece)
            text = message.text
            more = len(getattr(message, "logprobs", None) or b"")
            tool = getattr(message, "tool", None)
            if tool is not None:
                more += len((tool.id or "").encode()) + len((tool.name or "").encode())
        assert entry["cost"] == 64 + len(text.encode()) + more


def test_the_job_is_a_map_by_name() -> None:
    octets = bytes.fromhex(VECTORS["job"]["hex"])

    assert shown(decode_job(octets)) == VECTORS["job"]["fields"]
    assert shown(msgspec.msgpack.decode(octets)) == VECTORS["job"]["fields"]


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda v: v["hex"])
def test_what_is_refused_has_its_reason(vector: dict[str, str]) -> None:
    read = reader(vector["from"])
    (frame,) = read.split(bytes.fromhex(vector["hex"]))

    with pytest.raises(WireError) as raised:
        read.decode(frame)
    assert raised.value.reason.value == vector["reason"]


# ---- the document ----


def numbered(kinds: tuple[type[Message], ...]) -> set[tuple[int, str]]:
    """Number and name of each message, as the document writes them."""
    return {
        (
            number_of(kind),
            re.sub(r"(?<!^)(?=[A-Z])", " ", kind.__name__).lower(),
        )
        for kind in kinds
    }


def number_of(kind: type[Message]) -> int:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, int)
    return tag


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under *heading*."""
    section = DOC.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return found[2:]


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("Messages of both ends", (frames.Hello, frames.Proof, frames.Bye)),
        ("Messages of a router", ROUTER_SENDS[3:]),
        ("Messages of an agent", AGENT_SENDS[3:]),
    ],
)
def test_the_document_lists_every_message(
    heading: str, kinds: tuple[type[Message], ...]
) -> None:
    listed = {(int(row[0]), row[1]) for row in rows(heading)}

    assert listed == numbered(kinds)


def test_the_document_lists_every_field_in_order() -> None:
    for heading in (
        "Messages of both ends",
        "Messages of a router",
        "Messages of an agent",
    ):
        for number, _, fields, *_ in rows(heading):
            kind = next(
                k for k in (*ROUTER_SENDS, *AGENT_SENDS) if number_of(k) == int(number)
            )
            names = re.findall(r"\w+", re.sub(r"\(.*?\)", "", fields))
            assert names == list(kind.__struct_fields__), kind


def test_the_document_lists_every_reason_decline_and_fault() -> None:
    assert {row[0] for row in rows("Reasons")} == {reason.value for reason in Reason}
    assert {row[0]: row[1] for row in rows("Declines")} == {
        decline.value: DECLINES[decline].value for decline in Decline
    }
    listed = set(
        re.findall(
            r"`(\w+)`", DOC.partition("\n## Failures\n")[2].partition("\n## ")[0]
        )
    )
    assert {kind.value for kind in OF_WORKERS} <= listed


def test_the_document_gives_the_limits_of_the_code() -> None:
    limits = {row[0]: row[1] for row in rows("Limits")}

    assert limits == {
        "frame": str(frames.FRAME_MAX),
        "frame before the proof": str(frames.FRAME_MAX_UNPROVEN),
        "part of a job": str(frames.PART_MAX),
        "text of one delta": str(frames.TEXT_MAX),
        "first credit": str(frames.WINDOW),
        "number": str(frames.NUMBER_MAX),
        "name": str(frames.NAME_MAX),
        "words": str(frames.SENTENCE_MAX),
        "attempt": str(frames.ATTEMPT_MAX),
        "models": str(frames.MODELS_MAX),
        "engines": str(frames.HOSTS_MAX),
        "lacks": str(frames.LACKS_MAX),
        "cost of a delta": str(frames.DELTA_COST),
        "overdraft": str(attempt.OVERDRAFT_MAX),
        "pieces": str(attempt.PIECES_MAX),
        "pieces of a document": str(attempt.PIECES_MAX + DOCUMENT_MAX),
        "jobs on their way": str(gathering.GATHERING_MAX),
        "next KiB of a job": f"{gathering.GATHER_S:g} s",
        "opening": f"{frames.OPENING_S:g} s",
        "heartbeat": f"{frames.HEARTBEAT_S:g} s",
        "expiry": f"{frames.EXPIRY_S:g} s",
    }
