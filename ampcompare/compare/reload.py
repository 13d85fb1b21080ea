"""A comparison out of files that an earlier call has written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ampcompare.compare.comparable import differing
from ampcompare.compare.run import labeled, load_records
from ampcompare.compare.summary import summarize
from ampcompare.compare.terms import Terms
from ampcompare.comparison import Comparison, read_comparison
from ampcompare.errors import ConfigError, RecordError
from ampcompare.published import Published
from ampcompare.record import RunRecord, read_record

__all__ = ["reload_comparison"]


def reload_comparison(path: Path) -> Comparison:
    """Read a run directory, a `record.json` or a `report.json`.

    A run directory is summed up again from its records, in the order of its plan, where it has one.

    Raises:
        RecordError: there is nothing to read, or something that cannot be read.
    """
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise RecordError(f"there is no {path}; name a run directory, a record.json or a report.json")
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        kind = {}
    if isinstance(kind, dict) and "records" in kind:
        return read_comparison(path)
    record = read_record(path)
    return summarize([record], arms=[record.arm], reference=record.arm)


def _from_folder(folder: Path) -> Comparison:
    records = load_records(folder)
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        arms, reference = list(plan["arms"]), str(plan["reference"])
        command, order = str(plan["command"]), list(plan["order"])
        labels = {cell: label.rpartition("@")[0] for label, cell in plan["cells"].items()}  # as they ran
        terms = Terms(**plan.get("terms", {}))
        published = Published.model_validate(plan["published"]) if plan.get("published") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        _refuse_a_mixture(folder, records)
        arms = sorted({record.arm for record in records})
        return summarize(records, arms=arms, reference="fp32" if "fp32" in arms else arms[0])
    by_cell = {record.cell: record for record in records}
    mine = [labeled(by_cell[cell], label) for cell, label in labels.items() if cell in by_cell]
    return summarize(
        mine, arms=arms, reference=reference, command=command, order=order, terms=terms, published=published
    )


def _refuse_a_mixture(folder: Path, records: Sequence[RunRecord]) -> None:
    """See that records without a plan can be one table: equal settings, but for arm and seed.

    Raises:
        RecordError: two records differ in another setting.
    """
    first = records[0].config
    for record in records[1:]:
        apart = differing(first, record.config)
        if apart:
            raise RecordError(
                f"{folder} holds runs with different settings ({', '.join(apart)}), which one table cannot compare; "
                "name one of their record.json files"
            )
