"""Cells in processes of their own: what they leave, and what happens when they end badly."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ampcompare.base.errors import EnvironmentUnfit, LaunchError
from ampcompare.experiment.launch.contract import LauncherClosed, Progress
from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.results.records.document import dump_json
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.settings.config import RunConfig

MakeConfig = Callable[..., RunConfig]


def _log(folder: Path) -> str:
    return (folder / "log.txt").read_text()


def test_each_cell_has_a_process(
    launcher: ForkedLauncher, make_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two cells run in two processes that both come from one server, which has imported what torch needs.

    What a user's code prints is in the log and not on the terminal, and its standard input is empty.
    """
    words = []
    for seed in (0, 1):
        record = launcher.launch(make_config("launched:talking", recipe={"seed": seed}), tmp_path / str(seed))
        assert record.status == "completed", record.error
        words.append(_log(tmp_path / str(seed)).split())
    one, other = words
    assert one[1] != other[1]
    assert one[3] == other[3]
    assert one[1] != str(os.getpid())
    assert one[5] == "True"
    assert "to stderr" in _log(tmp_path / "1")
    assert "stdin ''" in _log(tmp_path / "1")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arch", "args", "error"),
    [
        ("launched:exits", {"code": 7}, "the process of the cell ended with exit code 7"),
        ("launched:exits", {"code": 0}, "the process of the cell ended with exit code 0 and left no record"),
        (
            "launched:killed",
            {},
            "was killed by SIGKILL (probably the out-of-memory killer): about to be killed",
        ),
        ("launched:crashes_in_forward", {}, "the process of the cell was killed by SIGSEGV"),
        ("launched:raises_in_forward", {}, "RuntimeError: the forward pass"),
        ("launched:out_of_memory", {}, "out of memory: CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_a_cell_that_ends_badly_is_a_record(
    launcher: ForkedLauncher,
    make_config: MakeConfig,
    tmp_path: Path,
    arch: str,
    args: dict[str, int],
    error: str,
) -> None:
    """However a process ends, its cell has a record that says how; the next one has the same server."""
    server = launcher._ensure_server()
    record = launcher.launch(make_config(arch, args=args), tmp_path / "bad")
    assert record.status == "failed"
    assert error in (record.error or "")
    assert "\n" not in (record.error or "")
    assert read_record(tmp_path / "bad" / "record.json") == record
    assert launcher._ensure_server() is server


def test_an_old_record_is_not_taken_for_a_new_one(
    launcher: ForkedLauncher, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A process that leaves early, with exit code 0, does not pass with the record of the run before."""
    config = make_config("launched:exits", args={"code": 0})
    old = RunRecord(cell=config.digest(), arm="fp32", status="completed", config=config)
    (tmp_path / "record.json").write_text(dump_json(old))
    assert launcher.launch(config, tmp_path).status == "failed"


def test_a_folder_that_cannot_be_made(
    launcher: ForkedLauncher, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A folder below a regular file is refused before anything runs."""
    (tmp_path / "FILE").write_text("")
    with pytest.raises(EnvironmentUnfit, match="choose another --output-dir"):
        launcher.launch(make_config(), tmp_path / "FILE" / "cell")


def test_a_server_that_cannot_start(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies at once is told with its exit code and its last words."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    monkeypatch.setattr(
        "ampcompare.experiment.launch.forked.worker_environment",
        lambda place: {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"},
    )
    with ForkedLauncher() as broken, pytest.raises(LaunchError, match="exit code 1: ImportError: libcudart"):
        broken.launch(make_config(), tmp_path / "cell")


@pytest.mark.usefixtures("forked_servers")
def test_a_server_that_was_killed_between_cells(make_config: MakeConfig, tmp_path: Path) -> None:
    """A server that is gone when a cell is asked for is replaced, which a note says, and the cell runs."""
    notes: list[str] = []
    with ForkedLauncher() as launcher:
        launcher.on_note = notes.append
        server = launcher._ensure_server()
        psutil.Process(server.pid).kill()
        record = launcher.launch(make_config(), tmp_path)
    assert record.status == "completed", record.error
    (note,) = notes
    assert note.startswith("the process server was killed by SIGKILL")


ENDLESS = """
import os, sys
from pathlib import Path
from ampcompare.settings.config import RunConfig
from ampcompare.experiment.launch.forked import ForkedLauncher

recipe = {"data": {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8},
          "model": {"arch": "mlp"}, "epochs": 1_000_000, "batch_size": 16}
with ForkedLauncher() as launcher:
    config = RunConfig.model_validate({"recipe": recipe})
    launcher.launch(config, Path(sys.argv[1]), lambda progress: print("going", flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_parent_ends(
    tmp_path: Path, forked_python: Any, number: signal.Signals
) -> None:
    """Server and cell end with the process that started them, also when that is killed without a chance to clean up."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    before = forked_python.descendants()
    command = [sys.executable, str(script), str(tmp_path)]
    parent = forked_python.popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert parent.stdout.readline() == "going\n"
        started = forked_python.descendants() - before - {psutil.Process(parent.pid)}
        # a library may just ask a program of the system something
        _, family = psutil.wait_procs(started, timeout=1)
        assert len(family) == 2
        parent.send_signal(number)
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive
        assert parent.wait(20) == -number
    finally:
        parent.kill()
        parent.stdout.close()


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.parametrize("moment", ["starting", "training"])
@pytest.mark.parametrize("act", ["close", "ask_cell_to_stop"])
def test_another_thread_stops_a_cell(
    make_config: MakeConfig, tmp_path: Path, forked_python: Any, moment: str, act: str
) -> None:
    """Whether its server starts or it trains, the cell ends at once, interrupted or without a record; nothing is
    left."""
    before = forked_python.descendants()
    ended: list[Any] = []
    trains = threading.Event()

    def note(progress: Progress) -> None:
        if progress.steps:
            trains.set()

    def launch() -> None:
        try:
            ended.append(launcher.launch(config, tmp_path, note).status)
        except LauncherClosed as error:
            ended.append(type(error))

    config = make_config(recipe={"epochs": 1_000_000}, drain_every=1)
    with ForkedLauncher() as launcher:
        thread = threading.Thread(target=launch)
        thread.start()
        if moment == "training":
            assert trains.wait(60)
        while launcher._server.process is None:
            time.sleep(0.001)
        if act == "close":
            launcher.close()
        else:
            assert launcher.ask_cell_to_stop()
        thread.join(30)
        assert ended == [LauncherClosed if act == "close" else "interrupted"]
    _, alive = psutil.wait_procs(
        forked_python.descendants() - before, timeout=5
    )  # one that has ended may be listed
    assert not alive
