"""The backend `mmengine`: mmengine's optimizer wrappers, as mmcls uses them.

Source: mmengine 0.10.
"""

from dataclasses import replace

from ampcompare.backends.library import Library
from ampcompare.backends.library_spec import library_spec
from ampcompare.backends.native import SPEC as NATIVE
from ampcompare.backends.options import float_dtype
from ampcompare.backends.roles import Roles
from ampcompare.backends.spec import ContractTestArm, Options

LIBRARY = Library(("mmengine.optim",), ("mmengine",), "pip install mmengine", extra="mmengine")


def _script_lines(asked: str) -> tuple[str, ...]:
    name, dtype = ("OptimWrapper", "") if asked == "float32" else ("AmpOptimWrapper", f', dtype="{asked}"')
    return (
        f"from mmengine.optim import {name}",
        f"wrapper = {name}(optimizer=optimizer, clip_grad=dict(max_norm=1.0){dtype})",
        "with wrapper.optim_context(model):",
        "    loss = criterion(model(x), y)",
        "wrapper.update_params(loss)  # backward, clip, step, zero_grad",
    )


def _roles_for_options(options: Options) -> Roles | None:
    if options["dtype"] != "bfloat16":
        return None  # those of ampcompare's own arm
    scaled = NATIVE.roles({"dtype": "float16"})
    return None if scaled is None else replace(scaled, products="bf16")


SPEC = library_spec(
    "mmengine, as mmcls trains",
    LIBRARY,
    summary="mmengine's OptimWrapper (fp32) and AmpOptimWrapper (fp16, bf16), as mmcls uses them",
    implementation="mmengine:MMEngine",
    option="dtype",
    arms={"float32": "fp32", "float16": "native:fp16", "bfloat16": "native:bf16"},
    does=(
        ("casts", "AmpOptimWrapper: autocast around forward pass and loss; OptimWrapper: none"),
        ("loss scale", "AmpOptimWrapper: dynamic, by torch's GradScaler, in bf16 too; OptimWrapper: none"),
        ("many optimizers", "refused with AmpOptimWrapper: each has its own scaler"),
    ),
    script=_script_lines,
    read=float_dtype,
    roles=_roles_for_options,
    contract=(ContractTestArm("mmengine:fp32"),),
)
