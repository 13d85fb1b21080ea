"""The floors of the house: which part of the package may import which, read from the source with `ast`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ampcompare"

# Rooms, and the folders in a room that have a floor of their own, from the ground up.
FLOORS = {
    "base": 0,
    "base.tensors": 0,
    "errors": 1,
    "apex": 1,
    "backends": 1,
    "source": 1,
    "source.lint": 2,
    "source.migrate": 3,
    "guards": 3,
    "runs.settings": 4,
    "runs.records": 5,
    "runs.analysis": 6,
    "runs.report": 7,
    "tasks": 8,
    "training.checkpoint": 9,
    "training.parallel": 9,
    "training.precision": 10,
    "training": 11,
    "diagnosis.profiling": 12,
    "diagnosis": 12,
    "testing": 13,
    "script": 13,
    "integrations": 14,
    "experiment.launch": 14,
    "experiment": 15,
    "api.doctor": 16,
    "api": 17,
    "cli": 18,
    "__main__": 19,
}
TORCH_FREE = ("api", "backends", "cli", "experiment", "experiment.launch.script.refusals", "runs", "source")
# In rooms without torch: what needs it, and says so in its docstring.
WITH_TORCH = ("api.doctor", "api.precision", "experiment.claims.programs", "experiment.launch")
HEAVY = {"numpy", "pandas", "scipy", "sklearn", "submitit", "torch", "torchvision"}
TESTS_WITHOUT_A_ROOM = ("benchmarks", "distributed", "docker", "docs")
# One process of pytest reads all files, instead of each.
pytestmark = pytest.mark.xdist_group("architecture")
# Names of objects of a script, or of a file's own, that have attributes of the names of points.
OBJECTS = {"self", "self._watch", "optimizer", "window", "param", "master"}
MAY_PRINT = ("apex", "script.legacy", "cli", "__main__")


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def _targets(module: str, node: ast.AST) -> Iterator[str]:
    """Yield the full names that an import statement may load; `from a import b` may load `a.b` too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *filter(None, [node.module])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES)


@cache
def _imports(module: str) -> tuple[tuple[int, str], ...]:
    """Return the line and the target of every import of a module, inside functions and for type checkers too."""
    nodes = (node for node in ast.walk(_tree(module)) if isinstance(node, ast.Import | ast.ImportFrom))
    return tuple((node.lineno, target) for node in nodes for target in _targets(module, node))


def _names_of_the_package(module: str) -> Iterator[tuple[int, str]]:
    """Yield what a module takes from the package's own `__init__.py`, which imports nearly every room."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name == "ampcompare")
        elif isinstance(node, ast.ImportFrom) and node.module == "ampcompare":
            names = (alias.name for alias in node.names)
            yield from ((node.lineno, name) for name in names if f"ampcompare.{name}" not in MODULES)


def _at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported: not those of functions, nor those for type checkers."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_import(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody", "handlers"):
            yield from _at_import(getattr(node, field, []))


@cache
def _loads(module: str) -> frozenset[str]:
    """Return what importing `module` imports directly, parent packages included."""
    loaded = {target for node in _at_import(_tree(module).body) for target in _targets(module, node)}
    for name in [module, *loaded]:
        if name in MODULES:
            loaded.update(parent for parent in _parents(name) if parent != module)
    return frozenset(loaded)


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in MODULES:
            yield name


def _chains(module: str) -> dict[str, str]:
    """Return every module that importing `module` imports, and by which way."""
    ways = {module: module}
    queue = [module]
    for current in queue:
        for target in sorted(_loads(current) if current in MODULES else ()):
            if target not in ways:
                ways[target] = f"{ways[current]} -> {target}"
                queue.append(target)
    return ways


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _part(module: str) -> str:
    """Return the room of a module, with the folder in it if that has a floor of its own."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in FLOORS else _room(module)


def _is_in(module: str, rooms: tuple[str, ...]) -> bool:
    """Return whether a module is one of `rooms`, as `script.legacy`, or lies in one."""
    return f"{module}.".startswith(tuple(f"ampcompare.{room}." for room in rooms))


def _in_room(*rooms: str) -> list[str]:
    return [module for module in MODULES if _is_in(module, rooms)]


