"""Verdicts on results that someone else measured: a table with a line per run, or per mean of runs with its spread.

Columns are `arm`, `seed`, `seconds`, `n` (runs behind a mean) and one metric; others are named and not looked at.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

from ampcompare.backends.arm import find_text_naming_same_arm
from ampcompare.base.environment.extras import require_statistics_packages
from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.base.files.read import read_text
from ampcompare.base.formatting import format_few_names
from ampcompare.results.analysis.conclusions.headline import headline
from ampcompare.results.analysis.conclusions.recommendation import none_recommended_sentences
from ampcompare.results.analysis.effects.step_time import TIME_FLOOR
from ampcompare.results.analysis.inference.effect import (
    MIN_PAIRS,
    SPREAD_IS_KNOWN,
    Effect,
    paired_effect,
    welch_effect,
    wilson_interval,
)
from ampcompare.results.analysis.inference.terms import QualityMargin, Terms, resolve_margin
from ampcompare.results.analysis.inference.verdict import EMPTY, Evidence, SequentialDesign, verdicts_on
from ampcompare.results.analysis.pairing.reference import default_reference
from ampcompare.results.analysis.pairing.scores import (
    effect_in_spacings,
    largest_common_spacing,
    rounding_deviation_of_spacings,
)
from ampcompare.results.analysis.summary import comparison_of_rows, quantity_tests, rows_with_verdicts
from ampcompare.results.records.comparison import ArmSummary, Comparison, JudgedTable, Quantity
from ampcompare.results.records.metric import MAX_NAME, TOP1, Metric
from ampcompare.results.records.verdict import Verdict
from ampcompare.settings.metric_direction import known_metric_direction

Better = Literal["higher", "lower"]
MAX_BYTES = 16_000_000
# published runs of ResNet-50 on ImageNet, one per arm
EXAMPLE = Path(__file__).parent / "data" / "resnet50.csv"
EXAMPLE_SD = 0.18  # the largest published standard deviation (conservative)
ACCURACIES = ("accuracy", "acc", "top-1", "top1")
KNOWN = ("arm", "seed", "seconds", "n")
NOT_MEASURED = ("", "-", "n/a")
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?|nan|[+-]?inf"
VALUE = re.compile(rf"(?P<mean>{NUMBER})\s*%?(?:\s*(?:±|\+/-)\s*(?P<sd>{NUMBER})\s*%?)?", re.IGNORECASE)
RULE = re.compile(r":?-+:?")  # of a Markdown table
NO_COUNT = Verdict(kind="inconclusive", why="number of runs unknown")


@dataclass(frozen=True)
class PrintedNumber:
    """A number as it is printed: its mean, the step of its last digit, and the standard deviation over runs if any."""

    mean: float
    step: float
    sd: float | None = None

    def multiplied_by(self, factor: float) -> PrintedNumber:
        """Return the same quantity in another unit, or with the other sign."""
        scale = abs(factor)
        return PrintedNumber(
            factor * self.mean, scale * self.step, None if self.sd is None else scale * self.sd
        )


@dataclass(frozen=True)
class RunOrMeanOfRuns:
    """One line: a run, or the mean of several, of a number that is None where it has a deviation and does not say so.

    The speed is the negative logarithm of the seconds.
    """

    arm: str
    seed: str
    value: PrintedNumber | None
    speed: PrintedNumber | None
    diverged: bool
    runs: int | None


@dataclass(frozen=True)
class ResultsTable:
    """All lines in order, what was measured, and columns that are not looked at."""

    runs: Sequence[RunOrMeanOfRuns]
    metric: Metric
    unused: Sequence[str]


def read_table(
    source: Path | TextIO | str, *, metric: str | None = None, better: Better | None = None
) -> ResultsTable:
    """Read a CSV (comma, semicolon or tab) or Markdown table. Lines that begin with `#` are remarks.

    Args:
        source: the path of a file in UTF-8, an open file, or the text itself.
        metric: the column that holds the results; None for accuracy, else the only one.
        better: "higher" or "lower"; None for what the name of the metric tells.

    Raises:
        RecordError: the table cannot be read; the message names the line.
        ConfigError: there is no such column, or the metric needs a direction.
    """
    name = str(source) if isinstance(source, Path) else "the table"
    written, lines = _header_and_numbered_rows(_read_source(source, name), name)
    head = [cell.lower() for cell in written]
    if "arm" not in head or len(set(head)) < len(head):
        raise RecordError(
            f"{name} needs a column arm, and no column twice; its columns are {', '.join(head)}"
        )
    column, found = _find_column_and_metric(dict(zip(head, written, strict=True)), lines, metric, better)
    runs = []
    seen: set[tuple[str, str]] = set()
    for number, cells in lines:
        run = _run_or_mean_of_line(dict(zip(head, cells, strict=True)), column, f"{name}, line {number}")
        if run.seed and (run.arm.casefold(), run.seed) in seen:
            raise RecordError(f"{name}, line {number}: a second line of {run.arm} with seed {run.seed}")
        seen.add((run.arm.casefold(), run.seed))
        runs.append(run)
    values = [run.value.mean for run in runs if run.value is not None]
    scale = _full_scale_if_shares(values, f"{name}: values of {column}") if found.name == TOP1.name else None
    scale = 1 / found.factor if scale is None else scale
    runs = [replace(run, value=run.value and run.value.multiplied_by(scale)) for run in runs]
    return ResultsTable(runs, found, [cell for cell in head if cell not in (*KNOWN, column, f"{column} sd")])


def _read_source(source: Path | TextIO | str, name: str) -> str:
    """Return the text of a table.

    Raises:
        RecordError: a file cannot be read.
    """
    try:
        if isinstance(source, Path):
            return read_text(source, max_bytes=MAX_BYTES, encoding="utf-8-sig")
        return source if isinstance(source, str) else source.read(MAX_BYTES)
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None


def _full_scale_if_shares(values: Sequence[float], name: str) -> float | None:
    """Return the value of a perfect score: 1 if accuracies are shares of 1; None, for 100, if they are percentages.

    Raises:
        RecordError: they are neither.
    """
    low, high = min(values, default=0.0), max(values, default=100.0)
    if low < 0 or high > 100 or (high > 1 > low and values):
        raise RecordError(f"{name} go from {low:g} to {high:g}; give percentages")
    return 1.0 if high <= 1 else None


def _header_and_numbered_rows(text: str, name: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header, and number and cells of each line below it."""
    numbered = [(number, line.strip(" ")) for number, line in enumerate(text.splitlines(), 1)]
    numbered = [(number, line) for number, line in numbered if line.strip(" |") and not line.startswith("#")]
    if len(numbered) < 2:
        raise RecordError(
            f"{name} holds no runs; it needs a header such as arm,seed,accuracy and a line per run"
        )
    separator = max(",;\t|", key=numbered[0][1].count)
    try:
        rows = list(csv.reader((line.strip("|") for _, line in numbered), delimiter=separator, strict=True))
    except csv.Error as error:
        raise RecordError(f"{name} is not a CSV: {error}") from None
    lines = [
        (n, [cell.strip().strip("*` ") for cell in cells])
        for (n, _), cells in zip(numbered, rows, strict=False)
    ]
    lines = [(number, cells) for number, cells in lines if not all(map(RULE.fullmatch, cells))]
    (_, header), *rest = lines
    for number, cells in rest:
        if len(cells) != len(header):
            raise RecordError(
                f"{name}, line {number}, has {len(cells)} cells where the header has {len(header)}"
            )
    return header, rest


