"""The Python interface: each function does what the command of that name does, without the command line.

Importing this module loads no torch; the functions that need it start processes or import it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from ampcompare.analysis.criteria import Criteria, Preference
from ampcompare.analysis.csv_table import read_table_file
from ampcompare.analysis.external import judge
from ampcompare.analysis.metrics import Better
from ampcompare.analysis.table_columns import TableOptions
from ampcompare.backends.arm import Arm, parse_arms, same_arm
from ampcompare.claims.reproduce import Reproduction
from ampcompare.claims.study import StudyOptions, run_study
from ampcompare.doctor.examine import Examination, examine
from ampcompare.errors import ConfigError, GateFailed
from ampcompare.experiment.compare import run_comparison
from ampcompare.experiment.diagnose import DiagnoseOptions
from ampcompare.experiment.diagnose import diagnose as _diagnose
from ampcompare.experiment.follow import load_callback
from ampcompare.experiment.matrix import find_setting
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.options import CompareOptions, LaunchOptions, RunOptions, to_seconds
from ampcompare.experiment.single_run import run_single
from ampcompare.experiment.sources import SettingsRequest, collect_settings
from ampcompare.explain.explain import Explanation
from ampcompare.explain.explain import explain_arm as _explain
from ampcompare.records.callback import Callback
from ampcompare.records.comparison import Comparison
from ampcompare.records.diagnosis import Diagnosis
from ampcompare.records.run import RunRecord
from ampcompare.report.diagnosis_files import write_diagnosis
from ampcompare.settings.config import Recipe, RunConfig
from ampcompare.settings.layers import Layer
from ampcompare.settings.script import SCRIPT_ARMS, script_config

if TYPE_CHECKING:
    from ampcompare.checkpoint.convert.fp32_weights import Conversion
    from ampcompare.precision.base import Precision

__all__ = [
    "compare",
    "convert_checkpoint",
    "diagnose",
    "examine_machine",
    "explain_arm",
    "judge_table",
    "reproduce_claims",
    "run",
]


def run(
    config: RunConfig | None = None,
    *,
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    output_dir: str | Path | None = None,
    force: bool = False,
    wait: float | str = 0,
    script: Sequence[str] | None = None,
    metrics: Sequence[str] | str = (),
    slurm_options: Mapping[str, str] | None = None,
    launch: LaunchOptions | None = None,
    callbacks: Sequence[Callback | str] = (),
    observer: Observer | None = None,
    **settings: Any,
) -> RunRecord:
    """Train one arm in a process of its own and return its record.

    Args:
        config: what to train, complete; or leave it out and describe it by the next arguments. The defaults train fp32
            on the bundled digits.
        recipe: a recipe, its name, or a YAML file with one; of several rows the first is trained.
        size: a smaller size of a named recipe, such as "small".
        config_file: YAML file of settings, which win over those of the recipe.
        output_dir: run directory, by default `runs/run-<digest of config>`.
        force: train again even if there is a usable record.
        wait: seconds, or a text such as "10m", to wait for another command that uses the run directory.
        script: a user's own script with its arguments, or "-m" and a module: it trains in place of the recipe.
        metrics: what it prints or logs, as for `--metric`; the first is that of verdicts.
        slurm_options: sbatch options, for the launcher slurm: {"partition": "gpu", "exclusive": ""}.
        launch: how processes are started, over several nodes for example.
        callbacks: called for each step, epoch and end of a run; a text is a factory, `package.module:factory`.
        observer: receives progress and notes.
        settings: further fields of `RunConfig`, which win over the file: `arm="apex:O2"`, `device="cpu"`; or paths of
            settings, as in `**{"recipe.epochs": 3}`.

    Returns:
        The record, also of a run that failed or diverged: see its `status` and `error`.

    Raises:
        ConfigError: settings that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that is asked for.
        LaunchError: no process could be started.
    """
    request = _request(recipe, size, config_file, _with_script(settings, script, metrics))
    if config is not None and request != SettingsRequest():
        raise ConfigError("run takes a complete config, or a recipe, file and settings, and both were given")
    options = RunOptions(
        config=config or collect_settings(request, one_run=True).config,
        output_dir=_path(output_dir),
        force=force,
        wait_seconds=_wait(wait),
        launch=_launch(launch, slurm_options),
        callbacks=_callbacks(callbacks),
    )
    return run_single(options, observer=observer).record


def compare(
    arms: Sequence[str] | str = (),
    *,
    reference: str | None = None,
    seeds: Iterable[int] | str | None = None,
    recipe: Recipe | str | None = None,
    size: str | None = None,
    config_file: str | Path | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    output_dir: str | Path | None = None,
    force: bool = False,
    margin: float | str | None = None,
    time_margin: float = 2.0,
    loss_margin: float = 1.0,
    looks: int | None = None,
    objective: Preference = "time",
    prefer: Preference | None = None,
    tag: str = "",
    budget: float | str = "30m",
    jobs: int = 1,
    timing_rounds: int = 0,
    fail_on: Sequence[str] | str = (),
    baseline: str | Path | None = None,
    wait: float | str = 0,
    tensorboard: str | Path | None = None,
    junit: str | Path | None = None,
    script: Sequence[str] | None = None,
    metrics: Sequence[str] | str = (),
    slurm_options: Mapping[str, str] | None = None,
    launch: LaunchOptions | None = None,
    callbacks: Sequence[Callback | str] = (),
    observer: Observer | None = None,
    **settings: Any,
) -> Comparison:
    """Train every arm with every seed on the same weights and batches, compare them, and write the reports.

    Args:
        arms: texts such as "fp32", "bf16" or "apex:O2", or one text with several, as in "fp32,bf16". By default the
            arms of the recipe or file, or else nine.
        reference: the arm that the others are compared with; added if it is none of them. By default fp32, or else the
            first.
        seeds: each is one pair of runs between any two arms: integers, a text such as "0-4", or "auto" for as many as
            the margin needs. By default those of the recipe or file, or else 0, 1 and 2.
        recipe: what all arms train: a recipe, its name, or a YAML file with one.
        size: a smaller size of a named recipe, such as "small".
        config_file: YAML file of settings, which win over those of the recipe.
        sweep: settings with values to cross with the arms: {"workers": [0, 2]}.
        output_dir: run directory, by default `runs/compare-<digest of the plan>`.
        force: run every cell again.
        margin: equivalence margin of top-1, chosen before the runs: percentage points, or "10%" of the reference's
            errors, "2sd" (standard deviations over seeds) or "auto", the smaller of 0.5 points and 10 % of the errors.
            By default that of the recipe or file, or else "auto".
        time_margin: equivalence margin in percent of the step time.
        loss_margin: equivalence margin in percent of the training loss over the last fifth of the steps.
        looks: how often these runs are tested in all as seeds are added; 1 if never again, None leaves it open.
        objective: what the recommended arm improves while it keeps the accuracy.
        prefer: the former name of `objective`.
        tag: label of the report and its folder.
        budget: wall time limit of seeds "auto": seconds, or a text such as "30m".
        jobs: cells that run in parallel; step times are then not compared.
        timing_rounds: times that the arms of a seed are timed again after their runs, in turns of some steps.
        fail_on: limits such as "accuracy<-0.5" or "time>1.10x", checked for every arm.
        baseline: report.json or run directory that the limits compare with; by default the reference arm.
        wait: seconds, or a text such as "10m", to wait for another command that uses the run directory.
        tensorboard: folder for an event file per arm and seed.
        junit: file for the results of arms and limits as JUnit XML.
        script: a user's own script, as for `run`; by default its arms are fp32, O1, fp16 and bf16.
        metrics: as for `run`.
        slurm_options: as for `run`.
        launch: how processes are started, over several nodes for example.
        callbacks: as for `run`.
        observer: receives progress and notes.
        settings: further fields of `RunConfig`, or paths of settings, as for `run`.

    Returns:
        The comparison that the reports show; failed cells are among its records.

    Raises:
        ConfigError: an arm or option that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that is asked for.
        RecordError: the baseline cannot be read.
        LaunchError: no process could be started.
        GateFailed: an arm exceeds a limit of `fail_on`; its `comparison` has the results.
    """
    options = CompareOptions(
        settings=_request(recipe, size, config_file, _with_script(settings, script, metrics)),
        arms=_arms(arms, script),
        reference=reference,
        seeds=seeds if isinstance(seeds, str) or seeds is None else ",".join(map(str, seeds)),
        budget_seconds=to_seconds("budget", budget),
        sweep=tuple((find_setting(name, "sweep"), list(values)) for name, values in (sweep or {}).items()),
        margin=margin,
        time_margin=time_margin,
        loss_margin=loss_margin,
        looks=looks,
        objective=prefer or objective,
        tag=tag,
        jobs=jobs,
        timing_rounds=timing_rounds,
        fail_on=(fail_on,) if isinstance(fail_on, str) else tuple(fail_on),
        baseline=_path(baseline),
        output_dir=_path(output_dir),
        force=force,
        wait_seconds=_wait(wait),
        tensorboard=_path(tensorboard),
        junit=_path(junit),
        launch=_launch(launch, slurm_options),
        callbacks=_callbacks(callbacks),
    )
    outcome = run_comparison(options, observer=observer)
    outcome.write_junit()
    failures = [f"{check.arm}: {check.failure}" for check in outcome.checks if check.failure]
    if failures:
        raise GateFailed("; ".join(failures), outcome.comparison)
    return outcome.comparison


def judge_table(
    table: str | Path,
    *,
    reference: str | None = None,
    metric: str | None = None,
    better: Better | None = None,
    within: Sequence[str] | str = (),
    settings: Sequence[str] | str = (),
    sd: float | None = None,
    runs: int | None = None,
    margin: float | str = "auto",
    time_margin: float = 2.0,
    objective: Preference = "time",
) -> Comparison:
    """Compare the arms of a table of results that were measured elsewhere.

    Args:
        table: a CSV or Markdown file with a line per run, or per mean of runs, and the columns arm, a metric such as
            accuracy and, if known, seed, sd, n, time or throughput, memory and diverged.
        reference: the arm that the others are compared with, in any case; by default fp32, or else the first.
        metric: column of results; by default accuracy, or else a metric with a known name.
        better: "higher" or "lower"; by default that of the metric.
        within: settings of which each value is a block, inside which arms are compared.
        settings: columns that runs must share, besides those with known names.
        sd: standard deviation over seeds in the unit of the metric, for arms with fewer than three runs.
        runs: behind each line that has a standard deviation and no number of runs.
        margin: equivalence margin in the unit of the metric, or a rule as for `compare`; "auto" is for other metrics
            than accuracy the usual one of the metric.
        time_margin: equivalence margin in percent of the time.
        objective: what the recommended arm improves while it keeps the accuracy.

    Returns:
        A comparison without records; `judged` says what its figures are.

    Raises:
        RecordError: the table cannot be read; the message names the line.
        ConfigError: an option that cannot be used, there is no arm of the reference's name, or the metric has no usual
            margin.
    """
    blocks = (within,) if isinstance(within, str) else tuple(within)
    shared = (settings,) if isinstance(settings, str) else tuple(settings)
    results = read_table_file(Path(table), TableOptions(metric, better, (*shared, *blocks)))
    criteria = Criteria(margin, time_margin / 100, objective)
    reference = same_arm(reference, [run.arm for run in results.runs])
    return judge(results, reference=reference, sd=sd, terms=criteria, within=blocks, runs=runs)


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    to: Literal["native", "apex"],
    *,
    opt_level: Literal["O0", "O1", "O2", "O3", "O4", "O5"] | None = None,
    save_apex_format: bool = False,
    unsafe_load: bool = False,
) -> Conversion:
    """Convert a checkpoint file between Apex and torch.amp. Imports torch.

    Args:
        source: a checkpoint of ampcompare, of a script with apex.amp, FP16_Optimizer or torch.amp, of timm, mmengine or
            Lightning.
        target: file to write, in the layout of `source`.
        to: "native" for torch.amp, "apex" for apex.amp.
        opt_level: level of the Apex side; by default inferred from the source, or O1 for the result.
        save_apex_format: write exactly what an Apex script saves, with `to="apex"`.
        unsafe_load: unpickle arbitrary objects in `source`, which runs code of its author.

    Returns:
        What was converted: `source` and `level` it was inferred to be, `changed` and `lost` as texts.

    Raises:
        CheckpointError: the source cannot be read, or holds objects that are not loaded without `unsafe_load`.
        ConversionError: it is of the wanted kind already, has nothing to convert, or is the target.
        EnvironmentUnfit: the target cannot be written.
    """
    from ampcompare.checkpoint.convert.convert import convert_file

    return convert_file(
        Path(source), Path(target), to, opt_level=opt_level, legacy_layout=save_apex_format, trust=unsafe_load
    )


def diagnose(
    loop: Callable[[Precision], Any] | None = None,
    *,
    arm: Arm | str = "apex:O2",
    steps: int = 8,
    at: Sequence[int] = (),
    reference: Literal["float32", "float64", "none"] = "float32",
    cures: bool = True,
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
            recipe is trained, in a process of its own.
        arm: such as "apex:O2", or an `Arm`.
        steps: updates of each run; up to 20 that are skipped come on top.
        at: steps to watch, counted from 0; all by default.
        reference: type that every operation is repeated in; "none" watches ranges alone.
        cures: train candidates of a cure for some steps.
        recipe, size, config_file, settings: as for `run`.
        output_dir: folder of `diagnosis.json` and, where the extra is installed, `diagnosis.html`; by default none.

    Raises:
        ConfigError: an option or setting that cannot be used, or a loop without a step.
        EnvironmentUnfit: this machine lacks something that is asked for.
        LaunchError: the model of a recipe raised.
    """
    arm = Arm.parse(arm) if isinstance(arm, str) else arm
    request = _request(recipe, size, config_file, {**settings, "arm": str(arm)})
    config = collect_settings(request, one_run=True).config
    options = DiagnoseOptions(config, steps=steps, at=tuple(at), reference=reference, cures=cures)
    found = _diagnose(options, loop)
    if output_dir is not None:
        write_diagnosis(found, Path(output_dir))
    return found


