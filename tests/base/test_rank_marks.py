"""What a rank prints is marked, by whichever stream it goes."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from ampcompare.base.rank_marks import CELL_FOLDER, MARKED, PIECE, mark_output


@pytest.mark.parametrize("world", ["1", "2"])
def test_every_stream_of_python_is_marked(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    """The one in place, the one from the start, bytes below it and a stream of another encoding; not a single rank."""
    raw = io.BytesIO()
    first = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, first)
    for name, value in ((CELL_FOLDER, "cell"), ("RANK", "1"), ("WORLD_SIZE", world)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "write", os.write)
    mark_output()
    mark_output()  # the second has no effect
    assert sys.__stdout__ is sys.stdout
    print("a", end="")
    assert sys.__stderr__ is not None
    sys.__stderr__.write("b" * PIECE + "B")
    sys.stdout.buffer.write(b"c")
    other = io.TextIOWrapper(sys.stdout.buffer, encoding="latin-1", write_through=True)
    other.write("\xe4")
    other.flush()
    texts = [b"a", b"b" * PIECE, b"B", b"c", b"\xe4"]
    other.detach()
    if world == "1":
        assert raw.getvalue() == b"".join(texts)
    else:
        assert MARKED.findall(raw.getvalue()) == [(b"1", text) for text in texts]
        assert MARKED.sub(b"", raw.getvalue()) == b""


def test_a_write_to_a_file_descriptor_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in ((CELL_FOLDER, "cell"), ("RANK", "3"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, io.StringIO())
    monkeypatch.setattr(os, "write", os.write)
    out, end = os.pipe()
    kept = os.dup(1)
    try:
        os.dup2(end, 1)
        mark_output()
        assert os.write(1, b"acc 1\n") == 6
        os.write(end, b"plain")
        with (tmp_path / "own.txt").open("wb") as own:
            os.dup2(own.fileno(), 1)
            os.write(1, b"acc 2\n")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(end)
    with open(out, "rb") as pipe:
        assert pipe.read() == b"\x1e3\x1facc 1\n\x1dplain"
    assert (tmp_path / "own.txt").read_bytes() == b"acc 2\n"
