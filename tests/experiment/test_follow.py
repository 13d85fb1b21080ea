"""Callbacks are called once for each step, epoch and end of a cell, from what its process has written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ampcompare
from ampcompare.base.errors import ConfigError
from ampcompare.experiment.follow import Callback, CellInfo, Follower, following, load_callback
from ampcompare.experiment.launch.cell_files import make_cell_folder
from ampcompare.experiment.launch.contract import Launcher, Progress
from ampcompare.experiment.launch.worker.cell import run_cell
from ampcompare.experiment.observer import Observer, Outline
from ampcompare.experiment.plan import make_plan
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_plan import run_plan
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import RunRecord, StepRecord, dump_json, read_record
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig

DATA = {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8}
RECIPE = {"data": DATA, "model": {"arch": "mlp"}, "epochs": 2, "batch_size": 16}
CONFIG = RunConfig.model_validate({"recipe": RECIPE, "drain_every": 3, "guards": "off"})


class InThisProcess(Launcher):
    """Trains cells here, so that no process is started, and keeps how progress was reported."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        self.reports.append(on_progress)
        make_cell_folder(folder)
        return run_cell(config, folder, on_progress)


class Heard(Callback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, Any]] = []

    def on_step(self, cell: CellInfo, step: StepRecord) -> None:
        self.events.append((cell.label, "step", step))

    def on_epoch(self, cell: CellInfo, epoch: EpochResult) -> None:
        self.events.append((cell.label, "epoch", epoch))

    def on_end(self, cell: CellInfo, record: RunRecord) -> None:
        self.events.append((cell.label, "end", record))


class Recorded(InThisProcess):
    """Leaves what cells of another folder have left."""

    def __init__(self, source: Path) -> None:
        super().__init__()
        self.source = source

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        self.reports.append(on_progress)
        shutil.copytree(RunDirectory(self.source).cell(config), folder, dirs_exist_ok=True)
        return read_record(folder / "record.json")


def _run(folder: Path, observer: Observer, launcher: Launcher) -> None:
    run_plan(make_plan(CONFIG, ["fp32", "native:bf16"], [3]), folder, launcher, observer=observer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Heard]:
    """The folder of two cells that were trained, and what was heard of them."""
    folder, heard = tmp_path_factory.mktemp("trained"), Heard()
    _run(folder, following(Observer(), [heard]), InThisProcess())
    return folder, heard


def test_each_event_comes_once_and_in_order(trained: tuple[Path, Heard]) -> None:
    """Of real runs: every step with its loss and learning rate, each epoch after its steps, and the record last."""
    folder, heard = trained
    for label in ("fp32", "native:bf16"):
        events = [(kind, event) for name, kind, event in heard.events if name == label]
        assert [kind for kind, _ in events] == [*["step"] * 4, "epoch", *["step"] * 4, "epoch", "end"]
        record = events[-1][1]
        steps = [event for kind, event in events if kind == "step"]
        assert steps == list(iter_steps(folder / "cells" / record.cell / "steps.jsonl"))
        assert [event.values for kind, event in events if kind == "epoch"] == [
            epoch.values for epoch in record.summary.epochs
        ]
        rates = [step.lr for step in steps]
        assert rates[0] == pytest.approx(0.05 / 4)  # one of the four steps of the warm-up
        assert max(rates) == 0.05
        assert rates[-1] < rates[4]


def test_what_callbacks_receive_cannot_be_changed(trained: tuple[Path, Heard], tmp_path: Path) -> None:
    """Steps, evaluations, records and cells are frozen."""
    assert trained[1].events
    for _, _, event in trained[1].events:
        with pytest.raises((AttributeError, ValueError), match=r"can't set|frozen"):
            event.epoch = event.status = 1
    with pytest.raises(AttributeError, match="cannot assign"):
        CellInfo("fp32", CONFIG, tmp_path).label = "other"  # type: ignore[misc]


def test_nothing_is_called_without_callbacks() -> None:
    """The observer is the same object, so the launcher reports to it directly."""
    observer = Observer()
    assert following(observer, ()) is observer


def test_a_cell_that_has_a_record_is_silent(trained: tuple[Path, Heard]) -> None:
    """The second call of a command trains nothing, so callbacks hear nothing."""
    heard, launcher = Heard(), InThisProcess()
    _run(trained[0], following(Observer(), [heard]), launcher)
    assert heard.events == launcher.reports == []


