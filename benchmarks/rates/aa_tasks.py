"""A/A calibration of metrics that are not counts: how often verdicts find a difference between an arm and itself.

    python -m benchmarks.rates aa_tasks [--replicates 100] [--out docs/benchmarks/aa_tasks]

Each comparison trains fp32 under two names, three pairs, on small versions of the tasks `lm` and `segmentation`. The
second name has seeds of its own, which is the largest noise that a pair can have. Nothing is resampled: every
comparison has runs of its own. Margins are those that the tasks bring.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.rates.real_runs import RECIPES, comparisons, judged, of_pair
from benchmarks.rates.study import Measured, Row, Study, Table, counted

__all__ = ["STUDY"]

PAIRS = 3


def _row(task: str, count: int, finals: list[list[float]]) -> Row:
    results = comparisons(task, count, lambda number: of_pair(RECIPES[task], number, PAIRS))
    finals += [[record.summary.metric_final or 0.0 for record in records] for records in results]
    differences = [b - a for values in finals for a, b in zip(values[::2], values[1::2], strict=True)]
    metric = results[0][0].metric
    return {
        "task": task,
        "metric": metric.name,
        "mean": metric.shown(statistics.fmean(value for values in finals for value in values)),
        "sd of a pair": f"{metric.factor * statistics.stdev(differences):.3g}",
        "comparisons": str(count),
        **counted([str(judged(records).quality) for records in results]),
    }


def _measure(count: int) -> Measured:
    finals: dict[str, list[list[float]]] = {task: [] for task in RECIPES}
    rows = [_row(task, count, finals[task]) for task in RECIPES]
    more: dict[str, Any] = {"finals": finals}
    return {"tasks": rows}, more


STUDY = Study(
    title="A/A calibration of tasks",
    about=__doc__,
    tables=(Table("tasks", (), _row),),
    replicates=100,
    measure=_measure,
)