def _find_column_and_metric(
    head: Mapping[str, str],
    lines: Sequence[tuple[int, list[str]]],
    wanted_metric: str | None,
    better: Better | None,
) -> tuple[str, Metric]:
    """Return the column of the results and its metric; `head` has the names in lower case, each as it is written."""
    numeric: list[str] = []
    for at, name in enumerate(head):
        if name in KNOWN or name.endswith(" sd"):
            continue
        if any(_parse_number(cells[at]) for _, cells in lines):
            numeric.append(name)
    chosen = (
        [wanted_metric.lower()]
        if wanted_metric
        else [name for name in numeric if name in ACCURACIES] or numeric
    )
    if not chosen and "seconds" in head:
        return "", TOP1  # times alone
    if len(chosen) != 1 or chosen[0] not in head:
        what = "several columns of numbers" if chosen else "no column of numbers"
        if wanted_metric:
            what = f"no column {wanted_metric!r}"
        remedy = f"name one of {', '.join(numeric or head)} with --metric"
        if not chosen:
            remedy = f"write numbers without units (26.9, not 26.9Gb) below {', '.join(head)}"
        raise ConfigError(f"the table has {what}; {remedy}")
    (column,) = chosen
    if column in ACCURACIES and better != "lower":
        return column, TOP1
    if better is None:
        if not (goal := known_metric_direction(head[column])):
            raise ConfigError(f"give the direction of {column}: --better higher or --better lower")
        better = "higher" if goal == "max" else "lower"
    return column, Metric(name=head[column][:MAX_NAME], better=better)


