"""Backends that hand training to another library, and packed activations, in sentences."""

from __future__ import annotations

from ampcompare.adapters import adapter_of, expected
from ampcompare.arm import Arm
from ampcompare.explain.parts import Parts
from ampcompare.explain.scripts import PLAIN_STEP

__all__ = ["explain_actnn", "explain_library"]

NAMES = {
    "accelerate": "Hugging Face Accelerate",
    "fabric": "Lightning Fabric",
    "mmengine": "mmengine, as mmcls trains",
    "horovod": "Horovod's DistributedOptimizer",
}
HOW = {
    "accelerate": (
        ("casts", "autocast around the model's own forward, which prepare() replaces; outputs come back in fp32"),
        ("loss scale", "fp16: dynamic, by torch's GradScaler, moved after each optimizer's step; else none"),
        ("many optimizers", "refused in fp16: each step would move the scale of the others"),
        ("one per process", "a second Accelerator of another precision is refused by accelerate"),
    ),
    "fabric": (
        (
            "casts",
            "mixed: inputs cast, autocast around the module, outputs in fp32; true: weights and inputs cast, outputs "
            "in fp32",
        ),
        ("loss scale", "16-mixed: dynamic, by torch's GradScaler, moved after each optimizer's step; else none"),
        ("many optimizers", "refused in 16-mixed: each step would move the scale of the others"),
    ),
    "mmengine": (
        ("casts", "AmpOptimWrapper: autocast around forward pass and loss; OptimWrapper: none"),
        ("loss scale", "AmpOptimWrapper: dynamic, by torch's GradScaler, in bf16 too; OptimWrapper: none"),
        ("many optimizers", "refused with AmpOptimWrapper: each has a scaler of its own"),
    ),
    "horovod": (
        ("casts", "none; with compression=fp16 gradients are exchanged in fp16"),
        ("loss scale", "none"),
        ("processes", "started by horovodrun, in a loop of your own; one process exchanges nothing"),
        ("accumulation", "passes=N: Horovod must know beforehand"),
    ),
}


def explain_library(arm: Arm) -> Parts:
    """Explain an arm that another library runs."""
    on_gpu, on_cpu, adapter = expected(arm, "cuda"), expected(arm, "cpu"), adapter_of(arm)
    assert on_gpu is not None
    assert on_cpu is not None
    assert adapter is not None
    cpu = on_cpu.reason or f"the precision of {on_cpu.arm}"
    return Parts(
        summary=f"{NAMES[arm.backend]}; {adapter.missing() or 'installed'}",
        does=(*HOW[arm.backend], ("on a GPU", f"the precision of {on_gpu.arm}"), ("on a CPU", cpu)),
        twin=on_gpu.arm,
        twin_is="our arm of the precision that was asked for; a run names the one that it really had",
        differs=(),
        script=_script(arm),
        twin_script=(),
    )


def explain_actnn(arm: Arm) -> Parts:
    """Explain packed activations."""
    bits, group = int(arm.options["bits"]), int(arm.options.get("group", 256))
    over = str(arm.options.get("over", "fp32")).replace("+", ",")
    each = bits + 64 / group
    return Parts(
        summary=f"{over}, with what autograd saves of the model's forward pass in {bits} bits (ActNN's idea)",
        does=(
            ("weights, casts", f"those of {over}"),
            (
                "saved tensors",
                f"in groups of {group}: {bits} bits a value, rounded at random so that the mean holds, and two fp32 "
                f"numbers a group; {each:.3g} bits a value in all, against 32",
            ),
            ("left alone", "weights, integers, tensors below 1024 elements, and what the loss saves"),
            ("gradients", "right in the mean, with the noise of the rounding"),
            ("time", "more: packing and unpacking; docs/backends.md has figures"),
        ),
        twin=over,
        twin_is="the arm underneath, whose activations are saved as they are",
        differs=("memory of saved activations, time, and the noise of the gradients",),
        script=(),
        twin_script=(),
    )


def _script(arm: Arm) -> tuple[str, ...]:
    """Return what a script with that library says."""
    asked = str(next(iter(arm.options.values()), ""))
    if arm.backend == "accelerate":
        return (
            "from accelerate import Accelerator",
            f'accelerator = Accelerator(mixed_precision="{asked}")',
            "model, optimizer = accelerator.prepare(model, optimizer)",
            "loss = criterion(model(x), y)",
            "accelerator.backward(loss)",
            "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
            "optimizer.step()",
        )
    if arm.backend == "fabric":
        return (
            "from lightning_fabric import Fabric  # or: from lightning.fabric import Fabric",
            f'fabric = Fabric(precision="{asked}", devices=1)',
            "model, optimizer = fabric.setup(model, optimizer)",
            "loss = criterion(model(x), y)",
            "fabric.backward(loss)",
            "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
            "optimizer.step()",
        )
    if arm.backend == "mmengine":
        name, dtype = ("OptimWrapper", "") if asked == "float32" else ("AmpOptimWrapper", f', dtype="{asked}"')
        return (
            f"from mmengine.optim import {name}",
            f"wrapper = {name}(optimizer=optimizer, clip_grad=dict(max_norm=1.0){dtype})",
            "with wrapper.optim_context(model):",
            "    loss = criterion(model(x), y)",
            "wrapper.update_params(loss)  # backward, clip, step, zero_grad",
        )
    compression = arm.options.get("compression", "none")
    return (
        "import horovod.torch as hvd",
        "hvd.init()",
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
        "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), "
        f"compression=hvd.Compression.{compression})",
        PLAIN_STEP[0],
        PLAIN_STEP[1],
        PLAIN_STEP[3],
    )
