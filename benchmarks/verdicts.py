"""Error rates of the verdicts in simulation: one look, following the advice, and seeds auto.

    python benchmarks/verdicts.py [--replicates 4000] [--part fixed] [--out docs/benchmarks/verdicts]

Each replicate is a comparison of one reference with some arms, judged by the functions that `compare` uses. `fixed`
has one look at a number of seeds; `followed` adds the pairs that "inconclusive (≤N more seeds)" names, at most 100 in
all, and looks again until all arms are clear or no number is named; `auto` has a pilot of five to ten seeds, and
Stein's test. All arms are equal to the reference (A/A), or all are worse by the margin. Arms share the reference, so
their differences are correlated. `sd` is that of the difference in one pair, in points; `counts` are of 360 images,
each the rounded value, and `images` are drawn image by image; t3 is Student's t with three degrees of freedom. The
reference gets `base` % right. A margin such as `10%` of the errors or `2sd` is computed from the runs of each
replicate; "at the margin" is then the margin of the truth. A family of arms errs where any of them does.

The columns: how often A/A names a winner or loser; how often arms that are worse by the margin are said to keep the
accuracy; how often the two-sided intervals at the look's level hold together; how often a printed interval covers, and
the confidence that it states; how often equal arms are shown to keep the accuracy (power); and of the comparisons that
are inconclusive at the first look, how many are clear after the pairs that they are promised, 80 % being the promise.

`metrics` is about metrics that are no counts, in one look at 5 % through `summarize`, with the usual margin of each;
the two runs of a seed share a part of their scatter.

`rounded` is about values that are printed with 2 to 4 digits, or that are shares of few images, through the functions
that judge the metric of a script (a ratio, with a margin of 2 %) and through `judge` on a CSV of percentages (half a
point), in one look at 5 %. Each figure is the worst over spreads of a run of 0.25 to 2 steps, with the truth anywhere
between two values. Power is that of finding one arm of the family that is 0.03 worse at 0.76, with a spread of 0.006,
next to that of the same values unrounded. Families of nine arms have half the replicates, power a quarter.

With --part the other tables of OUT.md stay as they are.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import numpy as np
import scipy
from metric_verdicts import metric_rows
from results import write_results
from rounded_verdicts import rounded_rows
from tabulate import tabulate

from ampcompare.experiment.compare import pilot_seeds
from ampcompare.runs.analysis.inference.effect import Effect, interval, min_resolvable_spread, paired, two_stage
from ampcompare.runs.analysis.inference.looks import error_rate_of_next
from ampcompare.runs.analysis.inference.margins import AccuracyMargin, margin_error, parse_margin, resolve_margin
from ampcompare.runs.analysis.inference.sample_size import stein_pairs
from ampcompare.runs.analysis.inference.verdict import Verdict, decide
from ampcompare.runs.records.look import Look

IMAGES = 360
MAX_PAIRS = 100
MAX_LOOKS = 6
MAX_ERROR_SHARE, MAX_POINTS = 0.1, 0.5  # of the rule `auto`
ADVICE = re.compile(r"≤(\d+) more")
WINNER = ("better", "worse")
KEEPS = ("equivalent", "non-inferior", "better")
Draw = Callable[[int], "np.ndarray[Any, Any]"]


@dataclass
class Tally:
    """What came of the replicates of one scenario."""

    runs: int = 0
    wrong: int = 0
    covered: int = 0
    right: int = 0
    promised: int = 0
    kept: int = 0
    pairs: list[int] = field(default_factory=list)
    stated: list[float] = field(default_factory=list)
    printed: list[bool] = field(default_factory=list)


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
        return min(MAX_POINTS, MAX_ERROR_SHARE * errors) if rule.kind == "auto" else rule.amount / 100 * errors

    @property
    def counts(self) -> bool:
        """Whether accuracies are numbers of images."""
        return self.noise in ("counts", "images")


def _draw(case: Scenario, truth: float, generator: np.random.Generator) -> Draw:
    """Return what draws accuracies of a number of seeds: reference first, then arms; shares of 1."""

    def noise(count: int) -> np.ndarray[Any, Any]:
        shape = (case.arms + 1, count)
        if case.noise == "t3":
            return generator.standard_t(3, shape) / math.sqrt(3)
        return generator.normal(size=shape)

    def draw(count: int) -> np.ndarray[Any, Any]:
        if case.noise == "images":  # the spread is that of the binomial distribution
            rates = np.full((case.arms + 1, count), case.base / 100)
            rates[1:] += truth
            counts: np.ndarray[Any, Any] = generator.binomial(IMAGES, np.minimum(rates, 1.0))
            return counts / IMAGES
        values = case.base / 100 + noise(count) * case.sd / 100 / math.sqrt(2)
        values[1:] += truth
        if not case.counts:
            return values
        rounded: np.ndarray[Any, Any] = np.round(values * IMAGES)
        return rounded / IMAGES

    return draw


def _margin(values: np.ndarray[Any, Any], case: Scenario) -> AccuracyMargin:
    resolution = 100 / IMAGES if case.counts else 1e-7
    points = (100 * values[0]).tolist()
    return resolve_margin(parse_margin(case.rule), points, resolution=resolution, reference="fp32")


def _effects(values: np.ndarray[Any, Any], case: Scenario, margin: AccuracyMargin, pilot: int = 0) -> list[Effect]:
    reference, *arms = values.tolist()
    samples = IMAGES if case.counts else 10**9
    floor, step = min_resolvable_spread(samples), 1 / IMAGES if case.counts else None
    early = [number < pilot for number in range(len(reference))]
    effects = []
    for arm in arms:
        if pilot:
            effect = two_stage(arm, reference, early, floor, rounded=True)
            moved = margin_error(arm[:pilot], reference[:pilot], margin.error_share) * math.sqrt(pilot / len(arm))
        else:
            effect = paired(arm, reference, floor, rounded=True)
            moved = margin_error(arm, reference, margin.error_share)
        effects.append(replace(effect, margin_error=moved, step=step))
    return effects


def _looked(rates: Sequence[float]) -> list[Look]:
    return [
        Look(number=number, error_rate=rate, reference="", arms=[], seeds=[], cells={}, margin=0.5, time_margin=0.02)
        for number, rate in enumerate(rates, 1)
    ]


def _judge(values: np.ndarray[Any, Any], case: Scenario, rate: float, after: float | None = None) -> Outcome:
    margin = _margin(values, case)
    effects = _effects(values, case, margin)
    return Outcome(decide(effects, margin.of_scores(), rate, after), effects, rate)


def _fixed(draw: Draw, case: Scenario) -> Outcome:
    return _judge(draw(case.first), case, error_rate_of_next([], case.looks))


def _followed(draw: Draw, case: Scenario) -> Outcome:
    values, kept = draw(case.first), None
    rates: list[float] = []
    for _ in range(case.looks or MAX_LOOKS):
        rates.append(error_rate_of_next(_looked(rates), case.looks))
        after = error_rate_of_next(_looked(rates), case.looks)
        outcome = _judge(values, case, rates[-1], after)
        advice = [int(match[1]) for verdict in outcome.verdicts if (match := ADVICE.search(verdict.word))]
        if not advice or values.shape[1] >= MAX_PAIRS:
            break
        values = np.concatenate([values, draw(max(advice))], axis=1)
        if len(rates) == 1:
            promised = _judge(values, case, after).verdicts
            kept = not any(verdict.word.startswith("inconclusive") for verdict in promised)
        values = values[:, :MAX_PAIRS]
    return replace(outcome, kept=kept)


def _auto(draw: Draw, case: Scenario) -> Outcome:
    rate = error_rate_of_next([], case.looks)
    size = len(pilot_seeds(case.arms))
    values = draw(size)
    margin = _margin(values, case)
    pilot = _effects(values, case, margin)
    needed = max(
        stein_pairs(effect.spread, effect.freedom, margin.of_scores().size, rate / len(pilot)) for effect in pilot
    )
    if needed > size:
        values = np.concatenate([values, draw(needed - size)], axis=1)
    margin = _margin(values, case)
    effects = _effects(values, case, margin, size)
    return Outcome(decide(effects, margin.of_scores(), rate), effects, rate)


PROCEDURES = {"fixed": _fixed, "followed": _followed, "auto": _auto}


def _simulate(case: Scenario, truth: float, replicates: int) -> Tally:
    begin = [round(100 * case.sd), case.arms, case.first, round(1e5 * -truth), len(case.noise), round(10 * case.base)]
    draw = _draw(case, truth, np.random.default_rng(begin))
    tally = Tally()
    for _ in range(replicates):
        outcome = PROCEDURES[case.seeds](draw, case)
        words = [verdict.word.partition(" (")[0] for verdict in outcome.verdicts]
        tally.runs += 1
        tally.wrong += any(word in (KEEPS if truth else WINNER) for word in words)
        tally.right += sum(word in KEEPS for word in words)
        tally.pairs.append(outcome.effects[0].pairs)
        if outcome.kept is not None:
            tally.promised += 1
            tally.kept += outcome.kept
        bounds = [interval(effect, 1 - outcome.rate / case.arms) for effect in outcome.effects]
        tally.covered += all(low <= truth <= high for low, high in filter(None, bounds))
        for verdict in outcome.verdicts:
            if verdict.low is not None and verdict.high is not None and verdict.confidence is not None:
                tally.printed.append(verdict.low <= truth <= verdict.high)
                tally.stated.append(verdict.confidence)
    return tally


def _percent(count: float, runs: float) -> str:
    return f"{100 * count / runs:.1f}" if runs else "-"


def _row(case: Scenario, replicates: int) -> dict[str, str]:
    equal = _simulate(case, 0.0, replicates)
    worse = _simulate(case, -case.true_margin / 100, replicates)
    return {
        "seeds": case.seeds,
        "looks": "open" if case.looks is None else str(case.looks),
        "noise": case.noise,
        "base %": f"{case.base:g}",
        "sd": "-" if case.noise == "images" else f"{case.sd:g}",
        "margin": case.rule if case.rule.isalpha() or not case.rule[-1].isdigit() else f"±{case.rule}",
        "arms": str(case.arms + 1),
        "first": str(len(pilot_seeds(case.arms)) if case.seeds == "auto" else case.first),
        "mean pairs": f"{np.mean(equal.pairs):.0f}",
        "A/A: winner or loser %": _percent(equal.wrong, equal.runs),
        "at the margin: kept %": _percent(worse.wrong, worse.runs),
        "all intervals cover %": _percent(equal.covered, equal.runs),
        "printed cover / stated %": f"{_percent(sum(equal.printed), len(equal.printed))} / "
        f"{100 * float(np.mean(equal.stated)):.1f}",
        "A/A: shown to keep %": _percent(equal.right, equal.runs * case.arms),
        "promise kept %": _percent(equal.kept + worse.kept, equal.promised + worse.promised),
        "replicates": f"{replicates}",
    }


def _scenarios(part: str) -> list[Scenario]:
    if part == "fixed":
        return [
            *(
                Scenario("fixed", sd=sd, first=n, looks=looks)
                for sd in (0.5, 1.5)
                for n in (3, 5, 10)
                for looks in (1, None)
            ),
            *(Scenario("fixed", kind, 1.5, first=n) for kind in ("counts", "t3") for n in (3, 5, 10)),
            *(Scenario("fixed", "counts", 0.5, first=n) for n in (3, 5, 10)),
            *(Scenario("fixed", "images", first=n, base=base) for base in (94.0, 99.0) for n in (3, 5, 10)),
            *(Scenario("fixed", kind, arms=n, share=0.5) for kind in ("normal", "counts", "t3") for n in (2, 4, 8)),
        ]
    if part == "margins":
        return [
            *(Scenario("fixed", sd=0.5, first=n, rule=rule) for rule in ("auto", "10%", "2sd") for n in (3, 5, 10)),
            *(
                Scenario("fixed", sd=0.1, first=n, rule=rule, base=99.0)
                for rule in ("auto", "10%", "2sd")
                for n in (3, 5, 10)
            ),
            *(Scenario("fixed", "images", first=n, rule="10%") for n in (3, 5, 10)),
            *(Scenario("followed", sd=0.5, first=5, rule=rule, share=0.5) for rule in ("auto", "10%", "2sd")),
            *(Scenario("auto", sd=0.5, rule=rule) for rule in ("auto", "10%")),
        ]
    if part == "followed":
        return [
            *(Scenario("followed", sd=sd, first=n, share=0.5) for sd in (0.5, 1.0, 1.5) for n in (3, 5, 10)),
            *(Scenario("followed", kind, first=n, share=0.5) for kind in ("counts", "t3", "images") for n in (3, 5)),
            *(Scenario("followed", sd=0.8, first=n, looks=looks, share=0.5) for looks in (2, 3) for n in (3, 5)),
            *(Scenario("followed", arms=arms, looks=looks, share=0.25) for arms in (2, 8) for looks in (None, 3)),
        ]
    return [
        *(Scenario("auto", sd=sd) for sd in (0.5, 0.8, 1.2, 2.0)),
        *(Scenario("auto", kind, sd) for kind in ("counts", "t3") for sd in (0.8, 1.2)),
        *(Scenario("auto", kind, 0.8, arms=n, share=0.5) for kind in ("normal", "t3") for n in (2, 4, 8)),
    ]


def _rows(part: str, replicates: int) -> list[dict[str, str]]:
    return [_row(case, max(100, round(replicates * case.share))) for case in _scenarios(part)]


def _tables_of(page: Path) -> dict[str, str]:
    """Return the tables that an earlier call wrote, by part; none without a page."""
    if not page.exists():
        return {}
    _, *sections = page.read_text(encoding="utf-8").split("\n## ")
    return {name: table.strip() for name, _, table in (section.partition("\n") for section in sections)}


PARTS = ("fixed", "margins", "followed", "auto", "metrics", "rounded")
OWN_ROWS = {"metrics": metric_rows, "rounded": rounded_rows}


@click.command()
@click.option("--replicates", default=4000, show_default=True, help="of a comparison of two arms; others have fewer")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="all by default")
@click.option("--out", default=None, help="write OUT.md")
def main(replicates: int, parts: Sequence[str], out: str | None) -> None:
    """Simulate comparisons and count false words."""
    tables = _tables_of(Path(f"{out}.md")) if out is not None else {}
    for part in parts or PARTS:
        begin = time.monotonic()
        rows = OWN_ROWS[part](replicates) if part in OWN_ROWS else _rows(part, replicates)
        tables[part] = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
        click.echo(f"## {part}\n\n{tables[part]}\n{time.monotonic() - begin:.0f} s\n")
    if out is not None:
        facts = (
            f"numpy {np.__version__}, scipy {scipy.__version__}; the standard error of a rate of 5 % is 0.3 points "
            "at 4000 replicates, 0.5 at 2000, 0.7 at 1000 and 1.1 at 400."
        )
        text = "\n\n".join(f"## {part}\n\n{tables[part]}" for part in PARTS if part in tables)
        write_results(out, "Error rates of the verdicts", __doc__, facts, text)


if __name__ == "__main__":
    main()
