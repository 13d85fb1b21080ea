"""The checkpoints of one run in one folder: the last few, the best, and how damaged ones are skipped."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.errors import CheckpointError, EnvironmentUnfit
from ampcompare.base.files.write import flush_to_disk
from ampcompare.base.tensors.tree import map_tree
from ampcompare.training.checkpoint.store.file import write_checkpoint
from ampcompare.training.checkpoint.store.sharded import STATE_FILE, SUFFIX, read_saved

__all__ = ["BEST", "BackgroundFolder", "CheckpointFolder", "snapshot"]

BEST = "best.pt"
BEST_SHARDS = f"best{SUFFIX}"
REPLACED = ".old"
NAME = re.compile(rf"step-(\d{{8,}})(?:\.pt|({re.escape(REPLACED)})?{re.escape(SUFFIX)})")
ASIDE = ".aside"


class CheckpointFolder:
    """Keeps the checkpoints of one run: `step-00000120.pt` by number of updates, and `best.pt`.

    One whose shards the ranks wrote is a folder, `step-00000120.dcp`, and the best of these `best.dcp`.

    Args:
        keep_last: how many of the newest are kept. An older one is deleted only after a newer one was read back.
        note: receives a line for what the caller should know that is not an error.
        on_written: called with the state, and whether it is the best, once it is written; it may write more files here.
        counted: another file that a checkpoint depends on; flushed to the disk before the checkpoint is written.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        note: Callable[[str], None] = lambda text: None,
        on_written: Callable[[Mapping[str, Any], bool], None] = lambda state, best: None,
        counted: Path | None = None,
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}, but at least one checkpoint must be kept")
        self.folder = folder
        self.keep_last = keep_last
        self.note = note
        self.on_written = on_written
        self.counted = counted

    def path_of(self, step: int) -> Path:
        """Return where the checkpoint after `step` updates lies."""
        return self.folder / f"step-{step:08d}.pt"

    def save(self, state: Mapping[str, Any], *, step: int, best: bool = False) -> Path:
        """Write a checkpoint, with one retry if the system refuses, then delete older ones.

        Args:
            step: updates made; the newest checkpoint is the one with most. Files of later steps, which a run that was
                resumed further back leaves behind, are renamed.
            best: this is the best so far, and also becomes `best.pt`.

        Raises:
            CheckpointError: the state holds what a checkpoint cannot.
            EnvironmentUnfit: it could not be written; those that were there are as they were.
        """
        path = self.path_of(step)
        self._prepare()
        try:
            write_checkpoint(path, state)
        except EnvironmentUnfit as error:
            self.note(f"{error}; trying once more")
            write_checkpoint(path, state)
        if best:
            self._keep_as_best(path)
        self.on_written(state, best)
        self._tidy(step, path)
        return path

    def begin_sharded(self, step: int) -> Path:
        """Return an empty folder for the shards after `step` updates; `finish_sharded` gives it its name.

        Raises:
            EnvironmentUnfit: it cannot be made.
        """
        self._prepare()
        temporary = self.folder / f".step-{step:08d}{SUFFIX}.{os.getpid()}.tmp"
        with _as_unsaved(f"cannot make {temporary}"):
            temporary.mkdir(parents=True)
        return temporary

    def finish_sharded(self, temporary: Path, state: Mapping[str, Any], *, step: int, best: bool = False) -> Path:
        """Complete a folder with the shards of all ranks, give it its name, and delete older checkpoints.

        Args:
            temporary: as `begin_sharded` returned it.
            state: as `store.sharded` describes it.
            step, best: as for `save`.

        Raises:
            CheckpointError, EnvironmentUnfit: as for `save`.
        """
        write_checkpoint(temporary / STATE_FILE, state)
        path = self.path_of(step).with_suffix(SUFFIX)
        replaced = path.with_suffix(f"{REPLACED}{SUFFIX}")
        with _as_unsaved(f"cannot write {path}"):
            if path.exists():  # a folder cannot replace another in one move: until the new one is there, both are found
                _remove(replaced)
                path.replace(replaced)
            temporary.replace(path)
            flush_to_disk(path / STATE_FILE)
        if best:
            self._keep_as_best(path)
        self._tidy(step, path)
        return path

    def _prepare(self) -> None:
        """Remove what writers that were killed have left, and put the steps that a checkpoint counts on the disk."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(".*.tmp"):
                _remove(path)
        if self.counted is not None:
            flush_to_disk(self.counted)

    def _keep_as_best(self, path: Path) -> None:
        """Give the file, or each file of the folder, a second name; where a file system has no links, copy it."""
        name, other = (BEST_SHARDS, BEST) if path.suffix == SUFFIX else (BEST, BEST_SHARDS)
        temporary = self.folder / f".{name}.{os.getpid()}.tmp"
        with _as_unsaved(f"cannot keep {path} as {name}"):
            try:
                _remove(temporary)
                if path.is_dir():
                    shutil.copytree(path, temporary, copy_function=_link_or_copy)
                    _remove(self.folder / name)
                else:
                    _link_or_copy(path, temporary)
                os.replace(temporary, self.folder / name)
                _remove(self.folder / other)
            except OSError:
                with contextlib.suppress(OSError):
                    _remove(temporary)
                raise

    def _tidy(self, step: int, saved: Path) -> None:
        with contextlib.suppress(OSError):  # what cannot be removed costs space, not the run
            for number, path in self._files():
                if number > step:
                    aside = path.with_name(path.name + ASIDE)
                    _remove(aside)
                    path.replace(aside)
                elif number == step and path != saved:
                    _remove(path)
            for _, path in self._files()[self.keep_last :]:
                _remove(path)

    def _files(self) -> list[tuple[int, Path]]:
        """Return step and path of each checkpoint, newest first."""
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        matches = [match for match in map(NAME.fullmatch, names) if match]
        matches.sort(key=lambda match: (int(match[1]), match[2] is None, match[0]), reverse=True)
        return [(int(match[1]), self.folder / match[0]) for match in matches]

    def newest(self, *, device: torch.device | str = "cpu") -> tuple[Path, dict[str, Any], list[str]] | None:
        """Read the newest checkpoint that is whole; None where there has never been one.

        Returns:
            Its path, its state, and a line for each newer one that was passed over.

        Raises:
            CheckpointError: there are checkpoints, and none can be read; or the newest is of a newer ampcompare.
        """
        notes: list[str] = []
        candidates = [path for _, path in self._files()]
        candidates += [self.folder / name for name in (BEST, BEST_SHARDS) if (self.folder / name).exists()]
        for path in candidates:
            try:
                return path, read_saved(path, device=device), notes
            except CheckpointError as error:
                if "upgrade" in str(error):
                    raise
                notes.append(f"{error}; falling back to the one before")
        if notes:
            raise CheckpointError(f"none of {len(notes)} checkpoints in {self.folder} can be read: {notes[0]}")
        return None


@contextlib.contextmanager
def _as_unsaved(failure: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentUnfit(
            f"{failure}: {error.strerror or error}; free some space or choose another --output-dir"
        ) from error


def _link_or_copy(path: str | Path, target: str | Path) -> None:
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def snapshot(state: Any) -> Any:
    """Return a copy of plain data with every tensor copied into memory of the host; one tensor once."""
    seen: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in seen:
            seen[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return seen[id(tensor)]

    return map_tree(state, copy)


class BackgroundFolder:
    """Saves into a `CheckpointFolder` by a thread; at most one checkpoint is on its way.

    An error of a save surfaces at the next `save`, or at `wait`.
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
