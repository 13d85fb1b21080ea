"""Point at `ampcompare migrate`, once, when a script that uses Apex warns or ends."""

from __future__ import annotations

import os
import sys

from ampcompare.script.legacy.settings import ExecSettings
from ampcompare.script.legacy.stderr import note

__all__ = ["point_at_migrate"]


def point_at_migrate(settings: ExecSettings) -> None:
    """Print where the way out of Apex is, on the first rank; nothing for a module, or without Apex."""
    if "apex" in sys.modules and settings.name.endswith(".py") and os.environ.get("RANK", "0") == "0":
        note(f"to move this script to torch.amp, and check that it trains the same: ampcompare migrate {settings.name}")
