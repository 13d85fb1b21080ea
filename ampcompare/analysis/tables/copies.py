"""Rows of a table that repeat those of another seed: copies of a run are one run.

A coarse metric ties by chance, so a tie alone is no copy. Rows count once

* if all seeds have the same row, and arms differ in it: then nothing is known of the scatter over seeds;
* if more rows repeat earlier ones than ties by chance would give in one of a hundred tables. The chance of a tie is
  that of the first arm times those of the differences to it, as arms of one seed rise and fall together; each is the
  step of the values over their scatter, and 1 where they scatter over few steps. Rows that differ by far less than the
  others scatter repeat each other too: what ignores the seed and is not deterministic gives such rows;
* if several arms repeat one sequence of rows, seed by seed, which ties would give in one of a hundred tables.

The first test is made for the rows of all arms together, and then for each arm alone.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampcompare.analysis.inference.granularity import grid_step
from ampcompare.analysis.tables.csv_table import Run, same_words

__all__ = ["without_copies"]

CHANCE = 0.01  # of ties by chance that are taken for copies
FEW_STEPS = 2  # scatter in steps, at which ties are no sign of copies
PER_QUARTILE = 8  # the chance that two normal values tie is a step over so many lower quartiles of their differences
TICK = 1e-9  # values are compared in it, and tables print fewer digits
NEAR = 1e-5  # of the median difference of two rows: closer ones differ by noise alone
NEAR_ROWS = 200
MAX_SEEDS = 2000  # the rows of which are compared with each other

Key = tuple[str, tuple[str, ...]]  # an arm with its settings


@dataclass(frozen=True)
class _Row:
    """The values of one seed, in printed steps, by arm; `name` is that of the seed, or the place of a line."""

    name: str
    ticks: Mapping[Key, int]


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs without those that copy the run of another seed, and a sentence for each seed that does."""
    kept, faults = list(runs), list[str]()
    together = _copies(_rows(kept), _steps(kept))
    for name, original in together.items():
        faults.append(f"the row of seed {name} is an exact copy of that of seed {original}, so that it is no other run")
    kept = [run for run in kept if not (run.seed in together and _is_single(run))]
    keys = list(dict.fromkeys(map(_key, filter(_is_single, kept))))
    for key in keys:
        mine = [run for run in kept if _is_single(run) and _key(run) == key]
        rows = [_Row(run.seed or f"line {number}", {key: _tick(run)}) for number, run in enumerate(mine, 1)]
        copies = _copies(rows, _steps(mine), CHANCE / len(keys))
        gone = {id(run) for run, row in zip(mine, rows, strict=True) if row.name in copies}
        faults += [
            f"{mine[0].arm}, {_seed_or_line(name)}: an exact copy of {_seed_or_line(original)}, so that it is no other "
            "run"
            for name, original in copies.items()
        ]
        kept = [run for run in kept if id(run) not in gone]
    return kept, faults


def _seed_or_line(name: str) -> str:
    return name if name.startswith("line ") else f"seed {name}"


def _is_single(run: Run) -> bool:
    return run.runs == 1 and run.value is not None


def _key(run: Run) -> Key:
    return run.arm.casefold(), tuple(same_words(text) for _, text in run.settings)


def _tick(run: Run) -> int:
    assert run.value is not None
    return round(run.value.mean / TICK)


def _steps(runs: Iterable[Run]) -> dict[Key, float]:
    """Return the step of the values of each arm, in ticks."""
    members: dict[Key, list[tuple[float, float]]] = {}
    for run in runs:
        if _is_single(run) and run.value is not None:
            members.setdefault(_key(run), []).append((run.value.mean, run.value.step))
    return {
        key: grid_step([value for value, _ in its], statistics.median_high(step for _, step in its), CHANCE) / TICK
        for key, its in members.items()
    }


def _rows(runs: Sequence[Run]) -> list[_Row]:
    found: dict[str, dict[Key, int]] = {}
    for run in runs:
        if run.seed and _is_single(run):
            found.setdefault(run.seed, {})[_key(run)] = _tick(run)
    return [_Row(seed, ticks) for seed, ticks in found.items()]


