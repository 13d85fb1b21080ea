"""The cells of a comparison, and the order in which they run, so that a drift of the machine affects all arms equally.

Every seed is a block, a row of all arms. What a drift adds to an arm follows its position in the row, so the rows are
chosen for equal mean positions: a row and its reverse, twice the arms give equal sums; an odd number of rows ends with
three whose sums are equal for an odd number of arms and differ by one for an even number, which is the least possible.

Several devices are blocks as well: a seed runs on one of them, so that a slow one is slow for all arms of a pair. Seeds
that are fewer than the devices, or are left over, are spread: an arm visits each device equally often over the seeds.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.base.files.read import FileFault, parse_yaml
from ampcompare.experiment.matrix import MatrixRow, find_reference, setting_path_of_name
from ampcompare.results.records.comparison import Published
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model

MAX_SEEDS = 10_000
MAX_ORDER_SEED_BITS = 53  # a number that every reader of JSON keeps exactly
SEED = re.compile(r"[0-9]{1,18}")
CANDIDATES = 50  # number of random rows from which the one with the fewest repetitions is chosen


@dataclass(frozen=True)
class Plan:
    """The matrix of a comparison.

    Attributes:
        arms: labels of the rows, in the order of the table: canonical texts of arms, and what is varied.
        reference: the row that the others are compared with.
        cells: in the order in which they run: blocks by seed, each with all arms, and over the blocks all arms at equal
            mean positions, so that a drift of the machine affects them equally.
        labels: the row of each cell.
        order_seed: seed of the random order, drawn for each plan.
    """

    arms: tuple[str, ...]
    reference: str
    seeds: tuple[int, ...]
    cells: tuple[RunConfig, ...]
    labels: tuple[str, ...]
    order_seed: int = 0
    timing_rounds: int = 0
    published: Published | None = None

    @property
    def order(self) -> list[str]:
        """Every cell as LABEL@SEED, as they run."""
        return [f"{label}@{cell.recipe.seed}" for label, cell in zip(self.labels, self.cells, strict=True)]

    def with_recorded_order(self, order: Sequence[str], order_seed: int) -> Plan:
        """Return the same cells in an order that was recorded, which arms and seeds that it lacks extend.

        Args:
            order: cells as LABEL@SEED; those that this plan lacks are ignored.
        """
        cells = dict(zip(self.order, self.cells, strict=True))
        recorded: dict[int, list[str]] = {seed: [] for seed in self.seeds}
        for name in dict.fromkeys(order):
            if name in cells:
                recorded[cells[name].recipe.seed].append(name.rpartition("@")[0])
        complete = [row for row in recorded.values() if len(row) == len(self.arms)]
        new_rows = iter(balanced_arm_orders(self.arms, complete, len(self.seeds) - len(complete), order_seed))
        labels = []
        for row in recorded.values():
            labels += row
            if len(row) < len(self.arms):
                labels += [label for label in next(new_rows) if label not in row]
        seeds = [seed for seed in self.seeds for _ in self.arms]
        names = [f"{label}@{seed}" for label, seed in zip(labels, seeds, strict=True)]
        return replace(
            self, cells=tuple(cells[name] for name in names), labels=tuple(labels), order_seed=order_seed
        )

    def cell_ranges_by_seed(self) -> list[range]:
        """Return the indices of the cells of each seed."""
        size = len(self.arms)
        return [range(start, start + size) for start in range(0, len(self.cells), size)]

    def digest(self) -> str:
        """Return 12 hexadecimal digits that change with any row, and not with the seeds.

        More seeds of the same rows are another look at the same comparison, so they use the same folder.
        """
        recipes = ((cell, cell.recipe.model_copy(update={"seed": 0})) for cell in self.cells)
        text = "\n".join(
            sorted({cell.model_copy(update={"recipe": recipe}).digest() for cell, recipe in recipes})
        )
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds such as `0-4`, `7` or `0,2,5-6`."""
    seeds: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not SEED.fullmatch(first) or (dash and not SEED.fullmatch(last)):
            raise ConfigError(f"seeds {text!r} cannot be read; write them as 0-4 or 0,2,7")
        low, high = int(first), int(last or first)
        if high < low or high - low >= MAX_SEEDS:
            raise ConfigError(
                f"seeds {word.strip()!r} is not a range; write the lower seed first, and at most {MAX_SEEDS} seeds"
            )
        seeds.extend(range(low, high + 1))
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds {text!r} name a seed twice; list each seed once")
    return tuple(seeds)


