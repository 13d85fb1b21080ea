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
from importlib.resources import files
from pathlib import Path
from typing import Literal

from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.base.files.read import read_text
from ampcompare.base.files.run_files import RunFile
from ampcompare.runs.analysis.answer.headline import not_recommended
from ampcompare.runs.analysis.evidence.step_time import TIME_FLOOR
from ampcompare.runs.analysis.inference.criteria import AccuracyMargin, Criteria, resolve_margin
from ampcompare.runs.analysis.inference.effect import MIN_PAIRS, SPREAD_IS_KNOWN, Effect, paired, welch
from ampcompare.runs.analysis.inference.looks import Design
from ampcompare.runs.analysis.inference.verdict import Evidence
from ampcompare.runs.analysis.runs.scores import grid_step, in_steps, rounding_spread
from ampcompare.runs.analysis.summary import Line, conclude, decided_rows
from ampcompare.runs.records.comparison import ArmSummary, Comparison, JudgedTable
from ampcompare.runs.records.metric import MAX_NAME, TOP1, Metric
from ampcompare.runs.records.verdict import Verdict

__all__ = ["EXAMPLE_SD", "MAX_BYTES", "Better", "ResultsTable", "example_table", "judge", "read_table"]

Better = Literal["higher", "lower"]
MAX_BYTES = 16_000_000
MAX_LINES = 100_000
EXAMPLE_SD = 0.18  # the largest published standard deviation (conservative)
ACCURACIES = ("accuracy", "acc", "top-1", "top1")
KNOWN = ("arm", "seed", "seconds", "n")
REPORT_COLUMNS = {"metric_final", "metric_last_mean"}
NOT_MEASURED = ("", "-", "n/a")
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?|nan|[+-]?inf"
VALUE = re.compile(rf"(?P<mean>{NUMBER})\s*%?(?:\s*(?:±|\+/-)\s*(?P<sd>{NUMBER})\s*%?)?", re.IGNORECASE)
RULE = re.compile(r"\s*:?-+:?\s*")
NO_COUNT = Verdict(kind="inconclusive", why="number of runs unknown")
MIN_FLOOR = 1e-12


@dataclass(frozen=True)
class Quantity:
    """A number as it is printed: its mean, the step of its last digit, and the standard deviation over runs if any."""

    mean: float
    step: float
    sd: float | None = None

    def times(self, factor: float) -> Quantity:
        """Return the same quantity in another unit."""
        return Quantity(factor * self.mean, factor * self.step, None if self.sd is None else factor * self.sd)


@dataclass(frozen=True)
class Run:
    """One line: a run, or the mean of several.

    Attributes:
        value: of the metric, in the unit that is shown; None if it was not measured or is not finite.
        runs: behind the line; None where it has a standard deviation and does not say of how many.
    """

    arm: str
    seed: str
    value: Quantity | None
    seconds: Quantity | None
    diverged: bool
    runs: int | None


@dataclass(frozen=True)
class ResultsTable:
    """All lines in order, what was measured, and columns that are not looked at."""

    runs: tuple[Run, ...]
    metric: Metric
    unused: tuple[str, ...] = ()


def read_table(
    source: Path | str, name: str = "the table", *, metric: str | None = None, better: Better | None = None
) -> ResultsTable:
    """Read a CSV (comma, semicolon or tab) or Markdown table with a header; lines that begin with `#` are remarks.

    Args:
        source: a file in UTF-8, or the text of a table.
        name: of a text, for errors.
        metric: column of the results; by default the accuracy, else the only other column of numbers.
        better: direction of a metric that is no accuracy.

    Raises:
        RecordError: it is not a table of results; the message names the line.
        ConfigError: it has no such column, or the direction of its metric is not known.
    """
    if isinstance(source, Path):
        name, text = str(source), _text_of(source)
    else:
        text = source
    written, lines = _cells(text, name)
    head = [cell.lower() for cell in written]
    if set(head) >= REPORT_COLUMNS:
        raise RecordError(f"{name} is a report of ampcompare, not a table; `ampcompare report FOLDER` has its verdicts")
    if "arm" not in head or len(set(head)) < len(head):
        raise RecordError(f"{name} needs a column arm, and no column twice; its columns are {', '.join(head)}")
    column, found = _metric_of(head, lines, metric, better)
    if column in head and found.name != TOP1.name:
        found = found.model_copy(update={"name": written[head.index(column)][:MAX_NAME]})
    runs = [_run(dict(zip(head, cells, strict=True)), column, f"{name}, line {number}") for number, cells in lines]
    seen: set[tuple[str, str]] = set()
    for (number, _), run in zip(lines, runs, strict=True):
        if run.seed and (run.arm.casefold(), run.seed) in seen:
            raise RecordError(f"{name}, line {number}: a second line of {run.arm} with seed {run.seed}")
        seen.add((run.arm.casefold(), run.seed))
    values = [run.value.mean for run in runs if run.value is not None]
    if found.name == TOP1.name:  # a share of 1 or a percentage
        if any(value < 0 or value > 100 for value in values) or (max(values, default=2) > 1 > min(values, default=2)):
            raise RecordError(
                f"{name}: values of {column} go from {min(values):g} to {max(values):g}; give percentages"
            )
        if values and max(values) <= 1:
            runs = [run if run.value is None else replace(run, value=run.value.times(100)) for run in runs]
    used = (*KNOWN, column, f"{column} sd")
    return ResultsTable(tuple(runs), found, tuple(cell for cell in head if cell not in used))


