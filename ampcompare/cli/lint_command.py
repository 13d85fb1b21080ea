"""`ampcompare lint`: mistakes in the use of Apex and `torch.amp`, in source files."""

import click

from ampcompare.api.migration import lint_paths
from ampcompare.cli.help import Command, make_option_from_signature, option
from ampcompare.cli.values import FILE, WordChoice
from ampcompare.source.lint.report import FORMATS


@click.command(
    "lint",
    cls=Command,
    examples=[
        ("All Python files and notebooks of a project:", "ampcompare lint src"),
        ("Fix what can be fixed safely:", "ampcompare lint --fix train.py"),
        ("A file for code scanning:", "ampcompare lint --format sarif src"),
    ],
    epilog="Exit codes: 0 no findings; 1 findings; 2 usage, or a file that cannot be read, parsed or written. "
    "`# noqa: AMP201` on a line silences a code there.",
)
@make_option_from_signature(lint_paths)("--fix")
@make_option_from_signature(lint_paths)("--torch-version", metavar="VERSION")
@option(
    "--format",
    "form",
    type=WordChoice(list(FORMATS)),
    default="text",
    show_default=True,
    help="of the report on stdout",
)
@option(
    "--select", metavar="CODES", help="report only these codes or prefixes, separated by commas: AMP2,AMP301"
)
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
    from ampcompare.base.errors import ConfigError

    codes, left = _split_codes(select), _split_codes(ignore)
    report = lint_paths(
        *paths, select=codes, ignore=left, exclude=exclude, fix=fix, torch_version=torch_version
    )
    for line in FORMATS[form](report):
        click.echo(line)
    for note in report.unread:
        click.echo(f"ampcompare: not read: {note}", err=True)
    if form == "text":
        click.echo(report.summary(), err=True)
    if report.unread:
        return ConfigError.exit_code
    return 1 if report.findings else 0


def _split_codes(text: str | None) -> list[str] | None:
    return None if text is None else [code.strip().upper() for code in text.split(",") if code.strip()]
