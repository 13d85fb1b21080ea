"""False winners in time under a drifting machine, by the order in which cells run.

    python -m benchmarks.rates order [--jobs 2] [--out docs/benchmarks/order]

All arms are equal, so each winner or loser is false. A cell's step time is the state of the machine at its turn, with
normal noise of 1 %. Machines: steady; a slowdown of 10 or 20 % from the first cell to the last; a busy stretch, in
which a fifth of the cells take 30 % longer; an autocorrelated state (AR(1), 0.9 from cell to cell, 5 %). Orders:
`list`, arms as they are listed; `fixed`, one shuffle by the number of the seed; `random`, each block shuffled for
itself; `balanced`, what `compare` does; `added`, the same, where all seeds but three were added later. A rate is the
share of comparisons that call any arm `better` or `worse`: pairs of log step times, Holm over the arms, a margin of 2
%. The last column is power: an arm that is 10 % faster is found, in balanced order.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np

from ampcompare.experiment.plan import balanced_rows
from benchmarks.rates.arrays import Floats, is_winner
from benchmarks.rates.study import Row, Study, Table

__all__ = ["STUDY"]

NOISE = 0.01
DRAWS = 50  # comparisons of each order
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


def _rate(order: Order, cell: tuple[str, int, int], replicates: int, faster: float = 0.0) -> float:
    """Return the share of comparisons with a winner or loser; with `faster`, how often the last arm is one."""
    machine, arms, seeds = cell
    generator = np.random.default_rng(0)
    names = [f"arm {number}" for number in range(arms)]
    plans, hits = max(1, replicates // DRAWS), 0
    for number in range(plans):
        rows = order(names, seeds, number)
        state = MACHINES[machine](generator, arms * seeds).reshape(DRAWS, seeds, arms)
        positions = np.array([[row.index(name) for name in names] for row in rows])
        logs = np.take_along_axis(state, positions[None].repeat(DRAWS, axis=0), axis=2)
        logs = logs + generator.normal(0, NOISE, logs.shape)
        logs[:, :, -1] -= faster
        winners = is_winner(logs)
        hits += int((winners[:, -1] if faster else winners.any(axis=1)).sum())
    return hits / (plans * DRAWS)


def _row(cell: tuple[str, int, int], replicates: int) -> Row:
    machine, arms, seeds = cell
    power = _rate(ORDERS["balanced"], cell, replicates, faster=0.1)
    return {
        "machine": machine,
        "arms": str(arms),
        "seeds": str(seeds),
        **{name: f"{100 * _rate(order, cell, replicates):.1f} %" for name, order in ORDERS.items()},
        "finds 10 %": f"{100 * power:.0f} %",
    }


STUDY = Study(
    title="Order of cells under drift",
    about=__doc__,
    tables=(
        Table("order", list(itertools.product(MACHINES, (2, 3, 5, 9), (3, 5, 10))), _row, by=("machine", "seeds")),
    ),
    replicates=20_000,
)
