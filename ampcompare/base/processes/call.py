"""Call one function in a child process and report how it ended."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ampcompare.base.processes.sandbox import open_sandbox
from ampcompare.base.processes.start import (
    environment_without_working_directory,
    exit_code_text,
    kill_process_group,
)

TIME_LIMIT = 60.0
CHILD = Path(__file__).resolve().parent / "child.py"
PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class ChildAnswer:
    """What a function returned in its child process, with the warnings that it and its imports gave, or how it ended.

    `how` is done; raised (an exception); died (a signal, or an exit without an answer); or hung (the time limit).
    """

    value: dict[str, Any]
    how: Literal["done", "raised", "died", "hung"]
    failure: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def has_returned(self) -> bool:
        """Whether the function returned."""
        return self.how == "done"


def search_path_of_child() -> list[str]:
    """Return the folders that a child imports from: `sys.path`, with the working directory never first.

    If PYTHONPATH or an editable installation names the working directory, it comes last; else it is left out.
    """
    working_directory = os.path.realpath(os.getcwd())
    others = [entry for entry in sys.path if entry and os.path.realpath(entry) != working_directory]
    # Python itself puts the working directory first; only a later entry was asked for.
    is_named = working_directory in (os.path.realpath(entry) for entry in sys.path[1:] if entry)
    return [*others, working_directory] if is_named else others


def call_in_child(
    program: Path,
    function: str = "",
    *,
    path: Sequence[str] | None = None,
    seconds: float = TIME_LIMIT,
    options: dict[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    shared_paths: Sequence[Path] | None = None,
) -> ChildAnswer:
    """Run one function in a fresh process and return its answer.

    Args:
        program: a file that defines the function, by default of its own name, which returns a dict of plain data.
        function: its name in the program.
        path: folders to import from; `search_path_of_child()` by default.
        seconds: time limit; after it the process and its children are killed.
        options: keyword arguments of the function, plain data.
        environment: variables that the process gets in addition to those of this one.
        shared_paths: puts the process, which runs a user's code, into a sandbox: the real files and folders where it
            writes.
    """
    folders = [*(search_path_of_child() if path is None else path), PACKAGE_ROOT]
    request = json.dumps({"path": folders, "function": function or program.stem, "options": options or {}})
    with tempfile.TemporaryDirectory(prefix="ampcompare-child-") as folder:
        answer_file = Path(folder) / "answer" / "answer.json"
        answer_file.parent.mkdir()
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context((Path(folder) / "stderr").open("w+b"))
            variables = {**environment_without_working_directory(), **(environment or {})}
            if shared_paths is not None:
                own = open_sandbox(Path(folder) / "store", shared_paths=[answer_file.parent, *shared_paths])
                variables |= stack.enter_context(own).environment
            process = subprocess.Popen(
                [sys.executable, str(CHILD), str(program), str(answer_file), request],
                # held open: it ends with this process, and the function reads an empty one
                stdin=subprocess.PIPE,
                # packages print when they are imported; the answer goes to its file
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=variables,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=seconds)
            except BaseException as error:
                kill_process_group(process.pid)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return ChildAnswer({}, "hung", f"it had not ended after {seconds:g} s and was killed")
            finally:
                assert process.stdin is not None
                process.stdin.close()
            errors.seek(0)
            last = _last_line_of_output(errors.read())
        try:
            answer = json.loads(answer_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            ending = f"the process {exit_code_text(code)}" + (" and no answer" if code >= 0 else "")
            return ChildAnswer({}, "died", ending + (f" ({last})" if last else ""))
    if "failure" in answer:
        return ChildAnswer({}, "raised", answer["failure"], answer["warnings"])
    return ChildAnswer(answer["value"], "done", "", answer["warnings"])


def _last_line_of_output(output: bytes) -> str:
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
