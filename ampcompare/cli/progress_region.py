"""Bars at the bottom of a terminal: drawn with rich, which is imported only with this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ampcompare.base.formatting import rough_duration
from ampcompare.experiment.running_cells import CellView, MatrixView

__all__ = ["Region", "bars"]

MAX_BAR = 40
MIN_BAR = 6
MAX_NAME = 40
PHASE_WIDTH = len("loading data")
NARROW = 60  # columns, below which a bar has a line of its own


class _Console(Console):
    """Never hides the cursor: a command that is killed or stopped could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Region:
    """Draws bars over those that it drew before; lines that are printed stand above them.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = _Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()

    def draw(self, cells: Sequence[CellView], matrix: MatrixView, idle: str = "", above: str | None = None) -> None:
        """Draw the bars of cells, as far as there is room, and of the matrix.

        Args:
            idle: what is said while no cell runs.
            above: a line that stays.
        """
        self._live.update(bars(cells, matrix, self._console, idle), refresh=above is None)
        if above is not None:
            self._console.print(Text(above), soft_wrap=True)

    def close(self) -> None:
        """Clear what is drawn."""
        self._live.stop()


def bars(cells: Sequence[CellView], matrix: MatrixView, console: Console, idle: str = "") -> RenderableType:
    """Return what stands at the bottom of the terminal: each running cell, and the matrix if it has several."""
    width, rows = console.size
    rows -= 3 if matrix.total > 1 else 2  # the line of the matrix, and one that the terminal scrolls
    is_narrow, between = width < NARROW, ", " if console.options.ascii_only else " · "
    has_figures = len(cells) * (3 if is_narrow else 2) <= rows
    shown = cells if has_figures or len(cells) <= rows else cells[: max(0, rows - 1)]
    name_width = min(MAX_NAME, width - 1, max((cell_len(cell.full_name) for cell in shown), default=0))
    lines: list[RenderableType] = []
    for cell in shown:
        name = Text(cell.full_name, style="bold")
        name.truncate(name_width, pad=True)
        if not has_figures:
            left = rough_duration(cell.seconds) if cell.left is None else f"{rough_duration(cell.left)} left"
            lines.append(_row(width, name, Text(left)))
            continue
        phase, time = Text(f" {cell.phase:<{PHASE_WIDTH}}", style="cyan"), Text(rough_duration(int(cell.seconds)))
        if cell.progress is not None and (total := cell.progress.total_steps):
            time = Text(f"{cell.progress.steps:>{len(str(total))}}/{total}  ") + time
        first = [_row(width, name, phase)] if is_narrow else []
        last = [] if is_narrow else [name, phase]
        lines += [*first, _row(width, *last, cell.share, time)]
        lines.append(Text("  " + between.join(cell.figures()), style="dim", no_wrap=True, overflow="crop"))
    if len(shown) < len(cells):
        lines.append(Text(f"and {len(cells) - len(shown)} more", style="dim"))
    if not cells and idle:
        lines.append(Text(idle))
    if matrix.total > 1:
        text = "" if matrix.left is None else f"{between}about {rough_duration(matrix.left)} left"
        count = Text(f"{matrix.done} of {matrix.total} cells", style="bold")
        lines.append(_row(width, count, matrix.share, Text(f"{rough_duration(int(matrix.seconds))}{text}")))
    return Group(*lines)


def _row(width: int, *parts: Text | float) -> RenderableType:
    """Return parts in one line; a share is a bar, as long as there is room for one."""
    room = width - 1 - sum(cell_len(part.plain) + 1 for part in parts if isinstance(part, Text))
    row = Table.grid(padding=(0, 1, 0, 0))
    rendered: list[RenderableType] = []
    for part in parts:
        if isinstance(part, Text):
            row.add_column(no_wrap=True, overflow="crop")
            rendered.append(part)
        elif room >= MIN_BAR:
            row.add_column()
            rendered.append(ProgressBar(total=1.0, completed=part, width=min(MAX_BAR, room), complete_style="green"))
    row.add_row(*rendered)
    return row