def explain_arm(arm: Arm | str) -> Explanation:
    """Explain what an arm does to numbers, and what its torch.amp equivalent is.

    Args:
        arm: an arm such as "native:fp16", "bf16" or "O2".

    Returns:
        The explanation; `data()` is the JSON document of the command.

    Raises:
        ConfigError: there is no such arm.
    """
    return _explain(Arm.parse(arm) if isinstance(arm, str) else arm)


def examine_machine(arms: Sequence[Arm | str] = (), *, time_limit: float = 60.0) -> Examination:
    """Examine this machine and its libraries, each in a process of its own.

    Args:
        arms: arms such as "apex:O1,engine=nvidia" to check one by one.
        time_limit: seconds for each import that is tried.

    Returns:
        All checks with their verdicts; `data()` is the JSON document of the command `doctor`.

    Raises:
        ConfigError: there is no such arm.
    """
    parsed = [one for arm in arms for one in (parse_arms([arm]) if isinstance(arm, str) else [arm])]
    return examine(parsed, seconds=time_limit)


def reproduce_claims(
    claims: Sequence[str] = (),
    *,
    study: str = "articles",
    output_dir: str | Path | None = None,
    budget: float | str = "15m",
    jobs: int = 1,
    wait: float | str = 0,
    observer: Observer | None = None,
) -> Reproduction:
    """Run small versions of published claims, judge them, and write the report.

    Args:
        claims: names; all of the study by default.
        study: which claims.
        output_dir: folder of records and reports, by default `runs/reproduce-<study>`.
        budget: wall time, as seconds or a text such as "15m"; no seed begins after it.
        jobs: cells that run in parallel; no times are judged then.
        wait: seconds, or a text such as "10m", to wait for another command that uses the folder.
        observer: receives progress and notes.

    Returns:
        A result for each claim, in `findings`.

    Raises:
        ConfigError: there is no such study or claim, or the folder cannot be used.
        LaunchError: no process could be started, or a program of the study failed.
    """
    options = StudyOptions(
        study=study,
        claims=tuple(claims),
        output_dir=_path(output_dir),
        budget_seconds=to_seconds("budget", budget),
        jobs=jobs,
        wait_seconds=_wait(wait),
    )
    return run_study(options, observer=observer)


