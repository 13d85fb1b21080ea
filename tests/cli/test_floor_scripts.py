"""`floor -- SCRIPT` and `judge STEPS --against floor.json`, on real trainings."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.analysis.floor import Envelope
from tests.cli.conftest import Call

SCRIPT = """import sys
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
for _ in range(12):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    FAULT
    optimizer.step()
"""
# What is wrong, and what is done in its place, in one line of the script.
FAULTS = {
    "gradients of a layer are too small by a thousandth": "net[0].weight.grad.mul_(0.999)",
    "a weight decay that nobody asked for": "net[2].weight.data.mul_(0.9999)",
    "gradients in bf16": "net[0].weight.grad.copy_(net[0].weight.grad.bfloat16())",
}


def test_a_command_without_a_script(call: Call) -> None:
    """`floor` says how a script is given."""
    done = call("floor", "--steps", "5")
    assert done.code == 2
    assert "ampcompare floor [OPTIONS] -- SCRIPT ARGS..." in done.err


def _steps(call: Call, folder: Path, name: str, fault: str) -> Path:
    """Return the recorded steps of the script with a fault."""
    (script := folder / f"{name}.py").write_text(SCRIPT.replace("FAULT", fault))
    out = folder / name
    done = call("run", "--arm", "script", "--device", "cpu", "-q", "-o", str(out), "--", str(script))
    assert done.code == 0, done.err
    return next(out.glob("cells/*/steps.jsonl"))


def test_a_record_of_exec_is_read_by_its_steps(call: Call, tmp_path: Path) -> None:
    """Not by its lines, of which only some have a loss; one without a step is refused."""
    rows = [{"loss": 1.0 / (step + 1), "grad_norm": None} for step in range(6)]
    no_floor = {"loss": 0.0, "grad_norm": None}
    envelope = Envelope(rows, [no_floor] * 6, {"again": 0.0}, "train.py", {})
    (floor := tmp_path / "floor.json").write_text(envelope.to_json())
    lines: list[dict[str, Any]] = [
        {"format": "ampcompare-exec", "schema": 1},
        {"kind": "setup", "half": None},
    ]
    for step, row in enumerate(rows):
        lines.append({"kind": "plain_backward", "loss": row["loss"]})
        lines.append({"kind": "step", "optimizer": 0, "step": step, "applied": True, "seconds": 0.1})
    (record := tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = call("judge", str(record), "--against", str(floor))
    assert (done.code, json.loads(done.out)["answer"], json.loads(done.out)["steps"]) == (0, "identical", 6)
    record.write_text(json.dumps(lines[0]))
    done = call("judge", str(record), "--against", str(floor))
    assert done.code == 64
    assert "is a record without a step: exec --arm script --record FILE" in done.err


@pytest.mark.slow
def test_a_script_and_its_faults(call: Call, tmp_path: Path) -> None:
    """The script itself is the same training, and each fault is another one, found within a few steps."""
    (script := tmp_path / "train.py").write_text(SCRIPT.replace("FAULT", "pass"))
    floor = tmp_path / "floor.json"
    done = call("floor", "-o", str(floor), "--", str(script))
    assert done.code == 0, done.err
    assert sum(one is not None for one in json.loads(floor.read_text())["twins"].values()) >= 4
    same = call("judge", str(_steps(call, tmp_path, "same", "pass")), "--against", str(floor))
    assert (same.code, json.loads(same.out)["answer"]) in ((0, "identical"), (0, "within the floor"))
    for number, fault in enumerate(FAULTS.values()):
        other = call("judge", str(_steps(call, tmp_path, f"fault{number}", fault)), "--against", str(floor))
        found = json.loads(other.out)
        assert (other.code, found["answer"]) == (1, "outside of the floor"), (fault, found)
        assert found["step"] <= 3
