"""The drawings are the tables: nothing in them is stale, no table is missing."""

import ast
import re
from enum import Enum
from pathlib import Path
from typing import Final

import pytest

from docs.make_diagrams import (
    BLOCK,
    DOCS,
    ELSE,
    GENERATED,
    MACHINES,
    NoSentence,
    draw,
    renewed,
    sentences,
)

ROOT: Final = Path(__file__).parent.parent
DOCUMENTS: Final = sorted(DOCS.glob("*.md"))
_ARROW: Final = re.compile(r"^    (\w+) --> (\w+): (.+)$", re.MULTILINE)
_STAYS: Final = re.compile(
    r"^\| (\w+) \| .* \| ([a-z]+(?:, [a-z]+)*) \|$", re.MULTILINE
)


def blocks() -> list[str]:
    """Give the name of each generated block, in all documents."""
    return [
        block["name"]
        for path in DOCUMENTS
        for block in BLOCK.finditer(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_generated_is_not_stale(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert renewed(text) == text, "run: make diagrams"


def test_everything_that_can_be_generated_stands_in_one_document() -> None:
    assert sorted(blocks()) == sorted(GENERATED)


def test_every_table_of_transitions_is_drawn() -> None:
    holders = {
        str(path.relative_to(ROOT))
        for package in ("router", "workers")
        for path in (ROOT / package).rglob("*.py")
        if holds_transitions(path)
    }

    drawn = {
        str(Path(str(machine.module.__file__)).relative_to(ROOT))
        for machine in MACHINES.values()
    }
    assert holders == drawn


def holds_transitions(path: Path) -> bool:
    """Tell whether a module assigns a table of transitions."""
    return any(
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id.endswith("TRANSITIONS")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
    )


@pytest.mark.parametrize("name", MACHINES)
def test_every_row_is_an_arrow_or_stays(name: str) -> None:
    machine = MACHINES[name]

    drawn = {
        (state, event, target)
        for state, target, events in _ARROW.findall(draw(machine))
        for event in events.split(", ")
        if event != ELSE
    }
    drawn |= {
        (state, event, state)
        for state, events in _STAYS.findall(draw(machine))
        for event in events.split(", ")
    }

    assert drawn == {
        (state.value, event.value, target.value)
        for state, row in machine.table.items()
        for event, target in row.items()
    }


def test_a_state_without_a_sentence_is_told() -> None:
    with pytest.raises(NoSentence, match="BARE"):
        sentences(Silent)


class Silent(Enum):
    """For the test above."""

    #: It says something.
    TOLD = "told"
    BARE = "bare"


def test_a_marker_that_names_nothing_is_told() -> None:
    with pytest.raises(KeyError, match="typo"):
        renewed("<!-- generated: typo -->\n<!-- end -->")
