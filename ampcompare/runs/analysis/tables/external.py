"""Verdicts on external results: from a table of runs to a comparison without records.

Copies of a run are one run. A coarse metric ties by chance, so a tie alone is no copy. Rows count once

* if all seeds have the same row, and arms differ in it: then nothing is known of the scatter over seeds;
* if more rows repeat earlier ones than ties by chance would give in one of a hundred tables. The chance of a tie is
  that of the first arm times those of the differences to it, as arms of one seed rise and fall together; each is the
  step of the values over their scatter, and 1 where they scatter over few steps. Rows that differ by far less than the
  others scatter repeat each other too: what ignores the seed and is not deterministic gives such rows;
* if several arms repeat one sequence of rows, seed by seed, which ties would give in one of a hundred tables.

The first test is made for the rows of all arms together, and then for each arm alone.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from ampcompare.base.errors import ConfigError
from ampcompare.runs.analysis.answer.headline import not_recommended
from ampcompare.runs.analysis.evidence.step_time import TIME_FLOOR
from ampcompare.runs.analysis.inference.criteria import AccuracyMargin, Criteria, resolve_margin
from ampcompare.runs.analysis.inference.effect import MIN_PAIRS, SPREAD_IS_KNOWN, Effect, paired, welch
from ampcompare.runs.analysis.inference.looks import Design
from ampcompare.runs.analysis.inference.verdict import Evidence
from ampcompare.runs.analysis.runs.scores import grid_step, in_steps, rounding_spread
from ampcompare.runs.analysis.summary import Line, conclude, decided_rows
from ampcompare.runs.analysis.tables.csv_table import ResultsTable, Run, TableOptions, read_table, same_words
from ampcompare.runs.analysis.tables.quantities import ACCURACY, Quantity
from ampcompare.runs.records.comparison import ArmSummary, Comparison, JudgedTable
from ampcompare.runs.records.metric import Metric

__all__ = ["EXAMPLE_SD", "combined", "compare_runs", "example_table", "judge", "mean_and_sd", "without_copies"]

CONTRADICTION = 0.01  # chance of a spread as large as that of the runs if the given one is true
Measured = tuple[Run, Quantity]
FP32 = ("fp32", "float32", "single precision")
MAX_NAMED = 8
EXAMPLE_SD = 0.18  # the largest published standard deviation (conservative)
NO_COUNT = "inconclusive (number of runs unknown)"
MIN_FLOOR = 1e-12
MAX_DECIMALS = 8
CHANCE = 0.01  # of ties by chance that are taken for copies
FEW_STEPS = 2  # scatter in steps, at which ties are no sign of copies
PER_QUARTILE = 8  # the chance that two normal values tie is a step over so many lower quartiles of their differences
TICK = 1e-9  # values are compared in it, and tables print fewer digits
NEAR = 1e-5  # of the median difference of two rows: closer ones differ by noise alone
NEAR_ROWS = 200
MAX_SEEDS = 2000  # the rows of which are compared with each other


@dataclass(frozen=True)
class _Difference:
    """An effect and how it came about.

    Attributes:
        effect: None where the table does not say how many runs are behind a mean.
        note: what a reader should know about it, "" for nothing.
        uses_sd: whether its error comes from the standard deviation that the caller gave.
        own_sd: the standard deviation of the runs where it contradicts the one that the caller gave; else None.
        rounded: whether its error is that of the rounding of the printed numbers, which more runs do not reduce.
        by_welch: whether it is of two independent samples.
    """

    effect: Effect | None
    note: str = ""
    uses_sd: bool = False
    own_sd: float | None = None
    rounded: bool = False
    by_welch: bool = False


@dataclass(frozen=True)
class _Sample:
    """All runs of an arm: their mean and number, and the variance that the `known` of them show."""

    mean: float
    count: int
    variance: float
    known: int
    rounding: float  # variance of the rounding error of a number
    single: bool  # whether each number is that of one run, which has this error of its own


def compare_runs(
    arm: Sequence[Run],
    reference: Sequence[Run],
    value: Callable[[Run], Quantity | None],
    floor: float,
    sd: float | None = None,
    *,
    counted: bool = False,
) -> _Difference | None:
    """Compare two arms: by pairs where most of the runs of both have a seed in common, else by Welch's test.

    Values of single runs are rounded to the digits that are printed, or to a coarser step of which all are multiples.
    The spread of that rounding is added to the one they show: three equal differences do not have a spread of 0.

    A rounded mean is off by the same amount however many runs are behind it, if they agree to the last digit. So the
    standard error is at least that of rounding the two sides: the step of the last digit over the square root of 12.

    Args:
        value: of a line, larger where it is better.
        floor: smallest spread of a difference, above 0.
        sd: standard deviation over seeds that is known from elsewhere, used if a side has fewer than three runs.
        counted: whether values may count samples, so that they lie on a coarser grid than the printed one.

    Returns:
        None if a side was not measured.
    """
    here, there = _lines(arm, value), _lines(reference, value)
    if not here or not there:
        return None
    pairs = _pairs(here, there)
    if any(run.runs is None for run, _ in (*here, *there)):
        return _Difference(None)
    step = _common_step(here, there) if counted else 0.0
    samples = _sample(here, step), _sample(there, step)
    rounding = rounding_spread(_usual_step(here), _usual_step(there))
    if sd is not None and min(sample.count for sample in samples) < MIN_PAIRS:
        if not _contradicts(samples, sd):
            return _rounded(_Difference(_with_known_sd(samples, sd), uses_sd=True), rounding)
        own_sd = _own_sd(samples)
    else:
        own_sd = None
    if 2 * len(pairs) > max(len(here), len(there)):
        left = len(here) + len(there) - 2 * len(pairs)
        least = max(floor, math.sqrt(sum(sample.rounding for sample in samples)))
        effect = in_steps(paired([a for a, _ in pairs], [b for _, b in pairs], least, rounded=True), step)
        note = f"is paired by seed; runs left out without a partner: {left}" if left else ""
        return _rounded(_Difference(effect, note, own_sd=own_sd), rounding)
    common = f"only {len(pairs)} seed{'s are' if len(pairs) > 1 else ' is'} in common"
    note = f"is compared by Welch's test, for {common}" if pairs else ""
    return _rounded(_Difference(_welch(*samples, floor), note, own_sd=own_sd, by_welch=True), rounding)


def mean_and_sd(runs: Sequence[Run], value: Callable[[Run], Quantity | None]) -> tuple[float, float | None] | None:
    """Return the mean of an arm and the standard deviation over its runs, None where it shows none."""
    lines = _lines(runs, value)
    if not lines:
        return None
    sample = _sample(lines)
    only_sd = lines[0][1].sd  # of a single line whose number of runs is unknown
    return sample.mean, math.sqrt(sample.variance) if sample.known > 1 else only_sd


def combined(parts: Sequence[_Difference]) -> _Difference | None:
    """Return the mean difference over blocks of runs that share a setting.

    Where every block can be tested by itself, the mean has the error of its parts: it is about these settings. Where
    one cannot, such as with one run of each arm in a block, the blocks are the pairs.
    """
    known = [(part, part.effect) for part in parts if part.effect is not None]
    if len(known) < 2:
        return known[0][0] if known else None
    effects = [effect for _, effect in known]
    uses_sd, rounded = any(part.uses_sd for part, _ in known), any(part.rounded for part, _ in known)
    if not all(effect.testable for effect in effects):
        least = min(effect.error for effect in effects)
        return _Difference(paired([effect.mean for effect in effects], [0.0] * len(effects), least), "", uses_sd)
    count = len(effects)
    shares = [effect.error**2 / count**2 for effect in effects]
    freedom = sum(shares) ** 2 / sum(share**2 / effect.freedom for share, effect in zip(shares, effects, strict=True))
    whole = Effect(
        mean=statistics.fmean(effect.mean for effect in effects),
        spread=math.sqrt(statistics.fmean(effect.spread**2 for effect in effects)),
        error=math.sqrt(sum(shares)),
        freedom=freedom,
        pairs=sum(effect.pairs for effect in effects),
    )
    by_welch = any(part.by_welch for part, _ in known)
    return _Difference(whole, uses_sd=uses_sd, rounded=rounded, by_welch=by_welch)


def _lines(runs: Sequence[Run], value: Callable[[Run], Quantity | None]) -> list[Measured]:
    return [(run, quantity) for run in runs if (quantity := value(run)) is not None]


def _pairs(here: Sequence[Measured], there: Sequence[Measured]) -> list[tuple[float, float]]:
    """Return the values of the seeds that both arms have."""
    partners = {run.seed: quantity.mean for run, quantity in there if run.seed and run.runs == 1}
    return [(quantity.mean, partners[run.seed]) for run, quantity in here if run.runs == 1 and run.seed in partners]


def _usual_step(lines: Sequence[Measured]) -> float:
    """Return the step of the last digit that the numbers of an arm have; some may have lost zeros at their end."""
    return statistics.median_high(quantity.step for _, quantity in lines)


def _common_step(here: Sequence[Measured], there: Sequence[Measured]) -> float:
    """Return the step of which the values of all single runs of two arms are multiples; 0 where there are means."""
    if any(run.runs != 1 for run, _ in (*here, *there)):
        return 0.0
    values = [quantity.mean for _, quantity in (*here, *there)]
    return grid_step(values, min(_usual_step(here), _usual_step(there)))


def _sample(lines: Sequence[Measured], step: float = 0.0) -> _Sample:
    """Pool the lines of an arm: the variance within each line that has one, and that between the lines.

    Args:
        step: of a grid on which the values lie, if it is coarser than the printed digits.
    """
    rounding = max(step, _usual_step(lines)) ** 2 / 12
    counts = [run.runs or 1 for run, _ in lines]
    mean = statistics.fmean((quantity.mean for _, quantity in lines), weights=counts)
    # The mean of several runs without a standard deviation shows no more of the spread than one run does.
    known = [
        (quantity.mean, count if quantity.sd is not None else 1, max(quantity.sd or 0.0, quantity.sd_step / 4))
        for (_, quantity), count in zip(lines, counts, strict=True)
    ]
    total = sum(count for _, count, _ in known)
    center = statistics.fmean((value for value, _, _ in known), weights=[count for _, count, _ in known])
    squares = sum((count - 1) * sd**2 + count * (value - center) ** 2 for value, count, sd in known)
    variance = squares / (total - 1) if total > 1 else 0.0
    return _Sample(mean, sum(counts), variance, total, rounding, all(run.runs == 1 for run, _ in lines))


def _welch(arm: _Sample, reference: _Sample, floor: float) -> Effect:
    """Return the effect between two samples, by Welch: unequal variances, Satterthwaite's degrees of freedom."""
    samples = arm, reference
    variances = [
        max(floor**2 / 2, sample.rounding, sample.variance + sample.single * sample.rounding) for sample in samples
    ]
    return welch(arm.mean - reference.mean, variances, [sample.known for sample in samples])


