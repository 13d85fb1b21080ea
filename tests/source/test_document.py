"""A document, a notebook too, that is written back without a change is the same file to the byte."""

import ast
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.files.read import FileFault
from ampcompare.source.document import (
    SourceDocument,
    UserPosition,
    parse_document,
    read_document,
    write_document,
)

CONTENTS = {
    "utf-8": "x = 'é'\n".encode(),
    "mark": b"\xef\xbb\xbfx = 1\n",
    "latin-1": "# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"),
    "windows": b"x = 1\r\nif x:\r\n    y = 2\r\n",
    "no newline at the end": b"x = 1",
    "empty": b"",
    "form feed": b"x = 1\n\x0c\ny = 2\n",
    "second line": b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nx = '\x80'\n",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_bytes_are_kept(content: bytes) -> None:
    """Encodings, the byte order mark and newlines come back as they were."""
    document = parse_document(Path("a.py"), content)

    assert document.encode(document.text) == content
    assert "﻿" not in document.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x = '\xff'\n", "line 1: it is not text in utf-8"),
        (b"#\n#\nx = '\xff'\n", "line 3: it is not text in utf-8"),
        (b"# coding: nonsense\n", "unknown encoding: nonsense"),
        (b"x = 1\0", "null byte"),
    ],
)
def test_what_is_not_text(content: bytes, message: str) -> None:
    """Bytes outside the encoding, an unknown encoding and null bytes are faults in one line."""
    with pytest.raises(FileFault, match=message):
        parse_document(Path("a.py"), content)


def test_a_character_that_the_encoding_lacks() -> None:
    """A rewritten text is not written in another encoding than the file declares."""
    document = parse_document(Path("a.py"), b"# coding: latin-1\n")

    with pytest.raises(FileFault, match="cannot be written as iso-8859-1"):
        document.encode("# coding: latin-1\nx = '€'\n")


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_writing_keeps_mode_and_link(tmp_path: Path) -> None:
    """The file behind a link is replaced, with its mode, and nothing else is left in the folder."""
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    script.write_bytes(b"x = 1\r\n")
    script.chmod(0o750)
    link.symlink_to("train.py")

    document = read_document(link)
    write_document(document, document.text.replace("1", "2"))

    assert link.is_symlink()
    assert script.read_bytes() == b"x = 2\r\n"
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "train.py"]


def test_writing_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"x = 1\n")
    monkeypatch.setattr(os, "access", lambda *_, **options: False)  # the superuser may write any file

    with pytest.raises(FileFault, match="Permission denied"):
        write_document(read_document(script), "x = 2\n")
    assert script.read_bytes() == b"x = 1\n"


CELLS: list[str | list[str]] = [
    ["%matplotlib inline\n", "import torch\n", "!pip install apex"],
    "for i in range(3):\n    !echo $i\n    x = (i\n         % 2)\n",
    ["%%bash\n", "echo 'no python'\n", "  ls | wc"],
    ["%%time\n", "y = 1"],
    "files = !ls\ntorch.nn?\n",
    [],
]


def notebook(cells: list[Any], **options: Any) -> bytes:
    content: list[dict[str, Any]] = [{"cell_type": "markdown", "source": ["# Title"]}]
    content += [{"cell_type": "code", "source": cell, "outputs": [], "metadata": {}} for cell in cells]
    return (
        json.dumps({"cells": content, "metadata": {}, "nbformat": 4}, **{"indent": 1, **options}) + "\n"
    ).encode()


def document(content: bytes) -> SourceDocument:
    return parse_document(Path("a.ipynb"), content)


@pytest.mark.parametrize(
    "options", [{}, {"indent": None}, {"indent": 4}, {"indent": "\t"}, {"ensure_ascii": False}]
)
def test_unchanged_cells_come_back(options: dict[str, Any]) -> None:
    """A text that was not rewritten gives the bytes of the file, magic commands and indent included."""
    content = notebook([*CELLS, "# é"], **options)

    read = document(content)

    ast.parse(read.text)
    assert read.encode(read.text) == content


def test_lines_belong_to_cells() -> None:
    """A line of the text has the number of the code cell and of the line in it."""
    read = document(notebook(CELLS))
    lines = read.text.split("\n")

    assert read.position_for_user(lines.index("import torch") + 1) == UserPosition(2, 1, cell=1)
    assert read.position_for_user(lines.index("y = 1") + 1, 4) == UserPosition(2, 5, cell=4)
    assert str(read.position_for_user(lines.index("y = 1") + 1, 4)) == "cell 4:2:5"


def test_a_rewritten_cell() -> None:
    """Only the cell of the change is rewritten; lines added above everything go to the first cell."""
    content = notebook(CELLS)
    read = document(content)

    written = json.loads(read.encode("import math\n" + read.text.replace("y = 1", "y = 2\nz = 3")))

    sources = ["".join(cell["source"]) for cell in written["cells"][1:]]
    assert sources[0].startswith("import math\n%matplotlib inline\n")
    assert sources[3] == "%%time\ny = 2\nz = 3"
    assert written["cells"][4]["source"] == ["%%time\n", "y = 2\n", "z = 3"]
    assert [sources[index] for index in (1, 2, 4, 5)] == ["".join(CELLS[index]) for index in (1, 2, 4, 5)]


def test_cells_that_cannot_be_told_apart() -> None:
    """A text that lost the line of a cell is not written."""
    read = document(notebook(CELLS))

    with pytest.raises(FileFault, match="cells cannot be separated"):
        read.encode(read.text.replace('"ampcompare: code cell 2"\n', ""))


def test_other_languages_have_nothing_to_read() -> None:
    """The cells of an R notebook are kept and not read."""
    data = json.loads(notebook(["x <- 1"]))
    data["metadata"] = {"kernelspec": {"language": "R"}}

    assert "<-" not in document(json.dumps(data).encode()).text


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"cells": 3}', b'{"cells": [1]}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_notebook(content: bytes) -> None:
    """Anything else is a fault in one line."""
    with pytest.raises(FileFault, match="it is not a notebook"):
        document(content)
