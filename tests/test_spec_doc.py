"""docs/spec.md and the tests say the same: rules with proofs, proofs with rules."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Final

import attrs
import pytest

TESTS: Final = Path(__file__).parent
DOC: Final = (TESTS.parent / "docs/spec.md").read_text()
#: Letters of rules; others (``test_b42_…``) name cases of other lists.
LETTERS: Final = "faswlpomhjedxt"
_RULE: Final = re.compile(r"^- \*\*([A-Z]\d+)\*\* ", re.MULTILINE)
_PROOF: Final = re.compile(r"`([\w/]+\.py)::(\w+)`")
_NUMBERED: Final = re.compile(rf"test_([{LETTERS}]\d+)_")


@attrs.frozen
class Rule:
    """One rule of the page; proofs are (path below tests/, name)."""

    number: str
    sentence: str
    proofs: tuple[tuple[str, str], ...]


def rules() -> list[Rule]:
    """Read the page, in its order."""
    parts = _RULE.split(DOC)[1:]
    found = []
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        sentence, _, proof = text.partition("Proof:")
        proof = proof.partition("\n\n")[0]
        found.append(Rule(number, sentence.strip(), tuple(_PROOF.findall(proof))))
    return found


RULES: Final = rules()
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.number)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, methods and classes that a test file defines or assigns."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return frozenset(found)


def test_no_rule_has_two_entries_and_each_stands_in_its_order() -> None:
    numbers = [rule.number for rule in RULES]

    assert [n for n, times in Counter(numbers).items() if times > 1] == []
    for letter in {number[0] for number in numbers}:
        own = [int(number[1:]) for number in numbers if number[0] == letter]
        assert own == sorted(own)


@every_rule
def test_each_rule_says_something_and_names_a_proof(rule: Rule) -> None:
    assert rule.sentence.endswith(".")
    assert rule.proofs != ()


@every_rule
def test_each_proof_exists(rule: Rule) -> None:
    missing = [
        f"{path}::{name}"
        for path, name in rule.proofs
        if not (TESTS / path).is_file() or name not in names_in(TESTS / path)
    ]

    assert missing == []


def test_every_number_in_the_name_of_a_test_has_its_rule() -> None:
    used = {
        match.group(1).upper()
        for path in TESTS.rglob("test_*.py")
        for name in names_in(path)
        if (match := _NUMBERED.match(name))
    }

    assert sorted(used - {rule.number for rule in RULES}) == []
