"""The state of a run carried from one arm to another."""

from typing import Any

import pytest
import torch

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConversionError
from ampcompare.checkpoints.convert.between_arms import convert_state_to_arm

SCALER = {
    "scale": 512.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}
STATES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": {}},
    "native:fp16": {"scaler": SCALER},
    "native:bf16": {"scaler": {}},
    "half": {"precision": {}},
    "half:dynamic,masters=fp32": {"precision": {"loss_scale": 512.0, "good_steps": 7}},
    "accelerate:fp16": {"scaler": SCALER},
    "fabric:bf16-mixed": {"scaler": {}},
    "apex:O0": {"amp": {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}},
    "apex:O1": {"amp": {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}}},
    "apex:O2": {"amp": {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}}},
    "apex:O3": {"amp": {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}},
}


WITH_MASTERS = ("apex:O2", "half:dynamic,masters=fp32")
MOVING = {"native:fp16", "accelerate:fp16", "apex:O1", "apex:O2"}


def mtime_and_size(arm: str) -> dict[str, Any]:
    """What a run of an arm saves, with masters under O2 and fp16 tensors under half."""
    exact = torch.full((9,), 1 / 3)
    weight = (
        exact.half()
        if arm.startswith("half")
        else exact.half().float()
        if arm in ("apex:O2", "apex:O3")
        else exact
    )
    state = {
        "schema": 1,
        "model": {"weight": weight, "count": torch.tensor(3)},
        "optimizer": {
            "state": {0: {"momentum_buffer": exact.to(weight.dtype)}},
            "param_groups": [{"params": [0]}],
        },
        "masters": {"weight": exact} if arm in WITH_MASTERS else {},
        "zeroed": [[0]],
        "arm": arm,
        "engine": {"name": "compat", "version": "1"},
    }
    return {**state, **STATES[arm]}


@pytest.mark.parametrize("source", STATES)
@pytest.mark.parametrize("target", STATES)
def test_every_arm_goes_on_from_every_other(source: str, target: str) -> None:
    """The precision state is of the target's kind alone; weights and state are fp32, and as exact as saved."""
    state = mtime_and_size(source)
    result = convert_state_to_arm(state, target)
    (key,) = [key for key in ("amp", "scaler", "precision") if key in result.state]
    assert key == next(iter(STATES[target]))
    assert (Arm.parse(result.state["arm"]), result.state["engine"]) == (Arm.parse(target), None)
    weight = result.state["model"]["weight"]
    assert weight.dtype is torch.float32
    exact = source not in ("half", "apex:O3")  # the others have fp32 weights or masters
    assert torch.equal(weight, torch.full((9,), 1 / 3)) == exact
    assert result.state["optimizer"]["state"][0]["momentum_buffer"].dtype is torch.float32
    assert ("weight" in result.state["masters"]) == (target in WITH_MASTERS)
    assert any("last bits of the weights" in line for line in result.lost) == (not exact)
    assert state["zeroed"] == [[0]]
    if source in MOVING and target in MOVING:
        found = result.state[key].get("loss_scaler0", result.state[key])
        assert found.get("scale", found.get("loss_scale")) == 512.0
        assert found.get("_growth_tracker", found.get("unskipped")) == 7
    if source in MOVING and target.startswith("half:dynamic"):
        assert result.state["precision"] == {"loss_scale": 512.0, "good_steps": 0}
    if source.startswith("half:dynamic") and target in MOVING:
        assert "512" in str(result.state[key])


def test_options_of_the_target_arm_stand() -> None:
    """A static scale, masters at O3, and a GradScaler's own factors are those of the arm that goes on."""
    state = mtime_and_size("apex:O2")
    static = convert_state_to_arm(state, "apex:O1,loss_scale=128").state["amp"]
    assert static == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}
    assert "weight" in convert_state_to_arm(state, "apex:O3,master_weights=true").state["masters"]
    scaler = convert_state_to_arm(state, "native:fp16,growth_factor=4,growth_interval=100").state["scaler"]
    assert (scaler["growth_factor"], scaler["growth_interval"], scaler["_growth_tracker"]) == (4.0, 100, 0)
    assert convert_state_to_arm(state, "half:loss_scale=8").state["precision"] == {"loss_scale": 8.0}


def test_foreign_states_have_no_arm() -> None:
    """A script's checkpoint cannot be resumed by a run."""
    with pytest.raises(ConversionError, match="not a checkpoint that a run"):
        convert_state_to_arm({"model": {"weight": torch.ones(2)}}, "fp32")
