"""One source file as text: its encoding, mark and newlines are kept, and a notebook looks like a module."""

from __future__ import annotations

import codecs
import io
import os
import stat
import tokenize
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.files.read import FileFault, open_regular
from ampcompare.base.files.write import write_file
from ampcompare.source.notebook import Cells, Notebook, read_notebook

__all__ = ["MAX_BYTES", "Document", "Place", "parse_document", "read_bytes", "read_document", "write_document"]

MAX_BYTES = 2**24  # of a module; a notebook may hold images
MAX_NOTEBOOK_BYTES = 2**27


@dataclass(frozen=True)
class Place:
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
class Document:
    """A source file that was read.

    Attributes:
        path: where it was read.
        text: what Python reads, with the newlines of the file; of a notebook the code cells, joined.
        encoding: as the file declares it (PEP 263), UTF-8 for a notebook.
        has_mark: whether it begins with the byte order mark of UTF-8.
        notebook: what else the notebook holds; None for a module.
        cells: which lines of `text` belong to which cell; None for a module.
    """

    path: Path
    text: str
    encoding: str = "utf-8"
    has_mark: bool = False
    notebook: Notebook | None = None
    cells: Cells | None = None

    def place(self, line: int, column: int = 0) -> Place:
        """Return the position that a line (from 1) and a column (from 0) of `text` have for the user."""
        if self.cells is None:
            return Place(line, column + 1)
        cell, line = self.cells.locate(line)
        return Place(line, column + 1, cell)

    def encode(self, text: str) -> bytes:
        """Return the bytes of the file with another text.

        Raises:
            FileFault: a character that the encoding of the file does not have, or cells that cannot be told apart.
        """
        if self.notebook is not None and self.cells is not None:
            return self.notebook.with_cells(self.cells.split(text))
        try:
            return (codecs.BOM_UTF8 if self.has_mark else b"") + text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise FileFault(f"{error.object[error.start]!r} cannot be written as {self.encoding}") from None


def read_bytes(path: Path) -> bytes:
    """Return the content of a source file.

    Raises:
        FileFault: it cannot be read, is not a regular file, or is too large for source.
    """
    most = MAX_NOTEBOOK_BYTES if path.suffix == ".ipynb" else MAX_BYTES
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise FileFault(error.strerror or str(error)) from None
    if len(content) > most:
        raise FileFault(f"it has more than the {most:,} bytes that are read")
    return content


def read_document(path: Path) -> Document:
    """Read a module, or the code cells of a notebook.

    Raises:
        FileFault: as for `read_bytes` and `parse_document`.
    """
    return parse_document(path, read_bytes(path))


def parse_document(path: Path, content: bytes) -> Document:
    """Return the document that the bytes of a file make.

    Raises:
        FileFault: not text in the encoding that it declares, or no notebook.
    """
    if path.suffix == ".ipynb":
        notebook = read_notebook(content)
        return Document(path, notebook.cells.text, notebook=notebook, cells=notebook.cells)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError as error:
        if "declaration" not in str(error.msg):  # the first two lines declare an encoding that Python does not know
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
    return Document(path, text, encoding=name, has_mark=has_mark)


def write_document(document: Document, text: str) -> None:
    """Replace the file of a document in one move; it keeps its mode, and a link stays a link.

    Raises:
        FileFault: as for `Document.encode`, or the file may not be written.
        EnvironmentUnfit: the disk is full or the folder cannot be written.
    """
    content = document.encode(text)
    target = Path(os.path.realpath(document.path))
    mode = stat.S_IMODE(target.stat().st_mode)
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise FileFault("Permission denied")
    write_file(target, lambda file: file.write(content), verify=lambda temporary: temporary.chmod(mode))
