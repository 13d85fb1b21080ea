"""Files that a script writes are seen, however it writes them, and scalars that it logs."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.jit._script import RecursiveScriptModule

from ampcompare.base import metric_log
from ampcompare.base.files.run_files import CellFile
from ampcompare.runs.records.opened_files import forget_reads, read_opened
from ampcompare.script import watch
from ampcompare.script.watch import LIBRARIES, WrittenFiles, catch_scalars

TENSORS = {"a": torch.ones(2)}
ORIGINALS = (torch.save, torch.serialization.save, RecursiveScriptModule.save)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WrittenFiles]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch.tempfile, "gettempdir", lambda: "/elsewhere")  # type: ignore[attr-defined]
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
    module = pytest.importorskip(name)
    tensors = {"a": np.ones(2) if name.endswith("numpy") else torch.ones(2)}
    module.save_file(tensors, filename="result")
    assert watched.end() == [os.path.abspath("result")]
    module.save_file(tensors, "late")
    assert watched.end() == [os.path.abspath("result")]


def test_folders_of_one_cell_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AMPCOMPARE_CELL_DIR", str(tmp_path))
    watched = WrittenFiles()
    torch.save(TENSORS, tmp_path / "model.pt")
    assert watched.end() == []


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two cells of a run directory, of which this process is `mine`; the working directory is next to them."""
    monkeypatch.setattr(watch.tempfile, "gettempdir", lambda: "/elsewhere")  # type: ignore[attr-defined]
    for name in ("mine", "other"):
        (tmp_path / "cells" / name).mkdir(parents=True)
    monkeypatch.setenv("AMPCOMPARE_CELL_DIR", str(tmp_path / "cells" / "mine"))
    monkeypatch.setenv("AMPCOMPARE_CELL_STARTED", str(time.time() + 100))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "cells"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_another_cell_wrote_is_seen_when_it_is_read(cells: Path) -> None:
    """Whether by `open`, `torch.load`, or TorchScript; data that nobody writes is not named."""
    for name in ("ck.pt", "scripted.pt", "teacher.txt", "data.txt", "mlruns/0/meta.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    torch.save(TENSORS, "ck.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save("scripted.pt")
    names = ("ck.pt", "scripted.pt", "teacher.txt", "mlruns/0/meta.txt")
    (cells / "other" / CellFile.OPENED).write_text(
        "".join(json.dumps({"wrote": os.path.abspath(one)}) + "\n" for one in names)
    )
    watched = WrittenFiles()
    torch.load("ck.pt")
    torch.jit.load("scripted.pt")
    Path("teacher.txt").read_text()
    Path("data.txt").read_text()
    Path("mlruns/0/meta.txt").read_text()
    watched.end()
    opened = read_opened(cells / "mine")
    assert [os.path.basename(one) for one in opened.inherited] == ["ck.pt", "scripted.pt", "teacher.txt"]


def test_a_file_that_is_read_before_it_is_written_was_there_before(cells: Path) -> None:
    """In this order only: a cell reads its own file back."""
    Path("old.txt").write_text("x")
    watched = WrittenFiles()
    Path("old.txt").read_text()
    Path("old.txt").write_text("y")
    Path("new.txt").write_text("y")
    Path("new.txt").read_text()
    watched.end()
    opened = read_opened(cells / "mine")
    assert [os.path.basename(one) for one in opened.inherited] == ["old.txt"]
    assert [os.path.basename(one) for one in opened.written] == ["old.txt", "new.txt"]
    forget_reads(cells / "mine")
    assert read_opened(cells / "mine").inherited == []


def test_a_checkpoint_of_an_earlier_attempt_is_seen(cells: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the cell, where ampcompare's own files do not count, nor what this attempt has written."""
    mine = cells / "mine"
    (mine / "ck.pt").write_text("x")
    (mine / "config.json").write_text("{}")
    watched = WrittenFiles()
    (mine / "ck.pt").read_text()
    (mine / "config.json").read_text()
    watched.end()
    assert read_opened(mine).resumed == [str(mine / "ck.pt")]
    monkeypatch.setenv("AMPCOMPARE_CELL_STARTED", str(time.time() - 100))
    (mine / CellFile.OPENED).unlink()
    watched = WrittenFiles()
    (mine / "ck.pt").read_text()
    watched.end()
    assert read_opened(mine).resumed == []


@pytest.mark.parametrize("then", ["forward", "autocast", "backward"])
def test_what_a_cell_makes_before_it_computes_is_data_to_others(
    cells: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """As long as it has that content; a module without weights is a transform of data."""
    watched = WrittenFiles()
    torch.nn.ReLU()(torch.ones(2))
    np.save("cache.npy", np.zeros(5))
    np.save("rewritten.npy", np.zeros(5))
    if then == "forward":
        torch.nn.Linear(2, 2)(torch.ones(2))
    elif then == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pass
    else:
        torch.ones(1, requires_grad=True).sum().backward()
    np.save("late.npy", np.zeros(5))
    np.save("rewritten.npy", np.ones(5))
    watched.end()
    forget_reads(cells / "mine")
    monkeypatch.setenv("AMPCOMPARE_CELL_DIR", str(cells / "other"))
    watched = WrittenFiles()
    for name in ("cache", "rewritten", "late"):
        np.load(f"{name}.npy")
    watched.end()
    inherited = read_opened(cells / "other").inherited
    assert [os.path.basename(one) for one in inherited] == ["late.npy", "rewritten.npy"]


def test_what_a_cell_makes_of_another_ones_results_is_no_data(cells: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have copied trained weights before its first forward pass."""
    np.save("weights.npy", np.ones(2))
    (cells / "other" / CellFile.OPENED).write_text(json.dumps({"wrote": os.path.abspath("weights.npy")}) + "\n")
    watched = WrittenFiles()
    np.save("copy.npy", np.load("weights.npy"))
    watched.begin()
    watched.end()
    forget_reads(cells / "mine")
    monkeypatch.setenv("AMPCOMPARE_CELL_DIR", str(cells / "other"))
    watched = WrittenFiles()
    np.load("copy.npy")
    watched.end()
    assert [os.path.basename(one) for one in read_opened(cells / "other").inherited] == ["copy.npy"]


@pytest.fixture
def logged() -> Iterator[list[tuple[str, float, str]]]:
    """What was logged while scalars are caught."""
    seen: list[tuple[str, float, str]] = []
    kept = {name: sys.modules.pop(name) for name in LIBRARIES if name in sys.modules}
    ends = [metric_log.listen(lambda *values: seen.append(values)), catch_scalars()]
    yield seen
    for end in ends:
        end()
    for name in LIBRARIES:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


def test_wandb_and_mlflow_are_caught_where_absent(logged: list[tuple[str, float, str]]) -> None:
    """Numbers of `wandb.log`, also nested and of a run, and of mlflow; texts and images are no metrics."""
    wandb, mlflow = importlib.import_module("wandb"), importlib.import_module("mlflow")
    with wandb.init(project="x") as run:
        run.log({"a": 1})
    wandb.log({"b": {"c": torch.tensor(2.0)}, "name": "x", "image": torch.ones(2, 2)}, step=3)
    wandb.config.update({"lr": 1})
    mlflow.set_experiment("x")
    mlflow.log_metric("d", 3.0, step=1)
    mlflow.log_metrics({"e": 4})
    wandb.finish()
    assert [(name, value) for name, value, _ in logged] == [("a", 1), ("b/c", 2), ("d", 3), ("e", 4)]
    assert logged[0][2] == "wandb.log"


def test_a_summary_writer_is_caught_where_absent(logged: list[tuple[str, float, str]]) -> None:
    """tensorboardX stands for the writers; what else it writes is ignored."""
    writer = importlib.import_module("tensorboardX").SummaryWriter("folder")
    writer.add_scalar("val/acc", torch.tensor([0.5]), 3)
    writer.add_histogram("weights", [1, 2])
    writer.close()
    assert logged == [("val/acc", 0.5, "SummaryWriter.add_scalar")]


def test_log_metric_without_a_listener_does_nothing() -> None:
    """A script may call it under plain Python."""
    metric_log.log_metric("top1", 93.2)
