"""False winners in time, by the order in which cells run, and where they run on several GPUs at once.

    python -m benchmarks.rates order [--part pool] [--jobs 2] [--out docs/benchmarks/order]

All arms are equal, so each winner or loser is false. A cell's log step time is the state of its machine at its turn,
with normal noise of 1 %. A rate is the share of comparisons that call any arm `better` or `worse`: pairs of log step
times, Holm over the arms, a margin of 2 %.

`order`: machines are steady; slow down by 10 or 20 % from the first cell to the last; have a busy stretch, in which a
fifth of the cells take 30 % longer; have an autocorrelated state (AR(1), 0.9 from cell to cell, 5 %). Orders: `list`,
arms as they are listed; `fixed`, one shuffle by the number of the seed; `random`, each block shuffled for itself;
`balanced`, what `compare` does; `added`, the same, where all seeds but three were added later. The last column is
power: an arm that is 10 % faster is found, in balanced order.

`pool`: each device runs its queue in the order of the plan, by the design of `compare --jobs auto`; `first free` is
without a design. Machines: steady; a drift of 20 % from the first turn to the last; one GPU that is 10 % slower; GPUs
that differ by 3 % (normal); a hot neighbor, which heats one GPU and those next to it: 5 % longer for a third of the
turns; a hot arm, the last one: next to it GPUs take 5 % longer. No order averages that out; the GPU has to report its
lowered clock, and such times are invalid. Gain: wall time on one GPU over that on all. Error: of the mean difference of
an arm, over that on one GPU of the same machine. Three tenths as many comparisons are drawn as for `order`.
"""

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ampcompare.experiment.plan import balanced_arm_orders, device_by_arm_per_seed
from benchmarks.rates.arrays import Floats, is_winner
from benchmarks.rates.study import Row, Study, Table

NOISE = 0.01
DRAWS = 50  # comparisons of each order
POOL_DRAWS = 20  # of each plan for several GPUs
POOL_SHARE = 0.3  # of the replicates
Order = Callable[[list[str], int, int], list[list[str]]]
Turns = NDArray[np.int64]
SIZES = ((2, 3, 2), (3, 5, 2), (2, 4, 4), (9, 5, 4), (9, 3, 8), (4, 8, 8), (9, 10, 8))  # arms, seeds, GPUs
POOLS = ("steady", "drift 20 %", "slow GPU", "GPUs differ", "hot neighbor", "hot arm")


def _same_order(arms: list[str], seeds: int, number: int) -> list[list[str]]:
    rows = []
    for seed in range(seeds):
        row = list(arms)
        random.Random(f"order of seed {seed}").shuffle(row)
        rows.append(row)
    return rows


def _random(arms: list[str], seeds: int, number: int) -> list[list[str]]:
    generator = random.Random(number)
    return [generator.sample(arms, len(arms)) for _ in range(seeds)]


def _add_seeds(arms: list[str], seeds: int, number: int) -> list[list[str]]:
    first = balanced_arm_orders(arms, [], 3, number)
    return first + balanced_arm_orders(arms, first, seeds - 3, number)


ORDERS: dict[str, Order] = {
    "list": lambda arms, seeds, number: [arms] * seeds,
    "fixed": _same_order,
    "random": _random,
    "balanced": lambda arms, seeds, number: balanced_arm_orders(arms, [], seeds, number),
    "added": _add_seeds,
}


def _drift(size: float) -> Callable[[np.random.Generator, int], Floats]:
    return lambda generator, cells: np.log1p(size * np.linspace(0, 1, cells))[None, :].repeat(DRAWS, axis=0)


def _busy(generator: np.random.Generator, cells: int) -> Floats:
    length = max(1, round(cells / 5))
    begin = generator.integers(0, cells - length + 1, (DRAWS, 1))
    places = np.arange(cells)[None, :]
    return np.where((places >= begin) & (places < begin + length), math.log(1.3), 0.0)


def _correlated_states(generator: np.random.Generator, cells: int) -> Floats:
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
    "AR(1)": _correlated_states,
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


