"""Errors of the Apex surface: ampcompare's families, with the built-in types that scripts written for Apex catch."""

from __future__ import annotations

from ampcompare.errors import CheckpointError, ConfigError, PreparationError, ScalingError

__all__ = [
    "AmpCheckpointError",
    "AmpNotInitialized",
    "AmpOptionError",
    "AmpOptionValueError",
    "AmpPreparationError",
    "AmpPreparationTypeError",
    "AmpScalingError",
    "ParameterTypeError",
    "UnknownLossId",
    "UnknownOptimizer",
]


class AmpOptionError(ConfigError, RuntimeError):
    """An option of `amp.initialize` does not fit the opt level."""


class AmpOptionValueError(ConfigError, AssertionError):
    """An option of `amp.initialize` has a value that Apex does not accept."""


class AmpPreparationError(PreparationError, RuntimeError):
    """Models or optimizers cannot be handed to `amp.initialize` as they are."""


class AmpPreparationTypeError(PreparationError, TypeError):
    """`amp.initialize` received something that is no model, no optimizer and no list of them."""


class ParameterTypeError(PreparationError, TypeError):
    """An optimizer holds a parameter that is neither float16 nor float32."""


class AmpScalingError(ScalingError, RuntimeError):
    """`amp.scale_loss`, or a step under amp, was used in an order or way that has no meaning."""


class AmpNotInitialized(ScalingError, RuntimeError, AttributeError):
    """Something was asked of amp before `amp.initialize`; Apex raises two types here, this is both."""


class UnknownLossId(ScalingError, IndexError):
    """`loss_id` names no loss scaler."""


class UnknownOptimizer(ScalingError, AttributeError):
    """An optimizer that never went through `amp.initialize`."""


class AmpCheckpointError(CheckpointError, RuntimeError):
    """An amp state holds entries that belong to no loss scaler."""
