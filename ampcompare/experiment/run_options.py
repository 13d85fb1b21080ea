"""Options of `run` and `compare`: name, type, default and text of each, for Python and for the command line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel

from ampcompare.base.environment.ranks import read_distributed_env
from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import parse_duration
from ampcompare.base.option_rules import OptionRule, Values, refusal_sentence, rule_of_need
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.dispatch.dispatch import launcher_for_places, make_launcher
from ampcompare.experiment.launch.places import Places, parse_gpu_numbers
from ampcompare.experiment.matrix import setting_path_of_name
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import parse_seeds
from ampcompare.experiment.sources import SettingsRequest, collect_settings
from ampcompare.results.analysis.gates import parse_gate
from ampcompare.results.analysis.inference.terms import Preference, Terms, parse_margin
from ampcompare.settings.config import REMOTE_LAUNCHERS, RunConfig
from ampcompare.settings.layers import Layer
from ampcompare.settings.reads import RECIPE_OBJECT, TRAIN
from ampcompare.settings.recipe import Recipe
from ampcompare.settings.script import SCRIPT_ARMS, script_config
from ampcompare.settings.stack import StackConfig, parse_stacks

Jobs: TypeAlias = int | Literal["auto"] | None
RENDEZVOUS = ("env://", "tcp://", "file://")


def _asks_to_time_cells_at_once(values: Values) -> bool:
    is_on_queue = bool(values["launchers"] & {*REMOTE_LAUNCHERS})
    return values["timing_rounds"] > 0 and (values["jobs"] not in (None, 1) or is_on_queue)


# What options need and exclude, as they come to be: `launchers` are those of all cells, `calls_apex` is of the arm.
LAUNCH_RULES = (
    OptionRule(
        "--slurm-option",
        "needs --launcher slurm",
        "give both",
        lambda values: bool(values["slurm_options"]) and "slurm" not in values["launchers"],
    ),
    OptionRule(
        "--jobs",
        "is not for Ray, which runs as many cells as fit",
        "leave it out",
        lambda values: values["jobs"] not in (None, 1) and "ray" in values["launchers"],
    ),
)
RUN_RULES = (
    *LAUNCH_RULES,
    OptionRule(
        "--save-apex-format",
        "needs an arm of Apex: it is what an Apex script saves",
        "leave it out",
        lambda values: values["apex_layout"] and not values["calls_apex"],
    ),
)
COMPARE_RULES = (
    rule_of_need("--baseline", "baseline", "--fail-on, which compares with it", "fail_on"),
    *LAUNCH_RULES,
    OptionRule(
        "--budget",
        "needs --seeds auto, whose number it limits",
        "give both, or leave it out",
        lambda values: values["budget_seconds"] is not None and values["seeds"] != "auto",
    ),
    OptionRule(
        "--timing-rounds",
        "is not for --jobs, Slurm or Ray: it times one arm after the other on this machine",
        "leave it out, or run without them",
        _asks_to_time_cells_at_once,
    ),
)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the processes of a cell are started.

    Attributes:
        dist_url: where processes that something else starts meet: env://, tcp://HOST:PORT or file://PATH.
        slurm_options: sbatch options for cells whose launcher is slurm, as in {"partition": "gpu", "exclusive": ""}.

    Raises:
        ConfigError: the address is none, or nothing has started this process as one of several.
    """

    dist_url: str | None = None
    slurm_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dist_url is None:
            return
        if not self.dist_url.startswith(RENDEZVOUS):
            raise ConfigError(
                f"--dist-url {self.dist_url!r} is none; give env://, tcp://HOST:PORT or file://PATH"
            )
        if read_distributed_env(url=self.dist_url) is None:
            why = "is for processes that something else starts, such as srun"
            raise ConfigError(refusal_sentence("--dist-url", why, "leave it out"))

    def launcher_of_cell(self, config: RunConfig) -> Launcher:
        """Return the launcher for one cell."""
        return make_launcher(config, **self._launcher_arguments())

    def pool(self, config: RunConfig, places: Places, jobs: Jobs = None) -> Launcher:
        """Return the launcher for a configuration, and for others that differ from it in what `compare` varies.

        Args:
            config: of the first cell.
            places: parts of the machine, one for each cell that runs at a time.
            jobs: cells at a time on a queue; "auto" or None where the launcher decides.

        Raises:
            ConfigError: an option that does not act with this launcher.
        """
        return launcher_for_places(places, config, **self._launcher_arguments(jobs))

    def _launcher_arguments(self, jobs: Jobs = None) -> dict[str, Any]:
        return {
            "dist_url": self.dist_url,
            "slurm": {
                "options": dict(self.slurm_options),
                "running": jobs if isinstance(jobs, int) else None,
            },
        }


