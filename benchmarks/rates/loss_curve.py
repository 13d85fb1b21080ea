"""Error rates of the verdicts on the training loss over the last fifth of the steps.

    python -m benchmarks.rates loss_curve [--part simulated] [--replicates 4000] [--out docs/benchmarks/loss_curve]

Simulated curves fall as a power of the step, over 500 steps. Their logarithm has noise of the batches, which both runs
of a seed share; of a run's own path, autocorrelated (AR(1) with `phi`); and what a run as a whole is off by: `own` is
its standard deviation in percent. Arms share the reference. Columns: equal arms called better or worse; the same if
steps were taken for independent samples; arms worse by the margin of 1 % said to keep the loss; equal arms shown to
keep it; arms 2 % worse called worse.

`real runs` train fp32 under two names on a small language model (--replicates 60). In `A/A` the second name has seeds
of its own; in `planted` it has the same seeds and 0.9 of the learning rate.
"""

import math
import statistics
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.stats import ttest_1samp

from ampcompare.results.analysis.effects.loss_tail import tail_loss_evidence_of_pairs
from ampcompare.results.analysis.inference.effect import ERROR_RATE
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.inference.verdict import decide_verdicts
from ampcompare.results.records.run import RunRecord, loss_tail_summary_fields
from ampcompare.settings.config import RunConfig
from benchmarks.rates.real_runs import SMALL_LM, Recipe, comparisons, of_pair, own_seed, summarize_pair
from benchmarks.rates.study import (
    KEEPS,
    WINNER,
    Row,
    Study,
    Table,
    begin_with,
    count_verdicts,
    percent,
    total,
)

STEPS = 500
MARGIN = 0.01
PLANTED = 0.02
SLOWER = 0.9
PAIRS = 3
BATCH, PATH = 0.05, 0.02  # standard deviations of the logarithm
TEMPLATE = RunRecord(cell="0", arm="fp32", status="completed", config=RunConfig())
Curves = NDArray[np.float64]


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        seeds: pairs.
        arms: without the reference.
        phi: of the noise of a path, from step to step.
        own: standard deviation of what a run is off by, in percent.
    """

    seeds: int
    arms: int = 1
    phi: float = 0.95
    own: float = 0.5


SCENARIOS = [
    *(Scenario(seeds, own=own) for own in (0.1, 0.5, 1.0) for seeds in (3, 5, 10)),
    *(Scenario(seeds, phi=0.99) for seeds in (3, 5)),
    *(Scenario(seeds, arms=8) for seeds in (3, 5)),
]


def _curves(case: Scenario, worse: float, generator: np.random.Generator) -> Curves:
    """Return losses (arms + 1, seeds, steps), those of the reference first; arms are worse by a share."""
    shape = (case.arms + 1, case.seeds)
    fall = np.log(1.5 + 3 * np.arange(1, STEPS + 1) ** -0.5)
    batches = BATCH * generator.normal(size=(1, case.seeds, STEPS))
    innovations = math.sqrt(1 - case.phi**2) * PATH * generator.normal(size=(*shape, STEPS))
    innovations[..., 0] /= math.sqrt(1 - case.phi**2)
    paths = lfilter([1], [1, -case.phi], innovations)
    whole = case.own / 100 * generator.normal(size=(*shape, 1))
    logs = fall + batches + paths + whole
    logs[1:] += math.log1p(worse)
    return np.asarray(np.exp(logs))


def _words(curves: Curves) -> list[str]:
    runs = [
        [
            TEMPLATE.model_copy(
                update={
                    "summary": TEMPLATE.summary.model_copy(
                        update={"num_steps": STEPS, **loss_tail_summary_fields(losses)}
                    )
                }
            )
            for losses in arm.tolist()
        ]
        for arm in curves
    ]
    effects = [tail_loss_evidence_of_pairs(list(zip(arm, runs[0], strict=True))).effect for arm in runs[1:]]
    return [str(verdict) for verdict in decide_verdicts(effects, Terms().log_loss_margin(), ERROR_RATE)]


def _by_steps(curves: Curves) -> bool:
    """Return whether a t test over all steps of all seeds, as if independent, finds one of the arms to differ."""
    tail = np.log(curves[..., -(STEPS // 5) :])
    differences = (tail[1:] - tail[0]).reshape(len(curves) - 1, -1)
    return bool((ttest_1samp(differences, 0, axis=1).pvalue < ERROR_RATE / len(differences)).any())


def _simulate(case: Scenario, replicates: int) -> Row:
    generator = np.random.default_rng([case.seeds, case.arms, round(100 * case.phi), round(100 * case.own)])

    def trial() -> dict[str, float]:
        equal = _curves(case, 0.0, generator)
        words = _words(equal)
        return {
            "winner": any(begin_with(words, WINNER)),
            "shown": sum(begin_with(words, KEEPS)),
            "steps": _by_steps(equal),
            "kept": any(begin_with(_words(_curves(case, MARGIN, generator)), KEEPS)),
            "found": sum(begin_with(_words(_curves(case, PLANTED, generator)), ("worse",))),
        }

    counts = total(replicates, trial)
    arms = replicates * case.arms
    return {
        "seeds": str(case.seeds),
        "arms": str(case.arms + 1),
        "phi": f"{case.phi:g}",
        "own %": f"{case.own:g}",
        "A/A: winner or loser %": percent(counts["winner"], replicates),
        "by steps %": percent(counts["steps"], replicates),
        "at the margin: kept %": percent(counts["kept"], replicates),
        "A/A: shown to keep %": percent(counts["shown"], arms),
        "2 % worse: found %": percent(counts["found"], arms),
        "replicates": str(replicates),
    }


def _slower(recipe: Recipe) -> Recipe:
    return {**recipe, "optimizer": {**recipe["optimizer"], "lr": SLOWER * recipe["optimizer"]["lr"]}}


def _real(kind: str, count: int) -> Row:
    other = own_seed if kind == "A/A" else _slower
    results = comparisons(kind, count, lambda number: of_pair(SMALL_LM, number, PAIRS, other))
    rows = [summarize_pair(records) for records in results]
    differences = [100 * (row.loss.effect or 0.0) for row in rows]
    return {
        "runs": kind,
        "comparisons": str(count),
        "seeds": str(PAIRS),
        "mean difference %": f"{statistics.fmean(differences):+.2f}",
        "its sd %": f"{statistics.stdev(differences):.2f}",
        **count_verdicts([str(row.loss) for row in rows]),
    }


STUDY = Study(
    title="Error rates of verdicts on the training loss",
    about=__doc__,
    tables=(
        Table("simulated", SCENARIOS, _simulate, by=("seeds", "arms"), only_json=("replicates",)),
        Table("real runs", ("A/A", "planted"), _real),
    ),
)
