"""The first steps of a recipe in fp32, as plain data. Runs in a child process: threads are set once."""

from contextlib import closing, suppress
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.loops import LoopConditions, arm_precision_isolated, make_recipe_loop
from ampcompare.diagnosis.prefix import PrefixWatch
from ampcompare.diagnosis.watched_precision import StepsDone, WatchedPrecision
from ampcompare.settings.examination import return_user_errors
from ampcompare.training.assemble import TrainingAssembly
from ampcompare.training.process.switches import configure_examining_process


@return_user_errors
def prefix_recipe(config: dict[str, Any], steps: int, total: int | None, is_twin: bool) -> dict[str, Any]:
    """Train the first steps of a configuration in fp32, and return what was seen."""
    settings, device = configure_examining_process({**config, "arm": "fp32"})
    conditions = LoopConditions(device=str(device), seed=settings.recipe.seed)
    with (
        arm_precision_isolated(Arm.parse("fp32"), conditions) as precision,
        closing(PrefixWatch(steps, total=total)) as watch,
    ):

        def at_assembly(assembly: TrainingAssembly) -> None:
            watch.follow_schedule(assembly.schedule, total or assembly.total_steps)

        with suppress(StepsDone):
            make_recipe_loop(settings, device, is_twin=is_twin, at_assembly=at_assembly)(
                WatchedPrecision(precision, watch)
            )
    return watch.read_prefix().model_dump(mode="json")
