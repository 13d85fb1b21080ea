"""The diagnosis of a recipe, as plain data. Runs in a child process: O1 patches torch, and threads are set once."""

from typing import Any

from ampcompare.diagnosis.diagnose import diagnose_loop_by_options
from ampcompare.diagnosis.loops import make_recipe_loop
from ampcompare.diagnosis.options import DiagnoseOptions, Reference
from ampcompare.settings.examination import return_user_errors
from ampcompare.training.process.switches import configure_examining_process


@return_user_errors
def diagnose_recipe(
    config: dict[str, Any],
    steps: int,
    reference: Reference,
    cures: bool,
) -> dict[str, Any]:
    settings, device = configure_examining_process(config)
    recipe = settings.recipe
    subject = f"{recipe.model.arch} on {recipe.data.name}, {recipe.optimizer.name}, seed {recipe.seed}"
    loop = make_recipe_loop(settings, device)
    options = DiagnoseOptions(settings, steps=steps, reference=reference, cures=cures)
    return diagnose_loop_by_options(loop, options, subject=subject).model_dump(mode="json")
