"""Errors of the Apex surface: ampcompare's families, with the built-in types that scripts written for Apex catch."""

from ampcompare.base.errors import CheckpointError, ConfigError, PreparationError, ScalingError


class AmpOptionError(ConfigError, RuntimeError):
    """An option of `amp.initialize` does not fit the opt level."""


class AmpOptionValueError(ConfigError, AssertionError):
    """An option of `amp.initialize` has a value that Apex does not accept."""


class AmpPreparationError(PreparationError, RuntimeError):
    """`amp.initialize` cannot prepare these models or optimizers."""


class AmpPreparationTypeError(PreparationError, TypeError):
    """`amp.initialize` received an object that is not a model, an optimizer, or a list of them."""


class ParameterTypeError(PreparationError, TypeError):
    """An optimizer holds a parameter that is neither float16 nor float32."""


class AmpScalingError(ScalingError, RuntimeError):
    """`amp.scale_loss`, or a step under amp, was called in an invalid order or way."""


class AmpNotInitialized(ScalingError, RuntimeError, AttributeError):
    """amp was used before `amp.initialize`; Apex raises two types here, and this class is both."""


class UnknownLossId(ScalingError, IndexError):
    """`loss_id` is out of range."""


class UnknownOptimizer(ScalingError, AttributeError):
    """An optimizer that `amp.initialize` did not prepare."""


class AmpCheckpointError(CheckpointError, RuntimeError):
    """An amp state contains entries that are not loss scalers."""
