"""One source file as text: its encoding, mark and newlines are kept, and a notebook looks like a module.

Each cell begins with a separate line, the string `MARKER` with the number of the cell, so that a rewritten text can
be divided again. Lines that only IPython understands (`%time`, `!pip install`) become `pass` with a comment, and come
back as they were.
"""

import bisect
import codecs
import io
import json
import os
import re
import stat
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.files.read import FileFault, open_regular_file
from ampcompare.base.files.write import write_file
from ampcompare.source.syntax import SourceInvalid, parse_tree

MARKER = "ampcompare: code cell"
MARKED = re.compile(rf'^"{MARKER} (\d+)"$', re.MULTILINE)
HIDDEN = "pass  # IPython: "
RESTORED = re.compile(rf"^([ \t]*){re.escape(HIDDEN)}(.*)$", re.MULTILINE)
# Cell magics whose cell is Python; the text below any other is left alone.
PYTHON_MAGICS = (
    "%%time", "%%timeit", "%%capture", "%%prun", "%%memit", "%%mprun", "%%scalene", "%%python3", "%%python",
)  # fmt: skip
LINE_OF_IPYTHON = re.compile(
    r"^(?P<indent>[ \t]*)(?P<rest>[!?].*|%[%A-Za-z].*|[\w., \t\[\]'\"]+=[ \t]*[%!].*|[\w.]+\?{1,2}[ \t]*)$",
    re.MULTILINE,
)
MAX_BYTES = 2**24  # of a module; a notebook may hold images
MAX_NOTEBOOK_BYTES = 2**27


@dataclass(frozen=True)
class _Notebook:
    """A notebook, whose code cells are one text.

    Attributes:
        data: what the JSON holds.
        text: the joined cells, each behind its line with `MARKER`.
        starts: the line of each marker, from 1.
        indent: of the JSON; None where it has one line.
        tail: what follows the JSON, such as a newline.
        ascii: whether other characters are escaped.
    """

    data: dict[str, Any]
    text: str
    starts: tuple[int, ...]
    indent: int | str | None
    tail: str
    ascii: bool

    def cell_and_line_of(self, line: int) -> tuple[int, int]:
        """Return the code cell and the line in it, both from 1, for a line of `text`."""
        index = max(bisect.bisect_right(self.starts, line) - 1, 0)
        return index + 1, max(line - self.starts[index], 1)

    def split_into_cells(self, text: str) -> list[str]:
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

    def encode(self, text: str) -> bytes:
        """Return the file with another text of its code cells."""
        data = json.loads(json.dumps(self.data))
        for cell, source in zip(_code_cells(data), self.split_into_cells(text), strict=True):
            if _source_of_cell(cell) != source:
                cell["source"] = (
                    re.findall(r".*\n|.+", source) if isinstance(cell["source"], list) else source
                )
        separators = (",", ": ") if self.indent is not None else None
        written = json.dumps(data, indent=self.indent, ensure_ascii=self.ascii, separators=separators)
        return (written + self.tail).encode()


def _read_notebook(content: bytes) -> _Notebook:
    """Read a notebook (nbformat 4)."""
    try:
        text = content.decode("utf-8-sig")
        data = json.loads(text)
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise FileFault(f"it is not a notebook: {error}") from None
    try:
        sources = [_source_of_cell(cell) for cell in _code_cells(data)]
    except (AttributeError, KeyError, TypeError):
        raise FileFault("it is not a notebook: it has no list of cells") from None
    kernel = (
        data.get("metadata", {}).get("kernelspec", {}) if isinstance(data.get("metadata", {}), dict) else {}
    )
    language = kernel.get("language", "python") if isinstance(kernel, dict) else "python"
    if isinstance(language, str) and language.lower() not in ("python", "python3", "ipython", ""):
        sources = ["" for _ in sources]  # its cells are kept, and there is nothing to find in them
    body = text.rstrip()
    match = re.match(r"\{\r?\n([ \t]*)", body)
    indent = None if match is None else (match[1] if "\t" in match[1] else len(match[1]))
    return _Notebook(data, *_join_cell_sources(sources), indent, text[len(body) :], body.isascii())


def _code_cells(data: Any) -> list[dict[str, Any]]:
    return [cell for cell in data["cells"] if cell.get("cell_type") == "code"]


