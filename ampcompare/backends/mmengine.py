"""The backend `mmengine`: mmengine's optimizer wrappers, as mmcls uses them.

Source: mmengine 0.10; a test compares what it does with `_effective`.
"""

from __future__ import annotations

from ampcompare.backends.explanation import ArmExplanation, EffectiveArm
from ampcompare.backends.library import Library, explain_library
from ampcompare.backends.options import float_dtype
from ampcompare.backends.spec import BackendSpec, CheckpointState, ContractArm, Options

__all__ = ["ASKED", "SPEC"]

LIBRARY = Library(("mmengine.optim",), ("mmengine",), "pip install mmengine", extra="mmengine")
# dtype -> the arm of ampcompare's own with that precision
ASKED = {"float32": "fp32", "float16": "native:fp16", "bfloat16": "native:bf16"}


def _effective(options: Options, device: str) -> EffectiveArm:
    asked = options["dtype"]
    if device == "cpu" and asked != "float32":
        return EffectiveArm(None, "AmpOptimWrapper of mmengine runs on a GPU only; mmengine:fp32 runs here")
    return EffectiveArm(ASKED[asked])


def _explain(options: Options) -> ArmExplanation:
    asked = options["dtype"]
    name, dtype = ("OptimWrapper", "") if asked == "float32" else ("AmpOptimWrapper", f', dtype="{asked}"')
    return explain_library(
        "mmengine, as mmcls trains",
        LIBRARY,
        (
            ("casts", "AmpOptimWrapper: autocast around forward pass and loss; OptimWrapper: none"),
            ("loss scale", "AmpOptimWrapper: dynamic, by torch's GradScaler, in bf16 too; OptimWrapper: none"),
            ("many optimizers", "refused with AmpOptimWrapper: each has its own scaler"),
        ),
        (
            f"from mmengine.optim import {name}",
            f"wrapper = {name}(optimizer=optimizer, clip_grad=dict(max_norm=1.0){dtype})",
            "with wrapper.optim_context(model):",
            "    loss = criterion(model(x), y)",
            "wrapper.update_params(loss)  # backward, clip, step, zero_grad",
        ),
        on_gpu=_effective(options, "cuda"),
        on_cpu=_effective(options, "cpu"),
    )


SPEC = BackendSpec(
    summary="mmengine's OptimWrapper (fp32) and AmpOptimWrapper (fp16, bf16), as mmcls uses them",
    implementation="ampcompare.training.precision.mmengine:MMEngine",
    explain=_explain,
    parsers={"dtype": float_dtype},
    positional="dtype",
    default="float32",
    library=LIBRARY,
    effective=_effective,
    checkpoint=CheckpointState(grad_scaler=lambda options: options["dtype"] == "float16"),
    contract=(ContractArm("mmengine:fp32"),),
)
