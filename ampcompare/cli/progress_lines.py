"""The lines that a display of progress shows, as text with styles, for any width: no clock and no terminal here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampcompare.base.formatting import format_count, printable
from ampcompare.experiment.launch.base import Phase, Progress
from ampcompare.experiment.observer import Outline
from ampcompare.runs.settings.config import RunConfig

__all__ = ["CellView", "MatrixView", "Segment", "Symbols", "bar_lines", "describe_outline", "notice", "notices", "span"]

Segment = tuple[str, str]
"""A piece of a line and its style, in the words of rich."""
Line = list[Segment]

NARROW = 60
MAX_BAR = 40
MAX_NAME = 40
MIN_BAR = 6
MAX_NAMED = 3  # arms in the first line
MAX_NOTICES = 16  # plain lines at a time
PHASE_WIDTH = len("loading data")


@dataclass(frozen=True)
class Symbols:
    """Characters that the terminal can show."""

    done: str
    open: str
    between: str

    @classmethod
    def of(cls, encoding: str) -> Symbols:
        """Return those of an encoding: lines and dots, or ASCII."""
        return cls("━", "─", " · ") if encoding.lower().startswith("utf") else cls("#", "-", ", ")


@dataclass(frozen=True)
class CellView:
    """A running cell as it is shown.

    Attributes:
        progress: the latest report; None while the process starts.
        seconds: since the cell began.
        left: seconds that it will still take; None while that is unknown.
        epochs: of the whole run.
        place: where it runs, such as "GPU 3" or "job 1234_5 on n1"; "" if it has no place of its own.
    """

    name: str
    number: int
    progress: Progress | None
    seconds: float
    left: float | None
    epochs: int
    place: str = ""

    @property
    def full_name(self) -> str:
        """The name with the place."""
        return f"{self.name}, {self.place}" if self.place else self.name

    @property
    def phase(self) -> Phase:
        """What the cell is at."""
        return "starting" if self.progress is None else self.progress.phase


@dataclass(frozen=True)
class MatrixView:
    """All cells as they are shown.

    Attributes:
        done: cells that ended, or were there already.
        share: of the work that is done, by cells, 0 to 1.
        seconds: since the start.
        left: seconds that all cells will still take; None while that is unknown.
    """

    done: int
    total: int
    share: float
    seconds: float
    left: float | None


def span(seconds: float) -> str:
    """Return a time as `41s`, `3m20s` or `6h41m`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def describe_outline(outline: Outline, device: str) -> str:
    """Return the first line: what will run, where and into which folder, and how much of it is there already.

    Args:
        device: that `auto` stands for.
    """
    arms, seeds, count = outline.arms, outline.seeds, len(outline.cells)
    named = f" ({printable(', '.join(arms), 100)})" if len(arms) <= MAX_NAMED else ""
    if count == 1:
        what = f"{printable(arms[0])}, seed {seeds[0]}"
    else:
        what = f"{format_count(count, 'cell')}: {format_count(len(arms), 'arm')}{named}"
        what += f" x {format_count(len(seeds), 'seed')} ({_ranges(seeds)})"
    if count == outline.num_cached:
        what += ", cached" if count == 1 else ", all cached"
    elif outline.num_cached:
        what += f", {outline.num_cached} cached"
    if outline.jobs > 1:
        what += f", {outline.jobs} at a time"
    return f"{what}; {_place(outline.cells, device)}; into {printable(str(outline.folder), 300)}"


def _place(cells: Sequence[RunConfig], device: str) -> str:
    """Return where cells run: devices, threads and processes, each as often as it differs."""
    devices = sorted({device if cell.device == "auto" else cell.device for cell in cells})
    threads = sorted({cell.threads for cell in cells})
    processes = sorted({cell.processes for cell in cells})
    ray = any(cell.launcher == "ray" for cell in cells)
    parts = (
        ["on Ray"]
        if ray
        else ["on Slurm"]
        if any(cell.launcher == "slurm" for cell in cells)
        else [f"on {' and '.join(devices)}"]
    )
    parts.append("1 thread" if threads == [1] else f"{' or '.join(map(str, threads))} threads")
    if processes != [1]:
        parts.append(f"{' or '.join(map(str, processes))} processes a cell")
    return ", ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as `0-4, 7`."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][1] + 1:
            groups[-1][1] = number
        else:
            groups.append([number, number])
    return printable(", ".join(str(low) if low == high else f"{low}-{high}" for low, high in groups), 60)


