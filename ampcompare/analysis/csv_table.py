"""Figures that someone else measured, read from a CSV: one line per run."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ampcompare.errors import RecordError
from ampcompare.files.read import read_text
from ampcompare.settings.durations import parse_duration

__all__ = ["MAX_BYTES", "ResultsTable", "Run", "read_table", "read_table_file"]

KNOWN = ("arm", "seed", "accuracy", "time", "memory", "diverged")
REMARKS = ("note", "notes", "remark", "remarks", "source")
OTHER_NAMES = {"method": "arm", "name": "arm", "backend": "arm", "acc": "accuracy", "top1": "accuracy"}
DIVERGED = ("nan", "inf", "+inf", "-inf", "diverged")
YES, NO = ("1", "yes", "true", "y"), ("", "0", "no", "false", "n")
MAX_CHARACTERS = 4_000_000
MAX_BYTES = 16_000_000  # in UTF-8, which takes up to four bytes per character
MAX_CELLS = 500_000


@dataclass(frozen=True)
class Run:
    """One line.

    Attributes:
        arm: as written.
        settings: every column that is neither a measurement nor a remark, such as the batch size.
        seed: as written, "" if the table has none.
        accuracy: in points, None if not measured or diverged.
        seconds: of whatever was timed.
        mebibytes: of memory.
    """

    arm: str
    settings: tuple[tuple[str, str], ...]
    seed: str
    accuracy: float | None
    seconds: float | None
    mebibytes: float | None
    diverged: bool


@dataclass(frozen=True)
class ResultsTable:
    """All runs in order, and the step in which accuracies were written down, in points."""

    runs: tuple[Run, ...]
    resolution: float


def read_table_file(path: Path) -> ResultsTable:
    """Read a table from a CSV file in UTF-8, as `read_table` does.

    Raises:
        RecordError: the file cannot be read, or is not a table.
    """
    try:
        text = read_text(path, most=MAX_BYTES, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read the table {path}: {getattr(error, 'strerror', None) or error}") from None
    return read_table(text, str(path))


def read_table(text: str, name: str) -> ResultsTable:
    """Read a table with a header; lines that begin with `#` are remarks.

    Columns are `arm`, `accuracy` (percent, or shares where none is above 1) and, where wanted, `seed`, `time` (seconds,
    8h26m45s or 8:26:45), `memory` (MiB) and `diverged` (yes or no). An accuracy of NaN is a run that diverged, an empty
    one was not measured. Any other column is a setting that runs must agree in to be compared.

    Raises:
        RecordError: naming the line and what is wrong with it.
    """
    if len(text) > MAX_CHARACTERS:
        raise RecordError(f"{name} has {len(text):,} characters; a table of runs has at most {MAX_CHARACTERS:,}")
    lines = text.splitlines()
    if len(lines) > MAX_CELLS or max(map(text.count, ",;\t")) > MAX_CELLS:
        raise RecordError(f"{name} has more than the {MAX_CELLS:,} lines or cells that are read")
    numbered = [(place, line) for place, line in enumerate(lines, 1) if line.strip()]
    numbered = [(place, line) for place, line in numbered if not line.lstrip().startswith("#")]
    if not numbered:
        raise RecordError(f"{name} is empty; it needs a header such as arm,seed,accuracy and a line per run")
    separator = max(",;\t", key=numbered[0][1].count)
    try:
        rows = list(csv.reader(io.StringIO("\n".join(line for _, line in numbered)), delimiter=separator, strict=True))
    except csv.Error as error:
        raise RecordError(f"{name} is not a CSV: {error}") from None
    header = _header(rows[0], name)
    if len(rows) == 1:
        raise RecordError(f"{name} has a header and no runs")
    runs, seen = [], set()
    for (place, _), cells in zip(numbered[1:], rows[1:], strict=False):
        where = f"{name}, line {place}"
        if len(cells) != len(header):
            raise RecordError(f"{where}, has {len(cells)} cells where the header has {len(header)}")
        run = _run(dict(zip(header, (cell.strip() for cell in cells), strict=True)), where)
        key = (run.arm, run.settings, run.seed)
        if run.seed and key in seen:
            raise RecordError(f"{where}: {run.arm} with seed {run.seed} is there twice; a run counts once")
        seen.add(key)
        runs.append(run)
    place = header.index("accuracy")
    digits = max(len(cells[place].strip().partition(".")[2]) for cells in rows[1:])
    return _in_points(runs, 10.0**-digits)


def _header(cells: list[str], name: str) -> list[str]:
    words = [cell.strip().lower() for cell in cells]
    header = [OTHER_NAMES.get(word, word) for word in words]
    for column in ("arm", "accuracy"):
        if column not in header:
            shown = ", ".join(cell.strip()[:30] for cell in cells[:8])
            raise RecordError(f"{name} has no column {column!r}; its header is {shown}, and arm,seed,accuracy would do")
    twice = [word for word, times in Counter(header).items() if times > 1]
    if twice or "" in header:
        raise RecordError(f"{name} has {f'two columns {twice[0]!r}' if twice else 'a column without a name'}")
    return header


def _run(cells: Mapping[str, str], where: str) -> Run:
    if not cells["arm"]:
        raise RecordError(f"{where}, names no arm")
    flag = cells.get("diverged", "").lower()
    if flag not in (*YES, *NO):
        raise RecordError(f"{where}: diverged is {flag!r}; write yes or no")
    accuracy = cells["accuracy"].rstrip("%").strip()
    diverged = flag in YES or accuracy.lower() in DIVERGED
    value = None if diverged or not accuracy else _number(accuracy, f"{where}: accuracy")
    if value is not None and not 0 <= value <= 100:
        raise RecordError(f"{where}: accuracy is {accuracy}; it is a percentage, or a share of 1")
    settings = tuple((name, text) for name, text in cells.items() if name not in (*KNOWN, *REMARKS))
    return Run(
        arm=cells["arm"],
        settings=settings,
        seed=cells.get("seed", ""),
        accuracy=value,
        seconds=_seconds(cells.get("time", ""), where),
        mebibytes=_positive(cells.get("memory", ""), f"{where}: memory"),
        diverged=diverged,
    )


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RecordError(f"{what} is {text[:40]!r}, which is not a number; {_how(text)}") from None


def _how(text: str) -> str:
    """Return how a number that could not be read is to be written."""
    if "," in text:
        return f"write it with a decimal point, and without separators of thousands: {_with_a_point(text)}"
    return "NaN is a run that diverged, and an empty cell was not measured"


def _with_a_point(text: str) -> str:
    """Return what a number with commas most likely is; three digits after each comma are thousands."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text):
        return text.replace(",", "")
    return text.replace(".", "").replace(",", ".")[:40]


def _positive(text: str, what: str) -> float | None:
    if not text or text.lower() in DIVERGED:
        return None
    value = _number(text, what)
    if not (value > 0 and math.isfinite(value)):
        raise RecordError(f"{what} is {text[:40]}; it is above 0, or empty where it was not measured")
    return value


def _seconds(text: str, where: str) -> float | None:
    seconds = parse_duration(text)
    if seconds:
        return seconds
    return _positive(text, f"{where}: time")


def _in_points(runs: list[Run], resolution: float) -> ResultsTable:
    highest = max((run.accuracy for run in runs if run.accuracy is not None), default=100.0)
    if highest > 1:
        return ResultsTable(tuple(runs), resolution)
    scaled = tuple(
        Run(**{**vars(run), "accuracy": None if run.accuracy is None else 100 * run.accuracy}) for run in runs
    )
    return ResultsTable(scaled, 100 * resolution)
