"""What an arm does to numbers, time and memory: the commands `diagnose`, `profile`, `find-batch` and `explain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcompare.backends.arm import Arm, parse_arms
from ampcompare.base.errors import ConfigError
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.diagnosis.options import AheadOptions, DiagnoseOptions, Reference
from ampcompare.diagnosis.profiling.options import ProfileOptions
from ampcompare.experiment.sources import collect_settings
from ampcompare.results.records.diagnosis import Diagnosis
from ampcompare.results.records.outlook import Outlook
from ampcompare.results.records.profile import Profile
from ampcompare.settings.reads import AHEAD, DIAGNOSE, DIAGNOSE_LOOP, FIND_BATCH, PROFILE, PROFILE_LOOP
from ampcompare.settings.recipe import Recipe
from ampcompare.settings.stack import parse_stacks

if TYPE_CHECKING:
    from ampcompare.diagnosis.explain import Explanation
    from ampcompare.results.records.batch_limit import BatchLimit
    from ampcompare.training.precision.base import Precision


def diagnose(
    loop: Callable[[Precision], Any] | None = None,
    *,
    arm: Arm | str = "apex:O2",
    steps: int = DiagnoseOptions.steps,
    reference: Reference = DiagnoseOptions.reference,
    cures: bool = DiagnoseOptions.cures,
    script: Sequence[str] | None = None,
    preflight: bool = True,
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    output_dir: str | Path | None = None,
    **settings: Any,
) -> Diagnosis:
    """Find where the numbers of an arm overflow or are lost, and test what to keep in fp32.

    Args:
        loop: any training loop, as a function of a precision: it calls `prepare` once, then for each step `backward` or
            `scale_loss`, and `step`, which ends the loop after the last step. It is called again for each candidate
            of a cure and must begin from the same weights and batches each time; torch is seeded before. It runs in
            this process and imports torch; of `settings` only `device`, `cpu_half` and the seed apply. By default the
            recipe is trained, in a separate process. A loop chooses its GPU itself.
        arm: such as "apex:O2", or an `Arm`.
        steps: updates of each run; up to 20 skipped ones are added.
        reference: precision in which every operation is repeated to measure its error; none: watch only ranges.
        cures: train with each candidate cure for some steps, to test it.
        script: a user's own script with its arguments, or "-m" and a module, as for `run`: it is started again for each
            candidate, in separate processes.
        preflight: of a script, first train a few steps without a watch: what cannot work is said at once.
        recipe, size, config_file, settings: as for `run`.
        output_dir: folder of `diagnosis.json` and, where the extra is installed, `diagnosis.html`; by default none.

    Raises:
        ConfigError: an option or setting that cannot be used, a loop and a script, or a loop that makes no step.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: the model of a recipe raised, or no step of a script was watched.
    """
    from ampcompare.experiment.diagnose import diagnose as _diagnose
    from ampcompare.experiment.option_checks import check_cells
    from ampcompare.experiment.preflight import run_trials_of_configs
    from ampcompare.experiment.run_options import settings_request, settings_with_script

    _refuse_loop_with_script("diagnose", loop, script)
    arm = Arm.parse(arm) if isinstance(arm, str) else arm
    request = settings_request(
        recipe, size, config_file, settings_with_script({**settings, "arm": str(arm)}, script, ())
    )
    config = collect_settings(request, DIAGNOSE if loop is None else DIAGNOSE_LOOP, one_run=True).config
    options = DiagnoseOptions(config, steps, reference, cures)
    options.check()
    if loop is None:
        check_cells([config])
    if script is not None and preflight:
        run_trials_of_configs([config], watches_failures=True)
    return _diagnose(options, loop, output_dir=None if output_dir is None else Path(output_dir))


def profile(
    loop: Callable[[Precision], Any] | None = None,
    *,
    arms: Sequence[Arm | str] = ("fp32", "native:bf16"),
    steps: int = ProfileOptions.steps,
    profiled_steps: int = ProfileOptions.profiled,
    trials: bool = ProfileOptions.trials,
    preflight: bool = True,
    script: Sequence[str] | None = None,
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    output_dir: str | Path | None = None,
    **settings: Any,
) -> Profile:
    """Find why an arm is faster or not, smaller or not, next to the first of some arms.

    Args:
        loop: as for `diagnose`, but called once for each arm.
        arms: such as "apex:O2", or `Arm`s; the first is the reference.
        steps: timed steps of each arm, without the profiler.
        profiled_steps: steps of each arm under torch.profiler.
        trials: train a recipe with switches that may help, in turns with the arm as it is.
        preflight: of a script, first train a few steps of each arm: what cannot work is said at once.
        script: a user's own script with its arguments, or "-m" and a module, as for `run`.
        recipe, size, config_file, settings: as for `run`.
        output_dir: folder of `profile.json`, `profile.md`, `trace.json` and, where the extra is installed,
            `profile.html`; by default none.

    Raises:
        ConfigError: an option or setting that cannot be used, a loop and a script, or a loop of too few steps.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: the reference could not be trained.
    """
    from ampcompare.experiment.option_checks import check_cells
    from ampcompare.experiment.preflight import run_trials_of_configs
    from ampcompare.experiment.profile import profile as _profile
    from ampcompare.experiment.run_options import settings_request, settings_with_script

    _refuse_loop_with_script("profile", loop, script)
    names, reads = _distinct_arm_texts(arms), PROFILE if loop is None else PROFILE_LOOP
    configs = []
    for name in names:
        request = settings_request(
            recipe, size, config_file, settings_with_script({**settings, "arm": name}, script, ())
        )
        configs.append(collect_settings(request, reads, one_run=True).config)
    options = ProfileOptions(tuple(configs), steps=steps, profiled=profiled_steps, trials=trials)
    options.check()
    if loop is None:
        check_cells(configs)
    if script is not None and preflight:
        run_trials_of_configs(configs)
    return _profile(options, loop, output_dir=None if output_dir is None else Path(output_dir))


def look_ahead(
    arms: Sequence[Arm | str] | str = ("apex:O2",),
    *,
    prefix: int = AheadOptions.prefix,
    steps: int | None = AheadOptions.steps,
    twin: bool = AheadOptions.twin,
    script: Sequence[str] | None = None,
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> Outlook:
    """Say from the first steps of a training which arms will hold to its end: `diagnose --ahead`.

    Args:
        arms: such as "half:bf16", or `Arm`s.
        prefix: steps to run, in fp32.
        steps: optimizer steps of the whole training, where its scheduler does not say; by default the rate stays.
        twin: run them again from weights changed by one part in 512: how far apart two equal trainings can end.
        script: a user's own script with its arguments, or "-m" and a module, as for `run`.
        recipe, size, config_file, settings: as for `run`.

    Returns:
        For each arm "will not hold", "no fault in sight" or "cannot know", with the law and its figures.

    Raises:
        ConfigError: an option or setting that cannot be used.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: the training failed, or made no step.
    """
    from ampcompare.experiment.look_ahead import look_ahead as _look_ahead
    from ampcompare.experiment.run_options import settings_request, settings_with_script

    given = settings_with_script({**settings, "arm": "fp32"}, script, ())
    config = collect_settings(settings_request(recipe, size, config_file, given), AHEAD, one_run=True).config
    judged = [Arm.parse(name) for name in _distinct_arm_texts(arms)]
    return _look_ahead(AheadOptions(config, judged, prefix, steps, twin))


def find_batch(
    arms: Sequence[Arm | str] | str = ("fp32",),
    *,
    memory_limit: float | None = None,
    margin: float = 5.0,
    gpus: str | None = None,
    note: Callable[[str], None] = lambda text: None,
    preflight: bool = True,
    stacks: Mapping[str, str] | Sequence[str] = (),
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    **settings: Any,
) -> list[BatchLimit]:
    """Find the largest batch that each arm fits, each try in a separate process.

    Args:
        arms: such as "apex:O2" or "O2@old", or `Arm`s.
        memory_limit: GiB that a run may take, required on a CPU; by default that of the GPU.
        margin: percentage of the memory that stays free.
        gpus: numbers of the GPUs to choose from, such as 0,2-3; by default the first that is free.
        note: receives a line about each try.
        preflight: first train a few steps of each arm: one that cannot train is named before the search.
        stacks: other environments that have ampcompare by name, with what starts their Python, for arms such as
            "O2@old": {"old": "/envs/old/bin/python"}.
        recipe, size, config_file, settings: as for `run`; the batch size is the first that is tried.

    Returns:
        For each arm the largest batch that fits and the smallest that does not, with their peak memory in bytes, or why
        its stack could not try any.

    Raises:
        ConfigError: an option or setting that cannot be used, or a CPU without a limit.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: a try failed for another reason than memory or too few samples.
    """
    from ampcompare.experiment.find_batch import (
        BatchSearchTerms,
        configs_of_arms,
        find_largest_batches_on_free_gpu,
    )
    from ampcompare.experiment.run_options import settings_request

    config = collect_settings(
        settings_request(recipe, size, config_file, settings), FIND_BATCH, one_run=True
    ).config
    texts = [arms] if isinstance(arms, str) else [str(arm) for arm in arms]
    configs = configs_of_arms(config, texts, parse_stacks([stacks] if isinstance(stacks, str) else stacks))
    return find_largest_batches_on_free_gpu(
        BatchSearchTerms(configs, memory_limit, margin / 100, note, preflight), gpus
    )


def _refuse_loop_with_script(function: str, loop: object, script: object) -> None:
    if loop is not None and script is not None:
        why = "takes either a loop or a script, but both were given"
        raise ConfigError(refusal_sentence(function, why, "leave one out"))


def _distinct_arm_texts(arms: Sequence[Arm | str] | str) -> list[str]:
    """Return the texts of arms, each once; a text may name several, separated by commas."""
    listed = [arms] if isinstance(arms, str) else arms
    return list(
        dict.fromkeys(
            str(one) for arm in listed for one in (parse_arms([arm]) if isinstance(arm, str) else [arm])
        )
    )


def explain_arm(arm: Arm | str) -> Explanation:
    """Explain what an arm does to numbers, and what its torch.amp equivalent is.

    Args:
        arm: an arm such as "native:fp16", "bf16" or "O2".

    Returns:
        The explanation; `data()` is the JSON document of the command.

    Raises:
        ConfigError: there is no such arm.
    """
    from ampcompare.diagnosis.explain import explain_arm as _explain

    return _explain(Arm.parse(arm) if isinstance(arm, str) else arm)
