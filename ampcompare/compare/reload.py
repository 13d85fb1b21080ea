"""A comparison out of files that an earlier call has written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.compare.run import load_records
from ampcompare.compare.summary import summarize
from ampcompare.errors import RecordError
from ampcompare.record import Comparison, RunRecord, read_comparison, read_record

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
        cells = set(plan["cells"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        _refuse_a_mixture(folder, records)
        arms = sorted({record.arm for record in records})
        return summarize(records, arms=arms, reference="fp32" if "fp32" in arms else arms[0])
    mine = [record for record in records if record.cell in cells]
    return summarize(_sorted(mine, arms), arms=arms, reference=reference, command=command, order=order)


def _refuse_a_mixture(folder: Path, records: Sequence[RunRecord]) -> None:
    """See that records without a plan can be one table: equal settings, but for arm and seed.

    Raises:
        RecordError: two records differ in another setting.
    """
    first = dict(_settings(records[0].config.model_dump()))
    for record in records[1:]:
        other = dict(_settings(record.config.model_dump()))
        apart = [
            place
            for place in {**first, **other}
            if first.get(place) != other.get(place) and place not in ("arm", "recipe.seed")
        ]
        if apart:
            raise RecordError(
                f"{folder} holds runs with different settings ({', '.join(apart)}), which one table cannot compare; "
                "name one of their record.json files"
            )


def _settings(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{above}{name}.")
        else:
            yield above + name, value


def _sorted(records: list[RunRecord], arms: list[str]) -> list[RunRecord]:
    return sorted(
        records, key=lambda record: (record.config.recipe.seed, arms.index(record.arm) if record.arm in arms else 0)
    )
