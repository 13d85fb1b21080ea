"""The fp32 arm of a script with autocast blocks: what these would cast gets the type of the weights."""

import os
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """import torch
from torch import nn

torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(4, 4, bias=False)
        self.weight = nn.Parameter(torch.ones(4, 2))
    def forward(self, x):
        return (self.base(x) + self.adapter(x)) @ self.weight
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(8, 4).half()
for step in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.MSELoss()(net(x), x[:, :2])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(repr(loss.item()))
"""
BY_HAND = (
    SCRIPT.replace("self.base(x)", "self.base(x.bfloat16()).float()")
    .replace(".half()", ".half().float()")
    .replace('"cpu", dtype=torch.float16', '"cpu", enabled=False')
    .replace('GradScaler("cpu")', 'GradScaler("cpu", enabled=False)')
)


def run(text: str, arm: str, folder: Path, python: Any) -> Any:
    (folder / "train.py").write_text(text)
    return python.run(["-m", "ampcompare", "exec", "--arm", arm, "train.py"], folder, os.environ)


@pytest.mark.parametrize("arm", ["fp32", "apex:O0"])
def test_16_bit_inputs_become_fp32(arm: str, tmp_path: Path, forked_python: Any) -> None:
    """Of a model, of a part with frozen 16-bit weights and of a loss, as in a version without autocast by hand."""
    done = run(SCRIPT, arm, tmp_path, forked_python)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == run(BY_HAND, "script", tmp_path, forked_python).stdout.splitlines()
    assert len(done.stdout.splitlines()) == 4


def test_what_a_function_gets_is_refused_with_its_line(tmp_path: Path, forked_python: Any) -> None:
    done = run(SCRIPT.replace("@ self.weight", ").half() @ self.weight").replace("return (", "return (("), "fp32",
               tmp_path, forked_python)  # fmt: skip
    assert done.returncode == 2
    assert (
        "train.py:12: under fp32 an operation gets tensors of both types, which autocast would cast"
        in done.stderr
    )
