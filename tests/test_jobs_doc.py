"""docs/jobs.md and docs/tools-and-signals.md say what the code says."""

import re
from pathlib import Path
from typing import Final

import attrs
import pytest

from router.config import parse
from router.engine import JobResult, Router, SyncRouter
from router.errors import FAULTS
from router.messages import GenerationParams, SignalCode
from router.sieve import FOR_MODELS
from router.sieve.loops import LOOP_MIN, PERIOD_MAX
from router.sieve.signals import MESSAGE_MAX, STOPPING
from workers.engines.engine import Engine
from workers.engines.recognise import make_engine
from workers.reasoning import GRACE

DOCS: Final = Path(__file__).parent.parent / "docs"
JOBS: Final = (DOCS / "jobs.md").read_text()
TOOLS: Final = (DOCS / "tools-and-signals.md").read_text()
#: In the order of the columns of the table of parameters.
KINDS: Final = ("llama-server", "vllm", "sglang", "generic")
WORKER: Final = '[[worker]]\nname = "w"\nurl = "http://127.0.0.1:9"\n'


def table(doc: str, head: str) -> list[list[str]]:
    """Rows of the first table whose heading begins with *head*, cell by cell."""
    rows = doc.partition(f"\n| {head} ")[2].partition("\n\n")[0].split("\n")[2:]
    assert rows, head
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_j7_every_reason_is_listed() -> None:
    listed = [words(row[0])[0] for row in table(JOBS, "reason")]

    assert sorted(listed) == sorted({row.reason for row in FAULTS.values()})


def test_j1_every_call_that_is_listed_is_there() -> None:
    for row in table(JOBS, "call"):
        for call in words(row[0]):
            assert hasattr(Router, call.partition("(")[0])


def test_j2_every_call_of_a_sync_router_is_listed() -> None:
    rows = table(JOBS, "call | what an exception")
    listed = {call.partition("(")[0] for row in rows for call in words(row[0])}
    public = {name for name in vars(SyncRouter) if not name.startswith("_")}

    assert listed - {"next"} == public - {"close"}
    for name in public - {"close"}:
        assert hasattr(Router, name), name


@pytest.mark.parametrize("place", range(len(KINDS)))
def test_j3_every_parameter_is_listed_with_each_engines_name(place: int) -> None:
    engine: Engine = make_engine(KINDS[place], ())
    listed: dict[str, str | None] = {}
    for row in table(JOBS, "parameter"):
        cell = row[1 + place]
        for name in words(row[0]):
            own = words(cell)
            listed[name] = own[0] if own else name if cell == "same" else None

    basic = {"temperature", "top_p", "stop", "seed"}
    assert listed.keys() == {f.name for f in attrs.fields(GenerationParams)}
    assert listed.pop("max_tokens") == engine.max_tokens_field
    kept = engine.budget_field if engine.keeps_budget else None
    assert listed.pop("thinking_max_tokens") == kept
    assert all(listed.pop(name) == name for name in basic)
    assert {k: v for k, v in listed.items() if v is not None} == engine.sampling_fields


def test_j1_the_parts_of_a_result_that_are_named_are_there() -> None:
    named = set(re.findall(r"`JobResult\.(\w+)`", JOBS + TOOLS))

    assert named <= {field.name for field in attrs.fields(JobResult)} | {"ok"}


def test_j5_every_signal_is_listed_with_what_follows() -> None:
    rows = table(TOOLS, "code")
    listed = {words(row[0])[0]: row for row in rows}

    assert listed.keys() == {code.value for code in SignalCode}
    for code in SignalCode:
        _, by, follows = listed[code.value]
        assert by.startswith("the model") == (code in FOR_MODELS)
        assert (follows == "the answer ends here") == (code in STOPPING)


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    text = TOOLS.replace("\n", " ")

    assert f"at most {MESSAGE_MAX:_}".replace("_", " ") in text
    assert f"up to {PERIOD_MAX:_} characters".replace("_", " ") in text
    assert f"must be {LOOP_MIN} characters long" in text
    assert f"may go {GRACE} deltas beyond it" in text


def test_j4_the_examples_of_the_page_are_valid() -> None:
    examples = re.findall(r"```toml\n(.*?)```", TOOLS, re.DOTALL)

    assert len(examples) == 2
    for example in examples:
        parse(WORKER + example, environ={}, directory=Path("/etc"))
