"""Cells as jobs of a real Slurm of this machine alone, where it may be started: what they leave and how they end."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ampcompare.experiment.launch.dispatch import slurm as slurm_launcher
from ampcompare.experiment.launch.dispatch.slurm import SlurmLauncher
from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.results.records.comparison import read_comparison
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig

pytest.importorskip("submitit", reason="needs the extra slurm")
pytestmark = pytest.mark.slow
MakeConfig = Callable[..., RunConfig]
WaitUntil = Callable[[Callable[[], object], float], bool]
Slurm = dict[str, str]
OPTIONS = {"time": "10"}
SMALL = [
    *("--data", "synthetic", "--train-size", "64", "--val-size", "32", "--image-size", "8", "--epochs", "1"),
    *("--batch-size", "16", "--device", "cpu", "--no-progress", "--slurm-option", "time=10"),
]


@pytest.fixture(autouse=True)
def _in_the_users_folder(slurm: Slurm, user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of Slurm find the one of these tests, and jobs the user's module."""
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    monkeypatch.chdir(user_folder)
    monkeypatch.setattr(slurm_launcher, "QUEUE_SECONDS", 1.0)
    monkeypatch.setattr(slurm_launcher, "RECORD_SECONDS", 1.0)


def queued() -> list[str]:
    command = ["squeue", "--noheader", "--array", "--format=%i"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def jobs_of(folder: Path) -> dict[str, str]:
    """Return the number of each cell's job."""
    return {path.parent.name: json.loads(path.read_text())["job"] for path in folder.glob("cells/*/job.json")}


def test_compare_killed_and_called_again(wait_until: WaitUntil, tmp_path: Path) -> None:
    """After SIGKILL the same command waits for the jobs that run, submits none anew, and ends with the table."""
    go, out = tmp_path / "go", tmp_path / "out"
    words = [
        "compare",
        "--seeds",
        "0",
        "--launcher",
        "slurm",
        "--arm",
        "fp32",
        "--arm",
        "native:bf16",
        *SMALL,
    ]
    words += ["--arch", "launched:waits_for", "--model-arg", f"file={go}", "-o", str(out)]
    command = [sys.executable, "-m", "ampcompare", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until(lambda: len(jobs_of(out)) == 2 and all(jobs_of(out).values()), 30)
        finally:
            process.kill()
    jobs = jobs_of(out)
    assert sorted(queued()) == sorted(jobs.values())
    go.touch()
    again = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert again.returncode == 0, again.stderr
    assert "\narm " in again.stdout
    assert jobs_of(out) == jobs
    assert [record.status for record in read_comparison(out / "report.json").records] == ["completed"] * 2
    assert len(list(out.glob("cells/slurm/*_submission.sh"))) == 1, "the cells are no array"
    read = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert read.stderr.count("(cached)") == 2
    assert not list(out.glob("cells/*/record.previous.json"))


def test_a_cell_of_two_processes(make_config: MakeConfig, tmp_path: Path) -> None:
    """A job starts the two ranks of a cell; progress is told, and the record has what concerns both."""
    told: list[int] = []
    config = make_config(
        processes=2, launcher="slurm", parallel={"kind": "apex-ddp"}, recipe={"batch_size": 8}
    )
    with SlurmLauncher(OPTIONS) as launcher:
        record = launcher.launch(config, tmp_path, lambda progress: told.append(progress.steps))
        assert launcher.pending_message() == ""
    assert (record.status, record.error) == ("completed", None)
    assert record == read_record(tmp_path / "record.json")
    assert record.processes is not None
    assert (record.processes.world_size, record.processes.nodes, record.processes.launcher) == (2, 1, "spawn")
    assert told[-1] == 4


def test_a_job_that_is_preempted_with_a_grace_time(
    launcher: ForkedLauncher, wait_until: WaitUntil, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Cells save and are queued again, each once; they resume, and are those of an undisturbed run bit for bit."""
    go = tmp_path / "go"
    config = make_config(
        "launched:waits_at_the_third_step",
        args={"file": str(go)},
        drain_every=1,
        allow_writes=[str(tmp_path)],
    )
    cells = [
        (config.model_copy(update={"launcher": "slurm"}), tmp_path / name) for name in ("first", "second")
    ]
    records: dict[int, RunRecord] = {}
    with SlurmLauncher(OPTIONS) as slurm:
        waiting = threading.Thread(target=lambda: records.update(slurm.collect_records(cells)))
        waiting.start()
        assert wait_until(lambda: all(_steps(folder) == 2 for _, folder in cells), 240)
        urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--ntasks=2", "--cpus-per-task=2", "--time=1"]
        subprocess.run([*urgent, "--output=/dev/null", "--wrap=true"], check=True, capture_output=True)
        numbers = sorted({_job(folder) for _, folder in cells})
        assert wait_until(
            lambda: all(_fact(number, "PreemptTime") not in ("", "None") for number in numbers), 240
        )
        go.touch()
        assert wait_until(lambda: all(_fact(number, "Restarts") == "1" for number in numbers), 240)
        assert [read_record(folder / "record.json").status for _, folder in cells] == ["interrupted"] * 2
        assert records == {}, "a cell counted while its job is queued again"
        assert wait_until(lambda: all(_state(number) == "PENDING" for number in numbers), 240)
        for number in numbers:
            # not in two minutes
            subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True)
        waiting.join(480)
    undisturbed = launcher.launch(config, tmp_path / "undisturbed")
    assert sorted(records) == [0, 1]
    for index, record in records.items():
        assert (record.status, record.summary.num_steps) == ("completed", 4)
        assert [each.step for each in record.resumed] == [3]
        assert record.summary.weights_sha256 == undisturbed.summary.weights_sha256
        assert record.summary.metric_final == undisturbed.summary.metric_final
        losses = [step.loss for step in iter_steps(cells[index][1] / "steps.jsonl")]
        assert losses == [step.loss for step in iter_steps(tmp_path / "undisturbed" / "steps.jsonl")]
    assert {_fact(number, "Restarts") for number in numbers} == {"1"}


def test_what_slurm_refuses(tmp_path: Path) -> None:
    """A partition that is not there is one line with Slurm's own words."""
    words = ["run", "--launcher", "slurm", *SMALL, "--slurm-option", "partition=nope", "-o", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "ampcompare", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    line = "ampcompare: Slurm rejects the job: Batch job submission failed: Invalid partition name specified"
    assert done.stderr.splitlines()[-1] == line


def _state(number: str) -> str:
    command = ["squeue", "--noheader", "--format=%T", f"--jobs={number}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _job(folder: Path) -> str:
    number: str = json.loads(_text(folder / "job.json") or '{"job": ""}')["job"]
    return number


def _fact(number: str, name: str) -> str:
    """Return what Slurm says of a job that ended lately; "" if nothing."""
    command = ["scontrol", "show", "job", "--oneliner", number]
    found = re.search(
        rf" {name}=(\S*)", subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    return found[1] if found else ""


def _steps(folder: Path) -> int:
    return len(_text(folder / "steps.jsonl").splitlines())


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
