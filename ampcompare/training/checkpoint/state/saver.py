"""When a run is saved, and to which files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.base.tensors.sharded import is_sharded, local
from ampcompare.settings.config import SavingConfig
from ampcompare.training.checkpoint.state.flattened import is_wrapped
from ampcompare.training.checkpoint.store.file import checksum
from ampcompare.training.checkpoint.store.folder import CheckpointFolder
from ampcompare.training.checkpoint.store.sharded import FILES, PARTS
from ampcompare.training.parallel.ranks import Communicator, SingleProcess

if TYPE_CHECKING:
    from ampcompare.training.checkpoint.store.folder import BackgroundFolder

__all__ = ["Position", "Saver"]

APEX_FILE = "apex-layout.pt"
WEIGHTS_FILE = "weights.safetensors"
BEST_WEIGHTS_FILE = "best-weights.safetensors"


class Saver:
    """Writes checkpoints when they are due. Use it as a context manager, which waits for pending writes.

    A save that fails is reported and tried again when the next one is due; the last one of a run must succeed.

    Args:
        folder: of the checkpoints.
        note: receives one line about what went wrong.
        steps: file with a row for each step that a checkpoint counts, flushed before each save; it is synced to disk
            before the checkpoint.
        ranks: those that write, for checkpoints in shards.
    """

    def __init__(
        self,
        folder: Path,
        config: SavingConfig,
        note: Callable[[str], None] = lambda text: None,
        steps: Path | None = None,
        ranks: Communicator | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.note = note
        self.steps = steps
        self.ranks = ranks or SingleProcess()
        self._saved_at: tuple[int, int, int] | None = None
        self._failure: EnvironmentUnfit | None = None
        self._background: BackgroundFolder | None = None

    @property
    def is_on(self) -> bool:
        """Whether saving was asked for; a run that is asked to stop is saved in any case."""
        return self.config.every_steps is not None or self.config.every_epochs is not None

    def is_due(self, before: int, after: int) -> bool:
        """Return whether to save after the updates from `before` up to `after`."""
        every = self.config.every_steps
        return every is not None and after // every > before // every

    def is_due_after(self, epochs: int) -> bool:
        """Return whether to save after this many epochs."""
        every = self.config.every_epochs
        return every is not None and epochs % every == 0

    def save(
        self, position: Position, state: Callable[[], dict[str, Any] | None], *, best: bool = False, last: bool = False
    ) -> None:
        """Save a run at a drain point, unless this position is saved already; every rank calls it.

        Args:
            state: returns what to save, with shards as they are if these are saved; None on ranks that write nothing.
            best: this is the best evaluation so far.
            last: the run ends here.

        Raises:
            CheckpointError: a part of the run has state that a checkpoint cannot hold.
            EnvironmentUnfit: the last checkpoint could not be written.
        """
        saved_at = position.step, position.epoch, position.batch
        if saved_at != self._saved_at or best:
            # Asked for only if it is written: it gathers from all ranks and reads buffers from the device.
            content = state()
            if content is not None:
                self._write(content, position.step, best=best)
            self._saved_at = saved_at
        if last:
            if self._failure is not None:
                raise self._failure
            self.close()

    def close(self) -> None:
        """Wait for the checkpoint that is written in the background, if any.

        Raises:
            EnvironmentUnfit: it could not be written.
        """
        if self._background is not None:
            self._background.wait()

    def _write(self, state: dict[str, Any], step: int, *, best: bool) -> None:
        try:
            self.close()
        except EnvironmentUnfit as error:
            self._note_failure(error)
        self._failure = None
        try:
            if self.config.format == "sharded":
                _write_shards(self._files(), state, self.ranks, step=step, best=best)
            else:
                (self._background or self._open_folder()).save(state, step=step, best=best)
        except EnvironmentUnfit as error:
            self._failure = error
            self._note_failure(error)

    def _note_failure(self, error: EnvironmentUnfit) -> None:
        if self.ranks.is_first:
            self.note(f"not saved: {error}; the next save tries again")

    def _open_folder(self) -> CheckpointFolder | BackgroundFolder:
        """Return what writes checkpoints; kept only if it writes in the background."""
        if not self.config.in_background:
            return self._files()
        from ampcompare.training.checkpoint.store.folder import BackgroundFolder

        self._background = BackgroundFolder(self._files())
        return self._background

    def _files(self) -> CheckpointFolder:
        from ampcompare.training.checkpoint.store.folder import CheckpointFolder

        return CheckpointFolder(self.folder, self.config.keep_last, self.note, self._write_exports, self.steps)

    def _write_exports(self, state: Mapping[str, Any], best: bool) -> None:
        """Write the same content in the formats of other programs, if asked for."""
        from ampcompare.training.checkpoint.store.file import write_pickle, write_weights
        from ampcompare.training.checkpoint.store.layout import apex_layout, weights_only

        if self.config.apex_layout and "amp" in state:
            write_pickle(self.folder / APEX_FILE, apex_layout(state))
        if self.config.weights_format == "safetensors":
            notes = {"arm": str(state["arm"]), "step": str(state["progress"]["step"])}
            for name in (WEIGHTS_FILE, *([BEST_WEIGHTS_FILE] if best else [])):
                write_weights(self.folder / name, weights_only(state), notes)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()


def _write_shards(
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
    _write_parts(temporary, shards)
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
        content = {**_with_parts(state, "", _describe_parts(temporary, shards)), FILES: files}
        folder.finish_sharded(temporary, content, step=step, best=best)

    ranks.broadcast_from_rank0(finish)


def _write_parts(folder: Path, shards: dict[str, Tensor]) -> None:
    """Write the parts of all ranks."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(shards), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:  # raised on every rank
        rank, (reason, _) = next(iter(error.failures.items()))
        text = getattr(reason, "strerror", None) or " ".join(str(reason).split())[:200]
        raise EnvironmentUnfit(
            f"rank {rank} cannot write its shards to {folder}: {text}; free some space or choose another --output-dir"
        ) from None


def _describe_parts(folder: Path, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what stands for each tensor in the state, by its key: where its parts lie, from the file that says so."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex

    metadata: Any = FileSystemReader(folder).read_metadata()  # what `save` returns lacks the places in torch 2.11
    described = {}
    for key in keys:
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
        described[key] = {PARTS: parts, "dtype": entry.properties.dtype, "shape": list(entry.size)}
    return described


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


@dataclass
class Position:
    """How far a run is at a drain point.

    Attributes:
        step: updates made.
        epoch: epochs completed, their evaluation included.
        batch: updates made in the current epoch.
        train_seconds: time spent on them.
        skipped: updates that were skipped, over all optimizers.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    train_seconds: float = 0.0
    skipped: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step, self.epoch, self.batch = int(state["step"]), int(state["epoch"]), int(state["batch"])
        self.train_seconds, self.skipped = float(state["train_seconds"]), int(state["skipped"])
