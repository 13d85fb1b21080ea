"""What is asked of Slurm and what it answers, without one; cells under a real one where it may be started."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import (
    BackendUnavailable,
    ConfigError,
    EnvironmentUnfit,
    LaunchError,
)
from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.experiment.launch.contract import record_of_failed_cell
from ampcompare.experiment.launch.dispatch import slurm as module
from ampcompare.experiment.launch.dispatch.slurm import SlurmLauncher, parse_slurm_options
from ampcompare.results.records.run import read_record
from ampcompare.settings.config import RunConfig

Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Put programs that print what they are given on a path of their own: `programs(squeue="1|x")`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(module, "QUEUE_SECONDS", 0.0)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "RECORD_SECONDS", 0.0)

    def make(**texts: str | None) -> None:
        for name, text in texts.items():
            script = "echo no answer >&2\nexit 1\n" if text is None else f"echo '{text}'\n"
            (folder / name).write_text(f"#!/bin/sh\n{script}")
            (folder / name).chmod(0o755)

    return make


def test_options_of_sbatch() -> None:
    """Names are taken with or without dashes, flags have no value, and what is not known here is left to sbatch."""
    texts = [
        "partition=gpu",
        "--account=lab",
        "gpus_per_node=2",
        "exclusive",
        "time=1-12:30:00",
        "gres=gpu:a100:2",
    ]
    assert parse_slurm_options(texts) == {
        "partition": "gpu", "account": "lab", "gpus-per-node": "2", "exclusive": "", "time": "1-12:30:00",
        "gres": "gpu:a100:2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["=gpu"], "is not an option of sbatch such as partition=gpu or exclusive"),
        (["partition="], "is not an option of sbatch"),
        (["qos=a\n#SBATCH --uid=0"], "is not an option of sbatch"),
        (["nodes=2"], "nodes is set by ampcompare"),
        (["ntasks_per_node=2"], "ntasks-per-node is set by ampcompare; see also --nproc-per-node"),
    ],
)
def test_options_that_cannot_be(texts: list[str], message: str) -> None:
    """What is no option, or is not the user's to set, is refused."""
    with pytest.raises(ConfigError, match=message):
        parse_slurm_options(texts)


