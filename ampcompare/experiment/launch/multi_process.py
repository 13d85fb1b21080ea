"""Several processes per cell, started by torchrun or one by one."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ampcompare.base.files.run_files import CellFile
from ampcompare.base.processes.sandbox import Sandbox
from ampcompare.base.processes.start import exit_code_text, module_command
from ampcompare.experiment.launch.cell_files import (
    drop_cell_outputs_from_code,
    last_lines_of_file,
    log_tail,
    make_cell_folder,
    make_forwarder_of_new_progress,
    remove_temporary_files_of_cell,
    sandbox_of_cell,
    write_config,
    write_record,
)
from ampcompare.experiment.launch.contract import Progress, record_of_failed_cell, record_of_interrupted_cell
from ampcompare.experiment.launch.forked import StoppableLauncher, worker_environment
from ampcompare.experiment.launch.places import ANYWHERE, Place
from ampcompare.experiment.launch.start_ranks import RanksRequest
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.settings.config import RunConfig

POLL_SECONDS = 0.1
END_SECONDS = 10.0
TAIL_LINES = 5


class MultiProcessLauncher(StoppableLauncher["subprocess.Popen[bytes]"]):
    """Starts the ranks of each cell.

    Args:
        launcher: "torchrun", or "spawn", which starts faster.
    """

    def __init__(
        self, launcher: Literal["torchrun", "spawn"] = "torchrun", *, place: Place = ANYWHERE
    ) -> None:
        super().__init__(place, _end_agent)
        self.launcher = launcher

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        folder = folder.resolve()
        request = RanksRequest(str(folder), self.launcher, config.processes)
        with self._process.busy_with_cell(), sandbox_of_cell(config, folder) as sandbox:
            make_cell_folder(folder)
            (folder / CellFile.FAILURE).unlink(missing_ok=True)
            write_config(config, folder)
            code = self._run_ranks(request, folder, sandbox, on_progress)
            self._process.raise_if_closed()
        remove_temporary_files_of_cell(folder)
        return drop_cell_outputs_from_code(
            self._record_of_cell(config, folder, code), folder, sandbox.written
        )

    def _run_ranks(
        self,
        request: RanksRequest,
        folder: Path,
        sandbox: Sandbox,
        on_progress: Callable[[Progress], None] | None,
    ) -> int:
        environment = {**worker_environment(self._place), **sandbox.environment}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        report_progress = make_forwarder_of_new_progress(folder, on_progress)
        with (folder / CellFile.LAUNCHER_LOG).open("wb") as log, self._place.processes_kept_on_cores():
            # In a new session, Ctrl-C in the terminal reaches only this process, which then ends the ranks.
            agent = self._process.start(
                lambda: subprocess.Popen(
                    module_command("ampcompare.experiment.launch.start_ranks", json.dumps(request)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            )
        if self._is_asked_to_stop():
            agent.terminate()
        while (code := agent.poll()) is None:
            time.sleep(POLL_SECONDS)
            report_progress()
        self._process.end_process()
        return code

    def _record_of_cell(self, config: RunConfig, folder: Path, code: int) -> RunRecord:
        path = folder / CellFile.RECORD
        record = read_record(path) if path.exists() else None
        if code == 0 and record is not None:
            return record
        failures = _read_exit_codes_of_failed_ranks(folder)
        # The others get SIGTERM when one has failed.
        killed = [
            failure for failure in failures if failure["code"] < 0 and failure["code"] != -signal.SIGTERM
        ]
        if record is not None and not killed:
            return record
        if self._is_asked_to_stop() and not killed:
            record = record_of_interrupted_cell(config)
        else:
            record = record_of_failed_cell(config, _failure_text(folder, code, [*killed, *failures]))
        write_record(record, folder)
        return record

    def _ask_process_to_stop(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()


def _end_agent(agent: subprocess.Popen[bytes]) -> None:
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        agent.stdin.close()  # the agent ends its ranks and itself
    try:
        agent.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)  # ranks end when their parent is gone
        agent.wait()


def _read_exit_codes_of_failed_ranks(folder: Path) -> list[dict[str, int]]:
    try:
        failures: list[dict[str, int]] = json.loads((folder / CellFile.FAILURE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return failures


def _failure_text(folder: Path, code: int, failures: list[dict[str, int]]) -> str:
    if not failures:
        tail = " | ".join(
            line.strip() for line in last_lines_of_file(folder / CellFile.LAUNCHER_LOG, TAIL_LINES)
        )
        return f"the launcher of the ranks {exit_code_text(code)}" + (f": {tail}" if tail else "")
    rank, how = failures[0]["rank"], exit_code_text(failures[0]["code"])
    tail = " | ".join(log_tail(folder, TAIL_LINES, rank).splitlines())
    return f"rank {rank} {how}" + (f"; last lines of its log: {tail}" if tail else "; its log is empty")
