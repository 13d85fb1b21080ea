"""`--wait [TIME]`, other times, and the command as it was typed."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

from ampcompare.base.errors import ConfigError
from ampcompare.base.secrets import hide
from ampcompare.cli.help import OUTPUT, option

__all__ = ["typed_command", "wait_option", "wait_seconds"]

FOREVER = "forever"


def wait_option() -> Callable[..., Any]:
    """Return the option `--wait [TIME]`."""
    return option(
        "--wait",
        group=OUTPUT,
        is_flag=False,
        flag_value=FOREVER,
        metavar="[TIME]",
        help="wait while another command uses the run directory, at most this long",
    )


def wait_seconds(wait: str | None) -> float:
    """Return how long to wait for another command.

    Raises:
        ConfigError: it is not a time.
    """
    from ampcompare.settings.durations import parse_duration

    if wait is None:
        return 0.0
    if wait == FOREVER:
        return math.inf
    seconds = float(wait) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", wait) else parse_duration(wait)
    if seconds is None:
        raise ConfigError(f"--wait {wait!r} is not a time such as 30 (seconds), 10m or 1h30m")
    return seconds


def typed_command() -> str:
    """Return the command line of this process, as it would be typed, with placeholders for secrets."""
    return shlex.join(["ampcompare", *hide(sys.argv[1:])])