def make_plan_of_rows(
    base: RunConfig, rows: Sequence[MatrixRow], seeds: Sequence[int], reference: str | None = None
) -> Plan:
    """Train each row with each seed."""
    if not rows or not seeds:
        raise ConfigError("a comparison needs at least one arm and one seed")
    named: dict[str, MatrixRow] = {}
    for row in rows:
        if row.label in named:
            raise ConfigError(f"arm {row.label!r} is named twice; list each arm once")
        named[row.label] = row
    cells = [_config_of_cell(base, row, seed) for seed in seeds for row in named.values()]
    base_row = find_reference(rows, reference)
    if base_row is None:
        raise ConfigError(f"the reference {reference!r} is not one of the arms {', '.join(named)}")
    plan = Plan(tuple(named), base_row.label, tuple(seeds), tuple(cells), tuple(named) * len(seeds))
    return plan.with_recorded_order([], secrets.randbits(MAX_ORDER_SEED_BITS))


def parse_varied_path_and_values(text: str) -> tuple[str, list[Any]]:
    """Read a varied setting such as `workers=0,2` or `recipe.batch_size=32,64`.

    Raises:
        ConfigError: it has no values, there is no such setting, or a value is no YAML.
    """
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--sweep {text!r} is not SETTING=VALUE,VALUE")
    path = setting_path_of_name(name, f"--sweep {text!r}")
    try:
        return path, [parse_yaml(value) for value in values.split(",")]
    except FileFault as fault:
        raise ConfigError(f"--sweep {text!r}: a value cannot be read: {fault}") from None


def _config_of_cell(base: RunConfig, row: MatrixRow, seed: int) -> RunConfig:
    arm = row.arm
    varied = row.varied
    values = base.model_dump()
    values["stack"] = row.stack
    for path, value in varied.items():
        *parents, name = path.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[name] = value
    values["arm"] = arm
    if Arm.parse(arm).spec.parallel and "parallel.kind" not in varied:
        del values["parallel"]["kind"]  # that of the arm, whatever the others have
    values["recipe"]["seed"] = seed
    recipe, optimizer = values["recipe"], values["recipe"]["optimizer"]
    if recipe["global_batch_size"] is not None and "recipe.batch_size" not in varied:
        del recipe["batch_size"]  # derived again from what was varied
    if optimizer["lr_base"] is not None and "recipe.optimizer.lr" not in varied:
        del optimizer["lr"]
    return build_validated_model(RunConfig, values)


def balanced_arm_orders(
    arms: Sequence[str], recorded_orders: Sequence[Sequence[str]], count: int, seed: int
) -> list[list[str]]:
    """Return the rows of further blocks, after those that are recorded.

    Where all arms are even, the next row is random: of `CANDIDATES` the one that, together with its reverse, puts arms
    least often at positions and after arms where they have been before. A Williams design has both exactly equal; it
    needs a multiple of the arms as blocks, and most comparisons have fewer.

    Args:
        recorded_orders: rows of the same arms that ran, or are planned, before.
        seed: of the random choice; with the same `recorded_orders` it gives the same rows.
    """
    generator = random.Random(f"{seed} after {len(recorded_orders)} blocks")
    rows = [list(row) for row in recorded_orders]
    for left in range(count, 0, -1):
        sums = sums_of_arm_positions(arms, rows)
        if max(sums.values()) == min(sums.values()):
            row = _least_repeating_arm_order(arms, rows, generator)
        elif left == 2 and max(sums.values()) - min(sums.values()) > 1:
            # Last but one, and not balanced: turned by half of the arms, so that the last row can equalize the sums.
            half = len(arms) // 2
            row = [*rows[-1][-half:], *rows[-1][:-half]] if half else list(arms)
        else:
            row = generator.sample(arms, len(arms))
            row.sort(key=lambda arm: -sums[arm])
        rows.append(row)
    return rows[len(recorded_orders) :]


def device_by_arm_per_seed(
    arms: Sequence[str], num_seeds: int, devices: int, seed: int, *, by_seed: bool = True
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


def sums_of_arm_positions(arms: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return for each arm the sum of its positions over rows."""
    return {arm: sum(row.index(arm) for row in rows) for arm in arms}


def _least_repeating_arm_order(
    arms: Sequence[str], rows: Sequence[Sequence[str]], generator: random.Random
) -> list[str]:
    """Return the random row that, with its reverse, repeats positions and neighbors least."""
    before = _count_positions_and_predecessors(rows)
    candidates = [generator.sample(arms, len(arms)) for _ in range(CANDIDATES)]
    return min(candidates, key=lambda row: _count_repetitions(before, [row, row[::-1]]))


def _count_positions_and_predecessors(rows: Sequence[Sequence[str]]) -> Counter[tuple[str, int | str]]:
    """Count how often each arm was at each position, and directly after each other arm."""
    places = [(arm, place) for row in rows for place, arm in enumerate(row)]
    neighbors = [(arm, previous) for row in rows for previous, arm in itertools.pairwise(row)]
    return Counter([*places, *neighbors])


def _count_repetitions(
    counts_before: Mapping[tuple[str, int | str], int], rows: Sequence[Sequence[str]]
) -> int:
    return sum(counts_before[what] * count for what, count in _count_positions_and_predecessors(rows).items())
