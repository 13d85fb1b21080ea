"""Asking in a process of its own, so that what crashes or hangs there is an answer too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["TIME_LIMIT", "Answer", "ask", "search_path"]

TIME_LIMIT = 60.0
PROBES = Path(__file__).resolve().parent / "probes"
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Answer:
    """What a probe returned, or how it ended.

    Attributes:
        value: what it returned; empty unless `how` is "done".
        how: done; raised (an exception); died (a signal, or an exit without an answer); hung (the time limit).
        failure: one sentence; empty where it is done.
        warnings: texts of the warnings that were given on the way.
    """

    value: dict[str, Any]
    how: Literal["done", "raised", "died", "hung"]
    failure: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether there is a value."""
        return self.how == "done"


def search_path() -> list[str]:
    """Return where a script in the current folder would import from: that folder, then `sys.path`."""
    here = os.getcwd()
    rest = [str(Path(entry or here)) for entry in sys.path]
    return [here, *(entry for entry in rest if entry != here)]


def ask(
    probe: str | Path,
    *,
    path: Sequence[str] | None = None,
    seconds: float = TIME_LIMIT,
    options: dict[str, Any] | None = None,
) -> Answer:
    """Run one function in a fresh process and return its answer.

    Args:
        probe: name of a file in `probes`, or the path of another; the function has the file's name.
        path: folders to import from, in place of `search_path()`.
        seconds: time limit; after it the process and its children are killed.
        options: keyword arguments of the function, plain data.
    """
    program = probe if isinstance(probe, Path) else PROBES / f"{probe}.py"
    folders = [*(search_path() if path is None else path), PACKAGE_ROOT]
    request = json.dumps({"path": folders, "options": options or {}})
    with tempfile.TemporaryDirectory(prefix="ampcompare-doctor-") as folder:
        answer_file = Path(folder) / "answer.json"
        with (Path(folder) / "stderr").open("w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, str(PROBES / "run.py"), str(program), str(answer_file), request],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # packages print when they are imported; the answer goes to its file
                stderr=errors,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                _kill(process)
                return Answer({}, "hung", f"it had not ended after {seconds:g} s and was killed")
            except BaseException:
                _kill(process)
                raise
            errors.seek(0)
            last = _last_line(errors.read())
        try:
            answer = json.loads(answer_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Answer({}, "died", _ending(code) + (f" ({last})" if last else ""))
    if "failure" in answer:
        return Answer({}, "raised", answer["failure"], answer["warnings"])
    return Answer(answer["value"], "done", "", answer["warnings"])


def _kill(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _ending(code: int) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the process was killed by {name}"
    return f"the process ended with exit code {code} and no answer"


def _last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
