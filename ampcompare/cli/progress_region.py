"""Bars at the bottom of a terminal: drawn with rich, which is imported only with this file."""

from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ampcompare.base.formatting import format_rough_duration
from ampcompare.experiment.running_cells import CellView, MatrixProgress

MAX_BAR = 40
MAX_NAME = 40
PHASE_WIDTH = len("loading data")


class _ConsoleWithVisibleCursor(Console):
    """Never hides the cursor: a command that is killed or stopped could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class ProgressRegion:
    """Draws bars over those that it drew before; lines that are printed stand above them."""

    def __init__(self, stream: TextIO) -> None:
        self._console = _ConsoleWithVisibleCursor(
            file=stream, force_terminal=True, highlight=False, markup=False, emoji=False
        )
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()

    def draw(
        self, cells: Sequence[CellView], matrix: MatrixProgress, idle: str = "", above: str | None = None
    ) -> None:
        """Draw the bars of cells, as far as there is room, and of the matrix; a line above them stays."""
        self._live.update(renderable_progress_bars(cells, matrix, self._console, idle), refresh=above is None)
        if above is not None:
            self._console.print(Text(above), soft_wrap=True)

    def close(self) -> None:
        """Clear what is drawn."""
        self._live.stop()


def renderable_progress_bars(
    cells: Sequence[CellView], matrix: MatrixProgress, console: Console, idle: str = ""
) -> RenderableType:
    """Return what stands at the bottom of the terminal: each running cell, and the matrix if it has several."""
    between = ", " if console.options.ascii_only else " · "
    # without the matrix, the others, and a row that scrolls
    shown = cells[: max(1, (console.height - 4) // 2)]
    name_width = min(MAX_NAME, max((cell_len(cell.full_name) for cell in shown), default=0))
    lines: list[RenderableType] = []
    for cell in shown:
        name = Text(cell.full_name, style="bold")
        name.truncate(name_width, pad=True)
        time = Text(format_rough_duration(int(cell.seconds)))
        if cell.progress is not None and (total := cell.progress.total_steps):
            time = Text(f"{cell.progress.steps:>{len(str(total))}}/{total}  ") + time
        lines.append(
            _row_of_parts(
                name, Text(f" {cell.phase:<{PHASE_WIDTH}}", style="cyan"), cell.share_of_steps_made, time
            )
        )
        lines.append(
            Text("  " + between.join(cell.known_number_texts()), style="dim", no_wrap=True, overflow="crop")
        )
    if len(shown) < len(cells):
        lines.append(Text(f"and {len(cells) - len(shown)} more", style="dim"))
    if not cells and idle:
        lines.append(Text(idle))
    if matrix.total > 1:
        text = "" if matrix.left is None else f"{between}about {format_rough_duration(matrix.left)} left"
        count = Text(f"{matrix.done} of {matrix.total} cells", style="bold")
        lines.append(
            _row_of_parts(count, matrix.share, Text(f"{format_rough_duration(int(matrix.seconds))}{text}"))
        )
    return Group(*lines)


def _row_of_parts(*parts: Text | float) -> RenderableType:
    """Return parts in one line; a share is a bar."""
    row = Table.grid(padding=(0, 1, 0, 0))
    cells: list[RenderableType] = []
    for part in parts:
        if isinstance(part, Text):
            row.add_column(no_wrap=True, overflow="crop")
            cells.append(part)
        else:
            row.add_column(max_width=MAX_BAR)
            cells.append(ProgressBar(1.0, part, complete_style="green"))
    row.add_row(*cells)
    return row
