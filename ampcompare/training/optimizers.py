"""From settings to a torch optimizer: parameter groups with their own rates and decays, and layer-wise adaptation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.errors import ConfigError, UnsupportedCombination
from ampcompare.settings.config import OptimizerConfig
from ampcompare.tensors.skippable_step import skip_on_device

__all__ = ["make_optimizer", "param_groups"]

KINDS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def make_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """Build a torch optimizer over all parameters of `model`.

    Raises:
        ConfigError: a group that no parameter belongs to.
        UnsupportedCombination: torch's fused kernels do not support a parameter.
    """
    groups = param_groups(config, model)
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.nesterov}
    else:
        options |= {"betas": config.betas, "eps": config.eps}
    if config.implementation != "default":
        options[config.implementation] = True
    if config.implementation == "fused":  # torch would raise at the first step only
        for name, param in model.named_parameters():
            if not param.is_floating_point():
                raise UnsupportedCombination(
                    f"a fused optimizer needs floating-point parameters, and {name} is {param.dtype}; use "
                    "--optimizer-implementation foreach"
                )
    optimizer = KINDS[config.name](groups, **options)
    if config.skip_on_device:
        skip_on_device(optimizer)
    if config.layer_lr != "none":
        _LayerRates(config.trust_coefficient, clip=config.layer_lr == "larc").attach(optimizer)
    return optimizer


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


class _LayerRates:
    """LARC or LARS on any optimizer, by hooks: they adapt gradients when the optimizer steps, after unscaling.

    A step that an overflow skips adapts nothing. Under O2 the hooks adapt the gradients of the fp32 masters.
    """

    def __init__(self, trust_coefficient: float, *, clip: bool) -> None:
        self._trust_coefficient = trust_coefficient
        self._clip = clip
        self._decays: list[float] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Adapt the gradients of every step of `optimizer`."""
        larc = importlib.import_module("ampcompare.apex.parallel.LARC").LARC
        self._rates = larc(optimizer, trust_coefficient=self._trust_coefficient, clip=self._clip)
        optimizer.register_step_pre_hook(self._adapt)
        optimizer.register_step_post_hook(self._restore_decays)

    @torch.no_grad()
    def _adapt(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            self._rates.adapt(group, decay)
            group["weight_decay"] = 0.0  # already part of the adapted gradients

    def _restore_decays(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            group["weight_decay"] = decay
