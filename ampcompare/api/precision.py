"""The precision of an arm, for a training loop of the caller. This module alone of the interface imports torch."""

from ampcompare.training.precision.base import Precision, StepOutcome, make_precision

__all__ = ["Precision", "StepOutcome", "make_precision"]
