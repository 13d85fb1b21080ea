"""Event files, read back by TensorBoard, and runs of W&B and MLflow, by the libraries or stand-ins for both."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.document import dump_json
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.step import StepRecord
from ampcompare.results.report import export
from ampcompare.results.report.export import make_exporter
from ampcompare.results.report.mlflow_runs import MlflowExporter
from ampcompare.results.report.tensorboard import TensorBoardExporter, run_name
from ampcompare.results.report.wandb_runs import WandbExporter
from ampcompare.testing import make_comparison, make_record

TAGS = {
    "train/loss",
    "train/loss_scale",
    "train/skipped",
    "eval/top1",
    "eval/top5",
    "eval/loss",
    "time/step_seconds",
}


def _step(number: int, *, scale: float | None, applied: bool = True, loss: float = 2.0) -> StepRecord:
    scales = () if scale is None else (scale,)
    return StepRecord(number, 0, loss - number, scales, scales, (applied,), None, 0.25, 0.05)


def _lay(
    folder: Path, record: RunRecord, steps: Sequence[StepRecord], ended: float = 1_700_000_000.0
) -> Path:
    path = folder / "cells" / record.cell / "steps.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(dump_json(step._asdict(), indent=None) + "\n" for step in steps))
    os.utime(path, (ended, ended))
    return path


def _compared(records: Sequence[RunRecord]) -> Comparison:
    arms = list(dict.fromkeys(record.arm for record in records))
    return make_comparison(records, arms=arms)


def _read(run: Path) -> Any:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    return reader.EventAccumulator(str(run)).Reload()


def _values(run: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _read(run).Scalars(tag)]


def test_arms_have_the_same_tags(tmp_path: Path) -> None:
    """A scaled and an unscaled arm have one run each with the same tags, whose values are those of steps and record."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    plain, scaled = make_record("fp32", 3, top1=0.4), make_record("apex:O2", 3, top1=0.5)
    _lay(tmp_path / "run", plain, [_step(number, scale=None) for number in range(4)])
    _lay(tmp_path / "run", scaled, [_step(n, scale=2.0 ** (16 - n), applied=n != 1) for n in range(4)])
    TensorBoardExporter(tmp_path / "tb", pytest.fail).export_records(
        _compared([plain, scaled]), tmp_path / "run"
    )
    runs = {
        path.parent.relative_to(tmp_path / "tb").as_posix() for path in (tmp_path / "tb").rglob("*tfevents*")
    }
    assert runs == {"fp32/seed=3", "apex-O2/seed=3"}
    for run in runs:
        assert set(_read(tmp_path / "tb" / run).Tags()["scalars"]) == TAGS
    one, other = tmp_path / "tb" / "fp32" / "seed=3", tmp_path / "tb" / "apex-O2" / "seed=3"
    assert _values(one, "train/loss") == [(0, 2.0), (1, 1.0), (2, 0.0), (3, -1.0)]
    assert [value for _, value in _values(one, "train/loss_scale")] == [1.0] * 4
    assert [value for _, value in _values(other, "train/loss_scale")] == [65536.0, 32768.0, 16384.0, 8192.0]
    assert [value for _, value in _values(other, "train/skipped")] == [0, 1, 1, 1]
    assert _values(one, "time/step_seconds") == [(number, 0.25) for number in range(4)]
    assert _values(one, "eval/top1") == [(3, pytest.approx(0.4))]
    assert _values(other, "eval/loss") == [(3, 1.0)]


def test_a_cell_that_ran_again_replaces_its_file(tmp_path: Path) -> None:
    """Nothing is written twice for the same steps; newer ones replace the file, and a user's own file stays."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    record = make_record("fp32")
    events, folder = TensorBoardExporter(tmp_path / "tb", pytest.fail), tmp_path / "tb" / "fp32" / "seed=0"
    _lay(tmp_path / "run", record, [_step(0, scale=None)])
    events.export_records(_compared([record]), tmp_path / "run")
    (before,) = folder.iterdir()
    stamp = before.stat().st_mtime_ns
    events.export_records(_compared([record]), tmp_path / "run")
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [stamp]
    own = folder / "events.out.tfevents.1.mine"
    own.write_bytes(b"")
    _lay(tmp_path / "run", record, [_step(0, scale=None), _step(1, scale=None)], ended=1_700_000_500.0)
    events.export_records(_compared([record]), tmp_path / "run")
    assert before not in set(folder.iterdir())
    assert own.exists()
    assert len(list(folder.iterdir())) == 2
    own.unlink()
    assert len(_values(folder, "train/loss")) == 2


def test_a_run_that_failed_or_diverged_has_its_steps(tmp_path: Path) -> None:
    """Steps before a failure are drawn, non-finite losses as such; a cell without steps has no file."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    failed, never = (
        make_record("half", status="failed", error="x"),
        make_record("fp32", status="failed", error="x"),
    )
    path = _lay(tmp_path / "run", failed, [_step(0, scale=None), _step(1, scale=None, loss=math.nan)])
    path.write_text(path.read_text() + '{"step": 2, "ep')
    TensorBoardExporter(tmp_path / "tb", pytest.fail).export_records(
        _compared([never, failed]), tmp_path / "run"
    )
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["half"]
    values = _values(tmp_path / "tb" / "half" / "seed=0", "train/loss")
    assert values[0] == (0, 2.0)
    assert math.isnan(values[1][1])


