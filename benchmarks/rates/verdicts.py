"""Error rates of the verdicts on accuracy: one look, following the advice, and seeds auto.

    python -m benchmarks.rates verdicts [--replicates 4000] [--part fixed] [--jobs 2] [--out docs/benchmarks/verdicts]

A replicate is a comparison of one reference with some arms, judged by the functions that `compare` uses. `fixed` has
one look; `followed` adds the pairs that "inconclusive (≤N more seeds)" names, at most 100 in all, and looks again until
all arms are clear; `auto` has a pilot of five to ten seeds, and Stein's test. All arms equal the reference (A/A), or
all are worse by the margin; they share the reference. `sd` is that of a pair's difference, in points; `counts` are
rounded to 360 images, `images` drawn image by image, t3 is Student's t with three degrees of freedom; `base` is the
reference's accuracy. Margins such as `10%` or `2sd` come from the runs of each replicate. A family errs where any arm
does.

Columns: A/A with a winner or loser; arms at the margin that are said to keep the accuracy; intervals of a look that
hold together; printed intervals that cover; equal arms that are shown to keep it (power); inconclusive first looks that
are clear after the promised pairs (80 % is the promise).

`metrics`: metrics that are no counts, one look at 5 %, usual margins; the runs of a seed share a part of their scatter.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ampcompare.experiment.compare import pilot_seeds
from ampcompare.results.analysis.inference.alpha_spending import error_rate_of_next_look
from ampcompare.results.analysis.inference.effect import (
    Effect,
    interval_if_testable,
    least_spread_of_accuracies,
    paired_effect,
    two_stage_effect,
)
from ampcompare.results.analysis.inference.sample_size import pairs_needed_by_stein
from ampcompare.results.analysis.inference.terms import (
    QualityMargin,
    parse_margin,
    resolve_margin,
    standard_error_for_relative_margin,
)
from ampcompare.results.analysis.inference.verdict import decide_verdicts
from ampcompare.results.records.comparison import Look
from ampcompare.results.records.verdict import OPEN, Verdict
from benchmarks.rates import metrics
from benchmarks.rates.study import KEEPS, WINNER, Row, Study, Table, begin_with, percent, total

IMAGES = 360
MAX_PAIRS = 100
MAX_LOOKS = 6
MAX_ERROR_SHARE, MAX_POINTS = 0.1, 0.5  # of the rule `auto`
Floats = NDArray[np.float64]
Draw = Callable[[int], Floats]


@dataclass(frozen=True)
class Outcome:
    """One comparison after its last look: words of that look, its effects, and whether its first promise was kept."""

    verdicts: Sequence[Verdict]
    effects: Sequence[Effect]
    rate: float
    kept: bool | None = None


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        seeds: how their number comes about, a key of `PROCEDURES`.
        noise: normal, t3, counts or images.
        sd: of the difference in one pair, in points.
        arms: without the reference.
        first: pairs at the first look.
        looks: planned number of looks; None if open.
        share: of the replicates.
        rule: of the margin, as `--margin` takes it.
        base: true accuracy of the reference, in percent.
    """

    seeds: str
    noise: str = "normal"
    sd: float = 1.0
    arms: int = 1
    first: int = 5
    looks: int | None = None
    share: float = 1.0
    rule: str = "0.5"
    base: float = 94.0

    @property
    def true_margin(self) -> float:
        """Points that the rule gives for the truth."""
        rule = parse_margin(self.rule)
        errors = 100 - self.base
        if rule.kind == "points":
            return rule.amount
        if rule.kind == "sd":
            return rule.amount * self.sd / math.sqrt(2)
        return (
            min(MAX_POINTS, MAX_ERROR_SHARE * errors) if rule.kind == "auto" else rule.amount / 100 * errors
        )

    @property
    def counts(self) -> bool:
        """Whether accuracies are numbers of images."""
        return self.noise in ("counts", "images")


def _draw(case: Scenario, truth: float, generator: np.random.Generator) -> Draw:
    """Return what draws accuracies of a number of seeds: reference first, then arms; shares of 1."""

    def noise(count: int) -> Floats:
        shape = (case.arms + 1, count)
        if case.noise == "t3":
            return generator.standard_t(3, shape) / math.sqrt(3)
        return generator.normal(size=shape)

    def draw(count: int) -> Floats:
        if case.noise == "images":  # the spread is that of the binomial distribution
            rates = np.full((case.arms + 1, count), case.base / 100)
            rates[1:] += truth
            return np.asarray(generator.binomial(IMAGES, np.minimum(rates, 1.0)) / IMAGES)
        values = case.base / 100 + noise(count) * case.sd / 100 / math.sqrt(2)
        values[1:] += truth
        return np.asarray(np.round(values * IMAGES) / IMAGES) if case.counts else values

    return draw


