"""docs/configuration.md lists exactly the keys there are, with their defaults."""

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from router.config import parse
from router.config.reading import SECTIONS

DOC: Final = (Path(__file__).parent.parent / "docs/configuration.md").read_text()
_HEAD: Final = re.compile(r"^## `\[+(\w+)[\].]", re.MULTILINE)
_ROW: Final = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", re.MULTILINE)


def documented() -> dict[str, dict[str, str]]:
    """Section to key to default, as written."""
    parts = _HEAD.split(DOC)[1:]
    return {
        name: {key: default for key, default, _ in _ROW.findall(text)}
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def default(field: "attrs.Attribute[Any]") -> object:
    value = field.default
    if field.name == "env":
        # A table, which attrs makes anew for each.
        return {}
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("section", SECTIONS)
def test_the_reference_lists_every_key_in_order_and_no_other(section: str) -> None:
    keys = [field.name for field in attrs.fields(SECTIONS[section])]

    assert list(documented()[section]) == keys


@pytest.mark.parametrize("section", SECTIONS)
def test_the_reference_gives_the_defaults_of_the_code(section: str) -> None:
    for field in attrs.fields(SECTIONS[section]):
        written = documented()[section][field.name]
        if field.default is attrs.NOTHING:
            assert written == "required"
        elif field.default is None:
            assert written == "not set"
        else:
            read = tomllib.loads(f"value = {written.strip('`')}")["value"]
            assert read == default(field), field.name


def test_the_examples_of_the_reference_are_valid() -> None:
    examples = re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)

    assert len(examples) == 2
    for example in examples:
        parse(example, environ={"GPU0_KEY": "sk-1"}, directory=Path("/etc"))
