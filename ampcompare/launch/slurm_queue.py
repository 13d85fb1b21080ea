"""Query Slurm for jobs: which are queued or running, and how one has ended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from ampcompare.base.errors import LaunchError

__all__ = ["STATES_OF_JOBS", "Ending", "active_jobs", "ending"]

ANSWER_SECONDS = 60.0
KILLED_CODE = 128
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
STATES_OF_JOBS = tuple(state for state in STORIES if state)  # more specific than the exit of a task


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
        return self.signal > 0 or self.code > KILLED_CODE or self.state in STATES_OF_JOBS

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
