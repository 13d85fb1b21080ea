"""What `holds` returns and raises. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.runs.records.diagnosis import Diagnosis

__all__ = ["DoesNotHold", "Figure", "Held"]


@dataclass(frozen=True)
class Figure:
    """One result that an arm was compared in: an output, the loss, or the gradient of a parameter.

    Attributes:
        name: such as "output", "loss" or "gradient of head.weight".
        error: norm of the difference to fp32, relative to the norm in fp32; inf where it is not finite.
        tolerance: that the error may have.
        dtype: in the arm.
    """

    name: str
    error: float
    tolerance: float
    dtype: str

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Held:
    """An arm that holds.

    Attributes:
        arm: in its canonical form.
        figures: of the first update that was applied.
        skipped: steps that were skipped while the loss scale settled.
        islands: operations that ran in another type than the arm promises, one line each.
    """

    arm: str
    figures: tuple[Figure, ...]
    skipped: int = 0
    islands: tuple[str, ...] = ()

    @property
    def worst(self) -> Figure:
        """The figure that uses most of its tolerance."""
        return max(self.figures, key=lambda figure: figure.error / figure.tolerance)


class DoesNotHold(AssertionError):
    """A step does not hold under an arm; the message says where it breaks and what cures it.

    Attributes:
        arm: in its canonical form.
        figures: all that were compared; empty where the step raised.
        diagnosis: None where the step raised.
    """

    def __init__(
        self, message: str, arm: str, figures: Sequence[Figure] = (), diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(message)
        self.arm = arm
        self.figures = tuple(figures)
        self.diagnosis = diagnosis
