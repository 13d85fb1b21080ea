"""Every call of Apex with its twin in torch: the one table of `migrate` and of its page."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DECORATORS",
    "IMPORTED",
    "LAYERS",
    "OPTIMIZERS",
    "REMOVED",
    "STAYS",
    "TABLE",
    "Optimizer",
    "Row",
    "markdown_table",
]


@dataclass(frozen=True)
class Row:
    """A row of the table in docs/migrating.md.

    Attributes:
        apex: the call, as code.
        torch: its twin, as code or in words.
        migrate: what `migrate` does: "rewrites", "rewrites, with a note" or "leaves".
        remark: what differs.
    """

    apex: str
    torch: str
    migrate: str
    remark: str = ""


@dataclass(frozen=True)
class Optimizer:
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


REWRITES, NOTED, STAYING = "rewrites", "rewrites, with a note", "leaves"

# What keeps its arguments: the import changes, or the chain of attributes.
IMPORTED = {
    "apex.parallel.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "apex.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "apex.parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "apex.parallel.optimized_sync_batchnorm.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "apex.parallel.convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "apex.parallel.ReduceOp": "torch.distributed.ReduceOp",
    "apex.normalization.FusedLayerNorm": "torch.nn.LayerNorm",
    "apex.normalization.fused_layer_norm.FusedLayerNorm": "torch.nn.LayerNorm",
    "apex.normalization.MixedFusedLayerNorm": "torch.nn.LayerNorm",
}

# Of these, what has the same arguments in torch, so that callers in other files need not change.
LAYERS = frozenset(name for name in IMPORTED if name.endswith(("LayerNorm", "SyncBatchNorm")))
# What Apex no longer has since May 2025.
REMOVED = ("apex.amp", "apex.parallel", "apex.fp16_utils", "apex.RNN", "apex.reparameterization")

ADAM = ("params", "lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none")
OPTIMIZERS = {
    "FusedAdam": Optimizer(
        "torch.optim.AdamW", ADAM, ("bias_correction", "adam_w_mode", "set_grad_none"), (("weight_decay", "0.0"),)
    ),
    "FusedSGD": Optimizer(
        "torch.optim.SGD",
        ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum",
         "materialize_master_grads", "set_grad_none"),
        ("wd_after_momentum", "materialize_master_grads", "set_grad_none"),
    ),
    "FusedAdagrad": Optimizer(
        "torch.optim.Adagrad",
        ("params", "lr", "eps", "weight_decay", "set_grad_none", "adagrad_w_mode"),
        ("set_grad_none", "adagrad_w_mode"),
    ),
}  # fmt: skip

DECORATORS = {"half_function": "float16", "float_function": "float32"}

# Parts that Apex removed later than amp, longest name first, each with when and what torch has instead.
GONE = {
    "apex.contrib.gpu_direct_storage": ("July 2026", "torch.cuda.gds"),
    "apex.contrib.multihead_attn": ("July 2026", "torch.nn.MultiheadAttention"),
    "apex.contrib.fmha": ("July 2026", "torch.nn.functional.scaled_dot_product_attention"),
    "apex.transformer": ("January 2026", "Megatron-Core"),
}
# Parts of Apex that its current version still has, and torch has not.
STAYS = (
    "apex.contrib.",
    "apex.mlp.",
    "apex.fused_dense.",
    "apex.optimizers.FusedLAMB",
    "apex.optimizers.FusedMixedPrecisionLamb",
    "apex.optimizers.FusedNovoGrad",
    "apex.optimizers.fused_lamb",
    "apex.normalization.",
    "apex.multi_tensor_apply.",
    "apex.pyprof",
    "apex.__file__",
    "apex.__version__",
    "amp_C",
    "apex_C",
)

TABLE = (
    Row('amp.initialize(model, optimizer, opt_level="O1")', 'scaler = torch.amp.GradScaler("cuda")', REWRITES,
        "the forward pass runs under `torch.autocast`; functions with other casts are listed"),
    Row('initialize(..., opt_level="O0")', 'GradScaler("cuda", enabled=False)', REWRITES, "autocast is off too"),
    Row('initialize(..., opt_level="O2")', "as for O1", NOTED, "[no equivalent](#o2-has-no-native-equivalent)"),
    Row("initialize(..., opt_level=args.opt_level)", 'GradScaler("cuda", enabled=args.opt_level != "O0")', NOTED,
        "O2 and O3 become autocast"),
    Row("initialize(..., enabled=args.amp)", 'GradScaler("cuda", enabled=args.amp)', REWRITES),
    Row('initialize(..., loss_scale="dynamic")', "the default", REWRITES, "65536, factors 2 and ½, 2000 steps"),
    Row("initialize(..., loss_scale=128.0)", 'GradScaler("cuda", init_scale=128.0)', NOTED,
        "with `scaler.update(new_scale=128.0)`; it skips overflows, which Apex's static scale does not"),
    Row("initialize(..., max_loss_scale=...)", "none", NOTED, "`GradScaler` has neither ceiling nor floor"),
    Row("initialize(..., keep_batchnorm_fp32=...)", "none needed", REWRITES, "weights stay fp32 under autocast"),
    Row("initialize(..., cast_model_outputs=...)", "cast the output yourself", NOTED),
    Row("initialize(..., num_losses=2)", "a GradScaler for each group of losses that shares no optimizer", REWRITES,
        "[several losses](#several-losses-models-and-optimizers)"),
    Row("with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
        "scaler.scale(loss).backward()", REWRITES),
    Row("scale_loss(..., delay_unscale=True)", "none needed", REWRITES, "[accumulation](#accumulation)"),
    Row("optimizer.step()", "scaler.step(optimizer); scaler.update()", REWRITES,
        "one `update()` after the last step of optimizers that share a scaler"),
    Row("clip_grad_norm_(amp.master_params(optimizer), 1.0)",
        "scaler.unscale_(optimizer); clip_grad_norm_(model.parameters(), 1.0)", REWRITES, "[clipping](#clipping)"),
    Row("amp.state_dict()", "scaler.state_dict()", REWRITES, "under the same key of the checkpoint"),
    Row("amp.load_state_dict(state)", "scaler.load_state_dict(state)", REWRITES, "and a branch for files of Apex"),
    Row("with amp.disable_casts():", 'with torch.autocast("cuda", enabled=False):', REWRITES),
    Row("@amp.half_function", "@cast_inputs(torch.float16)", REWRITES,
        "a function that is put into the file; `torch.amp.custom_fwd` on a method of `torch.autograd.Function`"),
    Row("@amp.float_function", "@cast_inputs(torch.float32)", REWRITES, "likewise"),
    Row('amp.register_half_function(torch, "einsum")', "none needed", REWRITES, "where autocast has fp16 too"),
    Row('amp.register_float_function(torch, "sigmoid")',
        'torch.sigmoid = cast_inputs(torch.float32, autocast=False)(torch.sigmoid)', NOTED,
        "for the whole process, as in Apex; a class is left"),
    Row("amp._amp_state.loss_scalers[0].loss_scale()", "scaler.get_scale()", REWRITES),
    Row("apex.parallel.DistributedDataParallel(model, delay_allreduce=True)",
        "torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)", NOTED,
        "buckets and streams have other options; buffers are broadcast from rank 0"),
    Row("apex.parallel.convert_syncbn_model(model)", "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)", REWRITES),
    Row("apex.parallel.create_syncbn_process_group(8)", "torch.distributed.new_subgroups(8)[0]", REWRITES),
    Row("apex.parallel.SyncBatchNorm", "torch.nn.SyncBatchNorm", REWRITES),
    Row("LARC(optimizer)", "none", STAYING, "by hand: `import ampcompare.apex as apex` has it"),
    Row("apex.optimizers.FusedAdam(params)", "torch.optim.AdamW(params, weight_decay=0.0, fused=True)", REWRITES,
        "`adam_w_mode=False` becomes `Adam`"),
    Row("cls = FusedAdam; cls(params, lr=lr)", "functools.partial(torch.optim.AdamW, weight_decay=0.0, fused=True)",
        REWRITES, "also in a table or a conditional, where every later call can be seen"),
    Row("apex.optimizers.FusedAdam(params, bias_correction=False)", "none", STAYING, "so does a subclass of it"),
    Row("apex.optimizers.FusedSGD(params, lr)", "torch.optim.SGD(params, lr, fused=True)", REWRITES),
    Row("apex.optimizers.FusedAdagrad(params)", "torch.optim.Adagrad(params, fused=True)", REWRITES),
    Row("apex.optimizers.FusedLAMB, FusedNovoGrad", "none", STAYING, "current Apex still has them"),
    Row("apex.normalization.FusedLayerNorm", "torch.nn.LayerNorm", REWRITES),
    Row("apex.normalization.FusedRMSNorm", "torch.nn.RMSNorm", REWRITES, "with `eps=1e-5`, the default of Apex"),
    Row("apex.fp16_utils.to_python_float(t)", "t.item()", REWRITES),
    Row("apex.fp16_utils.network_to_half(model)",
        'model.forward = torch.autocast("cuda", dtype=torch.float16)(model.forward)', NOTED,
        "in a file that only evaluates; left in one that trains"),
    Row("amp.init(enabled=True)", 'torch.autocast("cuda", dtype=torch.float16).__enter__()', REWRITES,
        "in a file that only evaluates; left in one that trains"),
    Row("FP16_Optimizer(optimizer)", "none", STAYING, "by hand: keep the model in fp32, use autocast and GradScaler"),
    Row("apex.contrib, apex.mlp, amp_C", "none", STAYING, "current Apex still has them, except the next row"),
    Row("apex.transformer; apex.contrib.fmha, multihead_attn, gpu_direct_storage", "none", STAYING,
        "by hand: Apex removed the first in January 2026, the others in July 2026"),
)  # fmt: skip


def markdown_table() -> str:
    """Return the table of docs/migrating.md."""
    lines = ["| Apex | torch | `migrate` | remark |", "|---|---|---|---|"]
    for row in TABLE:
        twin = row.torch if row.torch.startswith(("none", "as for", "the default", "a ", "cast ")) else f"`{row.torch}`"
        lines.append(f"| `{row.apex}` | {twin} | {row.migrate} | {row.remark} |")
    return "\n".join(lines) + "\n"
