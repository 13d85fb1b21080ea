"""Trajectories recorded from Apex 25.05, and from ROCm's Apex (daed8525) for O4 and O5, replayed step by step.

Bits depend on the processor. Where its arithmetic is the recording's, all of a recording is compared to the bit; on
any other, what all processors agree about is, losses and parameters within tolerances. On all of them the engine has
the bits of the levels by hand, as that processor computes them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.apex.amp_by_hand import is_within_reach
from tests.apex.golden_replay import compact, recordings

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted((GOLDEN / "apex-25.05").glob("*.json"))
ROCM = list(recordings([GOLDEN / "rocm-apex.json.xz"]))

BY_HAND = [
    recording["scenario"]["name"]
    for recording in (*recordings(FILES), *ROCM)
    if is_within_reach(recording["scenario"])
]

# What must agree on any processor, whatever its order of summation.
ALWAYS = (
    "step",
    "out_dtypes",
    "loss_dtypes",
    "param_dtypes",
    "grad_dtypes",
    "master_dtypes",
    "master_grad_dtypes",
    "buffer_dtypes",
    "skipped",
    "scalers",
)
# Ten times what kinds of processors were seen to differ by: a trajectory magnifies what its first steps round.
LOSS_TOLERANCE = {"O0": 5e-6, "O1": 1e-2, "O2": 1e-2, "O3": 2e-2, "O4": 2e-2, "O5": 2e-2}
PARAM_TOLERANCE = {"O0": 5e-5, "O1": 2e-2, "O2": 2e-2, "O3": 2e-2}
# Another release of torch has other kernels, and O3 no fp32 weights to damp the difference: Apex itself on torch 2.4.1
# is 0.035 away from Apex on torch 2.13, the release of the recording.
SAME_TORCH = torch.__version__.startswith("2.13.")
O3_TOLERANCE_ELSEWHERE = 5e-2
BLOWN_UP_LOSS = 1e6


Exact = Callable[[dict[str, Any]], bool]


def _recorded(path: Path) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(path.read_text())
    return recording


def test_there_are_98_scenarios() -> None:
    assert len(FILES) == 98


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_trajectory(path: Path, replayed: dict[str, Any], exact: Exact) -> None:
    """Every step of a recorded training run comes out as the real Apex made it."""
    recording = _recorded(path)
    result = replayed[recording["scenario"]["name"]]
    assert "error" not in result, result.get("error")
    assert result["initial"] == recording["initial"]
    assert len(result["steps"]) == len(recording["steps"])
    level = recording["scenario"]["amp"]["opt_level"]
    is_exact = exact(recording["scenario"])
    for want, got in zip(recording["steps"], result["steps"], strict=True):
        if is_exact:
            assert got == want
        else:
            _assert_near(want, got, level)
    if is_exact:
        assert result["final"] == recording["final"]
    else:
        _assert_same_layout(recording["final"], result["final"])


@pytest.mark.parametrize("recording", ROCM, ids=lambda recording: recording["scenario"]["name"])
def test_trajectory_of_rocm(recording: dict[str, Any], replayed: dict[str, Any], exact: Exact) -> None:
    """Every step of O4 and O5 comes out as ROCm's Apex made it."""
    scenario = recording["scenario"]
    result = replayed[scenario["name"]]
    assert "error" not in result, result.get("error")
    got = compact(result)
    if exact(scenario):
        assert got == {key: recording[key] for key in got}
        return
    assert len(got["steps"]) == len(recording["steps"])
    for want, step in zip(recording["steps"], got["steps"], strict=True):
        if _has_blown_up(want) and _has_blown_up(step):
            return  # whether weights of 1e28 become NaN, and steps are skipped then, is a matter of rounding
        assert {key: step[key] for key in ALWAYS} == {key: want[key] for key in ALWAYS}
        _assert_near_losses(want, step, scenario["amp"]["opt_level"])
    _assert_same_layout(recording["final"], got["final"])


@pytest.mark.parametrize("name", BY_HAND)
def test_trajectory_by_hand(name: str, replayed: dict[str, Any], by_hand: dict[str, Any]) -> None:
    """Every step has the bits of the same level in plain torch, on whatever processor this is."""
    assert "error" not in by_hand[name], by_hand[name].get("error")
    assert replayed[name] == by_hand[name]


def _assert_near(want: dict[str, Any], got: dict[str, Any], level: str) -> None:
    for key in ALWAYS:
        assert got[key] == want[key], key
    _assert_near_losses(want, got, level)
    tolerance = PARAM_TOLERANCE[level] if SAME_TORCH or level != "O3" else O3_TOLERANCE_ELSEWHERE
    for key in ("params", "masters"):
        assert (got[key] is None) == (want[key] is None)
        for (_, new), (_, old) in zip(got[key] or [], want[key] or [], strict=True):
            new, old = [float(v) for v in new], [float(v) for v in old]
            assert new == pytest.approx(old, rel=0, abs=tolerance, nan_ok=True)


def _assert_near_losses(want: dict[str, Any], got: dict[str, Any], level: str) -> None:
    numbers = [[float(loss) for loss in record["loss"]] for record in (got, want)]
    assert numbers[0] == pytest.approx(numbers[1], rel=LOSS_TOLERANCE[level], nan_ok=True)


def _has_blown_up(step: dict[str, Any]) -> bool:
    """Return whether no loss of a step is one of a network that still trains."""
    return not any(abs(float(loss)) < BLOWN_UP_LOSS for loss in step["loss"])


def _assert_same_layout(want: dict[str, Any], got: dict[str, Any]) -> None:
    assert got.get("amp_state_dict") == want.get("amp_state_dict")
    assert got["optimizer_state_dtypes"] == want["optimizer_state_dtypes"]
    assert [entry[:2] for entry in got["model_state_dict"]] == [
        entry[:2] for entry in want["model_state_dict"]
    ]
