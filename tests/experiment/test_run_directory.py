"""The plan on disk, and the steps in which a plan runs, each by itself: no process starts."""

import json
from pathlib import Path

import pytest

from ampcompare.base.errors import Ended
from ampcompare.experiment import run_plan as run_module
from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import Plan, make_plan
from ampcompare.experiment.run_directory import RunDirectory, StoredPlan
from ampcompare.experiment.run_plan import FinishedCell, RunningPlan, run_plan
from ampcompare.results.analysis.inference.criteria import Criteria
from ampcompare.results.records.comparison import Comparison, Look
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig
from tests.experiment.test_interim_analyses import Pretend


@pytest.fixture
def plan() -> Plan:
    """Two arms with two seeds."""
    return make_plan(RunConfig(), ["fp32", "half"], [0, 1])


@pytest.fixture
def running(plan: Plan, tmp_path: Path) -> RunningPlan:
    """The plan before its first cell; it keeps no report."""
    return RunningPlan(plan, RunDirectory(tmp_path), Pretend(), command="", terms=Criteria(), observer=Observer())


def _finish(running: RunningPlan, index: int, started: str, status: str = "completed") -> None:
    record = Pretend().launch(*running.cell(index)).model_copy(update={"started": started, "status": status})
    running.keep(FinishedCell(index, record, started))


def test_a_plan_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    """Terms, cells and order come back, and what another version has added is still there after a look."""
    run = RunDirectory(tmp_path)
    assert run.plan() is None
    stored = StoredPlan.of(plan, command="the command", terms=Criteria(0.5, tag="night"), pilot=[1, 0])
    run.write_plan(stored)
    assert run.plan() == stored
    assert (stored.pilot, stored.cells["half@1"]) == ([0, 1], plan.cells[plan.order.index("half@1")].digest())
    values = json.loads(run.plan_file.read_text())
    del values["order_seed"]
    run.plan_file.write_text(json.dumps({**values, "weather": "fine"}))
    arms = ["fp32", "half"]
    look = Look(
        number=1, error_rate=0.05, reference="fp32", arms=arms, seeds=[0], pairs={}, cells={}, margin=1, time_margin=1
    )
    run.append_look(look)
    assert run.looks() == [look]
    assert json.loads(run.plan_file.read_text()) == {**values, "weather": "fine"}


def test_the_order_on_disk_is_that_of_the_starts(running: RunningPlan) -> None:
    """Cells that ended are listed by their start, before those that have not run."""
    _finish(running, 2, "2026-01-05T10:00:00.000+00:00")
    _finish(running, 1, "2026-01-05T09:00:00.000+00:00")
    stored, order = running.run.plan(), running.plan.order
    assert stored is not None
    assert stored.order == [order[1], order[2], order[0], order[3]]
    assert running.missing(range(4)) == [0, 3]
    assert [f"{record.arm}@{record.config.recipe.seed}" for record in running.done_records()] == [order[1], order[2]]


def test_a_cell_that_was_stopped_ends_the_plan(running: RunningPlan) -> None:
    """Its record counts, and what is raised says how to resume."""
    with pytest.raises(Ended, match="--resume auto"):
        _finish(running, 0, "2026-01-05T10:00:00.000+00:00", "interrupted")
    assert running.missing(range(4)) == [1, 2, 3]


def test_what_must_run_again_is_known_with_the_reason(running: RunningPlan, plan: Plan) -> None:
    """Another call reuses a completed cell, and says why it repeats one that failed."""
    heard: list[str] = []

    class Hears(Observer):
        def note(self, text: str) -> None:
            heard.append(text)

        def end(self, record: RunRecord, *, reused: bool) -> None:
            heard.append(f"{record.arm} {reused}")

    for index, status in ((0, "completed"), (1, "failed")):
        config, folder = running.cell(index)
        record = Pretend().launch(config, folder)
        write_record(record.model_copy(update={"status": status}), folder)
    again = RunningPlan(plan, running.run, Pretend(), command="", terms=Criteria(), observer=Hears())
    assert again.missing(range(4)) == [1, 2, 3]
    again.reuse(0)
    again.begin(1)
    labels = again.plan.labels
    seed = again.plan.cells[1].recipe.seed
    assert heard == [f"{labels[0]} True", f"{labels[1]}, seed {seed}, runs again: it failed before"]


def test_each_state_of_the_runs_is_judged_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a report after each cell, and after the last one only that with the verdicts."""
    judged, saved, summarize = list[int](), list[int](), run_module.summarize

    def counted(records: list[RunRecord], **terms: object) -> Comparison:
        judged.append(len(records))
        return summarize(records, **terms)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "summarize", counted)
    run_plan(plan, tmp_path, Pretend(), save=lambda comparison, folder: saved.append(len(comparison.records)))
    assert judged == saved == [1, 2, 3, 4]
    run_plan(plan, tmp_path, Pretend())
    assert judged == [1, 2, 3, 4, 4]
