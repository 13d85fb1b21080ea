"""Cut a model and its optimizers into shards, one for each rank, by torch's `fully_shard` (FSDP2).

What is a unit, whose weights are gathered and freed together:

* each child of the outermost `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`: the repeated blocks of a model;
* each direct child, in a model without them;
* inside of a unit, each module that computes in fp32 while the rest does not;
* the model itself, with all that is left.

A module that shares a parameter with one outside it is not a unit: both are left to the model.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ampcompare.base.errors import BackendUnavailable, PreparationError
from ampcompare.base.tensors.sharded import shard_like
from ampcompare.base.tensors.skippable_step import is_step_skippable

LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class ShardTypes:
    """The types of `torch.distributed.fsdp.MixedPrecisionPolicy`; None for those of the weights."""

    param: torch.dtype | None = None  # of gathered weights and what they compute; batch norms stay in fp32
    reduce: torch.dtype | None = None  # in which gradients are averaged
    output: torch.dtype | None = None  # of what the model returns


def shard_models(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    types: ShardTypes = ShardTypes(),
    fp32_modules: Sequence[nn.Module] = (),
) -> None:
    """Replace the parameters of models, and those of their optimizers with their state, by shards, in place.

    Parameters and buffers of rank 0 are those of all ranks, as under torch's DDP. Every rank calls it. Modules in
    `fp32_modules` compute in fp32.
    """
    _refuse_unshardable(models, optimizers)
    names = {id(param): (number, name) for number, name, param in _named_parameters(models)}
    for model in models:
        _shard_model(model, types, fp32_modules)
    sharded = {(number, name): param for number, name, param in _named_parameters(models)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            old = group["params"]
            group["params"] = [sharded[names[id(param)]] for param in old]
            for before, after in zip(old, group["params"], strict=True):
                if before in optimizer.state:
                    state = optimizer.state.pop(before)
                    optimizer.state[after] = {name: shard_like(value, after) for name, value in state.items()}


def _refuse_unshardable(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse what cannot be sharded here.

    Raises:
        PreparationError: there is no process group, or an optimizer steps what shards cannot replace.
        BackendUnavailable: this torch shards on no CPU.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PreparationError(
            "weights are sharded over a process group, but there is none; call torch.distributed.init_process_group "
            "first, even with one process"
        )
    params = [param for _, _, param in _named_parameters(models)]
    is_old = torch.torch_version.TorchVersion(torch.__version__) < "2.7"
    if is_old and any(param.device.type == "cpu" for param in params):
        raise BackendUnavailable(
            f"FSDP2 shards weights on a CPU from torch 2.7 on, and this is {torch.__version__}: "
            "pip install -U torch torchvision"
        )
    known = set(map(id, params))
    held = (
        param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]
    )
    if any(id(param) not in known for param in held):
        raise PreparationError(
            "an optimizer holds a tensor that is not a parameter of the models, such as a master weight; sharding "
            "replaces parameters only"
        )
    if any(is_step_skippable(optimizer) for optimizer in optimizers):
        raise PreparationError(
            "a step that is skipped on the device copies whole weights; leave out skip_on_device"
        )


def _named_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield the parameters of models, each with the number of its model and its name there."""
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            yield number, name, param


def units_to_gather(model: nn.Module) -> list[nn.Module]:
    """Return the parts of `model` that are gathered one after the other, without the model itself."""
    found = [child for child in _children_of_outermost_lists(model) if _can_be_gathered_unit(child)]
    if not found and not isinstance(model, LISTS):
        found = [child for child in model.children() if _can_be_gathered_unit(child)]
    holders = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    alone = []
    for child in dict.fromkeys(found):
        inside = Counter(id(param) for _, param in child.named_parameters(remove_duplicate=False))
        if all(holders[key] == count for key, count in inside.items()):
            alone.append(child)
    return alone


def _children_of_outermost_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost lists of modules."""
    for child in [module] if isinstance(module, LISTS) else module.children():
        yield from child.children() if isinstance(child, LISTS) else _children_of_outermost_lists(child)


def _can_be_gathered_unit(module: nn.Module) -> bool:
    """Return whether a module can be gathered when it is called."""
    is_called = type(module).forward is not nn.Module.forward
    return is_called and any(param.requires_grad for param in module.parameters())


def _shard_model(model: nn.Module, types: ShardTypes, fp32_modules: Sequence[nn.Module]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    device = next(model.parameters()).device.type
    # The root is freed after its forward pass too: what reads the weights after an evaluation finds shards.
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    inner = MixedPrecisionPolicy(param_dtype=types.param, reduce_dtype=types.reduce)
    if types.param is not None:
        wide = MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=types.reduce, output_dtype=types.param
        )
        for module in _modules_in_fp32(model, fp32_modules):
            fully_shard(module, mp_policy=wide, **options)
    for unit in units_to_gather(model):
        if not is_sharded_model(unit):
            fully_shard(unit, mp_policy=inner, **options)
    outer = MixedPrecisionPolicy(
        param_dtype=types.param, reduce_dtype=types.reduce, output_dtype=types.output
    )
    fully_shard(model, mp_policy=outer, **options)


def _modules_in_fp32(model: nn.Module, kept: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of `model` that compute in fp32: those kept, and batch norms outside of them."""
    inside = {id(module) for each in kept for module in each.modules()}
    own = [module for module in model.modules() if any(module is each for each in kept)]
    others = [module for module in model.modules() if id(module) not in inside]
    norms = [module for module in others if isinstance(module, _BatchNorm) and _can_be_gathered_unit(module)]
    return [*own, *norms]


def is_sharded_model(module: nn.Module) -> bool:
    """Return whether `fully_shard` has been called on `module`."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)
