"""A/A calibration of metrics that are not counts: how often verdicts find a difference between an arm and itself.

    python benchmarks/aa_tasks.py [--comparisons 100] [--seeds 3] [--out docs/benchmarks/aa_tasks]

Each comparison trains fp32 under two names, on small versions of the tasks `lm` and `segmentation`. The second name has
seeds of its own, which is the largest noise that a pair can have. Nothing is resampled: every comparison has runs of
its own. Margins are those that the tasks bring.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from results import write_results
from scipy.stats import binomtest
from tabulate import tabulate

from ampcompare.experiment.launch.worker.cell import run_cell
from ampcompare.runs.analysis.summary import summarize
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

NAMES = ("first", "second")
OWN_SEEDS = 1_000_000
RECIPES: dict[str, dict[str, Any]] = {
    "lm": {
        "task": "lm",
        "data": {"train_size": 640, "val_size": 64, "sequence_length": 32},
        "model": {"args": {"width": 32, "depth": 1}},
        "optimizer": {"lr": 0.02},
        "epochs": 1,
        "batch_size": 16,
    },
    "segmentation": {
        "task": "segmentation",
        "data": {"train_size": 192, "val_size": 48, "image_size": 16},
        "model": {"args": {"width": 8, "depth": 2}},
        "epochs": 4,
        "batch_size": 16,
    },
}
HEADERS = ["task", "metric", "mean", "sd of a pair", "comparisons", "better or worse", "95 % interval", "all verdicts"]


def _record(task: str, seed: int, folder: Path) -> RunRecord:
    config = RunConfig.model_validate({"recipe": {**RECIPES[task], "seed": seed}, "device": "cpu"})
    return run_cell(config, folder)


def _comparison(task: str, number: int, seeds: int, folder: Path) -> list[RunRecord]:
    """Run one comparison; both records of a pair carry the pair's seed, as `summarize` pairs by it."""
    records = []
    for seed in range(number * seeds, (number + 1) * seeds):
        for place, name in enumerate(NAMES):
            record = _record(task, seed + place * OWN_SEEDS, folder / f"{seed}-{place}")
            recipe = record.config.recipe.model_copy(update={"seed": seed})
            config = record.config.model_copy(update={"recipe": recipe})
            records.append(record.model_copy(update={"arm": name, "config": config}))
    return records


def _finals(comparison: Sequence[RunRecord]) -> list[float]:
    return [record.summary.metric_final or 0.0 for record in comparison]


def _row(task: str, comparisons: Sequence[Sequence[RunRecord]]) -> list[str]:
    verdicts = [summarize(records, arms=NAMES, reference=NAMES[0]).arms[1].accuracy_verdict for records in comparisons]
    counts = Counter(verdict.partition(" (")[0] for verdict in verdicts)
    wrong = counts["better"] + counts["worse"]
    bounds = binomtest(wrong, len(verdicts)).proportion_ci(0.95, method="wilson")
    metric = comparisons[0][0].metric
    finals = [_finals(records) for records in comparisons]
    differences = [b - a for values in finals for a, b in zip(values[::2], values[1::2], strict=True)]
    return [
        task,
        metric.name,
        metric.shown(statistics.fmean(value for values in finals for value in values)),
        f"{metric.factor * statistics.stdev(differences):.3g}",
        str(len(verdicts)),
        f"{wrong} ({100 * wrong / len(verdicts):.1f} %)",
        f"{100 * bounds.low:.1f} to {100 * bounds.high:.1f} %",
        ", ".join(f"{word} {count}" for word, count in counts.most_common()),
    ]


@click.command()
@click.option("--comparisons", default=100, show_default=True)
@click.option("--seeds", default=3, show_default=True, help="pairs in each comparison")
@click.option("--task", "tasks", multiple=True, default=list(RECIPES), show_default=True)
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(comparisons: int, seeds: int, tasks: Sequence[str], out: str | None) -> None:
    """Compare fp32 with itself on each task."""
    rows = []
    finals = {}
    environment: dict[str, Any] = {}
    for task in tasks:
        results = []
        for number in range(comparisons):
            with tempfile.TemporaryDirectory() as folder:
                results.append(_comparison(task, number, seeds, Path(folder)))
            if not (number + 1) % 10:
                click.echo(f"[{task} {number + 1}/{comparisons}]", err=True)
        environment = results[0][0].environment
        rows.append(_row(task, results))
        finals[task] = [_finals(records) for records in results]
    text = tabulate(rows, headers=HEADERS, tablefmt="github", disable_numparse=True)
    click.echo(text)
    if out is not None:
        facts = f"torch {environment['torch']}, {environment['processor']}, one thread, {seeds} pairs a comparison"
        write_results(out, "A/A calibration of tasks", __doc__, facts, text, {"rows": rows, "finals": finals})


if __name__ == "__main__":
    main()