class _BuiltOptions:
    """Options that nobody changes once they are built, frozen dataclasses: what a command adds makes others of them.

    Parameters are what a caller writes; the fields, what they come to, are checked and read from then on.
    """

    def _set_fields(self, **values: Any) -> None:
        """Set the fields from `__init__`, all but those whose default no parameter replaces."""
        vars(self).update(values)

    def with_attributes(self, **attributes: Any) -> Self:
        """Return these options with some attributes that no parameter of Python's function has.

        Args:
            attributes: by their names.
        """
        other = copy.copy(self)
        other._set_fields(**attributes)
        return other


@dataclass(frozen=True, init=False, eq=False)
class RunOptions(_BuiltOptions):
    """All options of `run`: the parameters are those of `ampcompare.run`.

    Args:
        config: the complete configuration; or leave it out and describe it by the next arguments. The defaults train
            fp32 on the bundled digits.
        recipe: a recipe, its name, or a YAML file with one; of several rows the first is trained.
        size: a smaller size of a named recipe, such as "small".
        config_file: YAML file of settings, which win over those of the recipe.
        output_dir: run directory, by default `runs/run-<digest of config>`.
        force: ignore records of earlier calls and run again.
        script: a user's own script with its arguments, or "-m" and a module: it trains instead of the recipe.
        metrics: numbers that it prints or logs, as for `--metric`; verdicts use the first one.
        mask: names of further arguments of the script, and of variables of the environment, whose values are kept out
            of all files, such as "pin" or "my_*".
        shift_seeds: for a script that fixes its seed: seed k adds a fixed offset to what it seeds global generators
            with; "all": also to what it seeds its own with.
        slurm_options: sbatch options, for the launcher slurm: {"partition": "gpu", "exclusive": ""}.
        launch: how processes are started.
        observer: receives progress and notes; in a notebook a display of the progress by default.
        settings: further fields of `RunConfig`, which win over the file: `arm="apex:O2"`, `device="cpu"`; or paths of
            settings, as in `**{"recipe.epochs": 3}`.

    Attributes:
        command: shown to other commands that wait for the run directory.

    Raises:
        ConfigError: an option that cannot be used.
    """

    config: RunConfig
    output_dir: Path | None
    force: bool
    observer: Observer | None
    launch: LaunchOptions
    command: str = ""

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        recipe: Recipe | str | None = None,
        size: str | None = None,
        config_file: str | Path | None = None,
        output_dir: str | Path | None = None,
        force: bool = False,
        script: Sequence[str] | None = None,
        metrics: Sequence[str] | str = (),
        mask: Sequence[str] | str = (),
        shift_seeds: Literal["global", "all"] | None = None,
        slurm_options: Mapping[str, str] | None = None,
        launch: LaunchOptions | None = None,
        observer: Observer | None = None,
        **settings: Any,
    ) -> None:
        request = settings_request(
            recipe, size, config_file, settings_with_script(settings, script, metrics, mask, shift_seeds)
        )
        if config is not None and request != SettingsRequest():
            why = "takes either a complete config, or a recipe, file and settings, but both were given"
            raise ConfigError(refusal_sentence("run", why, "leave one out"))
        self._set_fields(
            config=config or collect_settings(request, TRAIN, one_run=True).config,
            output_dir=_path_or_none(output_dir),
            force=force,
            observer=observer,
            launch=_launch_options(launch, slurm_options),
        )

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.output_dir or Path("runs") / f"run-{self.config.digest()}"


