"""The checkpoints of one run in one folder: the last few, the best, and how damaged ones are skipped."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.base.files.write import flush_to_disk
from ampcompare.base.tensors.tree import map_tensors_in_tree
from ampcompare.checkpoints.store.file import NewerCheckpoint, read_checkpoint, write_checkpoint

BEST = "best.pt"
NAME = re.compile(r"step-(\d{8,})\.pt")
ASIDE = ".aside"


class CheckpointFolder:
    """Keeps the checkpoints of one run: `step-00000120.pt` by number of updates, and `best.pt`.

    An older one is deleted only after a newer one was read back.

    Args:
        folder: is made with the first checkpoint.
        keep_last: so many are kept, next to the best.
        note: gets a sentence about what went wrong and was put right.
        on_written: called with the state, and whether it is the best, once it is written; it may write more files here.
        counted: a file that is flushed to the disk before each checkpoint; None for none.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        note: Callable[[str], None] = lambda text: None,
        on_written: Callable[[Mapping[str, Any], bool], None] = lambda state, best: None,
        counted: Path | None = None,
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.note = note
        self.on_written = on_written
        self.counted = counted

    def checkpoint_path_of_step(self, step: int) -> Path:
        """Return where the checkpoint after `step` updates lies."""
        return self.folder / f"step-{step:08d}.pt"

    def save(self, state: Mapping[str, Any], *, step: int, best: bool = False) -> Path:
        """Write a checkpoint, with one retry if the system refuses, then delete older ones.

        The best so far also becomes `best.pt`. Files of later steps, which a run that was resumed further back leaves
        behind, are renamed.

        Args:
            state: of the run: plain values and tensors.
            step: updates made.
            best: whether it is the best so far.

        Raises:
            EnvironmentUnfit: it could not be written, twice.
        """
        path = self.checkpoint_path_of_step(step)
        self._clean_folder_and_flush_steps()
        try:
            write_checkpoint(path, state)
        except EnvironmentUnfit as error:
            self.note(f"{error}; trying once more")
            write_checkpoint(path, state)
        if best:
            self._link_checkpoint_as_best(path)
        self.on_written(state, best)
        self._delete_older_checkpoints(step)
        return path

    def _clean_folder_and_flush_steps(self) -> None:
        """Remove what writers that were killed have left, and put the steps that a checkpoint counts on the disk."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(".*.tmp"):
                path.unlink()
        if self.counted is not None:
            flush_to_disk(self.counted)

    def _link_checkpoint_as_best(self, path: Path) -> None:
        """Give the file a second name; where a file system has no links, copy it."""
        temporary = self.folder / f".{BEST}.{os.getpid()}.tmp"
        try:
            temporary.unlink(missing_ok=True)
            try:
                os.link(path, temporary)
            except OSError:
                shutil.copyfile(path, temporary)
            os.replace(temporary, self.folder / BEST)
        except OSError as error:
            raise EnvironmentUnfit(
                f"cannot keep {path} as {BEST}: {error.strerror or error}; free some space or choose another "
                "--output-dir"
            ) from error

    def _delete_older_checkpoints(self, step: int) -> None:
        with contextlib.suppress(OSError):  # what cannot be removed costs space, not the run
            for number, path in self._steps_and_paths_newest_first():
                if number > step:
                    path.replace(path.with_name(path.name + ASIDE))
            for _, path in self._steps_and_paths_newest_first()[self.keep_last :]:
                path.unlink()

    def _steps_and_paths_newest_first(self) -> list[tuple[int, Path]]:
        """Return step and path of each checkpoint, newest first."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        matches = (match for match in map(NAME.fullmatch, names) if match)
        return sorted(((int(match[1]), self.folder / match[0]) for match in matches), reverse=True)

    def read_newest_path_state_and_notes(
        self, *, device: torch.device | str = "cpu"
    ) -> tuple[Path, dict[str, Any], list[str]] | None:
        """Read the newest checkpoint that is whole; None where there has never been one.

        Returns its path, its state, and a line for each newer one that was passed over. If none can be read, or the
        newest is of a newer ampcompare, it raises.

        Args:
            device: on which tensors are placed.

        Raises:
            CheckpointError: none can be read, or the newest is of a newer ampcompare.
        """
        notes: list[str] = []
        best = self.folder / BEST
        for path in (
            *(path for _, path in self._steps_and_paths_newest_first()),
            *([best] if best.exists() else []),
        ):
            try:
                return path, read_checkpoint(path, device=device), notes
            except NewerCheckpoint:
                raise
            except CheckpointError as error:
                notes.append(f"{error}; falling back to the one before")
        if notes:
            raise CheckpointError(
                f"none of {len(notes)} checkpoints in {self.folder} can be read: {notes[0]}"
            )
        return None


def copy_to_host(state: Any) -> Any:
    """Return a copy of plain data with every tensor copied into memory of the host; one tensor once."""
    seen: dict[int, Tensor] = {}

    def copy_tensor(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return seen[id(tensor)]

    return map_tensors_in_tree(state, copy_tensor)
