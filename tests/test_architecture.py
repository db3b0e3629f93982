"""The house: a file imports lower floors only, so it can be read from the ground up."""

from __future__ import annotations

import ast
import graphlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACE = "nsqdedupe"

# One line per floor, from the ground up: a module imports from lines above its own only, so siblings that
# look alike (the stores, the tables, the commands) cannot lean on each other. A new module goes on the
# lowest line that holds; a module may be listed before it is written.
FLOORS = (
    "errors clock discretion unstarted eager",
    "calls",
    "store metrics checks pauses",
    "fingerprint ids sizing offload delivery testing commands permits",
    "tables.table tables.table_header ledger port waiting",
    "tables.table_file",
    "tables.opposite_bloom tables.rocksdb tables.rolling_bloom",
    "memcached.meta memcached.items memcached.held memcached.damage",
    "memcached.wire",
    "memcached.proof",
    "memcached.link",
    "memcached.streaming",
    "memcached.servers",
    "memcached.claiming memcached.confirming memcached.swapping",
    "memcached.session",
    "memcached.on_loop",
    "stores.embedded stores.memcached stores.redis",
    "stores.url",
    "registry traces together",
    "observer",
    "outcomes",
    "keeper shortcut unprotected",
    "deduper",
    "version client tls streams",
    "options lookupd link",
    "transport neighbours",
    "connection",
    "message pipeline",
    "places publication cluster dialer",
    "handling adopted line outbox",
    "answering",
    "runner desk",
    "handler reader publisher",
    "relay recall run",
    "nsqdedupe",
    "cli.local_server cli.workplace cli.cluster.account cli.demo_events cli.demo_screen",
    "cli.local_nsq cli.local_memcached cli.demo_score",
    "cli.demo_publish cli.cluster.publisher cli.cluster.consumer cli.cluster.summary",
    "cli.demo_run",
    "cli.relay cli.size cli.doctor cli.inspect cli.forget cli.demo cli.demo_cluster",
    "cli.main",
    "__main__",
)
FLOOR = {module: number for number, line in enumerate(FLOORS, start=1) for module in line.split()}

TOP = len(FLOORS) + 1
"""Where a module that is not in the table stands, until it is: one test says so, not all of them."""

NSQ_LIBRARIES = {"nsq", "tornado"}
FIRST_WITH_NSQ = FLOOR["version"]


def _name(file: Path) -> str:
    """The module as the table calls it: ``stores.url``; ``stores`` for the package; the package face in full."""
    parts = file.relative_to(ROOT / FACE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or FACE


FILES = {_name(file): file for file in sorted((ROOT / FACE).rglob("*.py"))}
PACKAGES = {name for name, file in FILES.items() if file.name == "__init__.py" and name != FACE}
MODULES = sorted(set(FILES) - PACKAGES)


def _imported(node: ast.stmt) -> list[str]:
    """The modules that an import statement names, in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    assert node.level == 0, f"line {node.lineno}: relative import"
    submodules = [f"{node.module}.{alias.name}" for alias in node.names]
    own = {f"{FACE}.{name}" for name in FILES}
    return [full if full in own else str(node.module) for full in submodules]


def _imports(name: str) -> list[tuple[str, bool]]:
    """What a module imports, in full, and whether it does so inside a function."""
    tree = ast.parse(FILES[name].read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    late = {id(node) for outer in ast.walk(tree) if isinstance(outer, kinds) for node in ast.walk(outer)}
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [(full, id(node) in late) for node in statements for full in _imported(node)]


def _own(name: str) -> set[str]:
    """The modules of this package that a module imports, as the table calls them."""
    return {full.removeprefix(f"{FACE}.") for full, _ in _imports(name) if full.split(".")[0] == FACE}


def _optional() -> set[str]:
    """The import names of the libraries that the extras bring."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [line for lines in extras.values() for line in lines]
    return {
        "".join(c if c.isalnum() or c in "-_" else " " for c in name).split()[0].replace("-", "_") for name in names
    }


def test_every_module_has_a_floor() -> None:
    assert set(MODULES) <= set(FLOOR), "add it to FLOORS, as low as its imports allow"


def test_no_module_has_two_floors() -> None:
    assert len(FLOOR) == sum(len(line.split()) for line in FLOORS)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_lower_floors_only(name: str) -> None:
    floor = FLOOR.get(name, TOP)
    not_lower = {other for other in _own(name) if FLOOR.get(other, 0) >= floor}
    assert not not_lower, f"{name} is on floor {floor}, these are no lower"


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_subpackage_only_says_what_it_is(name: str) -> None:
    """Else importing one store would bring in all of them, with their libraries."""
    body = ast.parse(FILES[name].read_text()).body
    assert len(body) == 1
    assert ast.get_docstring(ast.Module(body, [])) is not None


def test_no_circle() -> None:
    """Holds by the floors already; says which circle it is when somebody bends the table."""
    graphlib.TopologicalSorter({name: _own(name) for name in MODULES}).prepare()


@pytest.mark.parametrize("name", MODULES)
def test_only_optional_libraries_are_imported_inside_functions(name: str) -> None:
    late = {full for full, inside in _imports(name) if inside}
    assert {full for full in late if full.split(".")[0] not in _optional()} == set()


@pytest.mark.parametrize("name", [name for name in MODULES if FLOOR.get(name, TOP) < FIRST_WITH_NSQ])
def test_below_the_connection_nothing_knows_nsq(name: str) -> None:
    assert {full for full, _ in _imports(name) if full.split(".")[0] in NSQ_LIBRARIES} == set()


def test_the_state_machine_knows_no_concrete_store() -> None:
    assert {other for other in _own("deduper") if other.startswith(("stores", "tables"))} == set()
