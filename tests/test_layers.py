"""Which room may know which: ranks, purity and names, held as data.

A module imports only from ranks below its own. Modules in one folder that
has one entry here (``router.openai``, ``router.edge``) are one room and may
import each other, without cycles.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import attrs
import pytest

ROOT: Final = Path(__file__).parent.parent

#: Room to rank; a folder's entry covers all that is in it.
RANKS: Final[Mapping[str, int]] = {
    "router.ids": 0,
    "router.words": 0,
    "router.errors": 1,
    "router.messages": 1,
    "router.settings": 1,
    "router.tally": 1,
    "router.fence": 2,
    "router.assignment": 2,
    "router.lifecycle": 2,
    "router.waiting": 2,
    "router.sse": 2,
    "router.http1": 2,
    "router.budget": 2,
    "router.sieve": 2,
    "router.checks": 2,
    "router.catalog": 2,
    "router.commands": 2,
    "router.blame": 2,
    "router.gathered": 2,
    "router.waitingroom": 3,
    "router.placement": 3,
    "router.failover": 3,
    "router.crew": 3,
    "router.fleet": 4,
    "router.ports": 5,
    "router.cork": 5,
    "router.openai": 5,
    "router.anthropic": 5,
    # All above is pure. Workers see no further than this, and nothing that is
    # below the engine sees the workers.
    "workers": 6,
    "router.supervise": 6,
    "router.engine": 7,
    "router.edge": 8,
    # A front like the edge: the same engine behind a wire listener.
    "workers.agent": 8,
    "router.config": 9,
    "router.display": 9,
    "router.logs": 9,
    "router.control": 10,
    "router.daemon": 11,
    "router.demo": 12,
    "router.cli": 13,
    "router.__main__": 14,
    # The façade: names for those who embed the router. No module imports it.
    "router": 14,
}
PURE_UP_TO: Final = 5
WORKERS_FROM: Final = 7

#: What the pure rooms may import besides the standard library.
PURE_PACKAGES: Final = frozenset({"attrs", "cattrs", "msgspec", "httptools"})
#: What they may not import from it: clocks, the world, other loops.
IMPURE_STDLIB: Final = frozenset(
    {
        "asyncio",
        "datetime",
        "http",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "secrets",
        "select",
        "selectors",
        "signal",
        "socket",
        "socketserver",
        "ssl",
        "subprocess",
        "threading",
        "time",
        "urllib.request",
        "uuid",
    }
)
BANNED_WORDS: Final = frozenset(
    {
        "context",
        "manager",
        "handler",
        "helper",
        "helpers",
        "data",
        "info",
        "session",
        "utils",
        "util",
        "misc",
    }
)


@attrs.frozen
class Module:
    """One source file of the two packages."""

    name: str
    path: Path
    tree: ast.Module = attrs.field(repr=False, eq=False)

    @property
    def room(self) -> str | None:
        """The entry of RANKS that covers this module; None: it has no rank."""
        if self.name in {"router", "router.__init__"}:
            return "router"
        parts = self.name.split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            if prefix in RANKS and prefix != "router":
                return prefix
        return None

    @property
    def rank(self) -> int:
        """The rank of its room."""
        room = self.room
        assert room is not None, f"{self.name} has no rank in tests/test_layers.py"
        return RANKS[room]

    @property
    def is_empty(self) -> bool:
        """True for a file that holds a docstring at most."""
        return all(
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for node in self.tree.body
        )


def modules() -> list[Module]:
    """Give every module of router/ and workers/, sorted by name."""
    found = []
    for package in ("router", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            name = name.removesuffix(".__init__")
            found.append(Module(name, path, ast.parse(path.read_text())))
    return sorted(found, key=lambda module: module.name)


MODULES: Final = modules()
NAMES: Final = frozenset(module.name for module in MODULES)
every_module = pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Give (line, dotted name) of each import, late ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                yield node.lineno, dotted if dotted in NAMES else node.module


def own_imports(module: Module) -> Iterator[tuple[int, Module]]:
    """Give (line, module) of each import from router/ and workers/."""
    by_name = {other.name: other for other in MODULES}
    for line, name in imports(module.tree):
        if name in by_name:
            yield line, by_name[name]


def words(name: str) -> list[str]:
    """Split snake_case or CamelCase into lower-case words."""
    return re.findall(r"[a-z0-9]+", re.sub(r"([A-Z])", r"_\1", name).lower())


@every_module
def test_every_module_has_a_rank(module: Module) -> None:
    assert module.room is not None or module.is_empty


@every_module
def test_imports_go_down_the_ranks(module: Module) -> None:
    if module.is_empty:
        return
    wrong = [
        f"{module.path.name}:{line} imports {other.name}"
        for line, other in own_imports(module)
        if other.room != module.room and other.rank >= module.rank
    ]

    assert wrong == []


@every_module
def test_nobody_imports_the_facade(module: Module) -> None:
    assert [line for line, other in own_imports(module) if other.name == "router"] == []


@every_module
def test_workers_see_pure_rooms_only_and_are_seen_from_the_engine_up(
    module: Module,
) -> None:
    wrong = []
    for line, other in own_imports(module):
        if module.room == "workers" and other.room != "workers":
            too_far = other.rank > PURE_UP_TO
        elif other.room == "workers" and module.room != "workers":
            too_far = module.rank < WORKERS_FROM
        else:
            too_far = False
        if too_far:
            wrong.append(f"{module.path.name}:{line} imports {other.name}")

    assert wrong == []


@every_module
def test_pure_rooms_know_no_world(module: Module) -> None:
    if module.is_empty or module.rank > PURE_UP_TO:
        return
    wrong = []
    for line, name in imports(module.tree):
        top = name.partition(".")[0]
        if top in {"router", "random"} or top in PURE_PACKAGES:
            continue
        if top not in sys.stdlib_module_names or {top, name} & IMPURE_STDLIB:
            wrong.append(f"{module.path.name}:{line} imports {name}")

    assert wrong == []


@every_module
def test_pure_rooms_take_their_randomness_as_an_argument(module: Module) -> None:
    if module.is_empty or module.rank > PURE_UP_TO:
        return
    wrong = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            used = {alias.name for alias in node.names}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "random"
        ):
            used = {node.attr}
        else:
            continue
        if used - {"Random"}:
            wrong.append(f"{module.path.name}:{node.lineno} uses random.{used}")

    assert wrong == []


@every_module
def test_pure_rooms_have_no_async_code_but_the_ports(module: Module) -> None:
    if module.is_empty or module.rank > PURE_UP_TO or module.room == "router.ports":
        return

    kinds = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert [n for n in ast.walk(module.tree) if isinstance(n, kinds)] == []


def test_there_are_no_import_cycles() -> None:
    graph = TopologicalSorter(
        {
            module.name: {other.name for _, other in own_imports(module)}
            for module in MODULES
        }
    )

    graph.prepare()  # raises CycleError, which names the cycle


@every_module
def test_names_are_words_that_say_something(module: Module) -> None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = {n.name for n in ast.walk(module.tree) if isinstance(n, kinds)}
    defined.add(module.path.stem)
    # The level of a log line, which structlog and logging call so.
    defined.discard("info")

    assert {name for name in defined if names_nothing(name)} == set()


def names_nothing(name: str) -> bool:
    """Tell whether the last word of *name*, which says what it is, is banned."""
    return words(name)[-1:] != [] and words(name)[-1] in BANNED_WORDS


@pytest.fixture(scope="module")
def tested() -> set[str]:
    """Names of modules that some test file, or its kit, imports."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if path == Path(__file__):
            continue
        names.update(name for _, name in imports(ast.parse(path.read_text())))
    return names


@every_module
def test_every_module_has_its_tests(module: Module, tested: set[str]) -> None:
    """Its own, or those of the folder whose inner part it is."""
    if module.is_empty:
        return
    parts = module.name.split(".")
    folders = {".".join(parts[:length]) for length in range(2, len(parts))}
    siblings = {name for name in tested if name.rpartition(".")[0] in folders}
    relative = module.path.relative_to(ROOT)
    mirror = ROOT / "tests" / relative.parent / f"test_{relative.name}"

    assert ({module.name} | folders) & tested or siblings or mirror.exists()


def test_every_rank_belongs_to_something() -> None:
    gone = [
        room
        for room in RANKS
        if room not in NAMES and not any(n.startswith(f"{room}.") for n in NAMES)
    ]

    assert gone == []