def _with_script(
    settings: Mapping[str, Any], script: Sequence[str] | None, metrics: Sequence[str] | str
) -> dict[str, Any]:
    if script is None:
        if metrics:
            raise ConfigError("metrics are those of a script; give it, as in script=['train.py']")
        return dict(settings)
    values = dict(settings)
    max_steps = values.pop("recipe.max_steps", None)
    named = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    return {**values, "script": script_config(script, metrics=named, max_steps=max_steps)}


def _arms(arms: Sequence[str] | str, script: Sequence[str] | None) -> tuple[str, ...]:
    given = (arms,) if isinstance(arms, str) else tuple(arms)
    return given or (SCRIPT_ARMS if script is not None else ())


def _request(
    recipe: Recipe | str | None, size: str | None, config_file: str | Path | None, settings: Mapping[str, Any]
) -> SettingsRequest:
    """Return where settings come from; of pydantic models only the fields that were set count as given."""
    values = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in settings.items()
    }
    if isinstance(recipe, Recipe):
        if size is not None:
            raise ConfigError(f"size {size!r} is for a named recipe, and a Recipe object was given")
        values["recipe"] = recipe.model_dump(exclude_unset=True)
    return SettingsRequest(
        recipe=recipe if isinstance(recipe, str) else None,
        size=size,
        file=None if config_file is None else str(config_file),
        layers=(Layer("argument", values),) if values else (),
    )


def _launch(launch: LaunchOptions | None, slurm_options: Mapping[str, str] | None) -> LaunchOptions:
    if launch is not None and slurm_options is not None:
        raise ConfigError("launch has slurm_options of its own; give one of the two")
    return launch or LaunchOptions(slurm_options=slurm_options or {})


def _callbacks(callbacks: Sequence[Callback | str]) -> tuple[Callback, ...]:
    return tuple(load_callback(each) if isinstance(each, str) else each for each in callbacks)


def _wait(wait: float | str) -> float:
    return to_seconds("wait", wait) if wait else 0.0


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)
