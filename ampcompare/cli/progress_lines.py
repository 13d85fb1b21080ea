"""The plain lines of a display of progress: what will run, and how far it is. No clock and no terminal here."""

from collections.abc import Sequence

from ampcompare.base.formatting import format_count, format_ranges, format_rough_duration, printable_line
from ampcompare.experiment.observer import PlanOutline
from ampcompare.experiment.running_cells import CellView, MatrixProgress
from ampcompare.settings.config import REMOTE_LAUNCHERS, RunConfig

MAX_NAMED = 3  # arms in the first line
MAX_NOTICES = 16  # plain lines at a time


def outline_text(outline: PlanOutline, device: str) -> str:
    """Return the first line: what will run, on which device, into which folder, and what is there already."""
    arms = outline.arms
    seeds = outline.seeds
    count = len(outline.cells)
    named = f" ({printable_line(', '.join(arms), 100)})" if len(arms) <= MAX_NAMED else ""
    if count == 1:
        what = f"{printable_line(arms[0])}, seed {seeds[0]}"
    else:
        what = f"{format_count(count, 'cell')}: {format_count(len(arms), 'arm')}{named}"
        numbers = format_ranges(seeds).replace(",", ", ")
        what += f" x {format_count(len(seeds), 'seed')} ({printable_line(numbers, 60)})"
    if count == outline.num_cached:
        what += ", cached" if count == 1 else ", all cached"
    elif outline.num_cached:
        what += f", {outline.num_cached} cached"
    if outline.jobs > 1:
        what += f", {outline.jobs} at a time"
    places = _devices_and_processes_text(outline.cells, device)
    return f"{what}; {places}; into {printable_line(str(outline.folder), 300)}"


def _devices_and_processes_text(cells: Sequence[RunConfig], device: str) -> str:
    """Return where cells run: devices, threads and processes, each as often as it differs."""
    where = {f"on {cell.launcher.capitalize()}" for cell in cells if cell.launcher in REMOTE_LAUNCHERS}
    if not where:
        devices = {device if cell.device == "auto" else cell.device for cell in cells}
        where = {f"on {' and '.join(sorted(devices))}"}
    threads = sorted({cell.threads for cell in cells})
    processes = sorted({cell.processes for cell in cells})
    parts = [*sorted(where), "1 thread" if threads == [1] else f"{' or '.join(map(str, threads))} threads"]
    if processes != [1]:
        parts.append(f"{' or '.join(map(str, processes))} processes a cell")
    return ", ".join(parts)


def notice_lines(cells: Sequence[CellView], matrix: MatrixProgress, *, idle: str = "") -> list[str]:
    """Return plain lines on some running cells and the matrix, and in one more how many others run."""
    end = f"; {format_rough_duration(int(matrix.seconds))} since the start"
    if matrix.left is not None and matrix.total > 1:
        end += f", about {format_rough_duration(matrix.left)} left"
    if not cells:
        return [f"{matrix.done} of {matrix.total} cells: {idle}{end}"] if idle else []
    shown = cells if len(cells) <= MAX_NOTICES else cells[: MAX_NOTICES - 1]
    left = " left" if matrix.total == 1 else " for this cell"
    lines = [
        f"[{one.number}/{matrix.total}] {one.full_name}: {', '.join(one.phase_steps_and_figures(left))}{end}"
        for one in shown
    ]
    return lines if len(shown) == len(cells) else [*lines, f"and {len(cells) - len(shown)} more cells run"]
