"""Checkpoints that are not converted, and objects that need trust."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from ampcompare.base.errors import CheckpointError, ConversionError
from ampcompare.training.checkpoint.convert.convert import convert_file, convert_state
from ampcompare.training.checkpoint.convert.load import load_any, objects_of
from tests.training.checkpoint.convert.small_scripts import APEX, SCALER, WEIGHTS

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")


def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    """Nothing to convert, the wanted kind already, no weights, and the same file twice."""
    with pytest.raises(ConversionError, match="a checkpoint of Apex already"):
        convert_state({"model": WEIGHTS, "amp": APEX}, "apex")
    with pytest.raises(ConversionError, match=r"a checkpoint of torch\.amp already"):
        convert_state({"model": WEIGHTS, "scaler": SCALER}, "native")
    with pytest.raises(ConversionError, match="no sign of Apex"):
        convert_state({"model": WEIGHTS}, "native")
    with pytest.raises(ConversionError, match="no weights"):
        convert_state({"amp": APEX}, "native")
    path = tmp_path / "a.pt"
    torch.save({"model": WEIGHTS, "amp": APEX}, path)
    with pytest.raises(ConversionError, match="overwritten"):
        convert_file(path, path, "native")


def test_objects_need_trust(tmp_path: Path) -> None:
    """A pickled model is refused with its place; trusted, it becomes its state dict, and other objects are listed."""
    path = tmp_path / "a.pt"
    net = nn.Linear(2, 2)
    torch.save({"model": net, "amp": APEX, "sampler": torch.Generator, "rate": Rate()}, path)
    with pytest.raises(CheckpointError, match=r"model: torch\.nn\.modules\.linear\.Linear.*--unsafe-load"):
        load_any(path)
    state, left_out = load_any(path, trust=True)
    assert torch.equal(state["model"]["weight"], net.weight)
    torch.save({"\x1b[2J" + "long" * 500: net}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError) as refusal:
        load_any(tmp_path / "b.pt")
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500
    assert all(place.isprintable() and len(place) <= 80 for place in objects_of(tmp_path / "b.pt"))
    assert [line.partition(":")[0] for line in left_out] == ["sampler", "rate"]


def test_objects_of_a_program_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusted objects whose code is not installed are left out, and the tensors beside them are carried."""
    path = tmp_path / "a.pt"
    module = ModuleType("lost_program")
    module.Hub = type("Hub", (), {"__module__": "lost_program", "__qualname__": "Hub"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lost_program", module)
    torch.save({"meta": {}, "message_hub": module.Hub(), "state_dict": WEIGHTS, "amp": APEX}, path)
    monkeypatch.delitem(sys.modules, "lost_program")
    result = convert_file(path, tmp_path / "b.pt", "native", trust=True)
    assert torch.equal(result.state["state_dict"]["w"], WEIGHTS["w"])
    assert "ModuleNotFoundError" in result.lost[-2]
    assert result.lost[-1].startswith("message_hub: lost_program.Hub")


class Rate:
    """An object of a user's program."""
