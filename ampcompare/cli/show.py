"""Progress and notes on stderr while cells run."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from ampcompare.compare.run import Observer
from ampcompare.config import RunConfig
from ampcompare.launch.base import Progress
from ampcompare.record import RunRecord
from ampcompare.report.base import printable

__all__ = ["Display"]


class Display(Observer):
    """A progress bar on a terminal, one line per cell elsewhere, nothing when quiet.

    Args:
        notify_seconds: say how far the present cell is in a plain line this often; never by default.
    """

    def __init__(self, *, quiet: bool, bar: bool, notify_seconds: float | None = None) -> None:
        self.notify_seconds = None if quiet else notify_seconds
        self.began = self.notified = time.monotonic()
        self.quiet = quiet
        self.bar: Any = None
        self.wants_bar = bar and not quiet and sys.stderr.isatty()
        self.name = ""
        self.place = ""

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        self.name = printable(f"{config.arm}, seed {config.recipe.seed}", 60)
        self.place = f"[{number}/{total}]"
        if self.wants_bar:
            from tqdm import tqdm

            self.bar = tqdm(desc=f"{self.place} {self.name}", unit=" steps", leave=False, file=sys.stderr)

    def progress(self, progress: Progress) -> None:
        now = time.monotonic()
        if self.notify_seconds is not None and now - self.notified >= self.notify_seconds:
            self.notified = now
            steps = f"{progress.steps} of {progress.total_steps} steps"
            click.echo(f"{self.place} {self.name}: {steps}, {now - self.began:.0f} s since the start", err=True)
        if self.bar is not None:
            if self.bar.total is None:  # the clock of the rate starts here, after torch was imported and data made
                self.bar.reset(progress.total_steps)
            self.bar.update(progress.steps - self.bar.n)

    def end(self, record: RunRecord, *, reused: bool) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        alone = self.place == "[1/1]"
        if not self.quiet and not (alone and record.status == "failed"):  # whose error is said by the command
            there = " (record was there)" if reused else ""
            click.echo(f"{self.place} {self.name}: {_outcome(record)}{there}", err=True)

    def note(self, text: str) -> None:
        if not self.quiet:
            click.echo(f"note: {printable(text, 500)}", err=True)


def _outcome(record: RunRecord) -> str:
    summary = record.summary
    if record.status == "completed" and summary.top1_final is not None:
        return f"top-1 {100 * summary.top1_final:.2f} %"
    if record.status == "diverged":
        return f"diverged at step {summary.diverged_step} ({summary.divergence})"
    return printable(f"{record.status}: {record.error}", 300) if record.error else record.status
