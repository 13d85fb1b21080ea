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
from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.base.files.loaded_code import Names
from ampcompare.base.rank_marks import CELL_FOLDER
from ampcompare.base.secrets import MASK, learn_file, mask_variable
from ampcompare.launch.base import Launcher, Progress
from ampcompare.launch.cell_files import last_lines, make_cell_folder, with_code, write_config, write_record
from ampcompare.launch.places import ANYWHERE, Place
from ampcompare.launch.script.children import (
    RECORD,
    RECORDS,
    error_of_children,
    of_training_process,
    training_children,
)
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
from ampcompare.launch.script.supervise import end_family
from ampcompare.launch.stoppable import Stoppable
from ampcompare.records.opened_files import OPENED, forget_reads, read_opened
from ampcompare.records.run import RunRecord, dump_json
from ampcompare.script.legacy.old_script import COMPAT_HINT, is_of_old_script
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import ScriptConfig

__all__ = ["ScriptLauncher", "script_command"]

POLL_SECONDS = 0.2
PIPE_SECONDS = 2.0
MAX_SERVERS = 5  # per cell: if each of them is killed, the next one would be too
SETTINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".env", ".conf")
# Exit codes of `ampcompare exec` for errors of ampcompare itself.
OUR_ERRORS = (2, 3, 4)
MAX_LAST_LINES = 5
WORD = re.compile(r"[^\W_]")
NO_REASON = re.compile(r"ampcompare: (\d+ steps?, \d+ skipped|the record has no step|--device cpu: )")


class _AskedToStop(Exception):
    """The cell was asked to stop before its process had started."""


class ScriptLauncher(Launcher):
    """Starts one process per cell, forked where possible, or as many as the configuration says under torchrun.

    Args:
        place: the GPUs and cores that scripts use.
    """

    def __init__(self, place: Place = ANYWHERE) -> None:
        self._place = place
        self._process: Stoppable[CellProcess] = Stoppable(lambda process: end_family(process.pid))
        self._server: Stoppable[ScriptServer] = Stoppable(ScriptServer.close)

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        assert config.script is not None
        make_cell_folder(folder)
        for old in folder.glob(RECORDS):
            old.unlink()
        (folder / OPENED).unlink(missing_ok=True)
        write_config(config, folder)
        if reason := why_refused(config.script, config.parsed_arm):
            refused = failed_script(config, reason, exit_code=2)
            write_record(refused, folder)
            return refused
        for word in config.script.arguments:
            if (path := word.rpartition("=")[2]).endswith(SETTINGS):
                learn_file(Path(path))
        started, begin = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), time.perf_counter()
        code = 0
        output: OutputReader | None = None
        with self._process.busy():
            with contextlib.suppress(_AskedToStop):
                code, output = self._run(config, config.script, folder, on_progress)
            self._process.check()
        wall = time.perf_counter() - begin
        rows = of_training_process(folder)
        (folder / "steps.jsonl").write_text("".join(dump_json(step, indent=None) + "\n" for step in rows.steps))
        if self._is_asked():
            record = failed_script(config, "asked to stop", started=started).model_copy(
                update={"status": "interrupted"}
            )
        elif error := _failure(config.script, code, rows, folder):
            record = failed_script(config, error, exit_code=_our_code(code, rows), started=started)
        else:
            assert output is not None
            record = script_record(
                config, rows, output.values, wall_seconds=wall, started=started, faults=output.part_faults()
            )
        record = self._place.mark(_with_opened_files(with_code(record, folder), folder, config.script.folder))
        write_record(record, folder)
        return record

    def _run(
        self,
        config: RunConfig,
        script: ScriptConfig,
        folder: Path,
        on_progress: Callable[[Progress], None] | None,
    ) -> tuple[int, OutputReader]:
        """Return the exit code, and the output, which has been read."""
        process = self._start(config, script, folder)
        if self._is_asked():
            self._send_stop(process)
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
            self._process.drop()
            pump.join(timeout=PIPE_SECONDS)
            code = process.wait()
        return code, reader

    def _start(self, config: RunConfig, script: ScriptConfig, folder: Path) -> CellProcess:
        environment = {**_environment(config, folder), **self._place.environment}
        command = script_command(config, script, folder)
        if script.torchrun or not can_fork(config.processes):
            with self._place.pinned():
                return self._process.start(lambda: start_interpreter(command, environment))
        words = command[command.index("ampcompare") + 1 :]
        for left in reversed(range(MAX_SERVERS)):
            server = self._ensure_server(environment)
            try:
                if not server.wait_until_ready(self._is_asked):
                    self._server.drop()
                    raise _AskedToStop
                return self._process.start(lambda server=server: server.start(words, environment))  # type: ignore[misc]
            except EnvironmentUnfit:
                self._process.check()
                if not (server.was_killed and left):
                    raise
                self._server.drop()
                self.note("the server of a script's cells was killed; another one starts")
        raise AssertionError("the last one raises")

    def _ensure_server(self, environment: dict[str, str]) -> ScriptServer:
        server = self._server.process
        if server is not None and server.runs and server.threads == threads_of(environment):
            return server
        self._server.drop()
        with self._place.pinned():
            return self._server.start(lambda: ScriptServer(environment))

    def _is_asked(self) -> bool:
        return self._process.is_asked or not self.may_start()

    def close(self) -> None:
        self._process.close()
        self._server.close()

    def terminate(self) -> bool:
        if not self._process.ask():
            return False
        process = self._process.process
        if process is not None:
            self._send_stop(process)
        return True

    def _send_stop(self, process: CellProcess) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def _environment(config: RunConfig, folder: Path) -> dict[str, str]:
    """Return the environment of a script: that of this process, with as many threads per pool as cells have.

    Strings hash alike in all cells, also those of another server: a script may number its classes by a set of names.
    """
    assert config.script is not None
    threads = dict.fromkeys(THREAD_VARIABLES, str(config.threads))
    own = {
        CELL_FOLDER: str(folder.resolve()),
        "AMPCOMPARE_CELL_STARTED": str(time.time()),
        "AMPCOMPARE_CODE_FOLDER": str(config.script.folder),
        MASK: mask_variable(),
    }
    return {"PYTHONHASHSEED": "0", **threads, **os.environ, **own, "PYTHONUNBUFFERED": "1"}


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


