"""Checkpoints that are not converted, and objects that are left out."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from torch import nn

from ampcompare.base.errors import ConversionError
from ampcompare.checkpoints.convert.convert import convert_file, convert_state
from tests.checkpoints.convert.small_scripts import APEX, SCALER, WEIGHTS

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")


def test_what_cannot_be_converted_says_why(tmp_path: Path) -> None:
    """Nothing to convert, the wanted kind already, no weights, the same file twice, and a name of another format."""
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
    with pytest.raises(ConversionError, match="no safetensors file"):
        convert_file(path, tmp_path / "b.safetensors", "native")


def test_objects_are_left_out_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pickled model becomes its state dict; of other objects place and class are named on short lines."""
    path = tmp_path / "a.pt"
    lost = ModuleType("lost_program")
    lost.Hub = type("Hub", (), {"__module__": "lost_program", "__qualname__": "Hub"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lost_program", lost)
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.BatchNorm1d(2), shared)
    net.register_buffer("passing", torch.ones(1), persistent=False)
    hub = {"hub": lost.Hub(), "\x1b[2J" + "long" * 500: torch.Generator}
    nets = {"model": net, "netD": nn.Linear(3, 1), "netE": nn.Linear(3, 2)}
    torch.save({**nets, "amp": APEX, **hub}, path)
    monkeypatch.delitem(sys.modules, "lost_program")
    result = convert_file(path, tmp_path / "b.pt", "native")
    for name, module in nets.items():
        found, expected = result.state[name], module.state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert result.lost[-2] == "hub: lost_program.Hub (no tensor and no plain value)"
    assert all(line.isprintable() and len(line) < 200 for line in result.lost)


def _fused_adam(**group: Any) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"bias_correction": True, "step": 3, **group}]}


@pytest.mark.parametrize(
    ("entries", "to", "message"),
    [
        (
            {"amp": APEX, "optimizer": _fused_adam()},
            "native",
            "entry optimizer.param_groups.0 .* it has no 'params'",
        ),
        (
            {"amp": APEX, "optimizer": _fused_adam(params=[0], step="three")},
            "native",
            "entry optimizer.param_groups.0 .* 'three'",
        ),
        ({"scaler": {**SCALER, "growth_factor": "two"}}, "apex", "growth_factor is two"),
    ],
)
def test_the_entry_is_named(
    entries: dict[str, Any], to: Literal["native", "apex"], message: str, tmp_path: Path
) -> None:
    """An entry that lacks a key or has a value of another type is refused by its path in the checkpoint."""
    torch.save({"model": {"weight": torch.ones(2).half()}, **entries}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=message) as caught:
        convert_file(tmp_path / "a.pt", tmp_path / "b.pt", to)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "b.pt").exists()
