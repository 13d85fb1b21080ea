"""What every test needs: one thread, no user settings, this checkout in child processes, `requires` and `--unit`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import pytest

from ampcompare.doctor.gpu import has_nvidia_gpu

ROOT = Path(__file__).resolve().parent.parent

# A runner started in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything imports torch, which reads the thread count once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
for variable in [name for name in os.environ if name.startswith("AMPCOMPARE_")]:
    del os.environ[variable]
# Child processes started in another folder must import this checkout too, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _missing(cuda: int = 0, apex: bool = False) -> str | None:
    """Say what this machine lacks of what a test requires, or None.

    Args:
        cuda: number of CUDA devices.
        apex: the real Apex with `apex.amp`; looked for by files, because importing it may fail.
    """
    if cuda:
        import torch

        found = torch.cuda.device_count()
        if found < cuda:
            return f"needs {cuda} CUDA device(s), {found} found"
    if apex:
        spec = importlib.util.find_spec("apex")
        folders = (spec.submodule_search_locations if spec else None) or []
        if not any(Path(folder, "amp", "__init__.py").is_file() for folder in folders):
            return "needs the real Apex with apex.amp (last in tag 25.05)"
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use half as many processes again as there are cores: tests of launchers wait for others much of the time.

    Unit tests do not wait: one process per core, as each imports torch and every test file.
    """
    cores = os.cpu_count() or 1
    return max(2, cores if config.getoption("--unit") else cores * 3 // 2)


# What exists once on a machine: tests that use one of these fixtures run in one process, one after the other.
MACHINE_WIDE = ("slurm", "hosts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep tests that share something of the whole machine in one process of pytest-xdist; select those of `--unit`."""
    for item in items:
        for fixture in set(MACHINE_WIDE) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(fixture))
    if config.getoption("--unit"):
        others = [item for item in items if any(map(item.get_closest_marker, ("slow", "integration")))]
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)


# Rooms whose tests are about processes, and the words of a file that starts one. Whatever they miss fails under --unit.
PROCESS_ROOMS = ("benchmarks", "cli", "distributed", "docker", "docs", "doctor", "launch", "legacy")
STARTS_PROCESSES = re.compile(r"\bsubprocess\b|\bmultiprocessing\b|\bos\.fork\b|\breplayed\b")
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system")
_unit_test: list[str] = []  # the test that runs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--unit`, which `scripts/test unit` gives."""
    parser.addoption("--unit", action="store_true", help="only tests that are not slow and start no process")


def pytest_configure(config: pytest.Config) -> None:
    """Under `--unit`, fail a test that starts a process after all."""
    if config.getoption("--unit"):
        sys.addaudithook(_refuse_processes)


