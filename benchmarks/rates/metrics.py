"""Error rates of verdicts on metrics that are no counts, through the function that sums up every comparison."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord, RunSummary
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe
from benchmarks.rates.study import KEEPS, WINNER, Row, Table, percent, total

BITS = Metric(name="bits per byte", better="lower", decimals=4, difference="log ratio", margin=0.01)
RMSE = Metric(name="RMSE", better="lower", decimals=4, margin=0.02)
IOU = Metric(name="mean IoU", unit="%", factor=100.0, margin=1.0, highest=1.0)
ARMS = ("fp32", "half")


@dataclass(frozen=True)
class Scenario:
    """A metric whose runs scatter around one value.

    Attributes:
        base: true value of the reference, as it is stored.
        shared: standard deviation of what both runs of a seed have in common, relative to the value.
        own: that of what each run has for itself; of the difference it is sqrt(2) times that.
        at_margin: true value of an arm that is worse by the margin.
    """

    metric: Metric
    base: float
    shared: float
    own: float
    at_margin: float


SCENARIOS = (
    Scenario(BITS, 2.1, 0.01, 0.008, 2.1 * 1.01),
    Scenario(RMSE, 0.6, 0.01, 0.02, 0.62),
    Scenario(IOU, 0.74, 0.006, 0.01, 0.73),
)


def _row(cell: tuple[Scenario, int], replicates: int) -> Row:
    case, seeds = cell
    equal, worse = (_simulate(case, seeds, truth, replicates) for truth in (case.base, case.at_margin))
    metric = case.metric
    margin = metric.margin if metric.difference == "points" else 100 * (metric.margin or 0)
    return {
        "metric": metric.name,
        "better": metric.better,
        "difference": metric.difference,
        "value": metric.value_text(case.base),
        "margin": f"±{margin:g} {metric.difference_unit}".rstrip(),
        "seeds": f"{seeds}",
        "A/A: winner or loser %": percent(equal["winner"], replicates),
        "at the margin: kept %": percent(worse["keeps"], replicates),
        "printed covers %": percent(equal["covers"], replicates),
        "A/A: shown to keep %": percent(equal["keeps"], replicates),
        "replicates": f"{replicates}",
    }


def _simulate(case: Scenario, seeds: int, truth: float, replicates: int) -> Counter[str]:
    generator = np.random.default_rng([seeds, len(case.metric.name), round(1e4 * truth)])
    templates = [[_template(arm, seed, case.metric) for seed in range(seeds)] for arm in ARMS]
    difference = case.metric.difference_from_reference(truth, case.base)

    def trial() -> dict[str, float]:
        shared = case.shared * generator.normal(size=seeds)
        values = np.array([[case.base], [truth]]) * (
            1 + shared + case.own * generator.normal(size=(2, seeds))
        )
        records = [
            _with_value(run, case.metric.name, value, f"{run.arm} {number}")
            for runs, its in zip(templates, values.tolist(), strict=True)
            for number, (run, value) in enumerate(zip(runs, its, strict=True))
        ]
        row = summarize(records, arms=ARMS, reference=ARMS[0]).arms[1]
        low, high = row.quality.low, row.quality.high
        return {
            "winner": str(row.quality).startswith(WINNER),
            "keeps": str(row.quality).startswith(KEEPS),
            "covers": low is not None and high is not None and low <= difference <= high,
        }

    return total(replicates, trial)


def _template(arm: str, seed: int, metric: Metric) -> RunRecord:
    config = RunConfig(arm=arm, recipe=Recipe(seed=seed))
    return RunRecord(cell=config.digest(), arm=arm, status="completed", config=config, metrics=[metric])


def _with_value(run: RunRecord, name: str, value: float, losses: str) -> RunRecord:
    """Return the run with a final value; nothing is validated, as a study makes millions of these."""
    epoch = EpochResult.model_construct(
        epoch=0, samples=500, values={name: value}, counts={}, chance=None, loss=None, ema_values=None,
        ema_counts={}, ema_loss=None, train_seconds=1.0, eval_seconds=0.1, per_sample=None,
    )  # fmt: skip
    summary = RunSummary.model_construct(
        metric_final=value, epochs=[epoch], num_steps=10, losses_sha256=losses
    )
    return run.model_copy(update={"summary": summary})


TABLE = Table(
    "metrics",
    [(case, seeds) for case in SCENARIOS for seeds in (3, 5, 8)],
    _row,
    by=("metric",),
    only_json=("better", "value", "replicates"),
)
