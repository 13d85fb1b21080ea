"""What the source of the package keeps to: the contracts of imports in pyproject.toml, and what these cannot say.

import-linter sees every import, also in functions. It does not see which are made when a file is imported.
"""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest

from tests.modules import modules_of_package, parsed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ampcompare"

TORCH_FREE = ("api", "backends", "cli", "experiment", "results", "settings", "source", "testing")
# In rooms without torch: what needs it, and says so in its docstring.
WITH_TORCH = ("api.precision", "experiment.launch")
HEAVY = {"numpy", "pandas", "scipy", "sklearn", "submitit", "torch", "torchvision"}
TESTS_WITHOUT_A_ROOM = ("benchmarks", "distributed", "docker", "docs")
# One process of pytest reads all files, instead of each.
pytestmark = pytest.mark.xdist_group("architecture")
# Names of objects of a script, or of a file's own, that have attributes of the names of points.
OBJECTS = {"self", "self._watch", "optimizer", "window", "param", "master"}
MAY_PRINT = (
    "apex",
    "base.environment.oldest",
    "script.legacy",
    "script.process.execute",
    "script.invocation.stderr",
    "cli",
    "__main__",
)


MODULES = modules_of_package()


def _tree(module: str) -> ast.Module:
    return parsed(MODULES[module].read_text(encoding="utf-8"))


def _with(pattern: str, modules: Iterable[str]) -> list[str]:
    """Return the modules whose text matches a pattern: a look at the text is faster than one at each node."""
    return [name for name in modules if re.search(pattern, MODULES[name].read_text(encoding="utf-8"))]


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


def _is_in(module: str, rooms: tuple[str, ...]) -> bool:
    """Return whether a module is one of `rooms`, as `script.legacy`, or lies in one."""
    return f"{module}.".startswith(tuple(f"ampcompare.{room}." for room in rooms))


