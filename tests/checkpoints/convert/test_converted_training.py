"""Training that resumes from a converted checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.checkpoints.convert.convert import convert_file
from tests.checkpoints.convert.small_scripts import STEPS, ApexScript, NativeScript, steps, train_apex

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")


HALF = 2.0**-9  # two units in the last place of fp16, on a mean of sixteen losses


@pytest.mark.parametrize(("opt_level", "kind"), [("O1", torch.optim.SGD), ("O2", torch.optim.AdamW)])
def test_native_training_goes_on_from_a_legacy_checkpoint_and_back(
    tmp_path: Path, amp: Any, opt_level: str, kind: Any
) -> None:
    """Apex to native to Apex: the first loss agrees within fp16 rounding each time, and the scale is carried."""
    path = tmp_path / "legacy.pt"
    expected = train_apex(amp, path, opt_level, kind)
    scale = torch.load(path)["amp"]["loss_scaler0"]
    result = convert_file(path, tmp_path / "native.pt", "native")
    assert (result.source, result.level) == ("apex", opt_level)

    native = NativeScript(kind)
    native.load(torch.load(tmp_path / "native.pt"))
    assert native.scaler.get_scale() == scale["loss_scale"]
    assert native.scaler.state_dict()["_growth_tracker"] == scale["unskipped"] == STEPS
    losses = steps(native, STEPS, 20)
    assert losses[0] == pytest.approx(expected, rel=HALF)
    assert losses[-1] < losses[0]
    torch.save(native.save(), path)
    expected = native.step(STEPS + 20)

    result = convert_file(path, tmp_path / "back.pt", "apex", opt_level=opt_level)
    assert list(torch.load(tmp_path / "back.pt")) == ["model", "optimizer", "amp", "epoch"]
    script = ApexScript(amp, opt_level, kind)
    script.load(torch.load(tmp_path / "back.pt"))
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale["loss_scale"], "unskipped": STEPS + 20}}
    assert script.step(STEPS + 20) == pytest.approx(expected, rel=HALF)
