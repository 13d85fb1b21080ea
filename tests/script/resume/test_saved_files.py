"""What a script saves and loads is known by file and line, whatever writes it."""

import io
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.script.resume.saved_files import SavedFilesWatch, kinds_inside_saved_object
from ampcompare.settings.resume_trace import TraceRowKind, rows_of_saved_files

Rows = list[dict[str, Any]]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    monkeypatch.chdir(tmp_path)
    found: Rows = []
    events = Subscriptions(Layer.WATCH)
    SavedFilesWatch(lambda kind, **values: found.append({"kind": kind, "step": 0, **values})).install(events)
    yield found
    events.end()


def saves(rows: Rows) -> list[tuple[str, list[str]]]:
    return [(os.path.basename(row["path"]), row["holds"]) for row in rows_of_saved_files(rows)]


def state() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


def test_files_of_torch_and_pickle_and_buffers(rows: Rows) -> None:
    holds = ["generator", "model", "optimizer"]
    Path("folder").mkdir()
    torch.save(state(), Path("folder/of_a_path.pt"))
    assert [row["path"] for row in rows] == [os.path.abspath("folder/of_a_path.pt")]
    rows.clear()
    torch.save(state(), "a.tmp")
    os.replace("a.tmp", "a.pt")
    with open("b.pkl", "wb") as file:
        pickle.dump(state(), file)
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    Path("c.pt").write_bytes(buffer.getvalue())
    Path("other.txt").write_text("not saved")
    assert saves(rows) == [("a.pt", holds), ("b.pkl", holds), ("c.pt", holds)]
    assert all(row["line"].startswith("test_saved_files.py:") for row in rows_of_saved_files(rows))
    torch.load("a.pt")
    with open("b.pkl", "rb") as file:
        pickle.load(file)
    assert [os.path.basename(row["path"]) for row in rows if row["kind"] == TraceRowKind.LOAD] == [
        "a.pt",
        "b.pkl",
    ]


def test_safetensors_and_folders(rows: Rows, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as folders
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.ones(2)}, "m.safetensors")
    save_file(nn.BatchNorm1d(2).state_dict(), "of_a_norm.safetensors")
    assert load_file("m.safetensors")["a"].tolist() == [1.0, 1.0]
    given = {"model": {"a": torch.ones(2)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        folders.save(given, checkpoint_id="folder")
        folders.load(given, checkpoint_id=tmp_path / "folder")
    of_a_norm = ("of_a_norm.safetensors", ["buffers", "model"])
    assert saves(rows) == [("m.safetensors", ["model"]), of_a_norm, ("folder", ["model"])]
    assert [os.path.basename(row["path"]) for row in rows if row["kind"] == TraceRowKind.LOAD] == [
        "m.safetensors",
        "folder",
    ]


def test_parts_are_known_by_their_form() -> None:
    assert set(kinds_inside_saved_object({"x": [state()]})) == {"model", "optimizer", "generator"}
    assert list(
        kinds_inside_saved_object({"lr": {"last_epoch": 3}, "amp": {"scale": 1.0, "growth_factor": 2.0}})
    ) == [
        "scheduler",
        "scaler",
    ]
