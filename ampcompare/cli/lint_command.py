"""`ampcompare lint`: mistakes in the use of Apex and `torch.amp`, in source files."""

from __future__ import annotations

from pathlib import Path

import click

from ampcompare.api.migration import lint_paths
from ampcompare.cli.help import Command, option, options_of
from ampcompare.cli.values import FILE, Choice

__all__ = ["command"]


@click.command(
    "lint",
    cls=Command,
    examples=[
        ("All Python files and notebooks of a project:", "ampcompare lint src"),
        ("Fix what can be fixed safely:", "ampcompare lint --fix train.py"),
        ("Annotations in a pull request on GitHub:", "ampcompare lint --format github src"),
    ],
    epilog="Exit codes: 0 no findings; 1 findings; 2 usage, or a file that cannot be read, parsed or written. "
    "`# noqa: AMP201` on a line silences a code there.",
)
@options_of(lint_paths)("--fix")
@options_of(lint_paths)("--torch-version", metavar="VERSION")
@option(
    "--format",
    "form",
    type=Choice(["text", "json", "github"]),
    default="text",
    show_default=True,
    help="of the report on stdout",
)
@option("--select", metavar="CODES", help="report only these codes or prefixes, separated by commas: AMP2,AMP301")
@option("--ignore", metavar="CODES", help="do not report these codes or prefixes")
@option("--exclude", metavar="PATTERN", multiple=True, help="leave out files and folders; repeatable")
@click.argument("paths", metavar="PATHS...", nargs=-1, required=True, type=FILE)
def command(
    fix: bool,
    torch_version: str | None,
    form: str,
    select: str | None,
    ignore: str | None,
    exclude: tuple[str, ...],
    paths: tuple[str, ...],
) -> int:
    """Report mistakes in the use of Apex and torch.amp in source files.

    PATHS are Python files, notebooks or folders. Nothing is run or imported. Settings come from
    [tool.ampcompare.lint] of pyproject.toml: select, ignore, exclude.
    """
    from dataclasses import replace

    from ampcompare.base.errors import ConfigError
    from ampcompare.source.find import find_sources
    from ampcompare.source.lint.report import FORMATS
    from ampcompare.source.lint.run import lint_files, read_selection
    from ampcompare.source.versions import known_versions

    roots = [Path(path) for path in paths]
    selection = replace(read_selection(roots), versions=known_versions(torch_version))
    if select is not None:
        selection = replace(selection, select=_codes(select))
    if ignore is not None:
        selection = replace(selection, ignore=_codes(ignore))
    selection = replace(selection, exclude=(*selection.exclude, *exclude))

    unreadable: list[str] = []
    exclude = selection.exclude
    found = find_sources(roots, exclude=exclude, unreadable=lambda path, why: unreadable.append(f"{path}: {why}"))
    report = lint_files(list(found), selection, fix=fix, named=roots)
    for line in FORMATS[form](report):
        click.echo(line)
    for note in (*unreadable, *map(str, report.unread)):
        click.echo(f"ampcompare: not read: {note}", err=True)
    if form == "text":
        click.echo(report.summary(), err=True)
    if unreadable or report.unread:
        return ConfigError.exit_code
    return 1 if report.findings else 0


def _codes(text: str) -> tuple[str, ...]:
    return tuple(code.strip().upper() for code in text.split(",") if code.strip())
