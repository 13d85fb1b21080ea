"""From settings to a torch optimizer: groups with rates and decays of their own, and rates adapted layer by layer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.config import OptimizerConfig
from ampcompare.errors import ConfigError

__all__ = ["make_optimizer", "param_groups"]


def make_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """Build a torch optimizer with torch's default implementation, over all parameters of `model`.

    Raises:
        ConfigError: a group that no parameter belongs to.
    """
    groups = param_groups(config, model)
    optimizer: Optimizer
    if config.name == "sgd":
        optimizer = torch.optim.SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
        )
    else:
        kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
        optimizer = kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
    if config.layer_lr != "none":
        _LayerRates(config.trust_coefficient, clip=config.layer_lr == "larc").attach(optimizer)
    return optimizer


def param_groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters of `model` by learning rate and weight decay, in the model's order; one group by default.

    A parameter belongs to the first of `config.groups` whose pattern its name matches. Where that one says nothing of
    weight decay, norms and biases have their own, if they are given any.

    Raises:
        ConfigError: a pattern that matches no name.
    """
    norms = {id(param) for module in model.modules() if _is_norm(module) for param in module.parameters(recurse=False)}
    idle = set(range(len(config.groups)))
    found: dict[tuple[float, float], list[Tensor]] = {}
    for name, param in model.named_parameters():
        decay = config.weight_decay
        if id(param) in norms and config.norm_weight_decay is not None:
            decay = config.norm_weight_decay
        elif name.endswith("bias") and config.bias_weight_decay is not None:
            decay = config.bias_weight_decay
        factor = 1.0
        for place, group in enumerate(config.groups):
            if fnmatchcase(name, group.match):
                idle.discard(place)
                factor = group.lr_factor
                decay = decay if group.weight_decay is None else group.weight_decay
                break
        found.setdefault((config.lr * factor, decay), []).append(param)
    for place in sorted(idle):
        raise ConfigError(
            f"recipe.optimizer.groups[{place}] matches no parameter left to it: {config.groups[place].match!r}; "
            f"names look like {', '.join(_some_names(model))}"
        )
    return [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in found.items()]


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__  # torch's, Apex's and those of models share the word, and no base class


def _some_names(model: nn.Module) -> Iterator[str]:
    names = [name for name, _ in model.named_parameters()]
    yield from dict.fromkeys((names[0], names[len(names) // 2], names[-1]))


class _LayerRates:
    """LARC or LARS on any optimizer, by hooks: gradients are adapted when the optimizer steps, unscaled by then.

    A step that an overflow skips adapts nothing. Under O2 the hooks see the fp32 masters.
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
        optimizer.register_step_post_hook(self._put_decays_back)

    @torch.no_grad()
    def _adapt(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            self._rates.adapt(group, decay)
            group["weight_decay"] = 0.0  # it is in the adapted gradients

    def _put_decays_back(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            group["weight_decay"] = decay
