"""Join the runs of one comparison that were trained in several folders, each with seeds of its own."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from ampcompare.base.environment.extras import require_statistics_packages
from ampcompare.base.errors import ConfigError, EnvironmentUnfit, RecordError
from ampcompare.base.formatting import format_few_names
from ampcompare.experiment.interim_analyses import Journal
from ampcompare.experiment.reload_report import choose_reference, read_plan
from ampcompare.experiment.run_directory import (
    RunDirectory,
    StoredPlan,
    records_of_plan,
)
from ampcompare.results.analysis.inference.verdict import SequentialDesign
from ampcompare.results.analysis.pairing.comparability import changed_settings
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord

NOT_WRITABLE = (
    "Nothing was tested: the joined runs are another look at those of each folder, and it could not be counted because "
    "one of the folders is not writable."
)
NO_JOURNAL = (
    "Nothing was tested: a folder of an earlier version has no journal, which counts the looks at its runs."
)


@dataclass(frozen=True)
class _RecordsOfFolder:
    """The runs of one folder, each record with the label of its row."""

    run: RunDirectory
    plan: StoredPlan
    records: tuple[RunRecord, ...]
    excluded: tuple[str, ...]


@dataclass(frozen=True)
class _FolderJournalOfJoinedRuns(Journal):
    """The looks at the folder that has spent most of its error rate, and a plan of the cells of all folders."""

    files: Mapping[str, Path]

    def record_file_by_cell_name(self) -> dict[str, Path]:
        return dict(self.files)


def join_comparison(paths: Sequence[Path], *, reference: str | None = None) -> Comparison:
    """Compare the runs of several run directories in one table.

    The folders hold the same arms under the same terms and settings, and each has seeds of its own: every pair is from
    one folder, so that what differs between two machines is in no difference of a pair. The table is one more look at
    the runs of each folder. It is tested at what the folder that has spent most has left, and written into all of their
    journals; the same table again spends nothing.

    Args:
        paths: of two run directories or more.
        reference: another row than that of the plans.

    Raises:
        RecordError: a folder has no plan or nothing usable, or the folders are not of one comparison.
        ConfigError: no row is named like the reference, or a folder is in use.
    """
    require_statistics_packages()
    parts = [_read_runs_of_folder(Path(path)) for path in paths]
    _require_same_comparison(parts)
    plan = _join_plans(parts, reference)
    records = [record for part in parts for record in part.records]
    files = {
        label: path
        for part in parts
        for label, path in Journal(part.run, part.plan, ()).record_file_by_cell_name().items()
    }
    excluded = [f"{part.run.path}: {line}" for part in parts for line in part.excluded]

    def sum_up(design: SequentialDesign) -> Comparison:
        return summarize(records, design=design, excluded=excluded, **plan.arguments_of_summary)

    try:
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.run.file_lock().acquire(timeout=0))
            journals = [
                _FolderJournalOfJoinedRuns(part.run, plan, tuple(part.run.read_looks()), files)
                for part in parts
            ]
            # What one of them has left is left of the others at least.
            most = max(journals, key=lambda journal: math.fsum(look.error_rate for look in journal.looks))
            if any(part.plan.journal is None for part in parts):
                return sum_up(most.sequential_design_without_test(NO_JOURNAL))
            if not most.has_every_cell_ended(records):
                return sum_up(most.sequential_design_without_test())
            found = sum_up(most.sequential_design(records))
            for journal in journals:
                design = journal.sequential_design(records)
                if design.looks != journal.looks:  # else it has this look already
                    look = design.looks[-1].model_copy(update={"error_rate": found.error_rate})
                    journal.append_last_look(found.model_copy(update={"looks": [*journal.looks, look]}))
            return found
    except Timeout:
        names = format_few_names([str(part.run.path) for part in parts])
        raise ConfigError(
            f"one of {names} is in use by another command; try again when that has ended"
        ) from None
    except (OSError, EnvironmentUnfit):
        looks = tuple(parts[0].run.read_looks())
        return sum_up(
            _FolderJournalOfJoinedRuns(parts[0].run, plan, looks, files).sequential_design_without_test(
                NOT_WRITABLE
            )
        )


def _read_runs_of_folder(path: Path) -> _RecordsOfFolder:
    run = RunDirectory(path)
    if not path.is_dir() or (plan := read_plan(run)) is None:
        raise RecordError(
            f"{path} is no run directory of `compare`; name folders with a plan.json to join them"
        )
    records, excluded = run.read_records_and_faults()
    mine = records_of_plan(plan, records)
    return _RecordsOfFolder(run, plan, tuple(mine), tuple(excluded))


def _require_same_comparison(parts: Sequence[_RecordsOfFolder]) -> None:
    """Refuse folders that differ in more than their seeds.

    Raises:
        RecordError: they differ in arms, reference, terms or settings, or have a seed in common.
    """
    first, *others = parts
    for other in others:
        names = f"{first.run.path} and {other.run.path}"
        for what in ("arms", "reference", "terms"):
            mine, theirs = getattr(first.plan, what), getattr(other.plan, what)
            if (set(mine) != set(theirs)) if what == "arms" else (mine != theirs):
                raise RecordError(
                    f"{names} are not of one comparison: their {what} differ; report each by itself"
                )
        settings = {record.arm: record.config for record in first.records}
        for record in other.records:
            known = settings.get(record.arm)
            if known is not None and (apart := changed_settings(known, record.config)):
                raise RecordError(
                    f"{names} are not of one comparison: {record.arm} differs in {format_few_names(apart)}; "
                    "report each by itself"
                )
    owners: dict[str, Path] = {}
    for part in parts:
        for label in part.plan.cells:
            if label in owners:
                raise RecordError(
                    f"{owners[label]} and {part.run.path} both have {label}: seeds of joined folders differ, or one "
                    "run would count twice; train other seeds on the second machine, as in --seeds 5-9"
                )
            owners[label] = part.run.path


def _join_plans(parts: Sequence[_RecordsOfFolder], reference: str | None) -> StoredPlan:
    first = parts[0].plan
    chosen = [] if reference is None else ["--reference", reference]
    return first.model_copy(
        update={
            # No `compare` makes this table: more seeds in one of the folders may be seeds of another.
            "command": shlex.join(["ampcompare", "report", *(str(part.run.path) for part in parts), *chosen]),
            "reference": choose_reference(reference or first.reference, first.arms),
            "seeds": sorted({seed for part in parts for seed in part.plan.seeds}),
            "order": [label for part in parts for label in part.plan.order],
            "cells": {label: cell for part in parts for label, cell in part.plan.cells.items()},
            "pilot": sorted({seed for part in parts for seed in part.plan.pilot}),
        }
    )
