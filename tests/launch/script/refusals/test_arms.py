"""Which arms are refused from the source alone, and when the source does not say enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.launch.script.refusals.arms import why_refused
from ampcompare.settings.script import script_config

PLAIN = "import torch\nloss.backward()\noptimizer.step()\n"
TORCH = "import torch\nscaler = torch.cuda.amp.GradScaler()\nwith torch.autocast('cuda'):\n    pass\n"
NO_SCALER = "import torch\nwith torch.autocast('cuda'):\n    pass\n"
APEX = (
    "from apex import amp\nmodel, opt = amp.initialize(model, opt)\nwith amp.scale_loss(loss, opt) as s: s.backward()\n"
)
OFF = "from apex import amp\namp.initialize(model, opt, enabled=False)\n"
OLD = "from apex import amp\nhandle = amp.init()\n"
DDP = "from apex.parallel import DistributedDataParallel\n"
CLOSURE = APEX + "def closure():\n    pass\nopt.step(closure)\nscheduler.step()\n"


LBFGS = "import torch\nopt = torch.optim.LBFGS(params)\ndef closure(): ...\nopt.step(closure)\n"
SCALING = ("O1", "O2", "O3,loss_scale=8", "O5", "half:loss_scale=8", "half:master_weights")


def refused(tmp_path: Path, text: str, arm: str, others: dict[str, str] | None = None) -> str:
    for name, content in (others or {}).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    script = tmp_path / "train.py"
    script.write_text(text)
    return why_refused(script_config([str(script)]), Arm.parse(arm)).removeprefix(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "arm", "why"),
    [
        *[(LBFGS, arm, "/train.py:4: LBFGS runs its closure several times") for arm in ("native:fp16", *SCALING)],
        (OFF, "O2", "/train.py:2: amp.initialize has enabled=False"),
        (OLD, "bf16", "/train.py:2: amp.init has no models"),
        (CLOSURE, "bf16", "/train.py:6: optimizer.step is called with a closure"),
    ],
)
def test_an_arm_that_cannot_train_is_refused(tmp_path: Path, text: str, arm: str, why: str) -> None:
    """With the line and the reason."""
    assert refused(tmp_path, text, arm).startswith(why)


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        *[(TORCH, arm) for arm in ("fp32", "native:fp16", "bf16", "O0", "O1", "O2", "O3", "O5", "half")],
        *[(NO_SCALER, arm) for arm in ("bf16", "native:fp16", "O0", "O3", "O4", "half", *SCALING)],
        *[(PLAIN, arm) for arm in ("fp32", "native:fp16", "bf16", "O4", *SCALING)],
        *[(LBFGS, arm) for arm in ("fp32", "bf16", "O3", "half")],
        (LBFGS.replace("LBFGS", "Adam"), "native:fp16"),
        (DDP, "bf16"),
        *[(APEX, arm) for arm in ("fp32", "native:fp16", "half", "O2")],
        (OFF, "fp32"),
        (OLD, "O1"),
        (CLOSURE, "fp32"),
        (CLOSURE + "opt.step()\n", "bf16"),  # one of both may never run
        (APEX + TORCH, "half"),  # so may either of both libraries
    ],
)
def test_an_arm_that_may_train_is_not(tmp_path: Path, text: str, arm: str) -> None:
    """What only the run can tell is left to it."""
    assert refused(tmp_path, text, arm) == ""


def test_imported_files_count(tmp_path: Path) -> None:
    """A refusal follows what other files of the project do."""
    files = {
        "engine.py": "from pkg import steps",
        "pkg/__init__.py": "",
        "pkg/steps.py": "from . import scale",
        "pkg/scale.py": LBFGS,
    }
    assert refused(tmp_path, "from engine import train\n", "fp32", files) == ""
    assert refused(tmp_path, "from engine import train\n", "O1", files).startswith("/pkg/scale.py:4:")


@pytest.mark.parametrize(
    "line", ["import timm", "import importlib", "exec(code)", "from transformers import Trainer", "import engine"]
)
def test_unknown_code_is_never_refused(tmp_path: Path, line: str) -> None:
    """An installed library may use mixed precision by itself."""
    assert refused(tmp_path, f"{line}\n{LBFGS}", "O1", {"engine.py": "def broken(:"}) == ""


def test_modules_are_found_below_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-m MODULE` is looked up as Python does; one that is installed is left to the run."""
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, "", "fp32", {"pkg/__init__.py": "", "pkg/train.py": LBFGS})
    why = why_refused(script_config(["-m", "pkg.train"]), Arm.parse("O1"))
    assert why.startswith("pkg/train.py:4: LBFGS")
    assert why_refused(script_config(["-m", "torch.distributed.run"]), Arm.parse("O1")) == ""
