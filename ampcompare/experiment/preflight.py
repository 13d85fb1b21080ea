"""A few steps of each arm before a comparison: what cannot work is said once, before anything is paid for.

The reference comes first, with the first seed; the other arms have a second one. If two seeds give the same weights and
batches, the script does not follow the seed. Slow steps, and scripts that make none for long, are ended; arms for which
the time does not last are left to their first cell.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError, ArmAdvice, ConfigError, LaunchError, message_with_advice
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.formatting import format_count
from ampcompare.experiment.launch.cell_files import last_lines_of_file
from ampcompare.experiment.launch.contract import BY_HAND, Launcher, Progress
from ampcompare.experiment.launch.dispatch.dispatch import DispatchingLauncher
from ampcompare.experiment.launch.places import places_for_cells
from ampcompare.experiment.launch.script.listing import MAX_LINES, printed_metrics
from ampcompare.experiment.launch.script.output import OutputReader
from ampcompare.experiment.launch.script.rows import ScriptRows, rows_that_stand_for_cell
from ampcompare.experiment.plan import Plan
from ampcompare.results.analysis.pairing.seeding import key_of_run_start, why_seeds_are_one_run
from ampcompare.results.records.preflight import ArmTrial, Preflight
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.step import StepRecord, iter_steps
from ampcompare.settings.config import REMOTE_LAUNCHERS, RunConfig, SavingConfig
from ampcompare.settings.examination import ERRORS
from ampcompare.settings.script import ScriptConfig, seed_option_in_source

STEPS = 3
MAX_GUARDED_PASSES = 1000
MAX_FOLLOWED = 4  # arms that each keep one more module in fp32 than the one before
MAX_SECONDS = 5.0  # of further steps, once one is made
MAX_SECONDS_BEFORE = 60.0  # the first step, once a script or cell has begun
MAX_SECONDS_TO_BEGIN = 600.0
MIN_BUDGET = 20.0  # seconds for the arms behind the first one, or
SHARE = 0.02  # of all cells
SKIPPED = "(nothing else was started; --no-preflight skips this check)"
REFUSED = ConfigError.exit_code


def preflight(
    plan: Plan, launcher: Launcher, finished_records: Sequence[RunRecord | None], folder: Path | None = None
) -> Preflight:
    """Train a few steps of each row of a plan that has no record yet."""
    known = {label for label, record in zip(plan.labels, finished_records, strict=True) if record is not None}
    rows = {
        label: cell
        for label, cell in zip(plan.labels, plan.cells, strict=True)
        if cell.launcher not in REMOTE_LAUNCHERS
    }
    seeds = plan.seeds if len(plan.seeds) > 1 else (*plan.seeds, plan.seeds[0] + 1)
    order = sorted(plan.arms, key=lambda label: label != plan.reference)
    new = {label: rows[label] for label in order if label in rows and label not in known}
    return run_trials_of_rows(new, launcher, seeds, folder, cells=finished_records.count(None))


def run_trials_of_rows(
    rows: Mapping[str, RunConfig],
    launcher: Launcher,
    seeds: Sequence[int],
    folder: Path | None = None,
    *,
    cells: int = 0,
) -> Preflight:
    """Train a few steps of each of some cells, the first with the first seed, the others with the second.

    Args:
        rows: cells of one script or recipe by a label; those that are built alike are tried once.
        seeds: two of them; with one there is no question whether a script follows it.
        cells: how many will run, for the time that this may take.
    """
    begun = time.perf_counter()
    builds = {label: _build_key_of_cell(cell) for label, cell in rows.items()}
    with tempfile.TemporaryDirectory(prefix=".preflight.", suffix=f".{os.getpid()}.tmp", dir=folder) as place:
        runner = _TrialRunner(launcher, seeds, Path(place))
        untried = runner.try_each_build(rows, builds, cells)
        of_rows = dict(runner.trials)
        for label, cell in rows.items():
            if builds[label] in of_rows:
                runner.keep_advised_arms_that_train(of_rows[builds[label]], cell)
        tried = [trial for trial in of_rows.values() if not trial.must_be_started_by_hand]
        if len(tried) == len(rows) == 1:
            tried += runner.try_only_cell_with_last_seed(tried[0], *rows.values())
    found = _preflight_of_trials(tried, time.perf_counter() - begun)
    seen = {"arms": _arm_trials_by_label(builds, of_rows), "remarks": _labels_by_remark(builds, of_rows)}
    return found.model_copy(update={**seen, "untried": untried})


class _TrialRunner:
    """Trains a few steps of cells, each build once, within the time that the first trial sets.

    Attributes:
        trials: by what decides how a cell is built.
    """

    def __init__(self, launcher: Launcher, seeds: Sequence[int], place: Path) -> None:
        self._launcher, self._seeds, self._place = launcher, seeds, place
        self._left = 0.0  # seconds
        self.trials: dict[str, _CellTrial] = {}

    def try_each_build(
        self, rows: Mapping[str, RunConfig], builds: Mapping[str, str], cells: int
    ) -> list[str]:
        """Try cells, the first with the first seed; return the labels for which no time was left.

        Args:
            rows: cells by a label.
            builds: what decides how each is built, by the label.
            cells: how many will run.
        """
        untried: list[str] = []
        first: _CellTrial | None = None
        for label, cell in rows.items():
            if builds[label] in self.trials:
                continue
            if first is None:
                first = self._run_and_keep_trial(cell, builds[label], self._seeds[0])
                self._left = first.seconds_allowed_for_other_arms(cells)
                if first.is_fault_of_script or first.faults:
                    break
            elif self._left < first.busy_seconds or (first.was_ended_for_time and not first.steps):
                untried.append(label)
            else:
                self._left -= self._run_and_keep_trial(cell, builds[label], self._seeds[-1]).busy_seconds
        return untried

    def keep_advised_arms_that_train(self, failed: _CellTrial, cell: RunConfig) -> None:
        """Leave, of the arms that the error of a trial advises, those that are seen to train to finite losses.

        Args:
            failed: the trial; one without advice is left as it is.
            cell: of it.
        """

        def find_trial(arm: str) -> _CellTrial | None:
            other = cell.model_copy(update={"arm": str(Arm.parse(arm))})
            build = _build_key_of_cell(other)
            if build not in self.trials and self._left >= failed.busy_seconds:
                self._left -= self._run_and_keep_trial(other, build, self._seeds[-1]).busy_seconds
            return self.trials.get(build)

        able: list[str] = []
        for advised in failed.advice.arms:
            if _patterns_kept_by(advised) and any(map(_patterns_kept_by, able)):
                continue  # the first that trains keeps the least
            arm = _find_arm_with_finite_losses(advised, find_trial)
            able += [arm] if arm and arm not in able else []
        failed.advice = failed.advice.with_arms(able)

    def try_only_cell_with_last_seed(self, first: _CellTrial, cell: RunConfig) -> list[_CellTrial]:
        """Try the only cell again with another seed, if there is one, it trains, and there is time for it."""
        if len(self._seeds) < 2 or not first.is_trained or self._left < first.busy_seconds:
            return []
        return [_run_trial_of_cell(cell, self._seeds[-1], self._launcher, self._place / "again")]

    def _run_and_keep_trial(self, cell: RunConfig, build: str, seed: int) -> _CellTrial:
        folder = self._place / str(len(self.trials))
        trial = self.trials[build] = _run_trial_of_cell(cell, seed, self._launcher, folder)
        return trial


def _arm_trials_by_label(builds: Mapping[str, str], trials: Mapping[str, _CellTrial]) -> dict[str, ArmTrial]:
    """Return what is stored of each label that was tried; nothing of those that cannot be started from here."""
    found = {label: trials[build] for label, build in builds.items() if build in trials}
    return {label: trial.summary() for label, trial in found.items() if not trial.must_be_started_by_hand}


def _labels_by_remark(builds: Mapping[str, str], trials: Mapping[str, _CellTrial]) -> dict[str, list[str]]:
    """Return what guards and the ledger remark of the labels that were tried: the labels by the text."""
    found: dict[str, list[str]] = {}
    for label, build in builds.items():
        if build in trials:
            for text in trials[build].remarks:
                found.setdefault(text, []).append(label)
    return found


def _find_arm_with_finite_losses(arm: str, find_trial: Callable[[str], _CellTrial | None]) -> str | None:
    """Return an arm if it trains to finite losses, else the first that keeps more in fp32, as each error advises.

    One whose optimizer divides by an eps of zero has finite losses for a while.
    """
    for _ in range(MAX_FOLLOWED):
        trial = find_trial(arm)
        if trial is None:
            return None
        if trial.is_trained:
            is_sound = trial.find_step_of_nonfinite_loss() is None and not trial.divides_by_zero_eps
            return arm if is_sound else None
        more = _advised_arm_that_keeps_more(str(Arm.parse(arm)), trial.advice)
        if more is None:
            return None
        arm = more
    return None


def _advised_arm_that_keeps_more(arm: str, advice: ArmAdvice) -> str | None:
    """Return the first advised arm that keeps in fp32 what an arm keeps, and another module; None without."""
    kept = _patterns_kept_by(arm)
    return next((one for one in advice.arms if kept and kept < _patterns_kept_by(one)), None)


def _patterns_kept_by(arm: str) -> set[str]:
    return {*filter(None, Arm.parse(arm).keep_fp32.split("|"))}


def require_trainable_arm_and_metrics(preflight_result: Preflight) -> None:
    """Check that an arm made a step, if any was tried, and that what metrics have matched can be used.

    Raises:
        ConfigError: what a metric has matched cannot be used.
        AmpCompareError: no arm made a step; the error is that of the arms.
    """
    for fault in preflight_result.faults.values():
        raise ConfigError(f"{fault} {SKIPPED}")
    if preflight_result.arms and all(trial.error for trial in preflight_result.arms.values()):
        raise error_of_failed_arms(preflight_result, preflight_result.failures)


def require_different_runs_by_seed(preflight_result: Preflight, seeds: Sequence[int]) -> None:
    """Check that seeds which were asked for would be runs of their own.

    Args:
        preflight_result: what a few steps of each arm showed.
        seeds: all that were asked for.

    Raises:
        ConfigError: the script trains the same under two seeds.
    """
    if preflight_result.copies and len(seeds) > 1:
        raise ConfigError(
            f"{preflight_result.identical_seeds_sentence}; or run one seed, --seeds {seeds[0]} {SKIPPED}"
        )


def error_of_failed_arms(
    preflight_result: Preflight, arms_by_error: Mapping[str, Sequence[str]]
) -> AmpCompareError:
    """Return an error with the reasons of arms that cannot train, and the exit code of the gravest."""
    code = max(preflight_result.arms[arm].exit_code for arms in arms_by_error.values() for arm in arms)
    reasons = [f"{', '.join(arms)}: {error}" for error, arms in arms_by_error.items()]
    reason = (
        next(iter(arms_by_error))
        if len(reasons) == 1 and len(preflight_result.arms) == len(*arms_by_error.values())
        else "; ".join(reasons)
    )
    return ERRORS.get(code, LaunchError)(f"{reason} {SKIPPED}")


def run_trials_of_configs(
    configs: Sequence[RunConfig],
    say: Callable[[str], Any] = lambda line: None,
    *,
    min_steps: int = 0,
    watches_failures: bool = False,
) -> None:
    """Train a few steps under each of some configurations, and say what they show.

    Args:
        configs: one for each arm; the seed of the first counts for all.
        say: gets each line.
        min_steps: so many updates a script has to make.
        watches_failures: what follows looks at a script that ends by itself before its first step, as at a loss that
            is not finite, so that this is said and no error.

    Raises:
        ConfigError: a script makes fewer updates, or what its metrics have matched cannot be used.
        AmpCompareError: no arm can train; the error is that of the first.
    """
    place = places_for_cells(configs[:1], 1).all[0]
    with DispatchingLauncher(place=place) as launcher:
        launcher.on_note = say
        found = run_trials_of_rows(
            {config.arm: config for config in configs}, launcher, [configs[0].recipe.seed]
        )
    # A script that makes no optimizer, such as one that refuses its arguments, ends before anything can be watched.
    if (
        watches_failures
        and found.failures
        and found.optimizers
        and all(one.exit_code not in ERRORS for one in found.arms.values())
    ):
        for error, arms in found.failures.items():
            say(f"{', '.join(arms)} made no step: {error}")
        return
    require_trainable_arm_and_metrics(found)
    if found.cell_steps is not None and found.cell_steps < min_steps:
        raise ConfigError(
            f"the script makes {format_count(found.cell_steps, 'step')}, and {min_steps} are needed: let it train "
            f"longer, or lower --steps {SKIPPED}"
        )
    for line in found.summary_lines():
        say(line)


def _build_key_of_cell(cell: RunConfig) -> str:
    """Return what decides how a cell is built, as one text."""
    recipe = cell.recipe
    return repr(
        (cell.arm, cell.stack, cell.device, cell.script, recipe.task, recipe.model, recipe.data, recipe.optimizer.name,
         cell.processes, cell.parallel, recipe.batch_size)
    )  # fmt: skip


@dataclass
class _CellTrial:
    """A few steps of a cell.

    Attributes:
        metrics, faults: what its output has, by the name of a metric: the value, or why it has none.
        numbers: what it showed, with the option that takes it.
        advice, seen: what may be done about its error, and the error without that; empty where no arm is advised.
        seconds: from the start of its process to its end.
        busy_seconds: without the start of a server.
        total_steps: of the whole cell; 0 if that is not known.
    """

    record: RunRecord
    seconds: float
    busy_seconds: float
    steps: list[StepRecord]
    total_steps: int = 0
    rows: ScriptRows | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    advice: ArmAdvice = field(default_factory=ArmAdvice)
    seen: str = ""

    def __post_init__(self) -> None:
        found = {} if self.rows is None or self.rows.ended is None else self.rows.ended.get("advice") or {}
        if found and self.record.status == "failed":
            self.advice, self.seen = ArmAdvice(tuple(found["arms"]), found["remedy"]), found["seen"]

    @property
    def error(self) -> str:
        """Why it made no step; what a script does after its last one, which came too early for it, says nothing."""
        enough = self.record.config.script is not None and len(self.steps) >= STEPS
        if enough or self.record.status != "failed":
            return ""
        return message_with_advice(self.seen, self.advice) if self.seen else self.record.error or "it failed"

    @property
    def remarks(self) -> list[str]:
        """What went wrong in its steps by the script's own lines."""
        if self.rows is None:
            return list(self.record.guards)
        return [*self.rows.guards, *self.rows.remarks]

    @property
    def losses(self) -> list[float]:
        """Those of its steps; none of a script that shows no loss."""
        return [step.loss for step in self.steps] if self.rows is None else self.rows.losses

    @property
    def is_trained(self) -> bool:
        """Whether it made a step, so that another seed can be compared with it."""
        return bool(self.steps) and not self.error

    @property
    def was_ended_for_time(self) -> bool:
        """Whether it took too long, so that nothing is known of its batches."""
        return self.record.status == "interrupted"

    @property
    def must_be_started_by_hand(self) -> bool:
        """Whether it cannot be started from here, as each cell will say at once in its own folder."""
        return BY_HAND in self.record.environment

    @property
    def is_fault_of_script(self) -> bool:
        """Whether it failed before the arm had anything to do, and not by the arm's refusal, so that all fail alike."""
        rows, code = self.rows, self.record.environment.get("exit_code")
        if self.record.config.stack is not None or self.must_be_started_by_hand:  # whose fault it may be
            return False
        if rows is None or rows.weights or rows.steps:
            return False
        return bool(self.error) and code != REFUSED

    def seconds_allowed_for_other_arms(self, cells: int) -> float:
        """Return the seconds that the other arms may take before so many cells."""
        found = self.summary()
        steps = self.total_steps * (found.step_seconds or 0.0)
        return max(MIN_BUDGET, SHARE * cells * (self.busy_seconds + steps))

    def summary(self) -> ArmTrial:
        """Return what is stored of it."""
        code = int(self.record.environment.get("exit_code", 3)) if self.error else 0
        times = [step.seconds for step in self.steps][1:] or [step.seconds for step in self.steps]
        median = statistics.median(times) if times else None
        return ArmTrial(
            error=self.error,
            exit_code=code,
            steps=len(self.steps),
            seconds=self.seconds,
            step_seconds=median,
            lost_loss_at=self.find_step_of_nonfinite_loss(),
        )

    @property
    def divides_by_zero_eps(self) -> bool:
        """Whether an optimizer was seen to divide by zero, which breaks weights whose loss may show it later."""
        ledger = None if self.rows is None else self.rows.ledger
        return ledger is not None and bool(ledger.zero_denominators)

    def find_step_of_nonfinite_loss(self) -> int | None:
        """Return the first step whose loss is not finite; None if that of the last one is, or is not known."""
        if not self.losses or math.isfinite(self.losses[-1]):
            return None
        return next(at for at, loss in enumerate(self.losses) if not math.isfinite(loss))


