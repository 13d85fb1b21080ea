"""The matrix as it runs: shared weights and batches, crashing arms, and going on where an earlier call stopped."""

import dataclasses
import json
import os
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError, Ended
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_plan import run_plan
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.base import FORMATS, write_reports
from ampcompare.settings.config import RunConfig
from tests.experiment.pretend import make_plan

pytestmark = pytest.mark.integration

# A model that says what it saw, ends its process on float16 inputs, and raises on bfloat16 ones.
MODULE = """
import hashlib, os, signal, torch


def digest(tensor):
    return hashlib.sha256(tensor.detach().half().contiguous().numpy().tobytes()).hexdigest()[:8]


class Spy(torch.nn.Module):
    def __init__(self, num_classes, sample_shape):
        super().__init__()
        self.layer = torch.nn.Linear(sample_shape[0] * sample_shape[1] * sample_shape[2], num_classes)
        print("pid", os.getpid())
        print("weights", digest(self.layer.weight), digest(self.layer.bias))

    def forward(self, x):
        if x.dtype == torch.float16:
            os.kill(os.getpid(), signal.SIGKILL)
        if x.dtype == torch.bfloat16:
            raise RuntimeError("no bfloat16, please")
        print("batch", digest(x), flush=True)
        return self.layer(x.flatten(1))
"""
ARMS = ("fp32", "apex:O0,engine=compat", "apex:O1,engine=compat", "half", "half:bf16")
SEEDS = (0, 1)


class Listener(Observer):
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[tuple[str, bool]] = []
        self.notes: list[str] = []

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        self.began.append(f"{config.arm}@{config.recipe.seed}")

    def end(self, record: RunRecord, *, reused: bool) -> None:
        self.ended.append((f"{record.arm}@{record.config.recipe.seed}", reused))

    def note(self, text: str) -> None:
        self.notes.append(text)


def _base(arch: str) -> RunConfig:
    recipe = {
        "data": {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8},
        "model": {"arch": arch},
        "epochs": 2,
        "batch_size": 16,
    }
    return RunConfig.model_validate({"recipe": recipe, "device": "cpu"})


