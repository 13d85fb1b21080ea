"""A checkpoint as a folder of torch.distributed.checkpoint, into which every rank has written its own shards.

`state.pt` in it is a checkpoint as `store.file` writes it. Instead of each sharded tensor it holds where the parts of
it lie, and it holds the checksums of the files with parts. `.metadata`, by which torch reads the folder, is a pickle:
it is not opened here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.errors import CheckpointError
from ampcompare.base.tensors.tree import map_tree
from ampcompare.training.checkpoint.reader.foreign import name_faults, open_regular
from ampcompare.training.checkpoint.store.file import checksum, read_checkpoint

__all__ = ["FILES", "PARTS", "STATE_FILE", "SUFFIX", "is_sharded_folder", "read_saved"]

SUFFIX = ".dcp"
STATE_FILE = "state.pt"

FILES = "shard_files"
"""Key of the state in `STATE_FILE`: names of the files with parts to their checksums."""

PARTS = "stored_parts"
"""Key of what stands for a sharded tensor: a list of "file", "at" and "length" in bytes, "offsets" and "sizes" in
elements by dimension; next to "dtype" and "shape" of the whole tensor."""


def is_sharded_folder(path: Path) -> bool:
    """Return whether a path is that of a checkpoint in shards, and not that of a folder of checkpoints."""
    return path.is_dir() and (path.suffix == SUFFIX or (path / STATE_FILE).is_file())


def read_saved(path: Path, *, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint, be it a file or a folder of shards, with whole tensors.

    Args:
        device: where its tensors go.

    Raises:
        CheckpointError: as for `read_checkpoint`; or a file of the folder is missing, damaged or of another save.
    """
    if not is_sharded_folder(path):
        state = read_checkpoint(path, device=device)
        if FILES in state:
            raise CheckpointError(f"{path} is one file of a checkpoint in shards; name its folder, {path.parent}")
        return state
    state = read_checkpoint(path / STATE_FILE)
    if FILES not in state:
        raise CheckpointError(f"{path / STATE_FILE} does not name the files with its shards; take another checkpoint")
    with name_faults(path):
        for name, wanted in state.pop(FILES).items():
            _verify_shards(path / name, wanted)
        whole: dict[str, Any] = _without_parts(state, partial(_join_parts, path))
    return whole if torch.device(device).type == "cpu" else map_tree(whole, lambda tensor: tensor.to(device))


def _verify_shards(path: Path, wanted: str) -> None:
    """Check that a file with parts has its checksum."""
    try:
        found = checksum(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot read the shards in {path}: {error.strerror or error}; take the checkpoint before it"
        ) from None
    if found != wanted:
        raise CheckpointError(
            f"{path} is damaged or of another save: its bytes have the checksum {found[:8]}..., and {STATE_FILE} says "
            f"{str(wanted)[:8]}...; take the checkpoint before it"
        )


def _join_parts(folder: Path, entry: Mapping[str, Any]) -> Tensor:
    """Return a tensor from its parts, each an archive of `torch.save` inside of a file."""
    whole = torch.zeros(torch.Size(entry["shape"]), dtype=entry["dtype"])
    for part in entry[PARTS]:
        place = whole
        for dim, (offset, size) in enumerate(zip(part["offsets"], part["sizes"], strict=True)):
            place = place.narrow(dim, offset, size)
        with open_regular(folder / part["file"]) as file:
            file.seek(part["at"])
            place.copy_(torch.load(io.BytesIO(file.read(part["length"])), weights_only=True))
    return whole


def _without_parts(value: Any, join: Callable[[Mapping[str, Any]], Tensor]) -> Any:
    """Return a state with a whole tensor instead of each list of parts."""
    if isinstance(value, dict):
        return join(value) if PARTS in value else {key: _without_parts(item, join) for key, item in value.items()}
    return type(value)(_without_parts(item, join) for item in value) if type(value) in (list, tuple) else value
