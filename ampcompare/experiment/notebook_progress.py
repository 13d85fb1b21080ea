"""Progress in a notebook: one output below the cell, which is drawn again as the runs proceed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any

from ampcompare.base.formatting import format_rough_duration, printable_line
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.observer import Observer, PlanOutline
from ampcompare.experiment.running_cells import MatrixProgress, RunningCells
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

SECONDS_BETWEEN = 0.3
MAX_LINES = 40  # of ended cells, the last ones


def shell_of_running_kernel() -> Any | None:
    """Return the shell of the kernel that this code runs in; None in a terminal, a script or without IPython."""
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def observer_or_notebook_progress(observer: Observer | None) -> Observer | None:
    """Return the observer that was given; in a kernel, without one, a display of the progress."""
    if observer is None and shell_of_running_kernel() is not None:
        return NotebookProgress()
    return observer


class NotebookProgress(Observer):
    """Shows what runs, how far it is and how long it will still take, as text and as HTML."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._cells = RunningCells(time.monotonic())
        self._ended: list[str] = []
        self._notes: list[str] = []
        self._shown = 0.0

    def plan(self, outline: PlanOutline) -> None:
        self._cells.note_plan(outline)
        self._show_progress()

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        self._cells.note_begun_cell(config, number, total, time.monotonic())
        self._show_progress()

    def place(self, number: int, name: str) -> None:
        self._cells.note_place(number, name)

    def progress(self, number: int, progress: Progress) -> None:
        self._cells.note_progress(number, progress, time.monotonic())
        if time.monotonic() - self._shown > SECONDS_BETWEEN:
            self._show_progress()

    def end(self, record: RunRecord, *, reused: bool) -> None:
        cell = self._cells.note_ended_cell(record, time.monotonic(), reused=reused)
        reached, metric = record.summary.metric_final, record.metric
        what = (
            f"{metric.name} {metric.value_text(reached)}"
            if record.status == "completed" and reached is not None
            else ""
        )
        what = what or printable_line(
            ": ".join(filter(None, [record.status, record.error])), 500, keep_end=300
        )
        self._ended.append(f"{cell.name}: {what}{' (cached)' if reused else ''}")
        self._show_progress()

    def note(self, text: str) -> None:
        self._notes.append(f"note: {printable_line(text, 500, keep_end=300)}")
        self._show_progress()

    def _show_progress(self) -> None:
        self._shown = time.monotonic()
        cells, matrix = self._cells.cell_views_and_matrix_progress(self._shown)
        rows = [
            (cell.share_of_steps_made, f"{cell.full_name}: {', '.join(cell.phase_steps_and_figures())}")
            for cell in cells
        ]
        head, ended = self._progress_summary_text(matrix), self._ended[-MAX_LINES:]
        bundle = {
            "text/plain": "\n".join([head, *ended, *(text for _, text in rows), *self._notes]),
            "text/html": _progress_html(head, [*ended, *self._notes], rows),
        }
        if self._handle is None:
            display = import_module("IPython.display").display
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _progress_summary_text(self, matrix: MatrixProgress) -> str:
        """Return how much is done, and how long the rest takes."""
        outline = self._cells.outline
        words = [f"{matrix.done} of {matrix.total} {'run' if matrix.total == 1 else 'runs'}"]
        if matrix.left is not None and matrix.done < matrix.total:
            words.append(f"about {format_rough_duration(matrix.left)} left")
        if outline is not None and str(outline.folder) != ".":
            words.append(f"into {printable_line(str(outline.folder), 200)}")
        return ", ".join(words)


def _progress_html(head: str, lines: Sequence[str], rows: Sequence[tuple[float, str]]) -> str:
    bars = [
        f'<div><progress value="{share:.3f}" max="1" style="width:12em;vertical-align:middle"></progress> '
        f"{escape(text)}</div>"
        for share, text in rows
    ]
    texts = [f"<div>{escape(line)}</div>" for line in lines]
    ended = f"<details><summary>{escape(head)}</summary>{''.join(texts)}</details>"
    return f'<div style="font-size:90%">{ended}{"".join(bars)}</div>'