@pytest.fixture(scope="module")
def launcher(
    tmp_path_factory: pytest.TempPathFactory, forking: types.SimpleNamespace
) -> Iterator[ForkedLauncher]:
    """A launcher of cells that run where the module of the model lies."""
    folder, before = tmp_path_factory.mktemp("user"), Path.cwd()
    (folder / "spying.py").write_text(MODULE)
    os.chdir(folder)
    try:
        with ForkedLauncher() as launcher:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ampcompare.base.processes.client.subprocess", forking)
                launcher._ensure_server()
            yield launcher
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Five arms, of which two crash, with two seeds."""
    return make_plan(_base("spying:Spy"), ARMS, SEEDS)


@pytest.fixture(scope="module")
def ran(
    launcher: ForkedLauncher, plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Comparison, Listener]:
    """The whole matrix, run once for all tests that only look at it."""
    folder, listener = tmp_path_factory.mktemp("run") / "new", Listener()
    comparison = run_plan(
        plan, folder, launcher, command="the command", observer=listener, save=write_reports
    )
    return folder, comparison, listener


Ran = tuple[Path, Comparison, Listener]


def _said(folder: Path, config: RunConfig, word: str) -> list[str]:
    lines = (RunDirectory(folder).cell_folder(config) / "log.txt").read_text().splitlines()
    return [line for line in lines if line.startswith(f"{word} ")]


def _cells(plan: Plan, seed: int) -> list[RunConfig]:
    return [cell for cell in plan.cells if cell.recipe.seed == seed]


@pytest.mark.parametrize("seed", SEEDS)
def test_arms_share_weights_and_batches(ran: Ran, plan: Plan, seed: int) -> None:
    """All arms of a seed start from bitwise equal weights and see the same batches in the same order."""
    weights = {tuple(_said(ran[0], cell, "weights")) for cell in _cells(plan, seed)}
    assert len(weights) == 1
    batches = {
        cell.arm: _said(ran[0], cell, "batch")
        for cell in _cells(plan, seed)
        if not cell.arm.startswith("half")
    }
    assert len(batches["fp32"]) == 2 * (4 + 2)
    assert all(seen == batches["fp32"] for seen in batches.values())


def test_blocks_by_seed_in_recorded_order(ran: Ran, plan: Plan) -> None:
    """All arms of one seed come before those of the next, in an order that is random, recorded and the one that ran."""
    folder, comparison, listener = ran
    stored = json.loads((folder / "plan.json").read_text())
    assert listener.began == stored["order"] == comparison.order
    assert [label.split("@")[1] for label in comparison.order] == ["0"] * 5 + ["1"] * 5
    blocks = [[label.split("@")[0] for label in comparison.order[start : start + 5]] for start in (0, 5)]
    assert sorted(blocks[0]) == sorted(blocks[1]) == sorted(ARMS)
    assert blocks[0] != blocks[1]
    assert (stored["arms"], stored["reference"], stored["command"]) == (list(ARMS), "fp32", "the command")


def test_crashing_arms_are_rows(ran: Ran) -> None:
    """An arm that kills its process and one that raises are rows with their reason; all others are complete."""
    rows = {row.arm: row for row in ran[1].arms}
    assert list(rows) == list(ARMS)
    assert "was killed by SIGKILL" in rows["half"].status
    assert rows["half:bf16"].status == "failed: RuntimeError: no bfloat16, please"
    assert [rows[arm].completed for arm in ARMS] == [2, 2, 2, 0, 0]
    assert [rows[arm].failed for arm in ARMS] == [0, 0, 0, 2, 2]


def test_apex_o0_is_fp32_to_the_last_bit(ran: Ran) -> None:
    """O0 trains in fp32, and the headline says that it is equal to the last bit; O1 is not."""
    line = next(line for line in ran[1].headline if "to the last bit" in line)
    assert line == "apex:O0,engine=compat is identical to fp32, every loss and all weights to the last bit."


@pytest.mark.parametrize("form", FORMATS)
def test_reload_gives_the_same_report(ran: Ran, form: str) -> None:
    """The run directory, read again, renders like the comparison that was returned; so does its report.json."""
    if FORMATS[form].missing_packages:
        pytest.skip("the page needs the extra html")
    folder, comparison, _ = ran
    text = FORMATS[form].make_reporter().render(comparison)
    assert FORMATS[form].make_reporter().render(reload_comparison(folder / "report.json")) == text
    assert FORMATS[form].make_reporter().render(reload_comparison(folder)) == text


def test_a_single_record_can_be_read(ran: Ran, plan: Plan) -> None:
    """A record.json alone is a table of one row."""
    cell = next(cell for cell in plan.cells if cell.arm == ARMS[2])
    record = RunDirectory(ran[0]).cell_folder(cell) / "record.json"
    assert [row.arm for row in reload_comparison(record).arms] == [ARMS[2]]


SMALL = ("fp32", "native:bf16")


@pytest.fixture(scope="module")
def small() -> Plan:
    """Two arms with one seed."""
    return make_plan(_base("mlp"), SMALL, [0])


@pytest.fixture(scope="module")
def trained(launcher: ForkedLauncher, small: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run directory of the small plan, for copies."""
    folder = tmp_path_factory.mktemp("trained")
    run_plan(small, folder, launcher, save=write_reports)
    return folder


