"""The lines of progress at every width, from values that are given."""

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from ampcompare.cli.progress_lines import notice_lines, outline_text
from ampcompare.cli.progress_region import renderable_progress_bars
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.observer import PlanOutline
from ampcompare.experiment.running_cells import CellView, MatrixProgress
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

TRAINING = Progress(120, 900, 1, "training", 0.03413, 65536.0, 3, 0.00412)
MATRIX = MatrixProgress(done=7, total=27, share=0.27, seconds=72.9, left=200.0)


def cell(
    progress: Progress | None = TRAINING, name: str = "native:fp16, seed 1", number: int = 8
) -> CellView:
    return CellView(name, number, progress, seconds=41.2, left=12.0, epochs=5)


def drawn(
    *cells: CellView,
    matrix: MatrixProgress = MATRIX,
    size: tuple[int, int] = (80, 24),
    encoding: str = "utf-8",
) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=size[0], height=size[1])
    console.print(renderable_progress_bars(cells, matrix, console))
    file.flush()
    return file.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_a_cell_and_the_matrix() -> None:
    """Phase, bar, steps and time; then what is known, the most important first; the matrix below."""
    first, figures, last = drawn(cell())
    assert re.fullmatch(r"native:fp16, seed 1 +training +━━━+╸? *120/900  41s *", first)
    assert (
        figures.rstrip() == "  loss 0.03413 · loss scale 65536 · about 12s left · 4.12 ms/step · 3 skipped ·"
    )
    assert re.fullmatch(r"7 of 27 cells ━━━+╸? *1m12s · about 3m20s left *", last)


@pytest.mark.parametrize("width", [40, 60, 79, 80, 300])
@pytest.mark.parametrize(("count", "height"), [(1, 8), (5, 8), (40, 24)])
def test_nothing_is_wider_or_higher_than_the_terminal(width: int, count: int, height: int) -> None:
    """A line that wraps, or one below the last row, could not be drawn over."""
    numbers = Progress(10**9, 10**9, 10**6, "loading data", -math.inf, 2.0**100, 10**9, 1e-9)
    cells = [
        cell(numbers, "apex:O2,keep_batchnorm_fp32=false,loss_scale=dynamic, seed 123456", n)
        for n in range(count)
    ]

    lines = drawn(*cells, size=(width, height))

    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert lines[-1].startswith("7 of 2")
    assert (count > 5 or height > 8) == (f"and {count - 10} more" in lines[-2])


def test_plain_lines() -> None:
    """Without a terminal: the cell with all that is known, the time since the start, the time left for all."""
    assert notice_lines([cell()], MATRIX) == [
        "[8/27] native:fp16, seed 1: training, step 120 of 900, loss 0.03413, loss scale 65536, about 12s for "
        "this cell, 4.12 ms/step, 3 skipped, epoch 2/5; 1m12s since the start, about 3m20s left"
    ]
    assert notice_lines([cell(None)], MatrixProgress(0, 1, 0.0, 41.0, None)) == [
        "[8/1] native:fp16, seed 1: starting, about 12s left; 41s since the start"
    ]
    assert notice_lines([], MATRIX, idle="timing rounds")[0].startswith(
        "7 of 27 cells: timing rounds; 1m12s since"
    )


def outline(
    arms: list[str], seeds: list[int], cached: int = 0, jobs: int = 1, **settings: object
) -> PlanOutline:
    cells = [
        RunConfig.model_validate({"arm": arm, "recipe": {"seed": seed}, **settings})
        for seed in seeds
        for arm in arms
    ]
    record = RunRecord(cell="0" * 12, arm="fp32", status="completed", config=cells[0])
    records = [record if place < cached else None for place in range(len(cells))]
    return PlanOutline(cells, [cell.arm for cell in cells], records, Path("runs/compare-1"), jobs)


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        (outline(["fp32"], [3]), "fp32, seed 3; on cpu, 1 thread; into runs/compare-1"),
        (outline(["fp32"], [3], 1), "fp32, seed 3, cached; on cpu, 1 thread; into runs/compare-1"),
        (
            outline(["fp32", "half"], [0, 1, 2, 5], 3, threads=4, device="cuda:1"),
            "8 cells: 2 arms (fp32, half) x 4 seeds (0-2, 5), 3 cached; on cuda:1, 4 threads; into runs/compare-1",
        ),
        (
            outline(["fp32", "half", "apex:O1", "apex:O2"], [0], 4, 2, processes=2),
            "4 cells: 4 arms x 1 seed (0), all cached, 2 at a time; on cpu, 1 thread, 2 processes a cell; "
            "into runs/compare-1",
        ),
        (
            outline(["fp32", "half"], [0], launcher="slurm"),
            "2 cells: 2 arms (fp32, half) x 1 seed (0); on Slurm, 1 thread; into runs/compare-1",
        ),
    ],
    ids=["one", "one cached", "some cached", "parallel", "slurm"],
)
def test_the_first_line_says_what_runs_where(planned: PlanOutline, said: str) -> None:
    """Cells, arms and seeds, what is cached, devices, threads and processes, and the folder."""
    assert outline_text(planned, "cpu") == said
