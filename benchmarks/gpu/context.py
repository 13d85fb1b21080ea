"""What every part is given: the device, the folders, the time that is left, and ways to start other processes."""

import contextlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu import ROOT

PART_SECONDS = 510.0  # below nine minutes, with time to write the results
PRELOADED = ["torch", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"]


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        code: exit code; -1 where it was ended because the time was over.
        error: the end of what it wrote on standard error.
    """

    code: int
    out: str
    error: str

    @property
    def reason(self) -> str:
        """What to show where it failed: exit code and last line."""
        lines = (self.error.strip() or self.out.strip()).splitlines()
        return f"exit code {self.code}: {lines[-1][:300] if lines else 'no message'}"

    @property
    def document(self) -> dict[str, Any]:
        """What it printed with `--json`; empty where that is no document."""
        try:
            found = json.loads(self.out)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass
class Context:
    """The surroundings of a part.

    Attributes:
        device: "cuda", or "cpu" in a rehearsal.
        scratch: a folder that is deleted at the end.
        apex_src: folder that holds `apex/` of release 25.05; None where there is none.
        end: `time.monotonic()` at which the part should be done.
    """

    rehearse: bool
    scratch: Path
    apex_src: Path | None = None
    end: float = field(default_factory=lambda: time.monotonic() + PART_SECONDS)

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def jobs(self) -> int:
        """Processes that may work at the same time where no time is measured."""
        return 2 if self.rehearse else max(1, min(8, (os.cpu_count() or 2) // 2))

    def seconds_left(self, most: float = PART_SECONDS) -> float:
        """Return the seconds that something may take: `most`, or the rest of the part's time."""
        return max(1.0, min(most, self.end - time.monotonic()))

    def ampcompare(self, *words: str, most: float = 300.0) -> Done:
        """Run a command of the command line.

        A rehearsal runs it in this process, which saves the import of torch; cells have processes of their own anyway.
        """
        if self.rehearse and words[0] != "exec":
            return _in_this_process(words)
        return self.program([sys.executable, "-m", "ampcompare", *words], most=most)

    def program(self, command: Sequence[str], *, most: float = 300.0, folder: Path | None = None) -> Done:
        """Run a program of Python in this checkout."""
        return run_program(command, self.seconds_left(most), folder or self.scratch)

    def in_child(self, function: Callable[..., Any], *arguments: Any, most: float = 240.0) -> Any:
        """Return what a function returns in a process of its own, which starts with torch imported and without CUDA.

        Raises:
            RuntimeError: it raised, crashed, or took too long; the message says which.
        """
        pipe, process = start(function, *arguments)
        try:
            if not pipe.poll(self.seconds_left(most)):
                raise RuntimeError("no answer in time")
            held, answer = pipe.recv()
        except EOFError:
            process.join(10)
            raise RuntimeError(f"the process ended with exit code {process.exitcode}") from None
        finally:
            end_process(process)
        if not held:
            raise RuntimeError(answer)
        return answer

    def at_once(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Call a function that waits for processes on all items, several at a time, and return the results in order."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(function, items))


def run_program(command: Sequence[str], seconds: float, folder: Path) -> Done:
    """Run a program with this checkout on its path, and end it with its children where it takes too long."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, error = process.communicate(timeout=seconds)
            return Done(process.returncode, out, error)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            out, error = process.communicate()
            return Done(-1, out, f"{error}\nended after {seconds:.0f} s")


def is_missing(reason: str) -> bool:
    """Return whether a child failed because something is not installed here, which is not a failure of ampcompare."""
    return reason.startswith(("ImportError", "ModuleNotFoundError", "BackendUnavailable"))


def start(function: Callable[..., Any], *arguments: Any, talks: bool = False) -> tuple[Connection, Any]:
    """Start a function in a process forked from one that has torch; it answers `(True, result)` or `(False, error)`.

    Args:
        talks: it gets the other end of the pipe as its first argument, and answers as it likes until it raises.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, arguments, talks), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def end_process(process: Any) -> None:
    """Wait a moment for a process to end, then end it."""
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], talks: bool) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answer = (True, function(*([pipe] if talks else []), *arguments))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        answer = (False, f"{type(error).__name__}: {first[:300]}")
    if not (talks and answer[0]):
        pipe.send(answer)


def _in_this_process(words: Sequence[str]) -> Done:
    from ampcompare.cli import main

    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(list(words))
    return Done(code, out.getvalue(), error.getvalue())
