"""External results, read from a CSV or a Markdown table: one line per run, or per mean of runs."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ampcompare.analysis.tables.columns import Columns, TableOptions, find_columns
from ampcompare.analysis.tables.metrics import in_shares, is_percentage
from ampcompare.analysis.tables.quantities import (
    Quantity,
    bytes_of,
    is_quantity,
    parse_bytes,
    parse_number,
    parse_rate,
    parse_seconds,
    seconds_of,
)
from ampcompare.base.errors import RecordError
from ampcompare.base.files.read import read_text
from ampcompare.records.metric import Metric

__all__ = ["MAX_BYTES", "ResultsTable", "Run", "read_table", "read_table_file", "same_words"]

DIVERGED = ("nan", "inf", "+inf", "-inf", "diverged")
NOT_MEASURED = ("", "-", "–", "—", "n/a", "na", "none", "?")
YES, NO = ("1", "yes", "true", "y"), ("", "0", "no", "false", "n")
RULE = re.compile(r"\s*:?-+:?\s*")
OWN_COLUMNS = {"metric_final", "metric_last_mean"}  # of `report.csv`
MAX_CHARACTERS = 4_000_000
MIB = 2**20
MAX_BYTES = 16_000_000  # in UTF-8, which takes up to four bytes per character
MAX_CELLS = 500_000
MAX_RUNS = 1_000_000  # behind one line
SMALL_MEMORY = 100 * MIB  # less than what any training on a GPU takes


@dataclass(frozen=True)
class Run:
    """One line: a run, or the mean of several.

    Attributes:
        arm: as written.
        settings: name and text of what runs must share, such as the batch size.
        seed: as written, whole numbers without zeros before or behind them; "" if the table has none.
        value: of the metric, in the unit that is shown; None if not measured or diverged.
        seconds: of whatever was timed, or the inverse of a throughput.
        peak_bytes: of memory.
        runs: behind the line; None where it has a standard deviation and does not say of how many runs.
    """

    arm: str
    settings: tuple[tuple[str, str], ...]
    seed: str
    value: Quantity | None
    seconds: Quantity | None
    peak_bytes: float | None
    diverged: bool
    runs: int | None = 1


@dataclass(frozen=True)
class ResultsTable:
    """All lines in order, what was measured, and notes on how they were read."""

    runs: tuple[Run, ...]
    metric: Metric | None
    notes: tuple[str, ...] = ()


def read_table_file(path: Path, options: TableOptions | None = None) -> ResultsTable:
    """Read a table from a file in UTF-8, as `read_table` does.

    Raises:
        RecordError: the file cannot be read, or is not a table.
        ConfigError: it has no column that the options name.
    """
    if path.is_dir():
        raise RecordError(f"{path} is a folder, but a table is a CSV or Markdown file. {_report_of(str(path))}")
    if path.stem == "report" and (path.parent / "cells").is_dir():
        raise RecordError(f"{path} is a report of ampcompare, not a table. {_report_of(str(path.parent))}")
    try:
        text = read_text(path, most=MAX_BYTES, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read the table {path}: {getattr(error, 'strerror', None) or error}") from None
    return read_table(text, str(path), options)


def read_table(text: str, name: str, options: TableOptions | None = None) -> ResultsTable:
    """Read a table with a header; lines that begin with `#` are remarks.

    Args:
        name: of the table, for errors.

    Raises:
        RecordError: it is not a table of results; the message names the line.
        ConfigError: it has no column that the options name.
    """
    numbers, rows = _cells(text, name)
    if set(rows[0]) >= OWN_COLUMNS:
        raise RecordError(f"{name} is a report of ampcompare, not a table. {_report_of('FOLDER')}")
    body = rows[1:]
    numeric = [
        any(map(is_quantity, column)) and all(is_quantity(cell) or cell.lower() in NOT_MEASURED for cell in column)
        for column in zip(*body, strict=True)
    ]
    columns = find_columns(rows[0], numeric, name, options or TableOptions())
    locations = [f"{name}, line {number}" for number in numbers[1:]]
    runs = [_run(cells, columns, location) for cells, location in zip(body, locations, strict=True)]
    _refuse_doubles(runs, locations)
    metric = columns.metric
    if metric is not None:
        runs, metric = _in_one_unit(runs, locations, columns, metric)
        _check_range(runs, locations, columns, metric)
    return ResultsTable(tuple(runs), metric, tuple(_notes(runs, body, columns)))


def _report_of(folder: str) -> str:
    return f"The verdicts on the runs of a comparison: ampcompare report {shlex.quote(folder)}"


def _cells(text: str, name: str) -> tuple[list[int], list[list[str]]]:
    """Return the numbers of the lines with cells, and their cells, the header first."""
    if len(text) > MAX_CHARACTERS:
        raise RecordError(f"{name} has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    lines = text.splitlines()
    if len(lines) > MAX_CELLS or max(map(text.count, ",;\t|")) > MAX_CELLS:
        raise RecordError(f"{name} has more than the {MAX_CELLS:,} lines or cells that are read")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    numbered = [(number, line) for number, line in numbered if not line.lstrip().startswith("#")]
    if not numbered:
        raise RecordError(f"{name} is empty; it needs a header such as arm,seed,accuracy and a line per run")
    if numbered[0][1].count("|") >= 2:
        parted = [(number, line.strip().strip("|").split("|")) for number, line in numbered]
        kept = [(number, cells) for number, cells in parted if not all(map(RULE.fullmatch, cells))]
    else:
        separator = max(",;\t", key=numbered[0][1].count)
        try:
            body = io.StringIO("\n".join(line for _, line in numbered))
            parsed = list(csv.reader(body, delimiter=separator, strict=True))
        except csv.Error as error:
            raise RecordError(f"{name} is not a CSV: {error}") from None
        kept = [(number, cells) for (number, _), cells in zip(numbered, parsed, strict=False)]
    if len(kept) < 2:
        raise RecordError(f"{name} has a header and no runs")
    width = len(kept[0][1])
    for number, cells in kept:
        if len(cells) != width:
            raise RecordError(f"{name}, line {number}, has {len(cells)} cells where the header has {width}")
    return [number for number, _ in kept], [[cell.strip() for cell in cells] for _, cells in kept]


def _run(cells: Sequence[str], columns: Columns, location: str) -> Run:
    def cell(role: str) -> str:
        return cells[columns.roles[role]] if role in columns.roles else ""

    def head(role: str) -> str:
        return columns.names[columns.roles[role]]

    arm = cell("arm").strip("*` ")
    if not arm:
        raise RecordError(f"{location}, names no arm")
    flag = cell("diverged").lower()
    if flag not in (*YES, *NO):
        raise RecordError(f"{location}: diverged is {flag[:40]!r}; write yes or no")
    diverged = flag in YES or cell("value").lower() in DIVERGED
    value = None
    if not diverged and cell("value").lower() not in NOT_MEASURED:
        what = f"{location}: {head('value')}"
        value = _quantity(parse_number(cell("value")), cell("value"), what)
        value = _with_sd(value, cell("sd"), f"{location}: {head('sd')}" if "sd" in columns.roles else "")
    seconds = _seconds(cells, columns, location)
    runs = _count(cell("runs"), f"{location}: {head('runs')}") if cell("runs") else None
    spread = next((one.sd for one in (value, seconds) if one is not None and one.sd is not None), None)
    if runs == 1 and spread is not None:
        raise RecordError(
            f"{location} gives a standard deviation, {spread:g}, for one run; give the number of runs averaged"
        )
    return Run(
        arm=arm,
        settings=tuple((columns.names[number], cells[number]) for number in columns.settings),
        seed=_seed(cell("seed")),
        value=value,
        seconds=seconds,
        peak_bytes=_bytes(cells, columns, location),
        diverged=diverged,
        runs=runs if runs is not None or spread is not None else 1,
    )


def _seed(text: str) -> str:
    """Return a seed as it is compared: 0, 00, 0.0 and 0x0 are one; a float would join large ones."""
    if text.isdecimal():
        return str(int(text))
    if re.fullmatch(r"0[xX][0-9a-fA-F]+", text):
        return str(int(text, 16))
    number = parse_number(text)
    whole = number is not None and number.sd is None and not number.percent and number.mean.is_integer()
    return str(int(number.mean)) if number is not None and whole else text


def _quantity(parsed: Quantity | None, text: str, what: str) -> Quantity:
    if parsed is None:
        raise RecordError(f"{what} is {text[:40]!r}, which is not a number; {_how(text)}")
    return parsed


def _with_sd(value: Quantity, text: str, what: str) -> Quantity:
    """Return a value with the standard deviation of the column next to it, unless it has one of its own."""
    if value.sd is not None or text.lower() in NOT_MEASURED:
        return value
    sd = _quantity(parse_number(text), text, what)
    if sd.mean < 0:
        raise RecordError(f"{what} is {text[:40]}; a standard deviation is 0 or more")
    return replace(value, sd=sd.mean, sd_step=sd.step)


def _count(text: str, what: str) -> int:
    count = _quantity(parse_number(text), text, what).mean
    if count != int(count) or not 1 <= count <= MAX_RUNS:
        raise RecordError(f"{what} is {text[:40]}; it must be the number of runs averaged in the line, 1 or more")
    return int(count)


def _seconds(cells: Sequence[str], columns: Columns, location: str) -> Quantity | None:
    """Return the time of a line, from its time or its throughput."""
    role = "time" if "time" in columns.roles else "throughput"
    number = columns.roles.get(role)
    if number is None or cells[number].lower() in (*NOT_MEASURED, *DIVERGED):
        return None
    text, name = cells[number], columns.names[number]
    what = f"{location}: {name}"
    if role == "throughput":
        rate = _positive(parse_rate(text), text, what)
        inverse = 1 / rate.mean
        sd = None if rate.sd is None else rate.sd * inverse**2
        return Quantity(inverse, rate.step * inverse**2, sd, rate.sd_step * inverse**2)
    unit = seconds_of(columns.units[number] or name) or 1.0
    seconds = _positive(parse_seconds(text, unit), text, what)
    spread = cells[columns.roles["time sd"]] if "time sd" in columns.roles else ""
    if seconds.sd is not None or spread.lower() in NOT_MEASURED:
        return seconds
    of_column = _quantity(parse_seconds(spread, unit), spread, f"{what} sd")
    return replace(seconds, sd=abs(of_column.mean), sd_step=of_column.step)


def _bytes(cells: Sequence[str], columns: Columns, location: str) -> float | None:
    number = columns.roles.get("memory")
    if number is None or cells[number].lower() in (*NOT_MEASURED, *DIVERGED):
        return None
    text = cells[number]
    unit = bytes_of(columns.units[number]) or MIB
    return _positive(parse_bytes(text, unit), text, f"{location}: {columns.names[number]}").mean


def _positive(parsed: Quantity | None, text: str, what: str) -> Quantity:
    quantity = _quantity(parsed, text, what)
    if not quantity.mean > 0:
        raise RecordError(f"{what} is {text[:40]}; it is above 0, or empty where it was not measured")
    return quantity


def _how(text: str) -> str:
    """Return how to write a number that could not be read."""
    if "," in text:
        return f"write it with a decimal point, and without separators of thousands: {_with_a_point(text)}"
    return "write NaN for a run that diverged, and leave the cell empty if it was not measured"


def _with_a_point(text: str) -> str:
    """Return what a number with commas most likely is; three digits after each comma are thousands."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text):
        return text.replace(",", "")[:40]
    return text.replace(".", "").replace(",", ".")[:40]


