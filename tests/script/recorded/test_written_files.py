"""Files that a script writes are seen, however it writes them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.jit._script import RecursiveScriptModule

from ampcompare.script.recorded import written_files
from ampcompare.script.recorded.written_files import WrittenFiles

TENSORS = {"a": torch.ones(2)}
ORIGINALS = (torch.save, torch.serialization.save, RecursiveScriptModule.save)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WrittenFiles]:
    """Watch a folder that is no private one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(written_files.tempfile, "gettempdir", lambda: "/elsewhere")  # type: ignore[attr-defined]
    watched = WrittenFiles()
    yield watched
    watched.end()


def _move(path: str) -> None:
    Path("other").touch()
    os.replace("other", path)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save(TENSORS, path),
        lambda path: torch.save(obj=TENSORS, f=path),
        lambda path: torch.save(TENSORS, Path(path), _use_new_zipfile_serialization=False),
        lambda path: torch.serialization.save(TENSORS, path),
        lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path),
        lambda path: torch.jit.script(torch.nn.Linear(2, 2)).save(path),
        lambda path: np.ones(2).tofile(path),
        lambda path: Path(path).write_text("text"),
        _move,
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_file_is_seen(watched: WrittenFiles, write: Callable[[str], object]) -> None:
    """By its full path, as of the moment of writing."""
    write("result")
    assert Path("result").stat().st_size >= 0
    path = os.path.abspath("result")
    os.chdir("/")
    assert watched.end()[-1] == path


def test_reading_and_buffers_are_no_files(watched: WrittenFiles, tmp_path: Path) -> None:
    """And nothing is seen after the end, when all names are what they were."""
    torch.save(TENSORS, io.BytesIO())
    (tmp_path / "read").open("ab").close()
    (tmp_path / "read").open("rb").close()
    assert watched.end() == [str(tmp_path / "read")]
    torch.save(TENSORS, tmp_path / "late")
    (tmp_path / "later").touch()
    assert watched.end() == [str(tmp_path / "read")]
    assert (torch.save, torch.serialization.save, RecursiveScriptModule.save) == ORIGINALS


@pytest.mark.parametrize("name", ["safetensors.torch", "safetensors.numpy"])
def test_safetensors_are_seen(watched: WrittenFiles, name: str) -> None:
    """Also where the script imports them late."""
    module = pytest.importorskip(name)
    tensors = {"a": np.ones(2) if name.endswith("numpy") else torch.ones(2)}
    module.save_file(tensors, filename="result")
    assert watched.end() == [os.path.abspath("result")]
    module.save_file(tensors, "late")
    assert watched.end() == [os.path.abspath("result")]


def test_folders_of_one_cell_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of the cell and of temporary files."""
    monkeypatch.setenv("AMPCOMPARE_CELL_DIR", str(tmp_path))
    watched = WrittenFiles()
    torch.save(TENSORS, tmp_path / "model.pt")
    assert watched.end() == []