def _circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in edges[module]:
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            group = [stack.pop()]
            while group[-1] != module:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for module in edges:
        if module not in index:
            visit(module)
    return found


def test_no_circle() -> None:
    """No two files import each other, not even for types or inside a function."""
    edges = {}
    for module in MODULES:
        targets = {target for _, target in _imports(module)}
        # `from package import name` names the package too; what counts is the module that defines the name.
        edges[module] = {target for target in targets if target in MODULES and not module.startswith(f"{target}.")}
    assert not _circles(edges)


def test_every_room_has_a_floor() -> None:
    """Nothing lies in the package that the list of floors does not know."""
    unknown = {_part(module) for module in MODULES} - {"", "runs", *FLOORS}
    assert not unknown, f"give {sorted(unknown)} a floor in this file, or move them into a room"


def test_imports_go_down() -> None:
    """A file imports only from its own room and from lower floors, inside functions too, and nothing from the top."""
    wrong = []
    for module in MODULES.keys() - {"ampcompare"}:
        room = _part(module)
        wrong += [f"{module}, line {line}: {name}" for line, name in _names_of_the_package(module)]
        for line, target in _imports(module):
            other = _part(target) if target.split(".")[0] == "ampcompare" else ""
            if other not in ("", room) and FLOORS[other] >= FLOORS[room]:
                wrong.append(f"{module} (floor {FLOORS[room]}), line {line}: {target} (floor {FLOORS[other]})")
    assert not wrong, "imports upwards or sideways"


def _ways_to(packages: Collection[str], modules: Iterable[str]) -> list[str]:
    """Return how importing each of some modules imports one of the packages."""
    chains = (way for module in modules for way in _chains(module).items())
    return [way for target, way in chains if target.split(".")[0] in packages]


def _free_of_torch(module: str) -> bool:
    """Return whether the longest name that holds a module is one of those without torch."""
    names = [name for name in (*TORCH_FREE, *WITH_TORCH) if _is_in(module, (name,))]
    return max(names, key=len) in TORCH_FREE


def test_loads_without_torch() -> None:
    """What reads, plans and reports imports no torch until a function needs it."""
    modules = [name for name in _in_room(*TORCH_FREE) if _free_of_torch(name)]
    assert modules
    assert not _ways_to({"torch", "torchvision"}, modules)


def test_command_line_starts_light() -> None:
    """A command's heavy imports are inside its function, so that `--help` answers at once."""
    assert not _ways_to(HEAVY, _in_room("cli"))


def test_click_lives_in_cli() -> None:
    """Only the command line knows click."""
    users = {name for name in MODULES for _, target in _imports(name) if target.split(".")[0] == "click"}
    assert users
    assert not [name for name in users if _room(name) != "cli"]


def test_only_the_command_line_prints_and_exits() -> None:
    """Below the command line nothing prints or exits, but for the last line of what runs as `python -m`."""
    ends = {"print", "exit", "quit", "sys.exit", "SystemExit"}
    wrong = []
    for module in MODULES:
        if _is_in(module, MAY_PRINT):
            continue
        for part in _tree(module).body:
            if isinstance(part, ast.If) and "__main__" in ast.unparse(part.test):
                continue
            calls = (node for node in ast.walk(part) if isinstance(node, ast.Call))
            named = (call for call in calls if isinstance(call.func, ast.Name | ast.Attribute))
            wrong += [f"{module}, line {call.lineno}" for call in named if ast.unparse(call.func) in ends]
    assert not wrong


def _assigned_classes(tree: ast.AST) -> list[str]:
    """Return where a tree gives an object another class."""
    places = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store))
        or (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "__setattr__")
            and any(isinstance(value, ast.Constant) and value.value == "__class__" for value in node.args)
        )
    ]
    return [f"line {line}" for line in sorted(places)]


def test_no_object_changes_its_class() -> None:
    """`__class__` is read, never assigned: a module gets a `ReplacedForward` and stays what its user made it."""
    assert not {name: lines for name in MODULES if (lines := _assigned_classes(_tree(name)))}


def test_an_assigned_class_is_found() -> None:
    """In each of its spellings, and not where it is read."""
    source = """
a.__class__ = B
a.b[0].__class__, c = B, 1
setattr(a, "__class__", B)
object.__setattr__(a, "__class__", B)
a = b.__class__ is C
getattr(a, "__class__")
"""
    assert _assigned_classes(ast.parse(source)) == ["line 2", "line 3", "line 4", "line 5"]


