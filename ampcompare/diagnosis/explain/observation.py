"""Asking a child process what it sees of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.isolate.call import call_in_child
from ampcompare.settings.config import RunConfig

__all__ = ["MAX_SAMPLES", "observe_in_child"]

MAX_SAMPLES = 8
TIME_LIMIT = 600.0
PROGRAM = Path(__file__).resolve().parent / "observe.py"
ERRORS: dict[int, type[AmpCompareError]] = {2: ConfigError, 4: EnvironmentUnfit}


def observe_in_child(config: RunConfig, *, seconds: float = TIME_LIMIT) -> dict[str, Any]:
    """Prepare the model of `config` in a separate process, and return what one step of it shows.

    Types do not depend on the number of samples, so that at most `MAX_SAMPLES` are used.

    Raises:
        ConfigError: a name, a file or a user's factory that cannot be used.
        EnvironmentUnfit: this machine lacks something that the arm or the data need.
        LaunchError: the model raised, or the process died or did not end in time.
    """
    recipe = config.recipe
    changes = {"batch_size": min(recipe.batch_size, MAX_SAMPLES), "grad_accum_steps": 1}
    small = config.model_copy(update={"recipe": recipe.model_copy(update=changes)})
    answer = call_in_child(PROGRAM, seconds=seconds, options={"config": small.model_dump(mode="json")})
    if not answer.done:
        raise LaunchError(f"{config.arm} cannot be observed on {recipe.model.arch}: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return answer.value
