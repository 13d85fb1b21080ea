"""A/A calibration: how often verdicts find a difference between an arm and itself, and how often a real one.

    python -m benchmarks.rates aa [--replicates 200] [--out docs/benchmarks/aa]

Each comparison trains fp32 under two names, five runs each, every run in a process of its own, in random order inside a
pair, by the launcher and the verdicts that `compare` uses. With equal seeds the two would agree to the last bit on a
CPU; so the second name has seeds of its own, the largest noise that a pair can have. Nothing is resampled. Power is by
simulation, of normal noise with the spread that the runs had.
"""

import math
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.results.analysis.effects.step_time import TIME_FLOOR, invalid_time_reason
from ampcompare.results.analysis.inference.effect import (
    Effect,
    least_spread_of_accuracies,
    p_values,
    paired_effect,
)
from ampcompare.results.analysis.inference.sample_size import pairs_needed_by_t_test
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.inference.verdict import Margin, decide_verdicts
from ampcompare.results.records.run import RunRecord
from benchmarks.rates.real_runs import NAMES, comparisons, config_of, own_seed, rename_arm, summarize_pair
from benchmarks.rates.study import Measured, Row, Study, Table, count_verdicts

PAIRS = 5
TERMS = Terms(margin=0.5)
RECIPE = {
    "data": {"name": "digits"},
    "model": {"arch": "mlp"},
    "optimizer": {"lr": 0.05},
    "epochs": 3,
    "batch_size": 64,
    "max_steps": 55,
}
SIMULATIONS = 4000
REASONS = ("load", "of a core", "outliers", "data", "clock", "timed steps")


def _comparison(launcher: ForkedLauncher, folder: Path, number: int) -> list[RunRecord]:
    records = []
    for seed in range(number * PAIRS, (number + 1) * PAIRS):
        recipe = {**RECIPE, "seed": seed}
        order = [0, 1]
        random.Random(seed).shuffle(order)
        for place in order:
            record = launcher.launch(config_of((recipe, own_seed(recipe))[place]), folder)
            if record.status != "completed":
                raise SystemExit(f"a run of seed {seed} {record.status}: {record.error}")
            records.append(rename_arm(record, NAMES[place], recipe))
    return records


def _pairs(records: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, RunRecord]]:
    by_seed: dict[int, dict[str, RunRecord]] = {}
    for record in records:
        by_seed.setdefault(record.config.recipe.seed, {})[record.arm] = record
    yield from ((pair[NAMES[1]], pair[NAMES[0]]) for pair in by_seed.values())


def _seconds(record: RunRecord) -> float:
    return record.summary.step_seconds_median or math.nan


def _effect_without_gate(records: Sequence[RunRecord]) -> Effect:
    """Return the effect on time that there would be without the gate of validity."""
    pairs = list(_pairs(records))
    return paired_effect(
        [-math.log(_seconds(arm)) for arm, _ in pairs],
        [-math.log(_seconds(other)) for _, other in pairs],
        TIME_FLOOR,
    )


def _without_load(record: RunRecord) -> RunRecord:
    """Forget the load average, so that the gate goes by what was seen of the run itself."""
    assert record.readings is not None
    return record.model_copy(update={"readings": record.readings.model_copy(update={"load_average": None})})


def _facts(records: Sequence[RunRecord]) -> dict[str, Any]:
    row = summarize_pair(records, terms=TERMS)
    effect = _effect_without_gate(records)
    pairs = list(_pairs(records))
    without_load = [_without_load(record) for record in records]
    return {
        "accuracy": str(row.quality),
        "time": str(row.time),
        "time_without_load": str(summarize_pair(without_load, terms=TERMS).time),
        "time_without_gate": str(decide_verdicts([effect], TERMS.log_time_margin())[0]),
        "time_p_without_gate": p_values(effect, TERMS.log_time_margin().size).different,
        "points": [100 * ((a.summary.metric_final or 0) - (b.summary.metric_final or 0)) for a, b in pairs],
        "log_ratios": [math.log(_seconds(a) / _seconds(b)) for a, b in pairs],
        "valid": [not (invalid_time_reason(a) or invalid_time_reason(b)) for a, b in pairs],
    }