def _with_known_sd(samples: Sequence[_Sample], sd: float) -> Effect:
    """Return the effect where the standard deviation over seeds is known from elsewhere; one run of each is enough."""
    arm, reference = samples
    error = sd * math.sqrt(1 / arm.count + 1 / reference.count)
    runs = min(arm.count, reference.count)
    return Effect(arm.mean - reference.mean, sd * math.sqrt(2), error, SPREAD_IS_KNOWN, runs)


def _own_sd(samples: Sequence[_Sample]) -> float:
    """Return the standard deviation that the runs of both arms show together, 0 if they show none."""
    freedom = sum(sample.known - 1 for sample in samples)
    squares = sum((sample.known - 1) * sample.variance for sample in samples)
    return math.sqrt(squares / freedom) if freedom else 0.0


def _contradicts(samples: Sequence[_Sample], sd: float) -> bool:
    """Return whether the runs scatter far more than the given standard deviation allows (chi-squared, 1 %)."""
    from scipy.special import chdtrc

    freedom = sum(sample.known - 1 for sample in samples)
    expected = sd**2 + max(sample.rounding for sample in samples)
    return bool(freedom and chdtrc(freedom, freedom * _own_sd(samples) ** 2 / expected) < CONTRADICTION)


def _rounded(difference: _Difference, rounding: float) -> _Difference:
    """Return the difference with an error of no less than that of rounding."""
    effect = difference.effect
    if effect is None or effect.error >= rounding:
        return difference
    return replace(difference, effect=replace(effect, error=rounding), rounded=True)


