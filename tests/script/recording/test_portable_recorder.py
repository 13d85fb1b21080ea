"""The recorder of a stack: what it writes of unmodified scripts is what the scripts print.

Each script prints a line `STEP applied loss` for each update. AMPCOMPARE_STACK_PYTHON names another Python, such as one
with torch 1.13, that runs them in place of this one.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.launch.script.rows import ScriptRows, read_script_rows
from ampcompare.experiment.launch.script.stacks import TEMPLATE

OTHER = os.environ.get("AMPCOMPARE_STACK_PYTHON")
START = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 4)
y = torch.randn(16, 2)
def loss_of(part=slice(None)):
    return (model(x[part]) - y[part]).square().mean()
def told(loss, applied=True):
    print("STEP", applied, repr(float(loss)))
"""
SCALER = (
    START
    + """
kind = getattr(torch.amp, "GradScaler", None)
scaler = kind("cpu", init_scale=1024.0, growth_interval=3) if kind else torch.cuda.amp.GradScaler()
"""
)
JUMP = """
import time
real_clock, calls = time.CLOCK, []
def jump():
    calls.append(1)
    return real_clock() - (1000.0 if len(calls) > 20 else 0.0)
time.CLOCK = jump
"""
SCRIPTS = {
    "plain": """
for _ in range(5):
    loss = loss_of(); optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
    print("NORM", torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
""",
    "scheduler": """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
for _ in range(6):
    loss = loss_of(); optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step(); told(loss)
""",
    "accumulation": """
for _ in range(4):
    optimizer.zero_grad()
    losses = [loss_of(slice(k, k + 8)) / 2 for k in (0, 8)]
    for loss in losses: loss.backward()
    optimizer.step(); told(losses[0].item() + losses[1].item())
""",
    "clipping": """
for _ in range(4):
    loss = loss_of(); optimizer.zero_grad(); loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step(); told(loss); print("NORM", repr(float(norm)))
""",
    "closure": """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
def closure():
    global last
    optimizer.zero_grad(); last = loss_of(); last.backward(); return last
for _ in range(3):
    optimizer.step(closure); told(last)
""",
    "wrapper": """
class Ascent(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
    def step(self):
        self.base.step()
optimizer = Ascent(model.parameters())
for _ in range(4):
    loss = loss_of(); optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
""",
    "own step": """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]: p -= 0.1 * p.grad.sign()
optimizer = Own(model.parameters(), lr=0.1)
for _ in range(4):
    loss = loss_of(); optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
""",
    "two optimizers in turn": """
other = torch.optim.SGD(model[2].parameters(), lr=0.05)
for _ in range(3):
    first = loss_of(); optimizer.zero_grad(); first.backward(); optimizer.step()
    second = loss_of(); other.zero_grad(); second.backward(); other.step(); told(first.item() + second.item())
""",
    "not finite": """
for k in range(4):
    loss = loss_of() * (float("nan") if k == 2 else 1.0)
    optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
""",
    "checkpoint": """
from torch.utils.checkpoint import checkpoint
import inspect
reentrant = {"use_reentrant": True} if "use_reentrant" in inspect.signature(checkpoint).parameters else {}
x.requires_grad_()
for _ in range(3):
    hidden = checkpoint(model[0], x, **reentrant)
    loss = (model[2](hidden) - y).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
""",
    "autograd.backward": """
for _ in range(3):
    loss = loss_of(); optimizer.zero_grad(); torch.autograd.backward(loss); optimizer.step(); told(loss)
""",
    "evaluation between": """
for _ in range(3):
    loss = loss_of(); optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
    model.eval()
    with torch.no_grad(): model(x)
    model.train()
""",
    "workers": """
class Pairs(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, k): return x[k], y[k]
for a, b in torch.utils.data.DataLoader(Pairs(), batch_size=8, num_workers=1):
    loss = (model(a) - b).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
""",
    "exit": """
for _ in range(2):
    loss = loss_of(); optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
sys.exit(3)
""",
    "error": """
for _ in range(2):
    loss = loss_of(); optimizer.zero_grad(); loss.backward(); optimizer.step(); told(loss)
raise KeyError("no such column")
""",
    "no step": "loss_of().backward()",
}
SCALED = {
    "scaler": """
for k in range(8):
    loss = loss_of() * (float("inf") if k == 4 and scaler.is_enabled() else 1.0)
    before = model[0].weight.detach().clone()
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
    told(loss, bool((before != model[0].weight).any())); print("SCALE", scaler.get_scale())
""",
    "scaler with clipping": """
for k in range(5):
    loss = loss_of(); optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer); scaler.update(); told(loss); print("NORM", repr(float(norm)))
""",
}
EVERY = {
    **{name: START + body for name, body in SCRIPTS.items()},
    **{name: SCALER + body for name, body in SCALED.items()},
}


