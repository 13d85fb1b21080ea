"""Lines on stderr: one for each thing that is not as the script asked, the first time that it matters."""

from __future__ import annotations

import sys

from ampcompare.base.environment.ranks import rank_of
from ampcompare.guards import Violation
from ampcompare.script.legacy.settings import ExecSettings

__all__ = ["note", "point_at_migrate", "print_violation"]

_printed: set[str] = set()


def note(text: str) -> None:
    """Print `ampcompare: TEXT` on stderr, once per text and process."""
    if text not in _printed:
        _printed.add(text)
        print(f"ampcompare: {text}", file=sys.stderr, flush=True)


def print_violation(violation: Violation) -> None:
    """Print `ampcompare guard NAME: FILE:LINE: WHAT; REMEDY` on stderr."""
    print(f"ampcompare {violation}", file=sys.stderr, flush=True)


def point_at_migrate(settings: ExecSettings) -> None:
    """Print where the way out of Apex is, on the first rank; nothing for a module, or without Apex."""
    if "apex" in sys.modules and settings.name.endswith(".py") and rank_of() == 0:
        note(f"to move this script to torch.amp, and check that it trains the same: ampcompare migrate {settings.name}")