def _run_trial_of_cell(cell: RunConfig, seed: int, launcher: Launcher, folder: Path) -> _CellTrial:
    recipe = cell.recipe.model_copy(update={"seed": seed})
    brief = cell.model_copy(update={"recipe": recipe, "warmup_steps": 1, "drain_every": 1})
    script = cell.script
    if script is not None:
        limits = {"metrics": (), "max_steps": min(STEPS, script.max_steps or STEPS)}
        # None of its times is compared, so guards look at all that it does.
        update = {"script": script.model_copy(update=limits), "warmup_steps": MAX_GUARDED_PASSES}
        brief = brief.model_copy(update=update)
    else:
        brief = brief.model_copy(update={"saving": SavingConfig(stop_at_step=STEPS)})
    limit = _CellTimeLimit(launcher)
    begun = time.perf_counter()
    with limit:
        record = launcher.launch(brief, folder, limit.note_progress)
    seconds = time.perf_counter() - begun
    busy = min(seconds, limit.elapsed_seconds())
    steps = list(iter_steps(folder / CellFile.STEPS)) if (folder / CellFile.STEPS).exists() else []
    if script is None:
        return _CellTrial(record, seconds, busy, steps, limit.total_steps)
    rows = rows_that_stand_for_cell(folder)
    known = [steps for steps in (script.max_steps, rows.planned_steps) if steps is not None]
    trial = _CellTrial(record, seconds, busy, steps, min(known, default=0), rows)
    _read_printed_metrics_of_trial(trial, script, folder)
    return trial