def same_words(text: str) -> str:
    """Return the key by which names and settings are compared: ignoring case, and numbers by value."""
    number = parse_number(text)
    return text.casefold() if number is None or number.sd is not None else repr(number.mean)


def _refuse_doubles(runs: Sequence[Run], locations: Sequence[str]) -> None:
    known = set()
    for run, location in zip(runs, locations, strict=True):
        settings = tuple(same_words(text) for _, text in run.settings)
        key = (run.arm.casefold(), settings, run.seed)
        if run.seed and key in known:
            raise RecordError(f"{location}: {run.arm} with seed {run.seed} appears twice; list each run once")
        known.add(key)


def _in_one_unit(
    runs: Sequence[Run], locations: Sequence[str], columns: Columns, metric: Metric
) -> tuple[list[Run], Metric]:
    """Return the values of a percentage in the unit that is shown: percent, or shares where the table has shares."""
    if not is_percentage(metric):
        return list(runs), metric
    head = columns.roles["value"]
    of_head = columns.units[head] == "%"
    share, percent = None, None
    for run, location in zip(runs, locations, strict=True):
        if run.value is None or run.value.mean == 0:
            continue
        if of_head or run.value.percent or abs(run.value.mean) > 1:
            percent = percent or (location, run.value)
        else:
            share = share or (location, run.value)
    if share is None:
        return list(runs), metric
    if percent is not None:
        raise RecordError(
            f"{share[0]}: {columns.names[head]} is {share[1].mean:g} and {percent[0].rpartition(', ')[2]} has "
            f"{percent[1].mean:g}; fractions and percentages are mixed, so write {100 * share[1].mean:g} or "
            f"{share[1].mean:g}%, whichever it is"
        )
    shown = in_shares(metric)
    if shown.factor == 1:
        return list(runs), shown
    return [run if run.value is None else replace(run, value=run.value.times(100)) for run in runs], shown


