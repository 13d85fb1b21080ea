"""The files that a script writes and reads, so that a cell that reads what another one wrote is noticed.

Most files are seen by an audit hook on `open`. `torch.save`, TorchScript and safetensors open theirs outside of Python.

Where the process belongs to a cell, each file is also listed in the folder of the cell when it is first opened, so that
processes that the script has started add theirs, and other cells can look there.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._script import RecursiveScriptModule

from ampcompare.base.files.loaded_code import CODE, is_users_code, on_file_events
from ampcompare.guards.events import Layer, Subscriptions
from ampcompare.guards.import_hook import ImportHook
from ampcompare.records.opened_files import OPENED

__all__ = ["WrittenFiles"]

MAX_FILES = 200
MAX_READ = 5000
MAX_AGE_SECONDS = 30 * 86400.0  # an older file is data, and none that a cell of this comparison wrote
WRITING = os.O_WRONLY | os.O_RDWR
CELL_DIR = "AMPCOMPARE_CELL_DIR"
CELL_STARTED = "AMPCOMPARE_CELL_STARTED"
SAFETENSORS = ("safetensors.torch", "safetensors.numpy")
# Of other programs, which read and write them for themselves: compiled kernels, downloads, trackers of experiments.
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME")
IN_HOME = (".cache", ".triton", ".config", ".nv", ".keras", ".netrc")
TRACKERS = (f"{os.sep}mlruns{os.sep}", f"{os.sep}wandb{os.sep}")


class WrittenFiles:
    """Notes each file that this process writes or reads from now on, outside the folders that no other cell uses."""

    def __init__(self) -> None:
        self._files: dict[str, None] = {}
        self._read: set[str] = set()
        self._busy: set[int] = set()
        self._own = os.path.join(os.environ[CELL_DIR], "") if CELL_DIR in os.environ else None
        self._started = float(os.environ.get(CELL_STARTED, time.time()))
        # Found now: a hook that looks for the folder of temporary files waits for the lock of who looks for it.
        self._temporary = os.path.join(tempfile.gettempdir(), "tmp")
        self._here = os.path.join(os.getcwd(), "")
        home = os.path.expanduser("~")
        found = [*(os.environ.get(name) for name in CACHES), *(os.path.join(home, name) for name in IN_HOME)]
        self._caches = tuple(path for path in found if path)
        self._events = Subscriptions(Layer.RECORD)
        for module in (torch, torch.serialization):
            self._events.wrap(module, "save", functools.partial(self._save, "f"))
        # `torch.jit.save` calls this method.
        self._events.wrap(RecursiveScriptModule, "save", functools.partial(self._save, "f"))
        self._events.wrap(torch.jit, "load", functools.partial(self._load, "f"))
        hooks = {name: functools.partial(self._watch_safetensors, name) for name in SAFETENSORS}
        self._imports = ImportHook({"safetensors": self._watch_safe_open, **hooks})
        self._imports.begin()
        self._end_audit = on_file_events(self._audit)

    def end(self) -> list[str]:
        """Watch no longer, and return the full paths of those written, in the order of their first opening."""
        self._end_audit()
        self._events.end()
        self._imports.end()
        return list(self._files)

    def _watch_safetensors(self, name: str) -> None:
        self._events.wrap(sys.modules[name], "save_file", functools.partial(self._save, "filename"))

    def _watch_safe_open(self) -> None:
        self._events.wrap(sys.modules["safetensors"], "safe_open", functools.partial(self._load, "filename"))

    def _save(self, keyword: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the file of a function whose second argument, of that name, says where to save the first."""
        self._note(args[1] if len(args) > 1 else kwargs.get(keyword))
        return original(*args, **kwargs)

    def _load(self, keyword: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the file of a function whose first argument, of that name, says what to load."""
        self._note_read(args[0] if args else kwargs.get(keyword))
        return original(*args, **kwargs)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a file that is opened, or gets another's name.

        It runs inside any `open` of the process, so it takes no lock.
        """
        if threading.get_ident() in self._busy:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(flags, int) and flags & WRITING) or (isinstance(mode, str) and set(mode) & set("wax+"))
            if not writes or (isinstance(flags, int) and flags & os.O_RDWR and not flags & os.O_TRUNC):
                self._note_read(path)
            if writes:
                self._note(path)
        elif event == "os.rename":
            self._note(arguments[1])

    def _note(self, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike) or len(self._files) >= MAX_FILES:
            return
        file = os.path.abspath(os.fsdecode(path))
        if file in self._files or self._is_private(file) or "__pycache__" in file:
            return
        self._files[file] = None
        self._list({"wrote": file})

    def _note_read(self, path: Any) -> None:
        """Note a file that another cell may have written, and what an earlier attempt has left in its own folder."""
        if self._own is None or not isinstance(path, str | bytes | os.PathLike) or len(self._read) >= MAX_READ:
            return
        file = os.path.abspath(os.fsdecode(path))
        if file in self._read or file in self._files or file.endswith(CODE):
            return
        is_own = file.startswith(self._own)
        if is_own and os.path.dirname(file) == self._own.rstrip(os.sep) and _is_ampcompares(os.path.basename(file)):
            return
        if not is_own and (self._is_private(file) or file.startswith(self._caches) or not is_users_code(file)):
            return
        if any(part in file for part in TRACKERS):
            return
        try:
            found = os.stat(file)
        except OSError:
            return
        if not stat.S_ISREG(found.st_mode) or not found.st_size or found.st_mtime < self._started - MAX_AGE_SECONDS:
            return
        if is_own and found.st_mtime >= self._started:
            return
        self._read.add(file)
        self._list({"resumed" if is_own else "read": file})

    def _is_private(self, file: str) -> bool:
        if file.startswith(("/dev/", "/proc/", "/sys/")) or (self._own is not None and file.startswith(self._own)):
            return True
        return file.startswith(self._temporary) and not file.startswith(self._here)

    def _list(self, line: dict[str, str]) -> None:
        if self._own is None:
            return
        thread = threading.get_ident()
        self._busy.add(thread)
        try:
            descriptor = os.open(self._own + OPENED, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, json.dumps(line).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError:  # a full disk must not end the training
            pass
        finally:
            self._busy.discard(thread)


def _is_ampcompares(name: str) -> bool:
    """Return whether a file in the folder of a cell is one that ampcompare writes."""
    return name.endswith((".json", ".jsonl", ".txt", ".log")) and name.startswith(
        ("config.", "record.", "steps.", "epochs.", "script", "log.", "loaded.", "opened.", "progress.", "launcher.")
    )
