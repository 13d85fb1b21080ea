"""Metrics that a library logs, for those that ask for them by name."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ampcompare.base.metric_log import log_metric

__all__ = ["log_numbers"]


def log_numbers(values: Mapping[Any, Any], source: str) -> None:
    """Log each number, and each tensor of one element, under its name."""
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if is_number or (isinstance(value, Tensor) and value.numel() == 1):
            log_metric(str(name), float(value), source=source)
