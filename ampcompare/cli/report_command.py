"""`ampcompare report`: render the records of a run directory again."""

from __future__ import annotations

import os
import shlex
import tempfile
import webbrowser
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.run_files import RunFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.formatting import printable_line
from ampcompare.base.option_rules import OptionRule
from ampcompare.cli.comparison_output import details_option, say_unused_records
from ampcompare.cli.forms import refuse_given_parameters
from ampcompare.cli.help import ARMS, OUTPUT, Command, option
from ampcompare.cli.output import print_document
from ampcompare.cli.values import FILE, FILE_OR_FOLDER, WordChoice
from ampcompare.results.report.base import FORMATS, log_addresses_by_cell
from ampcompare.results.report.document import Document

SUFFIXES = {
    ".html": "html",
    ".htm": "html",
    ".md": "md",
    ".csv": "csv",
    ".json": "json",
    ".tex": "latex",
    ".txt": "table",
}


RULES = (
    OptionRule(
        "--open",
        "is not for --format, unless that is html",
        "give only one of them",
        lambda values: values["open_page"] and values["form"] not in (None, "html"),
    ),
    OptionRule(
        "--open",
        "is not for --output -, which is standard output",
        "give only one of them",
        lambda values: values["open_page"] and values["output"] == "-",
    ),
)


@click.command(
    "report",
    cls=Command,
    rules=RULES,
    examples=[
        ("The newest run, in a browser:", "ampcompare report --open"),
        ("The same runs against another reference:", "ampcompare report runs/first --reference O1"),
        ("Seeds 0-4 of one machine and 5-9 of another:", "ampcompare report runs/here runs/there"),
    ],
)
@click.argument("paths", metavar="[DIR|FILE]...", nargs=-1, type=FILE)
@option(
    "--format",
    "form",
    type=WordChoice(list(FORMATS)),
    group=OUTPUT,
    help="what to write  [default: by the name of --output, else table]",
)
@option(
    "--output",
    "-o",
    type=FILE_OR_FOLDER,
    group=OUTPUT,
    help="where to write it; -: standard output  [default: -]",
)
@option(
    "--open", "open_page", is_flag=True, group=OUTPUT, help="write the HTML page and open it in a browser"
)
@option(
    "--reference",
    metavar="ARM",
    group=ARMS,
    help="compare with this arm, without running anything  [default: as it was run]",
)
@details_option
def command(
    paths: tuple[str, ...],
    form: str | None,
    output: str | None,
    open_page: bool,
    reference: str | None,
    details: bool,
) -> int:
    """Render the records of a run directory again.

    Without DIR or FILE, the newest run directory in runs/ is shown: after `run`, that run. A line on standard error
    names it, and the one before it.

    FILE is a record.json, a report.json, or a file that `exec --record` wrote. Several run directories of one
    comparison, each with seeds of its own, become one table; that is one more look at the runs of each.

    A different --reference is one more look at the runs, and is counted in the run directory.

    Records that fail validation (edited, copied, from another cell) are left out and listed; the exit code is then 2.
    """
    from ampcompare.experiment.join_runs import join_comparison
    from ampcompare.experiment.reload_report import reload_comparison
    from ampcompare.results.report.documents.comparison import comparison_document
    from ampcompare.script.recording.summary import is_exec_record, record_document

    target = _report_destination_from_options(form, output, open_page)
    source = Path(paths[0]) if paths else _choose_newest_run_directory_and_say_so()
    target = target.with_default_page_file(
        source if source.is_dir() and reference is None and len(paths) < 2 else None
    )
    if len(paths) < 2 and is_exec_record(source):
        refuse_given_parameters(
            ("reference",), "is not for a record of exec, which has no arms", "leave it out"
        )
        _print_or_write_report(record_document(source), target)
        return 0
    if len(paths) > 1:
        comparison = join_comparison([Path(path) for path in paths], reference=reference)
    else:
        comparison = reload_comparison(source, reference=reference)
    logs = log_addresses_by_cell(comparison, source, target.file.parent) if target.file else {}
    _print_or_write_report(comparison_document(comparison, logs), target, details=details)
    return say_unused_records(comparison)


def _choose_newest_run_directory_and_say_so() -> Path:
    from ampcompare.experiment.run_directory import require_run_directories_newest_first

    found, *others = require_run_directories_newest_first()
    line = f"the newest run directory: {printable_line(str(found), 300)}"
    if others:
        line += f"; the one before it: ampcompare report {printable_line(shlex.quote(str(others[0])), 300)}"
    if len(others) > 1:
        line += f"; all {len(others) + 1}: ampcompare list runs"
    click.echo(line, err=True)
    return found


@dataclass(frozen=True)
class _ReportDestination:
    """Where a report goes.

    Attributes:
        form: name in `FORMATS`.
        file: None for standard output.
        shown: open it in a browser.
    """

    form: str
    file: Path | None
    shown: bool

    def with_default_page_file(self, run: Path | None) -> _ReportDestination:
        """Return the target with a file for a page that is shown and has none: that of its run directory."""
        if not self.shown or self.file is not None:
            return self
        if run is None or not os.access(run, os.W_OK):
            run = Path(tempfile.mkdtemp(prefix="ampcompare-report-"))
        return replace(self, file=run / f"{RunFile.REPORT}.html")


def _report_destination_from_options(
    form: str | None, output: str | None, opens_browser: bool
) -> _ReportDestination:
    """Return where a report goes, from the options of the command."""
    if output in (None, "-"):
        return _ReportDestination("html" if opens_browser else form or "table", None, opens_browser)
    path = Path(str(output))
    into_folder = path.is_dir() or str(output).endswith(os.sep)
    if form is not None:
        chosen: str | None = form
    elif opens_browser:
        chosen = "html"
    elif into_folder:
        chosen = "table"
    else:
        chosen = SUFFIXES.get(path.suffix.lower())
    if chosen is None:
        raise ConfigError(f"--output {output!r} does not say which format; add --format {'|'.join(FORMATS)}")
    suffix = next(suffix for suffix, name in SUFFIXES.items() if name == chosen)
    return _ReportDestination(
        chosen, path / f"{RunFile.REPORT}{suffix}" if into_folder else path, opens_browser
    )


def _print_or_write_report(document: Document, target: _ReportDestination, *, details: bool = False) -> None:
    """Print a report, or write it to its file and open that where it is asked for."""
    if target.file is None:
        print_document(document, target.form, details=details)
        return
    write_atomically(target.file, FORMATS[target.form].make_reporter(details=details).document_text(document))
    click.echo(f"report: {printable_line(str(target.file), 500)}", err=True)
    if target.shown and not webbrowser.open(target.file.resolve().as_uri()):
        click.echo("note: no browser was found; open that file, or copy it to a machine with one", err=True)
