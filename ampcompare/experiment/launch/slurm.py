"""Cells as Slurm jobs: submit them with submitit, wait for them, and find them again in a later call.

Cells that need the same are tasks of one job array; several short ones can share a job, which trains them in turn.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES
from ampcompare.base.errors import (
    BackendUnavailable,
    ConfigError,
    EnvironmentUnfit,
    LaunchError,
    UnsupportedCombination,
)
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.files.write import write_atomically
from ampcompare.base.processes.start import __file__ as START
from ampcompare.experiment.launch.base import Progress, QueueLauncher, failed_record
from ampcompare.experiment.launch.cell_files import (
    log_tail,
    make_cell_folder,
    progress_reader,
    write_config,
    write_record,
)
from ampcompare.experiment.launch.forked import worker_environment
from ampcompare.runs.records.run import RunRecord, read_record
from ampcompare.runs.settings.config import RunConfig

__all__ = ["Ending", "SlurmLauncher", "active_jobs", "ending", "parse_slurm_options", "require_slurm"]

POLL_SECONDS = 0.5
QUEUE_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
RECORD_SECONDS = 10.0  # until a file that another machine wrote is visible here
LOG_LINES = 50
TAIL_LINES = 5
DEFAULT_MINUTES = 60
WARNING_SECONDS = 90  # between submitit's signal and the time limit
JOB_NAME = "ampcompare"
MAX_ARRAY = 1000  # tasks; Slurm takes 1001 unless it is configured otherwise
DEAD_TASK = re.compile(r"^srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: (?P<how>.+)$", flags=re.MULTILINE)
NOISE = re.compile(r"submitit \w+ |srun: |slurmstepd\S*: ")
ISOLATION = ("PYTHONPATH", "PYTHONSAFEPATH")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")
RESERVED_OPTIONS = {
    **dict.fromkeys(("nodes", "N"), "--nnodes"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "n"), "--nproc-per-node"),
    **dict.fromkeys(("array", "chdir", "comment", "error", "job-name", "open-mode", "output", "wrap"), "ampcompare"),
}
ANSWER_SECONDS = 60.0
KILLED_CODE = 128
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
_STATES_OF_JOBS = tuple(state for state in STORIES if state)  # more specific than the exit of a task


def parse_slurm_options(texts: Sequence[str]) -> dict[str, str]:
    """Read options of sbatch such as `partition=gpu`, `time=2:00:00` or `exclusive`, without their dashes.

    Raises:
        ConfigError: not an option, a duplicate, an invalid time, or an option that ampcompare sets itself.
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
        if name == "time":
            _minutes(value)
        options[name] = value
    return options


