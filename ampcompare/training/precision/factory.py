"""Build the `Precision` of an arm from its text."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import require_unique
from ampcompare.base.errors import BackendUnavailable, ConfigError
from ampcompare.training.precision.base import Precision

__all__ = ["make_precision"]


def make_precision(arm: str | Arm, *, device: str = "cpu", **options: Any) -> Precision:
    """Build the precision of an arm.

    Args:
        arm: an arm's text such as `apex:O2,loss_scale=128`, an `Arm`, or a backend's name with its options as keywords.
        device: where the models are; Apex and autocast depend on it.
        options: further options of the backend.

    Raises:
        ConfigError: unknown backend or option.
        BackendUnavailable: the backend cannot work here.
    """
    arm = Arm.parse(arm) if isinstance(arm, str) else arm
    if options:
        arm = Arm.make(arm.backend, **{**arm.options, **options})
    factory = _implementation(arm)
    try:
        return factory(device=device, **arm.options)
    except TypeError as error:
        raise ConfigError(f"arm {arm} does not fit its backend: {error}") from error


def _implementation(arm: Arm) -> Callable[..., Precision]:
    """Import the class or function that builds the arm.

    Raises:
        ConfigError: another package registers the same name.
        BackendUnavailable: it cannot be imported.
    """
    require_unique(arm.backend)
    module, _, attribute = arm.spec.implementation.partition(":")
    try:
        implementation: Callable[..., Precision] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"{arm.backend!r} is registered as {arm.spec.implementation} and cannot be imported: {error}"
        ) from error
    return implementation
