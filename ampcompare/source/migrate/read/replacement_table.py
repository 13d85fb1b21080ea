"""What torch has in the place of parts of Apex, and what Apex has removed or kept."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerReplacement:
    """The twin of a fused optimizer.

    Attributes:
        torch: full name.
        arguments: those of Apex that torch has too, in the order of Apex.
        dropped: those that mean nothing in torch.
        added: arguments with the defaults of Apex, where those of torch differ.
    """

    torch: str
    arguments: tuple[str, ...]
    dropped: tuple[str, ...]
    added: tuple[tuple[str, str], ...] = ()


# What keeps its arguments: the import changes, or the chain of attributes.
IMPORTED = {
    "apex.parallel.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "apex.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "apex.parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "apex.parallel.optimized_sync_batchnorm.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "apex.parallel.sync_batchnorm.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "apex.parallel.ReduceOp": "torch.distributed.ReduceOp",
    "apex.parallel.convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "apex.normalization.FusedLayerNorm": "torch.nn.LayerNorm",
    "apex.normalization.fused_layer_norm.FusedLayerNorm": "torch.nn.LayerNorm",
    "apex.normalization.MixedFusedLayerNorm": "torch.nn.LayerNorm",
}

# Of these, what has the same arguments in torch, so that callers in other files need not change.
LAYERS = frozenset(name for name in IMPORTED if name.endswith(("LayerNorm", "SyncBatchNorm")))
# What Apex no longer has since May 2025.
REMOVED = ("apex.amp", "apex.parallel", "apex.fp16_utils", "apex.RNN", "apex.reparameterization")

ADAM = (
    "params",
    "lr",
    "bias_correction",
    "betas",
    "eps",
    "adam_w_mode",
    "weight_decay",
    "amsgrad",
    "set_grad_none",
)
OPTIMIZERS = {
    "FusedAdam": OptimizerReplacement(
        "torch.optim.AdamW", ADAM, ("bias_correction", "adam_w_mode", "set_grad_none"), (("weight_decay", "0.0"),)
    ),
    "FusedSGD": OptimizerReplacement(
        "torch.optim.SGD",
        ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum",
         "materialize_master_grads", "set_grad_none"),
        ("wd_after_momentum", "materialize_master_grads", "set_grad_none"),
    ),
    "FusedAdagrad": OptimizerReplacement(
        "torch.optim.Adagrad",
        ("params", "lr", "eps", "weight_decay", "set_grad_none", "adagrad_w_mode"),
        ("set_grad_none", "adagrad_w_mode"),
    ),
}  # fmt: skip

# Since when these have a fused kernel of CUDA, by torch's sources.
FUSED_SINCE = {
    "torch.optim.Adam": (1, 13),
    "torch.optim.AdamW": (2, 0),
    "torch.optim.SGD": (2, 3),
    "torch.optim.Adagrad": (2, 13),
}

DECORATORS = {"half_function": "float16", "float_function": "float32"}

# Parts that Apex removed at another time than amp, longest name first, each with when and what to take instead.
GONE = {
    "apex.contrib.gpu_direct_storage": ("in July 2026", "torch.cuda.gds"),
    "apex.contrib.multihead_attn": ("in July 2026", "torch.nn.MultiheadAttention"),
    "apex.contrib.fmha": ("in July 2026", "torch.nn.functional.scaled_dot_product_attention"),
    "apex.transformer": ("in January 2026", "Megatron-Core"),
    "apex.pyprof": ("before 25.05", "torch.profiler"),
}
# Options of layers that torch's do not take.
LAYER_OPTIONS = frozenset({"channel_last", "fuse_relu", "memory_efficient"})
# Parts of Apex that its current version still has, and torch has not.
STAYS = (
    "apex.contrib.", "apex.mlp.", "apex.fused_dense.", "apex.optimizers.FusedLAMB",
    "apex.optimizers.FusedMixedPrecisionLamb", "apex.optimizers.FusedNovoGrad", "apex.optimizers.fused_lamb",
    "apex.normalization.", "apex.multi_tensor_apply.", "apex.__file__", "apex.__version__", "amp_C",
    "apex_C",
)  # fmt: skip
# Those of them that a private function of torch can stand for.
STAYS_WITH_TWIN = {
    "apex_C.flatten": "torch._utils._flatten_dense_tensors",
    "apex_C.unflatten": "torch._utils._unflatten_dense_tensors",
}