@pytest.fixture
def recorded(tmp_path: Path, forked_python: Any) -> Any:
    """Return a function that runs a source under the recorder, and returns its process and rows."""

    def run(source: str, *options: str, prelude: str = "") -> tuple[Any, ScriptRows]:
        script, recorder = tmp_path / "train.py", tmp_path / "recorder.py"
        script.write_text(source)
        recorder.write_text(prelude + TEMPLATE.read_text())
        words = [str(recorder), "--record", str(tmp_path / "script.jsonl"), *options, str(script)]
        if OTHER:
            done: Any = subprocess.run(
                [OTHER, *words], cwd=tmp_path, capture_output=True, text=True, check=False
            )
        else:
            done = forked_python.run(words, tmp_path, dict(os.environ))
        return done, read_script_rows(tmp_path / "script.jsonl")

    return run


def _printed(output: str, word: str) -> list[list[str]]:
    return [line.split()[1:] for line in output.splitlines() if line.startswith(word)]


@pytest.mark.parametrize("name", EVERY)
def test_rows_are_what_the_script_prints(name: str, recorded: Any) -> None:
    done, rows = recorded(EVERY[name], "--seed", "0")
    steps = _printed(done.stdout, "STEP")
    assert [repr(step.loss) for step in rows.steps] == [loss for _, loss in steps], done.stderr
    assert [str(all(step.applied)) for step in rows.steps] == [applied for applied, _ in steps]
    if norms := _printed(done.stdout, "NORM"):
        assert [repr(step.grad_norm) for step in rows.steps] == [norm for (norm,) in norms]
    if (scales := _printed(done.stdout, "SCALE")) and rows.steps[0].loss_scales:
        assert [step.loss_scales for step in rows.steps] == [(float(scale),) for (scale,) in scales]
        assert any(not all(step.applied) for step in rows.steps)
    assert all(step.seconds > 0 for step in rows.steps[1:])
    assert rows.ended is not None
    assert rows.ended["exit_code"] == done.returncode == {"exit": 3, "error": 1}.get(name, 0)
    assert (rows.ended["error"] or "").startswith("KeyError" if name == "error" else "")
    assert len(rows.weights) == 1
    assert len(rows.batches) == min(
        3, max(1, len(steps) * (2 if name in ("accumulation", "two optimizers in turn") else 1))
    )


# As the one of Apex does, of which the scaler of apex.amp decides at the end of a backward pass what is skipped.
FP16_OPTIMIZER = """
from apex.amp.scaler import LossScaler
class FP16_Optimizer:
    def __init__(self, optimizer):
        self.optimizer, self.loss_scaler, self.overflow = optimizer, LossScaler(), False
    loss_scale = property(lambda self: self.loss_scaler.loss_scale())
    def zero_grad(self):
        self.optimizer.zero_grad()
    def backward(self, loss):
        (loss * self.loss_scale).backward()
        self.loss_scaler.overflow = not float(loss) < float("inf")
        self.overflow = self.loss_scaler.update_scale()
    def step(self):
        self.overflow or self.optimizer.step()
"""
LOSS_SCALER = """
class LossScaler:
    dynamic, overflow, scale = True, False, 1024.0
    def loss_scale(self):
        return self.scale
    def update_scale(self):
        self.scale /= 2.0 if self.overflow else 1.0
        return self.overflow
"""
APEX = {
    "__init__.py": "",
    "amp/__init__.py": "",
    "amp/_amp_state.py": "_amp_state = None",
    "amp/handle.py": "scale_loss = None",
    "amp/frontend.py": "_initialize = None",
    "amp/scaler.py": LOSS_SCALER,
    "fp16_utils/__init__.py": FP16_OPTIMIZER,
}


