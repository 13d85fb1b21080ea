"""From settings to an optimizer: its class, its arguments, and parameter groups with their own rates and decays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.settings.recipe import OptimizerConfig
from ampcompare.tensors.skippable_step import skip_on_device
from ampcompare.training.layer_rates import LayerRates
from ampcompare.training.optimizer_arguments import optimizer_arguments
from ampcompare.training.optimizer_class import load_optimizer

__all__ = ["make_optimizer", "param_groups"]

MAX_NAMED = 3


def make_optimizer(config: OptimizerConfig, model: nn.Module, *, engine: str | None = None) -> Optimizer:
    """Build an optimizer over all parameters of `model`.

    Args:
        engine: the implementation of `apex.amp` that runs, if any; "nvidia" makes the optimizers of Apex genuine.

    Raises:
        BackendUnavailable: the package of the optimizer is not installed, or cannot be imported.
        ConfigError: a group that no parameter belongs to, or an argument that the optimizer does not take.
        UnsupportedCombination: the optimizer, or torch's fused kernels, do not support a parameter.
    """
    factory = load_optimizer(config.name, engine)
    arguments = optimizer_arguments(config, factory)
    groups = param_groups(config, model)
    if "weight_decay" not in arguments:
        groups = [{name: value for name, value in group.items() if name != "weight_decay"} for group in groups]
    if config.implementation == "fused":  # torch would raise at the first step only
        for name, param in model.named_parameters():
            if not param.is_floating_point():
                raise UnsupportedCombination(
                    f"a fused optimizer needs floating-point parameters, and {name} is {param.dtype}; use "
                    "--optimizer-implementation foreach"
                )
    optimizer = _built(config.name, factory, groups, arguments, model)
    if config.skip_on_device:
        try:
            skip_on_device(optimizer)
        except TypeError as error:
            raise UnsupportedCombination(f"{error}; leave out skip_on_device") from None
    if config.layer_lr != "none":
        if not all("weight_decay" in group for group in optimizer.param_groups):
            raise UnsupportedCombination(
                f"layer_lr {config.layer_lr} applies the weight decay itself, but {config.name} has none; use another "
                f"optimizer"
            )
        LayerRates(config.trust_coefficient, clip=config.layer_lr == "larc").attach(optimizer)
    return optimizer


def _built(
    name: str,
    factory: Callable[..., Any],
    groups: list[dict[str, Any]],
    arguments: dict[str, Any],
    model: nn.Module,
) -> Optimizer:
    """Call the factory.

    Raises:
        ConfigError: it refuses an argument, or returns something else than an optimizer.
        UnsupportedCombination: it refuses parameters; the message names them.
    """
    try:
        optimizer = factory(groups, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        refused = [
            f"{param_name} of shape {list(param.shape)}"
            for param_name, param in model.named_parameters()
            if not _takes(factory, param, arguments)
        ]
        if refused and len(refused) < len(list(model.parameters())):
            more = f" and {len(refused) - MAX_NAMED} more" if len(refused) > MAX_NAMED else ""
            raise UnsupportedCombination(
                f"optimizer {name} does not support {', '.join(refused[:MAX_NAMED])}{more} ({text}); use another "
                f"optimizer, or your own that passes these parameters to another one"
            ) from error
        raise ConfigError(f"optimizer {name} cannot be built: {text}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer {name} is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    return optimizer


def _takes(factory: Callable[..., Any], param: Tensor, arguments: dict[str, Any]) -> bool:
    try:
        factory([torch.nn.Parameter(torch.empty_like(param))], **arguments)
    except (ValueError, TypeError, RuntimeError):
        return False
    return True


def param_groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters of `model` by learning rate and weight decay, in the model's order; one group by default.

    A parameter belongs to the first of `config.groups` whose pattern matches its name. If that group sets no weight
    decay, norms and biases have the decay that is set for them, if any.

    Raises:
        ConfigError: a pattern matches no name.
    """
    norms = {id(param) for module in model.modules() if _is_norm(module) for param in module.parameters(recurse=False)}
    unmatched = set(range(len(config.groups)))
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, param in model.named_parameters():
        decay = config.weight_decay
        if id(param) in norms and config.norm_weight_decay is not None:
            decay = config.norm_weight_decay
        elif name.endswith("bias") and config.bias_weight_decay is not None:
            decay = config.bias_weight_decay
        factor = 1.0
        for index, group in enumerate(config.groups):
            if fnmatchcase(name, group.match):
                unmatched.discard(index)
                factor = group.lr_factor
                decay = decay if group.weight_decay is None else group.weight_decay
                break
        groups.setdefault((config.lr * factor, decay), []).append(param)
    for index in sorted(unmatched):
        raise ConfigError(
            f"recipe.optimizer.groups[{index}] matches no parameter left to it: {config.groups[index].match!r}; "
            f"names look like {', '.join(_some_names(model))}"
        )
    return [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()]


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__  # norms of torch, Apex and models share this word, but no base class


def _some_names(model: nn.Module) -> Iterator[str]:
    names = [name for name, _ in model.named_parameters()]
    yield from dict.fromkeys((names[0], names[len(names) // 2], names[-1]))
