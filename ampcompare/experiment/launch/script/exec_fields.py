"""What the settings of a run say of `exec`: the same for a cell, for what looks at a script, and for one step of it."""

from __future__ import annotations

from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.backends.script_arms import engine_in_script
from ampcompare.settings.config import RunConfig


def exec_fields_of_script(config: RunConfig) -> dict[str, Any]:
    """Return the fields of `ExecSettings` that a script has under any arm, by their names: seed, device, old APIs.

    Args:
        config: of a run that trains a script.
    """
    assert config.script is not None
    return {
        "seed": config.recipe.seed,
        "device": "cpu" if config.device == "cpu" else None,
        "compat_torch": config.script.compat_torch,
        "name": config.script.name,
    }


def exec_fields_under_arm(config: RunConfig, arm: str) -> dict[str, Any]:
    """Return the fields of `ExecSettings` that a script has under an arm.

    Args:
        config: of a run that trains a script; its own arm may be another one.
        arm: as `Arm` spells it.
    """
    assert config.script is not None
    return {
        **exec_fields_of_script(config),
        "engine": engine_in_script(Arm.parse(arm)),
        "arm": arm,
        "shift_seeds": config.script.shift_seeds,
        "autocast_lists": config.autocast_lists,
    }