def test_the_fp16_optimizer_of_apex(recorded: Any, tmp_path: Path) -> None:
    for name, text in APEX.items():
        (path := tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = """
from apex.fp16_utils import FP16_Optimizer
optimizer = FP16_Optimizer(optimizer)
for k in range(5):
    loss = loss_of() * (float("inf") if k == 2 else 1.0)
    optimizer.zero_grad(); optimizer.backward(loss); optimizer.step()
    told(loss, not optimizer.overflow); print("SCALE", optimizer.loss_scale)
"""
    done, rows = recorded(START + script)
    told = _printed(done.stdout, "STEP")
    assert [[str(all(step.applied)), repr(step.loss)] for step in rows.steps] == told, done.stderr
    assert [applied for applied, _ in told] == ["True", "True", "False", "True", "True"]
    scales = [(float(scale),) for (scale,) in _printed(done.stdout, "SCALE")]
    assert [step.loss_scales for step in rows.steps] == scales
    assert [step.loss_scales_before for step in rows.steps] == [(1024.0,), *scales[:-1]]


@pytest.mark.parametrize("name", ["plain", "two optimizers in turn", "scaler"])
def test_a_kill_loses_no_step_that_has_ended(name: str, recorded: Any) -> None:
    """Also where a worker of a loader was forked, which leaves the file alone."""
    worker = "if os.fork() == 0: loss_of().backward(); optimizer.step(); os._exit(0)\nos.wait()\n"
    start, body = EVERY[name].rsplit("\nfor ", 1)
    body = re.sub(r"range\(\d\)", "range(20)", body) + "    sys.stdout.flush(); count()\n"
    head = "import os, signal\nsteps = []\ndef count():\n    steps.append(1)\n" + (
        "    if len(steps) == 17: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done, rows = recorded(head + start + "\n" + worker + "for " + body, "--seed", "0")
    steps = _printed(done.stdout, "STEP")
    assert (done.returncode, len(steps), rows.ended) == (-signal.SIGKILL, 17, None), done.stderr
    assert [repr(step.loss) for step in rows.steps] == [loss for _, loss in steps]
    assert [str(all(step.applied)) for step in rows.steps] == [applied for applied, _ in steps]


def test_a_disk_that_maps_no_file_keeps_the_rows_of_a_proper_end(recorded: Any, tmp_path: Path) -> None:
    """As some shared file systems: only a kill would lose rows then."""
    prelude = "import mmap\ndef refuse(*_): raise OSError(19, 'No such device')\nmmap.mmap = refuse\n"
    done, rows = recorded(EVERY["plain"], "--seed", "0", prelude=prelude)
    told = _printed(done.stdout, "STEP")
    assert len(rows.steps) == len(told) > 0
    assert done.returncode == 0
    assert not list(tmp_path.glob("*.tail"))


@pytest.mark.parametrize("is_full_for_ever", [False, True])
def test_a_full_disk_loses_no_row_that_has_room_later(is_full_for_ever: bool, recorded: Any) -> None:
    """Here it is a limit on the size of files, which the rows exceed, and the output does not."""
    start, body = EVERY["plain"].rsplit("\nfor ", 1)
    limits = """
    if k == 50: resource.setrlimit(resource.RLIMIT_FSIZE, (60000, most))
    if k == LIFTED: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
"""
    body = "for " + body.replace("_ in range(5):\n", f"k in range(700):{limits}").split("    print(")[0]
    head = "import resource\nmost = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
    done, rows = recorded(start + "\n" + head + body.replace("LIFTED", "-1" if is_full_for_ever else "600"))
    told = [loss for _, loss in _printed(done.stdout, "STEP")]
    assert (done.returncode, len(told)) == (0, 700), done.stderr
    steps = [repr(step.loss) for step in rows.steps]
    if is_full_for_ever:
        assert 100 < len(steps) < 400
        assert steps == told[: len(steps)]
        assert re.search(r"recorder: no room for \d+ bytes of .*script.jsonl", done.stderr)
    else:
        assert (steps, "recorder:" in done.stderr) == (told, False)
        assert rows.ended is not None


@pytest.mark.parametrize("word", ["--local_rank=1", "--local-rank=1"])
def test_the_word_of_an_old_launcher_is_that_of_the_script(word: str, recorded: Any) -> None:
    """torch.distributed.launch puts it before all others."""
    done, rows = recorded("import sys\nprint('WORDS', *sys.argv[1:])\n" + EVERY["plain"], word)
    assert (_printed(done.stdout, "WORDS"), len(rows.steps)) == ([[word]], 5)


def test_learning_rates_and_a_limit(recorded: Any) -> None:
    _, rows = recorded(EVERY["scheduler"], "--max-steps", "3")
    assert [step.lr for step in rows.steps] == [0.01, 0.01, 0.005]
    assert rows.ended is not None
    assert rows.ended["exit_code"] == 0


def test_shifted_seeds_are_those_of_an_arm(recorded: Any) -> None:
    """The global generators of seed 2 are seeded with 1 + 2 * 1000003, once."""
    done, _ = recorded(
        "import torch, random, numpy\ntorch.manual_seed(1)\nprint('SEED', torch.initial_seed())\n"
        "torch.manual_seed(torch.initial_seed())\nprint('SEED', torch.initial_seed())\n",
        *("--seed", "2", "--shift-seeds"),
    )
    assert _printed(done.stdout, "SEED") == [["2000007"], ["2000007"]]


@pytest.mark.parametrize("clock", ["perf_counter", "time"])
def test_a_clock_that_jumps_leaves_every_step(clock: str, recorded: Any) -> None:
    """A clock of it goes back by 1000 seconds at some point: that step has no time, and a note says so."""
    done, rows = recorded(
        EVERY["plain"].replace("range(5)", "range(40)"), prelude=JUMP.replace("CLOCK", clock)
    )
    assert len(rows.steps) == 40, done.stderr
    assert len([step.step for step in rows.steps if step.seconds <= 0]) == 2  # the first step has none either
    assert all(0 <= step.seconds < 500 for step in rows.steps)
    assert [step.step for step in rows.steps if step.grad_norm is not None] == [*range(8), 32]
    assert any("clocks disagreed" in note for note in rows.notes)


def test_first_weights_begin_from_stored_ones(recorded: Any, tmp_path: Path) -> None:
    weights = str(tmp_path / "weights.pt")
    _, first = recorded(EVERY["plain"], "--save-weights", weights)
    _, other = recorded(EVERY["plain"].replace("manual_seed(1)", "manual_seed(9)"))
    _, begun = recorded(
        EVERY["plain"].replace("manual_seed(1)", "manual_seed(9)"), "--first-weights", weights
    )
    assert first.weights == begun.weights != other.weights


def test_parts_of_weights_are_no_first_weights(recorded: Any, tmp_path: Path) -> None:
    script = EVERY["plain"].replace(
        "for _ in range(5)", "model[0].weight._fsdp_flattened = True\nfor _ in range(5)"
    )
    done, _ = recorded(script, "--save-weights", str(tmp_path / "weights.pt"))
    assert (done.returncode, (tmp_path / "weights.pt").exists()) == (1, False)
    assert "each rank holds a part of the weights, so one rank has no first weights for all" in done.stderr


def test_it_is_one_file_for_python_3_7() -> None:
    text = TEMPLATE.read_text()
    tree = ast.parse(text, feature_version=(3, 7))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= set(sys.stdlib_module_names) | {"importlib.util"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
    assert len(text.splitlines()) <= 500


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    recorder = tmp_path / "recorder.py"
    recorder.write_text(TEMPLATE.read_text())
    (tmp_path / "train.py").write_text("")
    words = [sys.executable, "-I", "-S", str(recorder)]  # without the installed packages
    done = subprocess.run([*words, str(tmp_path / "train.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "torch cannot be imported: ModuleNotFoundError" in done.stderr
    facts = json.loads(subprocess.run([*words, "--probe"], capture_output=True, text=True, check=True).stdout)
    assert "no_torch" in facts
