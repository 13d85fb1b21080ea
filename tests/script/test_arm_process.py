"""A script under `ampcompare exec --arm`, in a process of its own."""

import os
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.launch.script.rows import read_script_rows
from ampcompare.training.precision.cpu_half import has_bf16_instructions

pytestmark = pytest.mark.integration
RECORD = ("--record", "r.jsonl")

SCRIPT = """
import torch
from apex import amp
import ampcompare, wandb

model = torch.nn.Linear(4, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
for step in range(9):
    loss = model(torch.randn(8, 4)).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    wandb.log({"rate": 0.1})
    ampcompare.log_metric("top1", 90 + step)
    optimizer.step()
"""


def run(forked_python: Any, folder: Path, source: str, *options: str) -> Any:
    """Run a script under `exec` in `folder`."""
    (folder / "train.py").write_text(source)
    (folder / "wandb.py").write_text("def log(data): pass")
    command = ["-W", "ignore::FutureWarning", "-m", "ampcompare", "exec", *options, "train.py"]
    return forked_python.run(command, folder, {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})


def test_a_script_is_recorded_to_its_last_step(forked_python: Any, tmp_path: Path) -> None:
    """It ends after as many steps as asked for, with exit code 0; weights and batches follow from the seed."""
    done = run(forked_python, tmp_path, SCRIPT, "--arm", "bf16", "--seed", "3", "--max-steps", "4", *RECORD)
    assert done.returncode == 0, done.stderr
    rows = read_script_rows(tmp_path / "r.jsonl")
    assert len(rows.steps) == 4
    assert rows.scalars == {"rate": [0.1] * 4, "top1": [90, 91, 92, 93]}
    assert (len(rows.weights), len(rows.batches)) == (1, 3)
    assert rows.setup["device"]["device"] == "cpu"
    other = run(forked_python, tmp_path, SCRIPT, "--arm", "O2", "--seed", "3", "--max-steps", "3", *RECORD)
    assert other.returncode == 0, other.stderr
    again = read_script_rows(tmp_path / "r.jsonl")
    assert (again.weights, again.batches) == (rows.weights, rows.batches)


def test_a_script_ends_without_a_record_too(forked_python: Any, tmp_path: Path) -> None:
    done = run(forked_python, tmp_path, SCRIPT + "open('end', 'w')", "--arm", "fp32", "--max-steps", "2")
    assert (done.returncode, sorted(os.listdir(tmp_path))) == (0, ["train.py", "wandb.py"]), done.stderr


BEHIND_APEX = """
import torch
from apex import amp
from torch.nn import functional as F

model = torch.nn.Linear(4, 3).cuda()
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
logits = model(torch.randn(8, 4).cuda())
casts = [value.dtype for value in (logits, logits.softmax(1), logits.exp(), logits.sum(), F.layer_norm(logits, (3,)))]
with amp.disable_casts(), torch.autocast("cuda", dtype=logits.dtype):
    own = model(torch.randn(8, 4).cuda())
    own = [value.dtype for value in (own, own.softmax(1), own.exp(), own.sum(), F.layer_norm(own, (3,)))]
assert casts == own == [logits.dtype, *4 * [torch.float32]], (casts, own)
with amp.scale_loss(logits.float().square().mean(), optimizer) as scaled:
    scaled.backward()
optimizer.step()
"""


@pytest.mark.parametrize("arm", ["native:fp16", "native:bf16"])
def test_casts_behind_apex_are_those_for_cuda(forked_python: Any, tmp_path: Path, arm: str) -> None:
    """On the CPU in the place of a GPU, the arm runs the functions in fp32 that `torch.autocast("cuda")` does."""
    done = run(forked_python, tmp_path, BEHIND_APEX, "--device", "cpu", "--arm", arm)
    assert done.returncode == 0, done.stderr


EMULATED_TYPES = """
import sys
import torch
from torch.utils import _python_dispatch as dispatch

model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    with torch.autocast("cuda"):
        loss = model(torch.randn(8, 4).cuda()).float().square().mean()
    loss.backward()
    optimizer.step()
modes = dispatch._get_current_dispatch_mode_stack()
print(*sorted({str(mode.dtype) for mode in modes if hasattr(mode, "dtype")}), file=open("types.txt", "w"))
"""


@pytest.mark.parametrize(
    ("arm", "half"), [("native:fp16", "fp16"), ("native:bf16", "bf16"), ("half:bf16", "bf16")]
)
def test_a_record_says_emulated_of_a_type_that_is(
    forked_python: Any, tmp_path: Path, arm: str, half: str
) -> None:
    """Of bf16, which a processor may multiply itself, as of fp16, on the CPU in the place of a GPU."""
    done = run(forked_python, tmp_path, EMULATED_TYPES, "--device", "cpu", "--arm", arm, *RECORD)
    assert done.returncode == 0, done.stderr
    types = (tmp_path / "types.txt").read_text().split()
    is_emulated = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[half] in types
    assert is_emulated == (half == "fp16" or not has_bf16_instructions())
    assert (
        read_script_rows(tmp_path / "r.jsonl").setup["half"]
        == f"{half} {'emulated' if is_emulated else 'native'}"
    )


def test_a_refusal_is_one_line(forked_python: Any, tmp_path: Path) -> None:
    """No traceback: the line of the script, the reason, and the exit code of the error."""
    done = run(forked_python, tmp_path, SCRIPT.replace("verbosity=0", "enabled=False"), "--arm", "half")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "train.py:7: amp.initialize has enabled=False, so half has no effect" in done.stderr


ALL_SKIPPED = """
import torch
model = torch.nn.Linear(4, 2)
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
for step in range(3):
    scaler.scale(model(torch.full((8, 4), 1e38)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_script_whose_scaler_skips_all_steps_has_trained(forked_python: Any, tmp_path: Path) -> None:
    done = run(forked_python, tmp_path, ALL_SKIPPED, "--arm", "script", *RECORD)
    assert (done.returncode, "nothing was trained" in done.stderr) == (0, False), done.stderr
    assert [step.applied for step in read_script_rows(tmp_path / "r.jsonl").steps] == 3 * [(False,)]


def test_a_script_that_reaches_no_arm_fails(forked_python: Any, tmp_path: Path) -> None:
    """A script without training is not taken for a run of the arm, nor of the script as it is written."""
    for arm, said in (("bf16", "nothing was trained under bf16:"), ("script", "nothing was trained:")):
        done = run(forked_python, tmp_path, "import torch", "--arm", arm)
        assert done.returncode == 3
        assert said in done.stderr
