"""Cells that run at the same time, each on its own cores: real ones on two cores, and pretended launchers."""

import os
from pathlib import Path

import pytest

import ampcompare
from ampcompare.base.environment.variables import PLACE
from ampcompare.experiment.launch.contract import record_of_failed_cell
from ampcompare.experiment.launch.dispatch.dispatch import LauncherPool
from ampcompare.experiment.launch.forked import worker_environment
from ampcompare.experiment.launch.places import Place, record_with_place
from ampcompare.settings.config import RunConfig
from tests.experiment.pretend import Pretend

TINY = {"recipe.epochs": 1, "recipe.data.train_size": 64, "recipe.data.val_size": 32}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux pins processes")
def test_four_cells_on_two_cores(tmp_path: Path) -> None:
    """They end in the order of the design, each pinned to one core as its own process saw it and the record says."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    two = sorted(before)[:2]
    os.sched_setaffinity(0, two)
    try:
        comparison = ampcompare.compare(
            ["fp32", "native:bf16"], seeds=[0, 1], jobs="auto", device="cpu", output_dir=tmp_path, **TINY
        )
    finally:
        os.sched_setaffinity(0, before)
    records = comparison.records
    assert [record.status for record in records] == ["completed"] * 4
    for record in records:
        assert record.placement is not None
        assert record.environment["cores"] == record.placement.cores
        assert len(record.placement.cores) == 1
        assert record.jobs == 2
    assert {core for record in records for core in record.placement.cores} == set(two)  # type: ignore[union-attr]
    started = sorted(records, key=lambda record: record.started or "")
    assert [record.config.recipe.seed for record in started] == [0, 0, 1, 1]
    for seed in (0, 1):
        of_seed = [record.placement for record in records if record.config.recipe.seed == seed]
        assert len({tuple(place.cores) for place in of_seed if place is not None}) == 2
    assert str(comparison.arms[1].time) == "not comparable (2 cells ran at once)"


def test_no_cell_starts_after_the_pool_was_terminated(tmp_path: Path) -> None:
    """A thread between two cells when SIGTERM comes gets an interrupted record, and no process starts."""
    launcher = Pretend()
    pool = LauncherPool([launcher, launcher])
    pool.ask_cell_to_stop()
    assert pool.launch(RunConfig(), tmp_path).status == "interrupted"
    assert not launcher.asked


def test_a_record_knows_its_place_from_the_process_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names cores and the number of cells even where the command was killed; elsewhere it is as it was."""
    record = record_of_failed_cell(RunConfig(), "it ended")
    for name, value in Place(cores=(3,), cells=2).environment.items():
        monkeypatch.setenv(name, value)
    placed = record_with_place(record)
    assert placed == Place(cores=(3,), cells=2).record_with_place(record)
    assert (placed.jobs, placed.placement and placed.placement.cores) == (2, [3])
    assert PLACE not in worker_environment(), "of a cell that runs this command"
    monkeypatch.delenv(PLACE)
    assert record_with_place(record) == record