def bar_lines(
    cells: Sequence[CellView], matrix: MatrixView, size: tuple[int, int], symbols: Symbols, *, idle: str = ""
) -> list[Line]:
    """Return what stands at the bottom of the terminal: each running cell, and the matrix if it has several.

    Args:
        size: columns and rows of the terminal; no line is as wide, and there are fewer lines.
        idle: what is said while no cell runs.
    """
    width, rows = max(10, size[0] - 1), max(2, size[1] - 2)
    last = [_matrix_line(matrix, width, symbols)] if matrix.total > 1 else []
    longest = max((len(_short_name(cell, width)) for cell in cells), default=0)
    lines = [line for cell in cells for line in _cell_lines(cell, width, symbols, longest)]
    if len(lines) + len(last) > rows:
        lines = [_short_line(cell, width, symbols, longest) for cell in cells]
    room = rows - len(last)
    if len(lines) > room:
        lines = [*lines[: room - 1], [(f"and {len(lines) - room + 1} more", "dim")]]
    if not cells and idle:
        lines.append([(idle, "")])
    return [_cut(line, width) for line in [*lines, *last]]


def _has_place_in_name(cell: CellView, width: int) -> bool:
    """Return whether the name of a cell has room for its place; else that is the first of its figures."""
    return len(cell.full_name) <= min(MAX_NAME, width)


def _short_name(cell: CellView, width: int) -> str:
    name = cell.full_name if _has_place_in_name(cell, width) else cell.name
    return printable(name, min(MAX_NAME, width), keep_end=8)


def _cell_lines(cell: CellView, width: int, symbols: Symbols, name_width: int) -> list[Line]:
    """Return the lines of a cell; in a wide terminal its name is as wide as those of the others, for equal bars."""
    share, steps = _made(cell)
    right = f"{steps}  {span(int(cell.seconds))}"
    if width < NARROW:
        name = _short_name(cell, width)
        bar = _bar(share, width - len(right), symbols)
        first: Line = [(name, "bold"), ("  ", ""), (cell.phase, "cyan")]
        return [first, [*bar, (right, "")], *_figures(cell, width, symbols, 2)]
    left = _head(cell, width, name_width)
    room = width - sum(len(text) for text, _ in left) - len(right)
    return [[*left, *_bar(share, room, symbols), (right, "")], *_figures(cell, width, symbols, 1)]


def _short_line(cell: CellView, width: int, symbols: Symbols, name_width: int) -> Line:
    """Return a cell in one line: its name, its place, how far it is, and the time left if that is known."""
    share, steps = _made(cell)
    time = f"  {span(int(cell.seconds))}" if cell.left is None else f"  {span(cell.left)} left"
    if width < NARROW:
        room = width - len(time)
        place = f", {cell.place}" if cell.place else ""
        return [(printable(f"{cell.name}{place}", max(1, room), keep_end=8).ljust(room), "bold"), (time, "")]
    left = _head(cell, width, name_width)
    if cell.place and not _has_place_in_name(cell, width):
        left = [*left[:-2], (f"{cell.place} ", "")]
    right = f"{steps}{time}"
    room = width - sum(len(text) for text, _ in left) - len(right)
    return [*left, *_bar(share, room, symbols), (right, "")]


def _made(cell: CellView) -> tuple[float, str]:
    """Return the share of the steps that a cell has made, 0 to 1, and their number as text."""
    progress = cell.progress
    if progress is None or not progress.total_steps:
        return 0.0, ""
    total = str(progress.total_steps)
    return progress.steps / progress.total_steps, f" {progress.steps:>{len(total)}}/{total}"


def _head(cell: CellView, width: int, name_width: int) -> Line:
    """Return name and phase of a cell, as wide as those of the others."""
    name = _short_name(cell, width)
    space = " " * (name_width - len(name) + 2)
    return [(name, "bold"), (space, ""), (f"{cell.phase:<{PHASE_WIDTH}}", "cyan"), (" ", "")]


