"""The arm `script` equals plain Python, and records everything."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.experiment.matrix import cross_arms_with_settings, find_reference
from ampcompare.experiment.option_checks import check_cells
from ampcompare.settings.config import RunConfig

pytestmark = pytest.mark.integration  # two processes for each script

HEAD = """
import hashlib, sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3))
x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
def loss_of(): return nn.functional.cross_entropy(model(x).float(), y)
"""
TAIL = """
print(hashlib.sha256(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())).hexdigest())
sys.exit(7)
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(5):
    {forward}
    optimizer.zero_grad(); loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5); optimizer.step()
    print(loss.item())
"""
BLOCK = 'with torch.autocast("cpu", dtype=torch.bfloat16): loss = loss_of()'
SCALED = """
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(5):
    with torch.autocast("cpu", dtype=torch.float16): loss = loss_of()
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
    print(loss.item())
"""
LBFGS = """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
def closure():
    optimizer.zero_grad(); loss = loss_of(); loss.backward(); return loss
for step in range(5): print(optimizer.step(closure).item())
"""
# The scaler is off, and the script passes it by in some steps.
OFF = """
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
for step in range(5):
    loss = loss_of()
    optimizer.zero_grad(); (scaler.scale(loss) if step % 2 else loss).backward()
    if step < 3: scaler.step(optimizer)
    else: optimizer.step()
    scaler.update()
    print(loss.item())
"""
SCRIPTS = {
    "plain": LOOP.format(forward="loss = loss_of()"),
    "bf16": LOOP.format(forward=BLOCK),
    "fp16": SCALED,
    "weights": "model.bfloat16(); x = x.bfloat16()" + LOOP.format(forward="loss = loss_of()"),
    "lbfgs": LBFGS,
    "off": OFF,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_equals_plain_python(tmp_path: Path, forked_python: Any, name: str) -> None:
    """All that a script prints, its weights and its exit code; losses are recorded as printed."""
    script, record = tmp_path / "train.py", tmp_path / "rows.jsonl"
    script.write_text(HEAD + SCRIPTS[name] + TAIL)
    plain = forked_python.run([str(script)], tmp_path, os.environ)
    options = ["exec", "--arm", "script", "--record", str(record)]
    ours = forked_python.run(["-m", "ampcompare", *options, str(script)], tmp_path, os.environ)
    assert plain.returncode == 7, plain.stderr
    assert (ours.stdout, ours.returncode) == (plain.stdout, 7), ours.stderr
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("kind") == "backward"]
    assert losses == [float(line) for line in plain.stdout.splitlines()[:5]]
    assert sum(row.get("kind") == "step" for row in rows) == 5
    ledger = next(row for row in rows if row.get("kind") == "ledger")
    assert (ledger["loss_scale"] is not None) == (name == "fp16")
    assert ledger["groups"]


def test_it_is_the_reference() -> None:
    for arms, expected in (
        (["bf16", "fp32", "script"], "script"),
        (["bf16", "fp32"], "fp32"),
        (["bf16"], "native:bf16"),
    ):
        row = find_reference(cross_arms_with_settings(arms, []), None)
        assert row.arm == expected


def test_it_needs_a_script() -> None:
    with pytest.raises(UnsupportedCombination, match="put -- SCRIPT ARGS at the end"):
        check_cells([RunConfig(arm="script")])