def _subscribed_names() -> set[str]:
    """Return the names of the functions that anything in the package subscribes to."""
    names = set()
    for module in MODULES:
        for node in ast.walk(_tree(module)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("wrap", "put")
            ):
                names |= {one.value for one in node.args[1:2] if isinstance(one, ast.Constant)}
    points = next(node for node in _tree("ampcompare.guards.events").body if getattr(node, "name", "") == "Points")
    names |= {ast.literal_eval(node.elts[1]) for node in ast.walk(points) if isinstance(node, ast.Tuple)}
    return {name for name in names if isinstance(name, str)}


def _replaced(tree: ast.Module, names: set[str]) -> list[str]:
    """Return where a tree sets an attribute of one of these names, but of an object that is its own or the script's."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | OBJECTS
    places = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in sorted(places, key=lambda node: node.lineno)
        if node.attr in names and ast.unparse(node.value) not in own
    ]


def test_one_place_replaces_functions_of_torch() -> None:
    """What follows a script subscribes to `guards/events.py`; what changes a whole process need not."""
    names = _subscribed_names()
    assert {"backward", "step", "scale", "scale_loss", "_initialize", "__call__", "grad"} <= names
    apart = ("guards.events", *(f"script.legacy.{name}" for name in ("compat", "cpu", "child_processes", "replay")))
    modules = [name for name in _in_room("script", "guards") if not _is_in(name, apart)]
    assert not {name: lines for name in modules if (lines := _replaced(_tree(name), names))}


def test_a_replaced_function_is_found() -> None:
    """Of a module, a class or what an argument names, and not that of an optimizer or a class of the file's own."""
    source = """
kind.step, x = f, 1
amp.scale_loss = handle.scale_loss = f
Tensor.grad = f
self._frontend._initialize = f
optimizer.step = f
param.grad = None
self.scale = 1
class Own: pass
Own.step = f
f(kind.step)
"""
    lines = [one.partition(":")[0] for one in _replaced(ast.parse(source), _subscribed_names())]
    assert lines == ["line 2", "line 3", "line 3", "line 4", "line 5"]


def test_no_file_is_called_utils() -> None:
    """A file's name says what is in it, but for one whose name is Apex's."""
    vague = [name for name in MODULES if name.rpartition(".")[2] in ("utils", "helpers", "misc", "common")]
    assert vague == ["ampcompare.apex.amp.utils"]


def test_modules_say_what_they_are() -> None:
    """Every module begins with a docstring."""
    assert not [name for name in MODULES if not ast.get_docstring(_tree(name))]


def _part_of(path: Path) -> str:
    return _part(".".join(("ampcompare", *path.parent.parts)))


def misplaced_tests(tests: Path) -> list[str]:
    """Return the test files in no folder of the package, and those that are named after a module of another folder."""
    files = [path.relative_to(PACKAGE) for path in MODULES.values()]
    folders = {path.parent for path in files}
    wrong = []
    for path in (path.relative_to(tests) for path in tests.rglob("test_*.py")):
        if len(path.parts) == 1 or path.parts[0] in TESTS_WITHOUT_A_ROOM:
            continue
        module = f"{path.stem.removeprefix('test_')}.py"
        homes = {file.parent for file in files if file.name == module and _part_of(file) == _part_of(path)}
        if path.parent not in (homes or folders):
            wrong.append(path.as_posix())
    return sorted(wrong)


def test_tests_mirror_the_package(tmp_path: Path) -> None:
    """The tests of a file are in the folder of the same name, and a file in another folder is found out."""
    assert not misplaced_tests(PACKAGE.parent / "tests")
    for name in (
        "experiment/launch/test_stall.py",
        "experiment/launch/worker/test_stall.py",
        "tasks/test_cells.py",
        "lunch/test_cells.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert misplaced_tests(tmp_path) == ["experiment/launch/test_stall.py", "lunch/test_cells.py"]


def test_import_is_instant() -> None:
    """`import ampcompare` loads none of the heavy packages, nor pydantic."""
    code = "import sys, ampcompare; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "ampcompare" in loaded
    assert not loaded & (HEAVY | {"pydantic", "click", "yaml"})
