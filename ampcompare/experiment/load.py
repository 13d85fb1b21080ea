"""Load a comparison from files that an earlier call wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ampcompare.analysis.comparability import changed_settings
from ampcompare.analysis.criteria import Criteria, criteria_of
from ampcompare.analysis.looks import Design
from ampcompare.analysis.record_checks import contradiction, implausible, read_checked
from ampcompare.analysis.summary import summarize
from ampcompare.errors import ConfigError, RecordError
from ampcompare.experiment.journal import Journal, read_looks
from ampcompare.experiment.run import labeled, load_records
from ampcompare.files.read import FileFault, read_json
from ampcompare.records.comparison import Comparison, read_comparison
from ampcompare.records.published import Published
from ampcompare.records.run import RunRecord
from ampcompare.settings.validation import validated

__all__ = ["reload_comparison"]


class _StoredPlan(BaseModel):
    """What a `plan.json` says about the rows of a comparison."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    arms: list[str] = Field(min_length=1)
    reference: str
    command: str
    order: list[str]
    cells: dict[str, str]
    terms: Criteria = Criteria()
    pilot: list[int] = []
    published: Published | None = None

    @model_validator(mode="after")
    def _rows_are_arms(self) -> _StoredPlan:
        rows = {"reference": self.reference, **{f"cell {label}": _row(label) for label in self.cells}}
        for what, row in rows.items():
            if row not in self.arms:
                raise ValueError(f"the row {row!r} of {what} is none of its arms")
        return self


def _row(label: str) -> str:
    """Return the row of a cell that is written LABEL@SEED."""
    return label.rpartition("@")[0]


def reload_comparison(path: Path) -> Comparison:
    """Read a run directory, a `record.json` or a `report.json`.

    A run directory is summed up again from its records, in the order of its plan, where it has one. Records with a
    fault are left out, and named in `excluded`; so it is for those of a `report.json`.

    Raises:
        RecordError: there is nothing to read, or nothing that can be used.
    """
    if os.path.isdir(path):
        return _from_folder(path)
    if not os.path.exists(path):
        raise RecordError(f"there is no {path}; name a run directory, a record.json or a report.json")
    try:
        kind = read_json(path)
    except FileFault:
        kind = {}
    if isinstance(kind, dict) and "records" in kind:
        return _without_faults(path, read_comparison(path))
    record = read_checked(path)
    return summarize([record], arms=[record.arm], reference=record.arm)


def _from_folder(folder: Path) -> Comparison:
    records, excluded = load_records(folder)
    if not os.path.lexists(folder / "plan.json"):
        _refuse_a_mixture(folder, records)
        arms = sorted({record.arm for record in records})
        return summarize(records, arms=arms, reference="fp32" if "fp32" in arms else arms[0], excluded=excluded)
    plan = _read_plan(folder / "plan.json")
    by_cell = {record.cell: record for record in records}
    mine = []
    for label, cell in plan.cells.items():
        record = by_cell.get(cell)
        if record is None:
            continue
        if not _is_cell(label, record):
            whose = f"{record.config.arm}, seed {record.config.recipe.seed}"
            excluded.append(f"{folder / 'plan.json'}: it says that {label} is cell {cell}, which is {whose}")
            continue
        mine.append(labeled(record, _row(label)))
    return summarize(
        mine, arms=plan.arms, reference=plan.reference, command=plan.command, order=plan.order, terms=plan.terms,
        design=_design(folder, plan, mine), published=plan.published, excluded=excluded,
    )  # fmt: skip


def _is_cell(label: str, record: RunRecord) -> bool:
    """Return whether the label of a plan, such as `half workers=2@1`, fits the arm and seed of a record."""
    row, _, seed = label.rpartition("@")
    arm = record.config.arm
    return seed == str(record.config.recipe.seed) and (row == arm or row.startswith(f"{arm} "))


def _without_faults(path: Path, comparison: Comparison) -> Comparison:
    """Return a stored comparison as it is, or summed up again without the records that have a fault."""
    faults = {record.cell: implausible(record) or contradiction(record) for record in comparison.records}
    excluded = [
        f"{path}: {record.arm}, seed {record.config.recipe.seed}: {faults[record.cell]}"
        for record in comparison.records
        if faults[record.cell]
    ]
    if not excluded:
        return comparison
    return summarize(
        [record for record in comparison.records if not faults[record.cell]],
        arms=[row.arm for row in comparison.arms],
        reference=comparison.reference,
        command=comparison.command,
        order=comparison.order,
        terms=criteria_of(comparison),
        design=Design(
            comparison.error_rate, comparison.error_rate, look=comparison.look, looks=tuple(comparison.looks)
        ),
        published=comparison.published,
        excluded=excluded,
    )


def _design(folder: Path, plan: _StoredPlan, records: Sequence[RunRecord]) -> Design | None:
    """Return how the records were tested, if the run directory has a journal."""
    looks = tuple(read_looks(folder))
    pilot = frozenset(plan.pilot)
    journal = Journal(folder, looks, tuple(plan.arms), plan.reference, plan.cells, plan.terms, pilot)
    return journal.reread(records) if looks else None


def _read_plan(path: Path) -> _StoredPlan:
    """Read what `run_plan` has written.

    Raises:
        RecordError: it is not a plan.
    """
    try:
        return validated(_StoredPlan, read_json(path))
    except (FileFault, ConfigError) as error:
        raise RecordError(
            f"{path} is not a plan: {error}; the command that wrote it, called again, writes it again, and without it "
            "records of equal settings are one table"
        ) from None


def _refuse_a_mixture(folder: Path, records: Sequence[RunRecord]) -> None:
    """Check that records without a plan can be one table: equal settings, except arm and seed.

    Raises:
        RecordError: two records differ in another setting.
    """
    first = records[0].config
    for record in records[1:]:
        apart = changed_settings(first, record.config)
        if apart:
            raise RecordError(
                f"{folder} holds runs with different settings ({', '.join(apart)}), which one table cannot compare; "
                "name one of their record.json files"
            )
