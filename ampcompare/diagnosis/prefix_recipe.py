"""The first steps of a recipe in fp32, as plain data. Runs in a child process: threads are set once."""

from contextlib import closing, suppress
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.loops import Conditions, isolated_precision, recipe_loop
from ampcompare.diagnosis.prefix import PrefixWatch
from ampcompare.diagnosis.watched_precision import StepsDone, WatchedPrecision
from ampcompare.settings.examination import answering_errors
from ampcompare.training.assemble import Assembly
from ampcompare.training.process import enter_process


@answering_errors
def prefix_recipe(config: dict[str, Any], steps: int, total: int | None, is_twin: bool) -> dict[str, Any]:
    """Train the first steps of a configuration in fp32, and return what was seen."""
    settings, device = enter_process({**config, "arm": "fp32"})
    conditions = Conditions(device=str(device), seed=settings.recipe.seed)
    with (
        isolated_precision(Arm.parse("fp32"), conditions) as precision,
        closing(PrefixWatch(steps, total=total)) as watch,
    ):

        def show(assembly: Assembly) -> None:
            watch.follow(assembly.schedule, total or assembly.total_steps)

        with suppress(StepsDone):
            recipe_loop(settings, device, is_twin=is_twin, show=show)(WatchedPrecision(precision, watch))
    return watch.result().model_dump(mode="json")
