"""Which cells a comparison is made of, and in which order they run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.arm import Arm
from ampcompare.config import RunConfig, validated
from ampcompare.errors import ConfigError

__all__ = ["DEFAULT_ARMS", "Plan", "make_plan", "parse_seeds"]

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
        arms: canonical texts, in the order of the table.
        reference: the arm that the others are compared with.
        seeds: in order.
        cells: in the order in which they run: blocks by seed, arms at random inside a block, so that a drift of the
            machine meets all arms alike.
    """

    arms: tuple[str, ...]
    reference: str
    seeds: tuple[int, ...]
    cells: tuple[RunConfig, ...]

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


def make_plan(base: RunConfig, arms: Sequence[str], seeds: Sequence[int]) -> Plan:
    """Cross arms and seeds over one recipe.

    Args:
        base: everything but arm and seed.
        arms: texts of arms; fp32, or else the first, is the reference.

    Raises:
        ConfigError: an arm that cannot be read or is named twice.
    """
    texts = tuple(str(Arm.parse(arm)) for arm in arms)
    twice = sorted({text for text in texts if texts.count(text) > 1})
    if twice:
        raise ConfigError(f"arm {twice[0]!r} is named twice; an arm is one row")
    if not texts or not seeds:
        raise ConfigError("a comparison needs at least one arm and one seed")
    cells: list[RunConfig] = []
    for seed in seeds:
        block = list(texts)
        random.Random(f"order of seed {seed}").shuffle(block)
        cells.extend(_cell(base, arm, seed) for arm in block)
    return Plan(texts, "fp32" if "fp32" in texts else texts[0], tuple(seeds), tuple(cells))


def _cell(base: RunConfig, arm: str, seed: int) -> RunConfig:
    values = base.model_dump()
    values["arm"] = arm
    values["recipe"]["seed"] = seed
    config: RunConfig = validated(RunConfig, values)
    return config
