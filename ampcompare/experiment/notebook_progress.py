"""Progress in a notebook: one output below the cell, which is drawn again as the runs proceed."""

from __future__ import annotations

import sys
import time
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from ampcompare.base.formatting import printable
from ampcompare.experiment.eta import TimeLeft
from ampcompare.experiment.launch.base import Progress
from ampcompare.experiment.observer import Observer, Outline
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

__all__ = ["NotebookProgress", "default_observer", "running_kernel"]

SECONDS_BETWEEN = 0.3
MAX_LINES = 40  # of ended cells, the last ones


def running_kernel() -> Any | None:
    """Return the shell of the kernel that this code runs in; None in a terminal, a script or without IPython."""
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def default_observer(observer: Observer | None) -> Observer | None:
    """Return the observer that was given; in a kernel, without one, a display of the progress."""
    if observer is None and running_kernel() is not None:
        return NotebookProgress()
    return observer


class NotebookProgress(Observer):
    """Shows what runs, how far it is and how long it will still take, as text and as HTML."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._outline: Outline | None = None
        self._left: TimeLeft | None = None
        self._running: dict[int, tuple[str, Progress | None]] = {}
        self._places: dict[int, str] = {}
        self._numbers: dict[str, int] = {}  # of running cells, by digest
        self._ended: list[str] = []
        self._notes: list[str] = []
        self._count = 0
        self._shown = 0.0

    def plan(self, outline: Outline) -> None:
        self._expect(outline)
        self._show()

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        if self._outline is None:  # of a caller that runs no matrix
            self._expect(Outline([config] * total, [config.arm] * total, [None] * total, Path()))
        assert self._outline is not None
        assert self._left is not None
        name = printable(f"{self._outline.labels[number - 1]}, seed {config.recipe.seed}", 60)
        self._running[number] = (name, None)
        self._numbers[config.digest()] = number
        self._left.begin(number - 1, time.monotonic())
        self._show()

    def place(self, number: int, name: str) -> None:
        self._places[number] = printable(name, 40)

    def progress(self, number: int, progress: Progress) -> None:
        if number in self._running and self._left is not None:
            self._running[number] = (self._running[number][0], progress)
            self._left.report(number - 1, progress, time.monotonic())
            if time.monotonic() - self._shown > SECONDS_BETWEEN:
                self._show()

    def end(self, record: RunRecord, *, reused: bool) -> None:
        number = self._numbers.pop(record.cell, None) or min(self._running)
        name, _ = self._running.pop(number)
        self._count += 1
        if self._left is not None:
            self._left.end(number - 1, time.monotonic(), reused=reused)
        reached = record.summary.metric_final
        metric = record.metric
        what = f"{metric.name} {metric.shown(reached)}" if record.status == "completed" and reached is not None else ""
        what = what or printable(": ".join(filter(None, [record.status, record.error])), 500, keep_end=300)
        self._ended.append(f"{name}: {what}{' (cached)' if reused else ''}")
        self._show()

    def note(self, text: str) -> None:
        self._notes.append(f"note: {printable(text, 500, keep_end=300)}")
        self._show()

    def _expect(self, outline: Outline) -> None:
        self._outline, self._left, self._count = outline, TimeLeft(outline), 0

    def _show(self) -> None:
        self._shown = time.monotonic()
        bundle = {"text/plain": self._text(), "text/html": self._html()}
        if self._handle is None:
            display = import_module("IPython.display").display
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _head(self) -> str:
        """Return how much is done, and how long the rest takes."""
        total = 0 if self._outline is None else len(self._outline.cells)
        words = [f"{self._count} of {total} {'run' if total == 1 else 'runs'}"]
        left = None if self._left is None else self._left.seconds(time.monotonic())
        if left is not None and self._count < total:
            words.append(f"about {round(left)} s left" if left < 100 else f"about {round(left / 60)} min left")
        if self._outline is not None and str(self._outline.folder) != ".":
            words.append(f"into {printable(str(self._outline.folder), 200)}")
        return ", ".join(words)

    def _rows(self) -> list[tuple[str, float, str]]:
        """Return each running cell: its name, the share of its steps that are made, and its figures."""
        rows = []
        for number, (label, progress) in sorted(self._running.items()):
            name = ", ".join(filter(None, [label, self._places.get(number, "")]))
            if progress is None:
                rows.append((name, 0.0, "starting"))
                continue
            figures: list[str] = [progress.phase]
            if progress.total_steps:
                figures.append(f"step {progress.steps} of {progress.total_steps}")
            if progress.loss is not None:
                figures.append(f"loss {progress.loss:.4g}")
            if progress.loss_scale is not None:
                figures.append(f"loss scale {progress.loss_scale:g}")
            left = None if self._left is None else self._left.of_cell(number - 1, time.monotonic())
            if left is not None:
                figures.append(f"about {round(left)} s left")
            rows.append(
                (name, progress.steps / progress.total_steps if progress.total_steps else 0.0, ", ".join(figures))
            )
        return rows

    def _text(self) -> str:
        running = [f"{name}: {figures}" for name, _, figures in self._rows()]
        return "\n".join([self._head(), *self._ended[-MAX_LINES:], *running, *self._notes])

    def _html(self) -> str:
        rows = [
            f'<div><progress value="{share:.3f}" max="1" style="width:12em;vertical-align:middle"></progress> '
            f"{escape(name)}: {escape(figures)}</div>"
            for name, share, figures in self._rows()
        ]
        lines = [f"<div>{escape(line)}</div>" for line in (*self._ended[-MAX_LINES:], *self._notes)]
        ended = f"<details><summary>{escape(self._head())}</summary>{''.join(lines)}</details>"
        return f'<div style="font-size:90%">{ended}{"".join(rows)}</div>'
