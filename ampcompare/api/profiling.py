"""Find why an arm is faster or not, smaller or not: the command `profile`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcompare.backends.arm import Arm, parse_arms
from ampcompare.base.errors import ConfigError
from ampcompare.diagnosis.profiling.options import ProfileOptions
from ampcompare.experiment.sources import collect_settings
from ampcompare.runs.records.profile import Profile
from ampcompare.runs.settings.recipe import Recipe

if TYPE_CHECKING:
    from ampcompare.training.precision.base import Precision

__all__ = ["profile"]


def profile(
    loop: Callable[[Precision], Any] | None = None,
    *,
    arms: Sequence[Arm | str] = ("fp32", "native:bf16"),
    steps: int = ProfileOptions.steps,
    profiled_steps: int = ProfileOptions.profiled,
    trials: bool = ProfileOptions.trials,
    script: Sequence[str] | None = None,
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    output_dir: str | Path | None = None,
    **settings: Any,
) -> Profile:
    """Find why an arm is faster or not, smaller or not, next to the first of some arms.

    Args:
        loop: any training loop, as a function of a precision: it calls `prepare` once, then for each step `backward` or
            `scale_loss`, and `step`, which ends the loop after the last step. It is called once for each arm, in this
            process, and imports torch; of `settings` only `device`, `cpu_half` and the seed apply. By default the
            recipe is trained, each arm in a separate process.
        arms: such as "apex:O2", or `Arm`s; the first is the reference.
        steps: timed steps of each arm, without the profiler.
        profiled_steps: steps of each arm under torch.profiler.
        trials: train a recipe with switches that may help, in turns with the arm as it is.
        script: a user's own script with its arguments, or "-m" and a module, as for `run`.
        recipe, size, config_file, settings: as for `run`.
        output_dir: folder of `profile.json`, `profile.md`, `trace.json` and, where the extra is installed,
            `profile.html`; by default none.

    Raises:
        ConfigError: an option or setting that cannot be used, a loop and a script, or a loop of too few steps.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: the reference could not be trained.
    """
    from ampcompare.experiment.options import settings_request, with_script
    from ampcompare.experiment.preflight import check_cells
    from ampcompare.experiment.profile import profile as _profile
    from ampcompare.experiment.profile import require_arms

    if loop is not None and script is not None:
        raise ConfigError("profile takes either a loop or a script, but both were given; leave one out")
    names = list(
        dict.fromkeys(str(one) for arm in arms for one in (parse_arms([arm]) if isinstance(arm, str) else [arm]))
    )
    require_arms(names)
    configs = []
    for name in names:
        request = settings_request(recipe, size, config_file, with_script({**settings, "arm": name}, script, ()))
        configs.append(collect_settings(request, one_run=True).config)
    options = ProfileOptions(tuple(configs), steps=steps, profiled=profiled_steps, trials=trials)
    options.check()
    if loop is None:
        check_cells(configs)
    return _profile(options, loop, output_dir=None if output_dir is None else Path(output_dir))
