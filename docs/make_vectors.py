"""Write docs/wire-vectors.json: frames, byte for byte, for those who write an end.

``python docs/make_vectors.py`` (``make diagrams``) renews the file from the codec;
``tests/workers/wire/test_vectors.py`` fails when the two differ. docs/wire.md says
how to read it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

DOCS: Final = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

# After the path, since this is a script and no part of a package.
from router.messages import GenerationParams, Job  # noqa: E402
from workers.wire import frames  # noqa: E402
from workers.wire.frames import AGENT_SENDS, Message, cost_of, pack  # noqa: E402
from workers.wire.jobs import encode_job  # noqa: E402
from workers.wire.opening import Opening, Passport, Role  # noqa: E402

FILE: Final = DOCS / "wire-vectors.json"
TOKEN: Final = b"a shared token, sixteen or more"
JOB: Final = Job(
    "alias",
    ({"role": "user", "content": "Grüße"},),
    "m",
    GenerationParams(max_tokens=5, temperature=0.5, stop=("END",)),
    {"tools": []},
)
_AGENT: Final = Passport(Role.AGENT, "host-7", 1_795_952_512_000, ("count",), TOKEN)
_ROUTER: Final = Passport(Role.ROUTER, "edge-1", 1_795_952_500_000, (), TOKEN)

#: Name to message; one of each number, and of each optional part.
MESSAGES: Final[dict[str, Message]] = {
    "bye": frames.Bye("stopping", "the agent stops"),
    "offer": frames.Offer(1, "req_01", 2, 1_795_952_512_000, "m", 1000, 65536, 3),
    "offer to count": frames.Offer(2, "count-2", 1, 7, "m", 10, 0, 0, 1),
    "part": frames.Part(1, 65536, b"\x80\xff"),
    "cancel": frames.Cancel(1),
    "credit": frames.Credit(1, 98304),
    "seen": frames.Seen(17),
    "end reasoning": frames.EndReasoning(1),
    "accepted": frames.Accepted(1),
    "declined": frames.Declined(1, "no_slot", "All slots are taken.", 1500),
    "declined, no more said": frames.Declined(1, "stale"),
    "waiting": frames.Waiting(1, "busy"),
    "deltas": frames.Deltas([(1, 0, 0, "Hi"), (300, 7, 1, "é"), (2, 0, 2, "")]),
    "a tool call": frames.RichDelta(
        1, 3, "tool_call", '{"a":', frames.Tool(0, "call_1", "f")
    ),
    "more of a tool call": frames.RichDelta(
        1, 4, "tool_call", "1}", frames.Tool(0, None, None)
    ),
    "text with logprobs": frames.RichDelta(1, 5, "text", "x", None, b'{"content":[]}'),
    "piece": frames.Piece(1, 0, 0, "[0.25,"),
    "the rest of a long delta": frames.RichDelta(
        1, 0, "document", "0.5]", None, None, 1
    ),
    "finishing": frames.Finishing(1, 6, "stop"),
    "finished": frames.Finished(1, 6, "stop", frames.Tokens(12, 6, 4, None), "END"),
    "finished, no usage": frames.Finished(1, 6, "length"),
    "failed": frames.Failed(
        1, "rejected", "no such field", 400, b"{}", "invalid", None, "top_k", None
    ),
    "observation": frames.Observation(
        7, 18, 8, 3, {"m": (5, 2), "n": (0, 1)}, 4096, ["min_p"], None
    ),
    "observation with hosts": frames.Observation(
        7,
        19,
        8,
        3,
        {"m": (5, 2)},
        None,
        [],
        [frames.Host("gpu0", "ready", "ready", "vllm", "0.11", 8, 3, ["m"])],
    ),
    "draining": frames.Draining(),
    "counted": frames.Counted(2, 31),
    "counted, not known": frames.Counted(2, None),
}

#: From whom, bytes without their length, and the reason to close.
REFUSED: Final = (
    ("agent", "c1", "garbage"),
    ("agent", "9220", "garbage"),
    # Bytes behind the array; a string that is no UTF-8.
    ("agent", "92200100", "garbage"),
    ("agent", "93220aa1ff", "garbage"),
    ("agent", "90", "bad_shape"),
    ("agent", "922000", "bad_shape"),
    ("agent", "93200101", "bad_shape"),
    ("agent", "9220a131", "bad_shape"),
    # A float, whole or not, is no number; an extension type is nothing.
    ("agent", "9220cb3ff0000000000000", "bad_shape"),
    ("agent", "9220cb3ff8000000000000", "bad_shape"),
    ("agent", "9220d40000", "bad_shape"),
    ("agent", "92239194010003a0", "bad_shape"),
    ("agent", "921201", "wrong_direction"),
    ("router", "922001", "wrong_direction"),
    ("router", "926301", "unknown_message"),
)


def sender(message: Message) -> str:
    """Say who sends such a message; both: either end."""
    if isinstance(message, frames.Hello | frames.Proof | frames.Bye):
        return "both"
    return "agent" if type(message) in AGENT_SENDS else "router"


def opening() -> dict[str, Any]:
    """One whole opening, with fixed nonces."""
    router = Opening(_ROUTER, bytes(range(32)))
    agent = Opening(_AGENT, bytes(range(32, 64)))
    hellos = router.out.pop(), agent.out.pop()
    router.receive(hellos[1])
    agent.receive(hellos[0])
    proofs = router.out.pop(), agent.out.pop()
    router.receive(proofs[1])
    agent.receive(proofs[0])
    return {
        "token": TOKEN.decode(),
        "router hello": hellos[0].hex(),
        "agent hello": hellos[1].hex(),
        "router proof": proofs[0].hex(),
        "agent proof": proofs[1].hex(),
    }


def costs() -> list[dict[str, Any]]:
    """What deltas take of their credit."""
    plain = [
        {"text": text, "cost": frames.DELTA_COST + len(text.encode())}
        for text in ("", "Hi", "é", "日本")
    ]
    rich = [
        {"frame": name, "cost": cost_of(message)}
        for name, message in MESSAGES.items()
        if isinstance(message, frames.RichDelta | frames.Piece)
    ]
    return [*plain, *rich]


def render() -> str:
    """Write the whole file."""
    document = {
        "about": "docs/wire.md",
        "version": frames.VERSION_MAX,
        "frames": [
            {
                "name": name,
                "from": sender(message),
                "fields": shown(message),
                "hex": pack(message).hex(),
            }
            for name, message in MESSAGES.items()
        ],
        "opening": opening(),
        "costs": costs(),
        "job": {
            "fields": shown(JOB),
            "hex": encode_job(JOB).hex(),
        },
        "refused": [
            {"from": who, "hex": f"{len(body) // 2:08x}{body}", "reason": reason}
            for who, body, reason in REFUSED
        ],
    }
    return "\n".join(_lines(document)) + "\n"


def shown(value: object) -> Any:
    """Show *value* in JSON; bytes as an object with their hex."""
    return _readable(msgspec.to_builtins(value, builtin_types=(bytes,)))


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {name: _readable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(entry) for entry in value]
    return value


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """Write one line an entry, fit for reading and for comparing."""
    opened = "{"
    for name, value in document.items():
        yield f"{opened}{json.dumps(name)}:"
        opened = ","
        if isinstance(value, list):
            entries = [json.dumps(entry, ensure_ascii=False) for entry in value]
            yield "[" + ",\n ".join(entries) + "]"
        else:
            yield json.dumps(value, ensure_ascii=False)
    yield "}"


def main() -> None:
    """Renew the file."""
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