def test_a_resumed_cell_is_heard_from_its_first_step(tmp_path: Path) -> None:
    """Steps and epochs before the checkpoint come too, once."""
    saving = {"stop_at_step": 6, "resume": "auto"}
    stopped = RunConfig.model_validate({**CONFIG.model_dump(), "saving": saving})
    folder = tmp_path / "cell"
    make_cell_folder(folder)
    assert run_cell(stopped, folder).status == "interrupted"
    heard, config = Heard(), RunConfig.model_validate({**CONFIG.model_dump(), "saving": {"resume": "auto"}})
    follower = Follower(Observer(), [heard])
    follower.plan(Outline([config], ["fp32"], [None], tmp_path))
    RunDirectory(tmp_path).cell(config).parent.mkdir()
    folder.rename(RunDirectory(tmp_path).cell(config))
    follower.begin(config, 1, 1)
    record = InThisProcess().launch(config, RunDirectory(tmp_path).cell(config), lambda it: follower.progress(1, it))
    follower.end(record, reused=False)
    assert [resumption.step for resumption in record.resumed] == [7]
    kinds = [kind for _, kind, _ in heard.events]
    assert kinds == [*["step"] * 4, "epoch", *["step"] * 4, "epoch", "end"]
    assert [event.step for _, kind, event in heard.events if kind == "step"] == list(range(8))


def test_half_a_line_waits_and_a_new_file_is_read_again(tmp_path: Path) -> None:
    """A line that is being written is passed on when it is complete; steps of a file that was replaced come once."""
    heard, folder = Heard(), RunDirectory(tmp_path).cell(CONFIG)
    folder.mkdir(parents=True)
    follower = Follower(Observer(), [heard])
    follower.plan(Outline([CONFIG], ["fp32"], [None], tmp_path))
    follower.begin(CONFIG, 1, 1)
    lines = [dump_json(StepRecord(at, 0, 1.0, (), (), (True,), None, 0.1, 0.0), indent=None) + "\n" for at in range(3)]
    path = folder / "steps.jsonl"
    follower.progress(1, Progress(0, 0, 0))
    path.write_text(lines[0] + lines[1][:20])
    follower.progress(1, Progress(1, 3, 0))
    assert len(heard.events) == 1
    path.write_text(lines[0] + lines[1])
    follower.progress(1, Progress(2, 3, 0))
    other = folder / "other"
    other.write_text("".join(lines))
    other.replace(path)
    follower.progress(1, Progress(3, 3, 0))
    assert [event.step for _, _, event in heard.events] == [0, 1, 2]


def test_a_callback_that_raises_ends_the_command(trained: tuple[Path, Heard], tmp_path: Path) -> None:
    """The error names the class, the method and the cause."""

    class Broken(Callback):
        def on_end(self, cell: CellInfo, record: RunRecord) -> None:
            raise KeyError("top-9")

    with pytest.raises(ConfigError, match=r"callback Broken: on_end raised KeyError: 'top-9'; fix it"):
        _run(tmp_path, following(Observer(), [Broken()]), Recorded(trained[0]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("math:sqrt", "factory math:sqrt: calling it raised TypeError"),
        ("builtins:list", "returned a list; it must return an ampcompare.Callback"),
        ("wandb", "does not name a factory"),
    ],
)
def test_what_is_no_callback_is_refused(text: str, message: str) -> None:
    """A factory that fails or returns something else is one line, before anything runs."""
    with pytest.raises(ConfigError, match=message):
        load_callback(text)


def test_a_factory_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the user's own module is a factory."""
    (tmp_path / "my_callbacks.py").write_text("import ampcompare\nclass Mine(ampcompare.Callback): pass\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_callback("my_callbacks:Mine"), Callback)


def test_python_takes_objects_and_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ampcompare.run` and `compare` hand both on."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "ampcompare.api.comparison.run_single", lambda options, observer: seen.append(options) or _Outcome()
    )
    heard = Heard()
    ampcompare.run(CONFIG, callbacks=[heard, "ampcompare:Callback"])
    assert seen[0].callbacks[0] is heard
    assert type(seen[0].callbacks[1]) is Callback


class _Outcome:
    record = None
