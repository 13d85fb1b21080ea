"""A document that is written back without a change is the same file to the byte."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ampcompare.base.files.read import FileFault
from ampcompare.source.document import parse_document, read_document, write_document

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


@pytest.mark.usefixtures("modes_count")
def test_writing_without_permission(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"x = 1\n")
    script.chmod(0o444)

    with pytest.raises(FileFault, match="Permission denied"):
        write_document(read_document(script), "x = 2\n")
    assert script.read_bytes() == b"x = 1\n"