@dataclass(frozen=True)
class _Group:
    """The lines of one arm with one set of settings, in one block.

    Attributes:
        label: the arm, with the settings that tell it from others.
        name: the same without those that blocks are made of.
        block: values of the settings that blocks are made of.
        settings: the other ones.
    """

    label: str
    name: str
    arm: str
    block: tuple[str, ...]
    settings: dict[str, str]
    runs: tuple[Run, ...]

    @property
    def diverged(self) -> int:
        return sum(run.runs or 1 for run in self.runs if run.diverged)

    @property
    def count(self) -> int:
        return sum(run.runs or 1 for run in self.runs)


def _make_groups(runs: Sequence[Run], within: Sequence[str]) -> list[_Group]:
    """Put lines of one arm and equal settings together, blocks in the order of their first line."""
    known = [name for name, _ in runs[0].settings]
    columns = [_setting(name, known) for name in within]
    spelled: dict[str, str] = {}
    members: dict[tuple[tuple[str, ...], str, tuple[str, ...]], list[Run]] = {}
    for run in runs:
        spelled.setdefault(run.arm.casefold(), run.arm)
        block = tuple(same_words(dict(run.settings)[name]) for name in columns)
        rest = tuple(same_words(text) for name, text in run.settings if name not in columns)
        members.setdefault((block, run.arm.casefold(), rest), []).append(run)
    keys = list(members)
    blocks = {block: index for index, block in reversed(list(enumerate(key[0] for key in keys)))}
    groups = []
    for key in sorted(keys, key=lambda key: blocks[key[0]]):
        block, arm, _ = key
        mine = members[key]
        settings = {name: text for name, text in mine[0].settings if name not in columns}
        alone = sum(other[:2] == (block, arm) for other in keys) == 1
        words = [] if alone else [f"{name}={text}" for name, text in settings.items()]
        values = dict(mine[0].settings)
        of_block = [f"{name}={values[name]}" for name in columns] if len(blocks) > 1 else []
        label, name = " ".join([spelled[arm], *words, *of_block]), " ".join([spelled[arm], *words])
        groups.append(_Group(label, name, spelled[arm], block, settings, tuple(mine)))
    return groups


