"""Bring a checkpoint of any program into memory as tensors and plain values."""

from pathlib import Path
from typing import Any

from ampcompare.base.errors import CheckpointError
from ampcompare.training.checkpoint.reader.foreign import name_faults, open_foreign
from ampcompare.training.checkpoint.store.file import read_checkpoint


def load_any(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a checkpoint of any program into tensors and plain values; whole models become state dicts.

    Returns it with place and class of each object that is left out.
    """
    contents = open_foreign(path)
    if contents.comment.startswith(b"ampcompare checkpoint"):
        return read_checkpoint(path), []
    with name_faults(path):
        state, left_out = contents.plain()
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a checkpoint")
    return state, left_out
