"""Cells as Slurm jobs: tasks of job arrays, which submitit submits and each of which runs the command of its cell."""

import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES
from ampcompare.base.errors import BackendUnavailable, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.processes.start import __file__ as START
from ampcompare.experiment.launch.cell_files import write_cell_inputs, write_record
from ampcompare.experiment.launch.contract import record_of_failed_cell
from ampcompare.experiment.launch.dispatch.cell import train_cell_on_this_machine
from ampcompare.experiment.launch.dispatch.queue_launcher import QueueLauncher
from ampcompare.experiment.launch.forked import worker_environment
from ampcompare.results.records.run import RunRecord, read_record
from ampcompare.settings.config import RunConfig

POLL_SECONDS = 0.5
QUEUE_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
RECORD_SECONDS = 10.0  # until a file that another machine wrote is visible here
DEFAULT_MINUTES = 60
WARNING_SECONDS = 90  # between submitit's signal and the time limit
MAX_ARRAY = 1000  # tasks; Slurm takes 1001 unless it is configured otherwise
ISOLATION = ("PYTHONPATH", "PYTHONSAFEPATH")
OWN_OPTIONS = {
    *("ntasks", "ntasks-per-node", "n", "nodes", "N", "array"),
    *("chdir", "error", "job-name", "open-mode", "output"),
    "wrap",
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


def parse_slurm_options(texts: Sequence[str]) -> dict[str, str]:
    """Read options of sbatch such as `partition=gpu`, `time=2:00:00` or `exclusive`, without their dashes.

    Raises:
        ConfigError: a text is no option of sbatch, or one that ampcompare sets.
    """
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.strip().lstrip("-").partition("=")
        name = name.strip().replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name) or "\n" in value or (equals and not value):
            raise ConfigError(
                f"--slurm-option {text!r} is not an option of sbatch such as partition=gpu or exclusive"
            )
        if name in OWN_OPTIONS:
            raise ConfigError(
                f"--slurm-option {text!r}: {name} is set by ampcompare; see also --nproc-per-node"
            )
        options[name] = value
    return options


def require_slurm() -> None:
    """Check that this machine can submit jobs."""
    missing = [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]
    if missing:
        raise EnvironmentUnfit(
            f"--launcher slurm needs {missing[0]}, which is not on the path; run it where jobs are submitted, or "
            "use --launcher torchrun"
        )
    if importlib.util.find_spec("submitit") is None:
        raise BackendUnavailable("--launcher slurm needs submitit: pip install submitit (the extra slurm)")


class _SlurmJob(NamedTuple):
    """The job of a cell, as `job.json` in the cell's folder has it: its ID, as 1234 or 1234_5, and its output."""

    job: str
    log: str