def _setting(wanted: str, known: Sequence[str]) -> str:
    """Return the setting that the caller names, in any case, with or without its unit."""
    word = " ".join(wanted.strip().replace("_", " ").replace("-", " ").lower().split())
    if word not in known:
        has = f"its settings are {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"the table has no setting {wanted!r} to compare within; {has}")
    return word


def _reference_of(groups: Sequence[_Group], wanted: str | None) -> _Group:
    """Return a group of the reference arm; the one that others are compared with, if there is one block."""
    first = groups[0].block
    if wanted is None:
        return next((group for group in groups if group.arm.casefold() in FP32), groups[0])
    fit = [group for group in groups if group.label == wanted] or [
        group for group in groups if wanted.casefold() in (group.label.casefold(), group.arm.casefold())
    ]
    if not fit or len([group for group in fit if group.block == fit[0].block]) > 1:
        known = ", ".join(repr(group.label) for group in (fit or groups)[:MAX_NAMED])
        raise ConfigError(f"{'several arms are' if fit else 'there is no arm'} {wanted!r}; choose one of {known}")
    return next((group for group in fit if group.block == first), fit[0])


def _reference_in(groups: Sequence[_Group], reference: _Group) -> _Group | None:
    """Return what the arms of a block are compared with: its only group of that arm, or the one of equal settings."""
    fit = [group for group in groups if group.arm == reference.arm]
    return fit[0] if len(fit) == 1 else next((group for group in fit if not _differences(group, reference)), None)


