"""A study of error rates: tables whose rows are the cells of a grid, how they are run, and the page that shows them.

A study says how data are drawn, which function of the package judges them, and on which grid. What is common is here:
replicates, streams of random numbers, processes, rates with their intervals, tables, JSON and Markdown.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from scipy.stats import binomtest
from tabulate import tabulate

from benchmarks.harness import write_results

Row = dict[str, str]
Measured = tuple[dict[str, list[Row]], dict[str, Any]]
WINNER = ("better", "worse")
KEEPS = ("identical", "equivalent", "non-inferior", "better")
NUMBER = re.compile(r"±?(\d[\d,.]*)( %|x)?")


@dataclass(frozen=True)
class Table:
    """One table of a study.

    Attributes:
        name: heading on the page, and the value of `--part`.
        cells: the grid, in the order of the rows.
        row: makes the row of a cell from the cell and the number of replicates; in a study with one stream of random
            numbers, from its generator too.
        by: columns that tell the lines of the page apart, where a line shows ranges over several rows; none for a line
            for each row.
        singly: column and values of the rows that have a line of their own all the same.
        only_json: columns that the page leaves out.
        about: a sentence above the table.
    """

    name: str
    cells: Sequence[Any]
    row: Callable[..., Row]
    by: Sequence[str] = ()
    singly: Mapping[str, Sequence[str]] = field(default_factory=dict)
    only_json: Sequence[str] = ()
    about: str = ""


@dataclass(frozen=True)
class Study:
    """Tables that one command makes and one page shows.

    Attributes:
        about: what was done, for the page.
        replicates: usual number of comparisons that are drawn for a cell.
        seed: of the one stream of random numbers that all cells draw from in turn; None where each cell begins a stream
            of its own, so that tables and cells can be run apart.
        measure: makes rows by table, and further data for the JSON, instead of the cells: for studies of real runs.
    """

    title: str
    about: str
    tables: Sequence[Table]
    replicates: int = 4000
    seed: int | None = None
    measure: Callable[[int], Measured] | None = None


def study(name: str) -> Study:
    """Return a study by the name of its module."""
    found = import_module(f"benchmarks.rates.{name}").STUDY
    assert isinstance(found, Study)
    return found


def run(name: str, parts: Sequence[str] = (), replicates: int | None = None, jobs: int = 1) -> dict[str, Any]:
    """Run a study, or some of its tables, and return what its JSON holds."""
    chosen = study(name)
    count = replicates or chosen.replicates
    tables: dict[str, list[Row]] = {}
    more: dict[str, Any] = {}
    if chosen.measure is not None:
        tables, more = chosen.measure(count)
    elif chosen.seed is not None:
        if parts:
            raise SystemExit(f"the tables of {name} draw from one stream of random numbers: leave out --part")
        generator = np.random.default_rng(chosen.seed)
        tables = {
            table.name: [table.row(cell, count, generator) for cell in table.cells] for table in chosen.tables
        }
    else:
        for table in chosen.tables:
            if not parts or table.name in parts:
                tables[table.name] = _in_processes(name, table, count, jobs)
    facts = f"numpy {np.__version__}, scipy {scipy.__version__}; {count:,} replicates where a row has no other number."
    return {"environment": facts, "tables": tables, **more}


def _in_processes(name: str, table: Table, replicates: int, jobs: int) -> list[Row]:
    tasks = [(name, table.name, place, replicates) for place in range(len(table.cells))]
    if jobs == 1:
        return [_row(task) for task in tasks]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(_row, tasks))


def _row(task: tuple[str, str, int, int]) -> Row:
    name, part, place, replicates = task
    (table,) = (table for table in study(name).tables if table.name == part)
    return table.row(table.cells[place], replicates)


def total(replicates: int, trial: Callable[[], Mapping[str, float]]) -> Counter[str]:
    """Return the sums of what a trial returns, over all replicates."""
    sums: Counter[str] = Counter()
    for _ in range(replicates):
        sums.update(trial())
    return sums


def begin_with(words: Sequence[str], among: Sequence[str]) -> list[bool]:
    """Return which verdicts begin with one of some words."""
    return [word.startswith(tuple(among)) for word in words]


def percent(count: float, of: float) -> str:
    """Return a rate in percent with one digit."""
    return f"{100 * count / of:.1f}" if of else "-"


def bounds(count: int, of: int) -> str:
    """Return the 95 % interval of a rate by Wilson's method."""
    interval = binomtest(count, of).proportion_ci(0.95, method="wilson")
    return f"{100 * interval.low:.1f} to {100 * interval.high:.1f} %"


