"""Options that were renamed: the old names keep working, on the command line and as variables, and help hides them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.parser import _OptionParser

__all__ = ["OLD_NAMES", "RenamedOption", "variable_name"]

OLD_NAMES = {
    "--convert-on-resume": "--resume-into-other-arm",
    "--no-convert-on-resume": "--no-resume-into-other-arm",
    "--fail-below-loss-scale": "--stop-loss-scale",
    "--layerwise-lr": "--layer-lr",
    "--log-interval": "--drain-every",
    "--max-consecutive-skips": "--max-skipped",
    "--objective": "--prefer",
    "--progress-interval": "--notify-every",
    "--save-apex-format": "--apex-layout",
    "--no-save-apex-format": "--no-apex-layout",
    "--size": "--scale",
    "--sweep": "--vary",
    "--target": "--target-top1",
    "--unsafe-load": "--trust-checkpoint",
}


def variable_name(command: str, flag: str) -> str:
    """Return the environment variable that sets an option of a command."""
    return f"AMPCOMPARE_{command}_{flag.lstrip('-')}".replace("-", "_").upper()


class RenamedOption(click.Option):
    """An option that also accepts the old names of its flags, and its old environment variable.

    Attributes:
        old_envvar: set by the group of commands, which knows the name of the command.
    """

    old_envvar: str | None = None

    def add_to_parser(self, parser: _OptionParser, ctx: click.Context) -> None:
        """Register the flags with their old names; only the parser sees the latter, so help does not list them."""
        shown = self.opts, self.secondary_opts
        self.opts, self.secondary_opts = map(_with_old_names, shown)
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts, self.secondary_opts = shown

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the variable, or else of the old one."""
        value = super().resolve_envvar_value(ctx)
        return value or (os.environ.get(self.old_envvar) if self.old_envvar else None) or None


def _with_old_names(flags: list[str]) -> list[str]:
    return [*flags, *(OLD_NAMES[flag] for flag in flags if flag in OLD_NAMES)]