def test_unreadable_steps_are_a_note(tmp_path: Path) -> None:
    """A broken line in the middle is said once, and the other cells have their files."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    bad, good = make_record("half"), make_record("fp32")
    path = _lay(tmp_path / "run", bad, [_step(0, scale=None)])
    path.write_text("nonsense\n" + path.read_text())
    _lay(tmp_path / "run", good, [_step(0, scale=None)])
    notes: list[str] = []
    events = TensorBoardExporter(tmp_path / "tb", notes.append)
    for _ in range(2):
        events.export_records(_compared([good, bad]), tmp_path / "run")
    assert len(notes) == 1
    assert "no event file for half, seed 0: " in notes[0]
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["fp32"]


def test_run_names_are_safe_and_never_shared() -> None:
    """Whatever an arm is called, its run lies right below the log folder, under a short name of its own."""
    labels = ["a:b", "a-b", "a b", "a/b", "../b", "", "..", "\x00\n", "x" * 10_000]
    names = [run_name(label, 0) for label in labels]
    assert len(set(names)) == len(labels)
    assert all(re.fullmatch(r"[\w+][\w.=+-]{0,98}/seed=0", name, re.ASCII) for name in names), names


@pytest.fixture
def compared(tmp_path: Path) -> Comparison:
    """Two arms, of which one was scaled and has three steps, and the other failed before its first."""
    scaled = make_record("apex:O2", 3, top1=0.5).model_copy(
        update={"started": "2026-01-02T03:04:05.000+00:00"}
    )
    failed = make_record("fp32", 3, status="failed", error="no memory")
    folder = tmp_path / "run" / "cells" / scaled.cell
    folder.mkdir(parents=True)
    steps = [
        StepRecord(at, 0, 2.0 - at, (4.0,), (2.0,), (at != 1,), 0.5, 0.25, 0.25, (), 0.1) for at in range(3)
    ]
    (folder / "steps.jsonl").write_text("".join(dump_json(step, indent=None) + "\n" for step in steps))
    return summarize([scaled, failed], arms=["apex:O2", "fp32"], reference="apex:O2")


LAST = {"train/loss": 0.0, "train/skipped": 1.0, "time/step_seconds": 0.25, "train/loss_scale": 2.0}
LAST |= {"train/lr": 0.1, "train/grad_norm": 0.5}


class Run:
    """What a stand-in of W&B keeps of a run."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.points: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        Path(given["dir"], "wandb", f"offline-run-2026-{given['id']}").mkdir(parents=True)

    def log(self, values: dict[str, float], step: int) -> None:
        self.points.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_wandb_gets_settings_curves_and_summary(
    compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in: an offline run per record, each step once, the evaluation at the last, and a failure as such."""
    runs: list[Run] = []
    module = ModuleType("wandb")
    module.Settings = dict  # type: ignore[attr-defined]
    module.errors = ModuleType("wandb.errors")  # type: ignore[attr-defined]
    module.errors.Error = type("Error", (Exception,), {})  # type: ignore[attr-defined]
    module.init = lambda **given: runs.append(Run(**given)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    notes: list[str] = []
    exporter = WandbExporter(tmp_path / "out", notes.append, "mine")
    exporter.export_records(compared, tmp_path / "run")
    first, second = runs
    assert (first.given["name"], first.given["group"], first.given["mode"]) == (
        "apex:O2, seed 3",
        "run",
        "offline",
    )
    assert first.given["config"]["recipe"]["seed"] == 3
    assert [step for step, _ in first.points] == [0, 1, 2, 2]
    assert first.points[2][1] == LAST
    assert first.points[3][1] == {"eval/top1": 0.5, "eval/top5": 1.0, "eval/loss": 1.0}
    assert (first.summary["metric_final"], first.summary["status"], first.exit_code) == (0.5, "completed", 0)
    assert (second.points, second.exit_code, second.given["notes"]) == ([], 1, "no memory")
    exporter.export_records(compared, tmp_path / "run")
    assert len(runs) == 2
    assert notes == ["apex:O2, seed 3 is there already", "fp32, seed 3 is there already"]


class Metric(NamedTuple):
    """As MLflow's class of that name."""

    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    """As MLflow's class of that name."""

    key: str
    value: str


class Client:
    """A stand-in for MLflow's client, which keeps one experiment; `latest` is the last that was made."""

    latest: Client

    def __init__(self, tracking_uri: str) -> None:
        self.uri = tracking_uri
        self.created: list[dict[str, Any]] = []
        self.metrics: list[Metric] = []
        self.params: list[Param] = []
        self.ends: list[tuple[str, int]] = []
        Client.latest = self

    def get_experiment_by_name(self, name: str) -> None:
        self.name = name

    def create_experiment(self, name: str) -> str:
        return "7"

    def search_runs(self, experiments: Sequence[str], same: str) -> list[str]:
        return [
            each["tags"]["ampcompare.cell"]
            for each in self.created
            if each["tags"]["ampcompare.cell"] in same
        ]

    def create_run(self, experiment: str, **given: Any) -> Any:
        self.created.append(given)
        run = ModuleType("run")
        run.info = run  # type: ignore[attr-defined]
        run.run_id = str(len(self.created))  # type: ignore[attr-defined]
        return run

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.metrics += [each for each in metrics if run_id == "1"]
        self.params += [each for each in params if run_id == "1"]

    def delete_run(self, run_id: str) -> None:
        del self.created[int(run_id) - 1]

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        self.ends.append((status, end_time))


def stand_in_for_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put modules in the place of MLflow's, and its variables out of the way."""
    for name, values in {
        "mlflow": {},
        "mlflow.tracking": {"MlflowClient": Client},
        "mlflow.exceptions": {"MlflowException": type("MlflowException", (Exception,), {})},
        "mlflow.entities": {"Metric": Metric, "Param": Param},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "")


def interrupted(*args: Any, **given: Any) -> None:
    raise KeyboardInterrupt


def test_mlflow_gets_parameters_metrics_and_times(
    compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in: a run per record, at the times of the steps, and settings as parameters by their path."""
    stand_in_for_mlflow(monkeypatch)
    notes: list[str] = []
    exporter = MlflowExporter(tmp_path / "out", notes.append, "mine")
    exporter.export_records(compared, tmp_path / "run")
    client = Client.latest
    begin = 1767323045000
    assert client.uri == (tmp_path / "out").as_uri()
    assert [each["run_name"] for each in client.created] == ["apex:O2, seed 3", "fp32, seed 3"]
    assert [metric for metric in client.metrics if metric.key == "train/loss"] == [
        Metric("train/loss", 2.0 - at, begin + 500 * (at + 1), at) for at in range(3)
    ]
    assert Metric("eval/top1", 0.5, begin + 1500, 2) in client.metrics
    assert Metric("summary/metric_final", 0.5, begin, 2) in client.metrics
    assert Param("recipe.seed", "3") in client.params
    assert client.ends == [("FINISHED", begin + 1500), ("FAILED", 0)]
    exporter.export_records(compared, tmp_path / "run")
    assert len(client.created) == 2
    assert notes[0] == "apex:O2, seed 3 is there already"
    assert exporter.destination == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    elsewhere = MlflowExporter(tmp_path / "out", notes.append, "mine")
    assert (elsewhere.destination, Client.latest.uri) == ("http://127.0.0.1:9",) * 2


def test_an_export_that_breaks_off_leaves_no_half_run(
    compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose points did not arrive is deleted, so that the next export writes it."""
    stand_in_for_mlflow(monkeypatch)
    exporter = MlflowExporter(tmp_path / "out", pytest.fail, "mine")
    monkeypatch.setattr(Client, "log_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exporter.export_records(compared, tmp_path / "run")
    assert Client.latest.created == []
    monkeypatch.undo()
    stand_in_for_mlflow(monkeypatch)
    exporter.export_records(compared, tmp_path / "run")
    assert len(exporter._client.created) == 2  # type: ignore[attr-defined]


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs the extra wandb")
def test_wandb_itself_writes_an_offline_run(compared: Comparison, tmp_path: Path) -> None:
    """The library accepts every argument, and its file has the names of the curves."""
    make_exporter("wandb", tmp_path / "out", pytest.fail, "mine").write(compared, tmp_path / "run")
    files = sorted((tmp_path / "out").rglob("*.wandb"))
    assert len(files) == 2
    text = b"".join(path.read_bytes() for path in files)
    assert text.count(b"train/grad_norm") >= 3
    assert b"eval/top1" in text


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs the extra mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself_keeps_what_it_was_given(
    compared: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back by the library: curves, parameters and status."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    make_exporter("mlflow", tmp_path / "out", pytest.fail, "mine").write(compared, tmp_path / "run")
    client = MlflowClient(tracking_uri=(tmp_path / "out").as_uri())
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    run = runs["apex:O2, seed 3"]
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(0, 2.0), (1, 1.0), (2, 0.0)]
    assert run.data.params["recipe.seed"] == "3"
    assert (run.info.status, runs["fp32, seed 3"].info.status) == ("FINISHED", "FAILED")


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install, and nothing is written."""
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfit, match="pip install mlflow-skinny, or the extra mlflow"):
        make_exporter("mlflow", tmp_path / "out", pytest.fail, "mine")
    assert not (tmp_path / "out").exists()
