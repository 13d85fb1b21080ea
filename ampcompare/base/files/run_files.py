"""The names of the files in a run directory and in the folders of its cells; no other file of the package has them."""

import os
from pathlib import PurePosixPath


class RunFile:
    """Names in a run directory. REPORT is followed by the suffix of its format."""

    PLAN = "plan.json"
    JOURNAL = "journal.jsonl"
    ENVIRONMENT = "env.json"
    REPORT = "report"
    TRACE = "trace.json"
    LOCK = ".lock"
    OWNER = ".owner.json"
    CELLS = "cells"
    # of compilers, for all cells: each would compile again what it cannot keep in the home
    CACHES = ".caches"
    FIRST_WEIGHTS = "first-weights"  # of stacks: a folder for each seed, like that of a cell
    VERIFY_RESUME = "verify-resume"
    # of --verify-resume, in that folder; the first is the run without a break
    VERIFIED = ("unbroken", "resumed")


class CellFile:
    """Names in the folder of a cell.

    WRITTEN is a folder with what the user's code wrote elsewhere. RANK_SCRIPTS and SCRIPTS are patterns: those of ranks
    that ampcompare has started, and those of all processes.
    """

    CONFIG = "config.json"
    RECORD = "record.json"
    UNREADABLE = "record.unreadable.json"
    REJECTED = "record.rejected.json"
    STEPS = "steps.jsonl"
    EPOCHS = "epochs.jsonl"
    LOG = "log.txt"
    LAUNCHER_LOG = "launcher.log"
    PROGRESS = "progress.json"
    FAILURE = "failure.json"
    JOB = "job.json"
    LOADED = "loaded.jsonl"
    WRITTEN = "written"
    SCRIPT = "script.jsonl"
    SCRIPTS = "script*.jsonl"
    RANK_SCRIPTS = "script.rank*.jsonl"
    SCRIPT_TAILS = "script*.tail"  # of a stack whose process was killed
    RECORDER = "recorder.py"  # of a stack
    BY_HAND = "by-hand.txt"
    WEIGHTS = "first.pt"  # of a stack
    CHECKPOINTS = "checkpoints"
    ROUNDS = "rounds"


def file_of_cell(cell: str, name: str) -> PurePosixPath:
    """Return the path below a run directory of a file of a cell.

    Args:
        cell: the name of its folder, as `RunConfig.cell` gives it.
        name: of the file, a `CellFile`.
    """
    return PurePosixPath(RunFile.CELLS, cell, name)


def log_name(rank: int) -> str:
    """Return the name of the file that holds the output of a rank."""
    return CellFile.LOG if rank == 0 else f"rank{rank}.log"


def is_run_directory(folder: str) -> bool:
    """Return whether a folder is one, by what lies in it."""
    return os.path.exists(os.path.join(folder, RunFile.PLAN)) or os.path.isdir(
        os.path.join(folder, RunFile.CELLS)
    )
