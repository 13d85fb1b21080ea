"""Lines on stderr: one for each thing that is not as the script asked, the first time that it matters."""

import os
import shlex
import sys

from ampcompare.base.environment.ranks import rank_of_process
from ampcompare.base.formatting import fold_line_to_terminal_width
from ampcompare.guards import Violation
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.invocation.target import loaded_apex_files_in_folder
from ampcompare.source.migrate.adapter.mark import loaded_adapters

_printed: set[str] = set()


def say(text: str) -> None:
    """Print `ampcompare: TEXT` on stderr, folded to a terminal."""
    print(fold_line_to_terminal_width(f"ampcompare: {text}"), file=sys.stderr, flush=True)


def say_once(text: str) -> None:
    """Print `ampcompare: TEXT` on stderr, once per text and process."""
    if text not in _printed:
        _printed.add(text)
        say(text)


def print_violation(violation: Violation) -> None:
    """Print `ampcompare guard NAME: FILE:LINE: WHAT; REMEDY` on stderr."""
    print(fold_line_to_terminal_width(f"ampcompare {violation}"), file=sys.stderr, flush=True)


def print_hint_at_migrate(settings: ExecSettings) -> None:
    """Print where the way out of Apex is, on the first rank; nothing for a module, or without Apex."""
    if "apex" not in sys.modules or not settings.name.endswith(".py") or rank_of_process() != 0:
        return
    folder = os.path.dirname(settings.name)
    script = getattr(sys.modules["__main__"], "__file__", settings.name)  # of before any os.chdir
    files = [os.path.join(folder, each) for each in loaded_apex_files_in_folder(script)]
    if not files or loaded_adapters():  # a record has imported Apex, or the script is moved
        return
    command = [
        "ampcompare",
        "migrate",
        "--verify",
        settings.name,
        *(["--", *settings.arguments] * bool(settings.arguments)),
    ]
    say_once(
        f"to move {', '.join(files)} to torch.amp, and check that it trains the same: {shlex.join(command)}"
    )
