"""Error rates of verdicts on metrics that are printed with few digits, or that count few samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampcompare.runs.analysis.evidence.accuracy import accuracy_effect, accuracy_margin
from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.inference.verdict import decide
from ampcompare.runs.analysis.results_table import judge, read_table
from ampcompare.runs.records.metric import metrics_of
from ampcompare.runs.records.run import RunRecord, ScriptFacts
from ampcompare.runs.settings.config import RunConfig
from ampcompare.runs.settings.recipe import Recipe
from ampcompare.runs.settings.script import ScriptConfig, ScriptMetric
from benchmarks.rates.stored_run import with_value
from benchmarks.rates.study import KEEPS, WINNER, Row, Table, called

__all__ = ["TABLE"]

BASE = 0.76  # true value of all arms
SD = 0.006  # of one run, for power
SHIFT = 0.03  # of the arms that are worse, five times SD
SPREADS = (0.25, 0.4, 0.6, 1.0, 2.0)  # of one run, in steps; more is no longer coarse
SCRIPT = ScriptConfig(name="train.py", metrics=(ScriptMetric(name="acc", pattern="acc ([0-9.]+)"),))
(METRIC,) = metrics_of(SCRIPT)
Floats = NDArray[np.float64]


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
FINE = Scenario("as it is", 1e-9, 9)
SIZES = ((3, 2), (5, 2), (3, 9), (5, 9))  # seeds, and arms with the reference


def _row(cell: tuple[str, Scenario, int, int], replicates: int) -> Row:
    name, case, seeds, arms = cell
    judged = functools.partial(_share, PROCEDURES[name], seeds=seeds, arms=arms)
    runs = replicates if arms == 2 else max(100, replicates // 2)
    spreads = [0.0] if case.drawn else [spread * case.step for spread in SPREADS]
    false = {spread: judged(case, spread, 0.0, WINNER, runs, any) for spread in spreads}
    worst = max(false, key=lambda spread: false[spread])
    margin = 0.02 * BASE if name == "script" else 0.005
    kept = [judged(case, spread, -margin, KEEPS, runs, any) for spread in spreads]
    power = [judged(one, SD, -SHIFT, ("worse",), max(50, runs // 4), np.mean) for one in (case, FINE)]
    return {
        "procedure": name,
        "rounded to": case.kind,
        "seeds": f"{seeds}",
        "arms": f"{arms}",
        "A/A: winner or loser %": f"{100 * false[worst]:.1f}",
        "at a spread of": "-" if case.drawn else f"{worst / case.step:g} steps",
        "at the margin: kept %": f"{100 * max(kept):.1f}",
        "power %": "-" if case.drawn else f"{100 * power[0]:.0f}",
        "power unrounded %": "-" if case.drawn else f"{100 * power[1]:.0f}",
        "replicates": f"{runs}",
    }


def _share(
    judged: Callable[[Floats, Scenario], list[str]],
    case: Scenario,
    spread: float,
    shift: float,
    words: Sequence[str],
    replicates: int,
    of_family: Callable[[list[bool]], Any],
    *,
    seeds: int,
    arms: int,
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
        found += float(of_family(called(judged(values, case), words)))
    return found / replicates


def _by_script(values: Floats, case: Scenario) -> list[str]:
    """Return the verdicts on what a script printed, in one look at 5 %."""
    printed = [[float(f"{value:.{case.digits}f}") for value in its] for its in values]
    reference, *others = ([_record(seed, value, case.digits) for seed, value in enumerate(its)] for its in printed)
    margin = accuracy_margin(reference, "fp32", Criteria(), METRIC)
    effects = [accuracy_effect(list(zip(arm, reference, strict=True)), margin.error_share) for arm in others]
    return [str(verdict) for verdict in decide(effects, margin.of_scores())]


def _record(seed: int, value: float, digits: int) -> RunRecord:
    facts = ScriptFacts.model_construct(
        weights=["w"], batches=["b"], files=[], notes=[], printed={"acc": 10.0**-digits}
    )
    return with_value(_template(seed), "acc", value, 1).model_copy(update={"script": facts})


@functools.cache
def _template(seed: int) -> RunRecord:
    config = RunConfig(arm="fp32", recipe=Recipe(seed=seed), script=SCRIPT)
    return RunRecord(cell=config.digest(), arm="fp32", status="completed", config=config, metrics=[METRIC])


def _by_judge(values: Floats, case: Scenario) -> list[str]:
    """Return the verdicts of `judge` on a CSV of accuracies in percent."""
    lines = ["arm,seed,accuracy"]
    for arm, its in enumerate(values):
        name = f"arm{arm}" if arm else "fp32"
        lines += [f"{name},{seed},{100 * value:.{max(0, case.digits - 2)}f}" for seed, value in enumerate(its)]
    return [str(row.quality) for row in judge(read_table("\n".join(lines))).arms[1:]]


PROCEDURES = {"script": _by_script, "judge": _by_judge}
TABLE = Table(
    "rounded",
    [(name, case, seeds, arms) for name in PROCEDURES for case in SCENARIOS for seeds, arms in SIZES],
    _row,
    by=("procedure", "rounded to"),
    only_json=("at a spread of", "replicates"),
)