def _in_room(*rooms: str) -> list[str]:
    return [module for module in MODULES if _is_in(module, rooms)]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import of the package, in functions and for type checkers too."""
    return grimp.build_graph("ampcompare", cache_dir=None)


def test_no_circle(graph: grimp.ImportGraph) -> None:
    """No two files import each other, not even for types or inside a function."""
    edges = {}
    for module in graph.modules:
        targets = graph.find_modules_directly_imported_by(module)
        # A file may take names of a package that it lies in; what counts is the module that defines them.
        edges[module] = {target for target in targets if not module.startswith(f"{target}.")}
    assert len(edges) == len(MODULES)
    graphlib.TopologicalSorter(edges).prepare()


# Circles of folders that remain, each with its reason.
FOLDERS_OF_APEX = "the folders and imports of Apex itself, which legacy scripts import by name"
MAY_BE_CIRCLES = {
    ("apex.amp", "apex.amp._engine"): FOLDERS_OF_APEX,
    ("apex.amp", "apex.fp16_utils"): FOLDERS_OF_APEX,
}


def _folder_of(module: str) -> str:
    """Return the package that a module is directly in, without the name of the whole one."""
    name = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    return name.removeprefix("ampcompare").removeprefix(".")


def test_no_circle_of_folders(graph: grimp.ImportGraph) -> None:
    """No two folders import each other, a folder and one that lies in it neither; what a room stands on lies below."""
    arrows = {
        (_folder_of(module), _folder_of(target))
        for module in MODULES
        for target in graph.find_modules_directly_imported_by(module)
    }
    circles = {(one, other) for one, other in arrows if one < other and (other, one) in arrows}
    assert circles - {("", room) for _, room in circles} == set(MAY_BE_CIRCLES)


FACES = ("", "errors", "guards", "tasks", "testing")


def test_only_faces_list_their_names() -> None:
    """`__all__` stands where users import from, and in the folders of Apex; within the package names come from home."""
    listing = {
        name.removeprefix("ampcompare").removeprefix(".") for name in _with(r"(?m)^__all__\b", MODULES)
    }
    assert {name for name in listing if not name.startswith("apex")} == set(FACES)


LEAVES = {
    "apex": {
        *("environment.extras", "environment.torch_names", "environment.variables"),
        *("errors", "shim.alias", "tensors", "version"),
    },
    "source": {
        *("environment.packages", "environment.variables", "errors"),
        *("files.read", "files.write", "formatting", "notebook_display"),
        *("secrets", "version"),
    },
}


@pytest.mark.parametrize("room", LEAVES)
def test_leaves_stand_on_little(graph: grimp.ImportGraph, room: str) -> None:
    """All that the engine of Apex, and what reads scripts, reach in the package, in functions too."""
    reached = graph.find_upstream_modules(f"ampcompare.{room}", as_package=True)
    allowed = tuple(f"base.{name}" for name in LEAVES[room])
    assert not [name for name in reached if not _is_in(name, allowed)]


def test_contracts_of_imports() -> None:
    """Every contract of pyproject.toml is kept."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-cache",
    ]
    done = subprocess.run([*command, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def contracts() -> list[dict[str, Any]]:
    """Return the contracts of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


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


def test_only_the_command_line_prints_and_exits() -> None:
    """Below the command line nothing prints or exits, but for the last line of what runs as `python -m`."""
    ends = {"print", "exit", "quit", "sys.exit", "SystemExit"}
    wrong = []
    for module in _with(r"\b(print|exit|quit|SystemExit)\(", MODULES):
        if _is_in(module, MAY_PRINT):
            continue
        for part in _tree(module).body:
            if isinstance(part, ast.If) and "__main__" in ast.unparse(part.test):
                continue
            calls = (node for node in ast.walk(part) if isinstance(node, ast.Call))
            named = (call for call in calls if isinstance(call.func, ast.Name | ast.Attribute))
            wrong += [f"{module}, line {call.lineno}" for call in named if ast.unparse(call.func) in ends]
    assert not wrong


@cache
def _subscribed_names() -> set[str]:
    """Return the names of the functions that anything in the package subscribes to."""
    names = set()
    for module in _with(r"\.(wrap|put_innermost)\(", MODULES):
        for node in ast.walk(_tree(module)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("wrap", "put_innermost")
            ):
                names |= {one.value for one in node.args[1:2] if isinstance(one, ast.Constant)}
    points = next(
        node for node in _tree("ampcompare.base.patches").body if getattr(node, "name", "") == "PatchPoints"
    )
    names |= {ast.literal_eval(node.elts[1]) for node in ast.walk(points) if isinstance(node, ast.Tuple)}
    return {name for name in names if isinstance(name, str)}


def _replaced(tree: ast.Module, names: set[str]) -> list[str]:
    """Return where a tree sets an attribute of one of these names, but of an object that is its own or the script's."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | OBJECTS
    places = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in sorted(places, key=lambda node: node.lineno)
        if node.attr in names and ast.unparse(node.value) not in own
    ]


def test_one_place_replaces_functions_of_torch() -> None:
    """What follows a script subscribes to `base/patches.py`; what changes a whole process need not."""
    names = _subscribed_names()
    assert {"backward", "step", "scale", "scale_loss", "_initialize", "__call__", "grad"} <= names
    own = ("legacy.torch_functions", "legacy.cpu_device", "process.child_processes")
    apart = ("base.patches", *(f"script.{name}" for name in own))
    modules = [name for name in _in_room("script", "guards") if not _is_in(name, apart)]
    assert not {name: lines for name in modules if (lines := _replaced(_tree(name), names))}


def test_no_file_is_called_utils() -> None:
    """A file's name says what is in it, except for one whose name is Apex's."""
    vague = [name for name in MODULES if name.rpartition(".")[2] in ("utils", "helpers", "misc", "common")]
    assert vague == ["ampcompare.apex.amp.utils"]


def test_modules_say_what_they_are() -> None:
    """Every module begins with a docstring."""
    assert not [
        name for name, path in MODULES.items() if not path.read_text(encoding="utf-8").startswith('"""')
    ]


def _part_of(path: Path) -> str:
    """Return the folder of a file that the contracts know, or its room."""
    folders = (".".join(("ampcompare", *folder.parts)) for folder in path.parents)
    return next((folder for folder in folders if folder in _parts()), path.parts[0])


@cache
def _parts() -> set[str]:
    """Return the rooms and folders that contracts name."""
    parts = set()
    for contract in contracts():
        parts.update(contract.get("source_modules", []), contract.get("forbidden_modules", []))
        layers = " | ".join(contract.get("layers", [])).split(" | ")
        parts.update(
            f"{container}.{layer}" for container in contract.get("containers", []) for layer in layers
        )
    return parts - {"ampcompare"}


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


def test_tests_mirror_the_package() -> None:
    """The tests of a file are in the folder of the same name."""
    assert not misplaced_tests(PACKAGE.parent / "tests")


def test_import_is_instant() -> None:
    """`import ampcompare` loads none of the heavy packages, nor pydantic."""
    code = "import sys, ampcompare; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "ampcompare" in loaded
    assert not loaded & (HEAVY | {"pydantic", "click", "yaml"})


# Files outside of `backends` that may compare the name of an arm's backend, each with its reason.
MAY_COMPARE_BACKENDS: dict[str, str] = {}


def _compared(module: str) -> Iterator[str]:
    """Yield the lines that compare `.backend` of an arm, look for it in a collection, or use it as a key."""
    for node in ast.walk(_tree(module)):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            parts = [node.subject]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = [node.func.value, *(node.args if node.func.attr in ("get", "pop", "index") else [])]
        for part in parts:
            if isinstance(part, ast.Attribute) and part.attr == "backend":
                yield f"{module}:{part.lineno}"


def test_the_process_of_a_script_asks_for_no_option_of_an_arm() -> None:
    """What a backend does in a script, its `InScript`, its `Roles` and the file in `script/behind` say."""
    asking = _with(
        r"\.options\b",
        [f"ampcompare.script.{name}" for name in ("behind.stand_in", "arm_process", "behind.own_arm")],
    )
    assert asking == ["ampcompare.script.behind.own_arm"]


def test_what_a_backend_is_stands_in_backends() -> None:
    """No file outside of `backends` asks for the name of an arm's backend: `BackendSpec` and `Roles` answer."""
    outside = [name for name in MODULES if not _is_in(name, ("backends",))]
    found = [
        line
        for name in _with(r"\.backend\b", outside)
        if name not in MAY_COMPARE_BACKENDS
        for line in _compared(name)
    ]
    assert found == []
    assert list(_compared("ampcompare.backends.arm")), "the test sees what it looks for"
