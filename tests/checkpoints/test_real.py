"""Checkpoints that timm, mmengine and Lightning have written themselves; `real/README.md` says how."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.checkpoints.convert.convert import convert_file, load_any_checkpoint
from ampcompare.checkpoints.convert.detect import contents_by_kind
from ampcompare.checkpoints.convert.inspect import inspect_file

REAL = Path(__file__).parent / "real"
WEIGHTS = ("state_dict", "weights", 9)
AVERAGED = ("state_dict_ema", "averaged weights", 9)
OPTIMIZER = ("optimizer", "optimizer", 6)
FILES = {
    "timm.pth.tar": ("timm", None, [WEIGHTS, AVERAGED, OPTIMIZER], "amp_scaler", 1024.0),
    "timm-apex.pth.tar": ("timm", "O1", [WEIGHTS, AVERAGED, OPTIMIZER], "amp.loss_scaler0", 65536.0),
    "mmengine.pth": ("mmengine", None, [WEIGHTS, OPTIMIZER], "optimizer.loss_scaler", 1024.0),
    "mmengine-apex.pth": ("mmengine", "O1", [WEIGHTS, OPTIMIZER], "optimizer.apex_amp.loss_scaler0", 65536.0),
    "lightning.ckpt": (
        "Lightning", None, [WEIGHTS, ("optimizer_states.0", "optimizer", 6)], "MixedPrecision", 1024.0
    ),
}  # fmt: skip
SCALERS = {
    "timm.pth.tar": ("amp_scaler", "amp"),
    "timm-apex.pth.tar": ("amp_scaler", "amp"),
    "mmengine.pth": ("loss_scaler", "apex_amp"),
    "mmengine-apex.pth": ("loss_scaler", "apex_amp"),
    "lightning.ckpt": ("MixedPrecision", "amp_scaling_state"),
}


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing unpickle but our own reader, and no program be imported."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("something unpickles")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refuse)
    for name in ("timm", "mmengine", "mmengine.logging.history_buffer", "lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("timm.pth.tar", "mmengine.pth") else ())
        for name in FILES
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_a_real_file_is_known(name: str) -> None:
    """Writer, weights, averages, optimizer and scaler are found, nothing else is taken for one, and nothing is run."""
    writer, level, rows, place, scale = FILES[name]
    found = inspect_file(REAL / name)
    assert (found.writer, found.level) == (writer, level)
    assert [(row["place"], row["kind"], row["entries"]) for row in found.rows] == rows
    (scaler,) = found.scales
    assert (scaler["place"], scaler["scale"], scaler["clean_steps"]) == (place, scale, 3)
    assert found.traps == []
    logs = [line for line in found.objects if line.endswith("mmengine.logging.history_buffer.HistoryBuffer")]
    assert found.objects == logs
    assert bool(logs) == (writer == "mmengine")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "timm-apex.pth.tar" else pytest.mark.slow) for name in FILES],
)
@pytest.mark.usefixtures("nothing_runs")
def test_a_real_file_converts_there_and_back(name: str, tmp_path: Path) -> None:
    """The scaler moves to the name that the program gives the other kind, and back; all else stays.

    A script with timm's older loop may have been migrated by hand: it reads what it read before.
    """
    to, back = ("native", "apex") if "apex" in name else ("apex", "native")
    own, other = SCALERS[name] if to == "apex" else SCALERS[name][::-1]
    convert_file(REAL / name, tmp_path / "there.pt", to)  # type: ignore[arg-type]
    there, source = load_any_checkpoint(tmp_path / "there.pt")[0], load_any_checkpoint(REAL / name)[0]
    holder, before = (state["optimizer"] if "mmengine" in name else state for state in (there, source))
    assert other in holder
    if name == "timm-apex.pth.tar":
        assert list(holder) == [key for name in before for key in ((own, other) if name == own else (name,))]
        assert holder[own] == holder[other]
    else:
        assert own not in holder
        assert list(holder) == [other if key == own else key for key in before]
    convert_file(tmp_path / "there.pt", tmp_path / "back.pt", back)  # type: ignore[arg-type]
    again = load_any_checkpoint(tmp_path / "back.pt")[0]
    if name == "timm.pth.tar":
        assert again.pop("amp") == again["amp_scaler"]
    if to == "native":  # back for a FusedAdam too, which this script does not have
        for optimizer in contents_by_kind(again).optimizers.values():
            for group in optimizer["param_groups"]:
                del group["step"], group["bias_correction"]
    assert repr(again) == repr(source)
