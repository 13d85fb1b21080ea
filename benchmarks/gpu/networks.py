"""A network whose training draws random numbers on the device."""

import math
from collections.abc import Sequence

from torch import nn


def dropout(num_classes: int, sample_shape: Sequence[int]) -> nn.Module:
    """Return two linear layers with dropout between them, for `--arch`."""
    size = math.prod(sample_shape)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, num_classes)
    )
