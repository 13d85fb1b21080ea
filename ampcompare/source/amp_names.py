"""The names of Apex and torch that mixed precision has, in one table for all that reads scripts."""

APEX = ("apex", "amp_C", "apex_C")
ROOTS = (*APEX, "torch")
ADAPTER = "torch_amp_adapter"  # the module as `migrate` writes it; a project may move or rename it
OPT_LEVELS = ("O0", "O1", "O2", "O3")
# Of `apex.amp`, as it is since 2019.
CORE = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
AUTOCASTS = frozenset({
    "torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast",
    "torch.xpu.amp.autocast", "torch.npu.amp.autocast",
})  # fmt: skip
SCALERS = frozenset({"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler"})
# The limit is their second argument.
CLIPS = frozenset(
    {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_norm", "torch.nn.utils.clip_grad_value_"}
)
WRAPPERS = frozenset({
    "torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel", "apex.parallel.DistributedDataParallel",
})  # fmt: skip
# What `from MODULE import *` binds.
STARS = {
    "apex": ("amp", "parallel", "optimizers", "normalization", "fp16_utils", "multi_tensor_apply"),
    "apex.fp16_utils": (
        "BN_convert_float",
        "DynamicLossScaler",
        "FP16Model",
        "FP16_Optimizer",
        "LossScaler",
        "clip_grad_norm",
        "convert_module",
        "convert_network",
        "master_params_to_model_params",
        "model_grads_to_master_grads",
        "network_to_half",
        "prep_param_lists",
        "to_python_float",
        "tofp16",
    ),
    "apex.amp": CORE,
    "apex.parallel": ("DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model"),
    "apex.optimizers": ("FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD", "FusedAdagrad"),
}
# All that `apex.normalization` has shown in any version.
NORMALIZATION = frozenset({
    "FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_layer_norm",
})  # fmt: skip
# Modules that hold what another one shows.
SHOWN_AS = {
    "torch.cuda.amp.autocast_mode.": "torch.cuda.amp.",
    "torch.cuda.amp.grad_scaler.": "torch.cuda.amp.",
    "torch.cpu.amp.autocast_mode.": "torch.cpu.amp.",
    "torch.cpu.amp.grad_scaler.": "torch.cpu.amp.",
    "torch.amp.autocast_mode.": "torch.amp.",
    "torch.amp.grad_scaler.": "torch.amp.",
    "torch.nn.utils.clip_grad.": "torch.nn.utils.",
    "apex.amp.frontend.": "apex.amp.",
    "apex.amp.handle.": "apex.amp.",
    "apex.parallel.distributed.": "apex.parallel.",
}


def public_full_name(name: str) -> str:
    """Return a full name by the module that shows it: `apex.amp.initialize` for `apex.amp.frontend.initialize`."""
    for inner, outer in SHOWN_AS.items():
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    return name


def is_in_adapter_module(full_name: str) -> bool:
    """Return whether a full name is of the adapter's module, in whatever package."""
    return ADAPTER in full_name.split(".")


def is_unknown_to_every_apex(name: str) -> bool:
    """Return whether a full name is one that no version of Apex has, so that its import fails everywhere."""
    module, _, last = name.rpartition(".")
    return module == "apex.normalization" and last not in NORMALIZATION
