"""The largest batch that an arm fits in the memory of a device, as `find-batch` has found it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ampcompare.settings.stack import arm_text_with_stack


@dataclass(frozen=True)
class BatchTry:
    """The result of one batch size, in samples of each process: why it does not fit, and its peak where it ended."""

    batch: int
    reason: str
    peak_bytes: int | None = None


@dataclass(frozen=True)
class BatchLimit:
    """The largest batch that an arm fits.

    Attributes:
        fits: None if no batch does.
        fails: the smallest batch that was tried and does not fit.
        limit_bytes: memory that a run may take; None where only the device decides.
        stack: the name of the other environment in which it trains; None for this one.
        error: why nothing could be tried in that environment.
        environment: versions and devices there, or here, as the last try that ended has them.
    """

    arm: str
    fits: BatchTry | None = None
    fails: BatchTry | None = None
    limit_bytes: int | None = None
    tries: int = 0
    stack: str | None = None
    error: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What its row is called: the arm, with its stack."""
        return arm_text_with_stack(self.arm, self.stack)
