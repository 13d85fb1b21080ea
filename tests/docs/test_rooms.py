"""The pages about the inside of the package: rooms, floors, and where to look for what."""

import ast
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.modules import module_at, parsed

# With test_architecture.py, which reads all files too.
pytestmark = pytest.mark.xdist_group("architecture")
ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "ampcompare"
MAP = ROOT / "docs" / "contributing" / "map.md"
DESIGN = ROOT / "docs" / "design.md"
PAGES = [ROOT / "CONTRIBUTING.md", DESIGN, *sorted((ROOT / "docs" / "contributing").glob("*.md"))]
NAMED = r"`([\w/]+/(?!NAME\.)[\w.]+\.py)(?:::\w+)?`"
# Between rooms. `migrate --verify`, which starts processes, stands in `experiment` and reads `source`; five are those
# of `doctor`, which stands by itself: what it needs, and its two doors; seven are those of `checkpoints`.
MAX_IMPORTS = 87
ROWS = re.findall(
    r"^\| (.*\?) \| `([\w/.]+)` \| (?:`([\w.]+)` )?\|$", MAP.read_text(encoding="utf-8"), flags=re.MULTILINE
)


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    """The hook that draws tables from the source."""
    hook: Any = module_at("docs/hooks/rooms.py")
    hook.ast = SimpleNamespace(**{**vars(ast), "parse": parsed})
    return hook  # type: ignore[no-any-return]


def names_of(body: list[ast.stmt], above: str = "") -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    names = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(above + node.name)
        if isinstance(node, ast.ClassDef):
            names |= names_of(node.body, f"{node.name}.")
    return names


def test_the_map_has_enough_rows() -> None:
    """No row of the table escapes the checks of this file by its form."""
    table = MAP.read_text(encoding="utf-8").partition("## Symptom and file")[2].partition("\n## ")[0]
    assert len(ROWS) == table.count("\n| ") - 1  # the head of the table is no row
    assert len(ROWS) >= 15


def test_files_of_the_map_exist() -> None:
    """Each file that the map names exists, and holds the function or class that stands next to it."""
    wrong = []
    for question, file, name in ROWS:
        path = PACKAGE / file
        if not path.is_file() or (
            name and name not in names_of(parsed(path.read_text(encoding="utf-8")).body)
        ):
            wrong.append(f"{question} {file} {name}")
    assert not wrong


def test_the_table_of_rooms_is_whole(rooms: ModuleType) -> None:
    """Every room is in the table of design.md, on its floor and with its docstring, in the file as on the site."""
    page = DESIGN.read_text(encoding="utf-8")
    assert page == rooms.with_rooms(page), "run python docs/hooks/rooms.py --fill"
    assert page == rooms.on_page_markdown(page)
    table = page.partition(rooms.END)[0]
    drawn = re.findall(r"\| (\d+) \| `([\w/]+?)(?:/|\.py)` \| \w", table)
    assert {room.replace("/", "."): int(floor) for floor, room in drawn} == rooms.floors()
    assert len(drawn) == len(rooms.floors())


def test_rooms_import_few_others(rooms: ModuleType) -> None:
    """The rooms are joined by few imports."""
    imports = rooms.room_imports()
    assert set(imports) == {"__init__", *(name.partition(".")[0] for name in rooms.floors())}
    count = sum(map(len, imports.values()))
    assert count <= MAX_IMPORTS, (
        f"{count}: let a lower room carry what two rooms need, see docs/hooks/rooms.py"
    )


def test_the_map_has_every_file(rooms: ModuleType) -> None:
    """Every module of the package is in the list that replaces the marker of map.md, with its docstring."""
    page = rooms.on_page_markdown(MAP.read_text(encoding="utf-8"))
    for path in PACKAGE.rglob("*.py"):
        section = page.partition(f"### {path.parent.relative_to(ROOT).as_posix()}/\n")[2].partition("\n### ")[
            0
        ]
        summary = rooms.summary_of(path).replace("|", "\\|")
        assert summary, path
        assert (summary if path.name == "__init__.py" else f"| `{path.name}` | {summary} |") in section


def test_paths_that_pages_name_exist() -> None:
    """A path below the package or the repository that a page names is there; NAME stands for a new file's."""
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    paths = [(name, path) for name, text in texts.items() for path in re.findall(NAMED, text)]
    assert paths
    assert not [
        (name, path) for name, path in paths if not any((root / path).is_file() for root in (PACKAGE, ROOT))
    ]


# `summarize` (`results/analysis/summary.py`)
NAME_IN_FILE = r"`([A-Za-z_]\w*(?:\.\w+)?)`,?\s+\(`((?:\w+/)+\w+\.py)`\)"
ROW = r"\| `((?:\w+/)+\w+\.py)` \| `([A-Za-z_]\w*(?:\.\w+)?)` \|"  # of the tables of both pages
ITEM = r"`((?:\w+/)+\w+\.py)`: `([A-Za-z_]\w*)`"  # of a numbered walk


@pytest.mark.parametrize("page", [DESIGN, MAP], ids=lambda page: page.stem)
def test_names_that_pages_find_in_a_file_are_there(page: Path) -> None:
    """A name that a page gives with its file is defined in that file."""
    text = page.read_text(encoding="utf-8")
    places = [(path, name) for name, path in re.findall(NAME_IN_FILE, text)]
    places += [*re.findall(ROW, text), *re.findall(ITEM, text)]
    assert len(places) > 20
    wrong = []
    for path, name in places:
        if not (PACKAGE / path).is_file():
            continue  # `test_paths_that_pages_name_exist` says so
        source = (PACKAGE / path).read_text(encoding="utf-8")
        wrong += [
            (path, name)
            for part in name.split(".")
            if not re.search(rf"^\s*(?:(?:async )?def |class ){part}\b|^\s*{part}\b.*=", source, re.MULTILINE)
        ]
    assert wrong == []


def test_classes_that_others_extend_have_the_methods_that_are_named() -> None:
    """Each method in the table of contracts is one of the class in its row."""
    table = (
        DESIGN.read_text(encoding="utf-8").partition("## Classes that others extend")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \(`([\w/]+\.py)`\) \| (.*) \|$", table, flags=re.MULTILINE)
    assert len(rows) >= 15
    missing = []
    for name, file, text in rows:
        defined = names_of(parsed((PACKAGE / file).read_text(encoding="utf-8")).body)
        words = set(re.findall(r"`([a-z_]\w*)`", text)) - {"prepare", "measure"}
        missing += [f"{name}.{word}" for word in sorted(words) if f"{name}.{word}" not in defined]
    assert missing == []


def test_names_of_the_walks_are_defined() -> None:
    """A function or class that a walk names without a file is one of the package, too."""
    walks = DESIGN.read_text(encoding="utf-8").partition("## Nine walks")[2].partition("## The loop")[0]
    walks = re.sub(r"```.*?```", "", walks, flags=re.DOTALL)
    texts = [name for name in re.findall(r"`([A-Za-z_][\w.]*)`", walks) if not name.endswith(".py")]
    named = {part for name in texts for part in name.split(".")}
    # `make_launcher` and `RunDirectory`: what is one lower-case word may be a setting, a file or a backend
    named = {name for name in named if "_" in name or name != name.lower()}
    defined: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.id if isinstance(node, ast.Name) else node.attr)
    assert len(named) > 60
    assert named - defined == set()