def _turns(arms: int, seeds: int, devices: int, number: int, design: str) -> tuple[Turns, Turns]:
    """Return the device and the turn on it of each cell, both seeds x arms."""
    names = [str(arm) for arm in range(arms)]
    rows = balanced_arm_orders(names, [], seeds, number)
    places = device_by_arm_per_seed(names, seeds, devices, number, by_seed=design == "design")
    device, turn = np.zeros((seeds, arms), dtype=np.int64), np.zeros((seeds, arms), dtype=np.int64)
    length = [0] * devices
    for seed, row in enumerate(rows):
        for name in row:
            where = places[seed][name] if design != "first free" else length.index(min(length))
            device[seed, int(name)], turn[seed, int(name)] = where, length[where]
            length[where] += 1
    return device, turn


def _states(machine: str, device: Turns, turn: Turns, devices: int, generator: np.random.Generator) -> Floats:
    """Return the log step time that the machine gives to each cell: draws x seeds x arms."""
    shape = (POOL_DRAWS, *device.shape)
    if machine == "drift 20 %":
        return np.broadcast_to(np.log1p(0.2 * turn / max(1, int(turn.max()))), shape)
    if machine == "slow GPU":
        slow = generator.integers(0, devices, (POOL_DRAWS, 1, 1))
        return np.where(device[None] == slow, math.log(1.1), 0.0)
    if machine == "GPUs differ":
        return generator.normal(0, 0.03, (POOL_DRAWS, devices))[:, device]
    if machine == "hot neighbor":
        center, last = generator.integers(0, devices, (POOL_DRAWS, 1, 1)), int(turn.max()) + 1
        length = math.ceil(last / 3)
        begin = generator.integers(0, last - length + 1, (POOL_DRAWS, 1, 1))
        is_hot = (abs(device[None] - center) <= 1) & (turn[None] >= begin) & (turn[None] < begin + length)
        return np.where(is_hot, math.log(1.05), 0.0)
    if machine == "hot arm" and devices > 1:
        hot = {(int(device[seed, -1]), int(turn[seed, -1])) for seed in range(len(device))}
        near = np.vectorize(lambda d, t: (d - 1, t) in hot or (d + 1, t) in hot)(device, turn)
        return np.broadcast_to(np.where(near, math.log(1.05), 0.0), shape)
    return np.zeros(shape)


def _simulate(
    machine: str, arms: int, seeds: int, devices: int, plans: int, design: str = "design"
) -> tuple[float, float, float]:
    """Return the share of comparisons with a false winner, the standard error of a difference, and turns in all."""
    generator = np.random.default_rng(0)
    hits, squares, longest = 0, 0.0, 0.0
    for number in range(plans):
        device, turn = _turns(arms, seeds, devices, number, design)
        logs = _states(machine, device, turn, devices, generator)
        logs = logs + generator.normal(0, NOISE, logs.shape)
        hits += int(is_winner(logs).any(axis=1).sum())
        mean = (logs[:, :, :1] - logs[:, :, 1:]).mean(axis=1)
        squares += float((mean**2).mean())
        longest += float(turn.max() + 1)
    return hits / (plans * POOL_DRAWS), math.sqrt(squares / plans), longest / plans


def _pool_row(cell: tuple[str, tuple[int, int, int]], replicates: int) -> Row:
    machine, (arms, seeds, devices) = cell
    plans = max(1, round(POOL_SHARE * replicates) // POOL_DRAWS)
    rate, error, long = _simulate(machine, arms, seeds, devices, plans)
    free, _, _ = _simulate(machine, arms, seeds, devices, plans, "first free")
    _, alone, one = _simulate(machine, arms, seeds, 1, plans)
    return {
        "machine": machine,
        "arms": str(arms),
        "seeds": str(seeds),
        "GPUs": str(devices),
        "first free": f"{100 * free:.1f} %",
        "design": f"{100 * rate:.1f} %",
        "gain": f"{one / long:.1f}x",
        "error": f"{error / alone:.2f}",
    }


STUDY = Study(
    title="Order of cells under drift, and cells on several GPUs",
    about=__doc__,
    tables=(
        Table(
            "order",
            list(itertools.product(MACHINES, (2, 3, 5, 9), (3, 5, 10))),
            _row,
            by=("machine", "seeds"),
        ),
        Table("pool", list(itertools.product(POOLS, SIZES)), _pool_row, by=("machine",)),
    ),
    replicates=20_000,
)
