"""Which arms are refused from the source alone, and when the source does not say enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.experiment.launch.script.refusals import why_refused
from ampcompare.runs.settings.script import script_config

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
    assert refused(tmp_path, text, arm) == ""


def test_imported_files_count(tmp_path: Path) -> None:
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


LIGHTNING = "import lightning as L\nif __name__ == '__main__':\n    L.Trainer(max_epochs=1, {}).fit(model)\n"
ACCELERATE = "from accelerate import Accelerator\ndef main():\n    accelerator = Accelerator({})\nmain()\n"
HF = "from transformers import TrainingArguments\nargs = TrainingArguments('out', {})\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            LIGHTNING.format("strategy='deepspeed_stage_2'"),
            "/train.py:3: strategy='deepspeed_stage_2' of lightning has",
        ),
        (LIGHTNING.format("strategy=FSDPStrategy()"), "/train.py:3: strategy=FSDPStrategy() of lightning has"),
        (
            LIGHTNING.format("precision='transformer-engine'"),
            "/train.py:3: precision='transformer-engine' of lightning",
        ),
        (ACCELERATE.format("mixed_precision='fp8'"), "/train.py:3: mixed_precision='fp8' of accelerate has its own"),
        (ACCELERATE.format("fsdp_plugin=FullyShardedDataParallelPlugin()"), "/train.py:3: fsdp_plugin="),
        (HF.format("deepspeed='ds.json'"), "/train.py:2: deepspeed='ds.json' of transformers has its own"),
        ("import deepspeed\nengine, *_ = deepspeed.initialize(model=model)\n", "/train.py:2: DeepSpeed has its own"),
    ],
)
def test_precisions_that_no_arm_replaces_are_refused(tmp_path: Path, text: str, why: str) -> None:
    """A literal that names one refuses all arms but `script`, with what to take instead."""
    for arm in ("fp32", "bf16", "O2"):
        assert refused(tmp_path, text, arm).startswith(why)
    assert refused(tmp_path, text, "script") == ""


@pytest.mark.parametrize(
    "text",
    [
        LIGHTNING.format("strategy='ddp', precision='16-mixed'"),
        LIGHTNING.format("strategy=args.strategy"),
        LIGHTNING.format("strategy='fsdp'").replace("'__main__'", "'other'"),  # in a branch
        LIGHTNING.format("strategy='fsdp'") + "L.Trainer()\n",  # another one may train
        ACCELERATE.format("mixed_precision='bf16', fsdp_plugin=None"),
        HF.format("fsdp='', deepspeed=None"),
    ],
)
def test_precisions_that_may_be_replaced_are_not(tmp_path: Path, text: str) -> None:
    """What depends on a branch or a value is left to the cell."""
    assert refused(tmp_path, text, "bf16") == ""


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("--deepspeed", "ds.json"), "the argument --deepspeed has"),
        (("--deepspeed=ds.json",), "the argument --deepspeed has"),
        (("-m", "--mixed-precision", "fp8"), "the argument --mixed-precision fp8 has"),
        (("--mixed_precision=fp8",), "the argument --mixed_precision fp8 has"),
        (("--mixed_precision", "bf16", "--deepspeed_note"), ""),
        (("--fsdp", "full_shard auto_wrap"), "the argument --fsdp full_shard auto_wrap has"),
        (("--trainer.strategy=deepspeed_stage_2",), "the argument --trainer.strategy deepspeed_stage_2 has"),
        (("--trainer.strategy.class_path", "lightning.pytorch.strategies.FSDPStrategy"), "the argument --trainer.s"),
        (("+trainer.precision=64-true",), "the argument +trainer.precision 64-true has"),
        (("trainer.precision=16-mixed", "--trainer.strategy", "ddp"), ""),
        (("--precision", "64", "--strategy", "fsdp"), ""),  # of a script that is none of Lightning's
    ],
)
def test_arguments_name_precisions(tmp_path: Path, arguments: tuple[str, ...], refusal: str) -> None:
    """Of `accelerate launch` and of transformers' examples, whose sources name none."""
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    why = why_refused(script_config([str(script), *arguments]), Arm.parse("bf16"))
    assert why.startswith(refusal)
    assert bool(why) == bool(refusal)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("--precision", "64-true"), "the argument --precision 64-true has"),
        (("--precision", "bf16-mixed", "--strategy=fsdp_cpu_offload"), "the argument --strategy fsdp_cpu_offload has"),
        (("--precision=transformer-engine",), "the argument --precision transformer-engine has"),
        (("--precision", "32", "--strategy", "ddp", "--devices", "64"), ""),
    ],
)
def test_arguments_of_a_script_of_lightning(tmp_path: Path, arguments: tuple[str, ...], refusal: str) -> None:
    """Names that other scripts use for other things count where the script imports Lightning."""
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING.format("precision=args.precision, strategy=args.strategy"))
    why = why_refused(script_config([str(script), *arguments]), Arm.parse("bf16"))
    assert why.startswith(refusal)
    assert bool(why) == bool(refusal)
    assert why_refused(script_config([str(script), *arguments]), Arm.parse("script")) == ""
