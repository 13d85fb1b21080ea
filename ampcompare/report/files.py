"""Which formats there are, and the files of a run directory."""

from __future__ import annotations

import math
import time
from pathlib import Path

from ampcompare.comparison import Comparison
from ampcompare.record import write_atomically
from ampcompare.report.base import Reporter
from ampcompare.report.csv import Csv
from ampcompare.report.html import Html, html_available
from ampcompare.report.json import Json
from ampcompare.report.latex import Latex
from ampcompare.report.markdown import Markdown
from ampcompare.report.terminal import Terminal

__all__ = ["FORMATS", "write_reports"]

FORMATS: dict[str, type[Reporter]] = {
    "table": Terminal,
    "md": Markdown,
    "csv": Csv,
    "json": Json,
    "html": Html,
    "latex": Latex,
}
FILES: dict[str, type[Reporter]] = {"report.md": Markdown, "report.csv": Csv, "report.json": Json}
PAGE = "report.html"
PAGE_SECONDS = 10.0


def write_reports(comparison: Comparison, folder: Path) -> None:
    """Write `report.md`, `report.csv` and `report.json`, each in one move, and the page where its extra is installed.

    While cells are missing, a page younger than `PAGE_SECONDS` is left as it is: it is large, and cells can be short.
    """
    for name, reporter in FILES.items():
        write_atomically(folder / name, reporter().render(comparison))
    page = folder / PAGE
    unfinished = len(comparison.records) < len(comparison.order)
    if html_available() and not (unfinished and _age(page) < PAGE_SECONDS):
        write_atomically(page, Html().render(comparison))


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
