"""The precision of an arm, for a training loop of the caller. This module alone of the interface imports torch."""

from ampcompare.base.environment.extras import require_torch

require_torch()

from ampcompare.training.precision.base import Precision, StepOutcome, make_precision  # noqa: E402

__all__ = ["Precision", "StepOutcome", "make_precision"]
