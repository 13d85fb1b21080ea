"""Notebooks: their code cells as the text of one module, and back into the file.

Each cell begins with a separate line, the string `MARKER` with the number of the cell, so that a rewritten text can
be divided again. Lines that only IPython understands (`%time`, `!pip install`) become `pass` with a comment, and come
back as they were.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.base.files.read import FileFault
from ampcompare.source.syntax import SourceInvalid, parse_tree

__all__ = ["Cells", "Notebook", "read_notebook"]

MARKER = "ampcompare: code cell"
MARKED = re.compile(rf'^"{MARKER} (\d+)"$', re.MULTILINE)
HIDDEN = "pass  # IPython: "
RESTORED = re.compile(rf"^([ \t]*){re.escape(HIDDEN)}(.*)$", re.MULTILINE)
# Cell magics whose cell is Python; the text below any other is left alone.
PYTHON_MAGICS = (
    "%%time",
    "%%timeit",
    "%%capture",
    "%%prun",
    "%%memit",
    "%%mprun",
    "%%scalene",
    "%%python3",
    "%%python",
)
LINE_OF_IPYTHON = re.compile(
    r"^(?P<indent>[ \t]*)(?P<rest>[!?].*|%[%A-Za-z].*|[\w., \t\[\]'\"]+=[ \t]*[%!].*|[\w.]+\?{1,2}[ \t]*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Cells:
    """The code cells of a notebook as one text.

    Attributes:
        text: the joined cells, each behind its line with `MARKER`.
        starts: the line of each marker, from 1.
    """

    text: str
    starts: tuple[int, ...]

    def locate(self, line: int) -> tuple[int, int]:
        """Return the code cell and the line in it, both from 1, for a line of `text`."""
        index = max(bisect.bisect_right(self.starts, line) - 1, 0)
        return index + 1, max(line - self.starts[index], 1)

    def split(self, text: str) -> list[str]:
        """Return the sources of the cells of a rewritten text; what stands above the first marker joins its cell.

        Raises:
            FileFault: a marker is missing.
        """
        found = list(MARKED.finditer(text))
        if [int(match[1]) for match in found] != list(range(1, len(self.starts) + 1)):
            raise FileFault("the cells cannot be separated in the rewritten text")
        ends = [match.start() - 1 for match in found[1:]] + [len(text) - text.endswith("\n")]
        bodies = [text[match.end() + 1 : end] for match, end in zip(found, ends, strict=True)]
        if found and found[0].start():
            bodies[0] = text[: found[0].start()] + bodies[0]
        return [RESTORED.sub(r"\1\2", body) for body in bodies]


@dataclass(frozen=True)
class Notebook:
    """A notebook, whose cells can be replaced.

    Attributes:
        data: what the JSON holds.
        cells: its code cells.
        indent: of the JSON; None where it has one line.
        tail: what follows the JSON, such as a newline.
        ascii: whether other characters are escaped.
    """

    data: dict[str, Any]
    cells: Cells
    indent: int | str | None
    tail: str
    ascii: bool

    def with_cells(self, sources: Sequence[str]) -> bytes:
        """Return the file with other sources of its code cells."""
        data = json.loads(json.dumps(self.data))
        for cell, source in zip(_code_cells(data), sources, strict=True):
            if _source(cell) != source:
                cell["source"] = re.findall(r".*\n|.+", source) if isinstance(cell["source"], list) else source
        separators = (",", ": ") if self.indent is not None else None
        text = json.dumps(data, indent=self.indent, ensure_ascii=self.ascii, separators=separators)
        return (text + self.tail).encode()


def read_notebook(content: bytes) -> Notebook:
    """Read a notebook (nbformat 4, or 3 with its worksheets).

    Raises:
        FileFault: it is not JSON in UTF-8, or no notebook.
    """
    try:
        text = content.decode("utf-8-sig")
        data = json.loads(text)
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise FileFault(f"it is not a notebook: {error}") from None
    try:
        sources = [_source(cell) for cell in _code_cells(data)]
    except (AttributeError, KeyError, TypeError):
        raise FileFault("it is not a notebook: it has no list of cells") from None
    kernel = data.get("metadata", {}).get("kernelspec", {}) if isinstance(data.get("metadata", {}), dict) else {}
    language = kernel.get("language", "python") if isinstance(kernel, dict) else "python"
    if isinstance(language, str) and language.lower() not in ("python", "python3", "ipython", ""):
        sources = ["" for _ in sources]  # its cells are kept, and there is nothing to find in them
    body = text.rstrip()
    match = re.match(r"\{\r?\n([ \t]*)", body)
    indent = None if match is None else (match[1] if "\t" in match[1] else len(match[1]))
    return Notebook(data, _join(sources), indent, text[len(body) :], body.isascii())


def _code_cells(data: Any) -> list[dict[str, Any]]:
    sheets = [data] if "cells" in data else data["worksheets"]
    found = [cell for sheet in sheets for cell in sheet["cells"] if cell.get("cell_type") == "code"]
    for cell in found:
        if "source" not in cell:
            cell["source"] = cell.pop("input", "")
    return found


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _join(sources: Sequence[str]) -> Cells:
    lines, parts, starts = 1, [], []
    for number, source in enumerate(sources, start=1):
        body = _readable(source)
        starts.append(lines)
        parts.append(f'"{MARKER} {number}"\n{body}\n')
        lines += 2 + body.count("\n")
    return Cells("".join(parts), tuple(starts))


def _readable(source: str) -> str:
    """Return the source of a cell as Python with as many lines; a cell that is something else becomes comments."""
    if _parses(source):
        return source
    first = source.lstrip().partition("\n")[0]
    if first.startswith("%%") and not first.startswith(PYTHON_MAGICS):
        return _hide_all(source)
    hidden = LINE_OF_IPYTHON.sub(lambda match: f"{match['indent']}{HIDDEN}{match['rest']}", source)
    return hidden if _parses(hidden) else _hide_all(source)


def _hide_all(source: str) -> str:
    return "\n".join(f"{HIDDEN}{line}" for line in source.split("\n"))


def _parses(source: str) -> bool:
    try:
        parse_tree(source)
    except SourceInvalid:
        return False
    return True
