"""Several experiments side by side: the effect of each arm in each of them, and over all of them.

Experiments count alike (a random-effects model with equal weights). Weights by the inverse of each experiment's
variance, as DerSimonian-Laird and Paule-Mandel use them, suppose that the variances are known. Here each comes from
three to ten pairs: the experiment that happens to scatter least gets nearly all weight. In simulations of 3 to 10
experiments of 3 to 10 pairs, intervals of 95 % by DerSimonian-Laird with the normal quantile cover 78 to 94 %, by
either method with Hartung and Knapp's correction 87 to 95 %. With equal weights the correction is Student's t on the
experiments' own differences, which covers 95 to 98 % (docs/benchmarks/pooled_effects.md).

Sources: Hartung and Knapp 2001 (variance and t quantile); Hedges and Olkin 1985 (the variance between experiments as
that of the differences less the mean of their own); Higgins, Thompson and Spiegelhalter 2009 (prediction).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ampcompare.base.errors import ConfigError
from ampcompare.runs.analysis.answer.headline import headline
from ampcompare.runs.analysis.evidence.accuracy import accuracy_effect
from ampcompare.runs.analysis.evidence.step_time import TIME_FLOOR, ratio_of, step_times
from ampcompare.runs.analysis.inference.effect import ERROR_RATE, MIN_PAIRS, Effect, interval, paired
from ampcompare.runs.analysis.inference.verdict import Margin, decide
from ampcompare.runs.analysis.runs.pairs import Pair, pairs_by_seed
from ampcompare.runs.analysis.runs.scores import has_score, metric_of, spread_floor, step_of, step_of_scores
from ampcompare.runs.records.comparison import ArmSummary, Comparison
from ampcompare.runs.records.document import SCHEMA, FrozenRecord
from ampcompare.runs.records.metric import TOP1, Metric

__all__ = ["Experiment", "ExperimentEffect", "Forest", "Measure", "PooledEffect", "make_forest", "pool"]

MAX_NAMED = 3
Measure = Literal["accuracy", "time"]
Shown = Callable[[float], float]  # an effect as reports show it


class Experiment(FrozenRecord):
    """One run directory, or several of equal settings."""

    name: str
    model: str
    data: str
    seeds: list[int]


class ExperimentEffect(FrozenRecord):
    """An arm against the reference in one experiment: a difference of the metric, or a ratio of step times."""

    arm: str
    measure: Measure
    experiment: str
    pairs: int = 0
    value: float | None = None
    low: float | None = Field(None, description="of the interval of 95 % of this effect alone")
    high: float | None = None
    left_out: str = Field("", description="why the effect is not among the pooled ones; empty if it is")


class PooledEffect(FrozenRecord):
    """An arm against the reference over all experiments that could test it, each of equal weight."""

    arm: str
    measure: Measure
    experiments: int
    value: float
    low: float | None = Field(None, description="of the interval of the test behind `verdict`")
    high: float | None = None
    confidence: float | None = Field(None, description="two-sided, of that interval")
    prediction_low: float | None = Field(None, description="of what another experiment would measure, at 95 %")
    prediction_high: float | None = None
    tau: float = Field(description="standard deviation between experiments; of the logarithm for ratios of times")
    i_squared: float = Field(description="share of the variance of the effects that is between experiments")
    verdict: str = ""


class Forest(FrozenRecord):
    """All effects, and the terms that the verdicts go by."""

    schema_number: int = Field(SCHEMA, alias="schema")
    reference: str
    metric: Metric = Field(TOP1, description="that the accuracy is measured by")
    margin: float = Field(description="equivalence margin of the metric, in the unit of shown differences")
    time_margin: float = Field(description="share of the step time that does not matter")
    headline: list[str] = Field([], description="the answer, one sentence each, the most important first; plain text")
    experiments: list[Experiment]
    effects: list[ExperimentEffect]
    pooled: list[PooledEffect]
    notes: list[str] = Field([], description="what a reader should know of how they were pooled")


@dataclass(frozen=True)
class _Measured:
    """One arm in one experiment.

    Attributes:
        effect: positive where the arm is better; None where it was not measured.
        floor: smallest plausible standard deviation of such effects.
        left_out: why it is not pooled, "" if it is.
    """

    arm: str
    experiment: str
    effect: Effect | None
    floor: float
    left_out: str


def make_forest(experiments: Sequence[tuple[str, Comparison]]) -> Forest:
    """Pool the effects of every arm over experiments of different settings, each with a name.

    An arm of an experiment is pooled where its own comparison could test it.

    Raises:
        ConfigError: the reference is not the same in all of them.
    """
    first_name, first = experiments[0]
    for name, comparison in experiments:
        if comparison.reference != first.reference:
            raise ConfigError(
                f"the reference of {first_name} is {first.reference} and that of {name} is {comparison.reference}; "
                "effects against different references cannot be pooled"
            )
    metric = _one_metric(experiments)
    margins = sorted({comparison.margin for _, comparison in experiments})
    time_margins = sorted({comparison.time_margin for _, comparison in experiments})
    accuracy = Margin(metric.score_margin(margins[0]), metric.margin_text(margins[0]))
    time = Margin(math.log1p(time_margins[0]), f"{100 * time_margins[0]:g} %", practical=True)
    notes = []
    if len(margins) > 1 or len(time_margins) > 1:
        notes.append("The experiments have different margins; the smallest ones are used here.")
    effects: list[ExperimentEffect] = []
    pooled: list[PooledEffect] = []
    measures: list[tuple[Measure, Margin]] = [("accuracy", accuracy), ("time", time)]
    for measure, margin in measures:
        measured = _measured(experiments, measure)
        shown = metric.difference_of if measure == "accuracy" else _ratio_of_times
        effects += [_effect(one, measure, shown) for one in measured]
        pooled += _pooled(measured, measure, margin, shown)
    forest = Forest(
        reference=first.reference,
        metric=metric,
        margin=margins[0],
        time_margin=time_margins[0],
        experiments=[_facts(name, comparison) for name, comparison in experiments],
        effects=effects,
        pooled=pooled,
        notes=notes,
    )
    return forest.model_copy(update={"headline": _headline(forest)})


def _one_metric(experiments: Sequence[tuple[str, Comparison]]) -> Metric:
    """Return the metric of all experiments.

    Raises:
        ConfigError: they have several.
    """
    first_name, first = experiments[0]
    for name, comparison in experiments:
        if (comparison.metric.name, comparison.metric.difference) != (first.metric.name, first.metric.difference):
            raise ConfigError(
                f"{first_name} is measured by {first.metric.name} and {name} by {comparison.metric.name}; effects on "
                "different metrics cannot be pooled"
            )
    return first.metric


def _headline(forest: Forest) -> list[str]:
    """Return the answer over all experiments, and which of them are not in it."""
    names = list(dict.fromkeys(effect.arm for effect in forest.effects))
    pooled = {(effect.arm, effect.measure): effect for effect in forest.pooled}
    rows = [_pooled_row(arm, pooled.get((arm, "accuracy")), pooled.get((arm, "time"))) for arm in names]
    table = Comparison(
        command="",
        reference=forest.reference,
        seeds=[],
        metric=forest.metric,
        margin=forest.margin,
        time_margin=forest.time_margin,
        arms=[_pooled_row(forest.reference, None, None).model_copy(update={"completed": 1}), *rows],
        reading=[],
        records=[],
    )
    lost = [effect for effect in forest.effects if effect.measure == "accuracy" and effect.left_out]
    parts = [f"{effect.arm} in {effect.experiment} ({effect.left_out})" for effect in lost[:MAX_NAMED]]
    more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
    left_out = [f"Not in these means: {', '.join(parts)}{more}."] if parts else []
    return [*headline(table), *left_out]


def _pooled_row(arm: str, accuracy: PooledEffect | None, time: PooledEffect | None) -> ArmSummary:
    return ArmSummary(
        arm=arm,
        engine=None,
        half=None,
        lr=math.nan,
        seeds=[],
        completed=accuracy.experiments if accuracy else 0,
        diverged=0,
        failed=0,
        pairs=accuracy.experiments if accuracy else 0,
        metric_difference=accuracy.value if accuracy else None,
        metric_difference_low=accuracy.low if accuracy else None,
        metric_difference_high=accuracy.high if accuracy else None,
        accuracy_verdict=_pooled_word(accuracy) if accuracy else "",
        time_ratio=time.value if time else None,
        time_ratio_low=time.low if time else None,
        time_ratio_high=time.high if time else None,
        time_verdict=time.verdict if time else "",
    )


def _pooled_word(effect: PooledEffect) -> str:
    few = effect.verdict == "inconclusive" and effect.low is None
    return f"inconclusive (fewer than {MIN_PAIRS} experiments)" if few else effect.verdict


def _facts(name: str, comparison: Comparison) -> Experiment:
    recipe = comparison.records[0].config.recipe
    return Experiment(name=name, model=recipe.model.arch, data=recipe.data.name, seeds=comparison.seeds)


def _measured(experiments: Sequence[tuple[str, Comparison]], measure: Measure) -> list[_Measured]:
    """Return all arms of all experiments, experiments of one arm together, arms as they first come."""
    arms = list(dict.fromkeys(row.arm for _, comparison in experiments for row in comparison.arms))
    rows = {(name, row.arm): row for name, comparison in experiments for row in comparison.arms}
    measured = []
    for arm in arms:
        for name, comparison in experiments:
            row = rows.get((name, arm))
            if row is not None and arm != comparison.reference:
                measured.append(_of_row(row, name, comparison, measure))
    return measured


def _of_row(row: ArmSummary, name: str, comparison: Comparison, measure: Measure) -> _Measured:
    records = comparison.records
    theirs = [record for record in records if record.arm == comparison.reference]
    pairs = pairs_by_seed([record for record in records if record.arm == row.arm], theirs)
    if measure == "accuracy":
        effect, verdict, tested = accuracy_effect(pairs), row.accuracy_verdict, row.metric_difference_low is not None
        floor = _resolution(pairs)
    else:
        effect, verdict, tested = step_times(pairs).effect, row.time_verdict, row.time_ratio_low is not None
        floor = TIME_FLOOR
    reason = "" if tested or verdict.startswith("identical") else _reason(effect, verdict)
    return _Measured(row.arm, name, effect, floor, reason)


def _reason(effect: Effect | None, verdict: str) -> str:
    if effect is not None and not effect.testable:
        return f"only {effect.pairs} seed{'s' if effect.pairs > 1 else ''}"
    return verdict or "not measured"


def _resolution(pairs: Sequence[Pair]) -> float:
    """Return the error of the mean difference that the rounding of the metric leaves."""
    evaluated = [arm for arm, _ in pairs if arm.summary.epochs]
    if not evaluated:
        return 1.0
    metric = metric_of(evaluated)
    finals = [value for arm in evaluated if has_score(value := arm.summary.metric_final, metric)]
    samples = max(arm.summary.epochs[-1].samples for arm in evaluated)
    step = step_of_scores(step_of(evaluated), metric, finals)
    return spread_floor(metric, samples, list(map(metric.score, finals)), step) / math.sqrt(len(evaluated))


def _ratio_of_times(effect: float) -> float:
    """Return an effect on the time as reports show it: a ratio, which is smaller where the arm is better."""
    return ratio_of(-effect)


def _interval(bounds: tuple[float, float] | None, shown: Shown) -> tuple[float | None, float | None]:
    if bounds is None:
        return None, None
    low, high = sorted(map(shown, bounds))
    return low, high


def _effect(one: _Measured, measure: Measure, shown: Shown) -> ExperimentEffect:
    low, high = _interval(interval(one.effect) if one.effect else None, shown)
    return ExperimentEffect(
        arm=one.arm,
        measure=measure,
        experiment=one.experiment,
        pairs=one.effect.pairs if one.effect else 0,
        value=shown(one.effect.mean) if one.effect else None,
        low=low,
        high=high,
        left_out=one.left_out,
    )


def _pooled(measured: Sequence[_Measured], measure: Measure, margin: Margin, shown: Shown) -> list[PooledEffect]:
    by_arm: dict[str, list[_Measured]] = {}
    for one in measured:
        if not one.left_out and one.effect is not None:
            by_arm.setdefault(one.arm, []).append(one)
    over_all = {
        arm: pool([one.effect for one in known if one.effect], min(one.floor for one in known))
        for arm, known in by_arm.items()
    }
    verdicts = decide([pooled.effect for pooled in over_all.values()], margin)
    found = []
    for (arm, pooled), verdict in zip(over_all.items(), verdicts, strict=True):
        bounds = None if verdict.low is None or verdict.high is None else (verdict.low, verdict.high)
        low, high = _interval(bounds, shown)
        prediction_low, prediction_high = _interval(pooled.prediction, shown)
        found.append(
            PooledEffect(
                arm=arm,
                measure=measure,
                experiments=pooled.effect.pairs,
                value=shown(pooled.effect.mean),
                low=low,
                high=high,
                confidence=verdict.confidence,
                prediction_low=prediction_low,
                prediction_high=prediction_high,
                tau=pooled.tau,
                i_squared=pooled.i_squared,
                # The number of further experiments needed would be meaningless: experiments are chosen, not sampled.
                verdict="inconclusive" if verdict.word.startswith("inconclusive") else verdict.word,
            )
        )
    return found


@dataclass(frozen=True)
class _Pooled:
    """The mean effect over experiments.

    Attributes:
        effect: whose pairs are the experiments.
        prediction: interval that the measured effect of another such experiment lies in at 95 %; None for fewer than
            three experiments.
        tau: standard deviation between experiments beyond what their own errors explain.
        i_squared: share of the variance of their effects that is between them.
    """

    effect: Effect
    prediction: tuple[float, float] | None
    tau: float
    i_squared: float


def pool(effects: Sequence[Effect], floor: float) -> _Pooled:
    """Pool the effects of at least one experiment.

    Args:
        floor: least standard deviation between effects, above 0, from the resolution of what was measured.
    """
    means = [effect.mean for effect in effects]
    whole = paired(means, [0.0] * len(means), floor)
    within = statistics.fmean(effect.error**2 for effect in effects)
    between = max(0.0, statistics.variance(means) - within) if len(means) > 1 else 0.0
    return _Pooled(whole, _prediction(whole), math.sqrt(between), between / (between + within))


def _prediction(whole: Effect) -> tuple[float, float] | None:
    """Return the interval of one more effect of the same spread, by Student's t."""
    if whole.pairs < MIN_PAIRS:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(whole.freedom, 1 - ERROR_RATE / 2)) * whole.spread * math.sqrt(1 + 1 / whole.pairs)
    return whole.mean - half, whole.mean + half
