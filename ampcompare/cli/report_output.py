"""Where `report` writes, in which format, and the browser that shows it."""

from __future__ import annotations

import os
import tempfile
import webbrowser
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import printable
from ampcompare.cli.output import say
from ampcompare.report.base import FORMATS, write_report
from ampcompare.report.tables import room

__all__ = ["ReportTarget", "give_report", "target_from"]

SUFFIXES = {
    ".html": "html",
    ".htm": "html",
    ".md": "md",
    ".csv": "csv",
    ".json": "json",
    ".tex": "latex",
    ".txt": "table",
}


@dataclass(frozen=True)
class ReportTarget:
    """Where a report goes.

    Attributes:
        form: name in `FORMATS`.
        file: None for standard output.
        shown: open it in a browser.
    """

    form: str
    file: Path | None
    shown: bool

    @property
    def width(self) -> int | None:
        """Of the terminal that a table is for; None for a file."""
        return room() if self.file is None else None

    def resolved(self, run: Path | None) -> ReportTarget:
        """Return the target with a file for a page that is shown and has none: that of its run directory."""
        if not self.shown or self.file is not None:
            return self
        if run is not None and os.access(run, os.W_OK):
            return replace(self, file=run / "report.html")
        return replace(self, file=Path(tempfile.mkdtemp(prefix="ampcompare-report-")) / "report.html")


def target_from(form: str | None, output: str | None, shown: bool) -> ReportTarget:
    """Return where a report goes, from the options of the command.

    Raises:
        ConfigError: the options do not go together.
    """
    if shown and form not in (None, "html"):
        raise ConfigError(f"--open shows the HTML page, and --format asks for {form}; give only one of them")
    if shown and output == "-":
        raise ConfigError("--open shows a file, and --output - is standard output; give only one of them")
    if output in (None, "-"):
        return ReportTarget("html" if shown else form or "table", None, shown)
    path = Path(str(output))
    into_folder = path.is_dir() or str(output).endswith(os.sep)
    chosen = form or ("html" if shown else "table" if into_folder else SUFFIXES.get(path.suffix.lower()))
    if chosen is None:
        raise ConfigError(f"--output {output!r} does not say which format; add --format {'|'.join(FORMATS)}")
    suffix = next(suffix for suffix, name in SUFFIXES.items() if name == chosen)
    return ReportTarget(chosen, path / f"report{suffix}" if into_folder else path, shown)


def give_report(text: str, target: ReportTarget, *, beside: Path | None) -> None:
    """Write a report to its file, and show it if that is asked for; without a file, to standard output.

    Raises:
        EnvironmentUnfit: the file cannot be written.
    """
    target = target.resolved(beside)
    if target.file is None:
        say(text, nl=False)
        return
    write_report(text, target.file)
    click.echo(f"report: {printable(str(target.file), 500)}", err=True)
    if target.shown and not webbrowser.open(target.file.resolve().as_uri()):
        click.echo("note: no browser was found; open that file, or copy it to a machine with one", err=True)
