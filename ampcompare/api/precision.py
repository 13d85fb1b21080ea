"""The precision of an arm, for a training loop of the caller. This module alone of the interface imports torch."""

from ampcompare.base.environment.extras import require_torch

require_torch()

from ampcompare.training.precision.base import Precision as Precision  # noqa: E402
from ampcompare.training.precision.base import StepOutcome as StepOutcome  # noqa: E402
from ampcompare.training.precision.base import make_precision as make_precision  # noqa: E402
