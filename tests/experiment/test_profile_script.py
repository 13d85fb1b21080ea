"""Profiles of scripts: each arm is a process that has torch loaded."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampcompare.base.errors import LaunchError
from ampcompare.experiment.profile import profile_and_trace_of_script
from ampcompare.results.records.profile import ArmProfile
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import script_config

pytestmark = pytest.mark.integration

SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(400, 32), torch.arange(400) % 4)
for x, y in torch.utils.data.DataLoader(data, batch_size=STEP):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.fixture
def profiled(
    forking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., ArmProfile]:
    """Profile the source of a script under an arm."""
    monkeypatch.setattr("ampcompare.experiment.diagnose.subprocess", forking)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(tmp_path)

    def run(source: str, arm: str) -> ArmProfile:
        Path("train.py").write_text(source)
        config = RunConfig(arm=arm, device="cpu", script=script_config(["train.py"]))
        folder = tmp_path / "run"
        folder.mkdir()
        return profile_and_trace_of_script(config, folder, steps=2, profiled=1)[0]

    return run


def test_a_script(profiled: Callable[..., Any]) -> None:
    """It ends after its steps, with phases of its loader, the line that reads, and layers by their names."""
    found = profiled(SCRIPT.replace("STEP", "10"), "fp32")
    assert {"data", "forward", "backward", "optimizer"} <= {part.phase for part in found.parts}
    assert [(one.where, one.what, one.calls) for one in found.syncs if one.where] == [
        ("train.py:14", "item", 1)
    ]
    assert {"0", "2"} <= {layer.module for layer in found.layers}
    assert found.memory is not None
    assert found.optimizer == "SGD (for-loop)"


def test_a_script_of_few_steps(profiled: Callable[..., Any]) -> None:
    """The error says how many steps a profile takes."""
    with pytest.raises(LaunchError, match="without a profile, which takes 11 steps"):
        profiled(SCRIPT.replace("STEP", "200"), "fp32")
