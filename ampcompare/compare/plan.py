"""Which cells a comparison is made of, and in which order they run."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.arm import Arm
from ampcompare.compare.comparable import settings
from ampcompare.config import RunConfig, validated
from ampcompare.errors import ConfigError

__all__ = ["DEFAULT_ARMS", "Plan", "make_plan", "parse_seeds", "parse_vary"]

DEFAULT_ARMS = (
    "fp32",
    "apex:O0",
    "apex:O1",
    "apex:O2",
    "apex:O3",
    "native:fp16",
    "native:bf16",
    "half:bn_fp32",
    "half",
)
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Plan:
    """The matrix of a comparison.

    Attributes:
        arms: labels of the rows, in the order of the table: canonical texts of arms, and what is varied.
        reference: the row that the others are compared with.
        seeds: in order.
        cells: in the order in which they run: blocks by seed, arms at random inside a block, so that a drift of the
            machine meets all arms alike.
        labels: the row of each cell.
    """

    arms: tuple[str, ...]
    reference: str
    seeds: tuple[int, ...]
    cells: tuple[RunConfig, ...]
    labels: tuple[str, ...]

    @property
    def order(self) -> list[str]:
        """Every cell as LABEL@SEED, as they run."""
        return [f"{label}@{cell.recipe.seed}" for label, cell in zip(self.labels, self.cells, strict=True)]

    def blocks(self) -> list[range]:
        """Return the places of the cells of each seed."""
        size = len(self.arms)
        return [range(start, start + size) for start in range(0, len(self.cells), size)]

    def digest(self) -> str:
        """Return 12 hexadecimal digits that change with any cell."""
        text = "\n".join(sorted(cell.digest() for cell in self.cells))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds such as `0-4`, `7` or `0,2,5-6`.

    Raises:
        ConfigError: not seeds, or one given twice.
    """
    seeds: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"seeds {text!r} cannot be read; write them as 0-4 or 0,2,7")
        low, high = int(first), int(last or first)
        if high < low or high - low >= MOST_SEEDS:
            raise ConfigError(f"seeds {word.strip()!r} is not a range from low to high of at most {MOST_SEEDS}")
        seeds.extend(range(low, high + 1))
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds {text!r} name a seed twice; a run counts once")
    return tuple(seeds)


def make_plan(base: RunConfig, arms: Sequence[str], seeds: Sequence[int], vary: Sequence[tuple[str, Any]] = ()) -> Plan:
    """Cross arms, varied settings and seeds over one recipe.

    Args:
        base: everything but arm and seed.
        arms: texts of arms; fp32, or else the first, is the reference.
        vary: places of settings, each with a list of values, which are crossed as well; the first values make the
            reference.

    Raises:
        ConfigError: an arm or setting that cannot be used, or a row that is there twice.
    """
    texts = [str(Arm.parse(arm)) for arm in arms]
    if not texts or not seeds:
        raise ConfigError("a comparison needs at least one arm and one seed")
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for text in texts:
        for values in itertools.product(*(values for _, values in vary)):
            varied = dict(zip((place for place, _ in vary), values, strict=True))
            named = [f"{place.rpartition('.')[2]}={value}" for place, value in varied.items()]
            label = " ".join([text, *named])
            if label in rows:
                raise ConfigError(f"arm {label!r} is named twice; an arm is one row")
            rows[label] = (text, varied)
    labels, cells = [], []
    for seed in seeds:
        block = list(rows)
        random.Random(f"order of seed {seed}").shuffle(block)
        labels += block
        cells += [_cell(base, *rows[label], seed) for label in block]
    reference = next((label for label, (text, _) in rows.items() if text == "fp32"), next(iter(rows)))
    return Plan(tuple(rows), reference, tuple(seeds), tuple(cells), tuple(labels))


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """Read a varied setting such as `workers=0,2` or `recipe.batch_size=32,64`.

    Raises:
        ConfigError: no such setting, or one that is not varied this way.
    """
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--vary {text!r} is not SETTING=VALUE,VALUE")
    known = [place for place, _ in settings(RunConfig().model_dump(exclude={"saving"}))]
    name = name.strip().replace("-", "_")
    fit = [place for place in known if place == name] or [place for place in known if place.rpartition(".")[2] == name]
    if len(fit) != 1:
        meant = fit or difflib.get_close_matches(name, known) or known
        raise ConfigError(f"--vary {text!r}: {name!r} is not one setting; choose one of {', '.join(meant)}")
    if fit[0] in ("arm", "recipe.seed"):
        raise ConfigError(f"--vary {text!r}: arms and seeds have options of their own, --arm and --seeds")
    import yaml

    try:
        return fit[0], [yaml.safe_load(value) for value in values.split(",")]
    except yaml.YAMLError:
        raise ConfigError(f"--vary {text!r}: a value cannot be read") from None


def _cell(base: RunConfig, arm: str, varied: Mapping[str, Any], seed: int) -> RunConfig:
    values = base.model_dump()
    for place, value in varied.items():
        *parents, name = place.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[name] = value
    values["arm"] = arm
    values["recipe"]["seed"] = seed
    recipe, optimizer = values["recipe"], values["recipe"]["optimizer"]
    if recipe["global_batch_size"] is not None and "recipe.batch_size" not in varied:
        del recipe["batch_size"]  # follows anew from what was varied
    if optimizer["lr_base"] is not None and "recipe.optimizer.lr" not in varied:
        del optimizer["lr"]
    config: RunConfig = validated(RunConfig, values)
    return config
