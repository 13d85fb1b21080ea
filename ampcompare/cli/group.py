"""The group of commands: each is imported when it is called."""

import importlib
import os
import time
from typing import Any

import click

from ampcompare.base.environment.variables import OTHER_VARIABLES
from ampcompare.base.errors import AmpCompareError, close_matches
from ampcompare.base.version import __version__
from ampcompare.cli import COMMANDS, SUMMARY, help_overview_text
from ampcompare.cli.help import OLD_NAMES, environment_variable_of_option
from ampcompare.cli.output import (
    discard_buffered_output,
    print_folded_on_stderr,
    write_traceback_and_name_file,
)

INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h
SILENT_SECONDS = 2.0
RESUMED = ("run", "compare")


class _LazyGroup(click.Group):
    """Knows its commands by name; imports one only to run it or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ampcompare.cli.{cmd_name.replace('-', '_')}_command")
        command: click.Command = module.command
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                parameter.envvar = environment_variable_of_option(cmd_name, max(parameter.opts, key=len))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = close_matches(args[0], COMMANDS)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None

        if name is not None and command is not None and not ctx.resilient_parsing:
            _report_unused_environment_variables(name, command)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A reader that closes the output early, such as `head`, is not a failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would exit with 1, the code of a failed gate
            discard_buffered_output()
            return 0
        except (KeyboardInterrupt, click.Abort):
            resumes = ctx.invoked_subcommand in RESUMED
            rest = "; the same command starts with the first cell that has no record" if resumes else ""
            return _print_error(f"interrupted{rest}", 130)

    def get_help(self, ctx: click.Context) -> str:
        return help_overview_text().rstrip("\n")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Return the commands that begin with `incomplete`, each with its summary, or the flags of the group."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]


def _report_unused_environment_variables(name: str, command: click.Command) -> None:
    """Report variables that look like settings and are not: a mistyped one would silently change nothing."""
    known = [parameter.envvar for parameter in command.params if isinstance(parameter.envvar, str)]
    renamed = [environment_variable_of_option(name, flag) for flag in OLD_NAMES.values()]
    prefix = f"AMPCOMPARE_{name}_".replace("-", "_").upper()
    for variable in sorted(os.environ):
        word = variable.removeprefix("AMPCOMPARE_")
        of_another = any(
            word.startswith(f"{command}_".replace("-", "_").upper()) for command in COMMANDS
        ) and not variable.startswith(prefix)
        if word == variable or variable in (*known, *renamed, *OTHER_VARIABLES) or of_another:
            continue
        close = close_matches(prefix + variable.removeprefix(prefix).removeprefix("AMPCOMPARE_"), known)
        hint = f"did you mean {close[0]}?" if close else f"its variables begin with {prefix}"
        print_folded_on_stderr(f"note: {variable} is not a setting of {name}; {hint}")


NEW_NAMES = {old.removeprefix("--"): new.removeprefix("--") for new, old in OLD_NAMES.items()}


def _current_option_name(name: str) -> str:
    """Return the name of an option in its present form: with hyphens, and without its old name."""
    plain = name.replace("_", "-")
    return NEW_NAMES.get(plain, plain)


@click.command(
    cls=_LazyGroup,
    help=SUMMARY,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _current_option_name},
)
@click.version_option(__version__, "-V", "--version", prog_name="ampcompare")
@click.option(
    "--local-rank",
    hidden=True,
    help="torch.distributed.launch puts it before the command; exec gives it to the script",
)
def cli(local_rank: str | None) -> None:
    """Group the commands; each has its own file."""


def run_command_line(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; errors meant for users are one line on stderr."""
    try:
        result = cli.main(arguments, prog_name="ampcompare", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except AmpCompareError as error:
        return _print_error(str(error), error.exit_code)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _print_error("interrupted", 130)
    except OSError as error:  # such as a full disk behind stdout; other files report their own errors
        discard_buffered_output()
        what = "cannot write the output: " if error.filename is None else f"{str(error.filename)[:300]}: "
        return _print_error(f"{what}{error.strerror or error}", 4)
    except Exception as error:
        from ampcompare.base.environment.extras import missing_package_error
        from ampcompare.base.environment.torch_names import own_missing_torch_name_error

        if missing := missing_package_error(error) or own_missing_torch_name_error(error):
            return _print_error(str(missing), missing.exit_code)
        return _print_error(write_traceback_and_name_file(error), INTERNAL_ERROR)


def _print_error(message: str, code: int) -> int:
    from ampcompare.base.environment.ranks import rank_of_process
    from ampcompare.base.formatting import printable_line

    if (
        rank := rank_of_process()
    ) > 0:  # an error that stops every rank is reported once, by rank 0; the others wait for that
        time.sleep(SILENT_SECONDS)
        if code == 2:
            return code
        message = f"rank {rank}: {message}"
    print_folded_on_stderr(f"ampcompare: {printable_line(message, 2000, keep_end=600)}")
    return code
