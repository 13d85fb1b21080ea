"""The report files of a run directory."""

from __future__ import annotations

import math
import time
from pathlib import Path

from ampcompare.files.write import write_atomically
from ampcompare.records.comparison import Comparison
from ampcompare.report.formats import FORMATS

__all__ = ["write_reports"]


def write_reports(comparison: Comparison, folder: Path) -> None:
    """Write each format that has a file, such as `report.md`, in one move, if its packages are installed.

    While cells are missing, a young file of a format that takes long to write is left as it is: cells can be short.
    """
    is_unfinished = len(comparison.records) < len(comparison.order)
    for form in FORMATS.values():
        if form.file is None or form.missing:
            continue
        path = folder / form.file
        if not (is_unfinished and _age(path) < form.seconds):
            write_atomically(path, form.reporter().render(comparison))


def _age(path: Path) -> float:
    """Return the seconds since a file was written; infinity if there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
