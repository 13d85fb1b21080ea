"""Follow which files of checkpoints a script saves, moves and loads, through which line, and what they hold.

`torch.save` and `pickle.dump` to a named file or to a buffer that goes to a file, safetensors, and folders of
`torch.distributed.checkpoint`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.import_hook import ImportHook
from ampcompare.base.location import Location, user_location
from ampcompare.base.patches import Subscriptions
from ampcompare.settings.resume_trace import STATISTICS, TraceRowKind

DEPTH = 6  # of containers in what is saved
FOLDERS = "torch.distributed.checkpoint"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class SavedFilesWatch:
    """Calls `note` with the kind of a row and its values for each file that this process saves, moves or loads.

    Args:
        note: gets `Row.SAVE` when a file is complete; that of a buffer is about to be written.
        before_save: gets the path of a file that is about to be written.
    """

    def __init__(
        self, note: Callable[..., None], before_save: Callable[[str], None] = lambda path: None
    ) -> None:
        self._note, self._before_save = note, before_save
        self._buffer: dict[str, Any] | None = None  # what was saved into one last, and is in no file yet
        self._thread = threading.get_ident()
        self._inside = False
        self._waiting: list[Any] = []  # futures of saves that other threads make

    def install(self, events: Subscriptions) -> None:
        """Follow until the process ends."""
        events.wrap(torch, "save", self._note_saved_file)
        events.wrap(torch, "load", self._note_loaded_file)
        events.wrap(pickle, "dump", self._note_saved_file)
        events.wrap(pickle, "load", self._note_loaded_file)
        for name in ("replace", "rename"):  # which pathlib and shutil call
            events.wrap(os, name, self._note_moved_file)
        imports = ImportHook(
            {
                "safetensors": functools.partial(self._follow_safetensors, events, "safetensors"),
                "safetensors.torch": functools.partial(self._follow_safetensors, events, "safetensors.torch"),
                FOLDERS: functools.partial(self._follow_checkpoint_folders, events),
            }
        )
        imports.begin()
        events.call_at_end(imports.end)
        sys.addaudithook(functools.partial(self._note_file_event_of_audit, events))

    def have_other_threads_saved(self) -> bool:
        """Return whether no other thread still saves."""
        return all(each.done() for each in self._waiting)

    @contextlib.contextmanager
    def _within_one_file(self) -> Iterator[None]:
        """Take what is saved or loaded inside for parts of one file: `torch.save` pickles, folders have many files."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    # Files of torch and pickle.

    def _note_saved_file(self, inner: Any, value: Any, file: Any, *args: Any, **options: Any) -> Any:
        if self._inside:
            return inner(value, file, *args, **options)
        name = _name_of_file_object(file)
        found = {"line": script_location_text(), "holds": sorted(set(kinds_inside_saved_object(value)))}
        with self._within_one_file():
            if name is not None:
                self._before_save(os.path.abspath(name))
            result = inner(value, file, *args, **options)
        if name is not None:
            self._note(TraceRowKind.SAVE, path=os.path.abspath(name), **found)
        elif found["holds"]:
            self._buffer = found
        return result

    def _note_loaded_file(self, inner: Any, file: Any, *args: Any, **options: Any) -> Any:
        if self._inside:
            return inner(file, *args, **options)
        with self._within_one_file():
            result = inner(file, *args, **options)
        if (name := _name_of_file_object(file)) is not None:
            self._note(TraceRowKind.LOAD, path=os.path.abspath(name), line=script_location_text())
        return result

    def _note_moved_file(self, inner: Any, source: Any, target: Any, *args: Any, **options: Any) -> Any:
        before = os.path.abspath(os.fsdecode(source))
        result = inner(source, target, *args, **options)
        self._note(TraceRowKind.MOVE, path=before, to=os.path.abspath(os.fsdecode(target)))
        return result

    def _note_file_event_of_audit(self, events: Subscriptions, event: str, args: tuple[Any, ...]) -> None:
        """Learn which file gets what was saved into a buffer, and where a file is moved across file systems."""
        if event == "open" and self._buffer is not None and events.active:
            if threading.get_ident() == self._thread and is_open_for_writing(args) and not self._inside:
                found, self._buffer = self._buffer, None
                self._note(TraceRowKind.SAVE, path=os.path.abspath(os.fsdecode(args[0])), **found)
        elif event == "shutil.move" and events.active:
            source, target = (os.path.abspath(os.fsdecode(each)) for each in args[:2])
            if os.path.isdir(target):
                target = os.path.join(target, os.path.basename(source))
            self._note(TraceRowKind.MOVE, path=source, to=target)

    # Other formats.

    def _follow_safetensors(self, events: Subscriptions, name: str) -> None:
        module: Any = sys.modules[name]

        def save(inner: Any, tensors: Any, filename: Any, *args: Any, **options: Any) -> Any:
            path = os.path.abspath(os.fsdecode(filename))
            self._before_save(path)
            result = inner(tensors, filename, *args, **options)
            holds = sorted(
                {"model", *(["buffers"] if any(name.endswith(STATISTICS) for name in tensors) else [])}
            )
            self._note(TraceRowKind.SAVE, path=path, line=script_location_text(), holds=holds)
            return result

        def load(inner: Any, filename: Any, *args: Any, **options: Any) -> Any:
            if self._inside:  # `safetensors.torch` has the name of `safetensors`, which is followed already
                return inner(filename, *args, **options)
            with self._within_one_file():
                result = inner(filename, *args, **options)
            self._note(
                TraceRowKind.LOAD, path=os.path.abspath(os.fsdecode(filename)), line=script_location_text()
            )
            return result

        if name == "safetensors.torch":  # whose functions look these names up when they are called
            events.wrap(module, "serialize_file", save)
        events.wrap(module, "safe_open", load)

    def _follow_checkpoint_folders(self, events: Subscriptions) -> None:
        """Follow `torch.distributed.checkpoint`, of which a folder is one checkpoint."""
        module: Any = sys.modules[FOLDERS]

        def path_of(options: dict[str, Any], kind: str) -> str | None:
            given = options.get("checkpoint_id") or getattr(options.get(kind), "path", None)
            return None if given is None else os.path.abspath(os.fspath(given))

        def save(inner: Any, state: Any, *args: Any, **options: Any) -> Any:
            path = path_of(options, "storage_writer")
            line, holds = script_location_text(), sorted(set(kinds_inside_saved_object(state)))
            if path is not None:
                self._before_save(path)
            with self._within_one_file():
                result = inner(state, *args, **options)
            if path is not None:
                if hasattr(result, "done"):
                    self._waiting.append(result)
                self._note(TraceRowKind.SAVE, path=path, line=line, holds=holds)
            return result

        def load(inner: Any, state: Any, *args: Any, **options: Any) -> Any:
            with self._within_one_file():
                result = inner(state, *args, **options)
            if (path := path_of(options, "storage_reader")) is not None:
                self._note(TraceRowKind.LOAD, path=path, line=script_location_text())
            return result

        for name, around in (("save", save), ("async_save", save), ("load", load)):
            events.wrap(module, name, around)


