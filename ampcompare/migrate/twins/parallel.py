"""Rewrite `DistributedDataParallel` of Apex for that of torch, whose arguments are others."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ampcompare.migrate.edits import Edits
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.sites import Unsure
from ampcompare.migrate.read.tree import Tree

__all__ = ["DDP", "rewrite_ddp"]

DDP = "torch.nn.parallel.DistributedDataParallel"
DDP_ARGUMENTS = (
    "module",
    "message_size",
    "delay_allreduce",
    "shared_param",
    "allreduce_trigger_params",
    "retain_allreduce_buffers",
    "allreduce_always_fp32",
    "num_allreduce_streams",
    "allreduce_communicators",
    "gradient_average",
    "gradient_predivide_factor",
    "gradient_average_split_factor",
    "prof",
)
BUFFERS = (
    "torch's DistributedDataParallel sends the buffers of rank 0 before each forward pass, Apex's does not; "
    "broadcast_buffers=False keeps them apart"
)
SHARDS = (
    "each rank holds all weights in fp32 now, which takes more memory than O2; if that is too much, "
    "torch.distributed.fsdp.fully_shard (FSDP2) splits weights, gradients and optimizer state over the ranks"
)


def rewrite_ddp(
    tree: Tree,
    names: Names,
    edits: Edits,
    torch: str,
    call: ast.Call,
    note: Callable[[ast.AST, str], None],
    *,
    core: bool,
) -> None:
    """Rewrite the arguments of a call.

    Args:
        torch: the name by which the module knows torch.
        note: gets a remark on a node.
        core: whether `amp.initialize` is rewritten too.

    Raises:
        Unsure: an argument has no equivalent, or cannot be seen.
    """
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        raise Unsure(call, "the arguments of Apex's DistributedDataParallel are passed as * or **")
    bound = dict(zip(DDP_ARGUMENTS, call.args, strict=False))
    bound |= {str(each.arg): each.value for each in call.keywords}
    known = {name: value for name, value in bound.items() if name in DDP_ARGUMENTS}
    if len(known) < len(bound):  # torch's own arguments, which Apex would refuse
        return
    note(call, BUFFERS)
    if core and _halves_weights(names):
        note(call, SHARDS)
    if len(bound) == 1:
        return
    average = known.get("gradient_average")
    if average is not None and not (isinstance(average, ast.Constant) and average.value is True):
        raise Unsure(call, "gradient_average=False has no equivalent: torch averages; scale the loss by the world size")
    kept = any(isinstance(each, ast.Attribute) and each.attr == "allreduce_buffers" for each in tree.nodes)
    refused = ("allreduce_communicators", "allreduce_trigger_params", *(["retain_allreduce_buffers"] if kept else []))
    for name in refused:
        value = known.get(name)
        if value is not None and not (isinstance(value, ast.Constant) and not value.value):
            raise Unsure(call, f"{name} has no equivalent in torch's DistributedDataParallel")
    arguments = [tree.source(known["module"])] if "module" in known else []
    delay = known.get("delay_allreduce")
    if delay is not None and not (isinstance(delay, ast.Constant) and not delay.value):
        arguments.append(f"find_unused_parameters={tree.source(delay)}")
    edits.replace(call, f"{tree.source(call.func)}({', '.join(arguments)})")
    if isinstance(call.func, ast.Attribute):
        edits.replace(call, f"{torch}{DDP.removeprefix('torch')}({', '.join(arguments)})")
    dropped = sorted(set(known) - {"module", "delay_allreduce"})
    if dropped:
        note(call, f"{', '.join(dropped)} of Apex's DistributedDataParallel has no equivalent and is left out")


def _halves_weights(names: Names) -> bool:
    """Return whether a module initializes at O2 or O3, whose weights take half the memory."""
    for use, meaning in names.uses:
        call = names.tree.parent(use)
        if meaning == "apex.amp.initialize" and isinstance(call, ast.Call):
            level = next((each.value for each in call.keywords if each.arg == "opt_level"), None)
            if isinstance(level, ast.Constant) and level.value in ("O2", "O3"):
                return True
    return False
