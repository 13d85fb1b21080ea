"""The backend `fabric`: Lightning Fabric.

Source: lightning-fabric 2.6; a test compares what it does with `_effective`.
"""

from __future__ import annotations

from ampcompare.backends.explanation import ArmExplanation, EffectiveArm
from ampcompare.backends.library import Library, explain_library
from ampcompare.backends.options import choice
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractArm, Options

__all__ = ["ASKED", "SPEC"]

LIBRARY = Library(
    ("lightning_fabric", "lightning.fabric"),
    ("lightning-fabric", "lightning"),
    "pip install lightning-fabric",
    extra="fabric",
)
# precision -> the arm of ampcompare's own with that precision
ASKED = {
    "32-true": "fp32",
    "16-mixed": "native:fp16",
    "bf16-mixed": "native:bf16",
    "16-true": "half",
    "bf16-true": "half:dtype=bf16",
}


def _effective(options: Options, device: str) -> EffectiveArm:
    asked = options["precision"]
    if device == "cpu" and asked == "16-mixed":
        return EffectiveArm("native:bf16", "Fabric does not support 16-mixed on a CPU, and uses bf16-mixed instead")
    return EffectiveArm(ASKED[asked])


def _explain(options: Options) -> ArmExplanation:
    return explain_library(
        "Lightning Fabric",
        LIBRARY,
        (
            (
                "casts",
                "mixed: inputs cast, autocast around the module, outputs in fp32; true: weights and inputs cast, "
                "outputs in fp32",
            ),
            ("loss scale", "16-mixed: dynamic, by torch's GradScaler, updated after each optimizer's step; else none"),
            ("many optimizers", "refused in 16-mixed: each step would update the scale of the others"),
        ),
        (
            "from lightning_fabric import Fabric  # or: from lightning.fabric import Fabric",
            f'fabric = Fabric(precision="{options["precision"]}", devices=1)',
            "model, optimizer = fabric.setup(model, optimizer)",
            "loss = criterion(model(x), y)",
            "fabric.backward(loss)",
            "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
            "optimizer.step()",
        ),
        on_gpu=_effective(options, "cuda"),
        on_cpu=_effective(options, "cpu"),
    )


SPEC = BackendSpec(
    summary="Lightning Fabric: 32-true, 16-mixed, bf16-mixed, 16-true or bf16-true",
    implementation="ampcompare.training.precision.fabric:Fabric",
    explain=_explain,
    parsers={"precision": choice(*ASKED)},
    positional="precision",
    default="32-true",
    library=LIBRARY,
    effective=_effective,
    checkpoint=CheckpointState(grad_scaler=lambda options: options["precision"] == "16-mixed"),
    contract=(
        ContractArm("fabric:32-true"),
        ContractArm("fabric:bf16-mixed"),
        ContractArm("fabric:16-mixed", skips_steps=True, shares_steps=False),
        ContractArm("fabric:16-true"),
        ContractArm("fabric:bf16-true"),
    ),
)