def test_what_is_missing(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sbatch or without submitit the error says what to do, with the code of an unfit machine."""
    with pytest.raises(EnvironmentUnfit, match="needs sbatch, which is not on the path"):
        SlurmLauncher()
    programs(sbatch="", srun="", squeue="")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(BackendUnavailable, match="pip install submitit") as caught:
        SlurmLauncher()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("answer", "state"),
    [("JobId=7 JobState=TIMEOUT ExitCode=0:15 NodeList=n1", "TIMEOUT"), (None, "unknown to Slurm")],
)
def test_a_job_without_a_record(programs: Programs, tmp_path: Path, answer: str | None, state: str) -> None:
    """It becomes a record that has Slurm's word for its state, and the path of its output."""
    programs(sbatch="", srun="", squeue="", scontrol=answer)
    record = _ended(tmp_path)
    assert (record.status, record.error) == (
        "failed",
        f"Slurm job 7 ended as {state}; its output is in /logs/7.out",
    )
    assert read_record(tmp_path / "cell" / "record.json") == record


def test_a_cell_that_has_saved(programs: Programs, tmp_path: Path) -> None:
    """A cell that was asked to stop and saved is a row that says so and how to resume; other failures are unchanged."""
    programs(sbatch="", srun="", squeue="", scontrol="JobState=PREEMPTED")
    told = record_of_failed_cell(RunConfig(), "asked to stop after 3 updates, and saved")
    write_record(told.model_copy(update={"status": "interrupted"}), tmp_path / "cell")
    record = _ended(tmp_path)
    assert record.status == "failed"
    assert record.error.startswith("Slurm job 7 ended as PREEMPTED; ")
    assert record.error.endswith(
        "; the cell was asked to stop after 3 updates, and saved; --resume auto resumes from there"
    )
    write_record(record_of_failed_cell(RunConfig(), "ValueError: bad data"), tmp_path / "cell")
    assert _ended(tmp_path).error == "ValueError: bad data"


def _ended(tmp_path: Path) -> Any:
    """Return the record of a cell whose job 7 is no longer in the queue."""
    pytest.importorskip("submitit", reason="needs the extra slurm")
    folder = tmp_path / "cell"
    launcher = SlurmLauncher()
    launcher._jobs[folder.resolve()] = module._SlurmJob("7", "/logs/7.out")
    return launcher.launch(RunConfig(launcher="slurm"), folder)


def test_a_queue_that_does_not_answer(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Slurm is silent for a while the launcher waits on; when it stays so, that is the error."""
    programs(sbatch="", srun="", squeue=None)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(LaunchError, match="squeue does not respond"):
        _ended(tmp_path)


def test_what_is_submitted(programs: Programs, tmp_path: Path) -> None:
    """The batch file has the options, cores for all processes, and an hour unless told otherwise; the job is kept."""
    pytest.importorskip("submitit", reason="needs the extra slurm")
    programs(sbatch="Submitted batch job 31", srun="", squeue="30")
    launcher = SlurmLauncher(parse_slurm_options(["partition=gpu", "exclusive"]))
    config = RunConfig(processes=4, launcher="slurm", workers=2)
    launcher.submit_cells_ahead([(config, tmp_path / "cell")])
    launcher.submit_cells_ahead([(config, tmp_path / "cell")])
    saved = json.loads((tmp_path / "cell" / "job.json").read_text())
    assert saved == {"job": "31", "log": str(tmp_path / "cell" / "slurm" / "31_0_log.out")}
    (path,) = (tmp_path / "cell" / "slurm").glob("*_submission.sh")
    lines = path.read_text().splitlines()
    for line in (
        "partition=gpu",
        "exclusive",
        "nodes=1",
        "ntasks-per-node=1",
        "cpus-per-task=12",
        "time=60",
        "signal=USR2@90",
    ):
        assert f"#SBATCH --{line}" in lines
    assert not any("--array" in line for line in lines)
    assert launcher.pending_message().endswith("scancel 31")


def test_a_job_that_is_still_there(programs: Programs, tmp_path: Path) -> None:
    """A cell whose job is in the queue is not submitted again; a gone one is."""
    pytest.importorskip("submitit", reason="needs the extra slurm")
    config = RunConfig(launcher="slurm")
    programs(sbatch="Submitted batch job 31", srun="", squeue="29\n30_1")
    for name, noted in (("a", {"job": "29"}), ("b", {"job": "30_1", "log": ""}), ("c", {"job": "28"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(json.dumps(noted))
    launcher = SlurmLauncher()
    launcher.submit_cells_ahead([(config, tmp_path / name) for name in "abc"])
    jobs = [json.loads((tmp_path / name / "job.json").read_text())["job"] for name in "abc"]
    assert jobs == ["29", "30_1", "31"]


def test_cells_of_an_array(programs: Programs, tmp_path: Path) -> None:
    """Cells with equal needs are one array with a limit; others are one of their own."""
    pytest.importorskip("submitit", reason="needs the extra slurm")
    programs(sbatch="Submitted batch job 31", srun="", squeue="")
    launcher = SlurmLauncher(running=2)
    cells = [(RunConfig(launcher="slurm"), tmp_path / str(number)) for number in range(3)]
    wide = RunConfig(launcher="slurm", processes=3, workers=1)
    launcher.submit_cells_ahead([*cells, (wide, tmp_path / "wide")])
    texts = {path.parent.parent.name: path.read_text() for path in tmp_path.glob("**/*_submission.sh")}
    assert "#SBATCH --array=0-2%2\n" in texts[tmp_path.name]
    assert "#SBATCH --array" not in texts["wide"]
    assert "#SBATCH --ntasks-per-node=1\n" in texts["wide"]
    assert "#SBATCH --cpus-per-task=6\n" in texts["wide"]
    jobs = [json.loads((tmp_path / str(number) / "job.json").read_text())["job"] for number in range(3)]
    assert jobs == ["31_0", "31_1", "31_2"]


RUNS = "JobId=7 JobState=RUNNING Reason=None Requeue=1 PreemptEligibleTime=2026-11-26T05:43:05 PreemptTime="
ALONE, TASK = (
    {"SLURM_JOB_ID": "7"},
    {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"},
)


@pytest.mark.parametrize(
    ("code", "answer", "variables", "number"),
    [
        (143, f"{RUNS}2026-11-26T05:43:08 SuspendTime=None", ALONE, "7"),
        (143, f"{RUNS}2026-11-26T05:43:08 SuspendTime=None", TASK, "7_0"),
        (143, f"{RUNS}None SuspendTime=None", ALONE, None),
        (143, f"{RUNS}2026-11-26T05:43:08 ".replace("RUNNING", "CANCELLED"), ALONE, None),
        (143, None, ALONE, None),
        (0, f"{RUNS}2026-11-26T05:43:08 SuspendTime=None", ALONE, None),
    ],
    ids=["job", "task of an array", "asked to stop only", "cancelled", "no answer", "ended"],
)
def test_which_jobs_ask_to_be_queued_again(
    code: int,
    answer: str | None,
    variables: dict[str, str],
    number: str | None,
    programs: Programs,
    tmp_path: Path,
) -> None:
    """Those that Slurm has preempted while they run, and whose tasks were stopped; their exit code stays."""
    programs(scontrol=answer)
    calls, scontrol = tmp_path / "calls", tmp_path / "bin" / "scontrol"
    scontrol.write_text(scontrol.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\necho "$@" >>{calls}\n'))
    script = "\n".join([*module.REQUEUE_PREEMPTED, f"(exit {code})"])
    variables = {**variables, "PATH": str(tmp_path / "bin")}
    assert subprocess.run(["/bin/bash", "-c", script], env=variables, check=False).returncode == code
    asked = [line for line in calls.read_text().splitlines() if "requeue" in line] if calls.exists() else []
    assert asked == ([] if number is None else [f"requeue {number}"])


WORDS = [
    *("--data", "synthetic", "--train-size", "64", "--val-size", "33", "--image-size", "8", "--epochs", "1"),
    *("--device", "cpu", "--batch-size", "8", "--no-progress"),
]


def _srun(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["srun", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.slow
def test_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    """`srun -n2 ampcompare run` trains over its two tasks and prints one table."""
    run = [sys.executable, "-m", "ampcompare", "run", "--parallel", "apex-ddp", *WORDS, "-o", str(tmp_path)]
    done = _srun(slurm, "-N1", "-n2", *run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1 %") == 1
    record = read_record(next(tmp_path.glob("cells/*/record.json")))
    assert record.processes is not None
    assert (record.processes.world_size, record.processes.launcher) == (2, "slurm")


@pytest.mark.slow
def test_srun_over_two_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    """Tasks on two nodes meet where MASTER_ADDR says, since the names of virtual nodes are no hosts."""
    slurm = {**slurm, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    run = [sys.executable, "-m", "ampcompare", "run", "--parallel", "ddp", *WORDS, "-o", str(tmp_path)]
    done = _srun(slurm, "-N2", "-n2", *run)
    assert done.returncode == 0, done.stderr
    record = read_record(next(tmp_path.glob("cells/*/record.json")))
    assert record.processes is not None
    assert record.processes.nodes == 2