def _margin(values: Floats, case: Scenario) -> QualityMargin:
    resolution = 100 / IMAGES if case.counts else 1e-7
    points = (100 * values[0]).tolist()
    return resolve_margin(parse_margin(case.rule), points, resolution=resolution, reference="fp32")


def _effects(values: Floats, case: Scenario, margin: QualityMargin, pilot: int = 0) -> list[Effect]:
    reference, *arms = values.tolist()
    samples = IMAGES if case.counts else 10**9
    floor, step = least_spread_of_accuracies(samples), 1 / IMAGES if case.counts else None
    early = [number < pilot for number in range(len(reference))]
    effects = []
    for arm in arms:
        if pilot:
            effect = two_stage_effect(arm, reference, early, floor, is_rounded=True)
            moved = standard_error_for_relative_margin(
                arm[:pilot], reference[:pilot], margin.error_share
            ) * math.sqrt(pilot / len(arm))
        else:
            effect = paired_effect(arm, reference, floor, is_rounded=True)
            moved = standard_error_for_relative_margin(arm, reference, margin.error_share)
        effects.append(replace(effect, margin_error=moved, step=step))
    return effects


def _as_looks(rates: Sequence[float]) -> list[Look]:
    return [
        Look(
            number=number,
            error_rate=rate,
            reference="",
            arms=[],
            seeds=[],
            cells={},
            margin=0.5,
            time_margin=0.02,
        )
        for number, rate in enumerate(rates, 1)
    ]


def _judge(
    values: Floats, case: Scenario, rate: float, after: float | None = None, pilot: int = 0
) -> Outcome:
    margin = _margin(values, case)
    effects = _effects(values, case, margin, pilot)
    return Outcome(decide_verdicts(effects, margin.margin_of_scores(), rate, after), effects, rate)


def _look_once(draw: Draw, case: Scenario) -> Outcome:
    return _judge(draw(case.first), case, error_rate_of_next_look([], case.looks))


def _look_again(draw: Draw, case: Scenario) -> Outcome:
    values, kept = draw(case.first), None
    rates: list[float] = []
    for _ in range(case.looks or MAX_LOOKS):
        rates.append(error_rate_of_next_look(_as_looks(rates), case.looks))
        after = error_rate_of_next_look(_as_looks(rates), case.looks)
        outcome = _judge(values, case, rates[-1], after)
        advice = [verdict.more_seeds for verdict in outcome.verdicts if verdict.more_seeds is not None]
        if not advice or values.shape[1] >= MAX_PAIRS:
            break
        values = np.concatenate([values, draw(max(advice))], axis=1)
        if len(rates) == 1:
            promised = _judge(values, case, after).verdicts
            kept = not any(verdict.kind in OPEN for verdict in promised)
        values = values[:, :MAX_PAIRS]
    return replace(outcome, kept=kept)


def _auto(draw: Draw, case: Scenario) -> Outcome:
    rate = error_rate_of_next_look([], case.looks)
    size = len(pilot_seeds(case.arms))
    values = draw(size)
    margin = _margin(values, case)
    pilot = _effects(values, case, margin)
    needed = max(
        pairs_needed_by_stein(
            effect.spread, effect.freedom, margin.margin_of_scores().size, rate / len(pilot)
        )
        for effect in pilot
    )
    if needed > size:
        values = np.concatenate([values, draw(needed - size)], axis=1)
    return _judge(values, case, rate, pilot=size)


PROCEDURES = {"fixed": _look_once, "followed": _look_again, "auto": _auto}


def _simulate(case: Scenario, truth: float, replicates: int) -> Counter[str]:
    begin = [
        round(100 * case.sd),
        case.arms,
        case.first,
        round(1e5 * -truth),
        len(case.noise),
        round(10 * case.base),
    ]
    draw = _draw(case, truth, np.random.default_rng(begin))

    def trial() -> dict[str, float]:
        outcome = PROCEDURES[case.seeds](draw, case)
        words = [str(verdict) for verdict in outcome.verdicts]
        of_look = [interval_if_testable(effect, 1 - outcome.rate / case.arms) for effect in outcome.effects]
        printed = [
            (verdict.low <= truth <= verdict.high, verdict.confidence)
            for verdict in outcome.verdicts
            if verdict.low is not None and verdict.high is not None and verdict.confidence is not None
        ]
        return {
            "wrong": any(begin_with(words, KEEPS if truth else WINNER)),
            "right": sum(begin_with(words, KEEPS)),
            "pairs": outcome.effects[0].pairs,
            "promised": outcome.kept is not None,
            "kept": bool(outcome.kept),
            "covered": all(low <= truth <= high for low, high in filter(None, of_look)),
            "printed": len(printed),
            "printed covers": sum(covers for covers, _ in printed),
            "stated": sum(confidence for _, confidence in printed),
        }

    return total(replicates, trial)