def _rate(what: str, words: Sequence[str]) -> Row:
    """Return the row of one kind of verdict: how often a winner or loser was named."""
    valid = [word for word in words if not word.startswith("invalid")]
    row = {"verdict on": what, "comparisons": str(len(words)), "valid": str(len(valid))}
    if not valid:
        return {
            **row,
            "better or worse": "-",
            "95 % interval": "-",
            "at most 5 %": "-",
            "all verdicts": "all invalid",
        }
    called = count_verdicts(valid)
    test = binomtest(int(called["better or worse"].split()[0]), len(valid), 0.05, alternative="greater")
    return {
        **row,
        "better or worse": called["better or worse"],
        "95 % interval": called["95 % interval"],
        "at most 5 %": "yes" if test.pvalue > 0.05 else "NO",
        "all verdicts": count_verdicts(words)["all verdicts"],
    }


def _share_worse(spread: float, shift: float, pairs: int, floor: float, margin: Margin) -> float:
    """Return how often simulated pairs with a true difference of `shift` are called worse."""
    generator = np.random.default_rng(0)
    samples = generator.normal(shift, spread, (SIMULATIONS, pairs))
    verdicts = (
        decide_verdicts([paired_effect(list(row), [0.0] * pairs, floor)], margin)[0] for row in samples
    )
    return sum(str(verdict) == "worse" for verdict in verdicts) / SIMULATIONS


def _power(points: float, log_ratio: float) -> Iterator[Row]:
    floor = 100 * least_spread_of_accuracies(360)
    cases = [
        *(
            (f"{worse:g} points worse", worse, points, floor, Margin(0.5, "0.5"))
            for worse in (1.0, 2.0, 3.0, 5.0)
        ),
        *(
            (
                f"{100 * slower:.0f} % slower",
                math.log1p(slower),
                log_ratio,
                TIME_FLOOR,
                TERMS.log_time_margin(),
            )
            for slower in (0.05, 0.10, 0.20)
        ),
    ]
    for difference, size, spread, least, margin in cases:
        pairs = max(3, pairs_needed_by_t_test(max(spread, least), size, 0.025))
        yield {
            "true difference": difference,
            "spread": f"{spread:.2f} points" if spread is points else f"{100 * spread:.1f} %",
            "pairs promised": str(pairs),
            "found": f"{100 * _share_worse(spread, -size, pairs, least, margin):.0f} %",
        }


def report(results: Sequence[Mapping[str, Any]]) -> Measured:
    """Return tables and sentences on the facts of comparisons."""
    points = statistics.stdev(value for result in results for value in result["points"])
    every = [
        pair for result in results for pair in zip(result["log_ratios"], result["valid"], strict=True)
    ]  # fmt: skip
    valid = [value for value, fit in every if fit]
    is_enough = len(valid) > 20
    log_ratio = statistics.stdev(valid if is_enough else [value for value, _ in every])
    kinds = {
        "accuracy": "accuracy",
        "time, with the gate": "time",
        "time, the load average left out of the gate": "time_without_load",
        "time, were there no gate": "time_without_gate",
    }
    plain = sum(result["time_p_without_gate"] < 0.05 for result in results)
    reasons = Counter(_reason(result["time"]) for result in results if result["time"].startswith("invalid"))
    notes = [
        f"Invalid because of: {', '.join(f'{why} {count}' for why, count in reasons.most_common()) or 'nothing'}. "
        f"Valid pairs: {len(valid)} of {len(every)}. Without gate and practical margin, p < 0.05 in {plain} "
        f"({100 * plain / len(results):.1f} %).",
        f"Spread of a pair's difference: {points:.2f} points; step time {100 * log_ratio:.2f} % "
        f"({'valid pairs' if is_enough else 'all pairs, too few being valid'}).",
    ]
    rates = [_rate(what, [result[key] for result in results]) for what, key in kinds.items()]
    tables = {"rates": rates, "power": list(_power(points, log_ratio))}
    return tables, {"notes": notes, "results": list(results)}


def _reason(verdict: str) -> str:
    """Return the kind of a reason, without the value that was read."""
    return next((kind for kind in REASONS if kind in verdict), verdict)


def _measure(count: int) -> Measured:
    with ForkedLauncher() as launcher, tempfile.TemporaryDirectory() as folder:
        its = comparisons("A/A", count, lambda number: _comparison(launcher, Path(folder) / "cell", number))
    return report([_facts(records) for records in its])


STUDY = Study(
    title="A/A calibration",
    about=__doc__,
    tables=(
        Table("rates", (), _rate),
        Table(
            "power",
            (),
            _rate,
            about="Pairs that are promised to find a difference four times in five, and how often simulated ones do.",
        ),
    ),
    replicates=200,
    measure=_measure,
)