def _parse_number(text: str) -> PrintedNumber | None:
    match = VALUE.fullmatch(text.replace("−", "-"))
    if match is None:
        return None
    digits, _, exponent = match["mean"].lower().partition("e")
    step = (
        10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        if math.isfinite(float(match["mean"]))
        else 0.0
    )
    return PrintedNumber(float(match["mean"]), step, float(match["sd"]) if match["sd"] else None)


def _run_or_mean_of_line(cells: Mapping[str, str], column: str, location: str) -> RunOrMeanOfRuns:
    def parse_cell(name: str) -> PrintedNumber | None:
        text = cells.get(name, "")
        if text.lower() in NOT_MEASURED:
            return None
        if (found := _parse_number(text)) is None:
            raise RecordError(
                f"{location}: {name} is {text[:40]!r}, not a number such as 76.1 or 77.01 ± 0.16"
            )
        return found

    if not cells["arm"]:
        raise RecordError(f"{location}, names no arm")
    value, spread = parse_cell(column), parse_cell(f"{column} sd")
    count, seconds = parse_cell("n"), parse_cell("seconds")
    if value is not None and spread is not None:
        value = replace(value, sd=spread.mean)
    if value is not None and value.sd is not None and not 0 <= value.sd < math.inf:
        raise RecordError(f"{location}: the standard deviation is {value.sd:g}")
    if count is not None and not (count.mean >= 1 and count.mean == int(count.mean) < 1e6):
        raise RecordError(f"{location}: n is {count.mean:g}, and counts runs")
    if seconds is not None and not 0 < seconds.mean < math.inf:
        raise RecordError(f"{location}: seconds are {seconds.mean:g}, and a time is finite and above 0")
    diverged = value is not None and not math.isfinite(value.mean)
    runs: int | None = 1
    if count:
        runs = int(count.mean)
    elif value is not None and value.sd is not None:  # a mean of an unknown number of runs
        runs = None
    seed = cells.get("seed", "")
    seed = str(int(seed)) if seed.isascii() and seed.isdigit() and len(seed) < 16 else seed
    speed = seconds and replace(seconds.multiplied_by(1 / seconds.mean), mean=-math.log(seconds.mean))
    return RunOrMeanOfRuns(cells["arm"], seed, None if diverged else value, speed, diverged, runs)


@dataclass(frozen=True)
class _PooledRuns:
    """All runs of an arm: their mean and number, and the variance that the `known` of them show."""

    mean: float
    count: int
    variance: float
    known: int
    step: float  # of the last digit that most numbers have; some may have lost zeros at their end
    single: bool  # whether each number is that of one run, which has a rounding error of its own


@dataclass(frozen=True)
class _ArmDifference:
    """An effect, None where the number of runs is not known, and how it came about."""

    effect: Effect | None
    rounded: bool = False  # its error is that of the rounding of the printed numbers
    by_welch: bool = False
    uses_sd: bool = False


def _pool_runs_of_lines(lines: Sequence[tuple[RunOrMeanOfRuns, PrintedNumber]]) -> _PooledRuns:
    """Pool the lines of an arm: the variance within each line that has one, and that between the lines."""
    counts = [run.runs or 1 for run, _ in lines]
    # The mean of several runs without a standard deviation shows no more of the spread than one run does.
    known = [
        count if quantity.sd is not None else 1 for (_, quantity), count in zip(lines, counts, strict=True)
    ]
    values, total = [quantity.mean for _, quantity in lines], sum(known)
    mean, center = _weighted_mean(values, counts), _weighted_mean(values, known)
    squares = sum(
        (count - 1) * (quantity.sd or 0.0) ** 2 + count * (quantity.mean - center) ** 2
        for (_, quantity), count in zip(lines, known, strict=True)
    )
    variance = squares / max(1, total - 1)
    step = statistics.median_high(quantity.step for _, quantity in lines)
    return _PooledRuns(mean, sum(counts), variance, total, step, all(run.runs == 1 for run, _ in lines))


