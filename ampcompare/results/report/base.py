"""The contract of a report format."""

import abc
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ampcompare.base.files.run_files import CellFile, RunFile, file_of_cell
from ampcompare.base.files.write import write_atomically
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.report.document import Document

MAX_LINE = 100_000  # a conclusion names every arm, and there may be hundreds
DOCUMENTS = {  # of each class of results
    "Comparison": "ampcompare.results.report.documents.comparison:comparison_document",
    "Diagnosis": "ampcompare.results.report.documents.diagnosis:diagnosis_document",
    "Outlook": "ampcompare.results.report.documents.outlook:outlook_document",
    "Profile": "ampcompare.results.report.documents.profile:profile_document",
}
CELL = re.compile("[0-9a-f]{12}")  # the name of a folder that this program made


class Reporter(abc.ABC):
    """Turns a document into text.

    Args:
        width: of the terminal that the text is for; None for files, in which lines may have any length. Only formats
            for terminals use it.
        color: whether that terminal has colors.
        details: whether everything else follows what a reader sees first, for formats that otherwise leave it out.

    Attributes:
        logs: relative address of the log of each cell, by the name of the cell, for formats with links.
    """

    def __init__(self, width: int | None = None, *, color: bool = False, details: bool = False) -> None:
        self.width = width
        self.color = color
        self.details = details
        self.logs: Mapping[str, str] = {}

    def render(self, result: Any) -> str:
        """Return the report of a result; it ends with a newline."""
        return self.document_text(document_of(result, self.logs))

    @abc.abstractmethod
    def document_text(self, document: Document) -> str:
        """Return the text of a document; it ends with a newline."""


def document_of(result: Any, logs: Mapping[str, str] | None = None) -> Document:
    """Return the report of a result before it has a format: of a record, or of a result that makes its own.

    Args:
        logs: as for `Reporter`; of a comparison only.
    """
    if hasattr(result, "_document"):
        own: Document = result._document()
        return own
    module, _, name = DOCUMENTS[type(result).__name__].partition(":")
    document: Document = getattr(import_module(module), name)(result, *([logs] if logs else []))
    return document


@dataclass(frozen=True)
class Format:
    """A format of reports: the class that makes it, its file in a run directory, and the packages that it needs.

    Attributes:
        implementation: module and class of its `Reporter`, as `module:Class`.
        file: name that it has in a run directory, where every `compare` writes it; None for formats that only
            `report --format` makes.
        packages: that it needs beyond those of a plain installation; without them no file is written.
        seconds: age below which the file is not replaced while cells are missing, for formats that take long to write.
    """

    implementation: str
    file: str | None = None
    packages: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def missing_packages(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]

    def make_reporter(
        self, width: int | None = None, logs: Mapping[str, str] | None = None, **options: bool
    ) -> Reporter:
        """Return a new reporter; all arguments are as for `Reporter`."""
        module, _, name = self.implementation.partition(":")
        reporter: Reporter = getattr(import_module(module), name)(width, **options)
        reporter.logs = logs or {}
        return reporter


FORMATS: dict[str, Format] = {
    "table": Format("ampcompare.results.report.terminal:Terminal"),
    "md": Format("ampcompare.results.report.markdown:Markdown", f"{RunFile.REPORT}.md"),
    "csv": Format("ampcompare.results.report.csv:Csv", f"{RunFile.REPORT}.csv"),
    "json": Format("ampcompare.results.report.json:Json", f"{RunFile.REPORT}.json"),
    "html": Format(
        "ampcompare.results.report.html.page:Html",
        f"{RunFile.REPORT}.html",
        packages=("jinja2",),
        seconds=10.0,
    ),
    "latex": Format("ampcompare.results.report.latex:Latex"),
}
"""By the name that `report --format` takes. A new line here is a new format."""


def write_reports(comparison: Comparison, folder: Path) -> None:
    """Write each format that has a file, such as `report.md`, in one move, if its packages are installed.

    While cells are missing, a young file of a format that takes long to write is left as it is: cells can be short.

    Args:
        comparison: with the cells that are done.
        folder: the run directory, to which links to logs are relative.
    """
    is_unfinished = len(comparison.records) < len(comparison.order)
    document = document_of(comparison, logs=log_addresses_by_cell(comparison, folder, folder))
    for form in FORMATS.values():
        if form.file is None or form.missing_packages:
            continue
        path = folder / form.file
        if not (is_unfinished and _age_in_seconds(path) < form.seconds):
            write_atomically(path, form.make_reporter().document_text(document))


def write_result_in_formats(result: Any, folder: Path, forms: Sequence[str]) -> list[Path]:
    """Write a result in some formats, and return the files; a format whose packages are not installed is left out.

    Args:
        result: one of those that `document_of` takes.
        folder: gets a file for each, such as `profile.json`.
        forms: names of `FORMATS`.

    Raises:
        EnvironmentUnfit: the folder cannot be written.
    """
    document = document_of(result)
    written = {
        folder / f"{document.kind}.{form}": FORMATS[form]
        for form in forms
        if not FORMATS[form].missing_packages
    }
    for path, form in written.items():
        write_atomically(path, form.make_reporter().document_text(document))
    return list(written)


def log_addresses_by_cell(comparison: Comparison, run: Path, folder: Path) -> dict[str, str]:
    """Return the address of each log that exists, relative to the folder of a page, by the name of the cell.

    Args:
        comparison: whose cells have the logs.
        run: where the records are from.
        folder: where the page is.
    """
    try:
        start = os.path.relpath(run.resolve(), folder.resolve())
    except ValueError:  # on another drive
        return {}
    cells = {record.cell for record in comparison.records if CELL.fullmatch(record.cell)}
    logs = {cell: file_of_cell(cell, CellFile.LOG) for cell in cells}
    return {cell: quote(Path(start, log).as_posix()) for cell, log in logs.items() if (run / log).is_file()}


def _age_in_seconds(path: Path) -> float:
    """Return the seconds since a file was written; infinity if there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
