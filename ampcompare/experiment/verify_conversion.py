"""Check whether training continues from a converted checkpoint as from its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.errors import AmpCompareError, CheckpointError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.processes.call import call_in_child
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import validate

__all__ = ["ROUNDING", "Continued", "verify_conversion"]

ROUNDING = 2.0**-7
"""Largest relative difference of two first losses that fp16 arithmetic explains: eight units in its last place."""

TIME_LIMIT = 1800.0
PROGRAM = Path(__file__).resolve().parent.parent / "training" / "continue_checkpoint.py"
ERRORS: dict[int, type[AmpCompareError]] = {2: CheckpointError, 4: EnvironmentUnfit}


@dataclass(frozen=True)
class Continued:
    """Training resumed from a source and from what it was converted to, on the same batches.

    Attributes:
        arms: of the source and of the result.
        losses: per arm, of each step.
        scales: per arm, the loss scale before the first step and after each; empty where nothing is scaled.
        skipped: per arm, steps that overflow skipped.
    """

    arms: tuple[str, str]
    losses: tuple[list[float], list[float]]
    scales: tuple[list[float], list[float]]
    skipped: tuple[int, int]

    def differences(self) -> list[float]:
        """Return the relative difference of the losses of each step."""
        return [abs(a - b) / abs(a) if a else abs(b) for a, b in zip(*self.losses, strict=True)]

    @property
    def agrees(self) -> bool:
        """Whether the first losses differ by no more than fp16 rounding."""
        return self.differences()[0] <= ROUNDING


def verify_conversion(
    source: Path,
    target: Path,
    *,
    level: str | None,
    kind: str | None = None,
    to: str,
    config: RunConfig | None = None,
    steps: int = 10,
) -> Continued:
    """Train a few steps from both files, each in a separate process, on the same batches.

    Args:
        level: opt level of the Apex side.
        kind: of the source, as `Conversion.source`; the other one than `to` where None.
        to: "native" or "apex": what `target` is.
        config: model and data, which a checkpoint of ampcompare brings along.

    Raises:
        ConfigError: the source is of another program, and no settings were given.
        CheckpointError: a file does not fit the model or the optimizer.
        LaunchError: training raised.
    """
    recipes = [_recipe(path) for path in (source, target)]
    if config is None:
        recipe = recipes[0][0] or recipes[1][0]
        if recipe is None:
            raise ConfigError(
                f"{source} does not say which model and data it belongs to; give --config with a file that names both"
            )
        config = validate(RunConfig, {"recipe": recipe})
    apex = f"apex:{level or 'O1'}"
    native = "fp32" if level == "O0" else "native:fp16"
    from_apex = to == "native" if kind is None else kind != "native"
    guessed = (apex if from_apex else native, apex if to == "apex" else native)
    found = [
        _continue(config, path, own or arm, steps)
        for path, (_, own), arm in zip((source, target), recipes, guessed, strict=True)
    ]
    first, second = found
    return Continued(
        (first["arm"], second["arm"]),
        ([float(loss) for loss in first["losses"]], [float(loss) for loss in second["losses"]]),
        (_scales(first), _scales(second)),
        (first["skipped"], second["skipped"]),
    )


def _recipe(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return the recipe and the arm that a checkpoint of ampcompare contains."""
    from ampcompare.training.checkpoint.convert.load import load_any

    state, _ = load_any(path)
    recipe, arm = state.get("recipe"), state.get("arm")
    return recipe if isinstance(recipe, dict) else None, arm if isinstance(arm, str) else None


def _continue(config: RunConfig, checkpoint: Path, arm: str, steps: int) -> dict[str, Any]:
    settings = validate(RunConfig, {**config.model_dump(mode="json"), "arm": arm, "processes": 1, "parallel": {}})
    options = {
        "config": settings.model_dump(mode="json"),
        "checkpoint": str(checkpoint),
        "steps": steps,
    }
    answer = call_in_child(PROGRAM, seconds=TIME_LIMIT, options=options, shared=settings.writable_paths())
    if not answer.done:
        raise LaunchError(f"training from {checkpoint} as {arm} failed: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return answer.value


def _scales(found: dict[str, Any]) -> list[float]:
    scales = [found["scales_before"], *found["scales"]]
    return [float(scale[0]) for scale in scales if scale]
