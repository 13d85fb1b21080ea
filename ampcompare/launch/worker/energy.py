"""The energy of timed steps, from a counter that is read where losses are read from the device anyway."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["EnergyMeter"]


class EnergyMeter:
    """Adds up what a counter has advanced over blocks of steps; evaluations and the time between epochs are left out.

    Args:
        read: returns the counter in joules, or None where there is none.

    Attributes:
        joules: of the steps.
        steps: that were counted.
    """

    def __init__(self, read: Callable[[], float | None]) -> None:
        self.joules = 0.0
        self.steps = 0
        self._read = read
        self._last: tuple[int, float] | None = None

    def after(self, epoch: int, steps: int, *, timed: bool) -> None:
        """Count a block of steps that the device has just finished.

        Args:
            epoch: of the block; the first block of an epoch only sets the mark.
            steps: in the block.
            timed: whether all of them are after the warm-up.
        """
        now = self._read()
        if now is None:
            return
        if timed and self._last is not None and self._last[0] == epoch:
            self.joules += now - self._last[1]
            self.steps += steps
        self._last = epoch, now

    def per(self, units: int) -> float | None:
        """Return joules per unit, such as a sample; None if nothing was counted.

        Args:
            units: in a step.
        """
        return self.joules / (self.steps * units) if self.steps and self.joules > 0 else None
