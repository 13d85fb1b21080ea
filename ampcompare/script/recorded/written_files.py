"""The files that a script writes, so that two cells that write the same one are told apart.

Most files are seen by an audit hook on `open`. `torch.save`, TorchScript and safetensors open theirs outside of Python.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._script import RecursiveScriptModule

from ampcompare.guards.events import Layer, Point, Subscriptions
from ampcompare.guards.import_hook import ImportHook

__all__ = ["WrittenFiles"]

MAX_FILES = 200
WRITING = os.O_WRONLY | os.O_RDWR
CELL_DIR = "AMPCOMPARE_CELL_DIR"
SAFETENSORS = ("safetensors.torch", "safetensors.numpy")


class WrittenFiles:
    """Notes each file that this process writes from now on, outside the folders that no other cell uses."""

    def __init__(self) -> None:
        self._files: dict[str, None] = {}
        self._ended = False
        own = os.environ.get(CELL_DIR)
        # Found now: a hook that looks for the folder of temporary files waits for the lock of who looks for it.
        self._private = ("/dev/", "/proc/", os.path.join(tempfile.gettempdir(), "tmp"), *([own] if own else []))
        self._events = Subscriptions(Layer.RECORD)
        for module in (torch, torch.serialization):
            self._events.wrap(Point(module, "save"), functools.partial(self._save, "f"))
        # `torch.jit.save` calls this method.
        self._events.wrap(Point(RecursiveScriptModule, "save"), functools.partial(self._save, "f"))
        self._imports = ImportHook({name: functools.partial(self._watch_safetensors, name) for name in SAFETENSORS})
        self._imports.begin()
        sys.addaudithook(self._audit)

    def end(self) -> list[str]:
        """Watch no longer, and return the full paths of the files, in the order of their first opening."""
        if not self._ended:
            self._ended = True
            self._events.end()
            self._imports.end()
        return list(self._files)

    def _watch_safetensors(self, name: str) -> None:
        self._events.wrap(Point(sys.modules[name], "save_file"), functools.partial(self._save, "filename"))

    def _save(self, keyword: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the file of a function whose second argument, of that name, says where to save the first."""
        self._note(args[1] if len(args) > 1 else kwargs.get(keyword))
        return original(*args, **kwargs)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a file that is opened for writing, or gets another's name.

        It runs inside any `open` of the process, so it takes no lock and opens nothing.
        """
        if self._ended:
            return
        if event == "open":
            path, mode, flags = arguments
            if (isinstance(flags, int) and flags & WRITING) or (isinstance(mode, str) and set(mode) & set("wax+")):
                self._note(path)
        elif event == "os.rename":
            self._note(arguments[1])

    def _note(self, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike) or len(self._files) >= MAX_FILES:
            return
        file = os.path.abspath(os.fsdecode(path))
        if not file.startswith(self._private) and "__pycache__" not in file:
            self._files[file] = None
