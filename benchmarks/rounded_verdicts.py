"""Error rates of verdicts on metrics that are printed with few digits, or that count few samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.inference.verdict import decide
from ampcompare.runs.analysis.tables.csv_table import read_table
from ampcompare.runs.analysis.tables.external import judge
from ampcompare.runs.analysis.verdicts.accuracy import accuracy_effect, accuracy_margin
from ampcompare.runs.records.evaluation import EpochResult
from ampcompare.runs.records.metric import metrics_of
from ampcompare.runs.records.run import RunRecord, RunSummary, ScriptFacts
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.recipe import Recipe
from ampcompare.runs.settings.script import ScriptConfig, ScriptMetric

__all__ = ["rounded_rows"]

BASE = 0.76  # true value of all arms
SD = 0.006  # of one run, for power
SHIFT = 0.03  # of the arms that are worse, five times SD
SPREADS = (0.25, 0.4, 0.6, 1.0, 2.0)  # of one run, in steps; more is no longer coarse
WINNER = ("better", "worse")
KEEPS = ("equivalent", "non-inferior", "better")
SCRIPT = ScriptConfig(name="train.py", metrics=(ScriptMetric(name="acc", pattern="acc ([0-9.]+)"),))
(METRIC,) = metrics_of(SCRIPT)


@dataclass(frozen=True)
class Scenario:
    """How values come to be coarse.

    Attributes:
        kind: of rounding, for the table.
        step: between neighboring values.
        digits: that are printed.
        drawn: values that are counts are drawn sample by sample, whatever the spread.
    """

    kind: str
    step: float
    digits: int
    drawn: bool = False


SCENARIOS = (
    Scenario("2 digits", 1e-2, 2),
    Scenario("3 digits", 1e-3, 3),
    Scenario("4 digits", 1e-4, 4),
    Scenario("50 images", 1 / 50, 4, drawn=True),
    Scenario("360 images", 1 / 360, 4, drawn=True),
    Scenario("1000 images", 1 / 1000, 4, drawn=True),
)
SIZES = ((3, 2), (5, 2), (3, 9), (5, 9))  # seeds, and arms with the reference


def rounded_rows(replicates: int) -> list[dict[str, str]]:
    """Return a line for each procedure, rounding, number of seeds and of arms."""
    return [
        _row(name, case, seeds, arms, replicates) for name in PROCEDURES for case in SCENARIOS for seeds, arms in SIZES
    ]


def _row(name: str, case: Scenario, seeds: int, arms: int, replicates: int) -> dict[str, str]:
    judged = PROCEDURES[name]
    runs = replicates if arms == 2 else max(100, replicates // 2)
    spreads = [0.0] if case.drawn else [spread * case.step for spread in SPREADS]
    false = {spread: _share(judged, case, seeds, arms, spread, 0.0, WINNER, runs, any) for spread in spreads}
    worst = max(false, key=lambda spread: false[spread])
    margin = 0.02 * BASE if name == "script" else 0.005
    kept = {spread: _share(judged, case, seeds, arms, spread, -margin, KEEPS, runs, any) for spread in spreads}
    fine = Scenario("as it is", 1e-9, 9)
    power = [
        _share(judged, one, seeds, arms, SD, -SHIFT, ("worse",), max(50, runs // 4), np.mean) for one in (case, fine)
    ]
    return {
        "procedure": name,
        "rounded to": case.kind,
        "seeds": f"{seeds}",
        "arms": f"{arms}",
        "A/A: winner or loser %": f"{100 * false[worst]:.1f}",
        "at a spread of": "-" if case.drawn else f"{worst / case.step:g} steps",
        "at the margin: kept %": f"{100 * max(kept.values()):.1f}",
        "power %": "-" if case.drawn else f"{100 * power[0]:.0f}",
        "power unrounded %": "-" if case.drawn else f"{100 * power[1]:.0f}",
        "replicates": f"{runs}",
    }


def _share(
    judged: Callable[..., list[str]],
    case: Scenario,
    seeds: int,
    arms: int,
    spread: float,
    shift: float,
    words: Sequence[str],
    replicates: int,
    of_family: Callable[[list[bool]], Any],
) -> float:
    """Return how often some arm, or an arm, has one of the words."""
    begin = [round(1e6 * spread), seeds, arms, round(-1e5 * shift), len(case.kind), round(1e9 * case.step)]
    generator = np.random.default_rng(begin)
    found = 0.0
    for _ in range(replicates):
        truth = np.full((arms, seeds), BASE)
        truth[1:] += shift
        if case.drawn:
            count = round(1 / case.step)
            values = generator.binomial(count, truth) / count
        else:
            # Where the truth lies between two values matters as much as the spread does.
            values = truth + generator.uniform(0, case.step) + spread * generator.normal(size=truth.shape)
            values = np.round(values / case.step) * case.step
        found += float(of_family([word.startswith(tuple(words)) for word in judged(values, case)]))
    return found / replicates


def _by_script(values: Any, case: Scenario) -> list[str]:
    """Return the verdicts on what a script printed, in one look at 5 %."""
    printed = [[float(f"{value:.{case.digits}f}") for value in its] for its in values]
    rows = [[_record(seed, value, case.digits) for seed, value in enumerate(its)] for its in printed]
    reference, *others = rows
    margin = accuracy_margin(reference, "fp32", Criteria(), METRIC)
    effects = [accuracy_effect(list(zip(arm, reference, strict=True)), margin.error_share) for arm in others]
    return [verdict.word for verdict in decide(effects, margin.of_scores())]


def _record(seed: int, value: float, digits: int) -> RunRecord:
    epoch = EpochResult.model_construct(
        epoch=0, samples=1, values={"acc": value}, counts={}, chance=None, loss=None, ema_values=None, ema_counts={},
        ema_loss=None, train_seconds=1.0, eval_seconds=0.1, per_sample=None,
    )  # fmt: skip
    if seed not in _templates:
        config = RunConfig(arm="fp32", recipe=Recipe(seed=seed), script=SCRIPT)
        _templates[seed] = RunRecord(
            cell=config.digest(), arm="fp32", status="completed", config=config, metrics=[METRIC]
        )
    facts = ScriptFacts.model_construct(
        weights=["w"], batches=["b"], files=[], notes=[], printed={"acc": 10.0**-digits}
    )
    summary = RunSummary.model_construct(metric_final=value, epochs=[epoch], num_steps=10)
    return _templates[seed].model_copy(update={"summary": summary, "script": facts})


_templates: dict[int, RunRecord] = {}


def _by_judge(values: Any, case: Scenario) -> list[str]:
    """Return the verdicts of `judge` on a CSV of accuracies in percent."""
    lines = ["arm,seed,accuracy"]
    for arm, its in enumerate(values):
        lines += [f"{f'arm{arm}' if arm else 'fp32'},{seed},{_percent(value, case)}" for seed, value in enumerate(its)]
    return [row.accuracy_verdict for row in judge(read_table("\n".join(lines), "table")).arms[1:]]


def _percent(value: float, case: Scenario) -> str:
    return f"{100 * value:.{max(0, case.digits - 2)}f}"


PROCEDURES = {"script": _by_script, "judge": _by_judge}
