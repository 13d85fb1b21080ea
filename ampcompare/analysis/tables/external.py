"""Verdicts on external results: from a table of runs to a comparison without records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from ampcompare.analysis.answer.headline import headline
from ampcompare.analysis.answer.recommendation import not_recommended, recommended
from ampcompare.analysis.inference.criteria import Criteria
from ampcompare.analysis.inference.effect import MIN_PAIRS, wilson
from ampcompare.analysis.inference.margins import AccuracyMargin, resolve_margin
from ampcompare.analysis.inference.verdict import Margin, Verdict, decide
from ampcompare.analysis.tables.columns import TableOptions
from ampcompare.analysis.tables.copies import without_copies
from ampcompare.analysis.tables.csv_table import ResultsTable, Run, read_table
from ampcompare.analysis.tables.effects import Difference, combined, compare_runs, mean_and_sd
from ampcompare.analysis.tables.groups import (
    Group,
    crossed,
    differences,
    divergence,
    make_groups,
    reference_in,
    reference_of,
)
from ampcompare.analysis.tables.metrics import ACCURACY
from ampcompare.analysis.tables.quantities import Quantity
from ampcompare.analysis.verdicts.step_time import TIME_FLOOR, ratio_of
from ampcompare.base.errors import ConfigError
from ampcompare.records.comparison import ArmSummary, Comparison, JudgedTable
from ampcompare.records.metric import Metric

__all__ = ["EXAMPLE_SD", "example_table", "judge"]

EXAMPLE_SD = 0.18  # the largest published standard deviation (conservative)
NO_COUNT = "inconclusive (number of runs unknown)"
ROUNDED = "inconclusive (the figures are rounded)"
MIN_FLOOR = 1e-12
MAX_DECIMALS = 8


@dataclass(frozen=True)
class _Line:
    """One line of the result: a group against the reference of its block, or an arm over all blocks.

    Attributes:
        closed: the verdict that needs no test, "" if there is none.
        differs: likewise for the time.
        family: of the tests that share an error rate: lines over all blocks, or lines of single blocks.
    """

    label: str
    groups: tuple[Group, ...]
    is_reference: bool
    value: Difference | None
    time: Difference | None
    closed: str
    differs: str
    family: int = 0


def example_table() -> ResultsTable:
    """Return a published table of ResNet-50 on ImageNet, one run per arm."""
    text = (files("ampcompare.analysis.tables") / "data" / "resnet50.csv").read_text(encoding="utf-8")
    return read_table(text, "the example", TableOptions())


def judge(
    table: ResultsTable,
    *,
    reference: str | None = None,
    sd: float | None = None,
    terms: Criteria | None = None,
    within: Sequence[str] = (),
    runs: int | None = None,
) -> Comparison:
    """Compare every arm of a table with one of them.

    Args:
        reference: an arm, in any case; by default fp32, or else the first.
        sd: standard deviation over seeds that is known from elsewhere, in the unit of the metric that is shown, used
            for arms with fewer than three runs unless the runs themselves contradict it.
        terms: margins and preference; a margin that is a number is in the unit of the metric that is shown.
        within: settings of which each value is a block. Arms are compared inside each block, and over all of them.
        runs: behind each line that has a standard deviation and does not say of how many.

    Raises:
        ConfigError: no such arm or setting, or a number that cannot be used.
    """
    terms = terms or Criteria()
    if sd is not None and not (math.isfinite(sd) and sd > 0):
        raise ConfigError(f"the spread over seeds is {sd}; give the standard deviation, such as 0.18")
    if runs is not None and runs < 2:
        raise ConfigError(
            f"{runs} runs have no standard deviation; give the number of runs behind each line, such as 5"
        )
    metric = table.metric or ACCURACY
    own, copies = without_copies(table.runs)
    lines = [replace(run, runs=runs) if run.runs is None and runs is not None else run for run in own]
    groups = make_groups(lines, within)
    base = reference_of(groups, reference)
    margin = _margin(terms, metric, base, sd)
    result = _compare(groups, base, metric, sd)
    metric = metric.model_copy(update={"decimals": _decimals(table.runs, metric)})
    rows = _rows(result, metric, terms, margin.points)
    whole = [row for row, line in zip(rows, result, strict=True) if line.family == 0]
    reading = _why_none(whole, result, metric, terms)
    comparison = Comparison(
        command="",
        reference=next(line.label for line in result if line.is_reference),
        seeds=sorted({int(run.seed) for run in own if _is_seed(run.seed)}),
        metric=metric,
        margin=margin.points,
        margin_rule=str(terms.margin),
        margin_reason=margin.reason,
        time_margin=terms.time_margin,
        prefer=terms.prefer,
        arms=rows,
        excluded=copies,
        reading=[
            *(f"Not used: {text}." for text in copies),
            *reading,
            *_notes(result, groups, sd, within, metric.factor),
            *table.notes,
        ],
        records=[],
        judged=JudgedTable(
            references=[line.label for line in result if line.is_reference],
            sd=sd if _uses_sd(result) else None,
            within=list(within),
        ),
    )
    return comparison.model_copy(update={"headline": headline(comparison.model_copy(update={"arms": whole}))})


def _margin(terms: Criteria, metric: Metric, reference: Group, sd: float | None) -> AccuracyMargin:
    """Return the margin in the unit that is shown, and where it comes from.

    Raises:
        ConfigError: the metric has no usual margin and none is given, or none can be computed by the rule.
    """
    rule = terms.rule
    values = [run.value for run in reference.runs if run.value is not None]
    if metric.name != ACCURACY.name and rule.kind == "errors":
        raise ConfigError(f"a margin of {terms.margin} of the errors is one of accuracies; give one of {metric.name}")
    if metric.name != ACCURACY.name and rule.kind == "auto":
        if metric.margin is None:
            raise ConfigError(f"{metric.name} has no usual margin; give --margin, a difference that does not matter")
        return AccuracyMargin(metric.margin, "the usual one")
    if rule.kind == "sd" and sd is None and any(value.sd is not None for value in values):
        raise ConfigError(
            f"a margin of {terms.margin} needs single runs of {reference.arm}, or --sd; give it in points"
        )
    step = statistics.median_high(value.step for value in values) if values else 1.0  # zeros at the end may be missing
    means = [value.mean for value in values]
    return resolve_margin(rule, means, metric=metric, resolution=step, reference=reference.arm, sd=sd, least=True)


def _is_seed(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _decimals(runs: Sequence[Run], metric: Metric) -> int:
    """Return how many decimals most values have, at least two for percentages."""
    steps = [-math.floor(math.log10(run.value.step) + 1e-9) for run in runs if run.value is not None]
    return min(MAX_DECIMALS, max(2 if metric.factor > 1 else 0, statistics.mode(steps or [0])))


def _compare(groups: Sequence[Group], reference: Group, metric: Metric, sd: float | None) -> list[_Line]:
    """Return a line for each group, and before them one for each arm over all blocks, if there are several."""
    blocks = list(dict.fromkeys(group.block for group in groups))
    of_blocks: list[_Line] = []
    for block in blocks:
        mine = [group for group in groups if group.block == block]
        base = reference_in(mine, reference)
        of_blocks += [_line(group, base, reference, metric, sd) for group in mine]
    if len(blocks) == 1:
        return of_blocks
    by_name: dict[str, list[_Line]] = {}
    for line in of_blocks:
        by_name.setdefault(line.groups[0].name, []).append(line)
    whole = [_over_blocks(name, lines) for name, lines in by_name.items()]
    return [*whole, *(replace(line, family=1) for line in of_blocks)]


def _line(group: Group, base: Group | None, reference: Group, metric: Metric, sd: float | None) -> _Line:
    if base is None:
        missing = f"not comparable (no {reference.arm} with it)"
        value = Difference(None) if any(run.value for run in group.runs) else None
        time = Difference(None) if any(run.seconds for run in group.runs) else None
        return _Line(group.label, (group,), False, value, time, divergence([group]) or missing, missing)
    stored_sd = None if sd is None else sd / metric.factor
    value = compare_runs(
        group.runs, base.runs, lambda run: _better(run.value, metric), MIN_FLOOR, stored_sd, counted=True
    )
    time = compare_runs(group.runs, base.runs, _speed, TIME_FLOOR)
    differs = differences(group, base)
    return _Line(group.label, (group,), group is base, value, time, divergence([group]) or differs, differs)


def _over_blocks(name: str, lines: Sequence[_Line]) -> _Line:
    """Return the line of one arm over all blocks."""
    groups = tuple(group for line in lines for group in line.groups)
    open_lines = [line for line in lines if not line.closed]
    compared = tuple(group for line in open_lines for group in line.groups)
    timed = [line for line in lines if not line.differs]
    return _Line(
        label=name,
        groups=groups if divergence(groups) else compared or groups,
        is_reference=all(line.is_reference for line in lines),
        value=combined([line.value for line in open_lines if line.value is not None]) if open_lines else lines[0].value,
        time=combined([line.time for line in timed if line.time is not None]) if timed else lines[0].time,
        closed=divergence(groups) or ("" if open_lines else lines[0].closed),
        differs="" if timed else lines[0].differs,
    )


def _better(value: Quantity | None, metric: Metric) -> Quantity | None:
    """Return a value of the metric as it is stored, larger where it is better."""
    if value is None:
        return None
    stored = value.times(1 / metric.factor)
    return stored if metric.better == "higher" else replace(stored, mean=-stored.mean)


def _speed(run: Run) -> Quantity | None:
    """Return the negative logarithm of the time of a line, with what is known of its error to first order."""
    if run.seconds is None:
        return None
    seconds = run.seconds.mean
    return replace(run.seconds.times(1 / seconds), mean=-math.log(seconds))


def _rows(lines: Sequence[_Line], metric: Metric, terms: Criteria, points: float) -> list[ArmSummary]:
    margin = Margin(points / metric.factor, f"{points:g}")
    values = _verdicts(lines, margin, lambda line: line.closed, lambda line: line.value)
    times = _verdicts(lines, terms.time(), lambda line: line.differs, lambda line: line.time)
    bases = {line.groups[0].block: line for line in lines if line.is_reference and line.family == lines[-1].family}
    return [
        _row(line, bases.get(line.groups[0].block), value, time, metric)
        for line, value, time in zip(lines, values, times, strict=True)
    ]


def _verdicts(
    lines: Sequence[_Line], margin: Margin, closed: Callable[[_Line], str], part: Callable[[_Line], Difference | None]
) -> list[Verdict]:
    """Return the verdict of each line; lines over all blocks and those of blocks are tested apart."""
    verdicts: dict[int, Verdict] = {}
    for family in {line.family for line in lines}:
        effects = {
            number: known.effect
            for number, line in enumerate(lines)
            if line.family == family and not line.is_reference and not closed(line) and (known := part(line))
        }
        decided = decide(list(effects.values()), margin)
        verdicts |= dict(zip(effects, decided, strict=True))
    return [_explained(line, closed(line), part(line), verdicts.get(number)) for number, line in enumerate(lines)]


def _explained(line: _Line, closed: str, part: Difference | None, verdict: Verdict | None) -> Verdict:
    if line.is_reference:
        return Verdict(divergence(line.groups))
    if closed or part is None:
        return Verdict(closed if part is not None or closed.startswith("diverged") else "")
    if part.effect is None:
        return Verdict(NO_COUNT)
    if verdict is not None and part.rounded and part.effect.testable and verdict.word.startswith("inconclusive"):
        return replace(verdict, word=ROUNDED)
    return verdict or Verdict()


def _row(line: _Line, base: _Line | None, value: Verdict, time: Verdict, metric: Metric) -> ArmSummary:
    sign = 1 if metric.better == "higher" else -1
    effect = line.value.effect if line.value and not line.is_reference else None
    timed = line.time.effect if line.time and not line.is_reference else None
    bounds = [bound for bound in (value.low, value.high) if bound is not None]
    low, high = sorted(sign * bound for bound in bounds) if len(bounds) == 2 else (None, None)
    runs = [run for group in line.groups for run in group.runs]
    known = [run.value.mean / metric.factor for run in runs if run.value is not None]
    mean, sd = _mean_and_sd(line, metric)
    diverged, count = sum(group.diverged for group in line.groups), sum(group.count for group in line.groups)
    rate = wilson(diverged, count) if diverged else (None, None)
    peak, base_peak = _peak(line), _peak(base) if base and not line.is_reference else None
    return ArmSummary(
        arm=line.label,
        engine=None,
        half=None,
        lr=math.nan,
        seeds=sorted({int(run.seed) for run in runs if _is_seed(run.seed)}),
        completed=count - diverged,
        diverged=diverged,
        failed=0,
        metric_mean=mean,
        metric_sd=sd,
        metric_best=metric.best(known),
        peak_bytes=peak,
        time_ratio=ratio_of(-timed.mean) if timed else None,
        time_ratio_low=None if time.high is None else ratio_of(-time.high),
        time_ratio_high=None if time.low is None else ratio_of(-time.low),
        time_ratio_confidence=time.confidence,
        time_verdict="" if line.is_reference else time.word,
        metric_difference=sign * effect.mean if effect else None,
        metric_difference_low=low,
        metric_difference_high=high,
        metric_difference_confidence=value.confidence,
        accuracy_verdict=value.word,
        pairs=effect.pairs if effect else 0,
        memory_difference=None if peak is None or base_peak is None else peak - base_peak,
        diverged_low=rate[0],
        diverged_high=rate[1],
        status=divergence(line.groups) or "ok",
    )


def _mean_and_sd(line: _Line, metric: Metric) -> tuple[float | None, float | None]:
    """Return mean and standard deviation of the runs; over blocks the mean of means, which has no single spread."""
    stored = [
        known
        for group in line.groups
        if (known := mean_and_sd(group.runs, lambda run: run.value and run.value.times(1 / metric.factor)))
    ]
    if not stored:
        return None, None
    return statistics.fmean(mean for mean, _ in stored), stored[0][1] if len(line.groups) == 1 else None


def _peak(line: _Line) -> int | None:
    sizes = [run.peak_bytes for group in line.groups for run in group.runs if run.peak_bytes is not None]
    return round(max(sizes)) if sizes else None


def _why_none(rows: Sequence[ArmSummary], lines: Sequence[_Line], metric: Metric, terms: Criteria) -> list[str]:
    """Return why no arm is recommended by the lines over all blocks; nothing where one is."""
    base = next(line.label for line in lines if line.is_reference)
    others = [row for row in rows if row.arm != base]
    if not others or recommended(others, terms.prefer, metric):
        return []
    return [not_recommended(others, base, terms.prefer, metric.quality)]


def _notes(
    lines: Sequence[_Line], groups: Sequence[Group], sd: float | None, within: Sequence[str], factor: float
) -> Iterable[str]:
    """Yield notes on how the arms were compared."""
    tested = [line for line in lines if not line.is_reference and not line.closed and line.groups[1:] == ()]
    for line in tested:
        if line.value is not None and line.value.note:
            yield f"{line.label} {line.value.note}."
        if line.value is not None and line.value.own_sd is not None:
            own = line.value.own_sd * factor
            yield f"{line.label} is not compared by --sd {sd:g}: its runs and those of the reference have {own:.3g}."
    if any(line.value is not None and line.value.effect is None for line in tested):
        yield (
            "The table does not give the number of runs behind a mean, which its standard error needs: add a column "
            "n, or give --runs."
        )
    contradicted = any(line.value is not None and line.value.own_sd is not None for line in tested)
    if sd is not None and not _uses_sd(lines) and not contradicted:
        yield f"--sd {sd:g} is not used: no arm that can be compared by it has fewer than {MIN_PAIRS} runs."
    differing = [line for line in lines if line.closed.startswith("not comparable") and not line.is_reference]
    apart = [name for name in groups[0].settings if crossed(groups, name)]
    if differing and apart and not within:
        flags = " ".join(f"--within {name.replace(' ', '-')}" for name in apart)
        yield f"Arms differ in {', '.join(apart)}; {flags} compares them inside each value."


def _uses_sd(lines: Sequence[_Line]) -> bool:
    tested = [line for line in lines if not line.is_reference and not line.closed]
    return any(line.value is not None and line.value.uses_sd for line in tested)
