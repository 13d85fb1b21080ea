"""A/A calibration: how often verdicts find a difference between an arm and itself, and how often a real one.

    python benchmarks/aa.py [--comparisons 200] [--seeds 5] [--out docs/benchmarks/aa]

Each comparison trains fp32 under two names, five runs each, every run in a process of its own, in random order inside a
pair, by the launcher and the verdicts that `compare` uses. With equal seeds the two would agree to the last bit on a
CPU, and accuracy would show nothing; so the second name has seeds of its own, which is the largest noise that a
pair can have. Nothing is resampled: every comparison has runs of its own. Power is by simulation, of normal noise with
the spread that the runs had.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import numpy as np
from results import write_results
from scipy.stats import binomtest
from tabulate import tabulate

from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.inference.effect import Effect, min_resolvable_spread, p_values, paired
from ampcompare.runs.analysis.inference.sample_size import pairs_needed
from ampcompare.runs.analysis.inference.verdict import Margin, decide
from ampcompare.runs.analysis.runs.time_validity import invalid_reason
from ampcompare.runs.analysis.summary import summarize
from ampcompare.runs.analysis.verdicts.step_time import TIME_FLOOR
from ampcompare.runs.records.comparison import ArmSummary
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

NAMES = ("first", "second")
OWN_SEEDS = 1_000_000
TERMS = Criteria(margin=0.5)
RECIPE = {
    "data": {"name": "digits"},
    "model": {"arch": "mlp"},
    "optimizer": {"lr": 0.05},
    "epochs": 3,
    "batch_size": 64,
    "max_steps": 55,
}
SIMULATIONS = 4000
Pair = tuple[RunRecord, RunRecord]


def _train(launcher: ForkedLauncher, folder: Path, seed: int) -> RunRecord:
    config = RunConfig.model_validate({"recipe": {**RECIPE, "seed": seed}, "device": "cpu"})
    record = launcher.launch(config, folder)
    if record.status != "completed":
        raise SystemExit(f"a run of seed {seed} {record.status}: {record.error}")
    return record


def _comparison(launcher: ForkedLauncher, folder: Path, number: int, seeds: int) -> list[RunRecord]:
    """Run one comparison; both records of a pair carry the pair's seed, as `summarize` pairs by it."""
    records = []
    for seed in range(number * seeds, (number + 1) * seeds):
        order = [0, 1]
        random.Random(seed).shuffle(order)
        for place in order:
            record = _train(launcher, folder, seed + place * OWN_SEEDS)
            recipe = record.config.recipe.model_copy(update={"seed": seed})
            config = record.config.model_copy(update={"recipe": recipe})
            records.append(record.model_copy(update={"arm": NAMES[place], "config": config}))
    return records


def _pairs(records: Sequence[RunRecord]) -> Iterator[Pair]:
    by_seed: dict[int, dict[str, RunRecord]] = {}
    for record in records:
        by_seed.setdefault(record.config.recipe.seed, {})[record.arm] = record
    yield from ((pair[NAMES[1]], pair[NAMES[0]]) for pair in by_seed.values())


def _seconds(record: RunRecord) -> float:
    return record.summary.step_seconds_median or math.nan


def _ungated(records: Sequence[RunRecord]) -> Effect:
    """Return the effect on time that there would be without the gate of validity."""
    pairs = list(_pairs(records))
    return paired(
        [-math.log(_seconds(arm)) for arm, _ in pairs], [-math.log(_seconds(other)) for _, other in pairs], TIME_FLOOR
    )


def _judged(records: Sequence[RunRecord]) -> ArmSummary:
    rows = summarize(records, arms=NAMES, reference=NAMES[0], terms=TERMS).arms
    return next(row for row in rows if row.arm == NAMES[1])


def _without_load(record: RunRecord) -> RunRecord:
    """Forget the load average, so that the gate goes by what was seen of the run itself."""
    assert record.readings is not None
    return record.model_copy(update={"readings": record.readings.model_copy(update={"load_average": None})})


def _facts(records: Sequence[RunRecord]) -> dict[str, Any]:
    row = _judged(records)
    effect = _ungated(records)
    pairs = list(_pairs(records))
    return {
        "accuracy": row.accuracy_verdict,
        "time": row.time_verdict,
        "time_without_load": _judged([_without_load(record) for record in records]).time_verdict,
        "time_without_gate": decide([effect], TERMS.time())[0].word,
        "time_p_without_gate": p_values(effect, TERMS.time().size).different,
        "points": [100 * ((a.summary.metric_final or 0) - (b.summary.metric_final or 0)) for a, b in pairs],
        "log_ratios": [math.log(_seconds(a) / _seconds(b)) for a, b in pairs],
        "valid": [not (invalid_reason(a) or invalid_reason(b)) for a, b in pairs],
    }


def _word(verdict: str) -> str:
    return verdict.partition(" (")[0] or "none"


def _rate(what: str, words: Sequence[str]) -> list[str]:
    """Return the line of the table for one kind of verdict: how often a winner or loser was named."""
    counts = Counter(map(_word, words))
    valid = [word for word in words if not word.startswith("invalid")]
    wrong = counts["better"] + counts["worse"]
    if not valid:
        return [what, str(len(words)), "0", "-", "-", "-", "every one invalid"]
    test = binomtest(wrong, len(valid), 0.05, alternative="greater")
    bounds = binomtest(wrong, len(valid)).proportion_ci(0.95, method="wilson")
    listed = ", ".join(f"{word} {count}" for word, count in counts.most_common())
    return [
        what,
        str(len(words)),
        str(len(valid)),
        f"{wrong} ({100 * wrong / len(valid):.1f} %)",
        f"{100 * bounds.low:.1f} to {100 * bounds.high:.1f} %",
        "yes" if test.pvalue > 0.05 else "NO",
        listed,
    ]


