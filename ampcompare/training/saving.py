"""When a run is saved, and into which files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcompare.config import SavingConfig
from ampcompare.errors import EnvironmentUnfit
from ampcompare.training.checkpoint import capture

if TYPE_CHECKING:
    from ampcompare.checkpoint.background import BackgroundFolder
    from ampcompare.checkpoint.folder import CheckpointFolder
    from ampcompare.training.session import Session

__all__ = ["Saver"]

APEX_FILE = "apex-layout.pt"
WEIGHTS_FILE = "weights.safetensors"
BEST_WEIGHTS_FILE = "best-weights.safetensors"


class Saver:
    """Saves a session where it is due. Use it as a context manager, which waits for what is still being written.

    A save that fails is noted and tried again when the next one is due; the last one of a run must succeed.

    Args:
        folder: of the checkpoints.
        note: is told what went wrong, in one line.
        steps: file with a row for each step that a checkpoint counts, flushed whenever the session is asked for the
            next event; it is put on the disk before the checkpoint.
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
        self.steps = steps
        self._saved: tuple[int, int, int] | None = None
        self._failure: EnvironmentUnfit | None = None
        self._background: BackgroundFolder | None = None

    @property
    def is_on(self) -> bool:
        """Whether saving was asked for; a run that is told to end is saved in any case."""
        return self.config.every_steps is not None or self.config.every_epochs is not None

    def is_due(self, before: int, after: int) -> bool:
        """Tell whether to save after the updates from `before` up to `after`."""
        every = self.config.every_steps
        return every is not None and after // every > before // every

    def is_due_after(self, epochs: int) -> bool:
        """Tell whether to save after so many epochs."""
        every = self.config.every_epochs
        return every is not None and epochs % every == 0

    def save(self, session: Session, *, best: bool = False, last: bool = False) -> None:
        """Save a session at a drain point, unless that was done at this very one; every rank calls it.

        Args:
            best: this is the best evaluation so far.
            last: the run ends here.

        Raises:
            CheckpointError: a part of the run has a state that no checkpoint can hold.
            EnvironmentUnfit: the last checkpoint could not be written.
        """
        position = session.position
        place = position.step, position.epoch, position.batch
        if place != self._saved or best:
            state = capture(session)
            if state is not None:
                self._write(state, position.step, best=best)
            self._saved = place
        if last:
            if self._failure is not None:
                raise self._failure
            self.close()

    def close(self) -> None:
        """Wait for the checkpoint that is being written in the background.

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
            (self._background or self._opened()).save(state, step=step, best=best)
        except EnvironmentUnfit as error:
            self._failure = error
            self._note_failure(error)

    def _note_failure(self, error: EnvironmentUnfit) -> None:
        self.note(f"not saved: {error}; the next save is another try")

    def _opened(self) -> CheckpointFolder | BackgroundFolder:
        """Return what saves; kept only where it works in the background."""
        from ampcompare.checkpoint.background import BackgroundFolder
        from ampcompare.checkpoint.folder import CheckpointFolder

        files = CheckpointFolder(self.folder, self.config.keep_last, self.note, self._write_beside, self.steps)
        if not self.config.in_background:
            return files
        self._background = BackgroundFolder(files)
        return self._background

    def _write_beside(self, state: Mapping[str, Any], best: bool) -> None:
        """Write the same for others to read, where that is asked for."""
        import torch

        from ampcompare.checkpoint.file import write_safely, write_weights
        from ampcompare.checkpoint.layout import apex_layout, weights_only

        if self.config.apex_layout and "amp" in state:
            content = io.BytesIO()  # torch cannot be stopped inside a write that fails
            torch.save(apex_layout(state), content)
            write_safely(self.folder / APEX_FILE, lambda file: file.write(content.getbuffer()))
        if self.config.weights_format == "safetensors":
            notes = {"arm": str(state["arm"]), "step": str(state["progress"]["step"])}
            for name in (WEIGHTS_FILE, *([BEST_WEIGHTS_FILE] if best else [])):
                write_weights(self.folder / name, weights_only(state), notes)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
