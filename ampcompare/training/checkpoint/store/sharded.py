"""A checkpoint as a folder of torch.distributed.checkpoint, into which every rank has written its own shards.

`state.pt` in it is a checkpoint as `store.file` writes it. Instead of each sharded tensor it holds where the parts of
it lie, and it holds the checksums of the files with parts. `.metadata`, by which torch reads the folder, is a pickle:
it is not opened here.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.errors import CheckpointError
from ampcompare.base.tensors.tree import mapped
from ampcompare.training.checkpoint.reader.foreign import as_tensor, explained, open_members, open_regular
from ampcompare.training.checkpoint.store.file import checksum, read_checkpoint

__all__ = ["FILES", "PARTS", "STATE_FILE", "SUFFIX", "is_sharded_folder", "read_saved"]

SUFFIX = ".dcp"
STATE_FILE = "state.pt"

FILES = "shard_files"
"""Key of the state in `STATE_FILE`: names of the files with parts to their checksums."""

PARTS = "stored_parts"
"""Key of what stands for a sharded tensor: a list of "file", "at" and "length" in bytes, "offsets" and "sizes" in
elements by dimension; next to "dtype" and "shape" of the whole tensor."""

SHARD_FILE = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")


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
    with explained(path):
        sizes = {name: _verified_size(path / name, wanted) for name, wanted in state.pop(FILES).items()}
        whole: dict[str, Any] = _without_parts(state, _Joiner(path, sizes))
    return whole if torch.device(device).type == "cpu" else mapped(whole, lambda tensor: tensor.to(device))


def _verified_size(path: Path, wanted: str) -> int:
    """Return the bytes of a file with parts, once its checksum was found right."""
    if not SHARD_FILE.fullmatch(path.name):
        raise CheckpointError(f"{path.parent} is damaged: {path.name[:40]!r} is not the name of a file with shards")
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
    return path.stat().st_size


class _Joiner:
    """Joins the parts of sharded tensors; all tensors together are no larger than the files that they come from.

    Args:
        folder: of the checkpoint.
        sizes: bytes of each file with parts, by name.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self.folder = folder
        self.sizes = sizes
        self.left = sum(sizes.values())

    def __call__(self, entry: Mapping[str, Any]) -> Tensor:
        parts, shape, dtype = entry[PARTS], torch.Size(entry["shape"]), entry["dtype"]
        self.left -= shape.numel() * dtype.itemsize
        if self.left < 0 or sum(math.prod(part["sizes"]) for part in parts) != shape.numel():
            raise CheckpointError(f"{self.folder} is damaged: the parts of a tensor of {list(shape)} are not all there")
        whole = torch.zeros(shape, dtype=dtype)
        for part in parts:
            place = whole
            for dim, (offset, size) in enumerate(zip(part["offsets"], part["sizes"], strict=True)):
                place = place.narrow(dim, offset, size)
            place.copy_(self._part(part, place))
        return whole

    def _part(self, part: Mapping[str, Any], place: Tensor) -> Tensor:
        """Read one part, an archive of `torch.save` inside of a file, without running anything in it."""
        path = self.folder / part["file"]
        if (
            part["file"] not in self.sizes
            or not 0 <= part["at"] <= part["at"] + part["length"] <= self.sizes[path.name]
        ):
            raise CheckpointError(f"{self.folder} is damaged: a part lies outside of its files")
        with open_regular(path) as file:
            file.seek(part["at"])
            content = io.BytesIO(file.read(part["length"]))
        with zipfile.ZipFile(content) as archive:
            contents = open_members(path, archive, lambda name: as_tensor(archive.read(name)))
            value, _ = contents.plain()
        if not isinstance(value, Tensor) or value.shape != place.shape or value.dtype is not place.dtype:
            raise CheckpointError(
                f"{path} is damaged: a part is not the {place.dtype} of {list(place.shape)} it should be"
            )
        return value


def _without_parts(value: Any, join: Callable[[Mapping[str, Any]], Tensor]) -> Any:
    """Return a state with a whole tensor instead of each list of parts."""
    if isinstance(value, dict):
        return join(value) if PARTS in value else {key: _without_parts(item, join) for key, item in value.items()}
    return type(value)(_without_parts(item, join) for item in value) if type(value) in (list, tuple) else value
