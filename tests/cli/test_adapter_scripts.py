"""A script that `migrate` has moved with the adapter, under `exec`: its losses are those before the scale."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampcompare.script.recording.scaled_steps import ADAPTER
from ampcompare.source.migrate.adapter.imports import ADAPTER as WRITTEN
from ampcompare.source.migrate.adapter.imports import adapter_text

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SCRIPT = """import torch
import torch_amp_adapter as amp
torch.manual_seed(0)
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for step in range(3):
    loss = model(torch.randn(8, 4).cuda()).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
print("loss", loss.item())
"""


def test_losses_are_those_before_the_scale(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ADAPTER == WRITTEN
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{ADAPTER}.py").write_text(adapter_text(), encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    for arm in ("script", "native:bf16"):
        done = call("exec", "--arm", arm, "--device", "cpu", "--record", "steps.jsonl", "train.py")
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in rows if row.get("kind") == "backward"]
        assert len(losses) == 3
        assert max(losses) < 10
        assert [row["applied"] for row in rows if row.get("kind") == "step"] == [True] * 3
    done = call("exec", "--arm", "native:fp16", "--device", "cpu", "train.py")
    assert done.code == 2, done.err
    said = "\n".join([done.out, done.err, *done.lines])
    assert "native:fp16 scales the loss, and torch_amp_adapter scales it too" in said
