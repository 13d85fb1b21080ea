"""The cells of a comparison, and the order in which they run."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.base.files.read import FileFault, parse_yaml
from ampcompare.experiment.matrix import DEFAULT_ARMS, Row, crossed, find_reference, find_setting
from ampcompare.experiment.run_order import balanced_rows
from ampcompare.runs.records.comparison import Published
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.validation import validated

__all__ = ["DEFAULT_ARMS", "Plan", "make_plan", "parse_seeds", "parse_vary", "plan_rows"]

MAX_SEEDS = 10_000
MAX_ORDER_SEED_BITS = 53  # a number that every reader of JSON keeps exactly
SEED = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Plan:
    """The matrix of a comparison.

    Attributes:
        arms: labels of the rows, in the order of the table: canonical texts of arms, and what is varied.
        reference: the row that the others are compared with.
        seeds: in order.
        cells: in the order in which they run: blocks by seed, each with all arms, and over the blocks all arms at equal
            mean positions, so that a drift of the machine affects them equally.
        labels: the row of each cell.
        order_seed: seed of the random order, drawn for each plan.
        timing_rounds: times that every arm of a seed is timed again after its runs.
        published: published results matched to the rows.
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

    def in_order(self, order: Sequence[str], order_seed: int) -> Plan:
        """Return the same cells in an order that was recorded, which arms and seeds that it lacks extend.

        Args:
            order: cells as LABEL@SEED; those that this plan lacks are ignored.
            order_seed: recorded with it.
        """
        cells = dict(zip(self.order, self.cells, strict=True))
        recorded: dict[int, list[str]] = {seed: [] for seed in self.seeds}
        for name in dict.fromkeys(order):
            if name in cells:
                recorded[cells[name].recipe.seed].append(name.rpartition("@")[0])
        complete = [row for row in recorded.values() if len(row) == len(self.arms)]
        new_rows = iter(balanced_rows(self.arms, complete, len(self.seeds) - len(complete), order_seed))
        labels = []
        for row in recorded.values():
            labels += row
            if len(row) < len(self.arms):
                labels += [label for label in next(new_rows) if label not in row]
        names = [f"{label}@{seed}" for label, seed in zip(labels, _repeated(self.seeds, len(self.arms)), strict=True)]
        return replace(self, cells=tuple(cells[name] for name in names), labels=tuple(labels), order_seed=order_seed)

    def blocks(self) -> list[range]:
        """Return the indices of the cells of each seed."""
        size = len(self.arms)
        return [range(start, start + size) for start in range(0, len(self.cells), size)]

    def digest(self) -> str:
        """Return 12 hexadecimal digits that change with any row, and not with the seeds.

        More seeds of the same rows are another look at the same comparison, so they use the same folder.
        """
        recipes = ((cell, cell.recipe.model_copy(update={"seed": 0})) for cell in self.cells)
        text = "\n".join(sorted({cell.model_copy(update={"recipe": recipe}).digest() for cell, recipe in recipes}))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds such as `0-4`, `7` or `0,2,5-6`.

    Raises:
        ConfigError: not seeds, or one given twice.
    """
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


def make_plan(base: RunConfig, arms: Sequence[str], seeds: Sequence[int], vary: Sequence[tuple[str, Any]] = ()) -> Plan:
    """Cross arms, varied settings and seeds over one recipe.

    Args:
        base: everything but arm and seed.
        arms: texts of arms; fp32, or else the first, is the reference.
        vary: paths of settings, each with a list of values, which are crossed as well; the first values make the
            reference.

    Raises:
        ConfigError: an arm or setting that cannot be used, or a duplicate row.
    """
    return plan_rows(base, crossed(arms, vary), seeds)


def plan_rows(base: RunConfig, rows: Sequence[Row], seeds: Sequence[int], reference: str | None = None) -> Plan:
    """Train each row with each seed.

    Args:
        reference: an arm or the label of a row; by default the first row of fp32, or else the first of all.

    Raises:
        ConfigError: a setting that cannot be used, a duplicate row, or no row of the reference.
    """
    if not rows or not seeds:
        raise ConfigError("a comparison needs at least one arm and one seed")
    named: dict[str, Row] = {}
    for row in rows:
        if row.label in named:
            raise ConfigError(f"arm {row.label!r} is named twice; list each arm once")
        named[row.label] = row
    cells = [_cell(base, row.arm, row.varied, seed) for seed in seeds for row in named.values()]
    base_row = find_reference(rows, reference)
    if base_row is None:
        raise ConfigError(f"the reference {reference!r} is not one of the arms {', '.join(named)}")
    plan = Plan(tuple(named), base_row.label, tuple(seeds), tuple(cells), tuple(named) * len(seeds))
    return plan.in_order([], secrets.randbits(MAX_ORDER_SEED_BITS))


def _repeated(seeds: Sequence[int], times: int) -> list[int]:
    return [seed for seed in seeds for _ in range(times)]


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """Read a varied setting such as `workers=0,2` or `recipe.batch_size=32,64`.

    Raises:
        ConfigError: no such setting, or one that is not varied this way.
    """
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--sweep {text!r} is not SETTING=VALUE,VALUE")
    path = find_setting(name, f"--sweep {text!r}")
    try:
        return path, [parse_yaml(value) for value in values.split(",")]
    except FileFault as fault:
        raise ConfigError(f"--sweep {text!r}: a value cannot be read: {fault}") from None


def _cell(base: RunConfig, arm: str, varied: Mapping[str, Any], seed: int) -> RunConfig:
    values = base.model_dump()
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
    return validated(RunConfig, values)
