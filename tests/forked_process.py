"""Python command lines in processes that `fork_server.py` forks, with the interface of `subprocess.Popen`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import psutil

SERVER = Path(__file__).with_name("fork_server.py")
MODULES = ("ampcompare.base.processes.server", "ampcompare.script.examination.examined_run")
STARTERS = os.path.join("ampcompare", "base", "processes") + os.sep  # of this checkout, or of a copy


def forkable(command: Any) -> bool:
    """Return whether ampcompare starts a command line, or torchrun does, which alone gives `-u`.

    A module by `-m` is one that ends by itself: a signal to the group of the process that starts it would not reach it.
    """
    if not isinstance(command, (list, tuple)) or len(command) < 2 or command[0] != sys.executable:
        return False
    words = [str(word) for word in command[1:]]
    return words[0] == "-u" or STARTERS in words[0] or not {*words}.isdisjoint(MODULES)


class ServerEndedError(Exception):
    """The fork server has ended; what it has printed before stands in the output of the test that started it."""


class ForkedProcess:
    """A process of the server, with the methods of `subprocess.Popen` that tests and launchers use.

    Attributes:
        stdin, stdout, stderr: pipes, where the caller has asked for them.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        channel: socket.socket,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
        text: bool = False,
        **_: Any,
    ) -> None:
        self.args = args
        self.stdin: Any = None
        self.stdout: Any = None
        self.stderr: Any = None
        request = {
            "words": [str(word) for word in args[1:]],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
            "starter": os.getpid(),
            "passed": list(pass_fds),
        }
        mode = "" if text else "b"
        mine, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            files: list[int] = []
            for number, (name, stream) in enumerate(
                (("stdin", stdin), ("stdout", stdout), ("stderr", stderr))
            ):
                if stream == subprocess.PIPE:
                    ends = os.pipe()
                    file = ends[number > 0]
                    stack.callback(os.close, file)
                    setattr(self, name, os.fdopen(ends[number == 0], ("r" if number else "w") + mode))
                elif stream == subprocess.DEVNULL:
                    file = os.open(os.devnull, os.O_RDWR)
                    stack.callback(os.close, file)
                elif stream == subprocess.STDOUT:
                    file = files[1]
                elif stream is None:
                    file = number
                else:
                    file = stream if isinstance(stream, int) else stream.fileno()
                files.append(file)
            files += [*pass_fds, theirs.fileno()]
            socket.send_fds(channel, [json.dumps(request).encode()], files)
        self._answer = mine.makefile()
        mine.close()
        line = self._answer.readline()
        if not line:
            self._answer.close()
            raise ServerEndedError
        self.pid = int(line)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended."""
        if self.returncode is None and select.select([self._answer], [], [], 0)[0]:
            self.returncode = int(self._answer.readline())
            self._answer.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process ends.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if self.returncode is None and not select.select([self._answer], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return cast(int, self.poll())

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends, and the server has not reported it yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """End the process by SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkedPython:
    """Runs Python command lines in processes that find torch loaded: see `fork_server.py`.

    Use it where a script imports torch and where the start of the interpreter is not what is tested.
    """

    def __init__(self, folder: Path) -> None:
        """Start nothing yet.

        Args:
            folder: where all processes of pytest that share a server find its socket.
        """
        self._socket = folder / "fork-server"
        self._loader: subprocess.Popen[bytes] | None = None  # which forks the servers, if started here
        self._connection: socket.socket | None = None
        self._replaced = False
        self.server: int | None = None  # its process id

    def _connect(self) -> socket.socket:
        """Connect with the server, which the first process that needs it starts."""
        self._connection = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._socket.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                connection.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                self._socket.unlink(missing_ok=True)
                self._start()
                connection.connect(str(self._socket))
        self.server = int(connection.recv(64) or 0)
        if not self.server:
            raise ServerEndedError
        return connection

    def _start(self) -> None:
        if self._loader is not None:
            self._loader.wait()  # its socket has gone: it ends
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(self._socket))
            listening.listen()
            file = listening.fileno()
            command = [sys.executable, str(SERVER), str(file)]
            null = subprocess.DEVNULL
            self._loader = subprocess.Popen(
                command, stdin=null, stdout=null, pass_fds=[file], start_new_session=True
            )

    def descendants(self) -> set[psutil.Process]:
        """Return the processes that this one has started, by its server too; no server is one of them."""
        import psutil

        def below(pid: int | None) -> set[psutil.Process]:
            return set(psutil.Process(pid).children(recursive=True))

        found = below(None)
        if self._loader is not None and self._loader.poll() is None:
            found -= {psutil.Process(self._loader.pid)} | below(self._loader.pid)
        return found | below(self.server) if self.server else found

    def popen(self, args: Sequence[str], **options: Any) -> ForkedProcess:
        """Start a command line as `subprocess.Popen` does; options of Python itself can only be `-W`, `-u` and `-m`.

        Args:
            args: the interpreter, and what follows it.
            options: of `ForkedProcess`.

        Raises:
            ServerEndedError: it has ended again, after it was replaced.
        """
        if self._connection is not None and select.select([self._connection], [], [], 0)[0]:  # its end
            if self._replaced:
                raise ServerEndedError
            self._replaced = True
            self._disconnect()
        return ForkedProcess(args, channel=self._connection or self._connect(), **options)

    def run(
        self, words: list[str], folder: Path, environment: Mapping[str, str], timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS` to its end, with an empty standard input.

        Raises:
            subprocess.TimeoutExpired: it had not ended in time, and was killed.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            process = self.popen([sys.executable, *words], cwd=folder, env=environment, **streams)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    def close(self) -> None:
        """Let the server end; what was started here to fork servers ends when no other process of pytest needs one."""
        self._disconnect()
        if self._loader is not None:
            self._loader.wait()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self.server = None


def fork_from(channel: socket.socket) -> None:
    """Let `subprocess.Popen` of this process start by the server what is `forkable`."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __new__(cls, args: Any, *_: Any, **options: Any) -> Any:
            if forkable(args):
                return ForkedProcess(args, channel=channel, **options)
            return super().__new__(cls)

    subprocess.Popen = Popen  # type: ignore[misc]
