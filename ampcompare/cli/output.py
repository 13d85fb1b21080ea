"""What a command writes to the standard streams: also where they are closed, and where its reader has gone.

Nothing heavy is imported at the top, so that the first page of help comes at once.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import sys
from collections.abc import Callable

from ampcompare.base.formatting import fold_line_to_terminal_width

TYPE_CHECKING = False  # the first page imports no typing
if TYPE_CHECKING:
    from typing import Any

    from ampcompare.results.report.document import Document

MAX_TEXT_WIDTH = 120

# Writing results to a closed output is an error, as to a full disk; messages that no one wants to see are none.
STREAMS = (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))


def text_width() -> int:
    """Return how many columns a text may have: those of the terminal, 100 without one, at most 120."""
    return min(shutil.get_terminal_size((100, 24)).columns, MAX_TEXT_WIDTH)


def print_folded_on_stderr(line: str, write: Callable[[str], object] | None = None) -> None:
    """Write a line for people to stderr, or by a function, folded to the width of a terminal."""
    import click

    text = fold_line_to_terminal_width(line)
    if write is None:
        click.echo(text, err=True)
    else:
        write(text)


def say_on_stdout(text: str, *, nl: bool = True) -> None:
    """Write a result to stdout as it is, colors included; if the reader has closed it, the command continues."""
    import click

    try:
        click.echo(text, nl=nl, color=True)
    except BrokenPipeError:
        discard_buffered_output()


def print_document(
    document: Document, form: str = "table", *, width: int | None = None, details: bool = False
) -> None:
    """Print the report of a result on stdout: the one way in which commands do.

    Args:
        document: as the functions of `results/report/documents` make them.
        form: name in `FORMATS`; `table` is that of terminals.
        width: of plain text, in characters; None for the width and the colors that stdout has.
        details: whether everything else follows what a reader sees first.
    """
    from ampcompare.results.report.base import FORMATS
    from ampcompare.results.report.tables import terminal_width
    from ampcompare.results.report.terminal import has_color

    reporter = FORMATS[form].make_reporter(
        terminal_width() if width is None else width,
        color=width is None and has_color(sys.stdout),
        details=details,
    )
    say_on_stdout(reporter.document_text(document), nl=False)


def print_json(data: Any, *, indent: int | None = 1) -> None:
    """Print data on stdout as strict JSON: the one way in which commands do, where the result is no document.

    Args:
        data: as `dump_json` takes it.
        indent: spaces for each level; None for one line.
    """
    from ampcompare.results.records.document import dump_json

    say_on_stdout(dump_json(data, indent=indent))


def discard_buffered_output() -> None:
    """Send what is still buffered nowhere: flushing it at the end would fail again, with its own code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def discard_output_of_closed_terminal() -> None:
    """Send output nowhere that went to a terminal which is closed: writing there would end the command, unsaved."""
    for number in (1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def replace_closed_standard_streams() -> None:
    """Replace each closed standard stream, so that no other file gets its number; stdout takes all characters."""
    for number, (name, mode, flags) in enumerate(STREAMS):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # what Latin-1 or a code page cannot hold, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")


def write_traceback_and_name_file(error: Exception) -> str:
    """Write the traceback of an error that no part of the program expects to a file; return one line that names it."""
    import tempfile
    import traceback

    what = "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
    text = f"internal error: {' '.join(what.split())[:300]}"
    try:
        descriptor, path = tempfile.mkstemp(prefix="ampcompare-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError as fault:
        return f"{text} (no details: the temporary folder cannot be written: {fault.strerror})"
    return f"{text}; please report it with the details in {path}"
