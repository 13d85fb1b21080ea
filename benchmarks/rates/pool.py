"""False winners in time where cells run on several GPUs at once, and what that gains and costs.

    python -m benchmarks.rates pool [--jobs 2] [--out docs/benchmarks/pool]

All arms are equal, so each winner or loser is false. Each device runs its queue in the order of the plan, by the design
of `compare --jobs auto`; `first free` is without a design. A cell's log step time is the state of its device at its
turn, with normal noise of 1 %. Machines: steady; a drift of 20 % from the first turn to the last; one GPU that is 10 %
slower; GPUs that differ by 3 % (normal); a hot neighbor, which heats one GPU and those next to it: 5 % longer for a
third of the turns; a hot arm, the last one: next to it GPUs take 5 % longer. No order averages that out; the GPU has to
report its lowered clock, and such times are invalid. A rate is the share of comparisons that call any arm `better` or
`worse`. Gain: wall time on one GPU over that on all. Error: of the mean difference of an arm, over that on one GPU of
the same machine.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ampcompare.experiment.plan import balanced_rows, device_of_cells
from benchmarks.rates.arrays import Floats, is_winner
from benchmarks.rates.study import Row, Study, Table

__all__ = ["STUDY"]

Turns = NDArray[np.int64]
SIZES = ((2, 3, 2), (3, 5, 2), (2, 4, 4), (9, 5, 4), (9, 3, 8), (4, 8, 8), (9, 10, 8))  # arms, seeds, GPUs
MACHINES = ("steady", "drift 20 %", "slow GPU", "GPUs differ", "hot neighbor", "hot arm")
NOISE = 0.01
DRAWS = 20  # comparisons of each plan


def _turns(arms: int, seeds: int, devices: int, number: int, design: str) -> tuple[Turns, Turns]:
    """Return the device and the turn on it of each cell, both seeds x arms."""
    names = [str(arm) for arm in range(arms)]
    rows = balanced_rows(names, [], seeds, number)
    places = device_of_cells(names, seeds, devices, number, by_seed=design == "design")
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
    shape = (DRAWS, *device.shape)
    if machine == "drift 20 %":
        return np.broadcast_to(np.log1p(0.2 * turn / max(1, int(turn.max()))), shape)
    if machine == "slow GPU":
        slow = generator.integers(0, devices, (DRAWS, 1, 1))
        return np.where(device[None] == slow, math.log(1.1), 0.0)
    if machine == "GPUs differ":
        return generator.normal(0, 0.03, (DRAWS, devices))[:, device]
    if machine == "hot neighbor":
        center, last = generator.integers(0, devices, (DRAWS, 1, 1)), int(turn.max()) + 1
        length = math.ceil(last / 3)
        begin = generator.integers(0, last - length + 1, (DRAWS, 1, 1))
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
    return hits / (plans * DRAWS), math.sqrt(squares / plans), longest / plans


def _row(cell: tuple[str, tuple[int, int, int]], replicates: int) -> Row:
    machine, (arms, seeds, devices) = cell
    plans = max(1, replicates // DRAWS)
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
    title="Cells on several GPUs",
    about=__doc__,
    tables=(
        Table(
            "pool",
            [(machine, size) for machine in MACHINES for size in SIZES],
            _row,
            by=("machine",),
        ),
    ),
    replicates=6000,
)
