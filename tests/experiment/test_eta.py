"""How long running cells and the rest of a matrix take, on simulated matrices with a clock in the test's hands."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.observer import PlanOutline
from ampcompare.experiment.running_cells import RunningCells
from ampcompare.results.records.run import RunRecord, RunSummary
from ampcompare.settings.config import RunConfig

STEPS = 50
COSTS = {
    "fp32": 10.0,
    "half": 3.0,
    "native:fp16": 120.0,
    "apex:O1": 45.0,
    "apex:O2": 20.0,
    "native:bf16": 300.0,
}


def outline(
    arms: list[str], seeds: int, cached: Mapping[int, float] | None = None, jobs: int = 1
) -> PlanOutline:
    """Blocks of all arms, each in another order; `cached` are seconds of work by place."""
    generator = random.Random(0)
    labels = [arm for _ in range(seeds) for arm in generator.sample(arms, len(arms))]
    cells = [RunConfig(arm=arm) for arm in labels]
    records = [
        RunRecord(
            cell="0" * 12,
            arm=arm,
            status="completed",
            config=cell,
            jobs=jobs,
            summary=RunSummary(wall_seconds=(cached or {})[place]),
        )
        if place in (cached or {})
        else None
        for place, (arm, cell) in enumerate(zip(labels, cells, strict=True))
    ]
    return PlanOutline(cells, labels, records, Path("runs/made"), jobs)


def following(plan: PlanOutline) -> RunningCells:
    cells = RunningCells(0.0)
    cells.note_plan(plan)
    return cells


def begin(cells: RunningCells, number: int, now: float) -> None:
    assert cells.outline is not None
    cells.note_begun_cell(cells.outline.cells[number - 1], number, cells.total, now)


def end(cells: RunningCells, number: int, now: float, *, reused: bool = False) -> None:
    assert cells.outline is not None
    config = cells.outline.cells[number - 1]
    record = RunRecord(cell=config.digest(), arm=config.arm, status="completed", config=config)
    cells.note_ended_cell(record, now, reused=reused)


def left(cells: RunningCells, now: float) -> float | None:
    """Return how long all cells still take."""
    return cells.cell_views_and_matrix_progress(now)[1].left


def left_of(cells: RunningCells, place: int, now: float) -> float | None:
    """Return how long a running cell still takes, by its place among those."""
    return cells.cell_views_and_matrix_progress(now)[0][place].left


@dataclass
class Simulation:
    """Plays a matrix, and notes after each event how long the rest was said to take, and took.

    Attributes:
        spread: share by which the cells of an arm differ.
    """

    plan: PlanOutline
    costs: Mapping[str, float]
    spread: float = 0.0
    now: float = 0.0
    said: list[tuple[float, int, float | None]] = field(default_factory=list)

    def play(self) -> None:
        cells, generator = following(self.plan), random.Random(1)
        self.said = [(self.now, 0, left(cells, self.now))]
        for number, (label, record) in enumerate(zip(self.plan.labels, self.plan.cached, strict=True), 1):
            begin(cells, number, self.now)
            if record is None:
                self.now += 0.1
                work = self.costs[label] * generator.uniform(1 - self.spread, 1 + self.spread)
                cells.note_progress(number, Progress(0, 0, 0, "loading data"), self.now)
                self.now += 0.2 * work  # not in proportion to the steps
                for step in range(STEPS + 1):
                    cells.note_progress(number, Progress(step, STEPS, 0), self.now)
                    self.said.append((self.now, number - 1, left(cells, self.now)))
                    self.now += 0.8 * work / STEPS if step < STEPS else 0.0
            end(cells, number, self.now, reused=record is not None)
            self.said.append((self.now, number, left(cells, self.now)))

    def errors(self, *, cells: int) -> list[float]:
        """Relative errors of what was said after some cells had ended, down to the last twentieth of the time."""
        rest = [(said, self.now - at) for at, ended, said in self.said if ended >= cells]
        return [abs((said or 0.0) - true) / true for said, true in rest if true > self.now / 20]


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_right_within_a_quarter_after_a_third(spread: float) -> None:
    """Arms that cost between 3 and 300 s: after each arm ran once, the rest is known to 25 %."""
    simulation = Simulation(outline(list(COSTS), 3), COSTS, spread)

    simulation.play()

    assert max(simulation.errors(cells=6)) < 0.25
    assert simulation.said[-1][2] == 0.0


def test_earlier_records_tell_from_the_start() -> None:
    """With one cached cell of each arm, the rest is known before the first step, and cached cells cost nothing."""
    plan = outline(list(COSTS), 3)
    cached = {place: COSTS[plan.labels[place]] for place in range(6)}
    simulation = Simulation(outline(list(COSTS), 3, cached), COSTS)

    simulation.play()

    assert simulation.said[0][2] == pytest.approx(2 * sum(COSTS.values()), rel=0.01)
    assert max(simulation.errors(cells=0)) < 0.05


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([(80, 1.0), (90, 11.0)], 10.0),  # resumed: the first 80 steps took none of the time of this call
        ([(0, 0.0), (80, 40.0), (0, 100.0), (20, 110.0)], 40.0),  # its node was lost, and it is trained again
    ],
)
def test_steps_of_another_process_do_not_count(reports: list[tuple[int, float]], expected: float) -> None:
    cells = following(outline(["fp32"], 1))
    begin(cells, 1, 0.0)
    for steps, now in reports:
        cells.note_progress(1, Progress(steps, 100, 0), now)

    assert left_of(cells, 0, reports[-1][1]) == pytest.approx(expected)
