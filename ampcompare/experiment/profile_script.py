"""The profile of a user's own script, in processes of its own. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.errors import LaunchError
from ampcompare.experiment.diagnose_script import ENDED, ERRORS, error_of, run_watched, watched_settings
from ampcompare.profiling.options import ProfileRequest
from ampcompare.records.profile import ArmProfile, RankTimes
from ampcompare.settings.config import RunConfig

__all__ = ["profile_script"]


def profile_script(config: RunConfig, folder: Path, *, steps: int, profiled: int) -> tuple[ArmProfile, dict[str, Any]]:
    """Run a script under the arm of a configuration until its steps are profiled; return the profile and the trace.

    Args:
        config: it names a script.
        folder: for the files of the run.

    Returns:
        The profile of rank 0, with the times of all ranks, and its trace.

    Raises:
        ConfigError: the script cannot run under the arm.
        EnvironmentUnfit: this machine lacks something.
        LaunchError: the script failed, or made too few steps.
    """
    script = config.script
    assert script is not None
    request = ProfileRequest(
        settings=watched_settings(config, config.parsed_arm, folder),
        is_module=script.is_module,
        steps=steps,
        profiled=profiled,
        answers=str(folder),
        ended=str(folder / ENDED),
    )
    request.write(folder / "request.json")
    code = run_watched(config, folder, "ampcompare.script.profiled")
    if not request.answer(0).exists():
        if code:
            raise ERRORS.get(code, LaunchError)(f"the script showed no step to profile: {error_of(code, folder)}")
        raise LaunchError(
            "the script ended before its steps were profiled; a step is a backward pass and an optimizer step, and a "
            f"profile takes {steps + profiled + 8} of them: let it train longer, or lower --steps"
        )
    ranks = [_read(request.answer(rank)) for rank in range(config.processes) if request.answer(rank).exists()]
    found = ranks[0].model_copy(update={"ranks": _times(ranks) if len(ranks) > 1 else []})
    return found, json.loads(request.trace.read_text(encoding="utf-8"))


def _read(path: Path) -> ArmProfile:
    return ArmProfile.model_validate_json(path.read_text(encoding="utf-8"))


def _times(ranks: Sequence[ArmProfile]) -> list[RankTimes]:
    return [
        RankTimes(rank=rank, seconds=one.seconds, communication=one.communication) for rank, one in enumerate(ranks)
    ]
