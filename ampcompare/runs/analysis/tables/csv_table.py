"""External results, read from a CSV or a Markdown table: one line per run, or per mean of runs."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.base.files.read import read_text
from ampcompare.base.files.run_files import RunFile
from ampcompare.runs.analysis.tables.quantities import (
    ACCURACY,
    UNITS,
    Better,
    Quantity,
    bytes_of,
    in_shares,
    is_measurement,
    is_percentage,
    is_quantity,
    known_metric,
    parse_bytes,
    parse_number,
    parse_rate,
    parse_seconds,
    seconds_of,
)
from ampcompare.runs.records.metric import MAX_NAME, Metric

__all__ = ["MAX_BYTES", "ResultsTable", "Run", "TableOptions", "read_table", "read_table_file", "same_words"]

DIVERGED = ("nan", "inf", "+inf", "-inf", "diverged")
NOT_MEASURED = ("", "-", "–", "—", "n/a", "na", "none", "?")
YES, NO = ("1", "yes", "true", "y"), ("", "0", "no", "false", "n")
INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff]")  # of two arms that look alike one may have such characters
RULE = re.compile(r"\s*:?-+:?\s*")
OWN_COLUMNS = {"metric_final", "metric_last_mean"}  # of `report.csv`
MAX_CHARACTERS = 4_000_000
MIB = 2**20
MAX_BYTES = 16_000_000  # in UTF-8, which takes up to four bytes per character
MAX_CELLS = 500_000
MAX_RUNS = 1_000_000  # behind one line
SMALL_MEMORY = 100 * MIB  # less than what any training on a GPU takes
ARM = ("arm", "method", "backend", "name")
ARM_OTHERWISE = ("precision", "mode", "math", "dtype", "model", "config")  # if no column has a name of `ARM`
ROLES = {
    "seed": ("seed", "random seed"),
    "time": (
        *("time", "training time", "train time", "time to train", "total time", "step time", "iteration time"),
        *(
            "epoch time",
            "time per step",
            "time per epoch",
            "time/step",
            "time/epoch",
            "latency",
            "duration",
            "wall time",
        ),
        *("seconds", "minutes", "hours", "ms"),
    ),
    "throughput": ("throughput", "training throughput", "train throughput", "fps", "it/s"),
    "memory": (
        "memory",
        "mem",
        "peak memory",
        "peak mem",
        "gpu memory",
        "gpu mem",
        "max memory",
        "memory usage",
        "vram",
    ),
    "sd": ("sd", "std", "stdev", "std dev", "stddev", "standard deviation", "±", "+/-"),
    "runs": ("n", "runs", "num runs", "number of runs", "trials", "repeats", "num seeds", "seeds"),
    "diverged": ("diverged",),
}
MEAN = ("mean", "average", "avg")
REMARKS = ("note", "notes", "remark", "remarks", "comment", "comments", "source", "url", "link", "download", "log")
SETTINGS = (
    *("gpus", "gpu", "num gpus", "number of gpus", "nodes", "ranks", "world size", "processes", "machine", "device"),
    *("hardware", "system", "platform", "host", "batch", "batch size", "batch size/gpu", "batch/gpu", "bs"),
    *("global batch", "global batch size", "local batch size", "epoch", "epochs", "steps", "max steps", "iterations"),
    *("iters", "lr", "learning rate", "weight decay", "wd", "momentum", "optimizer", "schedule", "lr schd", "warmup"),
    *("warmup steps", "warmup epochs", "dropout", "label smoothing", "accumulation", "grad accum", "clip", "arch"),
    *("architecture", "model", "backbone", "network", "layers", "dataset", "data", "task", "image size", "crop size"),
    *("resolution", "seq len", "sequence length", "beam", "beam size", "workers", "threads", "framework", "torch"),
    *("pytorch", "cuda", "version", "container", "augmentation"),
)
PER_SECOND = re.compile(r".+(/| per )s(ec(ond)?)?")
UNIT = re.compile(r"(?P<name>.*?)\s*[(\[](?P<unit>[^()\[\]]*)[)\]]")


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
    if path.stem == RunFile.REPORT and (path.parent / RunFile.CELLS).is_dir():
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
    columns = _find_columns(rows[0], numeric, name, options or TableOptions())
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
    text = INVISIBLE.sub("", text)
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


def _run(cells: Sequence[str], columns: _Columns, location: str) -> Run:
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


def _seconds(cells: Sequence[str], columns: _Columns, location: str) -> Quantity | None:
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


def _bytes(cells: Sequence[str], columns: _Columns, location: str) -> float | None:
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
    runs: Sequence[Run], locations: Sequence[str], columns: _Columns, metric: Metric
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


def _check_range(runs: Sequence[Run], locations: Sequence[str], columns: _Columns, metric: Metric) -> None:
    if columns.metric is None or not is_percentage(columns.metric):
        return
    highest = None if metric.highest is None else metric.factor * metric.highest
    name = columns.names[columns.roles["value"]]
    for run, location in zip(runs, locations, strict=True):
        if run.value is not None and not (run.value.mean >= 0 and (highest is None or run.value.mean <= highest)):
            raise RecordError(f"{location}: {name} is {run.value.mean:g}; it must be a percentage or a fraction of 1")


def _notes(runs: Sequence[Run], body: Sequence[Sequence[str]], columns: _Columns) -> list[str]:
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


@dataclass(frozen=True)
class TableOptions:
    """What the caller says about a table.

    Attributes:
        metric: name of the column of results, or of what they are if the column is headed "mean".
        better: which direction is; by default that of the metric.
        settings: columns that runs must agree in, besides those with a known name.
    """

    metric: str | None = None
    better: Better | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Columns:
    """The indices of the columns.

    Attributes:
        roles: index by role: arm, and where there is one value, sd, runs, seed, time, time sd, memory, diverged, and
            throughput if there is no time.
        names: of all columns, in lower case, without units.
        units: of all columns, from their heads, "" for none.
        metric: that is judged; None if the table has times or memory only.
        settings: indices of what runs must share.
        not_judged: names of the columns that nothing is done with, except remarks.
    """

    roles: Mapping[str, int]
    names: tuple[str, ...]
    units: tuple[str, ...]
    metric: Metric | None
    settings: tuple[int, ...]
    not_judged: tuple[str, ...]


def _find_columns(head: Sequence[str], numeric: Sequence[bool], name: str, options: TableOptions) -> _Columns:
    """Find the role of each column.

    Args:
        head: the cells of the first line.
        numeric: of each column, whether all of its cells are numbers.
        name: of the table, for errors.

    Raises:
        RecordError: there is no arm or nothing that was measured, or two columns have the same role.
        ConfigError: there is no column that the options name.
    """
    names, units = zip(*(_name_and_unit(cell) for cell in head), strict=True)
    _refuse_double_columns(names, name)
    arm = _arm(names, name, head)
    roles = {"arm": arm}
    for role, known in ROLES.items():
        index = next((index for index, word in enumerate(names) if index != arm and _has_role(word, role, known)), None)
        if index is not None:
            roles[role] = index
    if "time" in roles:
        roles.pop("throughput", None)
    value, metric = _metric(names, roles, name, head, options)
    if value is not None:
        roles = {role: index for role, index in roles.items() if index != value} | {"value": value}
    _add_spreads(roles, names, value)
    wanted = [_index(names, word, "setting") for word in options.settings]
    used = {index for role, index in roles.items() if index not in wanted}
    settings = [
        index
        for index, word in enumerate(names)
        if index not in used
        and (index in wanted or word in SETTINGS or not (numeric[index] or is_measurement(word) or word in REMARKS))
    ]
    rest = [index for index in range(len(names)) if index not in used and index not in settings]
    return _Columns(
        roles={role: index for role, index in roles.items() if index not in settings},
        names=tuple(names),
        units=tuple(units),
        metric=metric,
        settings=tuple(settings),
        not_judged=tuple(names[index] for index in rest if names[index] not in REMARKS),
    )


def _name_and_unit(cell: str) -> tuple[str, str]:
    """Return `mem` and `gb` of `**Mem (GB)**`."""
    text = " ".join(cell.strip().strip("*").replace("_", " ").lower().split())
    if known_metric(text) or text in ("+/-", "±"):
        return text, ""
    match = UNIT.fullmatch(text)
    plain, unit = (match["name"], match["unit"].strip()) if match else (text, "")
    if plain.endswith(" %"):
        plain, unit = plain.removesuffix("%").strip(), unit or "%"
    plain = re.sub(r"\s*/\s*", "/", plain)
    words = plain.split()
    if not unit and len(words) > 1 and words[-1] in UNITS and words[0] in ("time", "memory", "mem"):
        plain, unit = " ".join(words[:-1]), words[-1]
    return plain, unit


def _refuse_double_columns(names: Sequence[str], name: str) -> None:
    twice = [word for word, times in Counter(names).items() if times > 1 and word]
    if twice or "" in names:
        raise RecordError(f"{name} has {f'two columns {twice[0]!r}' if twice else 'a column without a name'}")


def _arm(names: Sequence[str], name: str, head: Sequence[str]) -> int:
    certain = [index for index, word in enumerate(names) if word in ARM]
    if len(certain) > 1:
        raise RecordError(f"{name} has two columns of arms, {names[certain[0]]!r} and {names[certain[1]]!r}")
    otherwise = [names.index(word) for word in ARM_OTHERWISE if word in names]
    for index in (*certain, *otherwise):
        return index
    raise RecordError(f"{name} has no column 'arm'; its header is {_shown(head)}, and arm,seed,accuracy would do")


def _shown(head: Sequence[str]) -> str:
    return ", ".join(cell.strip()[:30] for cell in head[:8])


def _has_role(word: str, role: str, known: Sequence[str]) -> bool:
    return word in known or (role == "throughput" and PER_SECOND.fullmatch(word) is not None)


def _metric(
    names: Sequence[str], roles: Mapping[str, int], name: str, head: Sequence[str], options: TableOptions
) -> tuple[int | None, Metric | None]:
    """Return the column that is judged and what it holds."""
    taken = roles["arm"]
    metrics = {index: metric for index, word in enumerate(names) if index != taken and (metric := _known(word))}
    means = [index for index, word in enumerate(names) if word in MEAN]
    if options.metric is not None:
        wanted, _ = _name_and_unit(options.metric)
        meant = _known(wanted) or Metric(name=options.metric.strip()[:MAX_NAME] or "metric")
        indices = [index for index, word in enumerate(names) if word == wanted and index != taken]
        indices = indices or [index for index, metric in metrics.items() if metric == meant] or means
        if not indices:
            raise ConfigError(f"{name} has no column {options.metric!r} to judge; its header is {_shown(head)}")
        return indices[0], _directed(meant, options)
    accuracies = [index for index, metric in metrics.items() if metric == ACCURACY]
    if len(accuracies) > 1:
        first, second = (names[index] for index in accuracies[:2])
        raise RecordError(f"{name} has two columns of accuracy, {first!r} and {second!r}; choose one with --metric")
    for index in accuracies or metrics:
        return index, _directed(metrics[index], options)
    if means:
        return means[0], _directed(ACCURACY, options)
    if not {"time", "throughput", "memory"} & set(roles):
        raise RecordError(f"{name} has no column 'accuracy'; its header is {_shown(head)}; name one with --metric")
    return None, None


def _known(word: str) -> Metric | None:
    """Return the metric of `bleu`, `bleu mean` or `mean bleu`."""
    words = word.split()
    rest = [part for part in words if part not in MEAN]
    return known_metric(" ".join(rest)) if len(words) - len(rest) <= 1 else None


def _directed(metric: Metric, options: TableOptions) -> Metric:
    return metric if options.better is None else metric.model_copy(update={"better": options.better})


def _add_spreads(roles: dict[str, int], names: Sequence[str], value: int | None) -> None:
    """Find columns such as `bleu sd` and `time std`: the spread of another column."""
    for index, word in enumerate(names):
        of, _, last = word.rpartition(" ")
        if last not in ROLES["sd"] or not of:
            continue
        if "time" in roles and of == names[roles["time"]]:
            roles.setdefault("time sd", index)
        elif value is not None and of in (names[value], names[value].removesuffix(" mean").removeprefix("mean ")):
            roles.setdefault("sd", index)


def _index(names: Sequence[str], wanted: str, what: str) -> int:
    word, _ = _name_and_unit(wanted)
    if word not in names:
        raise ConfigError(f"the table has no column {wanted!r} for --{what}; it has {', '.join(names[:12])}")
    return names.index(word)