def _differences(group: _Group, base: _Group) -> str:
    apart = [
        f"{name} {text or 'none'}, not {base.settings.get(name) or 'none'}"
        for name, text in group.settings.items()
        if same_words(text) != same_words(base.settings.get(name, ""))
    ]
    return f"not comparable ({'; '.join(apart)})" if apart else ""


def _divergence(groups: Iterable[_Group]) -> str:
    known = list(groups)
    count = sum(group.diverged for group in known)
    return f"diverged {count}/{sum(group.count for group in known)}" if count else ""


def _crossed(groups: Sequence[_Group], name: str) -> bool:
    """Return whether an arm has several values of a setting, and another arm has one of them too."""
    values: dict[str, set[str]] = {}
    for group in groups:
        values.setdefault(group.arm, set()).add(same_words(group.settings[name]))
    several = [arm for arm, known in values.items() if len(known) > 1]
    return any(values[arm] & values[other] for arm in several for other in values if other != arm)


@dataclass(frozen=True)
class _Line:
    """One line of the result: a group against the reference of its block, or an arm over all blocks.

    Attributes:
        closed: the verdict that needs no test, "" if there is none.
        differs: likewise for the time.
    """

    label: str
    groups: tuple[_Group, ...]
    is_reference: bool
    value: _Difference | None
    time: _Difference | None
    closed: str
    differs: str


def example_table() -> ResultsTable:
    """Return a published table of ResNet-50 on ImageNet, one run per arm."""
    text = (files("ampcompare.runs.analysis.tables") / "data" / "resnet50.csv").read_text(encoding="utf-8")
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
    groups = _make_groups(lines, within)
    base = _reference_of(groups, reference)
    margin = _margin(terms, metric, base, sd)
    whole, of_blocks = _compare(groups, base, metric, sd)
    metric = metric.model_copy(update={"decimals": _decimals(table.runs, metric)})
    design = Design()
    references = {line.groups[0].block: line.groups[0] for line in of_blocks or whole if line.is_reference}
    families = [
        decided_rows([_undecided(line, references, metric) for line in lines], metric, margin, terms, design)
        for lines in (whole, of_blocks)
    ]
    result = [*whole, *of_blocks]
    labels = [line.label for line in result if line.is_reference]
    return conclude(
        [row for rows in families for row in rows],
        answered=families[0],
        metric=metric,
        margin=margin,
        terms=terms,
        design=design,
        command="",
        reference=labels[0],
        seeds=sorted({int(run.seed) for run in own if _is_seed(run.seed)}),
        excluded=copies,
        reading=[
            *(f"Not used: {text}." for text in copies),
            *not_recommended(families[0], labels[0], terms.prefer, metric),
            *_notes(result, groups, sd, within, metric.factor),
            *table.notes,
        ],
        records=[],
        judged=JudgedTable(
            references=labels,
            sd=sd if _uses_sd(result) else None,
            within=list(within),
            independent=[line.label for line in result if not line.is_reference and _is_by_welch(line.value)],
        ),
    )


def _is_by_welch(difference: _Difference | None) -> bool:
    return difference is not None and difference.by_welch


def _margin(terms: Criteria, metric: Metric, reference: _Group, sd: float | None) -> AccuracyMargin:
    """Return the margin in the unit that is shown, and where it comes from.

    Raises:
        ConfigError: the metric has no usual margin and none is given, or none can be computed by the rule.
    """
    rule, values = terms.rule, [run.value for run in reference.runs if run.value is not None]
    if metric.name != ACCURACY.name and rule.kind == "auto":
        if metric.margin is None:
            raise ConfigError(f"{metric.name} has no usual margin; give --margin, a difference that does not matter")
        return AccuracyMargin(metric.margin, "the usual one", metric=metric)
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