def _figures(cell: CellView, width: int, symbols: Symbols, most: int) -> list[Line]:
    """Return the figures of a cell in at most some lines, and in one at least; what has no room is left out."""
    place = [] if not cell.place or _has_place_in_name(cell, width) else [(0, cell.place)]
    parts = [*place, *_cell_parts(cell, " left")]
    while parts:
        lines = _wrapped([text for _, text in parts], width - 2, symbols.between)
        if len(lines) <= most:
            return [[("  " + line, "dim")] for line in lines]
        parts.remove(max(parts))
    return [[("", "")]]  # so that what stands below keeps its place


def _cell_parts(cell: CellView, left: str) -> list[tuple[int, str]]:
    """Return the figures of a cell in their order, each with its rank: the lowest is the most important."""
    parts = []
    progress = cell.progress
    if progress is not None and progress.loss is not None:
        parts.append((1, f"loss {progress.loss:.4g}"))
        if progress.loss_scale is not None:
            parts.append((3, f"loss scale {_number(progress.loss_scale)}"))
        if progress.step_seconds is not None:
            parts.append((4, _step_time(progress.step_seconds)))
        if progress.skipped or progress.loss_scale is not None:
            parts.append((5, f"{progress.skipped} skipped"))
    if cell.left is not None:
        parts.append((2, f"about {span(cell.left)}{left}"))
    if progress is not None and progress.total_steps and cell.epochs > 1:
        parts.append((6, f"epoch {progress.epoch + 1}/{cell.epochs}"))
    return parts


def _wrapped(parts: Sequence[str], width: int, between: str) -> list[str]:
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}{between if lines[-1] else ''}{part}"
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _matrix_line(matrix: MatrixView, width: int, symbols: Symbols) -> Line:
    count = f"{matrix.done} of {matrix.total} cells"
    right = f" {span(int(matrix.seconds))}"
    if matrix.left is not None:
        right += f"{symbols.between}about {span(matrix.left)} left"
    if len(count) + len(right) + 1 + MIN_BAR > width:
        count = f"{matrix.done}/{matrix.total}"
    if len(count) + len(right) + 1 + MIN_BAR > width:
        right = right.replace("about ", "")
    return [(count, "bold"), (" ", ""), *_bar(matrix.share, width - len(count) - len(right) - 1, symbols), (right, "")]


def _bar(share: float, width: int, symbols: Symbols) -> Line:
    """Return a bar that fills a width up to a limit; nothing where there is no room for one."""
    width = min(MAX_BAR, width)
    if width < MIN_BAR:
        return []
    done = min(width, math.floor(width * share))
    return [(symbols.done * done, "green"), (symbols.open * (width - done), "dim")]


def _cut(line: Line, width: int) -> Line:
    """Return a line that is no wider than the terminal: a longer one would wrap, and could not be drawn over."""
    short: Line = []
    for text, style in line:
        text = text[:width]
        width -= len(text)
        short.append((text, style))
    return short


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e10 else f"{value:g}"


def _step_time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms/step" if seconds < 1 else f"{seconds:.3g} s/step"


def notices(cells: Sequence[CellView], matrix: MatrixView, *, idle: str = "") -> list[str]:
    """Return plain lines on some running cells and the matrix, and in one more how many others run."""
    if not cells:
        return [notice(None, matrix, idle=idle)] if idle else []
    shown = cells if len(cells) <= MAX_NOTICES else cells[: MAX_NOTICES - 1]
    lines = [notice(cell, matrix) for cell in shown]
    return lines if len(shown) == len(cells) else [*lines, f"and {len(cells) - len(shown)} more cells run"]


def notice(cell: CellView | None, matrix: MatrixView, *, idle: str = "") -> str:
    """Return a plain line on a running cell and the matrix; without a cell, on the matrix alone."""
    if cell is None:
        parts = [f"{matrix.done} of {matrix.total} cells{': ' if idle else ''}{idle}"]
    else:
        parts = [f"[{cell.number}/{matrix.total}] {cell.full_name}: {cell.phase}"]
        if cell.progress is not None and cell.progress.total_steps:
            parts.append(f"step {cell.progress.steps} of {cell.progress.total_steps}")
        alone = matrix.total == 1
        parts += [text for _, text in _cell_parts(cell, " left" if alone else " for this cell")]
    line = f"{', '.join(parts)}; {span(int(matrix.seconds))} since the start"
    return line + (f", about {span(matrix.left)} left" if matrix.left is not None and matrix.total > 1 else "")
