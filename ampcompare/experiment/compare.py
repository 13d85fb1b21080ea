"""Compare arms from start to end: what both `ampcompare.compare` and the command `compare` call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ampcompare.analysis.gates import Check, Gate, VerdictGate, check_gates, parse_gate
from ampcompare.analysis.inference.criteria import Criteria
from ampcompare.analysis.inference.margins import check_margin, parse_margin
from ampcompare.base.errors import ConfigError, Ended, EnvironmentUnfit, LaunchError
from ampcompare.base.files.write import write_atomically
from ampcompare.experiment.adaptive_seeds import pilot_seeds, run_auto
from ampcompare.experiment.follow import following
from ampcompare.experiment.load import reload_comparison
from ampcompare.experiment.matrix import Row
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.options import CompareOptions
from ampcompare.experiment.ownership import owned
from ampcompare.experiment.plan import Plan, parse_seeds
from ampcompare.experiment.preflight import check_cells, grouped_refusals, refused_arms
from ampcompare.experiment.profile import ProfileOptions, profile
from ampcompare.experiment.profile_sentences import with_profile
from ampcompare.experiment.recorded_order import with_recorded_order
from ampcompare.experiment.run import run_plan
from ampcompare.experiment.run_folder import check_output_name
from ampcompare.experiment.single_run import WhileRunning
from ampcompare.experiment.sources import (
    SettingsSources,
    collect_settings,
    matrix_rows,
    matrix_seeds,
    plan_with_published,
)
from ampcompare.launch.places import find_places
from ampcompare.records.comparison import Comparison
from ampcompare.records.metric import Metric, metrics_of
from ampcompare.records.run import RunRecord
from ampcompare.report.base import write_reports
from ampcompare.report.junit import JUnit
from ampcompare.report.tensorboard import EventFiles
from ampcompare.tasks.catalog import TASKS

__all__ = ["ComparisonOutcome", "PlannedComparison", "plan_comparison", "requested_seeds", "run_comparison"]

DEFAULT_SEEDS = "0-2"


@dataclass(frozen=True)
class PlannedComparison:
    """A comparison whose options were checked and whose cells are known.

    Attributes:
        plan: with the seeds of the pilot, if the number of seeds is still to be determined.
        folder: the run directory.
        baseline: what gates compare with; the reference arm if None.
    """

    options: CompareOptions
    sources: SettingsSources
    rows: tuple[Row, ...]
    plan: Plan
    folder: Path
    criteria: Criteria
    gates: tuple[Gate | VerdictGate, ...]
    baseline: Comparison | None

    def plan_for(self, seeds: Sequence[int]) -> Plan:
        """Return the plan of the same rows with other seeds."""
        return _make_plan(self.options, self.sources, self.rows, seeds)


@dataclass(frozen=True)
class ComparisonOutcome:
    """A comparison that has ended.

    Attributes:
        folder: the run directory, with the reports.
        checks: the result of each gate for each arm.
        is_main: whether this process reports results, and not another node of the same command.
    """

    options: CompareOptions
    comparison: Comparison
    folder: Path
    checks: tuple[Check, ...] = ()
    is_main: bool = True

    @property
    def common_failure(self) -> RunRecord | None:
        """A record with the error that ended every cell, if it is the same for all."""
        records = self.comparison.records
        errors = {record.error for record in records if record.status == "failed"}
        all_failed = all(record.status == "failed" for record in records)
        return records[0] if records and all_failed and len(errors) == 1 else None

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if not self.is_main:
            return 0
        if self.common_failure is not None:
            return int(self.common_failure.environment.get("exit_code", 3))
        statuses = {record.status for record in self.comparison.records}
        if not statuses & {"completed", "diverged"} or ("failed" in statuses and self.options.strict):
            return 3
        return 1 if any(check.failure for check in self.checks) else 0

    def write_junit(self) -> None:
        """Write the JUnit XML, if it is asked for. Done separately, so that an unwritable file does not lose other
        results."""
        if self.options.junit is not None and self.is_main:
            write_atomically(self.options.junit, JUnit(self.checks).render(self.comparison))


def plan_comparison(options: CompareOptions) -> PlannedComparison:
    """Check the options of a comparison and return its cells; nothing is written or started.

    Raises:
        ConfigError: an option that cannot be used.
        EnvironmentUnfit: this machine lacks something that was requested.
        RecordError: the baseline cannot be read.
    """
    baseline = reload_comparison(options.baseline) if options.baseline is not None else None
    sources = collect_settings(options.settings)
    margin, metrics = _margin(options, sources), _known_metrics(sources)
    gates = tuple(parse_gate(text, metrics) for text in options.fail_on)
    if metrics is not None:
        check_margin(parse_margin(margin), metrics[0])
    margins = {"time_margin": options.time_margin / 100, "loss_margin": options.loss_margin / 100}
    criteria = Criteria(margin, prefer=options.objective, tag=options.tag, looks=options.looks, **margins)
    rows = tuple(matrix_rows(sources, arms=options.arms, reference=options.reference, sweep=options.sweep))
    base = sources.config
    if "arm" in base.model_fields_set:
        raise ConfigError(
            f"a comparison needs a list of arms, but the settings have arm: {base.arm}; write arms: [...]"
        )
    seeds = requested_seeds(options, sources)
    first = pilot_seeds(len(rows) - 1) if seeds == "auto" else parse_seeds(seeds)
    plan = _make_plan(options, sources, rows, first)
    options.launch.check({cell.launcher for cell in plan.cells}, options.jobs)
    check_cells(plan.cells)
    label = "-".join(["compare", *_folder_part(options.tag), plan.digest()])
    folder = options.output_dir or Path("runs") / label
    check_output_name(folder)
    plan = with_recorded_order(plan, folder)
    if options.profile:
        _profile_options(plan, options.reference or "")
    return PlannedComparison(options, sources, rows, plan, folder, criteria, gates, baseline)


def _make_plan(options: CompareOptions, sources: SettingsSources, rows: Sequence[Row], seeds: Sequence[int]) -> Plan:
    plan = replace(plan_with_published(sources, rows, seeds, options.reference), timing_rounds=options.timing_rounds)
    is_elsewhere = options.launch.nnodes > 1 or any(cell.launcher in ("slurm", "ray") for cell in plan.cells)
    if options.timing_rounds and (options.jobs not in (None, 1) or is_elsewhere):
        raise ConfigError(
            "--timing-rounds times one arm after the other on this machine; leave it out, or run without --jobs, "
            "--nnodes, Slurm and Ray"
        )
    # The nodes of one command run the same cells in the same order, but cannot exchange a drawn order.
    return plan if options.launch.nnodes == 1 else plan.in_order([], int(plan.digest(), 16))


def run_comparison(
    options: CompareOptions, *, observer: Observer | None = None, while_running: WhileRunning = nullcontext
) -> ComparisonOutcome:
    """Run every cell that has no usable record yet, write the reports after each, and check the gates.

    Args:
        observer: receives progress and notes in the main process.
        while_running: a context around the runs, given the launcher; the command line handles signals in it.

    Raises:
        ConfigError: an option that cannot be used, or another command uses the folder.
        EnvironmentUnfit: this machine lacks something that was requested.
        RecordError: the baseline cannot be read.
        LaunchError: no process could be started.
        KeyboardInterrupt: passed on; finished cells are saved.
        Ended: stopped by SIGTERM; finished cells are saved.
    """
    planned = plan_comparison(options)
    plan, folder = planned.plan, planned.folder
    jobs = 1 if options.timing_rounds or options.launch.nnodes > 1 else options.jobs
    places = find_places(plan.cells, jobs, options.gpus)
    launcher = options.launch.pool(planned.sources.config, places, options.jobs)
    is_main = launcher.is_main
    observer = observer if observer is not None and is_main else Observer()
    observer = following(observer, options.callbacks if is_main else ())
    for text in planned.baseline.excluded if planned.baseline is not None else []:
        observer.note(f"of the baseline a record is not used: {text}")
    for text in (*places.notes, *places.about_times):
        observer.note(text)
    for refusal in grouped_refusals(refused_arms(plan.cells)):
        observer.note(refusal)
    events = EventFiles(options.tensorboard, observer.note) if options.tensorboard is not None else None

    def save(comparison: Comparison, folder: Path) -> None:
        write_reports(comparison, folder)
        if events is not None:
            events.write(comparison, folder)

    shared: dict[str, Any] = {
        "command": options.command,
        "terms": planned.criteria,
        "force": options.force,
        "jobs": len(places.all),
        "observer": observer,
        "save": save,
    }
    hold = owned(folder, launcher, command=options.command, wait_seconds=options.wait_seconds, note=observer.note)
    try:
        with launcher, hold, while_running(launcher):
            if requested_seeds(options, planned.sources) == "auto":
                comparison = run_auto(
                    planned.plan_for, folder, launcher, budget_seconds=options.budget_seconds, **shared
                )
            else:
                comparison = run_plan(plan, folder, launcher, **shared)
    except (KeyboardInterrupt, Ended):
        if message := launcher.pending_message():
            observer.note(message)
        if (folder / "report.md").exists():
            observer.note(f"finished cells are in {folder / 'report.md'}")
        raise
    if is_main:
        if options.profile:
            _profile(planned, comparison, observer)
        told = with_profile(comparison, folder)
        if told is not comparison:
            comparison = told
            save(comparison, folder)
    checks = check_gates(planned.gates, comparison, planned.baseline) if planned.gates and is_main else []
    return ComparisonOutcome(options, comparison, folder, tuple(checks), is_main)


def _profile_options(plan: Plan, reference: str) -> ProfileOptions:
    """Return what `--profile` profiles: the cells of the first seed, the reference first.

    Raises:
        ConfigError: they cannot be profiled.
    """
    seed = plan.cells[0].recipe.seed
    cells = {cell.arm: cell for cell in reversed(plan.cells) if cell.recipe.seed == seed}
    first = [cells[reference]] if reference in cells else []
    options = ProfileOptions((*first, *(cell for arm, cell in reversed(cells.items()) if arm != reference)))
    options.check()
    return options


def _profile(planned: PlannedComparison, comparison: Comparison, observer: Observer) -> None:
    """Profile the arms that have run into the run directory."""
    options = _profile_options(planned.plan, comparison.reference)
    try:
        profile(options, output_dir=planned.folder, say=observer.note)
    except (LaunchError, EnvironmentUnfit) as error:
        observer.note(f"no profile: {error}")


def requested_seeds(options: CompareOptions, sources: SettingsSources) -> str:
    """Return the seeds as text: the requested ones, or else those of recipe or file, or else three.

    Settings with `recipe.seed` request that one seed.
    """
    one = str(sources.config.recipe.seed) if "recipe.seed" in sources.resolved.given else None
    texts = (options.seeds, matrix_seeds(sources.matrix), one, DEFAULT_SEEDS)
    return next(text for text in texts if text is not None).strip()


def _known_metrics(sources: SettingsSources) -> Sequence[Metric] | None:
    """Return the metrics of the runs; None if only a third-party task knows them."""
    if sources.config.script is not None:
        return metrics_of(sources.config.script)
    spec = TASKS.get(sources.config.recipe.task)
    return None if spec is None else spec.metrics


def _margin(options: CompareOptions, sources: SettingsSources) -> float | str:
    """Return the requested margin, or else that of recipe or file, or else the default rule."""
    values = (options.margin, sources.matrix.margin, Criteria.margin)
    return next(value for value in values if value is not None)


def _folder_part(tag: str) -> list[str]:
    """Return a tag as part of a folder's name, without characters that are not allowed there."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", tag).strip("-.")[:40]
    return [name] if name else []