def _copies(rows: Sequence[_Row], steps: Mapping[Key, float], chance: float = CHANCE) -> dict[str, str]:
    """Return which row copies which earlier one, by name; none where chance may have made them equal."""
    from scipy.special import gammainc

    if not 3 <= len(rows) <= MAX_SEEDS:
        return {}
    copies: dict[str, str] = {}
    originals: list[_Row] = []
    near = {key: _near([row.ticks[key] for row in rows if key in row.ticks]) for row in rows for key in row.ticks}
    rows = [_Row(row.name, {key: _settled(rows, key, row.ticks[key], near[key]) for key in row.ticks}) for row in rows]
    steps = {key: max(step, 2 * near.get(key, 0)) for key, step in steps.items()}
    for row in rows:
        original = next((one for one in originals if _equal(one, row)), None)
        if original is None:
            originals.append(row)
        else:
            copies[row.name] = original.name
    if not copies:
        return {}
    whole = set(rows[0].ticks)
    if len(originals) == 1:
        return copies if len(whole) > 1 and len(set(rows[0].ticks.values())) > 1 else {}
    pairs = len(rows) * (len(rows) - 1) / 2
    smallest = min((row.ticks.keys() for row in rows if row.name in copies), key=len)
    by_chance = pairs * _tie_chance(rows, sorted(smallest), steps)
    if gammainc(len(copies), by_chance) < chance:
        return copies
    return copies if len(whole) > 1 and _is_sequence(rows, len(originals), chance) else {}


def _near(values: Sequence[int]) -> float:
    apart = sorted(abs(a - b) for a, b in itertools.combinations(values[:NEAR_ROWS], 2))
    return NEAR * apart[len(apart) // 2] if apart else 0.0


def _settled(rows: Sequence[_Row], key: Key, value: int, near: float) -> int:
    """Return the first value of an arm to which a value is near."""
    if near < 1:
        return value
    return next(row.ticks[key] for row in rows if key in row.ticks and abs(row.ticks[key] - value) <= near)


def _equal(one: _Row, other: _Row) -> bool:
    """Return whether rows are equal in all arms that both have."""
    common = one.ticks.keys() & other.ticks.keys()
    return bool(common) and all(one.ticks[key] == other.ticks[key] for key in common)


def _tie_chance(rows: Sequence[_Row], keys: Sequence[Key], steps: Mapping[Key, float]) -> float:
    """Return the chance that two rows are equal in these arms."""
    first, *others = keys
    chance = _chance([row.ticks[first] for row in rows if first in row.ticks], steps[first])
    for key in others:
        both = [row.ticks[key] - row.ticks[first] for row in rows if key in row.ticks and first in row.ticks]
        chance *= _chance(both, max(steps[key], steps[first]))
    return chance


def _chance(values: Sequence[int], step: float) -> float:
    """Return the chance that two of these values tie, by the lower quartile of their differences, which few outliers
    do not move.
    """
    apart = sorted(abs(a - b) for a, b in itertools.combinations(values, 2) if a != b)
    quartile = apart[len(apart) // 4] if apart else 0
    return 1.0 if quartile <= FEW_STEPS * step else min(1.0, step / (PER_QUARTILE * quartile))


def _is_sequence(rows: Sequence[_Row], originals: int, chance: float) -> bool:
    """Return whether rows repeat the first ones in their order, or each of them as often, and not by chance."""
    values: list[Hashable] = [tuple(sorted(row.ticks.items())) for row in rows]
    count = len(values)
    in_turns = all(values[number] == values[number % originals] for number in range(count))
    each = count // originals
    in_blocks = count == each * originals and all(
        values[number] == values[number // each * each] for number in range(count)
    )
    ties = sum(a == b for a, b in itertools.combinations(values, 2)) / (count * (count - 1) / 2)
    return (in_turns or in_blocks) and count >= 2 * originals and ties ** (count - originals) < chance
