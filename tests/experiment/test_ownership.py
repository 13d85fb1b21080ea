"""One command at a time in a run directory, and never one that is dead."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from ampcompare.base.environment.ranks import DistributedEnv
from ampcompare.base.errors import ConfigError
from ampcompare.base.files.run_files import RunFile
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.dispatch.dispatch import DispatchingLauncher
from ampcompare.experiment.launch.dispatch.local import ExternalLauncher
from ampcompare.experiment.run_directory import RunDirectory

Process: TypeAlias = Any  # forked, with the methods of a `subprocess.Popen`
HOLDER = """
import sys, time
from pathlib import Path
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.experiment.launch.dispatch.dispatch import DispatchingLauncher
with RunDirectory(Path(sys.argv[1])).with_lock(DispatchingLauncher(), command="ampcompare compare --tag first"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def launcher() -> Launcher:
    """A launcher of the main process."""
    return DispatchingLauncher()


@pytest.fixture
def other(tmp_path: Path, forked_python: Any) -> Iterator[Process]:
    """Another process, which holds the folder `out`."""
    (tmp_path / "holder.py").write_text(HOLDER)
    command = [sys.executable, str(tmp_path / "holder.py"), str(tmp_path / "out")]
    process = forked_python.popen(command, stdout=subprocess.PIPE, text=True)
    with process.stdout as said:
        assert said.readline() == "held\n"
        yield process
    _end(process)


def _end(process: Process) -> None:
    process.kill()
    process.wait()


def test_the_second_is_refused_until_the_first_is_gone(
    other: Process, launcher: Launcher, tmp_path: Path
) -> None:
    """A second owner is refused with who holds the folder; one that was killed holds nothing."""
    out = tmp_path / "out"
    try:
        with pytest.raises(ConfigError) as refused, RunDirectory(out).with_lock(launcher):
            pytest.fail("two owners")
        for part in (f"process {other.pid} on {socket.gethostname()}, since 20", "compare --tag first"):
            assert part in str(refused.value)
        assert refused.value.exit_code == 2
    finally:
        _end(other)
    assert json.loads((out / RunFile.OWNER).read_text())["pid"] == other.pid  # left by the dead one
    with RunDirectory(out).with_lock(launcher):
        assert json.loads((out / RunFile.OWNER).read_text())["pid"] == os.getpid()
    assert not (out / RunFile.OWNER).exists()


def test_only_the_main_process_locks(other: Process, tmp_path: Path) -> None:
    """Ranks that take part in the command of another process do not ask for its folder."""
    with RunDirectory(tmp_path / "out").with_lock(
        ExternalLauncher(DistributedEnv(1, 2, 1, 2, "env://", 0, "torchrun"))
    ):
        assert other.poll() is None
    _end(other)


@pytest.mark.parametrize("name", ["f" * 300, "g\0h"])
def test_impossible_folders(launcher: Launcher, tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(ConfigError, match="cannot make the output folder"),
        RunDirectory(tmp_path / name).with_lock(launcher),
    ):
        pytest.fail("made")
    assert not list(tmp_path.iterdir())
