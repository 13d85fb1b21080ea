"""Cells of several processes, started for real: what they leave, and how they end when one of them goes wrong."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ampcompare.base.processes.start import module_command
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.launch.multi_process import MultiProcessLauncher
from ampcompare.experiment.launch.start_ranks import _end_ranks
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig
from tests.cli.test_working_directory import set_traps, trap_runpy, trapped_environment

MakeConfig = Callable[..., RunConfig]
WaitUntil = Callable[[Callable[[], object], float], bool]
SECONDS_TO_END = 15.0


def steps_made(folder: Path) -> int:
    """Steps of all cells below a run directory, as their ranks reported them."""
    return sum(json.loads(path.read_text())["progress"][0] for path in folder.glob("cells/*/progress.json"))


@pytest.fixture(autouse=True)
def _in_the_users_folder(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user_folder)


def launched(config: RunConfig, folder: Path, launcher: str = "spawn") -> RunRecord:
    with MultiProcessLauncher(launcher) as started:  # type: ignore[arg-type]
        return started.launch(config, folder)


def alive(folder: Path) -> list[psutil.Process]:
    """Return the processes that have a folder in their command line, or hold a file in it open, as ranks their logs."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid", "open_files"]):
        files = [file.path for file in process.info["open_files"] or ()]
        words = [*(process.info["cmdline"] or ()), *files]
        if process.pid != os.getpid() and any(str(folder) in word for word in words):
            found.append(process)
    return found


@pytest.mark.usefixtures("forked_ranks")
def test_torchrun(make_config: MakeConfig, tmp_path: Path) -> None:
    """Two ranks of torchrun train one cell: one record with what concerns them all, every step once, progress told."""
    told: list[Progress] = []
    config = make_config(processes=2, warmup_steps=0, recipe={"batch_size": 8}, parallel={"kind": "apex-ddp"})
    living: list[int] = []

    def look(progress: Progress) -> None:
        told.append(progress)
        living.append(len(alive(tmp_path)))

    with MultiProcessLauncher() as launcher:
        record = launcher.launch(config, tmp_path, look)
    assert (record.status, record.error) == ("completed", None)
    assert max(living) >= 2
    assert read_record(tmp_path / "record.json") == record
    facts = record.processes
    assert facts is not None
    assert (facts.world_size, facts.nodes, facts.global_batch_size, facts.backend) == (2, 1, 16, "gloo")
    assert (facts.launcher, facts.wrapper) == (
        "torchrun",
        "ampcompare.apex.parallel.distributed.DistributedDataParallel",
    )
    assert len(facts.step_seconds_by_rank) == 2
    assert facts.allreduce_share is not None
    assert 0 <= facts.allreduce_share < 1
    # torch was imported three times
    assert (facts.start_seconds or 0) >= (record.summary.start_seconds or 0) > 0.5
    assert facts.step_seconds_slowest == max(facts.step_seconds_by_rank)
    assert [step.step for step in iter_steps(tmp_path / "steps.jsonl")] == [0, 1, 2, 3]
    assert record.summary.epochs[0].samples == 32
    assert told[-1][:3] == (4, 4, 0)
    assert (tmp_path / "log.txt").read_text() == (tmp_path / "rank1.log").read_text() == ""


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "spawn"])
def test_a_rank_that_was_killed(make_config: MakeConfig, tmp_path: Path, launcher: str) -> None:
    """A rank that SIGKILL ends is named with the signal and its last words, and no other rank lives on."""
    begin = time.monotonic()
    config = make_config("launched:kills_rank_1", args={"tries": 2}, processes=2)
    record = launched(config, tmp_path, launcher)
    # both ranks import torch first, on a machine that is busy
    assert time.monotonic() - begin < SECONDS_TO_END + 30
    assert record.status == "failed"
    assert (record.error or "").startswith("rank 1 was killed by SIGKILL")
    assert "rank 1 is about to train" in (record.error or "")
    assert read_record(tmp_path / "record.json") == record
    assert not alive(tmp_path)


@pytest.mark.slow
def test_an_agent_that_was_killed(make_config: MakeConfig, tmp_path: Path) -> None:
    """A cell whose starter of ranks was killed is a failed row that says so, and no rank lives on."""
    with MultiProcessLauncher("spawn") as launcher:

        def kill(progress: Progress) -> None:
            if progress.steps and launcher._process.process is not None:
                launcher._process.process.kill()

        options = {"processes": 2, "recipe": {"batch_size": 8, "epochs": 1000}, "drain_every": 1}
        record = launcher.launch(make_config(**options), tmp_path, kill)
    assert record.status == "failed"
    assert (record.error or "").startswith("the launcher of the ranks was killed by SIGKILL")
    assert _within(10.0, lambda: not alive(tmp_path))


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_ranks_that_are_asked_to_stop_save_together(
    make_config: MakeConfig, tmp_path: Path, launcher: str
) -> None:
    """SIGTERM to whoever started them ends both ranks after the same step, from which the same cell goes on."""
    recipe = {"batch_size": 8, "epochs": 5000}
    config = make_config(processes=2, recipe=recipe, drain_every=1)
    with MultiProcessLauncher(launcher) as started:  # type: ignore[arg-type]
        told = threading.Event()

        def progress(progress: Progress) -> None:
            if progress.steps and not told.is_set():
                told.set()
                assert started.ask_cell_to_stop()

        record = started.launch(config, tmp_path, progress)
    assert record.status == "interrupted"
    assert record.summary.num_steps >= 1
    steps = record.summary.num_steps
    assert (tmp_path / "checkpoints" / f"step-{steps:08d}.pt").exists()
    assert sum(1 for _ in iter_steps(tmp_path / "steps.jsonl")) == steps


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_raises(make_config: MakeConfig, tmp_path: Path) -> None:
    """If the forward pass of one rank fails, there is one record with one line that says what happened."""
    record = launched(make_config("launched:rank_1_raises", processes=2), tmp_path)
    assert record.status == "failed"
    assert "rank 1: RuntimeError: the forward pass of one rank" in (record.error or "")
    assert "\n" not in (record.error or "")