def is_open_for_writing(args: tuple[Any, ...]) -> bool:
    """Return whether the arguments of the audit event "open" are those of a file, by name, that is to be written."""
    path, mode, flags = args
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    return any(each in mode for each in "wax+") if isinstance(mode, str) else bool((flags or 0) & WRITES)


def script_location_text() -> str:
    """Return file and line of the script that led here, or of a library if no line of the script did."""
    found: Location = user_location()
    found = found.caller or found
    return f"{os.path.basename(found.file)}:{found.line}"


def _name_of_file_object(file: Any) -> str | None:
    kinds = (str, bytes, os.PathLike)  # of which a path has a `name` too, without its folder
    name = file if isinstance(file, kinds) else getattr(file, "name", None)
    return os.fsdecode(name) if isinstance(name, kinds) else None


def kinds_inside_saved_object(value: Any, depth: int = DEPTH) -> Iterator[str]:
    """Yield what a saved object holds, as far as its form tells: the state of an optimizer, a scaler, a generator."""
    if isinstance(value, dict):
        keys = set(value)
        if {"state", "param_groups"} <= keys:
            yield "optimizer"
            return
        if {"scale", "growth_factor"} <= keys or any(str(key).startswith("loss_scaler") for key in keys):
            yield "scaler"
            return
        if "last_epoch" in keys or "_last_lr" in keys:
            yield "scheduler"
            return
        if value and all(isinstance(one, Tensor) for one in value.values()):
            yield "model"
            if any(str(key).endswith(STATISTICS) for key in keys):
                yield "buffers"
        for one in value.values() if depth else ():
            yield from kinds_inside_saved_object(one, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for one in value:
            yield from kinds_inside_saved_object(one, depth - 1)
    elif isinstance(value, Tensor) and value.dtype is torch.uint8 and value.dim() == 1:
        yield "generator"
