"""Progress and notes on stderr while cells run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampcompare.base.environment.gpus import platform_versions_of_torch
from ampcompare.base.formatting import printable_line
from ampcompare.cli.output import discard_output_of_closed_terminal, print_folded_on_stderr
from ampcompare.cli.progress_lines import notice_lines, outline_text
from ampcompare.doctor.gpu import has_nvidia_gpu
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.observer import Observer, PlanOutline
from ampcompare.experiment.running_cells import RunningCells
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import REMOTE_LAUNCHERS, RunConfig

if TYPE_CHECKING:
    from ampcompare.cli.progress_region import ProgressRegion

TICK_SECONDS = 0.5
NOTICE_SECONDS = 60.0
END_SECONDS = 2.0


@contextlib.contextmanager
def _run_continued_at_hangup() -> Iterator[None]:
    """Let a run continue to its end or to a checkpoint when its terminal is closed."""
    try:
        yield
    except OSError:
        discard_output_of_closed_terminal()


class ProgressDisplay(Observer):
    """Bars on a terminal, a plain line each minute elsewhere, a line per cell on both, nothing when quiet.

    A separate thread draws the bars, so that times are updated during long steps too. Use it as a context manager,
    which ends the thread and clears the bars, also before an error is shown.
    """

    def __init__(self, *, quiet: bool, bar: bool, notify_seconds: float | None = None) -> None:
        self.quiet = quiet
        self.wants_bar = bar and not quiet and sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb"
        if notify_seconds is None and not self.wants_bar:
            notify_seconds = NOTICE_SECONDS
        self.notify_seconds = None if quiet else notify_seconds
        self.notified = time.monotonic()
        self._cells = RunningCells(self.notified)
        self._found: set[str] = set()
        self._lock = threading.RLock()
        self._region: ProgressRegion | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def plan(self, outline: PlanOutline) -> None:
        with self._lock:
            self._cells.note_plan(outline)
            if not self.quiet:
                # Without torch: a process that forks cells must not touch CUDA.
                has_cuda = has_nvidia_gpu() and (platform_versions_of_torch() or {"cuda": "?"}).get("cuda")
                self._print_line(outline_text(outline, "cuda" if has_cuda else "cpu"))
            self._start_drawing()

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        with self._lock:
            self._cells.note_begun_cell(config, number, total, time.monotonic())
            self._start_drawing()

    def place(self, number: int, name: str) -> None:
        with self._lock:
            self._cells.note_place(number, name)

    def progress(self, number: int, progress: Progress) -> None:
        with self._lock:
            self._cells.note_progress(number, progress, time.monotonic())
            self._print_due_notices()

    def end(self, record: RunRecord, *, reused: bool) -> None:
        with self._lock:
            cell, total = (
                self._cells.note_ended_cell(record, time.monotonic(), reused=reused),
                self._cells.total,
            )
            # whose error is said by the command
            if not self.quiet and not (total == 1 and record.status == "failed"):
                cached = " (cached)" if reused else ""
                self._print_line(f"[{cell.number}/{total}] {cell.full_name}: {_outcome_text(record)}{cached}")
            for finding in record.guards:
                if not self.quiet and not any(finding in said for said in self._found):
                    self._found.add(finding)
                    self._print_line(printable_line(f"ampcompare {finding}", 500))

    def preflight(self, lines: Sequence[str]) -> None:
        if not self.quiet:
            with self._lock:
                self._found.update(lines)
                for line in lines:
                    self._print_line(printable_line(line, 500, keep_end=300, keep_spaces=True))

    def note(self, text: str) -> None:
        if not self.quiet:
            with self._lock:
                self._print_line(f"note: {printable_line(text, 500, keep_end=300)}")

    def close(self) -> None:
        """End the thread and clear the bars; later notes are plain lines."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(END_SECONDS)
        with self._lock, _run_continued_at_hangup():
            region, self._region = self._region, None
            if region is not None:
                region.close()

    def _print_line(self, line: str) -> None:
        with _run_continued_at_hangup():
            print_folded_on_stderr(line, None if self._region is None else self._draw_region)

    def _draw_region(self, above: str | None = None) -> None:
        if self._region is not None:
            self._region.draw(
                *self._cells.cell_views_and_matrix_progress(time.monotonic()),
                self._text_while_no_cell_runs,
                above,
            )

    def _start_drawing(self) -> None:
        """Start to draw bars or to show notices; again only after `close`."""
        if self._thread is not None or self.quiet:
            return
        if self.wants_bar:
            from ampcompare.cli.progress_region import ProgressRegion

            with _run_continued_at_hangup():
                self._region = ProgressRegion(sys.stderr)
        self._ended.clear()
        self._thread = threading.Thread(target=self._redraw_each_tick, name="progress", daemon=True)
        self._thread.start()

    def _redraw_each_tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            with self._lock, _run_continued_at_hangup():
                if not self._ended.is_set():
                    self._draw_region()
                self._print_due_notices()

    def _print_due_notices(self) -> None:
        """Show a plain line on each running cell if it is time for one."""
        now = time.monotonic()
        if self.notify_seconds is None or now - self.notified < self.notify_seconds:
            return
        self.notified = now
        for line in notice_lines(
            *self._cells.cell_views_and_matrix_progress(now), idle=self._text_while_no_cell_runs
        ):
            self._print_line(line)

    @property
    def _text_while_no_cell_runs(self) -> str:
        """What happens while no cell runs."""
        outline = self._cells.outline
        if self._cells.total > 1 and self._cells.done == self._cells.total:
            return "writing the report"
        if outline is not None and any(cell.launcher in REMOTE_LAUNCHERS for cell in outline.cells):
            return "waiting in the queue"
        if not self._cells.done:
            return "a few steps of each arm"
        return "timing rounds" if outline is not None and outline.timing_rounds > 0 else ""


def _outcome_text(record: RunRecord) -> str:
    summary = record.summary
    if record.status == "completed" and summary.metric_final is not None:
        metric = record.metric
        reached = [f"{metric.name} {metric.value_text(summary.metric_final)}"]
        if summary.ema_metric_final is not None:
            reached.append(f"{metric.value_text(summary.ema_metric_final)} with averaged weights")
        if summary.rollbacks:
            reached.append(f"rolled back at step {' and '.join(map(str, summary.rollbacks))}")
        return "; ".join([*reached, *([f"ended early: {summary.ended}"] if summary.ended else [])])
    if record.status == "diverged":
        return f"diverged at step {summary.diverged_step} ({summary.divergence})"
    return (
        printable_line(f"{record.status}: {record.error}", 500, keep_end=300)
        if record.error
        else record.status
    )