def _weighted_mean(values: Sequence[float], counts: Sequence[int]) -> float:
    return math.fsum(map(math.prod, zip(values, counts, strict=True))) / sum(counts)


def _difference_of_arms(
    arm: Sequence[RunOrMeanOfRuns],
    reference: Sequence[RunOrMeanOfRuns],
    value: Callable[[RunOrMeanOfRuns], PrintedNumber | None],
    floor: float,
    sd: float | None = None,
) -> _ArmDifference | None:
    """Compare two arms: by pairs where most runs of both have a seed in common, else by Welch's test.

    Values of single runs are rounded to the digits that are printed, or to a coarser step of which all are multiples;
    the spread of that is added to the one they show. A rounded mean is off by the same amount however many runs are
    behind it, so the standard error is at least that of rounding both sides. A standard deviation `sd` over seeds, in
    the unit of the values, is used if a side has fewer than three runs.
    """
    here, there = (
        [(run, found) for run in side if (found := value(run)) is not None] for side in (arm, reference)
    )
    if not here or not there:
        return None
    if any(run.runs is None for run, _ in (*here, *there)):
        return _ArmDifference(None)
    ours, theirs = samples = _pool_runs_of_lines(here), _pool_runs_of_lines(there)
    values = [quantity.mean for _, quantity in (*here, *there)]
    step = (
        largest_common_spacing(values, min(ours.step, theirs.step)) if ours.single and theirs.single else 0.0
    )
    rounding = [max(step, sample.step) ** 2 / 12 for sample in samples]  # variance of the error of a number
    counts = [sample.count for sample in samples]
    pairs = _value_pairs_of_common_seeds(here, there)
    is_paired = 2 * len(pairs) > max(len(here), len(there))
    uses_sd = min(counts) < MIN_PAIRS and sd is not None
    if sd is not None and uses_sd:
        error = sd * math.sqrt(sum(1 / count for count in counts))
        effect = Effect(ours.mean - theirs.mean, sd * math.sqrt(2), error, SPREAD_IS_KNOWN, min(counts))
    elif is_paired:
        least = max(floor, math.sqrt(sum(rounding)))
        effect = effect_in_spacings(
            paired_effect([a for a, _ in pairs], [b for _, b in pairs], least, is_rounded=True), step
        )
    else:
        variances = [
            max(floor**2 / 2, rounded, sample.variance + sample.single * rounded)
            for sample, rounded in zip(samples, rounding, strict=True)
        ]
        effect = welch_effect(ours.mean - theirs.mean, variances, [sample.known for sample in samples])
    least, error = rounding_deviation_of_spacings(ours.step, theirs.step), effect.error
    effect = replace(effect, error=max(least, error))
    return _ArmDifference(effect, error < least, not uses_sd and not is_paired, uses_sd)


def _value_pairs_of_common_seeds(
    here: Sequence[tuple[RunOrMeanOfRuns, PrintedNumber]],
    there: Sequence[tuple[RunOrMeanOfRuns, PrintedNumber]],
) -> list[tuple[float, float]]:
    """Return the values of single runs of both sides that have a seed in common."""
    partners = {run.seed: quantity.mean for run, quantity in there if run.seed and run.runs == 1}
    return [(one.mean, partners[run.seed]) for run, one in here if run.runs == 1 and run.seed in partners]


