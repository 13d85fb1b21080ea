"""The rooms of the package and its files, drawn from their docstrings and from the contracts in `pyproject.toml`.

mkdocs calls `on_page_markdown`. Nothing of the package is imported: everything is read with `ast`.
`python docs/hooks/rooms.py [CHECKOUT]` prints how many imports lead from room to room, and which.
`python docs/hooks/rooms.py --fill` writes the table of rooms into docs/design.md, for who reads the file.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "ampcompare"
DESIGN = ROOT / "docs" / "design.md"
FILES, ROOMS, END = "<!-- files -->", "<!-- rooms -->", "<!-- end of rooms -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker of a page by the list of files, and the table of rooms by that of the source."""
    if FILES in markdown:
        markdown = markdown.replace(FILES, file_map())
    return with_rooms(markdown)


def with_rooms(markdown: str) -> str:
    """Return a page with the table of rooms between its two markers, if it has them."""
    above, begin, rest = markdown.partition(ROOMS)
    return f"{above}{begin}\n\n{rooms_table()}\n\n{END}{rest.partition(END)[2]}" if begin else markdown


@cache
def contracts() -> list[dict[str, Any]]:
    """Return the contracts of imports, from `pyproject.toml`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def floors() -> dict[str, int]:
    """Return the floor of each room, from the layers of the package, counted from the ground."""
    layers = next(contract["layers"] for contract in contracts() if contract["id"] == "rooms")
    return {room: floor for floor, layer in enumerate(reversed(layers)) for room in layer.split(" | ")}


@cache
def room_imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return for each room the other rooms that its files import, lazily and for type checkers too.

    The package's own `__init__.py` is a room like any other, and an import of a name from the package leads to it.

    Args:
        root: of a checkout.
    """
    package = root / "ampcompare"
    rooms = {path.stem for path in package.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))} - {
        "__init__"
    }
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        room = place.parts[0].removesuffix(".py")
        targets, above = found.setdefault(room, set()), ("ampcompare", *place.parent.parts)
        for node in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
            for name in _imported(node, above):
                head, _, rest = name.partition(".")
                target = rest.partition(".")[0] if rest.partition(".")[0] in rooms else "__init__"
                if head == "ampcompare" and target != room:
                    targets.add(target)
    return found


def _statements(body: list[Any]) -> Iterator[ast.AST]:
    """Yield the statements of a module, also of its functions; no expressions, which are most of its nodes."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, field, []))


def _imported(node: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the full names that an import statement of a file in `package` names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else ()
        base = ".".join([*above, *filter(None, [node.module])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def summary_of(path: Path) -> str:
    """Return the first line of a module's docstring."""
    found = re.match(r'"""(.*?)(?:"""|\n)', path.read_text(encoding="utf-8"))
    return found[1] if found else ""


def rooms_table() -> str:
    """Return a table of all rooms, the top first, with the first lines of docstrings, and the other contracts.

    Below each room stand the folders in it.
    """
    rows = ["| floor | room | what it is | imports |", "|---|---|---|---|"]
    imports = room_imports()
    for room, floor in sorted(floors().items(), key=lambda item: (-item[1], item[0])):
        for name, path in (
            (f"{room}/", PACKAGE / room / "__init__.py"),
            (f"{room}.py", PACKAGE / f"{room}.py"),
        ):
            if path.is_file():
                others = " ".join(sorted(imports.get(room, ())))
                rows.append(f"| {floor} | `{name}` | {_cell(summary_of(path))} | {others} |")
        rows += [
            f"| | `{path.parent.relative_to(PACKAGE).as_posix()}/` | {_cell(summary_of(path))} | |"
            for path in sorted((PACKAGE / room).glob("*/**/__init__.py"))
        ]
    return "\n".join([*rows, "", *(f"* {contract['name']}." for contract in contracts()[1:])])


def file_map() -> str:
    """Return a section for each folder of the package, with the first line of each file's docstring."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for folder in folders:
        yield from (f"### {folder.relative_to(ROOT).as_posix()}/", "")
        start = folder / "__init__.py"
        if start.exists():
            yield from (_cell(summary_of(start)), "")
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        if files:
            yield from ("| file | what it is |", "|---|---|")
            yield from (f"| `{path.name}` | {_cell(summary_of(path))} |" for path in files)
            yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if sys.argv[1:] == ["--fill"] and __name__ == "__main__":
    DESIGN.write_text(with_rooms(DESIGN.read_text(encoding="utf-8")), encoding="utf-8")
elif __name__ == "__main__":
    arrows = room_imports(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
    lines = [f"{room}: {' '.join(sorted(targets))}" for room, targets in arrows.items()]
    total = f"{sum(map(len, arrows.values()))} imports between {len(arrows)} rooms"
    sys.stdout.write("\n".join([*lines, total]) + "\n")