def _compare(
    groups: Sequence[_Group], reference: _Group, metric: Metric, sd: float | None
) -> tuple[list[_Line], list[_Line]]:
    """Return the lines that answer, and further ones: those of arms over all blocks and of groups, or of groups alone.

    Each of the two is a family of tests.
    """
    blocks = list(dict.fromkeys(group.block for group in groups))
    of_blocks: list[_Line] = []
    for block in blocks:
        mine = [group for group in groups if group.block == block]
        base = _reference_in(mine, reference)
        of_blocks += [_line(group, base, reference, metric, sd) for group in mine]
    if len(blocks) == 1:
        return of_blocks, []
    by_name: dict[str, list[_Line]] = {}
    for line in of_blocks:
        by_name.setdefault(line.groups[0].name, []).append(line)
    return [_over_blocks(name, lines) for name, lines in by_name.items()], of_blocks


def _line(group: _Group, base: _Group | None, reference: _Group, metric: Metric, sd: float | None) -> _Line:
    if base is None:
        missing = f"not comparable (no {reference.arm} with it)"
        value = _Difference(None) if any(run.value for run in group.runs) else None
        time = _Difference(None) if any(run.seconds for run in group.runs) else None
        return _Line(group.label, (group,), False, value, time, _divergence([group]) or missing, missing)
    stored_sd = None if sd is None else sd / metric.factor
    value = compare_runs(
        group.runs, base.runs, lambda run: _better(run.value, metric), MIN_FLOOR, stored_sd, counted=True
    )
    time = compare_runs(group.runs, base.runs, _speed, TIME_FLOOR)
    differs = _differences(group, base)
    return _Line(group.label, (group,), group is base, value, time, _divergence([group]) or differs, differs)


