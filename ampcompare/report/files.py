"""Which formats there are, and the files of a run directory."""

from __future__ import annotations

from pathlib import Path

from ampcompare.record import Comparison, write_atomically
from ampcompare.report.base import Reporter
from ampcompare.report.csv import Csv
from ampcompare.report.json import Json
from ampcompare.report.markdown import Markdown
from ampcompare.report.terminal import Terminal

__all__ = ["FORMATS", "write_reports"]

FORMATS: dict[str, type[Reporter]] = {"table": Terminal, "md": Markdown, "csv": Csv, "json": Json}
FILES: dict[str, type[Reporter]] = {"report.md": Markdown, "report.csv": Csv, "report.json": Json}


def write_reports(comparison: Comparison, folder: Path) -> None:
    """Write `report.md`, `report.csv` and `report.json`, each in one move."""
    for name, reporter in FILES.items():
        write_atomically(folder / name, reporter().render(comparison))