def _source_of_cell(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _join_cell_sources(sources: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    lines = 1
    parts = []
    starts = []
    for number, source in enumerate(sources, start=1):
        body = _cell_as_python(source)
        starts.append(lines)
        parts.append(f'"{MARKER} {number}"\n{body}\n')
        lines += 2 + body.count("\n")
    return "".join(parts), tuple(starts)


def _cell_as_python(source: str) -> str:
    """Return the source of a cell as Python with as many lines; a cell that is something else becomes comments."""
    if _is_parsable(source):
        return source
    first = source.lstrip().partition("\n")[0]
    if first.startswith("%%") and not first.startswith(PYTHON_MAGICS):
        return _comment_out_lines(source)
    hidden = LINE_OF_IPYTHON.sub(lambda match: f"{match['indent']}{HIDDEN}{match['rest']}", source)
    return hidden if _is_parsable(hidden) else _comment_out_lines(source)


def _comment_out_lines(source: str) -> str:
    return "\n".join(f"{HIDDEN}{line}" for line in source.split("\n"))


def _is_parsable(source: str) -> bool:
    try:
        parse_tree(source)
    except SourceInvalid:
        return False
    return True


@dataclass(frozen=True)
class UserPosition:
    """A position as the user sees it.

    Attributes:
        line: from 1, in the file or in the cell.
        column: from 1, in characters.
        cell: the code cell of a notebook, from 1; None in a module.
    """

    line: int
    column: int
    cell: int | None = None

    def __str__(self) -> str:
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{cell}{self.line}:{self.column}"


@dataclass(frozen=True)
class SourceDocument:
    """A source file that was read.

    Attributes:
        path: where it was read.
        text: what Python reads, with the newlines of the file; of a notebook the code cells, joined.
        encoding: as the file declares it (PEP 263), UTF-8 for a notebook.
        has_mark: whether it begins with the byte order mark of UTF-8.
        notebook: None for a module.
    """

    path: Path
    text: str
    encoding: str = "utf-8"
    has_mark: bool = False
    notebook: _Notebook | None = None

    def position_for_user(self, line: int, column: int = 0) -> UserPosition:
        """Return the position that a line (from 1) and a column (from 0) of `text` have for the user."""
        if self.notebook is None:
            return UserPosition(line, column + 1)
        cell, line = self.notebook.cell_and_line_of(line)
        return UserPosition(line, column + 1, cell)

    def encode(self, text: str) -> bytes:
        """Return the bytes of the file with another text.

        Raises:
            FileFault: a character that the encoding of the file does not have, or cells that cannot be told apart.
        """
        if self.notebook is not None:
            return self.notebook.encode(text)
        try:
            return (codecs.BOM_UTF8 if self.has_mark else b"") + text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise FileFault(f"{error.object[error.start]!r} cannot be written as {self.encoding}") from None


def read_source_bytes(path: Path) -> bytes:
    """Return the content of a source file.

    Raises:
        FileFault: it cannot be read, is not a regular file, or is too large for source.
    """
    most = MAX_NOTEBOOK_BYTES if path.suffix == ".ipynb" else MAX_BYTES
    with os.fdopen(open_regular_file(path), "rb") as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise FileFault(error.strerror or str(error)) from None
    if len(content) > most:
        raise FileFault(f"it has more than the {most:,} bytes that are read")
    return content


def read_document(path: Path) -> SourceDocument:
    """Read a module, or the code cells of a notebook.

    Raises:
        FileFault: as for `read_source_bytes` and `parse_document`.
    """
    return parse_document(path, read_source_bytes(path))


def parse_document(path: Path, content: bytes) -> SourceDocument:
    """Return the document that the bytes of a file make.

    Raises:
        FileFault: not text in the encoding that it declares, or no notebook.
    """
    if path.suffix == ".ipynb":
        notebook = _read_notebook(content)
        return SourceDocument(path, notebook.text, notebook=notebook)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError as error:
        # the first two lines declare an encoding that Python does not know
        if "declaration" not in str(error.msg):
            raise FileFault(str(error.msg)) from None
        encoding = "utf-8"  # they declare none, and are not text in it, which is said below
    has_mark = content.startswith(codecs.BOM_UTF8)
    name = "utf-8" if encoding == "utf-8-sig" else encoding
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode(name) if has_mark else content.decode(name)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FileFault(f"line {line}: it is not text in {name} (byte {error.start} of the file)") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise FileFault(f"line {line}: it holds a null byte, which Python source cannot contain")
    return SourceDocument(path, text, encoding=name, has_mark=has_mark)


def write_document(document: SourceDocument, text: str) -> None:
    """Replace the file of a document in one move; it keeps its mode, and a link stays a link.

    Raises:
        FileFault: as for `SourceDocument.encode`, or the file may not be written.
        EnvironmentUnfit: the disk is full or the folder cannot be written.
    """
    content = document.encode(text)
    target = Path(os.path.realpath(document.path))
    mode = stat.S_IMODE(target.stat().st_mode)
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise FileFault("Permission denied")
    write_file(target, lambda file: file.write(content), verify=lambda temporary: temporary.chmod(mode))