def _minutes(text: str) -> int:
    """Return the minutes, rounded up, of a time as Slurm reads it: 30, 30:00, 1:30:00, 1-12, 1-12:30 or 1-12:30:00.

    Raises:
        ConfigError: it is not a time.
    """
    match = TIME.fullmatch(text)
    if match is None:
        raise ConfigError(f"--slurm-option time={text} is not a time such as 30 (minutes), 1:30:00 or 1-12:00:00")
    fields = [int(field) for field in match["fields"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*fields, 0, 0][:3]
        hours += 24 * int(match["days"])
    else:
        hours, minutes, seconds = (
            (0, *fields, 0)[:3] if len(fields) == 1 else (0, *fields)[-3:] if len(fields) == 2 else fields
        )
    return max(1, math.ceil(hours * 60 + minutes + seconds / 60))


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
        nnodes: nodes of one job, among which the processes of a cell are split.
        running: limit on the tasks of an array that run at the same time; None for no limit.
        cells_per_job: cells that a job trains in turn.

    Raises:
        EnvironmentUnfit: this machine has no Slurm.
        BackendUnavailable: submitit is not installed.
        UnsupportedCombination: several cells in a job of several nodes.
    """

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        *,
        nnodes: int = 1,
        running: int | None = None,
        cells_per_job: int = 1,
    ) -> None:
        require_slurm()
        if cells_per_job > 1 and nnodes > 1:
            raise UnsupportedCombination(
                f"--cells-per-job {cells_per_job} is for cells on one node, but --nnodes is {nnodes}; leave one out"
            )
        self._options = dict(options or {})
        self._nnodes = nnodes
        self._running = running
        self._cells_per_job = cells_per_job
        self._jobs: dict[Path, _Job] = {}

    def submit_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:
        """Submit the cells that have no job in the queue.

        Raises:
            LaunchError: Slurm rejects a job, or does not answer.
        """
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

    def collect(
        self,
        cells: Sequence[tuple[RunConfig, Path]],
        on_place: Callable[[int, str], None] = lambda index, place: None,
        on_progress: Callable[[int, Progress], None] | None = None,
    ) -> Iterator[tuple[int, RunRecord]]:
        cells = [(config, folder.resolve()) for config, folder in cells]
        self.submit_ahead(cells)
        waits = {}
        for index, (_, folder) in enumerate(cells):
            report = None if on_progress is None else functools.partial(on_progress, index)
            read = progress_reader(folder, report, functools.partial(on_place, index))
            waits[index] = _Wait(self._jobs[folder], folder, read, resolved=self._cells_per_job > 1)
        queue = _Queue()
        while waits:
            is_new = queue.ask_if_due()
            for index, wait in list(waits.items()):
                if wait.is_over(queue, is_new=is_new):
                    del waits[index]
                    yield index, self._result(*cells[index])
            if waits:
                time.sleep(POLL_SECONDS)

    def _result(self, config: RunConfig, folder: Path) -> RunRecord:
        """Return the record of a cell that is not waited for any more."""
        job = self._jobs.pop(folder)
        path = folder / CellFile.RECORD
        record = read_record(path) if path.exists() else None
        if record is None or (self._cells_per_job == 1 and _was_killed(job.job, record)):
            record = failed_record(config, _describe_end(job, folder))
        elif record.status == "interrupted":  # only this cell fails; the others continue
            error = _describe_interruption(job.job, record)
            record = record.model_copy(update={"status": "failed", "error": error})
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

        from ampcompare.experiment.launch.slurm_task import train, train_in_turn

        token, folders, size = secrets.token_hex(8), [folder for _, folder in cells], self._cells_per_job
        logs = Path(os.path.commonpath(folders)) / "slurm"
        shares = [folders[start : start + size] for start in range(0, len(folders), size)]
        for number, (config, folder) in enumerate(cells):
            make_cell_folder(folder)
            (folder / CellFile.PROGRESS).unlink(missing_ok=True)
            write_config(config, folder)
            self._jobs[folder] = _Job("", token, number // size, str(logs))
            self._jobs[folder].save(folder)
        # `-m submitit...` follows: without START, files of the working directory could shadow it.
        python = f"{shlex.quote(sys.executable)} -u {shlex.quote(START)}"
        executor = submitit.SlurmExecutor(logs, python=python)
        needs, running = self._needs(cells[0][0]), self._running or len(shares)
        executor.update_parameters(**needs, comment=token, array_parallelism=running)
        try:
            if size == 1:
                jobs = executor.map_array(train, [str(folder) for folder in folders])
            else:
                jobs = executor.map_array(train_in_turn, [[str(folder) for folder in share] for share in shares])
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
        """Return the parameters of submitit for the job of a cell.

        Raises:
            UnsupportedCombination: processes that cannot be split over the nodes.
        """
        if config.processes % self._nnodes:
            raise UnsupportedCombination(
                f"{config.processes} processes cannot be split over {self._nnodes} nodes; use --nproc-per-node"
            )
        tasks = config.processes // self._nnodes if self._cells_per_job == 1 else 1
        options = dict(self._options)
        minutes = _minutes(options.pop("time")) if "time" in options else DEFAULT_MINUTES
        environment = worker_environment()
        exported = {name: environment[name] for name in (*ISOLATION, *THREAD_VARIABLES) if name in environment}
        extra: dict[str, Any] = {name: value or True for name, value in options.items()}
        processes = config.processes // (tasks * self._nnodes)
        extra.setdefault("cpus-per-task", processes * (config.threads + config.workers))
        return {
            "job_name": JOB_NAME,
            "time": minutes,
            "signal_delay_s": min(WARNING_SECONDS, 60 * minutes // 4),
            "nodes": self._nnodes,
            "ntasks_per_node": tasks,
            "setup": [*(f"export {name}={shlex.quote(value)}" for name, value in exported.items()), *REQUEUE_PREEMPTED],
            "srun_args": ["--kill-on-bad-exit=1"],
            "stderr_to_stdout": True,
            "additional_parameters": extra,
        }


class _Queue:
    """The jobs that are queued or run, asked for now and then; Slurm may be silent for a while."""

    def __init__(self) -> None:
        self.jobs: Collection[str] | None = None
        self._asked = -math.inf
        self._answered = time.monotonic()

    def ask_if_due(self) -> bool:
        """Ask Slurm, unless it was asked lately, and return whether there is an answer.

        Raises:
            LaunchError: it has not answered for long.
        """
        now = time.monotonic()
        if now < self._asked + QUEUE_SECONDS:
            return False
        self._asked = now
        try:
            self.jobs = active_jobs()
        except LaunchError:
            if now - self._answered > PATIENCE_SECONDS:
                raise
            return False
        self._answered = now
        return True


class _Wait:
    """The wait for a cell to have its record, or for its job to end without one.

    Args:
        report: reads the progress of the cell.
        resolved: whether the job itself finds out why a cell failed.
    """

    def __init__(self, job: _Job, folder: Path, report: Callable[[], None], *, resolved: bool) -> None:
        self._job = job
        self._folder = folder
        self._report = report
        self._resolved = resolved
        self._started = False
        self._ended: float | None = None

    def is_over(self, queue: _Queue, *, is_new: bool) -> bool:
        """Return whether the wait is over; else report the progress.

        Args:
            is_new: whether the queue was just asked.
        """
        if is_new and queue.jobs is not None:
            if self._job.job in queue.jobs:
                self._ended = None  # queued again, or missing in one answer only
            else:
                self._ended = self._ended or time.monotonic()
        if not (self._started or is_new):  # cells that are queued may be many
            return False
        self._started = (self._folder / CellFile.PROGRESS).exists() or self._ended is not None
        over = _is_done(self._folder, resolved=self._resolved)
        self._report()
        if over or self._ended is None:
            return over
        return (self._folder / CellFile.RECORD).exists() or time.monotonic() - self._ended > RECORD_SECONDS


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


def _is_done(folder: Path, *, resolved: bool) -> bool:
    """Return whether the cell has a final record.

    A failed record is not final: Slurm may report later which rank was killed. Nor is an interrupted one: the job may
    be queued again.

    Args:
        resolved: whether the job itself finds out why a cell failed.
    """
    path = folder / CellFile.RECORD
    final = ("completed", "diverged", "failed") if resolved else ("completed", "diverged")
    return path.exists() and read_record(path).status in final


def _was_killed(job: str, record: RunRecord) -> bool:
    """Return whether a rank was killed, so that the record is that of another rank, which failed later."""
    return record.status == "failed" and record.config.processes > 1 and ending(job).was_killed


def _describe_interruption(job: str, record: RunRecord) -> str:
    """Return what happened to a job whose cell was asked to stop and has saved."""
    end = ending(job)
    how = end.story() if end.state in _STATES_OF_JOBS else "was asked to stop, before its time limit or for another job"
    return f"Slurm job {job} {how}; the cell was {record.error}; --resume auto resumes from there"


def _describe_end(job: _Job, folder: Path) -> str:
    """Return what happened to a job that left no record, with the last lines of its log.

    srun reports a task that died as `srun: error: NODE: task 1: Killed`.
    """
    try:
        output = job.log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        output = ""
    end = ending(job.job)
    dead = None if end.state in _STATES_OF_JOBS else DEAD_TASK.search(output)
    rank = int(dead["rank"]) if dead else 0
    how = f"lost rank {rank}: {dead['how']}" if dead else end.story()
    tail = " | ".join(_own_lines(log_tail(folder, LOG_LINES, rank)) or _own_lines(output))
    return f"Slurm job {job.job} {how}" + (f"; last lines of its log: {tail}" if tail else "; its log is empty")


def _own_lines(text: str) -> list[str]:
    """Return the last lines of a log, without those of submitit and srun."""
    return [line.strip() for line in text.splitlines() if line.strip() and not NOISE.match(line)][-TAIL_LINES:]


@dataclass(frozen=True)
class Ending:
    """How a job ended, as far as Slurm knows.

    Attributes:
        state: Slurm's word, such as "TIMEOUT"; "" if it has no record of the job.
        code, signal: of the batch script.
        nodes: where it ran.
    """

    state: str = ""
    code: int = 0
    signal: int = 0
    nodes: str = ""

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, or a task, whose signal srun returns as 128 plus its number."""
        return self.signal > 0 or self.code > KILLED_CODE or self.state in _STATES_OF_JOBS

    def story(self) -> str:
        """Return what happened, as the end of a sentence about the job."""
        text = STORIES.get(self.state)
        if text is None and self.signal:
            text = f"was ended by signal {self.signal}"
        elif text is None and self.code > KILLED_CODE:
            text = f"had a task that was ended by signal {self.code - KILLED_CODE}"
        elif text is None:
            text = f"ended with exit code {self.code}" + ("" if self.code else " and left no record")
        return text + (f" (node {self.nodes})" if self.nodes else "")


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


def ending(job: str) -> Ending:
    """Return how a job ended: from Slurm's memory of the last minutes, otherwise from its accounting, if any."""
    facts = dict(re.findall(r"(\w+)=(\S+)", _answer("scontrol", "show", "job", "--oneliner", job)))
    if "JobState" not in facts:
        values = _answer("sacct", "-n", "-P", "-X", "-o", "State,ExitCode,NodeList", "-j", job).strip().split("|")
        facts = dict(zip(("JobState", "ExitCode", "NodeList"), values, strict=False)) if len(values) == 3 else {}
    return _ending(facts)


def _ending(facts: Mapping[str, str]) -> Ending:
    code, _, number = facts.get("ExitCode", "0:0").partition(":")
    nodes = facts.get("NodeList", "")
    return Ending(
        state=facts.get("JobState", "").split(" ")[0],  # sacct writes CANCELLED by 1000
        code=int(code or 0),
        signal=int(number or 0),
        nodes="" if nodes in ("(null)", "None assigned") else nodes,
    )


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
