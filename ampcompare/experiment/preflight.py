"""A few steps of each arm before a comparison: what cannot work is said once, before anything is paid for.

The reference comes first, with the first seed; the other arms have a second one. If two seeds give the same weights and
batches, the script does not follow the seed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.launch.base import Launcher, Progress
from ampcompare.experiment.launch.cell_files import last_lines
from ampcompare.experiment.launch.dispatch import DispatchingLauncher
from ampcompare.experiment.launch.places import find_places
from ampcompare.experiment.launch.script.listing import MAX_LINES, printed_metrics
from ampcompare.experiment.launch.script.output import OutputReader
from ampcompare.experiment.launch.script.rows import ScriptRows, of_training_process
from ampcompare.experiment.plan import Plan
from ampcompare.runs.records.preflight import ArmTrial, Preflight
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.records.step import StepRecord, iter_steps
from ampcompare.runs.settings.config import RunConfig, SavingConfig
from ampcompare.runs.settings.script import ScriptConfig, seed_option

__all__ = ["check_arms", "failure_of", "preflight", "preflight_of", "require_trainable"]

STEPS = 3
SKIPPED = "(nothing else was started; --no-preflight skips this check)"
REMOTE = ("slurm", "ray")  # their cells run on other machines
REFUSED = ConfigError.exit_code
ERRORS: dict[int, type[AmpCompareError]] = {2: ConfigError, 4: EnvironmentUnfit}


def preflight(
    plan: Plan, launcher: Launcher, done: Sequence[RunRecord | None], folder: Path | None = None
) -> Preflight:
    """Train a few steps of each row of a plan that has no record yet.

    Args:
        done: the record of each cell of the plan.
        folder: the run directory, below which the files of these steps lie while they are made; by default elsewhere.
    """
    known = {label for label, record in zip(plan.labels, done, strict=True) if record is not None}
    rows = {label: cell for label, cell in zip(plan.labels, plan.cells, strict=True) if cell.launcher not in REMOTE}
    seeds = plan.seeds if len(plan.seeds) > 1 else (*plan.seeds, plan.seeds[0] + 1)
    order = sorted(plan.arms, key=lambda label: label != plan.reference)
    new = {label: rows[label] for label in order if label in rows and label not in known}
    return check_arms(new, launcher, seeds, folder)


def check_arms(
    rows: Mapping[str, RunConfig], launcher: Launcher, seeds: Sequence[int], folder: Path | None = None
) -> Preflight:
    """Train a few steps of each of some cells, the first with the first seed, the others with the second.

    Args:
        rows: cells of one script or recipe by a label; rows whose cells are built alike are tried once.
        seeds: two of them; with one there is no question whether a script follows it.
        folder: as for `preflight`.
    """
    begun = time.perf_counter()
    trials: dict[str, _Trial] = {}
    alike: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix=".preflight.", suffix=f".{os.getpid()}.tmp", dir=folder) as place:
        for label, cell in rows.items():
            alike[label] = _build(cell)
            if any(alike[other] == alike[label] for other in trials):
                continue
            seed = seeds[0] if not trials else seeds[-1]
            trials[label] = _run(cell, seed, launcher, Path(place, str(len(trials))))
            if len(trials) == 1 and (trials[label].is_scripts_own or trials[label].faults):
                break
        if len(trials) == 1 == len(rows) and len(seeds) > 1 and not next(iter(trials.values())).error:
            (label, cell), *_ = rows.items()
            trials["again"] = _run(cell, seeds[-1], launcher, Path(place, "again"))
    found = _found(trials, time.perf_counter() - begun)
    by_build = {alike[label]: found.arms[label] for label in found.arms if label in alike}
    return found.model_copy(update={"arms": {label: by_build[build] for label, build in alike.items()}})


def require_trainable(found: Preflight) -> None:
    """Check that an arm made a step, if any was tried, and that what metrics have matched can be used.

    Raises:
        ConfigError, EnvironmentUnfit, LaunchError: that is not so.
    """
    for fault in found.faults.values():
        raise ConfigError(f"{fault} {SKIPPED}")
    if found.arms and all(trial.error for trial in found.arms.values()):
        raise failure_of(found, found.failed)


def failure_of(found: Preflight, failed: Mapping[str, Sequence[str]]) -> AmpCompareError:
    """Return an error with the reasons of arms that cannot train, and the exit code of the gravest.

    Args:
        failed: the arms by the reason.
    """
    code = max(found.arms[arm].exit_code for arms in failed.values() for arm in arms)
    reasons = [f"{', '.join(arms)}: {error}" for error, arms in failed.items()]
    reason = (
        next(iter(failed)) if len(reasons) == 1 and len(found.arms) == len(*failed.values()) else "; ".join(reasons)
    )
    return ERRORS.get(code, LaunchError)(f"{reason} {SKIPPED}")


def preflight_of(
    configs: Sequence[RunConfig], say: Callable[[str], Any] = lambda line: None, *, gpus: str | None = None
) -> None:
    """Train a few steps under each of some configurations, one for each arm, and say what they show.

    Args:
        say: called with each line.
        gpus: that they may use.

    Raises:
        ConfigError, EnvironmentUnfit, LaunchError: none can train.
    """
    place = find_places(configs[:1], 1, gpus).all[0]
    with DispatchingLauncher(place=place) as launcher:
        launcher.on_note = say
        found = check_arms({config.arm: config for config in configs}, launcher, [configs[0].recipe.seed])
    require_trainable(found)
    for line in found.lines():
        say(line)


def _build(cell: RunConfig) -> str:
    """Return what decides how a cell is built, as one text."""
    recipe = cell.recipe
    return repr(
        (cell.arm, cell.device, cell.script, recipe.task, recipe.model, recipe.data, recipe.optimizer.name,
         cell.processes, cell.parallel, recipe.batch_size)
    )  # fmt: skip


@dataclass
class _Trial:
    """A few steps of a cell.

    Attributes:
        rows: of a script.
        values, faults: of its metrics in the output.
        numbers: what it showed, with the option that takes it.
        total_steps: of the whole cell; 0 if that is not known.
    """

    record: RunRecord
    seconds: float
    steps: list[StepRecord]
    total_steps: int = 0
    rows: ScriptRows | None = None
    optimizers: list[str] = field(default_factory=list)
    metrics: dict[str, float | None] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Why it made no step; what a script does after its last one, which came too early for it, says nothing."""
        enough = self.record.config.script is not None and len(self.steps) >= STEPS
        return "" if enough or self.record.status != "failed" else self.record.error or "it failed"

    @property
    def is_scripts_own(self) -> bool:
        """Whether it failed before the arm had anything to do, and not by the arm's refusal, so that all fail alike."""
        rows, code = self.rows, self.record.environment.get("exit_code")
        return bool(self.error) and rows is not None and not rows.weights and not rows.steps and code != REFUSED

    def summary(self) -> ArmTrial:
        """Return what is stored of it."""
        code = int(self.record.environment.get("exit_code", 3)) if self.error else 0
        times = [step.seconds for step in self.steps][1:] or [step.seconds for step in self.steps]
        median = statistics.median(times) if times else None
        return ArmTrial(
            error=self.error, exit_code=code, steps=len(self.steps), seconds=self.seconds, step_seconds=median
        )