ENDLESS = [
    *("run", "--nproc-per-node", "2", "--data", "synthetic", "--train-size", "64", "--val-size", "32"),
    *("--image-size", "8", "--epochs", "1000000", "--batch-size", "8", "--device", "cpu", "--arch", "mlp"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number", "code", "is_forked"),
    [("torchrun", signal.SIGINT, 130, True), ("spawn", signal.SIGKILL, -signal.SIGKILL, False)],
)
def test_all_ranks_end_with_the_command(
    wait_until: WaitUntil,
    tmp_path: Path,
    forked_python: Any,
    launcher: str,
    number: signal.Signals,
    code: int,
    is_forked: bool,
) -> None:
    """Ctrl-C, or the death of the command, ends every rank within 15 seconds; none of its processes has taken a file
    of the working directory for a library."""
    out, trapped = tmp_path / "out", tmp_path / "trapped"
    words = [*ENDLESS, "--launcher", launcher, "-o", str(out)]
    trapped.mkdir()
    if is_forked:
        start, command = forked_python.popen, [sys.executable, "-m", "ampcompare", *words]
    else:
        start, command = subprocess.Popen, module_command("ampcompare", *words)
        set_traps(trapped)
        trap_runpy(trapped)
    with (tmp_path / "errors").open("w") as errors:
        streams = {"stdout": subprocess.DEVNULL, "stderr": errors}
        process = start(command, cwd=trapped, env=trapped_environment(), **streams)
        try:
            assert wait_until(lambda: steps_made(out), 120), "the ranks did not train"
            begin = time.monotonic()
            process.send_signal(number)
            assert process.wait(SECONDS_TO_END) == code
            assert wait_until(lambda: not alive(out), SECONDS_TO_END - (time.monotonic() - begin))
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in (tmp_path / "errors").read_text()
    assert not (trapped / "SPRUNG").exists()


WORDS = [
    *("--data", "synthetic", "--train-size", "64", "--val-size", "32", "--image-size", "8", "--epochs", "1"),
    *("--device", "cpu", "--batch-size", "8"),
]


ByTorchrun = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def by_torchrun(forked_python: Any) -> ByTorchrun:
    """Run the command under the user's own torchrun, with two ranks."""

    def run(*words: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *options, "-m", "ampcompare", *words]
        done: subprocess.CompletedProcess[str] = forked_python.run(start, Path.cwd(), dict(os.environ))
        return done

    return run


def test_the_command_under_torchrun(by_torchrun: ByTorchrun, tmp_path: Path) -> None:
    """`torchrun -m ampcompare run` trains over its ranks, and rank 0 alone prints the table."""
    done = by_torchrun("run", "--parallel", "apex-ddp", "-o", str(tmp_path), *WORDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1 %") == 1
    assert done.stderr.count("record: ") == 1
    record = read_record(next(tmp_path.glob("cells/*/record.json")))
    assert record.processes is not None
    assert (record.processes.world_size, record.config.processes) == (2, 2)


@pytest.mark.slow
def test_a_killed_rank_under_the_users_torchrun(by_torchrun: ByTorchrun, tmp_path: Path) -> None:
    """With `torchrun --max-restarts 1` by c10d, SIGKILL inside an epoch costs the steps since the last checkpoint."""
    options = [
        "--max-restarts",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--rdzv-id",
        "again",
    ]
    words = ["run", "--arch", "launched:rank_1_dies_at", "--model-arg", "forward=4", "--log-interval", "1"]
    done = by_torchrun(*words, "--save-every-steps", "2", "-o", str(tmp_path), *WORDS, options=options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1 %") == 1
    (folder,) = tmp_path.glob("cells/*")
    record = read_record(folder / "record.json")
    assert [resumption.step for resumption in record.resumed] == [2]
    assert [step.step for step in iter_steps(folder / "steps.jsonl")] == list(range(record.summary.num_steps))


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.06)
    return False


def test_ranks_are_asked_to_end_before_they_are_killed() -> None:
    """SIGTERM gives a rank the time to save; one that has ended is left alone."""
    ranks = [subprocess.Popen([name, "60"]) for name in ("sleep", "true")]
    ranks[1].wait(10)
    _end_ranks(ranks, 20)
    assert [rank.returncode for rank in ranks] == [-signal.SIGTERM, 0]
