"""A script that wraps its model in DDP before an arm casts it trains as one that wraps it afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(rank)  # DDP gives all ranks the weights of the first
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
PREPARE
model = nn.parallel.DistributedDataParallel(model)
for step in range(4):
    optimizer.zero_grad()
    for micro in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + 2 * micro + rank))
        with torch.autocast("cpu", enabled=ENABLED):
            loss = model(x).float().square().mean()
        BACKWARD
    CLIP
    nn.utils.clip_grad_norm_(PARAMS, 0.1)
    STEP
values = torch.cat([value.double().flatten() for value in model.state_dict().values()])
both = [torch.empty_like(values) for _ in range(2)]
torch.distributed.all_gather(both, values)
if rank == 0:
    print("same", torch.equal(*both), "sum", values.sum().item(), values.square().sum().item())
torch.distributed.destroy_process_group()
"""
TORCH = {
    "PREPARE": "scaler = torch.amp.GradScaler('cpu')",
    "ENABLED": "True",
    "BACKWARD": "scaler.scale(loss).backward()",
    "CLIP": "scaler.unscale_(optimizer)",
    "PARAMS": "model.parameters()",
    "STEP": "scaler.step(optimizer); scaler.update()",
}
APEX = {
    "PREPARE": "from apex import amp; model, optimizer = amp.initialize(model, optimizer, verbosity=0)",
    "ENABLED": "False",
    "BACKWARD": "with amp.scale_loss(loss, optimizer, delay_unscale=micro == 0) as scaled: scaled.backward()",
    "CLIP": "pass",
    "PARAMS": "amp.master_params(optimizer)",
    "STEP": "optimizer.step()",
}


def printed(folder: Path, words: dict[str, str], arm: str, text: str = SCRIPT) -> str:
    """Return what two ranks print."""
    for name, value in words.items():
        text = text.replace(name, value)
    (folder / "train.py").write_text(text)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [*launch, "-m", "ampcompare", "exec", "--arm", arm, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("same"))


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["apex:O2", pytest.param("half:bn_fp32", marks=pytest.mark.extended)])
def test_two_ranks_train_as_a_script_for_apex(tmp_path: Path, arm: str) -> None:
    """Gradients are averaged in 16 bits, accumulated and clipped, to the same bits on both ranks."""
    ours = printed(tmp_path, TORCH, arm)
    assert ours.startswith("same True")
    assert ours == printed(tmp_path, APEX, arm)


@pytest.mark.slow
def test_two_ranks_with_lifted_weights_stay_together(tmp_path: Path) -> None:
    """The script holds 16-bit weights, and makes its optimizer after the wrapper."""
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
    wrapped = "model = nn.parallel.DistributedDataParallel(model)"
    text = SCRIPT.replace(f"{made}\n", "model.bfloat16()\n").replace(wrapped, f"{wrapped}\n{made}")
    words = {**TORCH, "PREPARE": "", "ENABLED": "False", "BACKWARD": "loss.backward()", "CLIP": ""}
    words = {**words, "STEP": "optimizer.step()", "model(x)": "model(x.bfloat16())"}
    assert printed(tmp_path, words, "fp32", text).startswith("same True")
