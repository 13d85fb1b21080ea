"""Run a script in a child process, in a sandbox: on the CPU as it is or rewritten, or in another stack."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.processes.sandbox import WITHOUT_OVERLAYS, Sandbox, open_sandbox
from ampcompare.base.processes.script_environment import script_environment
from ampcompare.base.processes.start import kill_with_descendants, module_command
from ampcompare.experiment.script_run import ScriptRun, read_run_error, read_script_run
from ampcompare.script.examination.rewrite_run import MOVED, SEED
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.settings.stack import StackConfig

ENGINE = "on ampcompare's engine"
SUPERVISE = "ampcompare.experiment.launch.script.supervise"
TIME_LIMIT = 3600.0  # of a run


def require_script(path: str) -> Path:
    """Return the path of a script.

    Raises:
        ConfigError: there is no such file, or it is a notebook.
    """
    script = Path(path)
    if not script.is_file():
        raise ConfigError(
            f"{path} is a folder; name a script" if script.is_dir() else f"there is no script {path}"
        )
    if script.suffix == ".ipynb":
        raise ConfigError(f"{path} is a notebook; name a script: jupyter nbconvert --to script {path}")
    return script


def run_script_by_exec(script: Sequence[str], **settings: Any) -> int:
    """Run a script by `ampcompare exec` in a child process, which has the streams of this one, and wait for it.

    Args:
        script: its words: "-m" before a module, the script, and its arguments.
        settings: fields of `ExecSettings`.

    Returns:
        The exit code of the process.
    """
    words = [*ExecSettings(**settings).exec_options, *script]
    return subprocess.run([sys.executable, "-m", "ampcompare", "exec", *words], check=False).returncode


def trace_script_in_child(
    script: Path,
    arguments: list[str],
    *,
    steps: int,
    rewrite: str | None = None,
    texts: Mapping[Path, str] | None = None,
    opt_level: str | None = None,
    twin: bool = False,
    stack: StackConfig | None = None,
    first_weights: Path | None = None,
) -> ScriptRun:
    """Run a script in a child process: on the CPU, or in a stack, on the device that the script takes there.

    Args:
        rewrite: how it is rewritten, with the files that it imports: for "torch" or the "adapter"; None as it is.
        texts: what becomes of its files, new ones too, where it is rewritten.
        opt_level: instead of the script's.
        twin: whether its weights change by a unit in the last place of fp16 behind the first step.
        stack: where it runs; None for here.
        first_weights: the file from which it begins, and that a run in a stack makes.

    Raises:
        EnvironmentUnfit: the stack cannot be started, or has no torch.
        LaunchError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="ampcompare-verify-") as outer:
        folder = Path(outer, "run")
        folder.mkdir()
        made = folder / CellFile.WEIGHTS
        request = {
            "arguments": arguments,
            "steps": steps,
            "rewrite": rewrite,
            "opt_level": opt_level,
            "twin": twin,
            "folder": str(folder),
            "first_weights": first_weights if stack is None or first_weights is None else str(made),
        }
        with open_sandbox(Path(outer, "store"), shared_paths=[folder], roots=[script.parent]) as sandbox:
            at = sandbox.path_seen_in_sandbox(str(script))
            _write_migrated_texts(texts or {}, sandbox, folder)
            words, place = json.dumps({**request, "script": at}, default=str), ""
            environment = {**script_environment(), "PYTHONDONTWRITEBYTECODE": "1", **sandbox.environment}
            if stack is None:
                command = module_command("ampcompare.script.examination.rewrite_run", words)
            else:
                from ampcompare.experiment.launch.script.stacks import (  # it imports torch
                    environment_without_own_python,
                    trace_command_and_stack_facts,
                )

                command, found = trace_command_and_stack_facts(
                    stack, at, arguments, folder, seed=SEED, steps=steps, request=words
                )
                place = f"in the stack {stack.name} ({found.versions_text})"
                if found.has_this_ampcompare and not found.apex_version:
                    place = f"{ENGINE} {place}"
                environment = environment_without_own_python(environment)
            code, text = run_command_with_time_limit(command, environment)
        _refuse_failed_run(code, text, _name_of_run(rewrite, opt_level, stack), folder)
        if stack is not None and first_weights is not None and made.exists():
            shutil.move(made, first_weights)
        run = read_script_run(folder, steps=steps)
        limits = WITHOUT_OVERLAYS if sandbox.is_partial else ""
        written = [one.path for one in sandbox.written]
        return dataclasses.replace(run, written=written, limits=limits, place=place)


def _write_migrated_texts(texts: Mapping[Path, str], sandbox: Sandbox, folder: Path) -> None:
    """Write what becomes of files, each by the paths by which the script may find it in the sandbox."""
    moved = {  # of a file outside of the sandbox, as `sys.path` may lead to it, too
        place: text
        for each, text in texts.items()
        for place in (os.path.abspath(each), sandbox.path_seen_in_sandbox(str(each)))
    }
    (folder / MOVED).write_text(json.dumps(moved), encoding="utf-8")


def _name_of_run(rewrite: str | None, opt_level: str | None, stack: StackConfig | None) -> str:
    what = "the rewritten script" if rewrite else "the unchanged script"
    level = f" at {opt_level}" if opt_level and not rewrite else ""
    return f"{what}{level}{f' in the stack {stack.name}' if stack is not None else ''}"


def _refuse_failed_run(code: int | None, text: str, run_name: str, folder: Path) -> None:
    """Raise a LaunchError for a run that failed.

    Args:
        code: its exit code; None for a run that was ended after `TIME_LIMIT`.
        text: what it wrote to stderr.
        run_name: the words for it.
        folder: where it writes its own error.
    """
    if code is None:
        raise LaunchError(
            f"{run_name} had not made its steps after {TIME_LIMIT:g} s and was ended; use fewer --steps"
        )
    if code:
        last = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in last if not line.startswith("ampcompare:")] or last
        why = read_run_error(folder) or (errors[-1] if errors else "")
        raise LaunchError(f"{run_name} ended with exit code {code}: {why}")


def run_command_with_time_limit(command: list[str], environment: dict[str, str]) -> tuple[int | None, str]:
    """Return the exit code of a command, None if it was ended after `TIME_LIMIT`, and its errors.

    They go to a file: what a script leaves behind, which is ended as well, would hold a pipe open.
    """
    null, code = subprocess.DEVNULL, None
    # What supervises a stack ends with its input, and gives the script none.
    start = subprocess.PIPE if SUPERVISE in command else null
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=start, stdout=null, stderr=errors, env=environment, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(TIME_LIMIT)
        finally:
            kill_with_descendants(process.pid)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        errors.seek(0)
        return code, errors.read().decode("utf-8", "replace")