@dataclass(frozen=True, init=False, eq=False)
class CompareOptions(_BuiltOptions):
    """All options of `compare`: the parameters are those of `ampcompare.compare`.

    Args:
        arms: texts such as "fp32", "bf16" or "apex:O2", or one text with several, as in "fp32,bf16". By default the
            arms of the recipe or file, or else nine.
        reference: the arm that the others are compared with; added if it is not listed. By default script, else
            fp32, else the first.
        seeds: each is one pair of runs between any two arms: integers, a text such as "0-4", or "auto" for as many as
            the margin needs. By default those of the recipe or file, or else 0, 1 and 2.
        recipe: what all arms train: a recipe, its name, or a YAML file with one.
        size: a smaller size of a named recipe, such as "small".
        config_file: YAML file of settings, which win over those of the recipe.
        stacks: other environments of Python and torch by name, with what starts their Python, for arms such as
            "script@old": {"old": "/envs/old/bin/python"}.
        first_weights: with a script, the stack whose first weights all arms begin with, recorded there once for each
            seed; by default the script's own.
        sweep: settings with values to cross with the arms: {"workers": [0, 2]}.
        output_dir: run directory, by default `runs/compare-<digest of the plan>`.
        force: ignore records of earlier calls and run again.
        margin: equivalence margin of top-1, chosen before the runs: percentage points, or "10%" of the reference's
            errors, "2sd" (standard deviations over seeds) or "auto", the smaller of 0.5 points and 10 % of the errors.
            By default that of the recipe or file, or else "auto".
        time_margin: equivalence margin in percent of the step time.
        loss_margin: equivalence margin in percent of the training loss over the last fifth of the steps.
        looks: number of tests planned as seeds are added; 1: test once; by default open.
        objective: what the recommended arm improves while it keeps the quality.
        prefer: the former name of `objective`.
        tag: label of the report and its folder.
        budget: wall time limit of seeds "auto": seconds, or a text such as "10m"; by default half an hour.
        jobs: cells that run in parallel; "auto": as many as there are GPUs, or cores for the threads of a cell;
            by default "auto" where several GPUs are visible, else one. Step times of cells that run in parallel are
            compared on equal GPUs only.
        gpus: numbers of the GPUs to use, such as 0,2-3; by default all that are free.
        timing_rounds: how often the arms of a seed are timed again after their runs, in turns of a few steps.
        twin: train the reference again from weights changed by one part in 512, as a row of its own: how far apart two
            equal trainings end is the least difference that can be told.
        preflight: first train a few steps of each arm: what cannot work is said once, before the first cell.
        fail_on: limits such as "accuracy<-0.5" or "time>1.10x", checked for every arm.
        baseline: report.json or run directory that the limits compare with; by default the reference arm.
        tensorboard: folder for event files of TensorBoard, one for each arm and seed.
        junit: file for the results of arms and limits as JUnit XML.
        script: a user's own script, as for `run`; by default its arms are script, fp32, O1, fp16 and bf16.
        metrics: as for `run`.
        mask: as for `run`.
        shift_seeds: as for `run`.
        slurm_options: as for `run`.
        launch: how processes are started.
        observer: receives progress and notes; in a notebook a display of the progress by default.
        settings: further fields of `RunConfig`, or paths of settings, as for `run`.

    Attributes:
        settings: of all cells, and the rows that a recipe or file describes; script, metrics and mask are among them.
        seeds: as a text; None for those of the recipe or file.
        budget_seconds: of `budget`; None for no limit of the user's own.
        sweep: paths of settings, each with its values.
        strict: a failed arm is a failure of the comparison; for the exit code of the command.
        command: stored in the plan and the report.

    Raises:
        ConfigError: an option that cannot be used.
    """

    settings: SettingsRequest
    arms: tuple[str, ...]
    reference: str | None
    tag: str
    seeds: str | None
    budget_seconds: float | None
    sweep: tuple[tuple[str, list[Any]], ...]
    stacks: dict[str, StackConfig]
    first_weights: str | None
    margin: float | str | None
    time_margin: float
    loss_margin: float
    looks: int | None
    objective: Preference
    jobs: Jobs
    gpus: str | None
    timing_rounds: int
    twin: bool
    preflight: bool
    fail_on: tuple[str, ...]
    baseline: Path | None
    output_dir: Path | None
    force: bool
    observer: Observer | None
    tensorboard: Path | None
    junit: Path | None
    launch: LaunchOptions
    strict: bool = False
    command: str = ""

    def __init__(
        self,
        arms: Sequence[str] | str = (),
        *,
        reference: str | None = None,
        seeds: Iterable[int] | str | None = None,
        recipe: Recipe | str | None = None,
        size: str | None = None,
        config_file: str | Path | None = None,
        stacks: Mapping[str, str] | Sequence[str] = (),
        first_weights: str | None = None,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        output_dir: str | Path | None = None,
        force: bool = False,
        margin: float | str | None = None,
        time_margin: float = 100 * Terms.time_margin,
        loss_margin: float = 100 * Terms.loss_margin,
        looks: int | None = Terms.looks,
        objective: Preference = Terms.prefer,
        prefer: Preference | None = None,
        tag: str = Terms.tag,
        budget: float | str | None = None,
        jobs: int | Literal["auto"] | None = None,
        gpus: str | None = None,
        timing_rounds: int = 0,
        twin: bool = False,
        preflight: bool = True,
        fail_on: Sequence[str] | str = (),
        baseline: str | Path | None = None,
        tensorboard: str | Path | None = None,
        junit: str | Path | None = None,
        script: Sequence[str] | None = None,
        metrics: Sequence[str] | str = (),
        mask: Sequence[str] | str = (),
        shift_seeds: Literal["global", "all"] | None = None,
        slurm_options: Mapping[str, str] | None = None,
        launch: LaunchOptions | None = None,
        observer: Observer | None = None,
        **settings: Any,
    ) -> None:
        if prefer is not None:
            warnings.warn(
                "prefer is now called objective, and ampcompare 0.3 removes the old name; pass objective=",
                DeprecationWarning,
                stacklevel=3,  # the caller of `ampcompare.compare`
            )
        seeds = seeds if isinstance(seeds, str) or seeds is None else ",".join(map(str, seeds))
        _refuse_invalid_values(jobs, timing_rounds, gpus, seeds, margin, _texts_as_tuple(fail_on))
        self._set_fields(
            settings=settings_request(
                recipe, size, config_file, settings_with_script(settings, script, metrics, mask, shift_seeds)
            ),
            arms=_texts_as_tuple(arms) or (SCRIPT_ARMS if script is not None else ()),
            reference=reference,
            tag=tag,
            seeds=seeds,
            budget_seconds=None if budget is None else parse_seconds("budget", budget),
            sweep=tuple(
                (setting_path_of_name(name, "sweep"), list(values)) for name, values in (sweep or {}).items()
            ),
            stacks=parse_stacks((stacks,) if isinstance(stacks, str) else stacks),
            first_weights=first_weights,
            margin=margin,
            time_margin=time_margin,
            loss_margin=loss_margin,
            looks=looks,
            objective=prefer or objective,
            jobs=jobs,
            gpus=gpus,
            timing_rounds=timing_rounds,
            twin=twin,
            preflight=preflight,
            fail_on=_texts_as_tuple(fail_on),
            baseline=_path_or_none(baseline),
            output_dir=_path_or_none(output_dir),
            force=force,
            observer=observer,
            tensorboard=_path_or_none(tensorboard),
            junit=_path_or_none(junit),
            launch=_launch_options(launch, slurm_options),
        )