def count_verdicts(words: Sequence[str]) -> Row:
    """Return columns on the verdicts of comparisons of an arm with itself: winners and losers, and every word."""
    counts = Counter(word.partition(" (")[0] or "none" for word in words)
    wrong = sum(counts[word] for word in WINNER)
    return {
        "better or worse": f"{wrong} ({percent(wrong, len(words))} %)",
        "95 % interval": bounds(wrong, len(words)),
        "all verdicts": ", ".join(f"{word} {count}" for word, count in counts.most_common()),
    }


def write(name: str, data: Mapping[str, Any], out: str) -> None:
    """Write the JSON of a study and its page; tables that were not run again stay as they are."""
    chosen = study(name)
    path = Path(out + ".json")
    tables = dict(data["tables"])
    if path.exists():
        tables = {**json.loads(path.read_text(encoding="utf-8"))["tables"], **tables}
    data = {
        **data,
        "tables": {table.name: tables[table.name] for table in chosen.tables if table.name in tables},
    }
    facts = data["environment"]
    rest = {key: value for key, value in data.items() if key != "environment"}
    write_results(out, chosen.title, chosen.about, facts, text_of(chosen, data), rest)


def text_of(chosen: Study, data: Mapping[str, Any]) -> str:
    """Return the part of the page with the tables."""
    parts = []
    for table in chosen.tables:
        rows = data["tables"].get(table.name)
        if rows is None:
            continue
        if len(chosen.tables) > 1:
            parts.append(f"## {table.name}")
        if table.about:
            parts.append(table.about)
        same, shown = varying(lines(table, rows))
        ranges = f"{len(rows)} rows, as ranges; each is in the JSON." if table.by else ""
        if ranges or same:
            parts.append(" ".join(filter(None, [ranges, same])))
        parts.append(tabulate(shown, headers="keys", tablefmt="pipe", disable_numparse=True))
    sizes = [
        int(row["replicates"]) for rows in data["tables"].values() for row in rows if "replicates" in row
    ]
    if sizes:
        each = "; ".join(
            f"{bounds(round(size / 20), size)} at {size:,} replicates" for size in sorted(set(sizes))
        )
        parts.append(f"The 95 % interval of a rate of 5 %: {each}.")
    return "\n\n".join([*parts, *data.get("notes", [])])


def varying(rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Return a sentence on the columns that hold one value in all rows, and the rows without them.

    Columns that are empty or `-` in all rows are left out of both. Fewer than three rows stay as they are.
    """
    if len(rows) < 3:
        return "", [dict(row) for row in rows]
    same = {name: value for name, value in rows[0].items() if all(row[name] == value for row in rows)}
    shown = [f"{name} {value}" for name, value in same.items() if value not in ("", "-")]
    sentence = f"In each row: {'; '.join(shown)}." if shown else ""
    return sentence, [{name: value for name, value in row.items() if name not in same} for row in rows]


def lines(table: Table, rows: Sequence[Row]) -> list[Row]:
    """Return the lines of the page: rows, or ranges over those that agree in the columns `by`."""
    if not table.by:
        return [_page_columns(table, row) for row in rows]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        own = any(row[column] in values for column, values in table.singly.items())
        key = tuple(row.values()) if own else tuple(row[column] for column in table.by)
        groups.setdefault(key, []).append(row)
    return [
        _page_columns(table, {column: _range([row[column] for row in its]) for column in its[0]})
        for its in groups.values()
    ]


def _page_columns(table: Table, row: Row) -> Row:
    return {column: value for column, value in row.items() if column not in table.only_json}


def _range(values: Sequence[str]) -> str:
    """Return one value, the lowest to the highest of numbers, or a list of words."""
    different = list(dict.fromkeys(values))
    numbers = [value for value in different if value != "-"]
    if len(different) < 3 and len(numbers) < 2:
        return different[0] if len(different) == 1 else ", ".join(different)
    found = [match for value in numbers if (match := NUMBER.fullmatch(value))]
    if len(found) == len(numbers):
        low, *_, high = sorted(found, key=lambda match: float(match[1].replace(",", "")))
        return f"{low[0].removesuffix(low[2] or '')}-{high[0].lstrip('±')}"
    return ", ".join(different)
