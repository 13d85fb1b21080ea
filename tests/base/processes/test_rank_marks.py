"""What a rank prints is marked, by whichever stream it goes."""

import io
import os
import sys

import pytest

from ampcompare.base.environment.variables import CELL_FOLDER
from ampcompare.base.processes.rank_marks import MARKED, PIECE, mark_output_with_rank


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
    mark_output_with_rank()
    mark_output_with_rank()  # the second has no effect
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
