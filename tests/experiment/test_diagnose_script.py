"""Diagnoses of scripts: each run is a process that has torch loaded."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.experiment import diagnose as module
from ampcompare.experiment.diagnose import diagnose_script
from ampcompare.results.report.terminal import Terminal
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import script_config

pytestmark = pytest.mark.integration

APEX = """
import torch
from torch import nn
from apex import amp

class Cube(nn.Module):
    def forward(self, x):
        return (x * 60.0) ** 3 * 1e-5

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.cube, self.head = nn.Linear(16, 16), Cube(), nn.Linear(16, 4)
    def forward(self, x):
        return self.head(self.cube(self.body(x)))

model = Net()
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.05), opt_level="O1")
criterion = nn.CrossEntropyLoss()
for step in range(100):
    loss = criterion(model(torch.randn(8, 16)), torch.arange(8) % 4)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""
TORCH = """
import torch
from torch.nn import functional as F

weight = torch.randn(16, 4, requires_grad=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LSTM(16, 16))
optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(100):
    for part in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(torch.randn(8, 16))[0] @ weight
            logits = FACTOR * (logits * 30000.0).cosh().log()
            loss = F.cross_entropy(logits.float(), torch.arange(8) % 4) / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.full((2, 16), float("inf")))
"""


@pytest.fixture
def diagnose(forking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Diagnose the source of a script."""
    monkeypatch.setattr("ampcompare.experiment.diagnose.subprocess", forking)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(tmp_path)

    def run(source: str, arm: str, **settings: Any) -> Any:
        Path("train.py").write_text(source)
        config = RunConfig(arm=arm, device="cpu", script=script_config(["train.py", "--epochs", "1"]))
        return diagnose_script(DiagnoseOptions(config, **settings))

    return run


def test_a_script_for_apex(diagnose: Callable[..., Any]) -> None:
    """The planted module is named, and its cure is an arm for the same script."""
    found = diagnose(APEX, "apex:O2", steps=2)
    assert found.verdict.startswith("apex:O2: overflow at step 0: cube pow is the first")
    assert found.cure.arm == "apex:O2,keep_fp32=cube"
    assert found.modules == ["", "body", "cube", "head", "CrossEntropyLoss:"]
    assert {one.place.module for one in found.gradients} == {"body", "head"}
    text = Terminal().render(found)
    assert "--arm apex:O2 --arm apex:O2,keep_fp32=cube -- train.py --epochs 1" in text
    assert "note: the script ran 2 times from its start" in text


def test_a_script_for_torch_amp(diagnose: Callable[..., Any]) -> None:
    """A line outside of modules is named, a step has all of its backward passes, and an evaluation is not counted."""
    found = diagnose(TORCH.replace("FACTOR", "1e-9"), "native:fp16", steps=2, cures=False, reference="none")
    assert found.faults[0].place.where == "train.py:13"
    assert found.skipped == found.steps
    (product,) = (one for one in found.places if one.place.operation == "mm" and one.place.phase == "forward")
    assert product.calls == 2 * found.steps
    assert {one.place.operation for one in found.places if one.place.where == "train.py:20"} == {"full"}


@pytest.mark.slow
def test_the_code_of_a_cure_has_the_line_of_a_script_in_another_folder(
    diagnose: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that stands for a GPU the device is the script's to name."""
    source = TORCH.replace("FACTOR", "1e-3").replace("30000.0).cosh().log()", "3.0).square() / 1e-8")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("../train.py").write_text(source)
    config = RunConfig(arm="native:fp16", device="cpu", script=script_config(["../train.py"]))
    found = diagnose_script(DiagnoseOptions(config, steps=2))
    assert found.cure is not None, found.verdict
    assert found.cure.code.splitlines()[1:] == [
        "with torch.autocast(device_type, enabled=False):",
        "    logits = model(torch.randn(8, 16))[0] @ weight",
    ]


PLAIN = """
import torch
from torch import nn

torch.manual_seed(0)

class Squashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)
        nn.init.constant_(self.body.bias, 5.0)
    def forward(self, x):
        return LINE

critic, actor = nn.Linear(8, 4), Squashed()  # of equal shapes
optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (critic, actor)]
for step in range(20):
    for model, optimizer in zip((critic, actor), optimizers):
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        (
            "-(1 - self.body(x).tanh() ** 2 + 1e-6).log()",
            {"rounding", "gradient overflow"},
        ),  # whose 1 - 1 is 0
        ("self.body(x) - 5", set()),
        (
            "(self.body(x) * (step < 1)).abs().sum(-1).sqrt()",
            {"not precision"},
        ),  # of 0 from the second step on
    ],
)
def test_gradients_of_a_script_whose_arm_has_masters(
    diagnose: Callable[..., Any], line: str, kinds: set[str]
) -> None:
    """Those of the backward pass are judged, in 16 bits, for the optimizer that steps."""
    source = PLAIN.replace("LINE", line)
    found = diagnose(source, "apex:O2,loss_scale=16", steps=4, cures=False)
    assert {fault.kind for fault in found.faults} == kinds, [fault.text for fault in found.faults]
    assert {one.place.module for one in found.gradients} == {"Linear:", "Squashed:body"}


def test_a_script_that_fails(diagnose: Callable[..., Any]) -> None:
    """The first line says so, with the error, after what the steps before it showed."""
    failing = APEX.replace("* 60.0) ** 3 * 1e-5", "* 1.0)").replace(
        "optimizer.step()", "optimizer.step(); 1 / 0"
    )
    found = diagnose(failing, "apex:O2,loss_scale=1", steps=2, reference="none")
    error = "ZeroDivisionError: division by zero (train.py:25)"
    assert found.verdict == f"apex:O2,loss_scale=1: no fault in 1 step; then the script failed: {error}"


STOPPING = """
import math, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        h = self.body(x) * FACTOR
        return self.head((h * h).sqrt() / FACTOR)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(3):
    loss = nn.functional.mse_loss(model(torch.randn(32, 8)), torch.ones(32, 1))
    if not math.isfinite(loss.item()) or FACTOR == 1:
        print(f"Loss is {loss.item():.1f}, stopping training")
        sys.exit(1)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize("way", ["prints", "raises"])
def test_a_script_that_ends_itself_at_a_loss_that_is_not_finite(
    diagnose: Callable[..., Any], way: str
) -> None:
    """It makes no step; what it computed before is looked at."""
    source = STOPPING.replace("FACTOR", "300")
    if way == "raises":
        source = source.replace("sys.exit(1)", "raise FloatingPointError(loss)")
    found = diagnose(source, "native:fp16")
    assert found.verdict == (
        "native:fp16: overflow at step 0: mul outside of submodules is the first result that is not finite "
        "(train.py:11); train.py:11 in fp32 cures it"
    )
    assert (found.steps, found.skipped) == (0, 0)
    assert found.failure


def test_a_script_that_ends_itself_at_a_finite_loss(diagnose: Callable[..., Any]) -> None:
    """The reason is its last line, not a note of ampcompare's on the device."""
    with pytest.raises(
        LaunchError,
        match=r"showed no step to watch, in fp32 neither: the script ended with exit code 1: Loss is \d+\.\d, stop",
    ):
        diagnose(STOPPING.replace("FACTOR", "1"), "native:fp16")


CHECKED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
    def forward(self, x):
        shares = self.body(x).softmax(-1)
        if (shares.float().sum(-1) - 1).abs().max() > 3e-5:
            raise ValueError("shares have to add up to 1")
        return shares[:, 0].mean()

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for step in range(3):
    loss = model(torch.randn(64, 8))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_a_script_that_raises_for_a_finite_number(diagnose: Callable[..., Any]) -> None:
    """That it does not in fp32 is tried; so is what removes the error, of what its step computed in 16 bits."""
    found = diagnose(CHECKED, "half", steps=2)
    assert found.verdict == (
        "half: error at step 0: the script ends by itself, which it does not in fp32, and _softmax outside of "
        "submodules is the 16-bit result nearest to its end (train.py:10); its error: ValueError: shares have to add "
        "up to 1 (train.py:12); train.py:10 in fp32 cures it"
    )
    assert (found.steps, found.faults[0].kind) == (0, "error")


def test_a_script_with_a_number_that_fp16_lacks(diagnose: Callable[..., Any]) -> None:
    """torch refuses it; the line, and what to write instead, are named."""
    masked = APEX.replace("(x * 60.0) ** 3 * 1e-5", "x.masked_fill(x > 0, -1e9)")
    with pytest.raises(
        ConfigError,
        match=r"train.py:8: under apex:O2 a tensor there is fp16, whose largest number is 65504.*finfo",
    ):
        diagnose(masked, "apex:O2", steps=1)


def test_a_rank_that_waits_for_the_watched_one_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The exit code is that of the watched rank, and the other one ends seconds later, not when its wait is over."""
    monkeypatch.setattr(module, "SECONDS_TO_END", 0.2)
    (tmp_path / "ended.txt").write_text("4")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    assert module._exit_code_of_watched_run(process, tmp_path / "ended.txt") == 4
    module._stop_process_and_ranks(process)
    assert process.wait(timeout=20) == -signal.SIGTERM
