"""The keyword arguments of an optimizer, from the settings that it takes and from `recipe.optimizer.args`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ampcompare.base.errors import ConfigError, UnsupportedCombination, did_you_mean
from ampcompare.settings.recipe import OWN_SETTINGS, OptimizerConfig

__all__ = ["optimizer_arguments"]

SETTINGS = ("momentum", "nesterov", "betas", "eps", "weight_decay")
DECAYS = ("norm_weight_decay", "bias_weight_decay")


def optimizer_arguments(config: OptimizerConfig, factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments to call `factory` with, besides the parameters.

    A setting at its default is passed if the optimizer takes it, and left out otherwise.

    Raises:
        ConfigError: a setting or an argument was given that the optimizer does not take.
        UnsupportedCombination: it has no implementation of that kind.
    """
    parameters = _parameters(config.name, factory)
    given = {name for name in SETTINGS if _differs(config, name)}
    arguments: dict[str, Any] = {"lr": config.lr}
    for name in SETTINGS:
        value = getattr(config, name)
        if name in config.args:
            if name in given:
                raise ConfigError(f"recipe.optimizer.{name} and args.{name} are the same; give only one of them")
        elif name in parameters and _fits(value, parameters[name].default):
            arguments[name] = value
        elif name in given:
            _refuse_setting(config.name, name, value, parameters)
    if "weight_decay" not in arguments:
        for name in DECAYS:
            if getattr(config, name):
                _refuse_setting(config.name, name, getattr(config, name), parameters)
        if any(group.weight_decay for group in config.groups):
            _refuse_setting(config.name, "groups.weight_decay", "set", parameters)
    if config.implementation != "default":
        if config.implementation not in parameters:
            raise UnsupportedCombination(
                f"optimizer {config.name} has no implementation {config.implementation}; leave out "
                "--optimizer-implementation"
            )
        arguments[config.implementation] = True
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [name for name in parameters if name not in ("self", *OWN_SETTINGS)]
    for name, value in config.args.items():
        if name not in known and not open_ended:
            raise ConfigError(f"optimizer {config.name} has no argument {name!r}; {did_you_mean(name, known)}")
        arguments[name] = value
    return arguments


def _parameters(name: str, factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    # Of a class its constructor: a `__new__` that passes everything on would hide it.
    called = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):  # a compiled callable: it is called with the rate alone
        return {}
    kinds = {parameter.kind for parameter in parameters.values()}
    if "lr" not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(f"optimizer {name} takes no lr, which every run sets; name a function with an lr argument")
    return parameters


def _differs(config: OptimizerConfig, name: str) -> bool:
    return bool(getattr(config, name) != OptimizerConfig.model_fields[name].default)


def _fits(value: Any, default: Any) -> bool:
    """Return whether an argument means the same as the setting: its default is of the same kind."""
    if default is inspect.Parameter.empty:
        return True
    if isinstance(value, tuple):
        return isinstance(default, tuple | list) and len(default) == len(value)
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(default, int | float)


def _refuse_setting(optimizer: str, name: str, value: Any, parameters: Mapping[str, Any]) -> None:
    takes = ", ".join(name for name in SETTINGS if name in parameters) or "none of them"
    shown = list(value) if isinstance(value, tuple) else value
    raise ConfigError(
        f"recipe.optimizer.{name} is {shown}, but optimizer {optimizer} does not take it; leave it out. Of "
        f"{', '.join(SETTINGS)} it takes {takes}"
    )