def judge_arms(
    table: ResultsTable, reference: str | None = None, sd: float | None = None, terms: Terms | None = None
) -> Comparison:
    """Compare every arm of a table with one of them.

    Args:
        table: as `read_table` or `table_of_records` returns it.
        reference: an arm, in any case and any spelling of it; None for script, else fp32, else the first.
        sd: standard deviation over seeds in the unit of the metric, for arms with fewer than three runs; None for none.
        terms: margins and error rate; None for the usual ones.

    Raises:
        ConfigError: `sd` is not positive, there is no arm of the reference's name, or the metric needs a margin.
        ExtraMissing: the packages for statistics are not installed.
    """
    require_statistics_packages()
    terms = terms or Terms()
    if sd is not None and not (math.isfinite(sd) and sd > 0):
        raise ConfigError(f"the spread over seeds is {sd}; give the standard deviation, such as 0.18")
    arms: dict[str, list[RunOrMeanOfRuns]] = {}
    for run in table.runs:
        arms.setdefault(run.arm.casefold(), []).append(run)
    base = _runs_of_reference(arms, reference)
    margin = _margin_of_table(terms, table.metric, base, sd)
    metric = _metric_with_decimals(table)
    stored_sd = None if sd is None else sd / metric.factor
    sign = 1 if metric.better == "higher" else -1
    values = {
        key: _difference_of_arms(
            its, base, lambda run: run.value and run.value.multiplied_by(sign), 1e-12, stored_sd
        )
        for key, its in arms.items()
        if its is not base
    }
    design = SequentialDesign()
    tests = quantity_tests(margin, terms, design)
    evidence = _evidence_of_table(arms, base, values)
    verdicts = {name: verdicts_on(known, tests[name].margin, design) for name, known in evidence.items()}
    untested = [_row_of_lines(its, metric, values.get(key)) for key, its in arms.items()]
    rows = rows_with_verdicts(untested, verdicts, tests)
    uses_sd = any(value.uses_sd for value in values.values() if value)
    independent = [arms[key][0].arm for key, value in values.items() if value and value.by_welch]
    facts = {
        "command": "",
        "reference": base[0].arm,
        "seeds": sorted({seed for row in rows for seed in row.seeds}),
        "reading": [
            *none_recommended_sentences(rows, base[0].arm, terms.prefer, metric),
            *_note_lines(table, rows, sd if not uses_sd else None),
        ],
        "records": [],
        "judged": JudgedTable(references=[base[0].arm], sd=sd if uses_sd else None, independent=independent),
    }
    comparison = comparison_of_rows(rows, metric, margin, terms, design, facts)
    return comparison.model_copy(update={"headline": headline(comparison)})


def _runs_of_reference(
    arms: Mapping[str, Sequence[RunOrMeanOfRuns]], reference: str | None
) -> Sequence[RunOrMeanOfRuns]:
    """Return the runs of the reference; None for script, else fp32, else the first arm.

    Raises:
        ConfigError: there is no such arm.
    """
    names = [run.arm for runs in arms.values() for run in runs]
    wanted = find_text_naming_same_arm(reference, names)
    if wanted is None:
        return arms[default_reference(list(arms))]
    if wanted.casefold() not in arms:
        known = format_few_names([its[0].arm for its in arms.values()])
        raise ConfigError(f"there is no arm {reference!r}; choose one of {known}")
    return arms[wanted.casefold()]


def _metric_with_decimals(table: ResultsTable) -> Metric:
    """Return the metric, shown with as many decimals as most values of the table have, 2 for a share at least."""
    metric = table.metric
    digits = [
        -math.floor(math.log10(metric.factor * run.value.step) + 1e-9) for run in table.runs if run.value
    ]
    least = 2 if metric.factor > 1 else 0
    return metric.model_copy(update={"decimals": min(8, max(least, statistics.mode(digits or [0])))})


def _margin_of_table(
    terms: Terms, metric: Metric, reference: Sequence[RunOrMeanOfRuns], sd: float | None
) -> QualityMargin:
    """Return the margin in the unit that is shown, and where it comes from."""
    rule = terms.margin_rule
    values = [run.value.multiplied_by(metric.factor) for run in reference if run.value is not None]
    if metric.name != TOP1.name and rule.kind == "auto":
        raise ConfigError(
            f"{metric.name} has no usual margin; give --margin, a difference that does not matter"
        )
    if rule.kind == "sd" and sd is None and any(value.sd is not None for value in values):
        raise ConfigError(f"a margin of {terms.margin} needs single runs of {reference[0].arm}, or --sd")
    step = statistics.median_high(value.step for value in values) if values else 1.0
    means = [value.mean for value in values]
    return resolve_margin(
        rule, means, metric=metric, resolution=step, reference=reference[0].arm, sd=sd, from_lower_limit=True
    )


