"""Records that were edited, copied or mixed up: each is named, and none moves a verdict."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.base.errors import RecordError
from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.results.analysis.pairing.record_checks import (
    read_checked_record,
    unique_and_duplicate_runs,
)
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.document import dump_json, record_checksum
from ampcompare.results.records.run import read_record
from ampcompare.settings.config import RunConfig
from ampcompare.testing import make_comparison, make_record
from tests.experiment.pretend import make_plan

MakeFolder = Callable[..., Path]


def _row(comparison: Comparison, arm: str = "half") -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == arm)


def _edit(path: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = False) -> None:
    """Change a record; `seal` makes its checksum right again."""
    data = json.loads(path.read_text())
    change(data)
    if seal:
        data["checksum"] = record_checksum(data)
    path.write_text(json.dumps(data))


TOP1 = {"fp32": [500, 520, 490, 510, 505], "half": [501, 519, 491, 509, 506]}  # right of 1,000, by seed


@pytest.fixture
def run_folder(tmp_path: Path) -> MakeFolder:
    """Write a run directory of fp32 and half as `compare` leaves it, without training."""

    def write(seeds: Sequence[int] = range(5)) -> Path:
        plan = make_plan(
            RunConfig.model_validate({"device": "cpu", "recipe": {"epochs": 1}}), ["fp32", "half"], seeds
        )
        for config in plan.cells:
            cell = RunDirectory(tmp_path / "run").cell_folder(config)
            cell.mkdir(parents=True)
            made = make_record(
                config.arm, config.recipe.seed, top1=TOP1[config.arm][config.recipe.seed] / 1000
            )
            facts = {
                "cell": config.digest(),
                "config": config,
                "host": "here",
                "started": "2026-11-22T08:00:00.000+00:00",
            }
            write_record(made.model_copy(update=facts), cell)
        cells = {label: cell.digest() for label, cell in zip(plan.order, plan.cells, strict=True)}
        stored = {"arms": plan.arms, "reference": "fp32", "command": "", "order": plan.order, "cells": cells}
        (tmp_path / "run" / "plan.json").write_text(json.dumps(stored))
        return tmp_path / "run"

    return write


def record_path(folder: Path, arm: str, seed: int) -> Path:
    """Return the record of an arm and seed in a run directory."""
    for path in folder.glob("cells/*/record.json"):
        config = json.loads(path.read_text())["config"]
        if (config["arm"], config["recipe"]["seed"]) == (arm, seed):
            return path
    raise AssertionError(f"{folder} has no {arm}, seed {seed}")


@pytest.fixture
def honest(run_folder: MakeFolder) -> Comparison:
    """What records as runs write them give."""
    return reload_comparison(run_folder())


@pytest.fixture
def stored(honest: Comparison, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The report.json of these records, as data and as a file."""
    text = dump_json(honest)
    path = tmp_path / "report.json"
    path.write_text(text)
    return json.loads(text), path


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(half="fp16 native"),
        lambda data: data["summary"].update(peak_bytes=1),
        lambda data: data["summary"]["epochs"][0].update(samples=100),
    ],
)
def test_an_edited_record_is_named_and_not_used(
    run_folder: MakeFolder, change: Callable[[dict[str, Any]], object]
) -> None:
    """A changed value is noticed by the checksum; the record is left out of the report, and the rest is shown."""
    folder = run_folder()
    path = record_path(folder, "half", 1)
    _edit(path, change)
    with pytest.raises(RecordError, match="changed after it was written: its checksum does not match"):
        read_checked_record(path)
    comparison = reload_comparison(folder)
    (excluded,) = comparison.excluded
    assert str(path) in excluded
    assert (_row(comparison).pairs, _row(comparison, "fp32").completed) == (4, 5)
    assert comparison.reading[0] == f"Not used: {excluded}."


def test_a_record_without_its_checksum_is_not_used(run_folder: MakeFolder) -> None:
    """Only old records, which have no host either, are without."""
    path = record_path(run_folder(), "half", 0)
    _edit(path, lambda data: data.update(checksum=None))
    with pytest.raises(RecordError, match="it has no checksum"):
        read_checked_record(path)
    _edit(path, lambda data: (data.pop("host"), data.pop("checksum")))
    assert read_checked_record(path).arm == "half"


def test_a_seed_copied_over_others_gives_no_pair(run_folder: MakeFolder) -> None:
    """Seed 0's record over those of other seeds is foreign there; one pair is left, and no verdict."""
    folder = run_folder()
    for arm in ("fp32", "half"):
        for seed in range(1, 5):
            shutil.copy(record_path(folder, arm, 0), record_path(folder, arm, seed))
    comparison = reload_comparison(folder)
    assert len(comparison.excluded) == 8
    assert all("seed 0), but is in the folder of cell" in text for text in comparison.excluded)
    assert _row(comparison).pairs == 1
    assert str(_row(comparison).quality).startswith("inconclusive")


@pytest.mark.parametrize("copies", [2, 4])
def test_copies_of_one_seed_give_no_verdict(copies: int) -> None:
    """One seed never gives a winner, however often its records are given."""
    records = copies * [make_record("fp32", 0, top1=0.5), make_record("half", 0, top1=0.506)]
    comparison = make_comparison(records, arms=["fp32", "half"])
    assert _row(comparison).pairs == 1
    assert str(_row(comparison).quality).startswith("inconclusive")
    assert len(comparison.excluded) == 2 * (copies - 1)
    assert "half, seed 0: a second record of this cell" in comparison.excluded


def test_a_run_that_is_not_there_ends_the_test(run_folder: MakeFolder) -> None:
    """Where a record of the plan was deleted, the others are shown, and nothing is tested on what somebody left."""
    folder = run_folder()
    record_path(folder, "half", 3).unlink()
    comparison = reload_comparison(folder)
    assert (_row(comparison).pairs, str(_row(comparison).quality)) == (4, "inconclusive (not tested)")
    assert any(line.startswith("Nothing was tested: some runs of this plan") for line in comparison.reading)


def test_a_headline_is_never_read_from_a_file(
    honest: Comparison, stored: tuple[dict[str, Any], Path]
) -> None:
    """Sentences that somebody wrote into a report.json, or that an older one lacks, are those that its rows give."""
    data, path = stored
    for other in (["half is more accurate than fp32."], []):
        path.write_text(json.dumps({**data, "headline": other, "next_steps": []}))
        assert reload_comparison(path) == honest


def test_compare_runs_an_edited_cell_again(run_folder: MakeFolder) -> None:
    """An edited record is not taken for a finished cell; it stays under another name, and the reason is told."""
    folder = run_folder(range(1))
    path = record_path(folder, "half", 0)
    config = read_record(path).config
    _edit(
        path,
        lambda data: data.update(environment={**data["environment"], **environment_fingerprint()}),
        seal=True,
    )
    assert RunDirectory(folder).find_reusable_record_and_reason(config).record is not None
    _edit(path, lambda data: data["summary"].update(metric_final=0.9))
    reuse = RunDirectory(folder).find_reusable_record_and_reason(config)
    assert reuse.record is None
    assert "its checksum does not match" in reuse.reason
    assert reuse.reason.endswith("; the file is kept as record.rejected.json")
    assert path.with_name("record.rejected.json").exists()
    assert not path.exists()


def test_diverged_runs_of_equal_losses_all_count() -> None:
    """Runs that are NaN from the first step on have equal losses over seeds, and each is a divergence."""
    records = [make_record("half", seed, status="diverged", losses="all NaN") for seed in range(3)]
    kept, excluded = unique_and_duplicate_runs(records)
    assert (len(kept), excluded) == (3, [])
