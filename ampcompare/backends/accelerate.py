"""The backend `accelerate`: Hugging Face Accelerate.

Source: accelerate 1.15; a test compares what it does with `_effective`.
"""

from __future__ import annotations

from ampcompare.backends.explanation import ArmExplanation, EffectiveArm
from ampcompare.backends.library import Library, explain_library
from ampcompare.backends.options import choice
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractArm, Options

__all__ = ["ASKED", "SPEC"]

LIBRARY = Library(("accelerate",), ("accelerate",), "pip install accelerate", extra="accelerate")
# mixed_precision -> the arm of ampcompare's own with that precision
ASKED = {"no": "fp32", "fp16": "native:fp16", "bf16": "native:bf16"}


def _effective(options: Options, device: str) -> EffectiveArm:
    asked = options["mixed_precision"]
    if device == "cpu" and asked == "fp16":
        return EffectiveArm("fp32", "accelerate does not support fp16 on a CPU, and silently trains in fp32")
    return EffectiveArm(ASKED[asked])


def _explain(options: Options) -> ArmExplanation:
    return explain_library(
        "Hugging Face Accelerate",
        LIBRARY,
        (
            ("casts", "autocast around the model's own forward, which prepare() replaces; outputs come back in fp32"),
            ("loss scale", "fp16: dynamic, by torch's GradScaler, updated after each optimizer's step; else none"),
            ("many optimizers", "refused in fp16: each step would update the scale of the others"),
            ("one per process", "a second Accelerator of another precision is refused by accelerate"),
        ),
        (
            "from accelerate import Accelerator",
            f'accelerator = Accelerator(mixed_precision="{options["mixed_precision"]}")',
            "model, optimizer = accelerator.prepare(model, optimizer)",
            "loss = criterion(model(x), y)",
            "accelerator.backward(loss)",
            "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
            "optimizer.step()",
        ),
        on_gpu=_effective(options, "cuda"),
        on_cpu=_effective(options, "cpu"),
    )


SPEC = BackendSpec(
    summary="Hugging Face Accelerate: no, fp16 or bf16",
    implementation="ampcompare.training.precision.accelerate:Accelerate",
    explain=_explain,
    parsers={"mixed_precision": choice(*ASKED)},
    positional="mixed_precision",
    default="no",
    library=LIBRARY,
    effective=_effective,
    checkpoint=CheckpointState(grad_scaler=lambda options: options["mixed_precision"] == "fp16"),
    contract=(
        ContractArm("accelerate:no"),
        ContractArm("accelerate:bf16"),
        ContractArm("accelerate:fp16", skips_steps=True, shares_steps=False),
    ),
)
