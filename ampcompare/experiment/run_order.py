"""In which order the arms of each seed run, so that a drift of the machine affects all arms equally.

Every seed is a block, a row of all arms. What a drift adds to an arm follows its position in the row, so the rows are
chosen for equal mean positions: a row and its reverse, twice the arms give equal sums; an odd number of rows ends with
three whose sums are equal for an odd number of arms and differ by one for an even number, which is the least possible.

Several devices are blocks as well: a seed runs on one of them, so that a slow one is slow for all arms of a pair. Seeds
that are fewer than the devices, or are left over, are spread: an arm visits each device equally often over the seeds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["balanced_rows", "device_of_cells", "position_sums"]

CANDIDATES = 50  # number of random rows from which the one with the fewest repetitions is chosen

Row = Sequence[str]


def balanced_rows(arms: Row, recorded: Sequence[Row], count: int, seed: int) -> list[list[str]]:
    """Return the rows of further blocks, after those that are recorded.

    Where all arms are even, the next row is random: of `CANDIDATES` the one that, together with its reverse, puts arms
    least often at positions and after arms where they have been before. A Williams design has both exactly equal; it
    needs a multiple of the arms as blocks, and most comparisons have fewer.

    Args:
        arms: of every row.
        recorded: rows of the same arms that ran, or are planned, before.
        count: rows to return.
        seed: of the random choice; with the same `recorded` it gives the same rows.
    """
    generator = random.Random(f"{seed} after {len(recorded)} blocks")
    rows = [list(row) for row in recorded]
    for left in range(count, 0, -1):
        sums = position_sums(arms, rows)
        if max(sums.values()) == min(sums.values()):
            row = _least_repeating(arms, rows, generator)
        elif left == 2 and max(sums.values()) - min(sums.values()) > 1:
            # Last but one, and not balanced: turned by half of the arms, so that the last row can equalize the sums.
            half = len(arms) // 2
            row = [*rows[-1][-half:], *rows[-1][:-half]] if half else list(arms)
        else:
            row = generator.sample(arms, len(arms))
            row.sort(key=lambda arm: -sums[arm])
        rows.append(row)
    return rows[len(recorded) :]


def device_of_cells(
    arms: Row, num_seeds: int, devices: int, seed: int, *, by_seed: bool = True
) -> list[dict[str, int]]:
    """Return for each seed, in order, on which of some equal devices each arm runs.

    Full rounds of seeds take one device each, in an order that is drawn for each round. The cells of the other seeds go
    to the devices in turn, from a drawn one on, and an arm goes to all devices before it returns to one.

    Args:
        seed: of the draw; with more seeds the full rounds that were there before stay as they are.
        by_seed: whether seeds may run at the same time; else all are spread.
    """
    full = num_seeds // devices if by_seed else 0
    rows = []
    for number in range(full):
        drawn = random.Random(f"{seed} devices of round {number}").sample(range(devices), devices)
        rows += [dict.fromkeys(arms, device) for device in drawn]
    generator = random.Random(f"{seed} devices after {full} rounds")
    drawn, order = generator.sample(range(devices), devices), generator.sample(arms, len(arms))
    period = devices // math.gcd(devices, len(arms))  # after it, each arm would meet its first device again
    for number in range(num_seeds - full * devices):
        first = number * len(arms) + number // period
        rows.append({arm: drawn[(first + rank) % devices] for rank, arm in enumerate(order)})
    return rows


def position_sums(arms: Row, rows: Sequence[Row]) -> dict[str, int]:
    """Return for each arm the sum of its positions over rows."""
    return {arm: sum(row.index(arm) for row in rows) for arm in arms}


def _least_repeating(arms: Row, rows: Sequence[Row], generator: random.Random) -> list[str]:
    """Return the random row that, with its reverse, repeats positions and neighbors least."""
    before = _counts(rows)
    candidates = [generator.sample(arms, len(arms)) for _ in range(CANDIDATES)]
    return min(candidates, key=lambda row: _repetitions(before, [row, row[::-1]]))


def _counts(rows: Sequence[Row]) -> Counter[tuple[str, int | str]]:
    """Count how often each arm was at each position, and directly after each other arm."""
    places = [(arm, place) for row in rows for place, arm in enumerate(row)]
    neighbors = [(arm, previous) for row in rows for previous, arm in itertools.pairwise(row)]
    return Counter([*places, *neighbors])


def _repetitions(before: Mapping[tuple[str, int | str], int], rows: Sequence[Row]) -> int:
    return sum(before[what] * count for what, count in _counts(rows).items())