class _CellTimeLimit:
    """Ends the cell of a launcher that takes too long, while this is a context; notes the steps of the whole cell."""

    def __init__(self, launcher: Launcher) -> None:
        self.total_steps = 0
        self._launcher = launcher
        self._begun = self._stepped = 0.0

    def __enter__(self) -> None:
        self._end_cell_after(MAX_SECONDS_TO_BEGIN)

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()

    def note_progress(self, progress: Progress) -> None:
        """Note that the cell has begun, or made a step."""
        self.total_steps = max(self.total_steps, progress.total_steps)
        now = time.monotonic()
        if not self._begun:
            self._begun = now
            self._timer.cancel()
            self._end_cell_after(MAX_SECONDS_BEFORE)
        if progress.steps and not self._stepped:
            self._stepped = now
            self._timer.cancel()
            self._end_cell_after(MAX_SECONDS)

    def elapsed_seconds(self) -> float:
        """Return the time since the cell has begun."""
        return time.monotonic() - (self._begun or time.monotonic())

    def _end_cell_after(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._launcher.end_cell)
        self._timer.daemon = True
        self._timer.start()


def _read_printed_metrics_of_trial(trial: _CellTrial, script: ScriptConfig, folder: Path) -> None:
    log = folder / CellFile.LOG
    assert trial.rows is not None
    if log.exists():
        output = OutputReader(log.open("rb"), Path(os.devnull), script.metrics)
        output.read_to_end()
        trial.faults = output.faults_of_matched_values()
        for metric in script.metrics:
            values = (
                output.values[metric.name]
                if metric.pattern is not None
                else trial.rows.scalars.get(metric.name)
            )
            trial.metrics[metric.name] = values[-1] if values else None
        seen = [*printed_metrics(last_lines_of_file(log, MAX_LINES))]
        trial.numbers = {one.name: one.option for one in seen}
    trial.numbers |= {name: name for name in trial.rows.scalars}


