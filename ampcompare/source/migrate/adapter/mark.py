"""How the adapter is known in any file, by its mark, and what it offers of Apex."""

import sys
from types import ModuleType

MARK = "Apex's amp on torch alone"  # with which the docstring of every copy begins
# What the adapter has, by the module of Apex that shows it.
OFFERED = {
    "amp": frozenset({
        "initialize", "scale_loss", "master_params", "state_dict", "load_state_dict", "disable_casts", "half_function",
        "float_function", "promote_function", "register_half_function", "register_float_function",
        "register_promote_function", "_amp_state",
    }),
    "parallel": frozenset({"DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"}),
    "optimizers": frozenset({"FusedAdam", "FusedSGD"}),
    "normalization": frozenset({"FusedLayerNorm"}),
    "fp16_utils": frozenset(),
}  # fmt: skip
# Modules of Apex whose content the adapter has itself, and a class that no other module shows.
INNER = {
    **dict.fromkeys((
        "apex.amp.amp", "apex.amp.frontend", "apex.amp.handle", "apex.amp.scaler", "apex.parallel.distributed",
        "apex.parallel.optimized_sync_batchnorm", "apex.parallel.sync_batchnorm", "apex.optimizers.fused_adam",
        "apex.optimizers.fused_sgd", "apex.normalization.fused_layer_norm",
    ), ""),
    "apex.amp.scaler.LossScaler": "LossScaler",
}  # fmt: skip
# By these names the adapter is an attribute of itself.
ITSELF = frozenset({*OFFERED, "scaler"})
_HEAD_BYTES = 4096  # a project may put its license above the docstring


def has_adapter_mark(path: str) -> bool:
    """Return whether a Python file is the adapter, whatever its name; False if it cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    before, mark, _ = head.partition(MARK.encode())
    return bool(mark) and before.rstrip().endswith((b'"""', b"'''"))


def loaded_adapters() -> list[ModuleType]:
    """Return the modules of this process that are the adapter; one that several names lead to stands once."""
    modules = dict.fromkeys(each for each in list(sys.modules.values()) if type(each) is ModuleType)
    return [each for each in modules if str(each.__doc__).startswith(MARK)]