def example_table() -> ResultsTable:
    """Return a published table of ResNet-50 on ImageNet, one run per arm."""
    text = (files("ampcompare.runs.analysis") / "data" / "resnet50.csv").read_text(encoding="utf-8")
    return read_table(text, "the example")


def _text_of(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if path.is_dir() or (path.stem == RunFile.REPORT and (folder / RunFile.CELLS).is_dir()):
        raise RecordError(f"{path} is no table of results; verdicts on a run directory: ampcompare report {folder}")
    try:
        return read_text(path, most=MAX_BYTES, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read the table {path}: {getattr(error, 'strerror', None) or error}") from None


def _cells(text: str, name: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header, and number and cells of each line below it."""
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip(" |")]
    numbered = [(number, line) for number, line in numbered if not line.lstrip().startswith("#")]
    if len(numbered) < 2:
        raise RecordError(
            f"{name} holds no runs; it needs a header such as arm,seed,accuracy,seconds and a line per run"
        )
    if len(numbered) > MAX_LINES:
        raise RecordError(f"{name} has {len(numbered)} lines, and at most {MAX_LINES} are read")
    if numbered[0][1].count("|") > 1:
        rows = [line.strip().strip("|").split("|") for _, line in numbered]
    else:
        separator = max(",;\t", key=numbered[0][1].count)
        try:
            rows = list(csv.reader((line for _, line in numbered), delimiter=separator, strict=True))
        except csv.Error as error:
            raise RecordError(f"{name} is not a CSV: {error}") from None
    lines = [
        (number, [cell.strip() for cell in cells])
        for (number, _), cells in zip(numbered, rows, strict=False)
        if not all(map(RULE.fullmatch, cells))
    ]
    for number, cells in lines:
        if len(cells) != len(lines[0][1]):
            raise RecordError(f"{name}, line {number}, has {len(cells)} cells where the header has {len(lines[0][1])}")
    return lines[0][1], lines[1:]


def _metric_of(
    head: Sequence[str], lines: Sequence[tuple[int, list[str]]], wanted: str | None, better: Better | None
) -> tuple[str, Metric]:
    """Return the column of the results and its metric.

    Raises:
        ConfigError: there is no such column, several could be meant, or its direction is not given.
    """
    numeric = [
        name
        for at, name in enumerate(head)
        if name not in KNOWN and not name.endswith(" sd") and any(_parsed(cells[at]) for _, cells in lines)
    ]
    chosen = [wanted.lower()] if wanted else [name for name in numeric if name in ACCURACIES] or numeric
    if not chosen and "seconds" in head:
        return "", TOP1  # times alone
    if not chosen:
        raise ConfigError(
            "the table has no metric, a column of plain numbers such as accuracy, and no seconds to compare; "
            f"its columns are {', '.join(head)}"
        )
    if len(chosen) > 1 or chosen[0] not in head:
        what = f"no column {wanted!r}" if wanted else "several columns of numbers"
        raise ConfigError(f"the table has {what}; name one of {', '.join(numeric)} with --metric")
    (column,) = chosen
    if column in ACCURACIES and better != "lower":
        return column, TOP1
    if better is None:
        raise ConfigError(f"give the direction of {column}: --better higher or --better lower")
    return column, Metric(name=column, better=better)


def _parsed(text: str) -> Quantity | None:
    match = VALUE.fullmatch(text.strip("*` ").replace("−", "-"))
    if match is None:
        return None
    digits, _, exponent = match["mean"].lower().partition("e")
    step = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])) if math.isfinite(float(match["mean"])) else 0.0
    return Quantity(float(match["mean"]), step, float(match["sd"]) if match["sd"] else None)


def _run(cells: Mapping[str, str], column: str, location: str) -> Run:
    def number(name: str) -> Quantity | None:
        text = cells.get(name, "")
        if text.lower() in NOT_MEASURED:
            return None
        if (found := _parsed(text)) is None:
            raise RecordError(f"{location}: {name} is {text[:40]!r}, not a number such as 76.1 or 77.01 ± 0.16")
        return found

    if not (arm := cells["arm"].strip("*` ")):
        raise RecordError(f"{location}, names no arm")
    value, spread, count, seconds = number(column), number(f"{column} sd"), number("n"), number("seconds")
    if value is not None and spread is not None:
        value = replace(value, sd=spread.mean)
    if value is not None and value.sd is not None and not 0 <= value.sd < math.inf:
        raise RecordError(f"{location}: the standard deviation is {value.sd:g}")
    if count is not None and not (count.mean >= 1 and count.mean == int(count.mean) < 1e6):
        raise RecordError(f"{location}: n is {count.mean:g}, and counts runs")
    if seconds is not None and not 0 < seconds.mean < math.inf:
        raise RecordError(f"{location}: seconds are {seconds.mean:g}, and a time is finite and above 0")
    diverged = value is not None and not math.isfinite(value.mean)
    runs = int(count.mean) if count else None if value is not None and value.sd is not None else 1
    seed = cells.get("seed", "")
    seed = str(int(seed)) if seed.isascii() and seed.isdigit() and len(seed) < 16 else seed
    return Run(arm, seed, None if diverged else value, seconds, diverged, runs)


@dataclass(frozen=True)
class _Sample:
    """All runs of an arm: their mean and number, and the variance that the `known` of them show."""

    mean: float
    count: int
    variance: float
    known: int
    rounding: float  # variance of the rounding error of a number
    single: bool  # whether each number is that of one run, which has this error of its own


@dataclass(frozen=True)
class _Difference:
    """An effect, None where the number of runs is not known, and how it came about."""

    effect: Effect | None
    rounded: bool = False  # its error is that of the rounding of the printed numbers
    by_welch: bool = False
    uses_sd: bool = False


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(map(math.prod, zip(values, weights, strict=True))) / math.fsum(weights)


def _sample(lines: Sequence[tuple[Run, Quantity]], step: float = 0.0) -> _Sample:
    """Pool the lines of an arm: the variance within each line that has one, and that between the lines.

    Args:
        step: of a grid on which the values lie, if it is coarser than the printed digits.
    """
    counts = [run.runs or 1 for run, _ in lines]
    # The mean of several runs without a standard deviation shows no more of the spread than one run does.
    known = [count if quantity.sd is not None else 1 for (_, quantity), count in zip(lines, counts, strict=True)]
    values, total = [quantity.mean for _, quantity in lines], sum(known)
    center = _mean(values, known)
    squares = sum(
        (count - 1) * (quantity.sd or 0.0) ** 2 + count * (quantity.mean - center) ** 2
        for (_, quantity), count in zip(lines, known, strict=True)
    )
    rounding = max(step, _usual_step(lines)) ** 2 / 12
    variance = squares / (total - 1) if total > 1 else 0.0
    return _Sample(
        _mean(values, counts), sum(counts), variance, total, rounding, all(run.runs == 1 for run, _ in lines)
    )


def _usual_step(lines: Sequence[tuple[Run, Quantity]]) -> float:
    """Return the step of the last digit that the numbers of an arm have; some may have lost zeros at their end."""
    return statistics.median_high(quantity.step for _, quantity in lines)


def _compare(
    arm: Sequence[Run],
    reference: Sequence[Run],
    value: Callable[[Run], Quantity | None],
    floor: float,
    sd: float | None = None,
) -> _Difference | None:
    """Compare two arms: by pairs where most runs of both have a seed in common, else by Welch's test.

    Values of single runs are rounded to the digits that are printed, or to a coarser step of which all are multiples;
    the spread of that is added to the one they show. A rounded mean is off by the same amount however many runs are
    behind it, so the standard error is at least that of rounding both sides.

    Args:
        value: of a line, larger where it is better.
        floor: smallest spread of a difference, above 0.
        sd: standard deviation over seeds that is known from elsewhere, used if a side has fewer than three runs.
    """
    here, there = ([(run, found) for run in side if (found := value(run)) is not None] for side in (arm, reference))
    if not here or not there:
        return None
    both = (*here, *there)
    if any(run.runs is None for run, _ in both):
        return _Difference(None)
    is_single = all(run.runs == 1 for run, _ in both)
    printed = min(_usual_step(here), _usual_step(there))
    step = grid_step([quantity.mean for _, quantity in both], printed) if is_single else 0.0
    samples = _sample(here, step), _sample(there, step)
    partners = {run.seed: quantity.mean for run, quantity in there if run.seed and run.runs == 1}
    pairs = [(one.mean, partners[run.seed]) for run, one in here if run.runs == 1 and run.seed in partners]
    by_welch = uses_sd = False
    if sd is not None and min(sample.count for sample in samples) < MIN_PAIRS:
        counts, uses_sd = [sample.count for sample in samples], True
        error = sd * math.sqrt(sum(1 / count for count in counts))
        effect = Effect(samples[0].mean - samples[1].mean, sd * math.sqrt(2), error, SPREAD_IS_KNOWN, min(counts))
    elif 2 * len(pairs) > max(len(here), len(there)):
        least = max(floor, math.sqrt(sum(sample.rounding for sample in samples)))
        effect = in_steps(paired([a for a, _ in pairs], [b for _, b in pairs], least, rounded=True), step)
    else:
        by_welch = True
        variances = [
            max(floor**2 / 2, sample.rounding, sample.variance + sample.single * sample.rounding) for sample in samples
        ]
        effect = welch(samples[0].mean - samples[1].mean, variances, [sample.known for sample in samples])
    least = rounding_spread(_usual_step(here), _usual_step(there))
    is_rounded = effect.error < least
    return _Difference(replace(effect, error=max(least, effect.error)), is_rounded, by_welch, uses_sd)


def judge(
    table: ResultsTable,
    *,
    reference: str | None = None,
    sd: float | None = None,
    terms: Criteria | None = None,
    runs: int | None = None,
) -> Comparison:
    """Compare every arm of a table with one of them.

    Args:
        reference: an arm, in any case; by default fp32, or else the first.
        sd: standard deviation over seeds that is known from elsewhere, in the unit of the metric that is shown, used
            for arms with fewer than three runs.
        terms: margins and preference; a margin that is a number is in the unit of the metric that is shown.
        runs: behind each line that has a standard deviation and does not say of how many.

    Raises:
        ConfigError: no such arm, or a number that cannot be used.
    """
    terms, metric = terms or Criteria(), table.metric
    if sd is not None and not (math.isfinite(sd) and sd > 0):
        raise ConfigError(f"the spread over seeds is {sd}; give the standard deviation, such as 0.18")
    if runs is not None and runs < 2:
        raise ConfigError(f"{runs} runs have no standard deviation; give the number of runs behind each line")
    arms: dict[str, list[Run]] = {}
    for run in table.runs:
        arms.setdefault(run.arm.casefold(), []).append(replace(run, runs=runs) if run.runs is None else run)
    base_key = reference.casefold() if reference is not None else "fp32" if "fp32" in arms else next(iter(arms))
    if (base := arms.get(base_key)) is None:
        known = ", ".join(repr(its[0].arm) for its in list(arms.values())[:8])
        raise ConfigError(f"there is no arm {reference!r}; choose one of {known}")
    margin = _margin(terms, metric, base, sd)
    steps = [-math.floor(math.log10(run.value.step) + 1e-9) for run in table.runs if run.value is not None]
    metric = metric.model_copy(
        update={"decimals": min(8, max(2 if metric.factor > 1 else 0, statistics.mode(steps or [0])))}
    )
    lines, independent, uses_sd = [], [], False
    for its in arms.values():
        value, time = _differences(its, base, metric, sd)
        if its is not base and value is not None:
            independent += [its[0].arm] if value.by_welch else []
            uses_sd = uses_sd or value.uses_sd
        lines.append(_line(its, base, metric, value, time))
    rows = decided_rows(lines, metric, margin, terms, Design())
    return conclude(
        rows,
        metric=metric,
        margin=margin,
        terms=terms,
        design=Design(),
        command="",
        reference=base[0].arm,
        seeds=sorted({int(run.seed) for run in table.runs if run.seed.isdigit()}),
        excluded=[],
        reading=[
            *not_recommended(rows, base[0].arm, terms.prefer, metric),
            *_notes(table, rows, sd if not uses_sd else None),
        ],
        records=[],
        judged=JudgedTable(references=[base[0].arm], sd=sd if uses_sd else None, within=[], independent=independent),
    )


def _differences(
    arm: Sequence[Run], base: Sequence[Run], metric: Metric, sd: float | None
) -> tuple[_Difference | None, _Difference | None]:
    """Return the difference in the metric, larger where it is better, and in the logarithm of speed."""

    def better(run: Run) -> Quantity | None:
        if run.value is None:
            return None
        stored = run.value.times(1 / metric.factor)
        return stored if metric.better == "higher" else replace(stored, mean=-stored.mean)

    def speed(run: Run) -> Quantity | None:
        if run.seconds is None:
            return None
        seconds = run.seconds.mean
        return replace(run.seconds.times(1 / seconds), mean=-math.log(seconds))

    stored_sd = None if sd is None else sd / metric.factor
    return _compare(arm, base, better, MIN_FLOOR, stored_sd), _compare(arm, base, speed, TIME_FLOOR)


def _margin(terms: Criteria, metric: Metric, reference: Sequence[Run], sd: float | None) -> AccuracyMargin:
    """Return the margin in the unit that is shown, and where it comes from.

    Raises:
        ConfigError: the metric has no usual margin and none is given, or none can be computed by the rule.
    """
    rule, values = terms.rule, [run.value for run in reference if run.value is not None]
    if metric.name != TOP1.name and rule.kind == "auto":
        raise ConfigError(f"{metric.name} has no usual margin; give --margin, a difference that does not matter")
    if rule.kind == "sd" and sd is None and any(value.sd is not None for value in values):
        raise ConfigError(f"a margin of {terms.margin} needs single runs of {reference[0].arm}, or --sd")
    step = statistics.median_high(value.step for value in values) if values else 1.0
    means = [value.mean for value in values]
    return resolve_margin(rule, means, metric=metric, resolution=step, reference=reference[0].arm, sd=sd, least=True)


def _line(
    runs: Sequence[Run], base: Sequence[Run], metric: Metric, value: _Difference | None, time: _Difference | None
) -> Line:
    """Return the line of an arm before its verdicts."""
    count, diverged = (sum(run.runs or 1 for run in its) for its in (runs, [run for run in runs if run.diverged]))
    divergence = Verdict(kind="diverged", share=(diverged, count)) if diverged else Verdict()
    measured = [(run, run.value.times(1 / metric.factor)) for run in runs if run.value is not None]
    sample = _sample(measured) if measured else None
    only_sd = measured[0][1].sd if measured else None  # of a single line whose number of runs is unknown
    effect = value.effect if value and runs is not base else None
    row = ArmSummary(
        arm=runs[0].arm,
        engine=None,
        half=None,
        lr=math.nan,
        seeds=sorted({int(run.seed) for run in runs if run.seed.isdigit()}),
        completed=count - diverged,
        diverged=diverged,
        failed=0,
        metric_mean=sample.mean if sample else None,
        metric_sd=math.sqrt(sample.variance) if sample and sample.known > 1 else only_sd,
        metric_best=metric.best(quantity.mean for _, quantity in measured),
        pairs=effect.pairs if effect else 0,
        status=str(divergence or "ok"),
    )
    if runs is base:
        return Line(row, Evidence(untested=divergence))
    return Line(row, _evidence(value, divergence), _evidence(time, Verdict()))


def _evidence(part: _Difference | None, untested: Verdict) -> Evidence:
    if part is None or part.effect is None:
        return Evidence(untested=untested or (NO_COUNT if part else Verdict()))
    return Evidence(part.effect, untested, part.effect.mean, part.rounded)


def _notes(table: ResultsTable, rows: Sequence[ArmSummary], unused_sd: float | None) -> Iterator[str]:
    if any(row.quality == NO_COUNT for row in rows):
        yield "The number of runs behind a mean is not known: add a column n, or give --runs."
    if unused_sd is not None:
        yield f"--sd {unused_sd:g} is not used: no arm that can be compared by it has fewer than {MIN_PAIRS} runs."
    if table.unused:
        yield f"Not looked at, so that lines of an arm count as its runs whatever they say: {', '.join(table.unused)}."
