"""Run a user's script as a cell: `ampcompare exec` with the arm, in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from ampcompare.base.environment.threads import THREAD_VARIABLES
from ampcompare.launch.base import Launcher, Progress
from ampcompare.launch.cell_files import last_lines, make_cell_folder, write_config, write_record
from ampcompare.launch.places import ANYWHERE, Place
from ampcompare.launch.script.children import RECORD, RECORDS, of_training_process, training_children
from ampcompare.launch.script.output import OutputReader
from ampcompare.launch.script.processes import (
    PYTHON,
    CellProcess,
    ScriptServer,
    can_fork,
    start_interpreter,
    threads_of,
)
from ampcompare.launch.script.record import failed_script, script_record
from ampcompare.launch.script.refusals.arms import why_refused
from ampcompare.launch.script.rows import ScriptRows
from ampcompare.records.run import RunRecord, dump_json
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import ScriptConfig

__all__ = ["ScriptLauncher", "script_command"]

POLL_SECONDS = 0.2
PIPE_SECONDS = 2.0
# Exit codes of `ampcompare exec` for errors of ampcompare itself.
OUR_ERRORS = (2, 3, 4)
MAX_LAST_LINES = 5
NO_REASON = re.compile(r"ampcompare: (\d+ steps?, \d+ skipped|the record has no step|--device cpu: )")


class ScriptLauncher(Launcher):
    """Starts one process per cell, forked where possible, or as many as the configuration says under torchrun.

    Args:
        place: the GPUs and cores that scripts use.
    """

    def __init__(self, place: Place = ANYWHERE) -> None:
        self._place = place
        self._process: CellProcess | None = None
        self._server: ScriptServer | None = None
        self._terminated = False

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        assert config.script is not None
        make_cell_folder(folder)
        for old in folder.glob(RECORDS):
            old.unlink()
        write_config(config, folder)
        if reason := why_refused(config.script, config.parsed_arm):
            refused = failed_script(config, reason, exit_code=2)
            write_record(refused, folder)
            return refused
        self._terminated = False
        started, begin = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), time.perf_counter()
        code, printed = self._run(config, config.script, folder, on_progress)
        wall = time.perf_counter() - begin
        rows = of_training_process(folder)
        (folder / "steps.jsonl").write_text("".join(dump_json(step, indent=None) + "\n" for step in rows.steps))
        if self._terminated:
            record = failed_script(config, "asked to stop", started=started).model_copy(
                update={"status": "interrupted"}
            )
        elif error := _failure(code, rows, folder):
            record = failed_script(config, error, exit_code=_our_code(code, rows), started=started)
        else:
            record = script_record(config, rows, printed, wall_seconds=wall, started=started)
        write_record(record, folder)
        return record

    def _run(
        self,
        config: RunConfig,
        script: ScriptConfig,
        folder: Path,
        on_progress: Callable[[Progress], None] | None,
    ) -> tuple[int, dict[str, list[float]]]:
        """Return the exit code, and the values of metrics with a pattern."""
        process = self._start(config, script, folder)
        self._process = process
        reader = OutputReader(process.stdout, folder / "log.txt", script.metrics)
        pump = threading.Thread(target=reader.pump, daemon=True)
        pump.start()
        try:
            counter = _StepCounter(folder / RECORD, script.max_steps or 0)
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if on_progress is not None and (progress := counter.read()) is not None:
                    on_progress(progress)
            pump.join(timeout=PIPE_SECONDS)  # a process that the script has left behind may hold the pipe open
        finally:
            _end_group(process.pid)
            pump.join(timeout=PIPE_SECONDS)
            code = process.wait()
            self._process = None
        return code, reader.values

    def _start(self, config: RunConfig, script: ScriptConfig, folder: Path) -> CellProcess:
        environment = {**_environment(config, folder), **self._place.environment}
        command = script_command(config, script, folder)
        if script.torchrun or not can_fork(config.processes):
            with self._place.pinned():
                return start_interpreter(command, environment)
        server = self._server
        if server is None or not server.runs or server.threads != threads_of(environment):
            self.close()
            with self._place.pinned():
                server = self._server = ScriptServer(environment)
        return server.start(command[command.index("ampcompare") + 1 :], environment)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def terminate(self) -> bool:
        if self._process is None:
            return False
        self._terminated = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        return True


def _environment(config: RunConfig, folder: Path) -> dict[str, str]:
    """Return the environment of a script: that of this process, with as many threads per pool as cells have."""
    threads = dict.fromkeys(THREAD_VARIABLES, str(config.threads))
    return {**threads, **os.environ, "AMPCOMPARE_CELL_DIR": str(folder.resolve()), "PYTHONUNBUFFERED": "1"}


def script_command(config: RunConfig, script: ScriptConfig, folder: Path) -> list[str]:
    """Return the command line of a cell."""
    seed = config.recipe.seed
    start = list(PYTHON)
    if config.processes > 1 or script.torchrun:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        start += [str(config.processes), "-m"]
    options = ["--arm", config.arm, "--seed", str(seed), "--record", str((folder / RECORD).resolve())]
    if script.max_steps is not None:
        options += ["--max-steps", str(script.max_steps)]
    if config.device == "cpu":
        options += ["--device", "cpu"]
    if script.compat_torch:
        options.append("--compat-torch")
    engine = config.parsed_arm.options.get("engine")
    if engine == "nvidia":
        options += ["--engine", "nvidia"]
    if script.is_module:
        options.append("-m")
    arguments = script.arguments_for(seed, config.arm, folder.resolve())
    return [*start, "ampcompare", "exec", *options, script.name, *arguments]


def _our_code(code: int, rows: ScriptRows) -> int:
    """Return the exit code of a failed cell: what the script itself passes to `sys.exit` is none of ampcompare's."""
    is_scripts = rows.ended is not None and rows.ended.get("error") is None
    return code if code in OUR_ERRORS and not is_scripts else 3


