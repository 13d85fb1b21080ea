"""The class of an optimizer, by the name that settings hold."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ampcompare.base.environment.quiet_import import quiet_import
from ampcompare.base.errors import BackendUnavailable, ConfigError, did_you_mean
from ampcompare.settings.optimizers import APEX, LIBRARIES, OWN_APEX, optimizer_path, require_optimizer
from ampcompare.tasks.factory import resolve_factory

__all__ = ["load_optimizer"]


def load_optimizer(name: str, engine: str | None = None) -> Callable[..., Any]:
    """Import the class or function that builds an optimizer.

    Args:
        name: as `canonical_name` returns it.
        engine: of an `apex` arm; "nvidia" takes the optimizers of Apex from Apex itself.

    Raises:
        BackendUnavailable: its package is not installed, or cannot be imported.
        ConfigError: there is nothing of that name.
    """
    require_optimizer(name)
    module, _, attribute = optimizer_path(name).partition(":")
    if module == OWN_APEX and engine == "nvidia":
        module = APEX
    package = module.partition(".")[0]
    if package not in ("torch", "apex", *LIBRARIES):
        return resolve_factory(f"{module}:{attribute}")
    try:
        with quiet_import():
            found = importlib.import_module(module)
    except Exception as error:  # a package built for another torch may raise anything
        raise BackendUnavailable(
            f"optimizer {name}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
    kinds = {key: value for key, value in vars(found).items() if _is_optimizer(value)}
    if attribute not in kinds:
        version = f"torch {torch.__version__}" if package == "torch" else f"this {package}"
        raise ConfigError(f"{version} has no optimizer {module}.{attribute}; {did_you_mean(attribute, kinds)}")
    kind: Callable[..., Any] = kinds[attribute]
    return kind


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
