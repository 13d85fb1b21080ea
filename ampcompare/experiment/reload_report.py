"""Load a comparison from files that an earlier call wrote."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from filelock import Timeout

from ampcompare.base.environment.extras import require_statistics_packages
from ampcompare.base.errors import ConfigError, EnvironmentUnfit, RecordError, close_matches
from ampcompare.base.files.read import FileFault, read_json
from ampcompare.experiment.interim_analyses import Journal
from ampcompare.experiment.run_directory import (
    RunDirectory,
    StoredPlan,
    records_of_plan,
)
from ampcompare.results.analysis.conclusions.headline import headline
from ampcompare.results.analysis.conclusions.next_step import next_steps
from ampcompare.results.analysis.inference.alpha_spending import error_rate_of_next_look
from ampcompare.results.analysis.inference.terms import terms_of_comparison
from ampcompare.results.analysis.inference.verdict import SequentialDesign
from ampcompare.results.analysis.pairing.comparability import changed_settings
from ampcompare.results.analysis.pairing.record_checks import read_checked_record
from ampcompare.results.analysis.pairing.reference import default_reference, find_row_named
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison, read_comparison
from ampcompare.results.records.run import RunRecord

_NO_JOURNAL = (
    "Nothing was tested: another reference is another look at these runs, and there is no journal here to count it. "
    "Name a run directory of this version, or run that comparison in its own run directory."
)
NOT_COUNTED = (
    "Nothing was tested: the journal has no look at these runs under the terms of the plan, and a report adds none. "
    "Run the comparison again with these terms to test."
)
NO_PLAN = (
    "Nothing was tested: the folder has a journal of looks but no plan.json that says which of its runs belong "
    "together. Run the command that wrote it again to restore it."
)
NOT_WRITABLE = (
    "Nothing was tested: another reference is another look at these runs, and it could not be counted because the run "
    "directory is not writable."
)


def reload_comparison(path: Path, *, reference: str | None = None) -> Comparison:
    """Read a run directory, a `record.json` or a `report.json`.

    A run directory is summed up again from its records, in the order of its plan, where it has one. Records with a
    fault are left out and named in `excluded`.

    Args:
        path: of the run directory or file.
        reference: another row than that of the plan. In a run directory that is one more look at its runs, which is
            written into its journal; elsewhere nothing is tested.

    Raises:
        RecordError: there is nothing to read, or nothing usable.
        ConfigError: no row is named like the reference, or the look cannot be recorded because the folder is in use.
    """
    if os.path.isdir(path):
        require_statistics_packages()
        return _comparison_of_folder(RunDirectory(path), reference)
    if not os.path.exists(path):
        raise RecordError(f"there is no {path}; name a run directory, a record.json or a report.json")
    try:
        kind = read_json(path)
    except FileFault:
        kind = {}
    if isinstance(kind, dict) and "records" in kind:
        return _comparison_of_report(path, read_comparison(path), reference)
    record = read_checked_record(path)
    choose_reference(reference or record.arm, [record.arm])
    return summarize([record], arms=[record.arm], reference=record.arm)


def read_records(path: Path) -> list[RunRecord]:
    """Return the records of a run directory, a `record.json` or a `report.json`, without comparing them.

    Raises:
        RecordError: there is nothing to read, or nothing usable.
    """
    if os.path.isdir(path):
        return RunDirectory(path).read_records_and_faults()[0]
    try:
        kind = read_json(path)
    except FileFault:
        kind = {}
    if isinstance(kind, dict) and "records" in kind:
        return list(read_comparison(path).records)
    return [read_checked_record(path)]


def _comparison_of_folder(run: RunDirectory, reference: str | None) -> Comparison:
    records, excluded = run.read_records_and_faults()
    plan, looks = read_plan(run), tuple(run.read_looks())
    if plan is None:
        for record in records[1:]:
            if apart := changed_settings(records[0].config, record.config):
                raise RecordError(
                    f"{run.path} holds runs with different settings ({', '.join(apart)}), which one table cannot "
                    "compare; name one of their record.json files"
                )
        arms = sorted({record.arm for record in records})
        return summarize(
            records, arms=arms, excluded=excluded,
            reference=choose_reference(reference or default_reference(arms), arms),
            design=SequentialDesign(0.0, 0.0, looks=looks, notes=(NO_PLAN,)) if looks else None,
        )  # fmt: skip
    mine = records_of_plan(plan, records)
    chosen = plan.model_copy(update={"reference": choose_reference(reference or plan.reference, plan.arms)})

    def sum_up(design: SequentialDesign | None) -> Comparison:
        return summarize(mine, design=design, excluded=excluded, **chosen.arguments_of_summary)

    journal, is_other = Journal(run, chosen, looks), chosen.reference != plan.reference
    if is_other and plan.journal is None:
        return sum_up(SequentialDesign(0.0, 0.0, notes=(_NO_JOURNAL,)))
    design = journal.sequential_design(mine)
    if looks and design.looks == looks:
        return sum_up(design)  # it was looked at so before
    if not journal.has_every_cell_ended(mine):
        return sum_up(journal.sequential_design_without_test())
    if is_other:
        return _summary_at_last_look(journal, mine, sum_up)
    return sum_up(
        journal.sequential_design_without_test(NOT_COUNTED) if looks or plan.journal is not None else None
    )


def _summary_at_last_look(
    journal: Journal, records: Sequence[RunRecord], summarize: Callable[[SequentialDesign | None], Comparison]
) -> Comparison:
    """Return the comparison against the reference of a journal, at the error rate that earlier looks left."""
    run = journal.run
    try:
        with run.file_lock().acquire(timeout=0):
            journal = replace(journal, looks=tuple(run.read_looks()))
            return journal.append_last_look(summarize(journal.sequential_design(records)))
    except Timeout:
        raise ConfigError(
            f"{run.path} is in use by another command, and another reference is a look that must be recorded there; "
            "try again when that command has ended"
        ) from None
    except (OSError, EnvironmentUnfit):
        return summarize(journal.sequential_design_without_test(NOT_WRITABLE))


def _comparison_of_report(path: Path, comparison: Comparison, reference: str | None) -> Comparison:
    """Return a stored comparison with the headline of its rows, or against another reference without a test."""
    chosen = choose_reference(reference or comparison.reference, [row.arm for row in comparison.arms])
    if chosen == comparison.reference:
        if not comparison.records:
            return comparison
        look = next((look for look in comparison.looks if look.number == comparison.look), None)
        left = (
            error_rate_of_next_look(comparison.looks, look.planned)
            if look is not None
            else comparison.error_rate
        )
        steps = next_steps(comparison, left)
        return comparison.model_copy(update={"headline": headline(comparison), "next_steps": steps})
    if not comparison.records:
        raise RecordError(f"{path} holds no runs, only their summary against {comparison.reference}")
    return summarize(
        comparison.records, arms=[row.arm for row in comparison.arms], reference=chosen, command=comparison.command,
        order=comparison.order, terms=terms_of_comparison(comparison),
        design=SequentialDesign(0, 0, notes=(_NO_JOURNAL,)), published=comparison.published,
    )  # fmt: skip


def read_plan(run: RunDirectory) -> StoredPlan | None:
    """Read the plan of a run directory."""
    try:
        return run.read_plan()
    except (FileFault, ConfigError) as error:
        raise RecordError(
            f"{run.plan_file} is not a plan: {error}; run the command that wrote it again to restore it, or remove it "
            "to show records of equal settings as one table"
        ) from None


def choose_reference(text: str, arms: Sequence[str]) -> str:
    """Return the row that `--reference` names: by its label, or by its arm in any spelling.

    Raises:
        ConfigError: there is none.
    """
    with contextlib.suppress(ConfigError):
        if (named := find_row_named(text, arms)) is not None:
            return named
    close = close_matches(text, arms)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"--reference {text!r} is not one of the arms of these runs: {', '.join(arms)}{hint}")