def _refuse_invalid_values(
    jobs: Jobs,
    timing_rounds: int,
    gpus: str | None,
    seeds: str | None,
    margin: float | str | None,
    gates: Iterable[str],
) -> None:
    """Refuse values that mean nothing by themselves, whatever machine, file or run they meet."""
    if jobs not in (None, "auto") and not (isinstance(jobs, int) and jobs > 0):
        raise ConfigError(
            f"jobs is {jobs}; give the number of cells that run in parallel, at least 1, or auto"
        )
    if timing_rounds < 0:
        raise ConfigError(f"timing rounds are {timing_rounds}; give how often arms are timed again, or 0")
    if gpus is not None:
        parse_gpu_numbers(gpus)
    if seeds is not None and seeds != "auto":
        parse_seeds(seeds)
    if margin is not None:
        parse_margin(margin)
    for text in gates:
        parse_gate(text, metrics=None)  # whether there is such a metric, the task or the script says


def parse_seconds(name: str, value: float | str) -> float:
    """Return a positive time in seconds from a number or a text such as 30m, 1h30m or 90s.

    Args:
        name: of the option, for the message.
        value: seconds, or a text with units; a text of digits alone is refused.

    Raises:
        ConfigError: it is no such text, or not above 0.
    """
    seconds = parse_duration(value) if isinstance(value, str) else float(value)
    if not seconds or not seconds > 0:
        raise ConfigError(f"{name} {value!r} is not a time such as 30m, 1h30m or 90s")
    return seconds