def _over_blocks(name: str, lines: Sequence[_Line]) -> _Line:
    """Return the line of one arm over all blocks."""
    groups = tuple(group for line in lines for group in line.groups)
    open_lines = [line for line in lines if not line.closed]
    compared = tuple(group for line in open_lines for group in line.groups)
    timed = [line for line in lines if not line.differs]
    return _Line(
        label=name,
        groups=groups if _divergence(groups) else compared or groups,
        is_reference=all(line.is_reference for line in lines),
        value=combined([line.value for line in open_lines if line.value is not None]) if open_lines else lines[0].value,
        time=combined([line.time for line in timed if line.time is not None]) if timed else lines[0].time,
        closed=_divergence(groups) or ("" if open_lines else lines[0].closed),
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


def _undecided(line: _Line, references: Mapping[tuple[str, ...], _Group], metric: Metric) -> Line:
    """Return a line before its verdicts.

    Args:
        references: of each block.
    """
    runs = [run for group in line.groups for run in group.runs]
    diverged = sum(group.diverged for group in line.groups)
    mean, sd = _mean_and_sd(line, metric)
    compared = [group for group in line.groups if group.block in references and not line.is_reference]
    peak, base_peak = _peak(compared), _peak([references[group.block] for group in compared])
    divergence = _divergence(line.groups)
    row = ArmSummary(
        arm=line.label,
        engine=None,
        half=None,
        lr=math.nan,
        seeds=sorted({int(run.seed) for run in runs if _is_seed(run.seed)}),
        completed=sum(group.count for group in line.groups) - diverged,
        diverged=diverged,
        failed=0,
        metric_mean=mean,
        metric_sd=sd,
        metric_best=metric.best(run.value.mean / metric.factor for run in runs if run.value is not None),
        peak_bytes=_peak(line.groups),
        pairs=line.value.effect.pairs if line.value and line.value.effect and not line.is_reference else 0,
        memory_difference=None if peak is None or base_peak is None else peak - base_peak,
        status=divergence or "ok",
    )
    if line.is_reference:
        return Line(row, Evidence(word=divergence))
    return Line(row, _evidence(line.value, line.closed), _evidence(line.time, line.differs))


def _evidence(part: _Difference | None, closed: str) -> Evidence:
    if part is None:
        return Evidence(word=closed if closed.startswith("diverged") else "")
    if part.effect is None:
        return Evidence(word=closed or NO_COUNT)
    return Evidence(part.effect, closed, part.effect.mean, part.rounded)


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


def _peak(groups: Iterable[_Group]) -> int | None:
    sizes = [run.peak_bytes for group in groups for run in group.runs if run.peak_bytes is not None]
    return round(max(sizes)) if sizes else None


def _notes(
    lines: Sequence[_Line], groups: Sequence[_Group], sd: float | None, within: Sequence[str], factor: float
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
    apart = [name for name in groups[0].settings if _crossed(groups, name)]
    if differing and apart and not within:
        flags = " ".join(f"--within {name.replace(' ', '-')}" for name in apart)
        yield f"Arms differ in {', '.join(apart)}; {flags} compares them inside each value."


def _uses_sd(lines: Sequence[_Line]) -> bool:
    tested = [line for line in lines if not line.is_reference and not line.closed]
    return any(line.value is not None and line.value.uses_sd for line in tested)


Key = tuple[str, tuple[str, ...]]  # an arm with its settings


@dataclass(frozen=True)
class _Row:
    """The values of one seed, in printed steps, by arm; `name` is that of the seed, or the place of a line."""

    name: str
    ticks: Mapping[Key, int]


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs without those that copy the run of another seed, and a sentence for each seed that does."""
    kept, faults = list(runs), list[str]()
    together = _copies(_rows_of_arms(kept), _steps(kept))
    for name, original in together.items():
        faults.append(f"the row of seed {name} is an exact copy of that of seed {original}, so that it is no other run")
    kept = [run for run in kept if not (run.seed in together and _is_single(run))]
    keys = list(dict.fromkeys(map(_key, filter(_is_single, kept))))
    for key in keys:
        mine = [run for run in kept if _is_single(run) and _key(run) == key]
        rows = [_Row(run.seed or f"line {number}", {key: _tick(run)}) for number, run in enumerate(mine, 1)]
        copies = _copies(rows, _steps(mine), CHANCE / len(keys))
        gone = {id(run) for run, row in zip(mine, rows, strict=True) if row.name in copies}
        faults += [
            f"{mine[0].arm}, {_seed_or_line(name)}: an exact copy of {_seed_or_line(original)}, so that it is no other "
            "run"
            for name, original in copies.items()
        ]
        kept = [run for run in kept if id(run) not in gone]
    return kept, faults


def _seed_or_line(name: str) -> str:
    return name if name.startswith("line ") else f"seed {name}"


def _is_single(run: Run) -> bool:
    return run.runs == 1 and run.value is not None


def _key(run: Run) -> Key:
    return run.arm.casefold(), tuple(same_words(text) for _, text in run.settings)


def _tick(run: Run) -> int:
    assert run.value is not None
    return round(run.value.mean / TICK)


def _steps(runs: Iterable[Run]) -> dict[Key, float]:
    """Return the step of the values of each arm, in ticks."""
    members: dict[Key, list[tuple[float, float]]] = {}
    for run in runs:
        if _is_single(run) and run.value is not None:
            members.setdefault(_key(run), []).append((run.value.mean, run.value.step))
    return {
        key: grid_step([value for value, _ in its], statistics.median_high(step for _, step in its), CHANCE) / TICK
        for key, its in members.items()
    }


def _rows_of_arms(runs: Sequence[Run]) -> list[_Row]:
    found: dict[str, dict[Key, int]] = {}
    for run in runs:
        if run.seed and _is_single(run):
            found.setdefault(run.seed, {})[_key(run)] = _tick(run)
    return [_Row(seed, ticks) for seed, ticks in found.items()]


def _copies(rows: Sequence[_Row], steps: Mapping[Key, float], chance: float = CHANCE) -> dict[str, str]:
    """Return which row copies which earlier one, by name; none where chance may have made them equal."""
    from scipy.special import gammainc

    if not 3 <= len(rows) <= MAX_SEEDS:
        return {}
    copies: dict[str, str] = {}
    originals: list[_Row] = []
    near = {key: _near([row.ticks[key] for row in rows if key in row.ticks]) for row in rows for key in row.ticks}
    rows = [_Row(row.name, {key: _settled(rows, key, row.ticks[key], near[key]) for key in row.ticks}) for row in rows]
    steps = {key: max(step, 2 * near.get(key, 0)) for key, step in steps.items()}
    for row in rows:
        original = next((one for one in originals if _equal(one, row)), None)
        if original is None:
            originals.append(row)
        else:
            copies[row.name] = original.name
    if not copies:
        return {}
    whole = set(rows[0].ticks)
    if len(originals) == 1:
        return copies if len(whole) > 1 and len(set(rows[0].ticks.values())) > 1 else {}
    pairs = len(rows) * (len(rows) - 1) / 2
    smallest = min((row.ticks.keys() for row in rows if row.name in copies), key=len)
    by_chance = pairs * _tie_chance(rows, sorted(smallest), steps)
    if gammainc(len(copies), by_chance) < chance:
        return copies
    return copies if len(whole) > 1 and _is_sequence(rows, len(originals), chance) else {}


def _near(values: Sequence[int]) -> float:
    apart = sorted(abs(a - b) for a, b in itertools.combinations(values[:NEAR_ROWS], 2))
    return NEAR * apart[len(apart) // 2] if apart else 0.0


def _settled(rows: Sequence[_Row], key: Key, value: int, near: float) -> int:
    """Return the first value of an arm to which a value is near."""
    if near < 1:
        return value
    return next(row.ticks[key] for row in rows if key in row.ticks and abs(row.ticks[key] - value) <= near)


def _equal(one: _Row, other: _Row) -> bool:
    """Return whether rows are equal in all arms that both have."""
    common = one.ticks.keys() & other.ticks.keys()
    return bool(common) and all(one.ticks[key] == other.ticks[key] for key in common)


def _tie_chance(rows: Sequence[_Row], keys: Sequence[Key], steps: Mapping[Key, float]) -> float:
    """Return the chance that two rows are equal in these arms."""
    first, *others = keys
    chance = _chance([row.ticks[first] for row in rows if first in row.ticks], steps[first])
    for key in others:
        both = [row.ticks[key] - row.ticks[first] for row in rows if key in row.ticks and first in row.ticks]
        chance *= _chance(both, max(steps[key], steps[first]))
    return chance


def _chance(values: Sequence[int], step: float) -> float:
    """Return the chance that two of these values tie, by the lower quartile of their differences, which few outliers
    do not move.
    """
    apart = sorted(abs(a - b) for a, b in itertools.combinations(values, 2) if a != b)
    quartile = apart[len(apart) // 4] if apart else 0
    return 1.0 if quartile <= FEW_STEPS * step else min(1.0, step / (PER_QUARTILE * quartile))


def _is_sequence(rows: Sequence[_Row], originals: int, chance: float) -> bool:
    """Return whether rows repeat the first ones in their order, or each of them as often, and not by chance."""
    values: list[Hashable] = [tuple(sorted(row.ticks.items())) for row in rows]
    count = len(values)
    in_turns = all(values[number] == values[number % originals] for number in range(count))
    each = count // originals
    in_blocks = count == each * originals and all(
        values[number] == values[number // each * each] for number in range(count)
    )
    ties = sum(a == b for a, b in itertools.combinations(values, 2)) / (count * (count - 1) / 2)
    return (in_turns or in_blocks) and count >= 2 * originals and ties ** (count - originals) < chance