def _run(cell: RunConfig, seed: int, launcher: Launcher, folder: Path) -> _Trial:
    recipe = cell.recipe.model_copy(update={"seed": seed})
    brief = cell.model_copy(update={"recipe": recipe, "warmup_steps": 1, "drain_every": 1})
    script = cell.script
    if script is not None:
        limits = {"metrics": (), "max_steps": min(STEPS, script.max_steps or STEPS)}
        brief = brief.model_copy(update={"script": script.model_copy(update=limits)})
    else:
        brief = brief.model_copy(update={"saving": SavingConfig(stop_at_step=STEPS)})
    totals = [0]

    def follow(progress: Progress) -> None:
        totals[0] = max(totals[0], progress.total_steps)

    begun = time.perf_counter()
    record = launcher.launch(brief, folder, follow)
    seconds = time.perf_counter() - begun
    steps = list(iter_steps(folder / CellFile.STEPS)) if (folder / CellFile.STEPS).exists() else []
    if script is None:
        return _Trial(record, seconds, steps, totals[0], optimizers=[cell.recipe.optimizer.name])
    rows = of_training_process(folder)
    known = [steps for steps in (script.max_steps, rows.planned_steps) if steps is not None]
    trial = _Trial(record, seconds, steps, min(known, default=0), rows, rows.optimizers)
    _read_metrics(trial, script, folder)
    return trial


def _read_metrics(trial: _Trial, script: ScriptConfig, folder: Path) -> None:
    log = folder / CellFile.LOG
    assert trial.rows is not None
    if log.exists():
        output = OutputReader(log.open("rb"), Path(os.devnull), script.metrics)
        output.pump()
        trial.faults = output.part_faults()
        for metric in script.metrics:
            values = output.values[metric.name] if metric.pattern is not None else trial.rows.scalars.get(metric.name)
            trial.metrics[metric.name] = values[-1] if values else None
        seen = [*printed_metrics(last_lines(log, MAX_LINES))]
        trial.numbers = {one.name: one.option for one in seen}
    trial.numbers |= {name: name for name in trial.rows.scalars}


def _found(trials: Mapping[str, _Trial], seconds: float) -> Preflight:
    if not trials:
        return Preflight()
    trained = {label: trial for label, trial in trials.items() if not trial.error}
    first, *others = trained.values() or trials.values()
    script = first.record.config.script
    copies = None
    facts = first.record.script
    if facts is not None and facts.weights and others:
        copies = any(
            (other.record.script.weights, other.record.script.batches) == (facts.weights, facts.batches)
            for other in others
            if other.record.script is not None and other.record.config.recipe.seed != first.record.config.recipe.seed
        )
    return Preflight(
        arms={label: trial.summary() for label, trial in trials.items()},
        optimizers=list(dict.fromkeys(first.optimizers)),
        losses=[step.loss for step in first.steps],
        is_script=script is not None,
        copies=copies,
        seed_option=seed_option(script) if copies and script is not None else "",
        metrics=first.metrics,
        faults=first.faults,
        numbers=first.numbers,
        written=[] if facts is None else [os.path.relpath(file) for file in facts.files],
        overwritten=[] if facts is None else [os.path.relpath(file) for file in facts.files if os.path.exists(file)],
        cell_steps=first.total_steps or None,
        seconds=seconds,
    )
