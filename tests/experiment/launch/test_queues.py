"""Cells that a queue runs several at a time: followed together, kept as they end, lost, and run again."""

import itertools
import json
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.base.errors import Ended, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.experiment.launch.cell_files import make_writer_of_progress, write_record
from ampcompare.experiment.launch.contract import Launcher, Progress
from ampcompare.experiment.launch.dispatch import slurm
from ampcompare.experiment.launch.dispatch.ray import RayLauncher
from ampcompare.experiment.launch.dispatch.slurm import SlurmLauncher
from ampcompare.experiment.observer import Observer
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.reload_report import reload_comparison
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.run_plan import run_plan
from ampcompare.results.records.document import json_with_checksum
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.results.report.base import write_reports
from ampcompare.settings.config import RunConfig
from ampcompare.testing import make_record
from tests.experiment.pretend import make_plan

Turn = Callable[[], object]


class Listener(Observer):
    """Keeps what happens to cells, by their number."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        self.events.append(f"{number} begins")

    def place(self, number: int, name: str) -> None:
        self.events.append(f"{number} at {name}")

    def progress(self, number: int, progress: Progress) -> None:
        if progress.steps:
            self.events.append(f"{number} made {progress.steps}")

    def end(self, record: RunRecord, *, reused: bool) -> None:
        self.events.append(
            f"{record.arm} of {record.config.recipe.seed} {'was' if reused else 'is'} {record.status}"
        )


class Cells:
    """The cells of a plan in a run directory, as the processes that train them act."""

    def __init__(self, launcher: str, folder: Path) -> None:
        base = RunConfig.model_validate({"launcher": launcher, "recipe": {"epochs": 1}})
        self.plan: Plan = make_plan(base, ["fp32", "half"], [0, 1])
        self.folder = folder
        self.listener = Listener()

    def path(self, number: int) -> Path:
        return RunDirectory(self.folder).cell_folder(self.plan.cells[number - 1])

    def reports(self, number: int, place: str, steps: int) -> None:
        make_writer_of_progress(self.path(number), place)(Progress(steps, 10, 0))

    def record(self, number: int) -> RunRecord:
        config = self.plan.cells[number - 1]
        record = make_record(config.arm, config.recipe.seed)
        here = {**record.environment, **environment_fingerprint()}
        return record.model_copy(update={"config": config, "cell": config.digest(), "environment": here})

    def ends(self, number: int) -> None:
        write_record(self.record(number), self.path(number))

    def run(self, launcher: Any) -> dict[int, str]:
        """Run the plan and return the status of each cell by its number, with the error of a failed one."""
        self.listener.events.clear()
        records = run_plan(self.plan, self.folder, launcher, observer=self.listener).records
        found = {
            record.cell: f"{record.status}{': ' if record.error else ''}{record.error or ''}"
            for record in records
        }
        return {number: found[cell.digest()] for number, cell in enumerate(self.plan.cells, 1)}


def _turns(monkeypatch: pytest.MonkeyPatch, turns: Sequence[Turn]) -> None:
    """Let something happen in each pause of the launcher of Slurm, which asks for jobs after each."""
    waiting = iter(turns)
    monkeypatch.setattr(slurm, "require_slurm", lambda: None)
    monkeypatch.setattr(slurm, "RECORD_SECONDS", 1.5)
    monkeypatch.setattr(slurm, "QUEUE_SECONDS", 0.5)
    clock = itertools.count(100.0, 0.01)
    paused = [0.0]

    def sleep(seconds: float) -> None:
        paused[0] += 1.0
        next(waiting, lambda: None)()

    now = types.SimpleNamespace(monotonic=lambda: next(clock) + paused[0], sleep=sleep)
    monkeypatch.setattr(slurm, "time", now)


def test_cells_of_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cells of all seeds are seen at their nodes at once, and one that was queued again moves; one whose node is lost
    is a failed row, and the same command runs that one alone again."""
    cells = Cells("slurm", tmp_path)
    jobs = {f"7_{number}" for number in range(4)}
    for number in range(1, 5):  # of an earlier call of the command
        cells.path(number).mkdir(parents=True)
        (cells.path(number) / "job.json").write_text(json.dumps({"job": f"7_{number - 1}"}))
    monkeypatch.setattr(slurm, "active_job_ids", lambda: set(jobs))
    monkeypatch.setattr(slurm, "_slurm_state_of_job", lambda job: "NODE_FAIL")
    _turns(
        monkeypatch,
        [
            lambda: [
                cells.reports(number, f"job 7_{number - 1} on n{number}", number) for number in (1, 2, 4)
            ],
            lambda: (cells.ends(4), jobs.remove("7_0")),
            lambda: jobs.add("7_0"),  # it was queued again
            lambda: None,
            lambda: (cells.reports(1, "job 7_0 on n3", 5), jobs.remove("7_1")),
            lambda: (cells.ends(1), cells.ends(3)),
        ],
    )
    lost = "failed: Slurm job 7_1 ended as NODE_FAIL; its output is in unknown"
    expected = {1: "completed", 2: lost, 3: "completed", 4: "completed"}
    assert cells.run(SlurmLauncher()) == expected
    first, last = cells.plan.cells[0], cells.plan.cells[3]
    events = cells.listener.events
    assert events[:9] == [
        *("1 begins", "1 at job 7_0 on n1", "1 made 1", "2 begins", "2 at job 7_1 on n2", "2 made 2"),
        *("4 begins", "4 at job 7_3 on n4", "4 made 4"),
    ]
    assert events[9] == f"{last.arm} of {last.recipe.seed} is completed"
    assert events[10:12] == ["1 at job 7_0 on n3", "1 made 5"]
    assert f"{first.arm} of {first.recipe.seed} is completed" in events[12:]

    submitted: list[RunConfig] = []

    def submit(self: SlurmLauncher, new: Sequence[tuple[RunConfig, Path]]) -> None:
        submitted.extend(config for config, _ in new)
        for _, folder in new:
            self._jobs[folder] = slurm._SlurmJob("8", "")
        cells.ends(2)

    monkeypatch.setattr(SlurmLauncher, "_submit_cells_and_note_jobs", submit)
    assert set(cells.run(SlurmLauncher()).values()) == {"completed"}
    assert submitted == [cells.plan.cells[1]]


