"""Comparisons of real runs under two names, of an arm with itself or with one that is off by a known amount."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ampcompare.experiment.launch.worker.cell import train_cell_and_write_record
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import ArmSummary
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

NAMES = ("first", "second")
SMALL_LM: dict[str, Any] = {
    "task": "lm",
    "data": {"train_size": 640, "val_size": 64, "sequence_length": 32},
    "model": {"args": {"width": 32, "depth": 1}},
    "optimizer": {"lr": 0.02},
    "epochs": 1,
    "batch_size": 16,
}
Recipe = dict[str, Any]


def config_of(recipe: Recipe) -> RunConfig:
    """Return the settings of a run in fp32 on the CPU."""
    return RunConfig.model_validate({"recipe": recipe, "device": "cpu"})


def own_seed(recipe: Recipe) -> Recipe:
    """Return the recipe with a seed that no first run has: the largest noise that a pair can have."""
    return {**recipe, "seed": recipe["seed"] + 1_000_000}


def rename_arm(record: RunRecord, name: str, recipe: Recipe) -> RunRecord:
    """Return a record as that of an arm by this name with the settings of its pair, as `summarize` pairs by them."""
    return record.model_copy(update={"arm": name, "config": config_of(recipe)})


def comparisons(what: str, count: int, compare: Callable[[int], list[RunRecord]]) -> list[list[RunRecord]]:
    """Return the records of comparisons by their number, and print how far it is."""
    results = []
    for number in range(count):
        results.append(compare(number))
        if not (number + 1) % 10:
            click.echo(f"[{what} {number + 1}/{count}]", err=True)
    return results


def of_pair(
    recipe: Recipe, number: int, pairs: int, other: Callable[[Recipe], Recipe] = own_seed
) -> list[RunRecord]:
    """Train a comparison in this process: pair after pair, first and second name.

    Args:
        other: makes the recipe of the second name.
    """
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(number * pairs, (number + 1) * pairs):
            its = {**recipe, "seed": seed}
            for name, trained in zip(NAMES, (its, other(its)), strict=True):
                records.append(
                    rename_arm(
                        train_cell_and_write_record(config_of(trained), Path(folder, f"{seed} {name}")),
                        name,
                        its,
                    )
                )
    return records


def summarize_pair(records: Sequence[RunRecord], **options: Any) -> ArmSummary:
    """Return the row of the second name."""
    rows = summarize(records, arms=NAMES, reference=NAMES[0], **options).arms
    return next(row for row in rows if row.arm == NAMES[1])
