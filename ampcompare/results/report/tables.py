"""Plain tables for a terminal, folded to its width, and for a file, in whole lines."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from tabulate import tabulate

GAP = 2
MIN_WIDTH = 20


def terminal_width() -> int | None:
    """Return the width of the terminal that stdout is, in characters; None if lines may have any length.

    A file or a pipe gets whole lines, which programs can search.
    """
    return max(shutil.get_terminal_size().columns, MIN_WIDTH) if sys.stdout.isatty() else None


def grid_text(rows: Sequence[Sequence[str]], headers: Iterable[str], width: int | None = None) -> str:
    """Return a table; if it is wider than `width`, its columns continue below, each part with the first column.

    A column that is wider than `width` by itself stays whole.

    Args:
        rows: their cells; each as many as headers.
        headers: of the columns.
        width: of a line in characters; None never splits.
    """
    names = list(headers)
    if width is None or not rows:
        return _simple_grid_text(rows, names)
    widths = [max(len(name) + GAP, *(len(row[index]) for row in rows)) for index, name in enumerate(names)]
    parts: list[list[int]] = [[0]]
    used = widths[0]
    for index in range(1, len(names)):
        if used + GAP + widths[index] > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(index)
        used += GAP + widths[index]
    tables: list[str] = []
    for part in parts:
        cells = [[row[index] for index in part] for row in rows]
        tables.append(_simple_grid_text(cells, [names[index] for index in part]))
    return "\n\n".join(tables)


def listing_text(rows: Sequence[Sequence[str]], headers: Iterable[str], width: int | None = None) -> str:
    """Return a table whose last column is text, which is wrapped if lines would be longer than `width`.

    Where the others leave less than `MIN_WIDTH` for it, each row is a paragraph below its first column.

    Args:
        rows: their cells; each as many as headers.
        headers: of the columns.
        width: of a line in characters; None never wraps.
    """
    names = list(headers)
    if width is None or not rows:
        return _simple_grid_text(rows, names)
    before = sum(
        GAP + max(len(name) + GAP, *(len(row[index]) for row in rows))
        for index, name in enumerate(names[:-1])
    )
    left = width - before
    if left < MIN_WIDTH:
        return "\n".join(line for row in rows for line in _row_as_lines(row, names, width))
    wrapped = [[*row[:-1], textwrap.fill(row[-1], left, break_on_hyphens=False)] for row in rows]
    return _simple_grid_text(wrapped, names)


def _row_as_lines(row: Sequence[str], names: Sequence[str], width: int) -> list[str]:
    """Return the lines of a row: its first column, the others that have a value with their heads, and its text."""
    facts = "; ".join(
        f"{name} {text}" for name, text in zip(names[1:-1], row[1:-1], strict=True) if text != "-"
    )
    indent = " " * GAP
    lines = [
        line
        for text in (facts, row[-1])
        for line in textwrap.wrap(
            text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    ]
    return [row[0], *lines]


def _simple_grid_text(rows: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    text: str = tabulate(rows, headers=names, tablefmt="simple", disable_numparse=True)
    return text