def _failure(code: int, rows: ScriptRows, folder: Path) -> str:
    """Return why a script gave no result; "" if it did."""
    if code < 0:
        return f"the script was killed by {signal.Signals(-code).name}"
    ended = rows.ended or {}
    if str(ended.get("error")).startswith("EOFError: EOF when reading"):
        return "the script reads from standard input, but a cell has none; pass the answer as an option of the script"
    if code != 0 and ended.get("error"):
        return str(ended["error"])
    if not rows.steps and (children := len(training_children(folder))):
        return (
            f"the script trains in {children} child processes, which are not the ranks of one process group. Let "
            f"torchrun start all training processes: remove multiprocessing from the script, or use the script's "
            f"option for that, and put --nproc-per-node {children} before `--`; each process finds RANK, LOCAL_RANK "
            f"and "
            "WORLD_SIZE in its environment"
        )
    if code != 0:
        return _last_words(code, folder)
    if not rows.steps:
        return "the script ended with exit code 0, but made no optimizer step"
    return "" if rows.ended else "the script's process ended before its record was complete"


def _last_words(code: int, folder: Path) -> str:
    """Return the last line of a script's output, or ampcompare's own if it is about the end."""
    lines = [line for line in last_lines(folder / "log.txt", MAX_LAST_LINES) if not NO_REASON.match(line)]
    last = lines[-1] if lines else ""
    if last.startswith("ampcompare: "):
        return last.removeprefix("ampcompare: ")
    return f"the script ended with exit code {code}" + (f": {last}" if last else "")


def _end_group(pid: int) -> None:
    """End what the script has left running."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _StepCounter:
    """Counts the steps in a record that another process writes."""

    def __init__(self, path: Path, total: int) -> None:
        self._path = path
        self._total = total
        self._offset = 0
        self._steps = 0
        self._loss: float | None = None

    def read(self) -> Progress | None:
        """Return the progress if there is any since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read()
        except OSError:
            return None
        whole = block[: block.rfind(b"\n") + 1]
        if not whole:
            return None
        self._offset += len(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            self._steps += row.get("kind") == "step" and row["optimizer"] == 0
            if row.get("kind") == "backward" and isinstance(row["loss"], float):
                self._loss = row["loss"]
        return Progress(self._steps, self._total, 0, loss=self._loss)
