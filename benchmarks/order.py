"""False winners in time under a drifting machine, by the order in which cells run.

    python benchmarks/order.py [--out docs/benchmarks/order]

Every arm is the same, so that each winner or loser is false. A cell's step time is the state of the machine at its
turn, with normal noise of 1 %. Machines: steady; a slowdown of 10 or 20 % from the first cell to the last; a busy
stretch, in which a fifth of the cells take 30 % longer; an autocorrelated state (AR(1), 0.9 from cell to cell, 5 %).
Orders:
`list`, arms as they are listed; `fixed`, one shuffle by the number of the seed, the same for every comparison;
`random`, each block shuffled for itself; `balanced`, what `compare` does; `added`, the same, where all seeds but three
were added to three that had run. A rate is the share of comparisons that call any arm `better` or `worse`, by the
test of `compare`: pairs of log step times, Holm over the arms, a margin of 2 %. The last column is power: how often a
comparison in balanced order finds an arm that is 10 % faster than the others.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import numpy as np
from numpy.typing import NDArray
from results import write_results
from scipy.special import stdtr
from tabulate import tabulate

from ampcompare.experiment.run_order import balanced_rows
from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.inference.effect import ERROR_RATE
from ampcompare.runs.analysis.verdicts.step_time import TIME_FLOOR

Floats = NDArray[np.float64]

ARMS = (2, 3, 5, 9)
SEEDS = (3, 5, 10)
NOISE = 0.01
PLANS, DRAWS = 400, 50  # orders of each kind, and comparisons of each order
MARGIN = Criteria().time().size


def is_winner(logs: Floats) -> NDArray[np.bool_]:
    """Return whether each arm but the first is `better` or `worse`, as `decide` says it.

    Args:
        logs: log step times, comparisons x seeds x arms; the first arm is the reference.

    Returns:
        Comparisons x (arms - 1).
    """
    differences = logs[:, :, :1] - logs[:, :, 1:]
    count = differences.shape[1]
    mean = differences.mean(axis=1)
    error = np.maximum(TIME_FLOOR, differences.std(axis=1, ddof=1)) / math.sqrt(count)
    different = 2 * stdtr(count - 1, -np.abs(mean) / error)
    equivalent = np.maximum(stdtr(count - 1, (-MARGIN - mean) / error), stdtr(count - 1, (mean - MARGIN) / error))
    is_different = _holm(different) < ERROR_RATE
    return is_different & (np.abs(mean) > MARGIN) & ~(_holm(equivalent) < ERROR_RATE)


def _holm(values: Floats) -> Floats:
    """Return p values adjusted by Holm's method along the last axis."""
    order = np.argsort(values, axis=-1)
    count = values.shape[-1]
    ascending = np.take_along_axis(values, order, axis=-1) * np.arange(count, 0, -1)
    adjusted = np.minimum(1, np.maximum.accumulate(ascending, axis=-1))
    result = np.empty_like(values)
    np.put_along_axis(result, order, adjusted, axis=-1)
    return result


Order = Callable[[list[str], int, int], list[list[str]]]


def _fixed(arms: list[str], seeds: int, number: int) -> list[list[str]]:
    rows = []
    for seed in range(seeds):
        row = list(arms)
        random.Random(f"order of seed {seed}").shuffle(row)
        rows.append(row)
    return rows


def _random(arms: list[str], seeds: int, number: int) -> list[list[str]]:
    generator = random.Random(number)
    return [generator.sample(arms, len(arms)) for _ in range(seeds)]


def _added(arms: list[str], seeds: int, number: int) -> list[list[str]]:
    first = balanced_rows(arms, [], 3, number)
    return first + balanced_rows(arms, first, seeds - 3, number)


ORDERS: dict[str, Order] = {
    "list": lambda arms, seeds, number: [arms] * seeds,
    "fixed": _fixed,
    "random": _random,
    "balanced": lambda arms, seeds, number: balanced_rows(arms, [], seeds, number),
    "added": _added,
}


def _drift(size: float) -> Callable[[np.random.Generator, int], Floats]:
    return lambda generator, cells: np.log1p(size * np.linspace(0, 1, cells))[None, :].repeat(DRAWS, axis=0)


def _busy(generator: np.random.Generator, cells: int) -> Floats:
    length = max(1, round(cells / 5))
    begin = generator.integers(0, cells - length + 1, (DRAWS, 1))
    places = np.arange(cells)[None, :]
    return np.where((places >= begin) & (places < begin + length), math.log(1.3), 0.0)


def _autocorrelated(generator: np.random.Generator, cells: int) -> Floats:
    phi, sd = 0.9, 0.05
    state = generator.normal(0, sd, DRAWS)
    states = [state]
    for _ in range(cells - 1):
        state = phi * state + generator.normal(0, sd * math.sqrt(1 - phi**2), DRAWS)
        states.append(state)
    return np.stack(states, axis=1)


MACHINES = {
    "steady": _drift(0.0),
    "drift 10 %": _drift(0.1),
    "drift 20 %": _drift(0.2),
    "busy stretch": _busy,
    "AR(1)": _autocorrelated,
}


def _rate(order: Order, machine: str, arms: int, seeds: int, faster: float = 0.0) -> float:
    """Return the share of comparisons with a winner or loser; with `faster`, how often the last arm is one."""
    generator = np.random.default_rng(0)
    names = [f"arm {number}" for number in range(arms)]
    hits = 0
    for number in range(PLANS):
        rows = order(names, seeds, number)
        state = MACHINES[machine](generator, arms * seeds).reshape(DRAWS, seeds, arms)
        positions = np.array([[row.index(name) for name in names] for row in rows])
        logs = np.take_along_axis(state, positions[None].repeat(DRAWS, axis=0), axis=2)
        logs = logs + generator.normal(0, NOISE, logs.shape)
        logs[:, :, -1] -= faster
        winners = is_winner(logs)
        hits += int((winners[:, -1] if faster else winners.any(axis=1)).sum())
    return hits / (PLANS * DRAWS)


def table(arms: Sequence[int] = ARMS, seeds: Sequence[int] = SEEDS) -> list[list[str]]:
    """Return a row for each machine and size of the comparison."""
    rows = []
    for machine in MACHINES:
        for size in arms:
            for count in seeds:
                rates = [_rate(order, machine, size, count) for order in ORDERS.values()]
                power = _rate(ORDERS["balanced"], machine, size, count, faster=0.1)
                shown = [f"{100 * rate:.1f} %" for rate in rates]
                rows.append([machine, str(size), str(count), *shown, f"{100 * power:.0f} %"])
    return rows


@click.command()
@click.option("--out", default=None, help="write OUT.md")
def main(out: str | None) -> None:
    """Simulate comparisons of equal arms."""
    headers = ["machine", "arms", "seeds", *ORDERS, "finds 10 %"]
    text = tabulate(table(), headers=headers, tablefmt="github", disable_numparse=True)
    click.echo(text)
    if out is not None:
        facts = f"{PLANS * DRAWS:,} comparisons for each figure, whose error is at most 0.4 points."
        write_results(out, "Order of cells under drift", __doc__, facts, text)


if __name__ == "__main__":
    main()