def _run_count_and_diverged_count(runs: Sequence[RunOrMeanOfRuns]) -> tuple[int, int]:
    return sum(run.runs or 1 for run in runs), sum(run.runs or 1 for run in runs if run.diverged)


def _divergence_verdict(runs: Sequence[RunOrMeanOfRuns]) -> Verdict:
    count, diverged = _run_count_and_diverged_count(runs)
    return Verdict(kind="diverged", share=(diverged, count)) if diverged else EMPTY


def _row_of_lines(
    runs: Sequence[RunOrMeanOfRuns], metric: Metric, value: _ArmDifference | None
) -> ArmSummary:
    """Return the row of an arm before its verdicts."""
    count, diverged = _run_count_and_diverged_count(runs)
    is_count_known = all(run.runs is not None or run.diverged for run in runs)
    rate = wilson_interval(diverged, count) if diverged and is_count_known else (None, None)
    measured = [(run, run.value) for run in runs if run.value is not None]
    sample = _pool_runs_of_lines(measured) if measured else None
    only_sd = measured[0][1].sd if measured else None  # of a single line whose number of runs is unknown
    return ArmSummary(
        arm=runs[0].arm,
        lr=math.nan,
        seeds=sorted({int(run.seed) for run in runs if run.seed.isdigit()}),
        completed=count - diverged if is_count_known else None,
        diverged=diverged,
        diverged_low=rate[0],
        diverged_high=rate[1],
        metric_mean=sample.mean if sample else None,
        metric_sd=math.sqrt(sample.variance) if sample and sample.known > 1 else only_sd,
        metric_best=metric.best(quantity.mean for _, quantity in measured),
        pairs=value.effect.pairs if value and value.effect else 0,
        status=str(_divergence_verdict(runs) or "ok"),
    )


def _evidence_of_table(
    arms: Mapping[str, Sequence[RunOrMeanOfRuns]],
    base: Sequence[RunOrMeanOfRuns],
    differences: Mapping[str, _ArmDifference | None],
) -> dict[Quantity, dict[str, Evidence]]:
    """Return what the lines of a table show of each arm.

    Args:
        arms: the lines of each, by its key.
        base: those of the reference.
        differences: of the metric, by the keys of the others.
    """
    found: dict[Quantity, dict[str, Evidence]] = {"quality": {}, "time": {}}
    for key, runs in arms.items():
        arm, divergence = runs[0].arm, _divergence_verdict(runs)
        if runs is base:
            found["quality"][arm] = Evidence(untested=divergence)
            continue
        survivors = _surviving_and_all_counts_of_reference(runs, base)
        quality = _evidence_of_difference(differences[key], divergence)
        found["quality"][arm] = replace(quality, survivors=survivors)
        time = _difference_of_arms(runs, base, lambda run: run.speed, TIME_FLOOR)
        found["time"][arm] = _evidence_of_difference(time, EMPTY)
    return found


def _surviving_and_all_counts_of_reference(
    runs: Sequence[RunOrMeanOfRuns], base: Sequence[RunOrMeanOfRuns]
) -> tuple[int, int] | None:
    """Return how many of the reference's runs next to these did not diverge, and how many there are; None if all."""
    seeds = {run.seed for run in runs}
    next_to_these = [run for run in base if run.seed in seeds] or base
    ran = sum(run.runs or 1 for run in next_to_these)
    kept = sum(run.runs or 1 for run in next_to_these if not run.diverged)
    return (kept, ran) if kept < ran else None


def _evidence_of_difference(difference: _ArmDifference | None, untested: Verdict) -> Evidence:
    if difference is None or difference.effect is None:
        return Evidence(untested=untested or (NO_COUNT if difference else EMPTY))
    return Evidence(difference.effect, untested, difference.effect.mean, difference.rounded)


def _note_lines(table: ResultsTable, rows: Sequence[ArmSummary], unused_sd: float | None) -> Iterator[str]:
    if any(row.quality == NO_COUNT for row in rows):
        yield "The number of runs behind a mean is not known: add a column n."
    if unused_sd is not None:
        yield f"--sd {unused_sd:g} is not used: no arm that can be compared by it has fewer than {MIN_PAIRS} runs."
    if table.unused:
        yield f"Not looked at, so that lines of an arm count as its runs whatever they say: {', '.join(table.unused)}."