def _with_opened_files(record: RunRecord, folder: Path, code_folder: Path) -> RunRecord:
    opened = read_opened(folder)
    forget_reads(folder)
    if record.script is None:
        return record
    facts = {
        "files": list(dict.fromkeys([*record.script.files, *opened.written])),
        "inherited": opened.inherited,
        "resumed": opened.resumed,
    }
    names = Names(code_folder)
    results = {names.of(file) for file in opened.inherited}  # of other cells, and no data that should stay as it is
    code = {name: digest for name, digest in (record.code or {}).items() if name not in results}
    return record.model_copy(update={"script": record.script.model_copy(update=facts), "code": code})


def _our_code(code: int, rows: ScriptRows) -> int:
    """Return the exit code of a failed cell: what the script itself passes to `sys.exit` is none of ampcompare's."""
    is_scripts = rows.ended is not None and rows.ended.get("error") is None
    return code if code in OUR_ERRORS and not is_scripts else 3


def _failure(script: ScriptConfig, code: int, rows: ScriptRows, folder: Path) -> str:
    """Return why a script gave no result; "" if it did."""
    if code < 0:
        return f"the script was killed by {signal.Signals(-code).name}"
    ended = rows.ended or {}
    if str(ended.get("error")).startswith("EOFError: EOF when reading"):
        return "the script reads from standard input, but a cell has none; pass the answer as an option of the script"
    if code != 0 and (error := ended.get("error")):
        if str(error).startswith("ChildFailedError"):  # of torchrun, which quotes no rank
            error = error_of_children(folder) or error
        hint = f". {COMPAT_HINT[0].upper()}{COMPAT_HINT[1:]}"
        return f"{error}{hint if not script.compat_torch and is_of_old_script(str(error)) else ''}"
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
    lines = last_lines(folder / "log.txt", MAX_LAST_LINES)
    lines = [line for line in lines if not NO_REASON.match(line) and WORD.search(line)]  # no ruled line
    last = lines[-1] if lines else ""
    if last.startswith("ampcompare: "):
        return last.removeprefix("ampcompare: ")
    return f"the script ended with exit code {code}" + (f": {last}" if last else "")


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
