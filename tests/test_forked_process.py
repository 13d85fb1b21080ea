"""The fork server: one for all processes of pytest, each of which sees its own; it ends with them and is replaced."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forked_process import ForkedProcess, ForkedPython, ServerEndedError

WAITING = "import sys; print(flush=True); sys.stdin.read()"
KILLED = """
import time
from pathlib import Path
from tests.forked_process import ForkedPython
python = ForkedPython(Path.cwd(), "bare")
python.run(["/dev/null"], Path.cwd(), {})
print(python.server, flush=True)
time.sleep(60)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], ForkedPython]]:
    """Connect with the server of this test, which loads nothing."""
    made: list[ForkedPython] = []

    def make() -> ForkedPython:
        made.append(ForkedPython(tmp_path, "bare"))
        return made[-1]

    yield make
    for python in reversed(made):  # the first waits for the others
        python.close()


def started(python: ForkedPython, folder: Path) -> ForkedProcess:
    """Start a process that waits for the end of its standard input."""
    (folder / "waiting.py").write_text(WAITING)
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": folder}
    process = python.popen([sys.executable, "waiting.py"], **options)
    process.stdout.readline()
    return process


def end(process: ForkedProcess) -> None:
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdout.close()


def test_two_that_connect_share_what_is_loaded_and_see_their_own(
    make: Callable[[], ForkedPython], tmp_path: Path
) -> None:
    """Their servers have one parent, which the first has started, and which ends after the last of them."""
    first, second = make(), make()
    processes = [started(python, tmp_path) for python in (first, second)]
    servers = [psutil.Process(python.server) for python in (first, second)]
    assert len({*servers}) == 2
    (loader,) = {server.parent() for server in servers}
    children = [psutil.Process(process.pid) for process in processes]
    found = first.descendants()  # and a browser of other tests of this process
    assert children[0] in found
    assert found.isdisjoint({loader, *servers, children[1]})
    assert children[1] in second.descendants()
    for process in processes:
        end(process)
    second.close()
    assert not psutil.wait_procs(servers[1:], timeout=20)[1]
    end(started(first, tmp_path))
    first.close()
    assert not any(map(psutil.Process.is_running, (loader, *servers)))
    assert not (tmp_path / "fork-server").exists()
    end(started(second, tmp_path))


def test_a_server_that_has_ended_is_replaced_once(make: Callable[[], ForkedPython], tmp_path: Path) -> None:
    python = make()
    for _ in range(2):
        end(started(python, tmp_path))
        server = psutil.Process(python.server)
        server.kill()
        psutil.wait_procs([server], timeout=20)
    with pytest.raises(ServerEndedError):
        started(python, tmp_path)


def test_it_ends_with_a_pytest_that_is_killed(tmp_path: Path) -> None:
    """Nothing is left of a server whose only pytest had no chance to close it."""
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ}) as killed:
        server = psutil.Process(int(killed.stdout.readline()))
        loader = server.parent()
        killed.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(map(psutil.Process.is_running, (server, loader))):
        time.sleep(0.01)
    assert not server.is_running()
    assert not loader.is_running()
