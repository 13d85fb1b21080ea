"""What the steps of a trainer did: loss scales and skipped steps, in memory and in a record."""

import sys
from pathlib import Path
from typing import Any

from ampcompare import guards
from ampcompare.base.errors import ConfigError
from ampcompare.script.legacy.settings import ExecSettings
from ampcompare.script.recording.recorder import Recorder, Rows, header

GUARDS = ("warn", "strict", "off")


def begin_guards(mode: str) -> guards.Guards | None:
    """Install the guards; None for "off".

    Args:
        mode: "warn", "strict" (a mistake is an error) or "off".

    Raises:
        ConfigError: it is none of these.
    """
    if mode not in GUARDS:
        raise ConfigError(f"guards={mode!r} is none of {', '.join(GUARDS)}")
    return None if mode == "off" else guards.install(strict=mode == "strict")


class StepLog:
    """Counts steps, and writes them to a file that `ampcompare report` reads.

    Args:
        record: the file; None writes none.

    Attributes:
        total: of all optimizers, skipped ones too.
        skipped: those of `total` that an overflow skipped.
        loss_scales: after the last step; empty if nothing is scaled.
    """

    def __init__(self, record: str | Path | None = None) -> None:
        self.total = self.skipped = 0
        self.loss_scales: tuple[float, ...] = ()
        self._recorder: Recorder | None = None
        self._rows: Rows | None = None
        if record is not None:
            self._recorder = Recorder(str(record), header(ExecSettings(record=str(record), name=sys.argv[0])))
            self._rows = Rows(self._recorder)

    def add(self, optimizer: Any, *, applied: bool, loss_scales: tuple[float, ...], loss: Any = None) -> None:
        """Add a step.

        Args:
            loss_scales: after it.
            loss: a number or a tensor of one element, if it is known.
        """
        self.total += 1
        self.skipped += not applied
        before, self.loss_scales = next(iter(self.loss_scales or loss_scales), None), loss_scales
        if self._rows is not None:
            number, _ = self._rows.number(optimizer)
            after = next(iter(loss_scales), None)
            value = None if loss is None else float(loss)
            self._rows.add_backward(value, number, (before, after), not applied, [number], [] if applied else [number])
            self._rows.add_step(number, applied)

    def close(self) -> None:
        """End the record."""
        if self._recorder is not None:
            self._recorder.close(0, None)
            self._recorder = self._rows = None