@pytest.fixture
def done(trained: Path, tmp_path: Path) -> Path:
    """A finished run directory of the small plan."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _again(
    small: Plan, folder: Path, launcher: ForkedLauncher, **options: Any
) -> tuple[dict[str, bool], list[str], Comparison]:
    listener = Listener()
    comparison = run_plan(small, folder, launcher, observer=listener, **options)
    return dict(listener.ended), listener.notes, comparison


def _record_of(folder: Path, plan: Plan, arm: str) -> Path:
    return (
        RunDirectory(folder).cell_folder(next(cell for cell in plan.cells if cell.arm == arm)) / "record.json"
    )


def test_the_same_plan_again_runs_nothing(launcher: ForkedLauncher, small: Plan, done: Path) -> None:
    before = {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}
    reused, notes, comparison = _again(small, done, launcher, save=write_reports)
    assert reused == {"fp32@0": True, "native:bf16@0": True}
    assert notes == []
    assert comparison.records
    assert {path: path.read_bytes() for path in done.rglob("*") if path.is_file()} == before


def test_force_runs_again(launcher: ForkedLauncher, small: Plan, done: Path) -> None:
    """With `force` no record is taken, and the same results come out."""
    hashes = {
        record.arm: record.summary.losses_sha256 for record in RunDirectory(done).read_records_and_faults()[0]
    }
    reused, _, comparison = _again(small, done, launcher, force=True)
    assert not any(reused.values())
    assert {record.arm: record.summary.losses_sha256 for record in comparison.records} == hashes


def test_an_arm_more_keeps_what_is_there(launcher: ForkedLauncher, small: Plan, done: Path) -> None:
    """A plan with one arm more in the same folder runs that arm alone."""
    reused, _, comparison = _again(make_plan(_base("mlp"), [*SMALL, "half"], [0]), done, launcher)
    assert reused == {"fp32@0": True, "native:bf16@0": True, "half@0": False}
    assert [row.arm for row in comparison.arms] == [*SMALL, "half"]


def test_a_corrupt_record_is_kept_aside(launcher: ForkedLauncher, small: Plan, done: Path) -> None:
    """A record that cannot be read is kept under another name, and its cell runs again."""
    path = _record_of(done, small, "fp32")
    broken = path.read_text()[:100]
    path.write_text(broken)
    reused, notes, comparison = _again(small, done, launcher)
    assert reused["fp32@0"] is False
    assert "the file is kept as record.unreadable.json" in notes[0]
    assert path.with_name("record.unreadable.json").read_text() == broken
    assert {record.status for record in comparison.records} == {"completed"}


def test_an_interruption_leaves_a_report(launcher: ForkedLauncher, small: Plan, done: Path) -> None:
    """An interruption between cells is passed on; the report holds what is new and what was there before."""

    class Impatient(Listener):
        def begin(self, config: RunConfig, number: int, total: int) -> None:
            if number == 2:
                raise KeyboardInterrupt

    bigger = make_plan(_base("mlp"), [*SMALL, "half"], [0, 1])
    (done / "report.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        run_plan(bigger, done, launcher, observer=Impatient(), save=write_reports)
    report = reload_comparison(done / "report.json")
    assert {f"{record.arm}@{record.config.recipe.seed}" for record in report.records} >= {
        "fp32@0",
        "native:bf16@0",
    }
    assert [row.arm for row in report.arms] == [*SMALL, "half"]


def test_a_plan_has_another_name_with_any_cell() -> None:
    """The default folder of a plan changes with its arms and recipe, not with their order and not with its seeds."""
    plans = [
        make_plan(_base("mlp"), SMALL, [0]),
        make_plan(_base("mlp"), [*SMALL, "half"], [0]),
        make_plan(_base("convnet"), SMALL, [0]),
    ]
    assert len({plan.digest() for plan in plans}) == 3
    assert make_plan(_base("mlp"), SMALL[::-1], [0]).digest() == plans[0].digest()
    assert make_plan(_base("mlp"), SMALL, [3, 1]).digest() == plans[0].digest()


@pytest.mark.parametrize(
    ("arms", "seeds", "message"),
    [
        (["fp32", "native", "native:fp16"], [0], "arm 'native:fp16' is named twice"),
        ([], [0], "at least one arm and one seed"),
        (["fp32"], [], "at least one arm and one seed"),
        (["fp32"], [-1], "recipe.seed"),
    ],
)
def test_a_plan_that_cannot_be(arms: list[str], seeds: list[int], message: str) -> None:
    """Arms that are named twice, and no arms or seeds at all, are refused before anything runs."""
    with pytest.raises(ConfigError, match=message):
        make_plan(_base("mlp"), arms, seeds)


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> int:
    """Rounds of few steps; the answer is their number."""
    steps = 3
    monkeypatch.setattr("ampcompare.experiment.timing_rounds.TIMED_STEPS", steps)
    return steps


@pytest.mark.slow
def test_timing_rounds_take_turns(
    launcher: ForkedLauncher, small: Plan, done: Path, short_rounds: int
) -> None:
    """Rounds are timed arm by arm in processes of their own, end before an evaluation, and are kept in the records."""
    plan = dataclasses.replace(small, timing_rounds=2)
    reused, notes, comparison = _again(plan, done, launcher)
    assert all(reused.values())
    assert notes == ["seed 0: 2 timing rounds of 2 arms"]
    rounds = {record.arm: record.timing_rounds for record in comparison.records}
    assert [timing.number for timing in rounds["fp32"]] == [1, 2]
    for timing in (timing for each in rounds.values() for timing in each):
        assert (timing.step_seconds_median or 0) > 0
        assert timing.readings is not None
        assert timing.readings.timed_steps >= short_rounds
    turns = sorted((timing.started or "", timing.number) for each in rounds.values() for timing in each)
    assert [number for _, number in turns] == [1, 1, 2, 2]
    folder = RunDirectory(done).cell_folder(plan.cells[0])
    assert not (folder / "rounds" / "1" / "checkpoints").exists()
    assert {
        record.arm: record.timing_rounds for record in RunDirectory(done).read_records_and_faults()[0]
    } == rounds
    again = _again(plan, done, launcher)
    assert (again[1], again[2]) == ([], comparison)


@pytest.mark.usefixtures("short_rounds")
@pytest.mark.slow
def test_a_round_that_one_cell_lacks_runs_again_for_all(
    launcher: ForkedLauncher, small: Plan, done: Path
) -> None:
    """A cell that ran again has no rounds, and those of the others are as old as it: all are timed again together."""
    plan = dataclasses.replace(small, timing_rounds=1)
    first = {
        record.arm: record.timing_rounds[0].started or ""
        for record in _again(plan, done, launcher)[2].records
    }
    _record_of(done, small, "fp32").unlink()
    comparison = _again(plan, done, launcher)[2]
    second = {record.arm: record.timing_rounds[0].started or "" for record in comparison.records}
    assert min(second.values()) > max(first.values())
    assert "Step times are compared over timing rounds (1 of each cell)" in comparison.reading[-1]


def test_a_round_that_is_stopped_ends_the_comparison(small: Plan, done: Path) -> None:
    """A turn that SIGTERM ended is no measurement: rounds before it are kept, and the command ends."""

    class Stopped(Launcher):
        def launch(self, config: RunConfig, folder: Path, on_progress: object = None) -> RunRecord:
            record = RunDirectory(done).read_records_and_faults()[0][0]
            summary = record.summary.model_copy(update={"num_steps": 20})
            return record.model_copy(update={"config": config, "status": "interrupted", "summary": summary})

    with pytest.raises(Ended, match="was stopped in timing round 1; the same command runs the round again"):
        run_plan(dataclasses.replace(small, timing_rounds=2), done, Stopped())
    assert all(not record.timing_rounds for record in RunDirectory(done).read_records_and_faults()[0])


def test_a_turn_that_fails_does_not_count(small: Plan, done: Path) -> None:
    """A round in which an arm failed is left out for all arms, and the note names the arm."""

    class Failing(Launcher):
        def launch(self, config: RunConfig, folder: Path, on_progress: object = None) -> RunRecord:
            record = next(
                record
                for record in RunDirectory(done).read_records_and_faults()[0]
                if record.arm == config.arm
            )
            return record if config.arm == "fp32" else record.model_copy(update={"status": "failed"})

    listener = Listener()
    run_plan(dataclasses.replace(small, timing_rounds=1), done, Failing(), observer=listener)
    assert listener.notes[-1] == "timing round 1 of seed 0 does not count: native:bf16 failed in it"
    assert all(not record.timing_rounds for record in RunDirectory(done).read_records_and_faults()[0])
