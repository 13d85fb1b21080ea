"""Checkpoints written by a thread from a snapshot, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ampcompare.checkpoint.store.folder import CheckpointFolder

__all__ = ["BackgroundFolder", "snapshot"]


def snapshot(state: Any) -> Any:
    """Return a copy of plain data with every tensor copied into memory of the host; one tensor once."""
    return _copy(state, {})


def _copy(value: Any, seen: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = value.detach().to("cpu", copy=True)
        return seen[id(value)]
    if isinstance(value, Mapping):
        return {key: _copy(item, seen) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(item, seen) for item in value)
    return value


class BackgroundFolder:
    """Saves into a `CheckpointFolder` by a thread; at most one checkpoint is on its way. Use it as a context manager.

    An error of a save surfaces at the next `save`, or at `close`.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: Mapping[str, Any], *, step: int, best: bool = False) -> Path:
        """Wait for the checkpoint before this one, copy the tensors, and return while they are written.

        Returns:
            The path that the checkpoint will have.

        Raises:
            CheckpointError, EnvironmentUnfit: the checkpoint before this one could not be written; this one is not
                begun.
        """
        self.wait()
        copied = snapshot(state)
        self._thread = threading.Thread(target=self._write, args=(copied, step, best), name="checkpoint")
        self._thread.start()
        return self.folder.path_of(step)

    def _write(self, state: dict[str, Any], step: int, best: bool) -> None:
        try:
            self.folder.save(state, step=step, best=best)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the checkpoint on its way.

        Raises:
            CheckpointError, EnvironmentUnfit: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    close = wait

    def newest(self, *, device: torch.device | str = "cpu") -> tuple[Path, dict[str, Any], list[str]] | None:
        """Read the newest checkpoint, as `CheckpointFolder.newest`, after the one on its way."""
        self.wait()
        return self.folder.newest(device=device)

    def __enter__(self) -> BackgroundFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:  # an error of training matters more than one of saving
            self._thread.join()
            self._thread = None
