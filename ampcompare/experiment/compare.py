"""Compare arms from start to end: what both `ampcompare.compare` and the command `compare` call.

The number is derived from the pilot's spread, so the test uses that spread too, with its few degrees of freedom
(Stein's two-stage test): the spread over all pairs would be too small whenever the pilot's was, and the error rate too
high.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError, Ended, GateFailed
from ampcompare.base.files.write import write_atomically
from ampcompare.base.option_rules import refusal_sentence, refuse_broken_rules
from ampcompare.base.secrets.masking import reveal_secrets
from ampcompare.experiment.launch.cell_files import write_cell_inputs
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.dispatch.cell import command_of_cell
from ampcompare.experiment.launch.dispatch.local import LocalLauncher
from ampcompare.experiment.launch.places import places_for_cells
from ampcompare.experiment.matrix import MatrixRow, find_reference
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.option_checks import check_cells
from ampcompare.experiment.plan import Plan, make_plan_of_rows, parse_seeds
from ampcompare.experiment.preflight import preflight
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_directory import DEFAULT_FOLDER, RunDirectory
from ampcompare.experiment.run_options import COMPARE_RULES, CompareOptions
from ampcompare.experiment.run_plan import CommonFailure, RunningPlan, run_plan
from ampcompare.experiment.single_run import WhileRunning
from ampcompare.experiment.sources import (
    SettingsSources,
    collect_settings,
    matrix_rows,
    matrix_seeds_text,
    published_table_matched_to_rows,
)
from ampcompare.results.analysis.effects.quality import quality_effects, quality_margin
from ampcompare.results.analysis.gates import Gate, GateOutcome, VerdictGate, gate_outcomes, parse_gate
from ampcompare.results.analysis.inference.alpha_spending import error_rate_of_next_look
from ampcompare.results.analysis.inference.effect import Effect
from ampcompare.results.analysis.inference.sample_size import pairs_needed_by_stein
from ampcompare.results.analysis.inference.terms import Terms, check_margin, parse_margin, terms_of_comparison
from ampcompare.results.records.comparison import Comparison, Look
from ampcompare.results.records.metric import Metric, metrics_of_script
from ampcompare.results.records.preflight import Preflight
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.base import FORMATS, write_reports
from ampcompare.results.report.export import make_exporter
from ampcompare.results.report.junit import junit_xml
from ampcompare.settings.reads import TRAIN
from ampcompare.settings.stack import require_used_stacks
from ampcompare.tasks.catalog import TASKS

DEFAULT_SEEDS = "0-2"
BUDGET_SECONDS = 1800.0
PILOT_SIZES = {1: 5, 2: 8, 3: 8}  # by the number of arms besides the reference; MAX_PILOT for more arms
MAX_PILOT = 10


@dataclass(frozen=True)
class PlannedComparison:
    """A comparison whose options were checked and whose cells are known.

    Attributes:
        plan: with the seeds of the pilot, if the number of seeds is still to be determined.
        baseline: what gates compare with; the reference arm if None.
    """

    options: CompareOptions
    sources: SettingsSources
    rows: tuple[MatrixRow, ...]
    plan: Plan
    folder: Path
    terms: Terms
    gates: tuple[Gate | VerdictGate, ...]
    baseline: Comparison | None

    def plan_with_seeds(self, seeds: Sequence[int]) -> Plan:
        """Return the plan of the same rows with other seeds."""
        return _make_plan(self.options, self.sources, self.rows, seeds)


@dataclass(frozen=True)
class ComparisonOutcome:
    """A comparison that has ended."""

    options: CompareOptions
    comparison: Comparison
    folder: Path
    checks: tuple[GateOutcome, ...] = ()

    @property
    def record_of_common_failure(self) -> RunRecord | None:
        """A record with the error that ended every cell, if it is the same for all."""
        records = self.comparison.records
        errors = {record.error for record in records if record.status == "failed"}
        all_failed = all(record.status == "failed" for record in records)
        return records[0] if records and all_failed and len(errors) == 1 else None

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.record_of_common_failure is not None:
            return int(self.record_of_common_failure.environment.get("exit_code", 3))
        statuses = {record.status for record in self.comparison.records}
        if not statuses & {"completed", "diverged"} or ("failed" in statuses and self.options.strict):
            return 3
        return 1 if any(check.failure for check in self.checks) else 0

    def raise_if_gate_failed(self) -> None:
        """Raise what Python's functions raise where an arm exceeds a limit.

        Raises:
            GateFailed: with the limits that were exceeded, and the comparison.
        """
        failures = [f"{check.arm}: {check.failure}" for check in self.checks if check.failure]
        if failures:
            raise GateFailed("; ".join(failures), self.comparison)

    def write_junit(self) -> None:
        """Write the JUnit XML, if it is asked for. Done separately, so that an unwritable file does not lose other
        results."""
        if self.options.junit is not None:
            write_atomically(self.options.junit, junit_xml(self.comparison, self.checks))


def plan_comparison(options: CompareOptions) -> PlannedComparison:
    """Check the options of a comparison and return its cells; nothing is written or started.

    Raises:
        ConfigError: options or settings that cannot be used together, or that name what does not exist.
        EnvironmentUnfit: this machine lacks what the cells need.
        RecordError: the baseline cannot be read.
    """
    sources = collect_settings(options.settings, TRAIN)
    if options.first_weights is not None:
        sources = sources.with_first_weights(options.first_weights, options.stacks)
    margins = (options.margin, sources.matrix.margin, Terms.margin)
    margin, metrics = (
        next(value for value in margins if value is not None),
        _metrics_of_runs_if_known(sources),
    )
    gates = tuple(parse_gate(text, metrics) for text in options.fail_on)
    if metrics is not None:
        check_margin(parse_margin(margin), metrics[0])
    terms = Terms(
        margin, options.time_margin / 100, prefer=options.objective, tag=options.tag, looks=options.looks,
        loss_margin=options.loss_margin / 100,
    )  # fmt: skip
    rows = tuple(matrix_rows(
        sources, arms=options.arms, reference=options.reference, sweep=options.sweep, stacks=options.stacks,
    ))  # fmt: skip
    used = {row.stack.name for row in rows if row.stack is not None} | {options.first_weights}
    require_used_stacks(options.stacks, used)
    if options.twin and (base_row := find_reference(rows, options.reference)) is not None:
        rows = (*rows, replace(base_row, varied={**base_row.varied, "first_weights": "twin"}))
    base = sources.config
    if "arm" in base.model_fields_set:
        raise ConfigError(
            f"a comparison needs a list of arms, but the settings have arm: {base.arm}; write arms: [...]"
        )
    seeds = requested_or_default_seeds_text(options, sources)
    first = pilot_seeds(len(rows) - 1) if seeds == "auto" else parse_seeds(seeds)
    plan = _make_plan(options, sources, rows, first)
    given = {**vars(options), "seeds": seeds, "slurm_options": options.launch.slurm_options}
    refuse_broken_rules(COMPARE_RULES, {**given, "launchers": {cell.launcher for cell in plan.cells}})
    check_cells(plan.cells)
    baseline = reload_comparison(options.baseline) if options.baseline is not None else None
    tag = re.sub(r"[^A-Za-z0-9.]+", "-", options.tag).strip("-.")[:40]
    label = "-".join(filter(None, ["compare", tag, plan.digest()]))
    folder = options.output_dir or DEFAULT_FOLDER / label
    run = RunDirectory(folder)
    run.check_name()
    plan = run.plan_in_recorded_order(plan)
    return PlannedComparison(options, sources, rows, plan, folder, terms, gates, baseline)


def _make_plan(
    options: CompareOptions, sources: SettingsSources, rows: Sequence[MatrixRow], seeds: Sequence[int]
) -> Plan:
    plan = make_plan_of_rows(sources.config, rows, seeds, options.reference)
    return replace(
        plan, published=published_table_matched_to_rows(sources, rows), timing_rounds=options.timing_rounds
    )


def run_comparison(
    options: CompareOptions, *, observer: Observer | None = None, while_running: WhileRunning = nullcontext
) -> ComparisonOutcome:
    """Run every cell that has no usable record yet, write the reports after each, and check the gates.

    Args:
        options: arms, seeds, terms and how cells are started.
        observer: receives progress and notes.
        while_running: a context around the runs, given the launcher; the command line handles signals in it.
    """
    planned = plan_comparison(options)
    plan, folder = planned.plan, planned.folder
    jobs = 1 if options.timing_rounds else options.jobs
    places = places_for_cells(plan.cells, jobs, options.gpus)
    launcher = options.launch.pool(planned.sources.config, places, options.jobs)
    observer = observer or Observer()
    for text in planned.baseline.excluded if planned.baseline is not None else []:
        observer.note(f"of the baseline a record is not used: {text}")
    for text in (*places.notes, *places.about_times):
        observer.note(text)
    events = make_exporter("tensorboard", options.tensorboard, observer.note) if options.tensorboard else None

    def save(comparison: Comparison, folder: Path) -> None:
        write_reports(comparison, folder)
        if events is not None:
            events.export_records(comparison, folder)

    shared: dict[str, Any] = {
        "command": options.command,
        "terms": planned.terms,
        "force": options.force,
        "jobs": len(places.all),
        "observer": observer,
        "save": save,
        "check": options.preflight,
        "are_seeds_asked": options.seeds is not None,
    }
    hold = RunDirectory(folder).with_lock(launcher, command=options.command)
    try:
        with launcher, hold, while_running(launcher):
            if requested_or_default_seeds_text(options, planned.sources) == "auto":
                budget = BUDGET_SECONDS if options.budget_seconds is None else options.budget_seconds
                comparison = run_pilot_and_estimated_seeds(
                    planned.plan_with_seeds, folder, launcher, budget_seconds=budget, **shared
                )
            else:
                comparison = run_plan(plan, folder, launcher, **shared)
    except CommonFailure as failure:
        comparison = failure.comparison
    except (KeyboardInterrupt, Ended):
        if message := launcher.pending_message():
            observer.note(message)
        if (report := folder / str(FORMATS["md"].file)).exists():
            observer.note(f"finished cells are in {report}")
        raise
    checks = gate_outcomes(planned.gates, comparison, planned.baseline) if planned.gates else []
    return ComparisonOutcome(options, comparison, folder, tuple(checks))


def write_cell_commands(options: CompareOptions, file: Path) -> int:
    """Write the command of each cell that has no record, for any scheduler; the same comparison reads what they leave.

    Args:
        options: of the comparison.
        file: gets one command a line.

    Returns:
        The number of commands.

    Raises:
        ConfigError: the number of seeds is decided while they run, or an argument of the script is a secret.
    """
    planned = plan_comparison(options)
    if requested_or_default_seeds_text(options, planned.sources) == "auto":
        why = "is not for --emit-cells: the first cells decide how many follow"
        raise ConfigError(refusal_sentence("--seeds auto", why, "name the seeds"))
    script = planned.plan.cells[0].script
    if script is not None and reveal_secrets(script.arguments) != list(script.arguments):
        raise ConfigError(
            "a secret among the arguments of the script is written to no file, so no command can have it; let the "
            "script read it from the environment"
        )
    run, launcher = RunDirectory(planned.folder), LocalLauncher()
    with run.with_lock(launcher, command=options.command):
        running = RunningPlan(
            planned.plan, run, launcher, command=options.command, terms=planned.terms, force=options.force,
            observer=Observer(),
        )  # fmt: skip
        cells = [
            running.cell_and_folder(index) for index in running.indices_to_run(range(len(planned.plan.cells)))
        ]
        for config, folder in cells:
            write_cell_inputs(config, folder)
    here = shlex.quote(os.getcwd())
    commands = [f"cd {here} && {shlex.join(command_of_cell(folder.resolve()))}\n" for _, folder in cells]
    write_atomically(file, "".join(commands))
    return len(commands)


def preflight_planned_rows(planned: PlannedComparison) -> Preflight | None:
    """Train a few steps of each row of a comparison that has no record, writing nothing; None where it is left out."""
    options, plan = planned.options, planned.plan
    if not options.preflight:
        return None
    run = RunDirectory(planned.folder)
    done = [
        run.find_reusable_record_and_reason(cell).record if run.path.is_dir() else None for cell in plan.cells
    ]
    places = places_for_cells(plan.cells, 1, options.gpus)
    with options.launch.pool(planned.sources.config, places) as launcher:
        return preflight(plan, launcher, done)


def requested_or_default_seeds_text(options: CompareOptions, sources: SettingsSources) -> str:
    """Return the seeds as text: the requested ones, or else those of recipe or file, or else three.

    Settings with `recipe.seed` request that one seed.

    Args:
        options: whose `seeds` win.
        sources: where settings, matrix and recipe come from.

    Returns:
        Text such as "0-4" or "auto", which is not checked yet.
    """
    one = str(sources.config.recipe.seed) if "recipe.seed" in sources.resolved.given else None
    texts = (options.seeds, matrix_seeds_text(sources.matrix), one, DEFAULT_SEEDS)
    return next(text for text in texts if text is not None).strip()


def _metrics_of_runs_if_known(sources: SettingsSources) -> Sequence[Metric] | None:
    """Return the metrics of the runs; None if only a third-party task knows them."""
    if sources.config.script is not None:
        return metrics_of_script(sources.config.script)
    spec = TASKS.get(sources.config.recipe.task)
    return None if spec is None else spec.metrics


def pilot_seeds(num_other_arms: int) -> range:
    """Return the seeds of a pilot, for some arms besides the reference.

    Each arm is tested at its share of the error rate, and at a small level few degrees of freedom cost many seeds: nine
    arms need 158 seeds with a pilot of five and 72 with one of ten, where a difference has an sd of 0.8 points and
    the margin is 0.5.
    """
    return range(PILOT_SIZES.get(max(1, num_other_arms), MAX_PILOT))


def pairs_needed_and_neediest_arm(comparison: Comparison, error_rate: float) -> tuple[int, str]:
    """Return how many pairs a comparison needs in all, and the arm that needs most; 0 and "" if that cannot be
    estimated.

    That is the number for a power of 80 % in Stein's one-sided test of non-inferiority at the margin, if the true
    difference is 0, with the pilot's spread, at a level shared by all arms. All arms get the largest number.
    """
    arms, reference = [row.arm for row in comparison.arms], comparison.reference
    runs = [record for record in comparison.records if record.arm == reference]
    margin = quality_margin(runs, reference, terms_of_comparison(comparison), comparison.metric)
    effects = quality_effects(comparison.records, arms, reference, margin.error_share)
    able = {arm: effect for arm, effect in effects.items() if effect.is_testable}
    alpha = error_rate / max(1, len(able))
    needs = {
        arm: pairs_needed_by_stein(
            _standard_deviation_of_differences(effect),
            effect.freedom,
            margin.margin_of_score_differences().size,
            alpha,
        )
        for arm, effect in able.items()
    }
    arm = max(needs, key=lambda name: needs[name], default="")
    return needs.get(arm, 0), arm


def _standard_deviation_of_differences(effect: Effect) -> float:
    return max(effect.error, effect.margin_error or 0.0) * math.sqrt(effect.pairs)


def _seed_count_and_neediest_arm(
    pilot: Comparison, size: int, looks: Sequence[Look], terms: Terms
) -> tuple[int, str]:
    """Return how many seeds the next look needs, or an earlier one that got them: the same command asks no more."""
    for look in looks:
        if look.error_rate and look.margin == terms.margin:
            needed, arm = pairs_needed_and_neediest_arm(pilot, look.error_rate)
            if look.seeds == list(range(max(needed, size))):
                return needed, arm
    error_rate = error_rate_of_next_look(looks, terms.looks)
    return pairs_needed_and_neediest_arm(pilot, error_rate) if error_rate else (0, "")


def run_pilot_and_estimated_seeds(
    make: Callable[[Sequence[int]], Plan],
    folder: Path,
    launcher: Launcher,
    *,
    terms: Terms,
    budget_seconds: float,
    observer: Observer | None = None,
    save: Callable[[Comparison, Path], None] | None = None,
    jobs: int = 1,
    command: str = "",
    **pilot_options: Any,
) -> Comparison:
    """Run a pilot of some seeds, estimate how many the margin needs, and run that many within a budget.

    Args:
        budget_seconds: wall time; a seed whose cells would not finish in time is not started. The pilot always runs.
    """
    observer = observer or Observer()
    begin = time.monotonic()
    first = pilot_seeds(len(make([0]).arms) - 1)
    run = partial(
        run_plan, folder=folder, launcher=launcher, command=command, terms=terms, jobs=jobs, save=save
    )
    pilot = run(make(first), observer=observer, test=False, **pilot_options)
    needed, arm = _seed_count_and_neediest_arm(pilot, len(first), RunDirectory(folder).read_looks(), terms)
    margin = f"a margin of {pilot.margin:g} {pilot.metric.difference_unit.replace('pp', 'points')}".rstrip()
    if needed <= len(first):
        observer.note(
            f"the pilot of {len(first)} seeds is enough for {margin}"
            if needed
            else f"no arm has three completed pairs with {pilot.reference}, or no look is left, so how many seeds are "
            "needed is not known"
        )
        return run(make(first), pilot=first)
    observer.note(
        f"{margin} needs {needed} seeds, judging by the spread of {arm} over the pilot's {len(first)}"
    )
    ended = ""

    def fits_budget(records: Sequence[RunRecord]) -> bool:
        nonlocal ended
        left = begin + budget_seconds - time.monotonic()
        seeds = len({record.config.recipe.seed for record in records})
        if left >= sum(record.summary.wall_seconds or 0.0 for record in records) / (seeds * jobs):
            return True
        ended = (
            f"The budget of {budget_seconds:g} s ended it after {seeds} of the {needed} seeds that are needed. The "
            f"error rate still holds, but the power to detect a difference is below 80 %."
        )
        return False

    comparison = run(make(range(needed)), observer=observer, may_start=fits_budget, pilot=first)
    if not ended:
        return comparison
    comparison = comparison.model_copy(update={"reading": [*comparison.reading, ended]})
    if save is not None:
        save(comparison, folder)
    return comparison
