"""How far a cell is, told through a file by its processes to whoever waits for them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from ampcompare.launch.base import Progress
from ampcompare.record import write_atomically

__all__ = ["PROGRESS_FILE", "progress_teller", "report_to"]

PROGRESS_FILE = "progress.json"


def report_to(folder: Path) -> Callable[[Progress], None]:
    """Return what keeps the progress of a cell in a file of its folder."""

    def report(progress: Progress) -> None:
        values = [progress.steps, progress.total_steps, progress.epoch]
        write_atomically(folder / PROGRESS_FILE, json.dumps(values))

    return report


def progress_teller(folder: Path, on_progress: Callable[[Progress], None] | None) -> Callable[[], None]:
    """Return what reads the file and tells how far the cell has come, where it has come further."""
    told: list[int] = []

    def tell() -> None:
        nonlocal told
        if on_progress is None:
            return
        with contextlib.suppress(OSError, ValueError):
            values = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
            if values != told:
                told = values
                on_progress(Progress(*values))

    return tell
