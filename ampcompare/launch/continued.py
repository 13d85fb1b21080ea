"""The files of a cell that goes on from a checkpoint: steps that it had made stay, none is there twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from ampcompare.record import write_atomically

__all__ = ["CHECKPOINTS", "continue_steps", "set_checkpoints_aside"]

CHECKPOINTS = "checkpoints"


def continue_steps(folder: Path, others: Sequence[Path], step: int) -> bool:
    """Leave `steps.jsonl` in `folder` with the first `step` steps, from the first file that has them all.

    Args:
        others: where to look beside the folder's own files.

    Returns:
        Whether there was such a file; else the steps begin with those that come.
    """
    own = folder / "steps.jsonl"
    for path in (own, folder / "steps.previous.jsonl", *others):
        lines = _first_steps(path, step)
        if len(lines) == step:
            write_atomically(own, "".join(lines))
            return True
    write_atomically(own, "")
    return False


def _first_steps(path: Path, count: int) -> list[str]:
    """Return the lines of the first `count` steps, or as many as are there in order and whole."""
    lines: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if len(lines) == count or not line.endswith("\n") or json.loads(line)["step"] != len(lines):
                    break
                lines.append(line)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return lines


def set_checkpoints_aside(folder: Path) -> None:
    """Keep the checkpoints of an earlier run as `checkpoints.previous`, so that none is taken for one of the coming."""
    path = folder / CHECKPOINTS
    if path.exists():
        previous = folder / f"{CHECKPOINTS}.previous"
        shutil.rmtree(previous, ignore_errors=True)
        path.replace(previous)
