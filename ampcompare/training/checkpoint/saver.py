"""When a run is saved, and to which files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.checkpoints.store.file import write_pickle_without_checksum, write_weights
from ampcompare.checkpoints.store.folder import CheckpointFolder, copy_to_host
from ampcompare.checkpoints.store.layout import flat_weights_for_safetensors, state_in_apex_layout
from ampcompare.settings.config import SavingConfig

APEX_FILE = "apex-layout.pt"
WEIGHTS_FILE = "weights.safetensors"
BEST_WEIGHTS_FILE = "best-weights.safetensors"


class CheckpointSaver:
    """Writes checkpoints when they are due. Use it as a context manager, which waits for pending writes.

    A save that fails is reported and tried again when the next one is due; the last one of a run must succeed.

    Args:
        folder: of the checkpoints.
        config: when to save, and how many are kept.
        note: gets a sentence about a save that failed.
        steps: the file with a row for each step that a checkpoint counts, which is synced to disk before it.
    """

    def __init__(
        self,
        folder: Path,
        config: SavingConfig,
        note: Callable[[str], None] = lambda text: None,
        steps: Path | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.note = note
        self._files = CheckpointFolder(folder, config.keep_last, note, self._write_exports, steps)
        self._saved_at: tuple[int, int, int] | None = None
        self._failure: EnvironmentUnfit | None = None
        self._pending: Future[Path] | None = None  # at most one checkpoint is on its way

    @property
    def is_on(self) -> bool:
        """Whether saving was asked for; a run that is asked to stop is saved in any case."""
        return self.config.every_steps is not None or self.config.every_epochs is not None

    def is_due(self, updates_before: int, updates_after: int) -> bool:
        """Return whether to save after the updates from `updates_before` up to `updates_after`."""
        every = self.config.every_steps
        return every is not None and updates_after // every > updates_before // every

    def is_due_after_epochs(self, epochs: int) -> bool:
        """Return whether to save after this many epochs."""
        every = self.config.every_epochs
        return every is not None and epochs % every == 0

    def save_run_unless_saved(
        self,
        position: RunPosition,
        state: Callable[[], dict[str, Any] | None],
        *,
        is_best: bool = False,
        is_last: bool = False,
    ) -> None:
        """Save a run at a drain point, unless this position is saved already; every rank calls it.

        `state` returns what to save; None on ranks that write nothing. The last save of a run raises if it fails.

        Args:
            position: where the run is.
            state: returns what to save; None on ranks that write nothing.
            is_best: whether it is the best so far.
            is_last: whether the run ends here: then an error is raised, else it is a note.
        """
        saved_at = position.step, position.epoch, position.batch
        if saved_at != self._saved_at or is_best:
            # Asked for only if it is written: it gathers from all ranks and reads buffers from the device.
            content = state()
            if content is not None:
                self._write_checkpoint(content, position.step, best=is_best)
            self._saved_at = saved_at
        if is_last:
            if self._failure is not None:
                raise self._failure
            self.close()

    def close(self) -> None:
        """Wait for the checkpoint that is written in the background, if any, and raise if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_checkpoint(self, state: dict[str, Any], step: int, *, best: bool) -> None:
        try:
            self.close()
        except EnvironmentUnfit as error:
            self.note(f"not saved: {error}; the next save tries again")
        self._failure = None
        if self.config.in_background:
            pool = ThreadPoolExecutor(1)
            self._pending = pool.submit(self._files.save, copy_to_host(state), step=step, best=best)
            pool.shutdown(wait=False)
            return
        try:
            self._files.save(state, step=step, best=best)
        except EnvironmentUnfit as error:
            self._failure = error
            self.note(f"not saved: {error}; the next save tries again")

    def _write_exports(self, state: Mapping[str, Any], best: bool) -> None:
        """Write the same content in the formats of other programs, if asked for."""
        if self.config.apex_layout and "amp" in state:
            write_pickle_without_checksum(self.folder / APEX_FILE, state_in_apex_layout(state))
        if self.config.weights_format == "safetensors":
            notes = {"arm": str(state["arm"]), "step": str(state["progress"]["step"])}
            for name in (WEIGHTS_FILE, *([BEST_WEIGHTS_FILE] if best else [])):
                write_weights(self.folder / name, flat_weights_for_safetensors(state), notes)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()


@dataclass
class RunPosition:
    """How far a run is at a drain point."""

    step: int = 0  # updates made
    epoch: int = 0  # completed, their evaluation included
    batch: int = 0  # updates made in the current epoch
    train_seconds: float = 0.0  # spent on them
    skipped: int = 0  # updates, over all optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step = int(state["step"])
        self.epoch = int(state["epoch"])
        self.batch = int(state["batch"])
        self.train_seconds = float(state["train_seconds"])
        self.skipped = int(state["skipped"])