def _refuse_processes(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in STARTS and _unit_test:
        pytest.fail("this is not a unit test, it starts a process: mark it `integration`", pytrace=False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `--unit`, leave out files that start processes before anything of them is imported."""
    if not config.getoption("--unit"):
        return None
    if collection_path.is_dir():
        return True if collection_path.parent == ROOT / "tests" and collection_path.name in PROCESS_ROOMS else None
    if collection_path.suffix != ".py":
        return None
    return True if STARTS_PROCESSES.search(collection_path.read_text(encoding="utf-8")) else None


def may_use_gpu(item: pytest.Item) -> bool:
    """Return whether a test is for a GPU: it requires one, or takes the device that is there."""
    asks = any(mark.kwargs.get("cuda", mark.args[0] if mark.args else 0) for mark in item.iter_markers("requires"))
    return asks or "device" in getattr(item, "fixturenames", ())


def hide_gpus(patch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts see no GPU until `patch` is undone."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # the driver looks once at what is visible, and a later test may need its GPU
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Run on the CPU what is not for a GPU, whatever the machine has; fixtures of any scope with it."""
    with pytest.MonkeyPatch.context() as patch:
        if has_nvidia_gpu() and not may_use_gpu(item):
            hide_gpus(patch)
        _unit_test.append(item.nodeid)
        try:
            return (yield)
        finally:
            _unit_test.clear()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose mark `requires` names what is not here."""
    for mark in item.iter_markers("requires"):
        reason = _missing(*mark.args, **mark.kwargs)
        if reason is not None:
            pytest.skip(reason)


class ForkedProcess:
    """A process that `ForkedPython` has started, with the methods of `subprocess.Popen` that tests use.

    Attributes:
        stdin: its standard input.
        stdout, stderr: what it prints, where the caller has asked for pipes.
    """

    def __init__(self, answer: socket.socket, stdin: IO[Any]) -> None:
        self._answer = answer.makefile()
        answer.close()
        self.stdin = stdin
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self.pid = int(self._answer.readline())
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended."""
        if self._code is None and select.select([self._answer], [], [], 0)[0]:
            self._code = int(self._answer.readline())
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process ends.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if self._code is None and not select.select([self._answer], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return cast(int, self.poll())

    def kill(self) -> None:
        """End the process by SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedPython:
    """Runs Python command lines in processes that find torch loaded: see `fork_server.py`.

    Use it where a script imports torch and where the start of the interpreter is not what is tested.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def _start(self) -> socket.socket:
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        command = [sys.executable, str(ROOT / "tests" / "fork_server.py"), str(theirs.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        return self._channel

    def start(
        self,
        words: list[str],
        folder: Path,
        environment: Mapping[str, str],
        out: IO[Any],
        err: IO[Any],
        *,
        session: bool = False,
        stdin_mode: str = "w",
    ) -> ForkedProcess:
        """Start `python WORDS`, where options of Python itself can only be `-W` and `-m`."""
        channel = self._channel or self._start()
        request = {"words": words, "folder": str(folder), "environment": dict(environment), "session": session}
        mine, theirs = socket.socketpair()
        read, write = os.pipe()
        try:
            files = [read, out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(channel, [json.dumps(request).encode()], files)
        finally:
            os.close(read)
            theirs.close()
        return ForkedProcess(mine, os.fdopen(write, stdin_mode))

    def start_with_pipes(self, command: list[str], *, env: Mapping[str, str], **_: Any) -> ForkedProcess:
        """Start `command` as `subprocess.Popen` does with three pipes of bytes and a session of its own."""
        pipes = [os.pipe(), os.pipe()]
        with open(pipes[0][1], "wb") as out, open(pipes[1][1], "wb") as err:
            process = self.start(command[1:], Path.cwd(), env, out, err, session=True, stdin_mode="wb")
        process.stdout, process.stderr = os.fdopen(pipes[0][0], "rb"), os.fdopen(pipes[1][0], "rb")
        return process

    def run(
        self, words: list[str], folder: Path, environment: Mapping[str, str], timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS` to its end, with an empty standard input.

        Raises:
            subprocess.TimeoutExpired: it had not ended in time, and was killed.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(words, folder, environment, out, err)
            process.stdin.close()
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def close(self) -> None:
        """End the server."""
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.wait()


@pytest.fixture(scope="session")
def forked_python() -> Iterator[ForkedPython]:
    """Python with torch loaded, forked for each command line."""
    python = ForkedPython()
    yield python
    python.close()


@pytest.fixture
def forked_children(forked_python: ForkedPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `call_in_child` fork its children from a process that has torch loaded."""

    def start(command: list[str], *, env: dict[str, str], stderr: IO[Any], **_: Any) -> ForkedProcess:
        with open(os.devnull, "w") as null:
            process = forked_python.start(command[1:], Path.cwd(), env, null, stderr)
        process.stdin.close()
        return process

    names = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr("ampcompare.isolate.call.subprocess", names)


@pytest.fixture
def forked_servers(forked_python: ForkedPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let process servers start in milliseconds, from a process that has torch loaded."""
    names = types.SimpleNamespace(**{**vars(subprocess), "Popen": forked_python.start_with_pipes})
    monkeypatch.setattr("ampcompare.launch.server_process.subprocess", names)


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Any]:
    """Build the record of one cell from its arm, seed, accuracy, step time and the like."""
    from ampcompare.records.evaluation import EpochResult
    from ampcompare.records.run import RunRecord, RunSummary
    from ampcompare.settings.config import Recipe, RunConfig

    def make(
        arm: str = "fp32",
        seed: int = 0,
        *,
        top1: float = 0.5,
        seconds: float = 0.01,
        status: str = "completed",
        losses: str = "",
        half: str | None = None,
        device: str = "cpu",
        error: str | None = None,
        majority: int | None = None,
        **summary: Any,
    ) -> RunRecord:
        config = RunConfig(arm=arm, recipe=Recipe(seed=seed))
        correct = round(top1 * 1000)
        epoch = EpochResult(
            epoch=0,
            samples=1000,
            top1_correct=correct,
            top5_correct=1000,
            loss=1.0,
            majority_correct=majority,
            train_seconds=1.0,
            eval_seconds=0.1,
        )
        ran = status in ("completed", "diverged")
        numbers: dict[str, Any] = {
            "metric_final": top1 if status == "completed" else None,
            "metric_best": top1,
            "step_seconds_median": seconds,
            "epoch_seconds": 100 * seconds,
            "num_steps": 100,
            "losses_sha256": losses or f"{arm} {seed}",
            "epochs": [epoch],
            "diverged_step": 7 if status == "diverged" else None,
        }
        return RunRecord.model_validate(
            {
                "cell": config.digest(),
                "arm": arm,
                "status": status,
                "config": config,
                "half": half,
                "environment": {"device": device},
                "summary": RunSummary(**{**numbers, **summary}) if ran else RunSummary(),
                "error": error,
            }
        )

    return make