class Here(Launcher):
    """Trains cells on this machine, one at a time, and keeps which."""

    def __init__(self, cells: Cells) -> None:
        self.cells, self.trained = cells, []  # type: tuple[Cells, list[RunConfig]]

    def launch(self, config: RunConfig, *rest: object) -> RunRecord:
        self.trained.append(config)
        number = self.cells.plan.cells.index(config) + 1
        self.cells.ends(number)
        return self.cells.record(number)


def test_another_launcher_resumes(tmp_path: Path) -> None:
    """Cells that Slurm has trained are not trained again by another launcher, which trains the others."""
    slurm_cells, here = Cells("slurm", tmp_path), Cells("auto", tmp_path)
    for number in (1, 2, 4):
        slurm_cells.ends(number)
    trained = slurm_cells.plan.order[:2] + slurm_cells.plan.order[3:]
    launcher = Here(here)
    comparison = run_plan(here.plan, tmp_path, launcher, save=write_reports)
    assert [f"{config.arm}@{config.recipe.seed}" for config in launcher.trained] == [
        slurm_cells.plan.order[2]
    ]
    assert [record.status for record in comparison.records] == ["completed"] * 4
    assert sorted(f"{record.arm}@{record.config.recipe.seed}" for record in comparison.records) == sorted(
        [*trained, slurm_cells.plan.order[2]]
    )
    read = reload_comparison(tmp_path)
    assert [row.pairs for row in read.arms] == [2, 2]
    assert read.excluded == []


def test_the_place_of_a_task_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task names its job or its number in the array, its nodes, and the GPUs that Slurm gave it."""
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert slurm._text_on_job_nodes_and_gpus() == "job 71 on n[1-2]"
    for name, value in (
        ("SLURM_ARRAY_JOB_ID", "70"),
        ("SLURM_ARRAY_TASK_ID", "3"),
        ("SLURM_JOB_GPUS", "2,3"),
    ):
        monkeypatch.setenv(name, value)
    assert slurm._text_on_job_nodes_and_gpus() == "job 70_3 on n[1-2], GPU 2,3"


class RayError(Exception):
    """What Ray raises of a task that it lost."""


class Remote:
    """A task, a call of an actor, or what makes one: its answer is there once it is set."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.cancelled = False


