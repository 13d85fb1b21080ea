"""`%%ampcompare`: the cell of a notebook is a script, and `compare -- SCRIPT` trains it under each arm.

The cell is written to a file of its own and runs in separate processes: it does not see the variables of the kernel,
except those that `--with` copies into it.
"""

import ast
import hashlib
import shlex
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from ampcompare.base.errors import AmpCompareError, ConfigError

FOLDER = Path("runs", "cells")
# The first line of the script stands where the cell has the line of the magic, so that line numbers agree. Modules of
# the working directory can be imported, as in the notebook.
FIRST = '__import__("sys").path.insert(0, "")'
USAGE = "%%ampcompare --arm fp32,bf16 [--with NAME,...] [options of compare] [-- arguments of the script]"


def load_ipython_extension(shell: Any) -> None:
    """Add the magic to a shell of IPython: `%load_ext ampcompare`."""

    def ampcompare(line: str, cell: str) -> Any:
        """Train the code of this cell under each arm and compare; options are those of `ampcompare compare`."""
        try:
            return compare_on_notebook_cell(line, cell, shell.user_ns)
        except (AmpCompareError, click.ClickException) as error:
            text = error.format_message() if isinstance(error, click.ClickException) else str(error)
            # One line, without a traceback.
            raise import_module("IPython.core.error").UsageError(text) from None

    shell.register_magic_function(ampcompare, magic_kind="cell", magic_name="ampcompare")


def compare_on_notebook_cell(line: str, cell: str, variables: Mapping[str, Any]) -> Any:
    """Compare the arms of a line on the code of a cell; None for options that train nothing, as `--dry-run`.

    A line has options of `compare`, and `--with NAME,...` for variables of the kernel; the script's own follow `--`.
    """
    from ampcompare.base.errors import LaunchError
    from ampcompare.cli.compare_command import compare_options_from_parameters, run_instead_of_comparison
    from ampcompare.cli.group import cli
    from ampcompare.cli.help import Command
    from ampcompare.experiment.compare import run_comparison
    from ampcompare.experiment.notebook_progress import NotebookProgress

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"the line of the magic cannot be read: {error}; write {USAGE}") from None
    place = words.index("--") if "--" in words else len(words)
    names, own = _variable_names_and_other_words(words[:place])
    path = _write_script(script_of_cell(cell, {name: _variable_as_code(name, variables) for name in names}))
    typed = [*own, "--", str(path), *words[place + 1 :]]
    group = click.Context(cli, info_name="ampcompare", **cli.context_settings)
    command = cli.get_command(group, "compare")
    assert isinstance(command, Command)
    with command.make_context("compare", typed, parent=group) as context:
        asked = command.resolve_options(context)
        assert asked is not None
        options = compare_options_from_parameters(context.params).with_attributes(
            command=shlex.join(["ampcompare", "compare", *typed])
        )
        if run_instead_of_comparison(asked, options, context.params) is not None:
            return None
        outcome = run_comparison(options, observer=None if context.params["quiet"] else NotebookProgress())
    outcome.write_junit()
    if outcome.record_of_common_failure is not None:
        raise LaunchError(
            f"every run failed: {outcome.record_of_common_failure.error}; the logs are in {outcome.folder}/cells"
        )
    outcome.raise_if_gate_failed()
    return outcome.comparison


def _variable_names_and_other_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the names after `--with`, and the other words."""
    params = [
        click.Option(["--with"], multiple=True),
        click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED),
    ]
    settings = {"ignore_unknown_options": True}
    reader = click.Command("%%ampcompare", params=params, add_help_option=False, context_settings=settings)
    try:
        found = reader.make_context("%%ampcompare", words).params
    except click.UsageError:  # without a value
        found = {"with": [""]}
    if "" in found["with"]:
        raise ConfigError(f"--with names no variable; write {USAGE}")
    return [name.strip() for text in found["with"] for name in text.split(",") if name.strip()], list(
        found["rest"]
    )


def _variable_as_code(name: str, variables: Mapping[str, Any]) -> str:
    """Return a variable of the kernel as code, if it is a plain value."""
    if name not in variables:
        raise ConfigError(f"--with {name}: the notebook has no variable of this name")
    text = repr(variables[name])
    try:
        same = ast.literal_eval(text) == variables[name]
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        same = False
    if not same or "\n" in text:
        kind = type(variables[name]).__name__
        raise ConfigError(
            f"--with {name}: a value of type {kind} cannot be written into the script; only numbers, texts, "
            "None, and lists, tuples, sets and dictionaries of them can. Make it in the cell, or import it from a file"
        )
    return text


def script_of_cell(cell: str, values: Mapping[str, str]) -> str:
    """Return the script: the cell below one line that sets the variables to their code."""
    try:
        tree = ast.parse(f"\n{cell}")
    except SyntaxError as error:
        raise ConfigError(
            f"the cell is not Python: line {error.lineno}: {error.msg}; lines with % or ! belong into another cell"
        ) from None
    if not tree.body:
        raise ConfigError("the cell is empty; write a script that trains below the line of the magic")
    first = "; ".join([FIRST, *(f"{name} = {text}" for name, text in values.items())])
    lines = ["", *cell.splitlines()]
    # A script must begin with its imports from __future__; the line that sets variables then comes behind them.
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    if futures:
        lines.insert(futures[-1].end_lineno or 0, first)
    else:
        lines[0] = first
    return "\n".join(lines) + "\n"


def _write_script(script: str) -> Path:
    """Return the file of a script; its name is that of its text, so that an unchanged cell resumes."""
    from ampcompare.base.files.write import write_atomically

    path = FOLDER / f"cell_{hashlib.sha256(script.encode()).hexdigest()[:8]}.py"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, script)
    return path
