"""The profile of an arm on a recipe in a separate process. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.isolate.call import call_in_child
from ampcompare.records.profile import ArmProfile
from ampcompare.settings.config import RunConfig

__all__ = ["profile_in_child"]

TIME_LIMIT = 3600.0
PROGRAM = Path(__file__).resolve().parent / "profile_recipe.py"
ERRORS: dict[int, type[AmpCompareError]] = {2: ConfigError, 4: EnvironmentUnfit}


def profile_in_child(
    config: RunConfig,
    *,
    steps: int,
    profiled: int,
    trials: bool,
    trace: Path | None = None,
    seconds: float = TIME_LIMIT,
) -> ArmProfile:
    """Profile an arm on a recipe in a separate process.

    Args:
        trace: file for the trace.

    Raises:
        ConfigError: a name, a file or an option that cannot be used.
        EnvironmentUnfit: this machine lacks something that the arm or the data need.
        LaunchError: the model raised, or the process died or did not end in time.
    """
    answer = call_in_child(
        PROGRAM,
        seconds=seconds,
        options={
            "config": config.model_dump(mode="json"),
            "steps": steps,
            "profiled": profiled,
            "trials": trials,
            "trace": "" if trace is None else str(trace),
        },
    )
    if not answer.done:
        raise LaunchError(f"{config.arm} cannot be profiled: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return ArmProfile.model_validate(answer.value)
