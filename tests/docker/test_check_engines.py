"""`docker/check_engines.py`: what it measures, which differences it sees, and what it says without Apex."""

import copy
import math
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.modules import module_at

GOOD: dict[str, Any] = {
    "dtypes": {"output": "torch.float32", "0.weight": "torch.float32", "0.bias": "torch.float32"},
    "loss_scales": [65536.0, 32768.0, 32768.0],
    "applied": [True, False, True],
    "state": {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}},
    "losses": [1.52978, math.nan, 1.44522],
    "weights": [0.5, -2.0],
}
HALF = {"output": "torch.float16", "0.weight": "torch.float16", "1.weight": "torch.float32"}


@pytest.fixture
def script() -> ModuleType:
    return module_at("docker/check_engines.py")


def measured(level: str) -> dict[str, Any]:
    """Return what Apex does under a level."""
    result = copy.deepcopy(GOOD)
    if level == "O2":
        result["dtypes"] = dict(HALF)
    return result


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, nvidia: Any, *arguments: str) -> tuple[int, str]:
    """Run the command with made-up measurements: ours right, and `nvidia(level)` for the real Apex."""
    monkeypatch.setattr(
        script,
        "in_child",
        lambda engine, level, device: measured(level) if engine == "compat" else nvidia(level),
    )
    result = CliRunner().invoke(script.main, ["--device", "cpu", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def forked_script(script: ModuleType, forked_python: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module whose children are forked from a process that has torch loaded."""

    def run_forked(command: list[str], *, timeout: float, **_: Any) -> Any:
        return forked_python.run(command[1:], Path.cwd(), dict(os.environ), timeout)

    monkeypatch.setattr(
        script, "subprocess", SimpleNamespace(**{**vars(script.subprocess), "run": run_forked})
    )
    return script


@pytest.mark.slow
def test_engine_alone(forked_script: ModuleType) -> None:
    """Where the real Apex cannot run, the engine is held against what is known, and the output says it was alone."""
    result = CliRunner().invoke(forked_script.main, ["--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert result.output.count(" ok: compat alone, as the real Apex cannot run here") == 2
    assert "nothing was compared with the real Apex" in result.output


def test_agreement(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal measurements pass, strictly too, with the largest difference shown."""
    code, output = run(script, monkeypatch, measured, "--strict")
    assert code == 0
    assert output.count("ok: nvidia and compat agree: largest difference 0 in losses, 0 in weights") == 2


def test_strict_needs_apex(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --strict a check without Apex has exit code 4, because it compared nothing."""
    code, output = run(script, monkeypatch, lambda level: "apex is not installed", "--strict")
    assert code == 4
    assert "compat alone, as the real Apex cannot run here (apex is not installed)" in output


@pytest.mark.parametrize(
    "key, value, seen",
    [
        ("loss_scales", [65536.0, 65536.0, 65536.0], "loss_scales"),
        ("applied", [True, True, True], "applied"),
        ("state", {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 2}}, "state"),
        ("dtypes", {**GOOD["dtypes"], "output": "torch.float16"}, "dtypes"),
        ("losses", [1.52978, math.nan, 1.45522], "losses differ by 0.00687"),
        ("losses", [1.52978, 2.0, 1.44522], "losses differ by inf"),
        ("weights", [0.5, -2.01], "weights differ by 0.00498"),
        ("weights", [0.5], "weights: 1 numbers against 2"),
    ],
)
def test_each_difference_is_seen(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, seen: str
) -> None:
    """One difference in any of the things compared fails the check and is named."""
    code, output = run(
        script,
        monkeypatch,
        lambda level: {**measured(level), key: value} if level == "O1" else measured(level),
    )
    assert code == 1
    assert "O1 FAILED" in output
    assert seen in output
    assert "O2 ok" in output
