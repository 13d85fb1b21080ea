"""What all runs had in common, and in what they differed: settings, environment, arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.base.formatting import printable
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord

__all__ = ["Shared", "arm_facts", "chosen_settings", "listed", "shared_environment", "shared_settings"]

VARIED = ("arm", "recipe.seed")  # by the matrix itself
OF_A_FAILURE = ("exit_code",)


@dataclass(frozen=True)
class Shared:
    """Facts by name: those equal in all runs, and for the others their values by arm."""

    equal: list[tuple[str, str]]
    differing: list[tuple[str, list[tuple[str, str]]]]

    @property
    def groups(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The equal facts by the part of the recipe that they belong to; facts without parts are one group."""
        found: dict[str, list[tuple[str, str]]] = {}
        for name, value in self.equal:
            *above, last = name.split(".")
            group = above[1] if len(above) > 1 else "training" if above else ""
            found.setdefault(group, []).append((last, value))
        if len(found) > 1 and "" in found:
            found["run"] = found.pop("")
        return list(found.items())


def shared_settings(comparison: Comparison) -> Shared:
    """Return the settings of all runs, by dotted names such as `recipe.optimizer.lr`."""
    facts = [record.config.by_path() for record in comparison.records]
    return _shared(comparison.records, [{k: v for k, v in found.items() if k not in VARIED} for found in facts])


def chosen_settings(comparison: Comparison, shared: Shared) -> list[list[str]]:
    """Return the settings that all runs share and that differ from their defaults: name, value here, default."""
    known = comparison.records[0].config.defaults_by_path() if comparison.records else {}
    defaults = {name: _shown(value) for name, value in known.items()}
    return [
        [name.removeprefix("recipe."), value, defaults.get(name, "not set")]
        for name, value in shared.equal
        if value != defaults.get(name, "not set")
    ]


def shared_environment(comparison: Comparison) -> Shared:
    """Return the environment of all runs that started; of the comparison if none started."""
    records = [record for record in comparison.records if record.environment]
    if not records:
        return Shared([(_shown(name), _shown(value)) for name, value in comparison.environment.items()], [])
    facts = [{k: v for k, v in record.environment.items() if k not in OF_A_FAILURE} for record in records]
    started = [
        (record, found) for record, found in zip(records, facts, strict=True) if record.status != "failed"
    ] or list(zip(records, facts, strict=True))
    return _shared([record for record, _ in started], [found for _, found in started])


def arm_facts(comparison: Comparison) -> list[list[str]]:
    """Return for each arm its backend, options, engine with the reason for it, and how 16-bit arithmetic ran."""
    first: dict[str, RunRecord] = {}
    for record in comparison.records:
        if record.arm not in first or first[record.arm].engine is None:
            first[record.arm] = record
    rows = []
    for row in comparison.arms:
        known = first.get(row.arm)
        backend = options = "-"  # of a program's row, and of a table that ampcompare did not make
        if known is not None and known.config.arm == row.arm:
            arm = known.config.parsed_arm
            backend, options = arm.backend, ", ".join(f"{name} = {value}" for name, value in arm.options.items())
        engine = known.engine if known is not None else None
        why = f"{engine.name} {engine.version}: {engine.reason}" if engine else "torch"
        rows.append([_shown(text or "-") for text in (row.arm, backend, options, why, row.half)])
    return rows


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, Mapping) and not value:
        return "none"
    return printable(str(value).lower() if isinstance(value, bool) else str(value), 200)


def _shared(records: Sequence[RunRecord], facts: Sequence[Mapping[str, Any]]) -> Shared:
    names = list(dict.fromkeys(name for found in facts for name in found))
    equal: list[tuple[str, str]] = []
    differing: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        seen = [_shown(found.get(name)) for found in facts]
        if len(set(seen)) == 1:
            equal.append((_shown(name), seen[0]))
            continue
        by_value: dict[str, dict[str, None]] = {}
        for record, value in zip(records, seen, strict=True):
            by_value.setdefault(value, {})[printable(record.arm, 60)] = None
        differing.append((_shown(name), [(value, listed(arms)) for value, arms in by_value.items()]))
    return Shared(equal, differing)


def listed(names: Iterable[str], most: int = 12) -> str:
    """Return names in a row; of very many, the first ones and how many more there are."""
    known = list(names)
    shown = ", ".join(known[:most])
    return shown if len(known) <= most else f"{shown} and {len(known) - most} more"
