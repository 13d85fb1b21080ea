"""The profile of a user's own script. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ampcompare.records.profile import ArmProfile
from ampcompare.settings.config import RunConfig

__all__ = ["profile_script"]


def profile_script(config: RunConfig, folder: Path, *, steps: int, profiled: int) -> tuple[ArmProfile, dict[str, Any]]:
    raise NotImplementedError