def _found(spread: float, shift: float, pairs: int, floor: float, margin: Any, word: str) -> float:
    """Return how often simulated pairs with a true difference of `shift` get `word`."""
    generator = np.random.default_rng(0)
    samples = generator.normal(shift, spread, (SIMULATIONS, pairs))
    verdicts = (decide([paired(list(row), [0.0] * pairs, floor)], margin)[0] for row in samples)
    return sum(verdict.word == word for verdict in verdicts) / SIMULATIONS


def _power(points: float, log_ratio: float) -> list[list[str]]:
    rows = []
    floor = 100 * min_resolvable_spread(360)
    accuracy = Margin(0.5, "0.5")
    for worse in (1.0, 2.0, 3.0, 5.0):
        pairs = max(3, pairs_needed(max(points, floor), worse, 0.025))
        rate = _found(points, -worse, pairs, floor, accuracy, "worse")
        rows.append([f"{worse:g} points worse", f"{points:.2f} points", str(pairs), f"{100 * rate:.0f} %"])
    for slower in (0.05, 0.10, 0.20):
        pairs = max(3, pairs_needed(max(log_ratio, TIME_FLOOR), math.log1p(slower), 0.025))
        rate = _found(log_ratio, -math.log1p(slower), pairs, TIME_FLOOR, TERMS.time(), "worse")
        rows.append([f"{100 * slower:.0f} % slower", f"{100 * log_ratio:.1f} %", str(pairs), f"{100 * rate:.0f} %"])
    return rows


def _report(results: Sequence[dict[str, Any]], seeds: int) -> tuple[str, dict[str, Any]]:
    points = statistics.stdev(value for result in results for value in result["points"])
    valid = [
        value for result in results for value, fit in zip(result["log_ratios"], result["valid"], strict=True) if fit
    ]
    everything = [value for result in results for value in result["log_ratios"]]
    log_ratio = statistics.stdev(valid if len(valid) > 20 else everything)
    rates = [
        _rate("accuracy", [result["accuracy"] for result in results]),
        _rate("time, with the gate", [result["time"] for result in results]),
        _rate("time, the load average left out of the gate", [result["time_without_load"] for result in results]),
        _rate("time, were there no gate", [result["time_without_gate"] for result in results]),
    ]
    plain = sum(result["time_p_without_gate"] < 0.05 for result in results)
    reasons = Counter(_reason(result["time"]) for result in results if result["time"].startswith("invalid"))
    power = _power(points, log_ratio)
    headers = [
        "verdict on",
        "comparisons",
        "valid",
        "better or worse",
        "95 % interval",
        "at most 5 %",
        "all verdicts",
    ]
    text = [
        f"{len(results)} comparisons of fp32 with itself, {seeds} pairs each, {2 * seeds * len(results)} runs.",
        tabulate(rates, headers=headers, tablefmt="github", disable_numparse=True),
        f"Invalid because of: {', '.join(f'{why} {count}' for why, count in reasons.most_common()) or 'nothing'}. "
        f"Valid pairs: {len(valid)} of {len(everything)}. Without gate and practical margin, p < 0.05 in {plain} "
        f"({100 * plain / len(results):.1f} %).",
        f"Spread of a pair's difference: {points:.2f} points; step time {100 * log_ratio:.2f} % "
        f"({'valid pairs' if len(valid) > 20 else 'all pairs, too few being valid'}).",
        "Power: pairs that are promised to find a difference four times in five, and how often simulated ones do.",
        tabulate(
            power, headers=["true difference", "spread", "pairs promised", "found"], tablefmt="github",
            disable_numparse=True,
        ),
    ]  # fmt: skip
    return "\n\n".join(text), {"rates": rates, "power": power, "results": list(results)}


def _reason(verdict: str) -> str:
    """Return the kind of a reason, without the value that was read."""
    for kind in ("load", "of a core", "outliers", "data", "clock", "timed steps"):
        if kind in verdict:
            return kind
    return verdict


@click.command()
@click.option("--comparisons", default=200, show_default=True)
@click.option("--seeds", default=5, show_default=True, help="pairs in each comparison")
@click.option("--out", default=None, help="write OUT.json and OUT.md")
def main(comparisons: int, seeds: int, out: str | None) -> None:
    """Compare an arm with itself again and again."""
    results = []
    with ForkedLauncher() as launcher, tempfile.TemporaryDirectory() as folder:
        environment: dict[str, Any] = {}
        for number in range(comparisons):
            records = _comparison(launcher, Path(folder) / "cell", number, seeds)
            environment = records[0].environment
            results.append(_facts(records))
            if not (number + 1) % 10:
                click.echo(f"[{number + 1}/{comparisons}]", err=True)
    text, data = _report(results, seeds)
    click.echo(text)
    if out is not None:
        facts = f"torch {environment['torch']}, {environment['processor']}, {os.cpu_count()} cores, one thread a run"
        write_results(out, "A/A calibration", __doc__, facts, text, data)


if __name__ == "__main__":
    main()
