"""Processes that one server forks: what they are given, what they tell, and how they end."""

import os
import signal
import types
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ampcompare.base.errors import LaunchError
from ampcompare.base.processes.client import ProcessServer, ServerLost

pytestmark = pytest.mark.integration
MODULE = """
import os, sys, time

def tell(words):
    leads = os.getsid(0) == os.getpid()
    print(words, sys.argv, os.getcwd(), os.environ.get("GIVEN"), leads, sys.stdin.read(), flush=True)
    return 7

def leave(words):
    print("a line", flush=True)
    raise SystemExit("no data")

def load_loudly():
    print("x" * 10**6, file=sys.stderr)

def wait(words):
    print("waits", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions.py").write_text(MODULE)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.environ["PYTHONPATH"]))}


@pytest.fixture
def server(environment: dict[str, str], forking: types.SimpleNamespace) -> Iterator[ProcessServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampcompare.base.processes.client.subprocess", forking)
        one = ProcessServer(["functions"], environment)
    try:
        assert one.wait_until_ready(lambda: False)
        yield one
    finally:
        one.close()


def test_forks_end_as_their_functions_do(
    server: ProcessServer, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another: words, folder, environment, a session of its own; and an exit by an exception."""
    monkeypatch.chdir(tmp_path)
    fork = server.start_fork("functions:tell", ["a", "b"], environment={**environment, "GIVEN": "1"})
    assert fork.stdout is not None
    with fork.stdout:
        assert fork.wait() == 7
        assert fork.stdout.read().decode() == f"['a', 'b'] ['functions', 'a', 'b'] {tmp_path} 1 True \n"
    with (tmp_path / "log").open("wb") as log:
        assert server.start_fork("functions:leave", ["c"], output=log.fileno(), load=["none"]).wait() == 1
    assert (tmp_path / "log").read_text() == "a line\nno data\n"
    assert server.fork is None


def test_a_signal_reaches_a_fork(server: ProcessServer, tmp_path: Path) -> None:
    """As soon as it is known, whatever the server does with such a signal."""
    with (tmp_path / "log").open("wb") as log:
        fork = server.start_fork("functions:wait", [], output=log.fileno())
    os.kill(server.pid, signal.SIGTERM)
    fork.send_signal(signal.SIGTERM)
    assert fork.wait() == -signal.SIGTERM
    assert server.is_running


def test_a_fork_whose_server_is_killed(server: ProcessServer, tmp_path: Path) -> None:
    """It counts as killed, and is, once it is asked for."""
    with (tmp_path / "log").open("wb") as log:
        fork = server.start_fork("functions:wait", [], output=log.fileno())
    psutil.Process(server.pid).kill()
    assert fork.wait() == -signal.SIGKILL
    assert fork.is_alive()
    process = psutil.Process(fork.pid)
    fork.kill()
    assert psutil.wait_procs([process], timeout=20)[1] == []
    with pytest.raises(ServerLost):
        server.start_fork("functions:tell", [])


def test_a_server_that_says_much_is_not_held_up(server: ProcessServer, tmp_path: Path) -> None:
    """More than a pipe takes; nobody reads it."""
    with (tmp_path / "log").open("wb") as log:
        assert (
            server.start_fork(
                "functions:tell", [], output=log.fileno(), load=["functions:load_loudly"]
            ).wait()
            == 7
        )


def test_a_server_that_cannot_load(environment: dict[str, str], forking: types.SimpleNamespace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampcompare.base.processes.client.subprocess", forking)
        broken = ProcessServer(["functions:nothing"], environment)
    with pytest.raises(LaunchError, match=r"exit code 1: AttributeError: .*nothing"):
        broken.wait_until_ready(lambda: False)
    broken.close()
