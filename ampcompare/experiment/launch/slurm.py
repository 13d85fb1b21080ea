"""Cells as Slurm jobs: submit them with submitit, wait for them, and find them again in a later call.

Cells that need the same are tasks of one job array; a job runs the command of its cells, several short ones in turn.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES
from ampcompare.base.errors import BackendUnavailable, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.processes.start import __file__ as START
from ampcompare.experiment.launch.cell import train_cells
from ampcompare.experiment.launch.cell_files import announce_cell, last_lines, log_tail, write_record
from ampcompare.experiment.launch.contract import failed_record
from ampcompare.experiment.launch.forked import worker_environment
from ampcompare.experiment.launch.queue_launcher import QueueLauncher
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.settings.config import RunConfig

__all__ = ["SlurmLauncher", "active_jobs", "how_ended", "parse_slurm_options", "require_slurm", "train_in_job"]

POLL_SECONDS = 0.5
QUEUE_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
RECORD_SECONDS = 10.0  # until a file that another machine wrote is visible here
TAIL_LINES = 5
DEFAULT_MINUTES = 60
WARNING_SECONDS = 90  # between submitit's signal and the time limit
JOB_NAME = "ampcompare"
MAX_ARRAY = 1000  # tasks; Slurm takes 1001 unless it is configured otherwise
NOISE = re.compile(r"submitit \w+ |srun: |slurmstepd\S*: ")
ISOLATION = ("PYTHONPATH", "PYTHONSAFEPATH")
RESERVED_OPTIONS = {
    **dict.fromkeys(("ntasks", "ntasks-per-node", "n"), "--nproc-per-node"),
    **dict.fromkeys(("nodes", "N", "array", "chdir", "comment", "error", "job-name"), "ampcompare"),
    **dict.fromkeys(("open-mode", "output", "wrap"), "ampcompare"),
}
ANSWER_SECONDS = 60.0
# Where Slurm preempts a job with a grace time, its tasks save and end, and Slurm does not queue again what has ended.
# It refuses to where --no-requeue was given. The number of an array alone would mean all of its tasks.
REQUEUE_PREEMPTED = (
    "AMPCOMPARE_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}",
    "requeue_preempted() {",
    '    if [[ $? != 0 && $(scontrol show job --oneliner "$AMPCOMPARE_JOB") =~ '
    "\\ JobState=RUNNING\\ .*\\ PreemptTime=[0-9] ]]; then",
    '        scontrol requeue "$AMPCOMPARE_JOB"',
    "    fi",
    "}",
    "trap requeue_preempted EXIT",
)
# What to report for the states of Slurm.
STORIES = {
    "TIMEOUT": "reached its time limit; --slurm-option time=MINUTES gives more",
    "DEADLINE": "reached its deadline",
    "OUT_OF_MEMORY": "ran out of memory; --slurm-option mem=SIZE gives more",
    "PREEMPTED": "was preempted by another job",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "lost its node",
    "BOOT_FAIL": "had a node that did not start",
    "": "is gone, and Slurm has no record of it",
}


def parse_slurm_options(texts: Sequence[str]) -> dict[str, str]:
    """Read options of sbatch such as `partition=gpu`, `time=2:00:00` or `exclusive`, without their dashes.

    Raises:
        ConfigError: not an option, a duplicate, or an option that ampcompare sets itself.
    """
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.strip().lstrip("-").partition("=")
        name = name.strip().replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name) or "\n" in value or (equals and not value):
            raise ConfigError(f"--slurm-option {text!r} is not an option of sbatch such as partition=gpu or exclusive")
        if name in RESERVED_OPTIONS:
            raise ConfigError(f"--slurm-option {text!r}: {name} is set by {RESERVED_OPTIONS[name]}")
        if name in options:
            raise ConfigError(f"--slurm-option {name} is given twice")
        options[name] = value
    return options


def require_slurm() -> None:
    """Check that this machine can submit jobs.

    Raises:
        EnvironmentUnfit: this machine has no Slurm.
        BackendUnavailable: submitit is not installed.
    """
    missing = [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]
    if missing:
        raise EnvironmentUnfit(
            f"--launcher slurm needs {missing[0]}, which is not on the path; run it where jobs are submitted, or "
            "use --launcher torchrun"
        )
    if importlib.util.find_spec("submitit") is None:
        raise BackendUnavailable("--launcher slurm needs submitit: pip install submitit (the extra slurm)")


@dataclass(frozen=True)
class _Job:
    """The job of a cell, as `job.json` in the cell's folder has it.

    Attributes:
        job: its ID, as 1234 or 1234_5; "" before it is submitted.
        token: its comment, by which a call finds the job if an earlier one was killed before it had written the ID.
        task: its number in the array.
        logs: folder of its output.
    """

    job: str
    token: str = ""
    task: int = 0
    logs: str = ""

    @property
    def log(self) -> Path:
        """The file with the output of its tasks."""
        return Path(self.logs) / f"{self.job}_0_log.out"

    def save(self, folder: Path) -> None:
        """Write `job.json`."""
        write_atomically(folder / CellFile.JOB, json.dumps(asdict(self)))


class SlurmLauncher(QueueLauncher):
    """Submits all announced cells ahead, and waits for each.

    The job ID is in the cell's `job.json`, so that a later call waits for that job instead of submitting another.
    Jobs continue when this process ends.

    Args:
        options: sbatch options by their long names; "" for a flag.
        running: limit on the tasks of an array that run at the same time; None for no limit.
        cells_per_job: cells that a job trains in turn.

    Raises:
        EnvironmentUnfit: this machine has no Slurm.
        BackendUnavailable: submitit is not installed.
    """

    def __init__(
        self, options: Mapping[str, str] | None = None, *, running: int | None = None, cells_per_job: int = 1
    ) -> None:
        require_slurm()
        self._options = dict(options or {})
        self._running = running
        self._cells_per_job = cells_per_job
        self._jobs: dict[Path, _Job] = {}
        self._gone: dict[Path, float] = {}  # since when Slurm does not name the job of a cell
        self._asked = self._answered = -math.inf

    def submit_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        """Submit the cells that have no job in the queue.

        Raises:
            LaunchError: Slurm rejects a job, or does not answer.
        """
        self._answered = time.monotonic()
        new = [(config, folder.resolve()) for config, folder in cells if folder.resolve() not in self._jobs]
        if not new:
            return
        active = active_jobs()
        missing: dict[str, list[tuple[RunConfig, Path]]] = {}
        for config, folder in new:
            job = _earlier_job(folder, active)
            if job is not None:
                self._jobs[folder] = job
            else:
                missing.setdefault(json.dumps(self._needs(config), sort_keys=True), []).append((config, folder))
        for cells in missing.values():
            for start in range(0, len(cells), MAX_ARRAY * self._cells_per_job):
                self._submit(cells[start : start + MAX_ARRAY * self._cells_per_job])

    def wait_for_some(self, folders: Collection[Path]) -> set[Path]:
        now = time.monotonic()
        if now >= self._asked + QUEUE_SECONDS:
            self._asked = now
            try:
                active, self._answered = active_jobs(), now
                for folder in folders:
                    if self._jobs[folder].job in active:
                        self._gone.pop(folder, None)  # queued again, or missing in one answer only
                    else:
                        self._gone.setdefault(folder, now)
            except LaunchError:  # Slurm may be silent for a while
                if now - self._answered > PATIENCE_SECONDS:
                    raise
        ended = {
            folder
            for folder in folders
            if _has_result(folder, is_gone=folder in self._gone) or now > self._gone.get(folder, now) + RECORD_SECONDS
        }
        if not ended:
            time.sleep(POLL_SECONDS)
        return ended

    def take_record(self, config: RunConfig, folder: Path) -> RunRecord:
        job = self._jobs.pop(folder)
        self._gone.pop(folder, None)
        path = folder / CellFile.RECORD
        record = read_record(path) if path.exists() else None
        left_no_record = "ended with exit code {} and left no record"
        asked = "was asked to stop, before its time limit or for another job"
        if record is None:
            tail = " | ".join(_own_lines(folder, job))
            error = f"Slurm job {job.job} {how_ended(job.job, left_no_record)}; "
            record = failed_record(config, error + (f"last lines of its log: {tail}" if tail else "its log is empty"))
        elif record.status == "interrupted":  # only this cell fails; the others continue
            error = f"Slurm job {job.job} {how_ended(job.job, asked)}; the cell was {record.error}; "
            record = record.model_copy(update={"status": "failed", "error": f"{error}--resume auto resumes from there"})
        else:
            return record
        write_record(record, folder)
        return record

    def pending_message(self) -> str:
        # An array as a whole: what has ended of it is not touched.
        jobs = " ".join(sorted({job.job.partition("_")[0] for job in self._jobs.values() if job.job}, key=int))
        return (
            f"Slurm jobs continue, and the same command waits for them; to cancel them: scancel {jobs}" if jobs else ""
        )

    def _submit(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        """Submit cells with equal needs, as one job or one array."""
        import submitit

        token, folders, size = secrets.token_hex(8), [folder for _, folder in cells], self._cells_per_job
        logs = Path(os.path.commonpath(folders)) / "slurm"
        shares = [folders[start : start + size] for start in range(0, len(folders), size)]
        for number, (config, folder) in enumerate(cells):
            announce_cell(config, folder)
            self._jobs[folder] = _Job("", token, number // size, str(logs))
            self._jobs[folder].save(folder)
        # `-m submitit...` follows: without START, files of the working directory could shadow it.
        python = f"{shlex.quote(sys.executable)} -u {shlex.quote(START)}"
        executor = submitit.SlurmExecutor(logs, python=python)
        needs, running = self._needs(cells[0][0]), self._running or len(shares)
        executor.update_parameters(**needs, comment=token, array_parallelism=running)
        try:
            jobs = executor.map_array(train_in_job, [[str(folder) for folder in share] for share in shares])
        except submitit.core.utils.FailedJobError as error:
            for folder in folders:
                del self._jobs[folder]
            lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
            raise LaunchError(f"Slurm rejects the job: {lines[-1].strip().removeprefix('sbatch: error: ')}") from None
        for job, share in zip(jobs, shares, strict=True):
            for folder in share:
                self._jobs[folder] = replace(self._jobs[folder], job=str(job.job_id))
                self._jobs[folder].save(folder)

    def _needs(self, config: RunConfig) -> dict[str, Any]:
        """Return the parameters of submitit for the job of a cell."""
        environment = worker_environment()
        exported = {name: environment[name] for name in (*ISOLATION, *THREAD_VARIABLES) if name in environment}
        extra: dict[str, Any] = {name: value or True for name, value in self._options.items()}
        extra.setdefault("cpus-per-task", config.processes * (config.threads + config.workers))
        return {
            "job_name": JOB_NAME,
            "time": DEFAULT_MINUTES,
            "signal_delay_s": WARNING_SECONDS,
            "nodes": 1,
            "ntasks_per_node": 1,
            "setup": [*(f"export {name}={shlex.quote(value)}" for name, value in exported.items()), *REQUEUE_PREEMPTED],
            "stderr_to_stdout": True,
            "additional_parameters": extra,
        }


def _earlier_job(folder: Path, active: Mapping[str, str]) -> _Job | None:
    """Return the job of an earlier call that is still queued or runs.

    Args:
        active: the comment of each such job, by its ID.
    """
    try:
        text = (folder / CellFile.JOB).read_text(encoding="utf-8")
        saved = _Job(**{"logs": str(folder / "slurm"), **json.loads(text)})
    except (OSError, ValueError, TypeError):
        return None
    if saved.job in active:
        return saved
    for number, comment in active.items():
        if saved.token and comment == saved.token and int(number.partition("_")[2] or 0) == saved.task:
            job = replace(saved, job=number)
            job.save(folder)
            return job
    return None


def _has_result(folder: Path, *, is_gone: bool) -> bool:
    """Return whether a cell has its last record.

    Args:
        is_gone: whether its job has ended: before, a cell that was interrupted may be queued again.
    """
    path = folder / CellFile.RECORD
    return path.exists() and (is_gone or read_record(path).status != "interrupted")


def _own_lines(folder: Path, job: _Job) -> list[str]:
    """Return the last lines of the log of a cell, or else of its job, without those of submitit and srun."""
    lines = log_tail(folder, TAIL_LINES).splitlines() or last_lines(job.log, TAIL_LINES)
    return [line.strip() for line in lines if not NOISE.match(line)]


def how_ended(job: str, else_: str) -> str:
    """Return how a job ended, as far as Slurm remembers, as the end of a sentence about it.

    Args:
        else_: the end of the sentence if the job ended by itself, with `{}` for its exit code.
    """
    facts = dict(re.findall(r"(\w+)=(\S+)", _answer("scontrol", "show", "job", "--oneliner", job)))
    state, nodes = facts.get("JobState", ""), facts.get("NodeList", "(null)")
    text = STORIES.get(state, else_.format(facts.get("ExitCode", "").partition(":")[0]))
    return text + ("" if nodes in ("(null)", "None assigned") else f" (node {nodes})")


def active_jobs() -> dict[str, str]:
    """Return the comment of every queued or running job of this user, by job ID; a task of an array as 1234_5.

    Raises:
        LaunchError: Slurm does not answer.
    """
    command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i|%k"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"squeue does not respond: {_last_line(error.stderr)}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"squeue does not respond: {error}") from None
    return dict(line.strip().split("|", 1) for line in done.stdout.splitlines() if "|" in line)


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def train_in_job(folders: list[str]) -> None:
    """Train the cells of a job, in the job: the signal that Slurm sends before a limit acts as SIGTERM does.

    Raises:
        Ended: it was stopped, so that the batch file sees an exit code: see REQUEUE_PREEMPTED.
    """
    warning = signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]
    # Slurm sends it to all processes of the job. They inherit that it is blocked, and only this one waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [warning])

    def stop() -> None:
        signal.sigwait([warning])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    train_cells([Path(folder) for folder in folders], _place())


def _place() -> str:
    """Return job, nodes and GPUs of this job, for progress."""
    found = os.environ
    job = f"{found['SLURM_ARRAY_JOB_ID']}_{found['SLURM_ARRAY_TASK_ID']}" if "SLURM_ARRAY_JOB_ID" in found else None
    text = f"job {job or found.get('SLURM_JOB_ID', '')} on {found.get('SLURM_JOB_NODELIST', socket.gethostname())}"
    gpus = found.get("SLURM_STEP_GPUS") or found.get("SLURM_JOB_GPUS")
    return f"{text}, GPU {gpus}" if gpus else text
