"""Progress and notes on stderr while cells run."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ampcompare.api.doctor.gpu import has_nvidia_gpu
from ampcompare.base.formatting import printable
from ampcompare.cli.output import leave_closed_terminal, note
from ampcompare.cli.progress_lines import CellView, MatrixView, bar_lines, describe_outline, notices
from ampcompare.experiment.eta import TimeLeft
from ampcompare.experiment.launch.base import Progress
from ampcompare.experiment.observer import Observer, Outline
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

if TYPE_CHECKING:
    from ampcompare.cli.progress_region import Region

__all__ = ["Display"]

TICK_SECONDS = 0.5
NOTICE_SECONDS = 60.0
END_SECONDS = 2.0

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


@dataclass
class _Running:
    config: RunConfig
    name: str
    began: float
    place: str = ""
    progress: Progress | None = None


class Display(Observer):
    """Bars on a terminal, a plain line each minute elsewhere, a line per cell on both, nothing when quiet.

    A separate thread draws the bars, so that times are updated during long steps too. Use it as a context manager,
    which ends the thread and clears the bars, also before an error is shown.

    Args:
        notify_seconds: show a plain line this often; by default each minute where there are no bars.
    """

    def __init__(self, *, quiet: bool, bar: bool, notify_seconds: float | None = None) -> None:
        self.quiet = quiet
        self.wants_bar = bar and not quiet and sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb"
        if notify_seconds is None and not self.wants_bar:
            notify_seconds = NOTICE_SECONDS
        self.notify_seconds = None if quiet else notify_seconds
        self.began = self.notified = time.monotonic()
        self._outline: Outline | None = None
        self._left: TimeLeft | None = None
        self._running: dict[int, _Running] = {}
        self._numbers: dict[str, int] = {}  # of running cells, by digest
        self._done = 0
        self._found: set[str] = set()
        self._lock = threading.RLock()
        self._region: Region | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @_unless_closed
    def plan(self, outline: Outline) -> None:
        with self._lock:
            self._expect(outline)
            if not self.quiet:
                self._print(describe_outline(outline, _automatic_device()))
            self._start()

    @_unless_closed
    def begin(self, config: RunConfig, number: int, total: int) -> None:
        with self._lock:
            if self._outline is None or self._left is None:  # of a caller that runs no matrix
                self._expect(Outline([config] * total, [config.arm] * total, [None] * total, Path()))
            assert self._outline is not None
            assert self._left is not None
            name = printable(f"{self._outline.labels[number - 1]}, seed {config.recipe.seed}", 60)
            now = time.monotonic()
            self._running[number] = _Running(config, name, now)
            self._numbers[config.digest()] = number
            self._left.begin(number - 1, now)
            self._start()

    @_unless_closed
    def place(self, number: int, name: str) -> None:
        with self._lock:
            if number in self._running:
                self._running[number].place = printable(name, 40)

    @_unless_closed
    def progress(self, number: int, progress: Progress) -> None:
        with self._lock:
            if self._left is not None and number in self._running:
                self._running[number].progress = progress
                self._left.report(number - 1, progress, time.monotonic())
            self._notify()

    @_unless_closed
    def end(self, record: RunRecord, *, reused: bool) -> None:
        with self._lock:
            number = self._numbers.pop(record.cell, None) or min(self._running)
            cell = self._running.pop(number)
            self._done += 1
            assert self._left is not None
            self._left.end(number - 1, time.monotonic(), reused=reused)
            total = self._total
            alone = total == 1
            if not self.quiet and not (alone and record.status == "failed"):  # whose error is said by the command
                cached = " (cached)" if reused else ""
                where = f", {cell.place}" if cell.place else ""
                self._print(f"[{number}/{total}] {cell.name}{where}: {_outcome(record)}{cached}")
            for finding in record.guards:
                if not self.quiet and finding not in self._found:
                    self._found.add(finding)
                    self._print(printable(f"ampcompare {finding}", 500))

    @_unless_closed
    def preflight(self, lines: Sequence[str]) -> None:
        if not self.quiet:
            with self._lock:
                for line in lines:
                    self._print(printable(line, 500, keep_end=300, keep_spaces=True))

    @_unless_closed
    def note(self, text: str) -> None:
        if not self.quiet:
            with self._lock:
                self._print(f"note: {printable(text, 500, keep_end=300)}")

    @_unless_closed
    def close(self) -> None:
        """End the thread and clear the bars; later notes are plain lines."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(END_SECONDS)
        with self._lock:
            region, self._region = self._region, None
            if region is not None:
                region.close()

    @property
    def _total(self) -> int:
        return 0 if self._outline is None else len(self._outline.cells)

    def _expect(self, outline: Outline) -> None:
        self._outline, self._left, self._done = outline, TimeLeft(outline), 0

    def _print(self, line: str) -> None:
        region = self._region
        note(line, None if region is None else functools.partial(self._draw_region, region))

    def _draw_region(self, region: Region, above: str | None = None) -> None:
        cells, matrix = self._views()
        region.draw(bar_lines(cells, matrix, region.size, region.symbols, idle=self._idle), above)

    def _start(self) -> None:
        """Start to draw bars or to show notices; again only after `close`."""
        if self._thread is not None or self.quiet:
            return
        if self.wants_bar:
            from ampcompare.cli.progress_region import Region

            self._region = Region(sys.stderr, leave_closed_terminal)
        self._ended.clear()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._draw()

    @_unless_closed
    def _draw(self) -> None:
        with self._lock:
            if self._region is not None and not self._ended.is_set():
                self._draw_region(self._region)
            self._notify()

    def _notify(self) -> None:
        """Show a plain line on each running cell if it is time for one."""
        now = time.monotonic()
        if self.notify_seconds is None or now - self.notified < self.notify_seconds:
            return
        self.notified = now
        cells, matrix = self._views()
        for line in notices(cells, matrix, idle=self._idle):
            self._print(line)

    @property
    def _idle(self) -> str:
        """What happens while no cell runs."""
        if self._total > 1 and self._done == self._total:
            return "writing the report"
        if self._outline is not None and any(cell.launcher in ("slurm", "ray") for cell in self._outline.cells):
            return "waiting in the queue"
        if not self._done:
            return "a few steps of each arm"
        has_rounds = self._outline is not None and self._outline.timing_rounds > 0 and self._done
        return "timing rounds" if has_rounds else ""

    def _views(self) -> tuple[list[CellView], MatrixView]:
        """Return what is to be shown now."""
        now = time.monotonic()
        left = self._left
        cells = [
            CellView(
                cell.name,
                number,
                cell.progress,
                now - cell.began,
                None if left is None else left.of_cell(number - 1, now),
                1 if cell.config.script else cell.config.recipe.epochs,  # how many a script makes is not known
                cell.place,
            )
            for number, cell in sorted(self._running.items())
        ]
        total = self._total
        made = self._done + (0.0 if left is None else sum(left.share(number - 1) for number in self._running))
        seconds_left = None if left is None else left.seconds(now)
        return cells, MatrixView(self._done, total, made / max(1, total), now - self.began, seconds_left)


def _automatic_device() -> str:
    """Return what the device "auto" stands for, without torch: a process that forks cells must not touch CUDA."""
    try:
        has_cuda = "+cpu" not in version("torch")
    except PackageNotFoundError:  # a torch without metadata
        has_cuda = True
    return "cuda" if has_cuda and has_nvidia_gpu() else "cpu"


def _outcome(record: RunRecord) -> str:
    summary = record.summary
    if record.status == "completed" and summary.metric_final is not None:
        metric = record.metric
        reached = [f"{metric.name} {metric.shown(summary.metric_final)}"]
        if summary.ema_metric_final is not None:
            reached.append(f"{metric.shown(summary.ema_metric_final)} with averaged weights")
        if summary.rollbacks:
            reached.append(f"rolled back at step {' and '.join(map(str, summary.rollbacks))}")
        return "; ".join([*reached, *([f"ended early: {summary.ended}"] if summary.ended else [])])
    if record.status == "diverged":
        return f"diverged at step {summary.diverged_step} ({summary.divergence})"
    return printable(f"{record.status}: {record.error}", 500, keep_end=300) if record.error else record.status
