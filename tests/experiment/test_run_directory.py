"""The plan on disk, and the steps in which a plan runs, each by itself: no process starts."""

import json
from pathlib import Path

import pytest

from ampcompare.base.errors import Ended
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run_directory import RunDirectory, StoredPlan
from ampcompare.experiment.run_plan import FinishedCell, RunningPlan
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.records.comparison import Look
from ampcompare.settings.config import RunConfig
from tests.experiment.pretend import make_plan
from tests.experiment.test_interim_analyses import Pretend


@pytest.fixture
def plan() -> Plan:
    """Two arms with two seeds."""
    return make_plan(RunConfig(), ["fp32", "half"], [0, 1])


@pytest.fixture
def running(plan: Plan, tmp_path: Path) -> RunningPlan:
    """The plan before its first cell; it keeps no report."""
    return RunningPlan(
        plan, RunDirectory(tmp_path), Pretend(), command="", terms=Terms(), observer=Observer()
    )


def _finish(running: RunningPlan, index: int, started: str, status: str = "completed") -> None:
    record = (
        Pretend()
        .launch(*running.cell_and_folder(index))
        .model_copy(update={"started": started, "status": status})
    )
    running.record_finished_cell_and_save_report(FinishedCell(index, record, started))


def test_a_plan_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    """Terms, cells and order come back, and what another version has added is still there after a look."""
    run = RunDirectory(tmp_path)
    assert run.read_plan() is None
    stored = StoredPlan.from_plan(plan, command="the command", terms=Terms(0.5, tag="night"), pilot=[1, 0])
    run.write_plan(stored)
    assert run.read_plan() == stored
    assert (stored.pilot, stored.cells["half@1"]) == ([0, 1], plan.cells[plan.order.index("half@1")].digest())
    values = json.loads(run.plan_file.read_text())
    del values["order_seed"]
    run.plan_file.write_text(json.dumps({**values, "weather": "fine"}))
    arms = ["fp32", "half"]
    look = Look(
        number=1,
        error_rate=0.05,
        reference="fp32",
        arms=arms,
        seeds=[0],
        pairs={},
        cells={},
        margin=1,
        time_margin=1,
    )
    run.append_look(look)
    assert run.read_looks() == [look]
    assert json.loads(run.plan_file.read_text()) == {**values, "weather": "fine"}


def test_a_cell_that_was_stopped_ends_the_plan(running: RunningPlan) -> None:
    """Its record counts, and what is raised says how to resume."""
    with pytest.raises(Ended, match="--resume auto"):
        _finish(running, 0, "2026-01-05T10:00:00.000+00:00", "interrupted")
    assert running.indices_to_run(range(4)) == [1, 2, 3]
