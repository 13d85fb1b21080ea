"""Save a run through torch.distributed.checkpoint: every rank writes its own shards, and nothing is gathered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.checkpoint.store.checksum import checksum
from ampcompare.checkpoint.store.folder import CheckpointFolder
from ampcompare.checkpoint.store.sharded import FILES, PARTS
from ampcompare.parallel.ranks import Communicator
from ampcompare.tensors.sharded import is_sharded, local
from ampcompare.training.state.flattened import is_wrapped

__all__ = ["write_shards"]


def write_shards(
    folder: CheckpointFolder, state: dict[str, Any], ranks: Communicator, *, step: int, best: bool = False
) -> None:
    """Write a checkpoint as a folder of shards; every rank calls it.

    Args:
        state: on rank 0 all of it, on the others what holds sharded tensors; of each, every rank has its part.
        step, best: as for `CheckpointFolder.save`.

    Raises:
        CheckpointError: the state holds what a checkpoint cannot; on every rank.
        EnvironmentUnfit: it could not be written, on any rank; those that were there are as they were. On every rank.
    """
    shards: dict[str, Tensor] = {}
    _collect(state, "", shards)
    if ranks.any(any(is_wrapped(local(shard)) for shard in shards.values())):
        raise CheckpointError(
            "the optimizer keeps state in a few bits, in blocks of the shards of each rank, which "
            "torch.distributed.checkpoint does not store; save with --checkpoint-format file"
        )
    temporary = Path(ranks.broadcast_from_rank0(lambda: str(folder.begin_sharded(step))))
    stored = _written(temporary, shards)
    files: dict[str, str] = {}
    for own in ranks.gather(_checksums(temporary, ranks.rank)):
        if isinstance(own, str):
            raise EnvironmentUnfit(own)
        files |= own

    def finish() -> None:
        missing = [name for name in files if not (temporary / name).is_file()]
        if missing:
            raise EnvironmentUnfit(
                f"rank 0 does not see {temporary / missing[0]}, which another rank has written; choose an --output-dir "
                "on a disk that all ranks share"
            )
        content = {**_with_parts(state, "", stored), FILES: files}
        folder.finish_sharded(temporary, content, step=step, best=best)

    ranks.broadcast_from_rank0(finish)


def _written(folder: Path, shards: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Write the parts of all ranks; return what stands for each tensor in the state, by its key."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        metadata: Any = save(dict(shards), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:  # raised on every rank
        rank, (reason, _) = next(iter(error.failures.items()))
        text = getattr(reason, "strerror", None) or " ".join(str(reason).split())[:200]
        raise EnvironmentUnfit(
            f"rank {rank} cannot write its shards to {folder}: {text}; free some space or choose another --output-dir"
        ) from None
    stored = {}
    for key in shards:
        entry = metadata.state_dict_metadata[key]
        parts = []
        for chunk in entry.chunks:
            if math.prod(chunk.sizes):  # there may be fewer rows than ranks
                place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
                parts.append(
                    {
                        "file": place.relative_path,
                        "at": place.offset,
                        "length": place.length,
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                    }
                )
        stored[key] = {PARTS: parts, "dtype": entry.properties.dtype, "shape": list(entry.size)}
    return stored


def _checksums(folder: Path, rank: int) -> dict[str, str] | str:
    """Return the checksums of what this rank has written, read back; or why they cannot be read."""
    try:
        return {path.name: checksum(path) for path in sorted(folder.glob(f"__{rank}_*.distcp"))}
    except OSError as error:
        return f"rank {rank} cannot read back its shards in {folder}: {error.strerror or error}; check the disk"


def _collect(value: Any, key: str, shards: dict[str, Tensor]) -> None:
    """Find the sharded tensors of a state by the keys that torch.distributed.checkpoint gives them."""
    if isinstance(value, Tensor):
        if is_sharded(value):
            shards[key] = value.detach()
    elif isinstance(value, dict | list | tuple):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _collect(item, f"{key}.{name}" if key else str(name), shards)


def _with_parts(value: Any, key: str, stored: dict[str, dict[str, Any]]) -> Any:
    if isinstance(value, Tensor):
        return stored.get(key, value)
    if isinstance(value, dict):
        return {name: _with_parts(item, f"{key}.{name}" if key else str(name), stored) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_parts(item, f"{key}.{index}", stored) for index, item in enumerate(value))
    return value
