"""The start of a cell: from a checkpoint or from step 0, and the files that belong to either."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.files.write import write_atomically
from ampcompare.launch.cell_files import CHECKPOINTS, archive_checkpoints, continue_steps
from ampcompare.parallel.ranks import Communicator
from ampcompare.records.run import Resumption
from ampcompare.settings.config import RunConfig
from ampcompare.training.state.resume import AUTO, find_checkpoint, validate_resume

__all__ = ["ResumePoint", "find_resume_point", "prepare_files"]


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a cell resumes from.

    Attributes:
        path: of the checkpoint.
        state: its content, made to fit the configuration.
        resumption: what the record reports about it.
    """

    path: Path
    state: dict[str, Any]
    resumption: Resumption


def find_resume_point(config: RunConfig, folder: Path, ranks: Communicator, attempt: int) -> ResumePoint | None:
    """Return the checkpoint that a cell resumes from, the same on every rank; None for a start from step 0.

    A cell that was restarted after a failure resumes from its own last checkpoint, whatever it first started from.

    Args:
        attempt: restarts before this one.

    Raises:
        CheckpointError: it cannot be read, or is of another run.
    """
    # Ranks receive plain data only: nothing that arrives from another process is unpickled as a class.
    received = ranks.broadcast_from_rank0(lambda: _read_checkpoint(config, folder, ranks.size, attempt))
    if received is None:
        return None
    path, state, resumption = received
    return ResumePoint(Path(path), state, Resumption.model_validate(resumption))


def _read_checkpoint(
    config: RunConfig, folder: Path, world_size: int, attempt: int
) -> tuple[str, dict[str, Any], dict[str, Any]] | None:
    checkpoints, resume = folder / CHECKPOINTS, config.saving.resume
    checkpoint = find_checkpoint(AUTO, checkpoints) if attempt else None
    if checkpoint is None and resume is not None:
        checkpoint = find_checkpoint(resume, checkpoints)
    if checkpoint is None:
        return None
    state, resumption = validate_resume(checkpoint, config, world_size)
    return str(checkpoint.path), state, resumption.model_dump()


def prepare_files(folder: Path, point: ResumePoint | None, attempt: int) -> None:
    """Keep in the folder of a cell only what belongs to the steps up to its resume point, and archive the rest.

    Args:
        attempt: restarts before this one, whose checkpoints stay.
    """
    checkpoints = folder / CHECKPOINTS
    is_own = point is not None and checkpoints.resolve() in point.path.resolve().parents
    if not attempt and not is_own:
        archive_checkpoints(folder)
    write_atomically(folder / "epochs.jsonl", "")  # earlier ones are in the checkpoint, and written from there
    if point is None:
        write_atomically(folder / "steps.jsonl", "")
        return
    step = point.resumption.step
    if not continue_steps(folder, [point.path.parent.parent / "steps.jsonl"], step):
        point.resumption.notes.append(f"steps.jsonl begins with step {step}")