class SlurmLauncher(QueueLauncher):
    """Submits all announced cells ahead, and waits for each.

    The job ID is in the cell's `job.json`, so that a later call waits for that job instead of submitting another.
    Jobs continue when this process ends.
    """

    def __init__(self, options: Mapping[str, str] | None = None, *, running: int | None = None) -> None:
        require_slurm()
        self._options = dict(options or {})
        self._running = running
        self._jobs: dict[Path, _SlurmJob] = {}
        self._gone: dict[Path, float] = {}  # since when Slurm does not name the job of a cell
        self._asked = self._answered = -math.inf

    def submit_cells_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        """Submit the cells that have no job in the queue."""
        self._answered = time.monotonic()
        new = [(config, folder.resolve()) for config, folder in cells if folder.resolve() not in self._jobs]
        active = active_job_ids() if new else set()
        missing: dict[str, list[tuple[RunConfig, Path]]] = {}
        for config, folder in new:
            job = _submitted_job_of_cell(folder)
            if job.job in active:
                self._jobs[folder] = job
            else:
                missing.setdefault(json.dumps(self._job_parameters(config), sort_keys=True), []).append(
                    (config, folder)
                )
        for cells in missing.values():
            for start in range(0, len(cells), MAX_ARRAY):
                self._submit_cells_and_note_jobs(cells[start : start + MAX_ARRAY])

    def wait_for_ended_cells(self, folders: Collection[Path]) -> set[Path]:
        now = time.monotonic()
        if now >= self._asked + QUEUE_SECONDS:
            self._asked = now
            try:
                active, self._answered = active_job_ids(), now
            except LaunchError:  # Slurm may be silent for a while
                if now - self._answered > PATIENCE_SECONDS:
                    raise
            else:  # a job may be queued again, or be missing in one answer only
                gone = [folder for folder in folders if self._jobs[folder].job not in active]
                self._gone = {folder: self._gone.get(folder, now) for folder in gone}
        ended = {
            folder
            for folder in folders
            if _has_last_record_of_cell(folder, is_gone=folder in self._gone)
            or now > self._gone.get(folder, now) + RECORD_SECONDS
        }
        if not ended:
            time.sleep(POLL_SECONDS)
        return ended

    def take_record_of_ended_cell(self, config: RunConfig, folder: Path) -> RunRecord:
        job, path = self._jobs.pop(folder), folder / CellFile.RECORD
        record = read_record(path) if path.exists() else None
        if record is not None and record.status != "interrupted":
            return record
        error = f"Slurm job {job.job} ended as {_slurm_state_of_job(job.job)}; its output is in {job.log}"
        if record is None:
            record = record_of_failed_cell(config, error)
        else:  # only this cell fails; the others continue
            error = f"{error}; the cell was {record.error}; --resume auto resumes from there"
            record = record.model_copy(update={"status": "failed", "error": error})
        write_record(record, folder)
        return record

    def pending_message(self) -> str:
        # An array as a whole: what has ended of it is not touched.
        jobs = " ".join(sorted({job.job.partition("_")[0] for job in self._jobs.values()}, key=int))
        return (
            f"Slurm jobs continue, and the same command waits for them; to cancel them: scancel {jobs}"
            if jobs
            else ""
        )

    def _submit_cells_and_note_jobs(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        """Submit cells with equal needs, as one job or one array."""
        import submitit

        folders = [folder for _, folder in cells]
        logs = Path(os.path.commonpath(folders)) / "slurm"
        for config, folder in cells:
            write_cell_inputs(config, folder)
        # `-m submitit...` follows: without START, files of the working directory could shadow it.
        python = f"{shlex.quote(sys.executable)} -u {shlex.quote(START)}"
        executor = submitit.SlurmExecutor(logs, python=python)
        executor.update_parameters(
            **self._job_parameters(cells[0][0]), array_parallelism=self._running or len(cells)
        )
        try:
            jobs = executor.map_array(train_cell_in_slurm_job, [str(folder) for folder in folders])
        except submitit.core.utils.FailedJobError as error:
            lines = [line for line in str(error).splitlines() if "error" in line.lower()] or [str(error)]
            raise LaunchError(
                f"Slurm rejects the job: {lines[-1].strip().removeprefix('sbatch: error: ')}"
            ) from None
        for job, folder in zip(jobs, folders, strict=True):
            self._jobs[folder] = _SlurmJob(str(job.job_id), str(logs / f"{job.job_id}_0_log.out"))
            write_atomically(folder / CellFile.JOB, json.dumps(self._jobs[folder]._asdict()))

    def _job_parameters(self, config: RunConfig) -> dict[str, Any]:
        """Return the parameters of submitit for the job of a cell."""
        environment = worker_environment()
        exported = {
            name: environment[name] for name in (*ISOLATION, *THREAD_VARIABLES) if name in environment
        }
        extra: dict[str, Any] = {name: value or True for name, value in self._options.items()}
        extra.setdefault("cpus-per-task", config.processes * (config.threads + config.workers))
        return {
            "job_name": "ampcompare",
            "time": DEFAULT_MINUTES,
            "signal_delay_s": WARNING_SECONDS,
            "nodes": 1,
            "ntasks_per_node": 1,
            "setup": [
                *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
                *REQUEUE_PREEMPTED,
            ],
            "stderr_to_stdout": True,
            "additional_parameters": extra,
        }


def _submitted_job_of_cell(folder: Path) -> _SlurmJob:
    """Return the job that an earlier call has submitted for a cell; one without an ID if none."""
    try:
        saved = json.loads((folder / CellFile.JOB).read_text(encoding="utf-8"))
        return _SlurmJob(saved["job"], saved.get("log", "unknown"))
    except (OSError, ValueError, KeyError):
        return _SlurmJob("", "")


def _has_last_record_of_cell(folder: Path, *, is_gone: bool) -> bool:
    """Return whether a cell has its last record: one that was interrupted may be queued again until its job is gone."""
    path = folder / CellFile.RECORD
    return path.exists() and (is_gone or read_record(path).status != "interrupted")


def _slurm_state_of_job(job: str) -> str:
    """Return the state of a job as Slurm says it."""
    try:
        found = re.search(
            r"JobState=(\S+)", _output_of_slurm_command("scontrol", "show", "job", "--oneliner", job)
        )
    except LaunchError:
        found = None
    return found[1] if found else "unknown to Slurm"


def active_job_ids() -> set[str]:
    """Return the ID of every queued or running job of this user; a task of an array as 1234_5."""
    return set(
        _output_of_slurm_command(
            "squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"
        ).split()
    )


def _output_of_slurm_command(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{command[0]} does not respond: {error}") from None
    if done.returncode:
        raise LaunchError(
            f"{command[0]} does not respond: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        )
    return done.stdout


def train_cell_in_slurm_job(folder: str) -> None:
    """Train the cell of a job, in the job: the signal that Slurm sends before a limit acts as SIGTERM does.

    Raises:
        Ended: it was stopped, so that the batch file sees an exit code: see REQUEUE_PREEMPTED.
    """
    warning = signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]
    # Slurm sends it to all processes of the job. They inherit that it is blocked, and only this one waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [warning])

    def ask_cell_to_stop() -> None:
        signal.sigwait([warning])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask_cell_to_stop, daemon=True).start()
    train_cell_on_this_machine(Path(folder), _text_on_job_nodes_and_gpus())


def _text_on_job_nodes_and_gpus() -> str:
    """Return job, nodes and GPUs of this job, for progress."""
    found = os.environ
    job = (
        f"{found['SLURM_ARRAY_JOB_ID']}_{found['SLURM_ARRAY_TASK_ID']}"
        if "SLURM_ARRAY_JOB_ID" in found
        else None
    )
    text = f"job {job or found.get('SLURM_JOB_ID', '')} on {found.get('SLURM_JOB_NODELIST', socket.gethostname())}"
    gpus = found.get("SLURM_STEP_GPUS") or found.get("SLURM_JOB_GPUS")
    return f"{text}, GPU {gpus}" if gpus else text