def _preflight_of_trials(trials: Sequence[_CellTrial], seconds: float) -> Preflight:
    if not trials:
        return Preflight()
    first, *others = [trial for trial in trials if not trial.error] or trials
    recipe, script = first.record.config.recipe, first.record.config.script
    copies = None
    facts = first.record.script
    if facts is not None and facts.weights and others and not first.was_ended_for_time:
        copies = any(
            key_of_run_start(other.record.script) == key_of_run_start(facts)
            for other in others
            if other.record.script is not None and other.record.config.recipe.seed != recipe.seed
        )
    option = seed_option_in_source(script) if copies and script is not None else ""
    return Preflight(
        optimizers=list(
            dict.fromkeys([recipe.optimizer.name] if first.rows is None else first.rows.optimizers)
        ),
        losses=first.losses,
        is_script=script is not None,
        copies=copies,
        seed_option=option,
        why_copies=why_seeds_are_one_run(script, facts, option) if copies and script is not None else "",
        metrics=first.metrics,
        faults=first.faults,
        numbers=first.numbers,
        written=[] if facts is None else [os.path.relpath(file) for file in facts.files],
        overwritten=[]
        if facts is None
        else [os.path.relpath(file) for file in facts.files if os.path.exists(file)],
        cell_steps=first.total_steps or None,
        seconds=seconds,
    )