def _check_range(runs: Sequence[Run], locations: Sequence[str], columns: Columns, metric: Metric) -> None:
    if columns.metric is None or not is_percentage(columns.metric):
        return
    highest = None if metric.highest is None else metric.factor * metric.highest
    name = columns.names[columns.roles["value"]]
    for run, location in zip(runs, locations, strict=True):
        if run.value is not None and not (run.value.mean >= 0 and (highest is None or run.value.mean <= highest)):
            raise RecordError(f"{location}: {name} is {run.value.mean:g}; it must be a percentage or a fraction of 1")


def _notes(runs: Sequence[Run], body: Sequence[Sequence[str]], columns: Columns) -> list[str]:
    notes = []
    if columns.not_judged:
        several = len(columns.not_judged) > 1
        notes.append(
            f"Not judged: {', '.join(columns.not_judged[:8])}{', ...' if len(columns.not_judged) > 8 else ''}. "
            f"--metric judges {'one of them' if several else 'it'} instead, --setting makes "
            f"{'them settings' if several else 'it a setting'} that runs must share."
        )
    if any(run.value is not None and run.value.sd is not None for run in runs):
        notes.append("Numbers after ± or in brackets are read as the standard deviation over runs.")
    memory = columns.roles.get("memory")
    if memory is not None and not columns.units[memory]:
        plain = [run.peak_bytes for run, cells in zip(runs, body, strict=True) if parse_number(cells[memory])]
        if any(size is not None and size < SMALL_MEMORY for size in plain):
            notes.append("Memory has no unit and was read as MiB; write it as in 3.5 GB.")
    return notes
