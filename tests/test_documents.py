"""What the documents point to is there: files, modules, decisions in order."""

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
DOCUMENTS: Final = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: Where a path in a text may start.
BASES: Final = ("", "router", "workers", "docs", "tests")
_LINK: Final = re.compile(r"\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)")
_PATH: Final = re.compile(
    r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml|conf|txt)|(?:\w+/)+)`"
)
every_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


@every_document
def test_every_link_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    dead = [to for to, _ in _LINK.findall(text) if not (path.parent / to).exists()]
    assert dead == []


@every_document
def test_every_file_that_is_named_is_there(path: Path) -> None:
    named = set(_PATH.findall(path.read_text(encoding="utf-8")))

    missing = [
        name
        for name in sorted(named)
        if not any((ROOT / base / name).exists() for base in BASES)
        and not list((ROOT / "router").rglob(name))
    ]
    assert missing == []


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [path.name[:4] for path in sorted((ROOT / "docs/adr").glob("0*.md"))]

    assert numbers == [f"{n:04}" for n in range(1, len(numbers) + 1)]


def test_every_decision_has_its_three_parts_and_its_number() -> None:
    for path in sorted((ROOT / "docs/adr").glob("0*.md")):
        text = path.read_text(encoding="utf-8")
        heads = re.findall(r"^## (.+)$", text, re.MULTILINE)

        assert text.startswith(f"# {path.name[:4]} ")
        assert heads == ["Context", "Decision", "Consequences"], path.name
