"""How long the rest of a matrix takes, on simulated matrices with a clock in the test's hands."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ampcompare.experiment.eta import TimeLeft
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.observer import Outline
from ampcompare.results.records.run import RunRecord, RunSummary
from ampcompare.settings.config import RunConfig

STEPS = 50
COSTS = {"fp32": 10.0, "half": 3.0, "native:fp16": 120.0, "apex:O1": 45.0, "apex:O2": 20.0, "native:bf16": 300.0}


def outline(arms: list[str], seeds: int, cached: Mapping[int, float] | None = None, jobs: int = 1) -> Outline:
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
    return Outline(cells, labels, records, Path("runs/made"), jobs)


@dataclass
class Simulation:
    """Plays a matrix, and notes after each event how long the rest was said to take, and took.

    Attributes:
        spread: share by which the cells of an arm differ.
    """

    plan: Outline
    costs: Mapping[str, float]
    spread: float = 0.0
    now: float = 0.0
    said: list[tuple[float, int, float | None]] = field(default_factory=list)

    def play(self) -> TimeLeft:
        left, generator = TimeLeft(self.plan), random.Random(1)
        self.said = [(self.now, 0, left.seconds(self.now))]
        for place, (label, record) in enumerate(zip(self.plan.labels, self.plan.cached, strict=True)):
            left.begin(place, self.now)
            if record is None:
                self.now += 0.1
                work = self.costs[label] * generator.uniform(1 - self.spread, 1 + self.spread)
                left.report(place, Progress(0, 0, 0, "loading data"), self.now)
                self.now += 0.2 * work  # not in proportion to the steps
                for step in range(STEPS + 1):
                    left.report(place, Progress(step, STEPS, 0), self.now)
                    self.said.append((self.now, place, left.seconds(self.now)))
                    self.now += 0.8 * work / STEPS if step < STEPS else 0.0
            left.end(place, self.now, reused=record is not None)
            self.said.append((self.now, place + 1, left.seconds(self.now)))
        return left

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


def test_one_mean_for_all_arms_would_be_wrong() -> None:
    """The simulated matrix is one where the mean of all cells so far errs by far more than 25 %."""
    plan = outline(list(COSTS), 3)
    costs = [COSTS[label] for label in plan.labels]
    worst = max(
        abs(sum(costs[:done]) / done * (18 - done) / sum(costs[done:]) - 1) for done in range(6, 18) if costs[done:]
    )
    assert worst > 0.5


def test_earlier_records_tell_from_the_start() -> None:
    """With one cached cell of each arm, the rest is known before the first step, and cached cells cost nothing."""
    plan = outline(list(COSTS), 3)
    cached = {place: COSTS[plan.labels[place]] for place in range(6)}
    simulation = Simulation(outline(list(COSTS), 3, cached), COSTS)

    simulation.play()

    assert simulation.said[0][2] == pytest.approx(2 * sum(COSTS.values()), rel=0.01)
    assert max(simulation.errors(cells=0)) < 0.05


def test_an_arm_that_never_ran_is_taken_for_the_mean_of_the_others() -> None:
    """Before any other knowledge, an arm costs what the known arms cost in the mean; all cached leaves nothing."""
    plan = outline(["fp32", "half", "apex:O1"], 1)
    left = TimeLeft(plan)
    assert left.seconds(0.0) is None

    for place, end in ((0, 10.0), (1, 40.0)):
        left.begin(place, end - 10.0 * (2 * place + 1))
        left.end(place, end)

    assert left.seconds(40.0) == pytest.approx((10 + 30) / 2)
    done = TimeLeft(outline(["fp32"], 2, {0: 5.0, 1: 5.0}))
    assert done.seconds(0.0) == 0.0


def test_a_cell_in_its_first_seconds_is_projected() -> None:
    """A lone cell: the time before its first step counts once, that of steps by their share."""
    left = TimeLeft(outline(["fp32"], 1))
    left.begin(0, 0.0)
    left.report(0, Progress(0, 0, 0, "loading data"), 5.0)
    assert left.of_cell(0, 6.0) is None
    left.report(0, Progress(0, 100, 0), 25.0)
    left.report(0, Progress(25, 100, 0), 35.0)

    assert left.of_cell(0, 35.0) == pytest.approx(0.75 * 40)
    assert left.seconds(35.0) == left.of_cell(0, 35.0)


def test_a_resumed_cell_counts_from_where_it_resumes() -> None:
    """Steps of an earlier call took none of the time of this one."""
    left = TimeLeft(outline(["fp32"], 1))
    left.begin(0, 0.0)
    left.report(0, Progress(80, 100, 0), 1.0)
    left.report(0, Progress(90, 100, 0), 11.0)

    assert left.of_cell(0, 11.0) == pytest.approx(10.0)


def test_jobs_share_the_rest() -> None:
    """With two cells at a time each seed takes as long as its longer half."""
    plan = outline(["fp32", "half", "apex:O1", "apex:O2"], 2, dict.fromkeys(range(4), 10.0), jobs=2)
    left = TimeLeft(plan)
    assert left.seconds(0.0) == pytest.approx(20.0)

    for place in (4, 5):
        left.begin(place, 0.0)
        left.report(place, Progress(0, 100, 0), 0.0)
    left.report(4, Progress(50, 100, 0), 5.0)
    left.report(5, Progress(50, 100, 0), 5.0)

    assert left.seconds(5.0) == pytest.approx(15.0)


def test_cells_of_all_seeds_in_a_queue() -> None:
    """A queue that runs three cells at a time is expected to go on like that, and to wait for no seed."""
    left = TimeLeft(outline(["fp32"], 9))
    for cell in range(3):
        left.begin(cell, 0.0)
        left.report(cell, Progress(0, STEPS, 0), 0.0)
    for cell in range(3):
        left.report(cell, Progress(STEPS // 2, STEPS, 0), 30.0)
    assert left.of_cell(1, 30.0) == pytest.approx(30.0)
    assert left.seconds(30.0) == pytest.approx(30.0 + 2 * 60.0)


def test_a_cell_that_is_run_again() -> None:
    """A cell whose node was lost is projected from its second start: earlier steps are not in what it has made."""
    left = TimeLeft(outline(["fp32"], 1))
    left.begin(0, 0.0)
    for steps, now in ((0, 0.0), (40, 40.0), (0, 100.0), (10, 110.0)):
        left.report(0, Progress(steps, STEPS, 0), now)
    assert left.of_cell(0, 110.0) == pytest.approx(40.0)
