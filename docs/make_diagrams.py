"""Write into the documents what the code holds as data.

``python docs/make_diagrams.py`` (``make diagrams``) puts the state machines into
docs/machines.md and the faults into docs/errors.md, each between two markers;
the prose around them is written by hand. The tables are the source and the
documents the product, so ``tests/test_diagrams.py`` fails when they differ.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import attrs

DOCS: Final = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

# After the path, since this is a script and no part of a package.
from router import assignment, errors, fence, lifecycle, ports, waiting  # noqa: E402
from router.anthropic import machine as message  # noqa: E402
from router.anthropic.errors import STATUSES  # noqa: E402
from router.sieve import convention  # noqa: E402
from workers.wire import attempt, inbound, opening  # noqa: E402

#: What stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
BLOCK: Final = re.compile(
    r"(?P<open><!-- generated: (?P<name>[\w.-]+) -->\n).*?(?P<close><!-- end -->)",
    re.DOTALL,
)

#: What an arrow says that stands for all events without a row.
ELSE: Final = "anything else"

Table: TypeAlias = Mapping[Any, Mapping[Any, Any]]


@attrs.frozen
class Machine:
    """One machine that is drawn: where its table is, and what its states are."""

    module: ModuleType
    states: type[Enum]
    otherwise: Enum | None = None
    """Where events without a row lead; None: they are illegal."""

    @property
    def table(self) -> Table:
        """State to event to next state; a row for every state."""
        table: Table = self.module.TRANSITIONS
        # A move of the message machine also says what is written.
        return {
            state: {
                event: getattr(move, "to", move)
                for event, move in table.get(state, {}).items()
            }
            for state in self.states
        }


#: Name in the markers to machine.
MACHINES: Final[Mapping[str, Machine]] = {
    "fence": Machine(fence, fence.State),
    "assignment": Machine(assignment, assignment.Phase),
    "lifecycle": Machine(lifecycle, lifecycle.State),
    "message": Machine(message, message.State),
    "convention": Machine(
        convention, convention.Place, otherwise=convention.Place.TEXT
    ),
    "opening": Machine(opening, opening.State),
    "attempt": Machine(attempt, ports.SourcePhase),
    "inbound": Machine(inbound, inbound.State),
}


class NoSentence(Exception):
    """A member of an enum has no ``#:`` comment above it."""


def sentences(members: type[Enum]) -> dict[Enum, str]:
    """Read what the ``#:`` comment above each member says, in their order.

    Raises:
        NoSentence: one has none.
    """
    lines = inspect.getsource(inspect.getmodule(members) or members).splitlines()
    tree = ast.parse("\n".join(lines))
    body = next(
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == members.__name__
    )
    found = {}
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(
            node.targets[0], ast.Name
        ):
            continue
        at = node.lineno - 1
        words: list[str] = []
        while (above := lines[at - 1].strip()).startswith("#:"):
            words.insert(0, above.removeprefix("#:").strip())
            at -= 1
        member = members[node.targets[0].id]
        if not words:
            raise NoSentence(f"{members.__module__}.{member}")
        found[member] = " ".join(words)
    return found


def draw(machine: Machine) -> str:
    """Draw one machine: its changes as arrows, then a row for each state.

    An event that leaves a state as it is has no arrow; the row names it.
    """
    table = machine.table
    first, *_ = machine.states
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, row in table.items():
        targets: dict[Enum, list[str]] = {}
        for event, target in row.items():
            if target is not state:
                targets.setdefault(target, []).append(event.value)
        for target, events in targets.items():
            lines.append(f"    {state.value} --> {target.value}: {', '.join(events)}")
        if row and machine.otherwise is not None:
            lines.append(f"    {state.value} --> {machine.otherwise.value}: {ELSE}")
        if not row:
            lines.append(f"    {state.value} --> [*]")
    lines += ["```", "", "| state | what it means | stays on |", "|---|---|---|"]
    for state, says in sentences(machine.states).items():
        stays = [event.value for event, to in table[state].items() if to is state]
        lines.append(f"| {state.value} | {_cell(says)} | {', '.join(stays)} |")
    return "\n".join(lines)


def tabulate_waits() -> str:
    """Say what each kind of silence is, and which fault it becomes."""
    lines = ["| silence | what it means | beyond its budget |", "|---|---|---|"]
    for state, says in sentences(waiting.WaitState).items():
        kind, words = waiting.TIMEOUTS[waiting.WaitState(state)]
        becomes = f"`{kind.value}`: {words} for … s"
        lines.append(f"| {state.value} | {_cell(says)} | {becomes} |")
    return "\n".join(lines)


def tabulate_faults() -> str:
    """Say all that follows from each kind of fault."""
    heads = "fault|what went wrong|status|code|Anthropic|reason|moves|counts|retry"
    heads = heads.replace("|", " | ")
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    for kind, says in sentences(errors.FaultKind).items():
        row = errors.FAULTS[errors.FaultKind(kind)]
        code = "null" if row.code is None else f"`{row.code}`"
        cells = [
            f"`{kind.value}`",
            _cell(says),
            str(row.status),
            code,
            f"{STATUSES[row.anthropic_type]} `{row.anthropic_type}`",
            f"`{row.reason}`",
            *map(_yes, (row.moves, row.counts, row.retry)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("``", "`")


def _yes(said: bool) -> str:
    return "yes" if said else ""


#: Name in the markers to what stands there.
GENERATED: Final[Mapping[str, Callable[[], str]]] = {
    **{name: partial(draw, machine) for name, machine in MACHINES.items()},
    "waits": tabulate_waits,
    "faults": tabulate_faults,
}


def renewed(text: str) -> str:
    """Give a document's *text* with everything generated in it made anew.

    Raises:
        KeyError: a marker names nothing that can be generated.
    """
    return BLOCK.sub(
        lambda block: (
            f"{block['open']}\n{GENERATED[block['name']]()}\n\n{block['close']}"
        ),
        text,
    )


def main() -> None:
    """Renew every document of this folder in place."""
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
