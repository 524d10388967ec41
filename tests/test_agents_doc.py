"""The examples of docs/agents.md are files that are taken."""

import re
from pathlib import Path
from typing import Final

import pytest

from router.config import parse

DOC: Final = (Path(__file__).parent.parent / "docs/agents.md").read_text()
EXAMPLES: Final = re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_is_valid(example: str) -> None:
    parse(example, environ={"FENCEPOST_TOKEN": "x" * 32}, directory=Path("/etc"))


def test_there_is_one_for_each_end_of_either_way() -> None:
    agents = ["[agent]" in example for example in EXAMPLES]

    assert agents == [True, False, False, True]
