"""Reports as files: those of a run directory, and single ones."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from ampcompare.base.files.write import write_atomically
from ampcompare.records.comparison import Comparison
from ampcompare.report.formats import FORMATS

__all__ = ["log_links", "write_report", "write_reports"]

LOG = "log.txt"
CELL = re.compile("[0-9a-f]{12}")  # the name of a folder that this program made


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
            write_atomically(path, form.reporter(logs=log_links(comparison, [folder], folder)).render(comparison))


def write_report(text: str, file: Path) -> None:
    """Write one report to a file of any name, in one move.

    Raises:
        EnvironmentUnfit: the file cannot be written.
    """
    write_atomically(file, text)


def log_links(comparison: Comparison, runs: Iterable[Path], folder: Path) -> dict[str, str]:
    """Return the address of each log that exists, relative to the folder of a page, by the name of the cell.

    Args:
        runs: run directories that the records may be from.
        folder: where the page is.
    """
    links = {}
    for run in runs:
        try:
            start = os.path.relpath(run.resolve(), folder.resolve())
        except ValueError:  # on another drive
            continue
        for cell in {record.cell for record in comparison.records if CELL.fullmatch(record.cell)}:
            if (run / "cells" / cell / LOG).is_file():
                links[cell] = quote(Path(start, "cells", cell, LOG).as_posix())
    return links


def _age(path: Path) -> float:
    """Return the seconds since a file was written; infinity if there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
