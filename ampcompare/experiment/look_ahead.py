"""What the first steps of a training tell of the rest, for some arms: the command `diagnose --ahead`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis import options as recipes
from ampcompare.diagnosis.laws import expected_outlook_of, loss_distance
from ampcompare.diagnosis.options import MIN_PREFIX, AheadOptions, PrefixWatchRequest
from ampcompare.experiment.diagnose import (
    ENDED,
    exec_settings_for_watching,
    run_examined_script,
    say_writable_files,
)
from ampcompare.experiment.launch.places import places_for_cells
from ampcompare.experiment.option_checks import check_cells
from ampcompare.results.records.outlook import Outlook, WatchedFirstSteps
from ampcompare.settings.examination import examine_in_child

PROGRAM = recipes.PROGRAM.with_name("prefix_recipe.py")


def look_ahead(options: AheadOptions, say: Callable[[str], None] = lambda line: None) -> Outlook:
    """Run the first steps of a training in fp32, and say for each arm what is to be expected of it.

    Args:
        options: the training, the arms, and how many steps.
        say: gets a line for each part that begins.

    Raises:
        ConfigError: a setting names what does not exist.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: the training cannot run its first steps.
    """
    options.check()
    check_cells([options.config])
    environment = places_for_cells([options.config], None).all[0].gpu_environment
    if options.config.script is not None:
        say_writable_files(say)
    say(f"running the first {options.prefix} steps in fp32")
    prefix = _run_prefix_of_training(options, environment, is_twin=False)
    # its updates are rounded in the second half of what there is
    if MIN_PREFIX <= prefix.steps < options.prefix:
        say(f"it has ended after {prefix.steps} steps: running these again")
        options = replace(options, prefix=prefix.steps, steps=prefix.steps)
        prefix = _run_prefix_of_training(options, environment, is_twin=False)
    distance = None
    if options.twin:
        say("running them again from weights changed by one part in 512")
        distance = loss_distance(
            prefix.losses, _run_prefix_of_training(options, environment, is_twin=True).losses
        )
    recipe, script = options.config.recipe, options.config.script
    subject = script.name if script else f"{recipe.model.arch} on {recipe.data.name}, {recipe.optimizer.name}"
    script_arm = Arm.parse("script")
    arms = [*([script_arm] if prefix.weights and script_arm not in options.arms else []), *options.arms]
    outlooks = [expected_outlook_of(arm, prefix, distance) for arm in arms]
    return Outlook(subject=subject, prefix=prefix, twin=distance, arms=outlooks)


def _run_prefix_of_training(
    options: AheadOptions, environment: Mapping[str, str], *, is_twin: bool
) -> WatchedFirstSteps:
    if options.config.script is not None:
        return _run_prefix_of_script(options, environment, is_twin=is_twin)
    asked = {"steps": options.prefix, "total": options.steps, "is_twin": is_twin}
    failed = "the first steps could not be trained"
    return WatchedFirstSteps.model_validate(
        examine_in_child(PROGRAM, options.config, failed, asked, environment=environment)
    )


def _run_prefix_of_script(
    options: AheadOptions, environment: Mapping[str, str], *, is_twin: bool
) -> WatchedFirstSteps:
    script = options.config.script
    assert script is not None
    with tempfile.TemporaryDirectory(prefix="ampcompare-ahead-") as name:
        folder = Path(name)
        answer = folder / "answer.json"
        request = PrefixWatchRequest(
            settings={
                **exec_settings_for_watching(options.config, Arm.parse("fp32"), folder),
                "twin": is_twin,
            },
            is_module=script.is_module,
            steps=options.prefix,
            total=options.steps,
            answer=str(answer),
            ended=str(folder / ENDED),
        )
        run_examined_script(options.config, folder, "prefix", request, answer, "first step", environment)
        return WatchedFirstSteps.model_validate_json(answer.read_text(encoding="utf-8"))
