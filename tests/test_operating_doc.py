"""docs/operating.md names every metric and every field of the request's record."""

import ast
import inspect
import re
from pathlib import Path
from typing import Final

from router.daemon import hosting, serving
from router.edge.metrics import Metrics
from router.engine import records
from tests.kit.stub_router import StubRouter

DOC: Final = (Path(__file__).parent.parent / "docs/operating.md").read_text()
_METRIC: Final = re.compile(r"^\| `(fencepost_\w+)` \|(.*?) \| (.+) \|$", re.MULTILINE)
_FIELD: Final = re.compile(r"^\| `(\w+)` \| (?!Histogram).+ \|$", re.MULTILINE)


async def test_x1_every_metric_and_label_is_documented_and_no_other() -> None:
    documented = {
        (name, tuple(re.findall(r"`(\w+)`", labels)), "Histogram" in says)
        for name, labels, says in _METRIC.findall(DOC)
    }

    exported = {
        (
            family.name + ("_total" if family.type == "counter" else ""),
            tuple(getattr(family, "_labelnames", ())),
            family.type == "histogram",
        )
        for family in Metrics(StubRouter()).collect()
    }
    assert documented == exported


def test_x2_every_field_of_a_request_is_documented() -> None:
    table = DOC.partition("| field | meaning |")[2].partition("\n\n")[0]

    assert sorted(_FIELD.findall(table)) == sorted(keys_of("flight_record", "record"))


def test_x3_every_field_of_an_attempt_is_documented() -> None:
    (row,) = re.findall(r"^\| `attempts` \| (.+) \|$", DOC, re.MULTILINE)

    assert re.findall(r"`(\w+)`", row) == keys_of_an_attempt()


def keys_of_an_attempt() -> list[str]:
    """Keys of each entry of the record's ``attempts``."""
    tree = ast.parse(inspect.getsource(records.flight_record))
    (each,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ListComp)
        if isinstance(node.elt, ast.Dict)
    )
    assert isinstance(each.elt, ast.Dict)
    return [str(key.value) for key in each.elt.keys if isinstance(key, ast.Constant)]


def keys_of(function: str, name: str) -> list[str]:
    """Keys that *function* of the records puts into *name*."""
    source = inspect.getsource(getattr(records, function))
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            keys = [key for key in node.value.keys if isinstance(key, ast.Constant)]
            found = [str(key.value) for key in keys] + found
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == name
            and isinstance(node.slice, ast.Constant)
        ):
            found.append(str(node.slice.value))
    return found


def test_the_commands_that_are_shown_are_there() -> None:
    from router.cli import main

    shown = set(re.findall(r"`fencepost (\w+)", DOC))

    assert shown == {"serve", "status", "drain", "undrain", "cancel"}
    assert shown <= set(main.commands)


def test_what_is_told_when_it_listens_is_documented() -> None:
    (row,) = re.findall(r"^\| `listening` \| (.+) \|$", DOC, re.MULTILINE)

    told = {
        keyword.arg
        for module in (serving, hosting)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and any(
            isinstance(a, ast.Constant) and a.value == "listening" for a in node.args
        )
        for keyword in node.keywords
    }
    assert set(re.findall(r"`(\w+)`", row)) == told