def settings_request(
    recipe: Recipe | str | None, size: str | None, config_file: str | Path | None, settings: Mapping[str, Any]
) -> SettingsRequest:
    """Return where the settings of a function of Python come from.

    Args:
        recipe: the name of one, or an object, of which only the fields that were set count as given; None for none.
        size: of a named recipe; None for the whole.
        config_file: a YAML file of settings; None for none.
        settings: value of each path, which may be a part as a pydantic model.

    Raises:
        ConfigError: a size is given for a recipe that is an object.
    """
    values = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in settings.items()
    }
    layers = []
    if isinstance(recipe, Recipe):
        if size is not None:
            raise ConfigError(f"size {size!r} is for a named recipe, and a Recipe object was given")
        layers.append(Layer(RECIPE_OBJECT, {"recipe": recipe.model_dump(exclude_unset=True)}))
    if values:
        layers.append(Layer("argument", values))
    return SettingsRequest(
        recipe=recipe if isinstance(recipe, str) else None,
        size=size,
        file=None if config_file is None else str(config_file),
        layers=tuple(layers),
    )


def settings_with_script(
    settings: Mapping[str, Any],
    script: Sequence[str] | None,
    metrics: Sequence[str] | str,
    mask: Sequence[str] | str = (),
    shift_seeds: str | None = None,
) -> dict[str, Any]:
    """Return the settings, with those of the script if there is one.

    Args:
        settings: value of each path; of a script `recipe.max_steps` becomes its own.
        script: the words after `--`; None for none.
        metrics, mask, shift_seeds: as for `script_config`.

    Raises:
        ConfigError: one of these is given without a script, or there is no such script.
    """
    if script is None:
        for name, value in (("mask", mask), ("metrics", metrics), ("shift_seeds", shift_seeds)):
            if value:
                raise ConfigError(
                    refusal_sentence(name, "needs a script", "pass one, as in script=['train.py']")
                )
        return dict(settings)
    values = dict(settings)
    max_steps = values.pop("recipe.max_steps", None)
    config = script_config(
        script,
        metrics=_texts_as_tuple(metrics),
        max_steps=max_steps,
        mask=_texts_as_tuple(mask),
        shift_seeds=shift_seeds,
    )
    return {**values, "script": config}


def _launch_options(launch: LaunchOptions | None, slurm_options: Mapping[str, str] | None) -> LaunchOptions:
    """Return how processes are started."""
    if launch is not None and slurm_options is not None:
        raise ConfigError(refusal_sentence("launch", "has slurm_options of its own", "give only one of them"))
    return launch or LaunchOptions(slurm_options=slurm_options or {})


def _path_or_none(path: str | Path | None) -> Path | None:
    """Return a path for a text; None for none, and for an empty text."""
    return Path(path) if path else None


def _texts_as_tuple(text_or_texts: Sequence[str] | str) -> tuple[str, ...]:
    """Return several texts, or one, as a tuple."""
    return (text_or_texts,) if isinstance(text_or_texts, str) else tuple(text_or_texts)