def _row(case: Scenario, replicates: int) -> Row:
    count = max(100, round(replicates * case.share))
    equal = _simulate(case, 0.0, count)
    worse = _simulate(case, -case.true_margin / 100, count)
    covers, stated = (percent(equal[what], equal["printed"]) for what in ("printed covers", "stated"))
    return {
        "seeds": case.seeds,
        "looks": "open" if case.looks is None else str(case.looks),
        "noise": case.noise,
        "base %": f"{case.base:g}",
        "sd": "-" if case.noise == "images" else f"{case.sd:g}",
        "margin": case.rule if case.rule.isalpha() or not case.rule[-1].isdigit() else f"±{case.rule}",
        "arms": str(case.arms + 1),
        "first": str(len(pilot_seeds(case.arms)) if case.seeds == "auto" else case.first),
        "mean pairs": f"{equal['pairs'] / count:.0f}",
        "A/A: winner or loser %": percent(equal["wrong"], count),
        "at the margin: kept %": percent(worse["wrong"], count),
        "all intervals cover %": percent(equal["covered"], count),
        "printed cover / stated %": f"{covers} / {stated}",
        "A/A: shown to keep %": percent(equal["right"], count * case.arms),
        "promise kept %": percent(equal["kept"] + worse["kept"], equal["promised"] + worse["promised"]),
        "replicates": f"{count}",
    }


SIZES = (3, 5, 10)
RULES = ("auto", "10%", "2sd")
FIXED = [
    *(
        Scenario("fixed", sd=sd, first=n, looks=looks)
        for sd in (0.5, 1.5)
        for n in SIZES
        for looks in (1, None)
    ),
    *(Scenario("fixed", kind, 1.5, first=n) for kind in ("counts", "t3") for n in SIZES),
    *(Scenario("fixed", "counts", 0.5, first=n) for n in SIZES),
    *(Scenario("fixed", "images", first=n, base=base) for base in (94.0, 99.0) for n in SIZES),
    *(Scenario("fixed", kind, arms=n, share=0.5) for kind in ("normal", "counts", "t3") for n in (2, 4, 8)),
]
MARGINS = [
    *(Scenario("fixed", sd=0.5, first=n, rule=rule) for rule in RULES for n in SIZES),
    *(Scenario("fixed", sd=0.1, first=n, rule=rule, base=99.0) for rule in RULES for n in SIZES),
    *(Scenario("fixed", "images", first=n, rule="10%") for n in SIZES),
    *(Scenario("followed", sd=0.5, first=5, rule=rule, share=0.5) for rule in RULES),
    *(Scenario("auto", sd=0.5, rule=rule) for rule in ("auto", "10%")),
]
FOLLOWED = [
    *(Scenario("followed", sd=sd, first=n, share=0.5) for sd in (0.5, 1.0, 1.5) for n in SIZES),
    *(Scenario("followed", kind, first=n, share=0.5) for kind in ("counts", "t3", "images") for n in (3, 5)),
    *(Scenario("followed", sd=0.8, first=n, looks=looks, share=0.5) for looks in (2, 3) for n in (3, 5)),
    *(Scenario("followed", arms=arms, looks=looks, share=0.25) for arms in (2, 8) for looks in (None, 3)),
]
AUTO = [
    *(Scenario("auto", sd=sd) for sd in (0.5, 0.8, 1.2, 2.0)),
    *(Scenario("auto", kind, sd) for kind in ("counts", "t3") for sd in (0.8, 1.2)),
    *(Scenario("auto", kind, 0.8, arms=n, share=0.5) for kind in ("normal", "t3") for n in (2, 4, 8)),
]
ONLY_JSON = ("seeds", "printed cover / stated %")
STUDY = Study(
    title="Error rates of the verdicts",
    about=__doc__,
    tables=(
        Table("fixed", FIXED, _row, by=("noise",), only_json=ONLY_JSON),
        Table("margins", MARGINS, _row, by=("seeds", "margin"), only_json=ONLY_JSON[1:]),
        Table("followed", FOLLOWED, _row, by=("noise", "arms"), only_json=ONLY_JSON),
        Table("auto", AUTO, _row, by=("noise", "arms"), only_json=ONLY_JSON),
        metrics.TABLE,
    ),
)
