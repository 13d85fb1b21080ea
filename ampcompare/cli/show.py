"""Progress and notes on stderr while cells run."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ampcompare.cli.output import leave_closed_terminal
from ampcompare.experiment.run import Observer
from ampcompare.formatting import printable
from ampcompare.launch.base import Progress
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["Display"]

Show = TypeVar("Show", bound=Callable[..., None])


def _unless_closed(show: Show) -> Show:
    """Let a run continue to its end or to a checkpoint when its terminal is closed."""

    @functools.wraps(show)
    def shown(*words: Any, **options: Any) -> None:
        try:
            show(*words, **options)
        except OSError:
            leave_closed_terminal()

    return shown  # type: ignore[return-value]


class Display(Observer):
    """A progress bar on a terminal, one line per cell elsewhere, nothing when quiet.

    The bar counts the steps of the present cell, and says what time is left for all cells: each that is still to run
    is taken to need the mean of those that ran and of the present one so far.

    Args:
        notify_seconds: log the progress of the running cell in a plain line this often; never by default.
    """

    def __init__(self, *, quiet: bool, bar: bool, notify_seconds: float | None = None) -> None:
        self.notify_seconds = None if quiet else notify_seconds
        self.began = self.notified = time.monotonic()
        self.quiet = quiet
        self.bar: Any = None
        self.wants_bar = bar and not quiet and sys.stderr.isatty()
        self.name = ""
        self.place = ""
        self.cells_left = 0  # with the present one
        self.cell_began = self.began
        self.ran = 0
        self.ran_seconds = 0.0
        self.found: set[str] = set()

    @_unless_closed
    def begin(self, config: RunConfig, number: int, total: int) -> None:
        self.name = printable(f"{config.arm}, seed {config.recipe.seed}", 60)
        self.place = f"[{number}/{total}]"
        self.cells_left = total - number + 1
        self.cell_began = time.monotonic()
        if self.wants_bar:
            from tqdm import tqdm

            self.bar = tqdm(desc=f"{self.place} {self.name}", unit=" steps", leave=False, file=sys.stderr)

    @_unless_closed
    def progress(self, progress: Progress) -> None:
        now = time.monotonic()
        left = self._left(progress, now)
        if self.notify_seconds is not None and now - self.notified >= self.notify_seconds:
            self.notified = now
            steps = f"{progress.steps} of {progress.total_steps} steps"
            click.echo(f"{self.place} {self.name}: {steps}, {now - self.began:.0f} s since the start{left}", err=True)
        if self.bar is not None:
            if self.bar.total is None:  # the clock of the rate starts here, after torch was imported and data made
                self.bar.reset(progress.total_steps)
            self.bar.set_postfix_str(left.removeprefix(", "), refresh=False)
            self.bar.update(progress.steps - self.bar.n)

    def _left(self, progress: Progress, now: float) -> str:
        """Return about how long all cells will take from now; nothing for one cell alone, whose bar shows it."""
        share = progress.steps / progress.total_steps if progress.total_steps else 0.0
        if not self.ran + share or self.place == "[1/1]":
            return ""
        mean = (self.ran_seconds + now - self.cell_began) / (self.ran + share)
        return f", about {_span(mean * (self.cells_left - share))} for all"

    @_unless_closed
    def end(self, record: RunRecord, *, reused: bool) -> None:
        if not reused:
            self.ran += 1
            self.ran_seconds += time.monotonic() - self.cell_began
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        alone = self.place == "[1/1]"
        if not self.quiet and not (alone and record.status == "failed"):  # whose error is said by the command
            cached = " (cached)" if reused else ""
            click.echo(f"{self.place} {self.name}: {_outcome(record)}{cached}", err=True)
        for finding in record.guards:
            if not self.quiet and finding not in self.found:
                self.found.add(finding)
                click.echo(printable(f"ampcompare {finding}", 500), err=True)

    @_unless_closed
    def note(self, text: str) -> None:
        if not self.quiet:
            click.echo(f"note: {printable(text, 500)}", err=True)


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _outcome(record: RunRecord) -> str:
    summary = record.summary
    if record.status == "completed" and summary.top1_final is not None:
        reached = [f"top-1 {100 * summary.top1_final:.2f} %"]
        if summary.ema_top1_final is not None:
            reached.append(f"{100 * summary.ema_top1_final:.2f} % with averaged weights")
        if summary.rollbacks:
            reached.append(f"went back at step {' and '.join(map(str, summary.rollbacks))}")
        return "; ".join([*reached, *([f"ended early: {summary.ended}"] if summary.ended else [])])
    if record.status == "diverged":
        return f"diverged at step {summary.diverged_step} ({summary.divergence})"
    return printable(f"{record.status}: {record.error}", 300) if record.error else record.status