class Ray(types.ModuleType):
    """Stands for Ray: runs nothing, and lets something happen whenever the launcher waits for tasks."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.exceptions = types.SimpleNamespace(RayError=RayError)
        self.tasks: dict[str, Remote] = {}
        self.turns: list[Turn] = []

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, **needs: Any) -> Any:
        def made(what: Any) -> Any:
            return types.SimpleNamespace(
                remote=lambda _, folder, *rest: self.tasks.setdefault(folder, Remote())
            )

        return made

    def wait(self, tasks: list[Remote], num_returns: int = 1, timeout: float = 0.0) -> Any:
        if timeout and self.turns:
            self.turns.pop(0)()
        ended = [task for task in tasks if task.answer is not None]
        return ended[:num_returns], [task for task in tasks if task not in ended[:num_returns]]

    def get(self, task: Remote) -> Any:
        if isinstance(task.answer, Exception):
            raise task.answer
        return task.answer

    def cancel(self, task: Remote) -> None:
        task.answer = task.answer or RayError("it was cancelled")

    def shutdown(self) -> None:
        raise AssertionError("it is not the launcher's")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    """A cluster that this process has joined."""
    ray = Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def test_cells_of_ray(ray: Ray, tmp_path: Path) -> None:
    """Cells are seen at their nodes where those see the run directory; the files of others come when they end, and one
    that Ray has lost is a failed row."""
    cells = Cells("ray", tmp_path)

    def task(number: int) -> Remote:
        return ray.tasks[str(cells.path(number))]

    def answers(number: int) -> None:
        task(number).answer = {
            "record.json": json_with_checksum(cells.record(number)).encode(),
            "steps.jsonl": b"",
        }

    ray.turns = [
        lambda: cells.reports(1, "node near", 1),
        lambda: answers(4),
        lambda: setattr(task(2), "answer", RayError("a header\nThe node was killed.")),
        lambda: (cells.ends(1), setattr(task(1), "answer", {}), answers(3)),
    ]
    with RayLauncher() as launcher:
        found = cells.run(launcher)
    lost = "failed: the task of Ray was lost: The node was killed."
    assert found == {1: "completed", 2: lost, 3: "completed", 4: "completed"}
    assert cells.listener.events[:4] == ["1 begins", "1 at node near", "1 made 1", "4 begins"]
    assert "completed" in cells.listener.events[4]


def test_ray_is_lost(ray: Ray, tmp_path: Path) -> None:
    """Where the head or the raylet of this machine has died, one line says so, and what had ended stays."""
    cells = Cells("ray", tmp_path)

    def dead(*words: object, **options: object) -> None:
        raise RayError("the connection was lost")

    ray.turns = [
        lambda: (cells.ends(1), setattr(ray.tasks[str(cells.path(1))], "answer", {})),
        lambda: setattr(ray, "wait", dead),
    ]
    lost = pytest.raises(LaunchError, match="Ray is lost: the connection was lost; the same command")
    with lost, RayLauncher() as launcher:
        cells.run(launcher)
    assert read_record(cells.path(1) / "record.json").status == "completed"


def test_ray_is_joined_or_started(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster of RAY_ADDRESS or of `ray start` is joined, never any other that runs here; where the latter is gone,
    Ray is started, and where the former is, that is an error."""
    asked: list[Any] = []

    def init(**options: Any) -> None:
        asked.append(options.get("address"))
        if options.get("address") is None:
            raise ConnectionError("Failed to connect to Ray cluster at here:6379")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init, raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    RayLauncher()
    assert asked == [None, "local"]
    monkeypatch.setenv("RAY_ADDRESS", "here:6379")
    with pytest.raises(
        LaunchError, match="Ray cannot be reached or started: Failed to connect to Ray cluster at here"
    ):
        RayLauncher()
    assert asked == [None, "local", None]


def test_a_cell_of_ray_that_ended_while_the_command_stops(ray: Ray, tmp_path: Path) -> None:
    """SIGTERM cancels the tasks that run; the files of one that has ended elsewhere are kept."""
    cells = Cells("ray", tmp_path)
    launcher = RayLauncher()

    def stop() -> None:
        ray.tasks[str(cells.path(4))].answer = {"record.json": json_with_checksum(cells.record(4)).encode()}
        assert launcher.ask_cell_to_stop()

    ray.turns = [stop]
    with pytest.raises(Ended, match="asked to stop"), launcher:
        cells.run(launcher)
    ray.tasks.clear()
    ray.turns = [
        lambda: [
            (cells.ends(number), setattr(ray.tasks[str(cells.path(number))], "answer", {}))
            for number in (1, 2, 3)
        ]
    ]
    assert set(cells.run(RayLauncher()).values()) == {"completed"}
    assert str(cells.path(4)) not in ray.tasks
    assert not (cells.path(1) / CellFile.PROGRESS).exists()
