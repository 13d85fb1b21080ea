"""A diagnosis of a recipe in a separate process. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.isolate.call import call_in_child
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.runs.records.diagnosis import Diagnosis

__all__ = ["diagnose_in_child"]

TIME_LIMIT = 3600.0
PROGRAM = Path(__file__).resolve().parent / "diagnose_recipe.py"
ERRORS: dict[int, type[AmpCompareError]] = {2: ConfigError, 4: EnvironmentUnfit}


def diagnose_in_child(
    options: DiagnoseOptions, *, seconds: float = TIME_LIMIT, environment: Mapping[str, str] | None = None
) -> Diagnosis:
    """Diagnose a recipe in a separate process.

    Args:
        environment: variables that the process gets in addition.

    Raises:
        ConfigError: a name, a file or an option that cannot be used.
        EnvironmentUnfit: this machine lacks something that the arm or the data need.
        LaunchError: the model raised, or the process died or did not end in time.
    """
    options.check()
    answer = call_in_child(
        PROGRAM,
        seconds=seconds,
        environment=environment,
        options={
            "config": options.config.model_dump(mode="json"),
            "steps": options.steps,
            "at": list(options.at),
            "reference": options.reference,
            "cures": options.cures,
        },
    )
    if not answer.done:
        raise LaunchError(f"{options.config.arm} cannot be diagnosed: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return Diagnosis.model_validate(answer.value)
