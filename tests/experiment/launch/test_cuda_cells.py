"""Whole cells on "cuda", of every arm, with the package's CUDA stand-in under them: what a GPU would be asked to do."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN

HERE = Path(__file__).resolve().parent
STEPS, DRAIN = 4, 2
RECIPE = {
    "data": {"name": "synthetic", "train_size": 8 * STEPS, "val_size": 8, "image_size": 8},
    "model": {"arch": "convnet", "args": {"width": 4, "depth": 1}},
    "optimizer": {"implementation": "foreach"},  # as torch chooses on a GPU
    "epochs": 1,
    "batch_size": 8,
}
O1, O2 = "apex:O1,engine=compat", "apex:O2,engine=compat"


def _for_this_model(arm: str) -> str:
    """Return an arm that keeps modules of another model with a pattern for the one trained here, which has one linear
    layer."""
    if arm.startswith("gemm:") and "keep=" not in arm:
        arm += ",keep=none"
    return re.sub(r"keep_fp32=[^,]*", "keep_fp32=BatchNorm2d", arm)


# On a GPU the libraries run 16 bits too.
FURTHER = {"fp32:tf32": False, "half:bf16,dynamic": True, "mmengine:fp16": True}
# Contract arms, and whether the host must know at each update if gradients overflowed; others wait for nothing.
DYNAMIC = {
    _for_this_model(arm.text): arm.skips_steps for spec in BUILT_IN.values() for arm in spec.contract
} | FURTHER
ARMS = [
    arm for arm in DYNAMIC if (library := Arm.parse(arm).spec.library) is None or not library.why_missing()
]
ONE_READ = {arm for arm, dynamic in DYNAMIC.items() if dynamic}
# Further settings of a cell: name, arm, changes of the recipe, other settings.
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "average": (O2, {"ema_decay": 0.9}, {}),
    "average of half": ("half:bn_fp32", {"ema_decay": 0.9}, {}),
    "ddp": ("native:fp16", {}, {"parallel": {"kind": "ddp"}}),
    "apex-ddp": (O2, {}, {"parallel": {"kind": "apex-ddp", "sync_bn": "apex"}}),
    "clipped parts": (O2, {"clip_grad": 1.0, "grad_accum_steps": 2, "channels_last": True}, {"prefetch": 2}),
    "deterministic": (O1, {}, {"deterministic": True, "tf32": "on"}),
    "cudnn": ("fp32", {"cudnn_benchmark": True}, {"tf32": "off"}),
    "skip": (O1, {}, {"on_nan": "skip"}),
    "rollback": ("native:fp16", {}, {"on_nan": "rollback", "rollback_every": 2}),
    "saved": (O2, {}, {"saving": {"every_steps": 2, "in_background": True, "apex_layout": True}}),
    "larc": (O2, {"optimizer": {"layer_lr": "larc", "implementation": "foreach"}}, {}),
    "adam": ("half:masters=fp32,dynamic", {"optimizer": {"name": "adam", "implementation": "foreach"}}, {}),
    "fused": (O2, {"optimizer": {"implementation": "fused"}}, {}),
    "many batches": ("fp32", {"data": {**RECIPE["data"], "val_size": 44}}, {}),
    "fused native": ("native:fp16", {"optimizer": {"implementation": "fused"}}, {}),
}
# Host reads of a step that a method is documented to add.
EXTRA = {"skip": 1}
# The first backward pass of Apex DDP asks the other ranks in which order gradients came.
ONCE = {"apex-ddp": 1}
# Adam counts its steps on the CPU, where a read waits for nothing, and here they cannot be told from others.
HOST_COUNTERS = {"adam"}

pytestmark = pytest.mark.slow


def _cells() -> dict[str, Any]:
    common = {"device": "cuda", "drain_every": DRAIN, "warmup_steps": 0}
    cells = {arm: {**common, "recipe": RECIPE, "arm": arm} for arm in ARMS}
    for name, (arm, recipe, options) in METHODS.items():
        cells[name] = {**common, "recipe": {**RECIPE, **recipe}, "arm": arm, **options}
    return cells


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cells asked of their device, all trained in one process."""
    folder = tmp_path_factory.mktemp("cells")
    command = [sys.executable, str(HERE / "cuda_cells.py"), str(folder), json.dumps(_cells())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", [*ARMS, *METHODS])
def test_a_cell_trains_on_cuda(notes: dict[str, Any], name: str) -> None:
    """`--device cuda` trains every arm to its end and evaluates it; lists of tensors have one dtype each: several are
    wrong on CUDA before torch 2.11. The process takes its GPU, by index, before anything is sent to other processes."""
    found = notes[name]
    assert (found["status"], found["error"]) == ("completed", None)
    assert (found["device"], found["device_name"]) == ("cuda:0", "CPU in place of CUDA")
    assert (found["steps"], found["updates"], found["evaluations"]) == (STEPS, STEPS, 1)
    assert found["averaged"] == name.startswith("average")
    assert found["mixed"] == []
    assert (set(found["devices_set"]), found["collectives_before_device"]) == ({"cuda:0"}, [])


@pytest.mark.parametrize("name", [*ARMS, *METHODS])
def test_the_host_waits_for_no_more_than_it_must(notes: dict[str, Any], name: str) -> None:
    """In a step it reads at most the one flag that a dynamic scale needs, and none where a fused step skips; a drain
    reads losses, outcomes and norms in a transfer each, an evaluation counts and per-image results of all batches."""
    found, reads = notes[name], notes[name]["reads"]
    arm = METHODS[name][0] if name in METHODS else name
    flags = arm in ONE_READ and not name.startswith("fused")
    if name not in HOST_COUNTERS:
        assert reads.get("step", 0) <= STEPS * (flags + EXTRA.get(name, 0)) + ONCE.get(name, 0)
    assert reads.get("average", 0) == 0
    kinds = 2 + (name == "clipped parts")
    assert STEPS / DRAIN <= reads["drain"] <= kinds * STEPS / DRAIN
    assert reads["evaluation"] == 1 + found["averaged"]
    assert found["images"]
