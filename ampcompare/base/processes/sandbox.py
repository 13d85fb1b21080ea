"""Let what processes write land in a folder of its own, wherever they write, while the user's files stay as they are.

A sandbox guards against accidents. It holds for the processes that are started in it and all that they start, for what
any library, shell or compiled program writes, and where processes are killed: the user's files are never opened for
writing (`overlay.py`). `/proc`, `/sys`, `/dev` and `/run` stay those of the machine, and so do sockets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ampcompare.base.processes.overlay import LAYERS, NAMES, VARIABLE
from ampcompare.base.processes.start import start_command

__all__ = ["Sandbox", "Written", "can_sandbox", "sandboxed"]

LEFT_OUT = ("__pycache__",)
OF_TEMPFILE = ("tmp", "pymp-", "torchelastic_")  # names of temporary files that a process has left behind
PROBE_SECONDS = 20.0


@dataclass(frozen=True)
class Written:
    """A file that a process in a sandbox has written.

    Attributes:
        path: where the process wrote it.
        how: new; changed (the user has a file there, which is as it was); removed.
        place: where it lies now; "" if it was not kept.
    """

    path: str
    how: Literal["new", "changed", "removed"]
    place: str = ""


@dataclass
class Sandbox:
    """Processes that are sandboxed together.

    Attributes:
        environment: variables that sandbox a process of ampcompare which is started with them, and its children.
        written: what they have written, by path; known at the end.
    """

    environment: dict[str, str]
    written: list[Written] = field(default_factory=list)


@contextlib.contextmanager
def sandboxed(
    store: Path, *, shared: Sequence[Path] = (), roots: Sequence[Path] = (), target: Path | None = None
) -> Iterator[Sandbox]:
    """Yield what sandboxes the processes of a block; when they have ended, move what they have written.

    What they have written does not count among the files of `Sandbox` if it is compiled Python, or was left behind by
    `tempfile`.

    Args:
        store: a new folder on a local disk, below none of the `shared` ones; it is removed at the end.
        shared: folders and files that stay the real ones for the processes.
        roots: further folders of the user where the processes may write; those that they start in need not be named.
        target: a folder that gets the files, by their paths below the working directory, or by their full paths; None
            removes them.
    """
    store.mkdir(parents=True)
    place, here = os.path.realpath(store), os.getcwd()
    request = {"store": place, "shared": [*map(os.path.realpath, shared)], "roots": [*map(os.path.realpath, roots)]}
    trial = Sandbox({VARIABLE: json.dumps(request)} if can_sandbox(os.path.dirname(place)) else {})
    try:
        yield trial
    finally:
        trial.written = _collect(place, None if target is None else os.path.realpath(target), here)


def can_sandbox(folder: str) -> bool:
    """Return whether processes whose store is in a folder can be sandboxed here; it tries that once for each disk."""
    disk = os.stat(folder).st_dev
    if disk not in _tried:
        _tried[disk] = sys.platform.startswith("linux") and _try(folder)
    return _tried[disk]


_tried: dict[int, bool] = {}


def _try(folder: str) -> bool:
    store = tempfile.mkdtemp(prefix=".sandbox.", dir=folder)
    request = {"store": store, "shared": [], "roots": []}
    try:
        command = start_command("ampcompare.base.processes.overlay")
        environment = {**os.environ, VARIABLE: json.dumps(request)}
        done = subprocess.run(command, env=environment, capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        _remove_tree(store)
    return done.returncode == 0


def _collect(store: str, target: str | None, base: str) -> list[Written]:
    """Move what was written out of a store, and remove the store."""
    layers = Path(store, LAYERS)
    found: list[Written] = []
    for root, upper in (json.loads(layers.read_text()) if layers.exists() else {}).items():
        for folder, folders, names in os.walk(upper):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            for name in names:
                place = os.path.join(folder, name)
                path = os.path.normpath(os.path.join(root, os.path.relpath(place, upper)))
                how = None if _is_temporary(path) else _how_written(place, path)
                if how is None or (upper.endswith(NAMES) and how != "new"):
                    continue
                there = "" if target is None or how == "removed" else _place_for(path, target, base)
                if there:
                    os.makedirs(os.path.dirname(there), exist_ok=True)
                    shutil.move(place, there)
                found.append(Written(path, how, there))
    _remove_tree(store)
    return sorted(found, key=lambda one: one.path)


def _is_temporary(path: str) -> bool:
    """Return whether a path is one that a process has got from `tempfile`, or lies in such a folder."""
    folder = os.path.join(tempfile.gettempdir(), "")
    name = path.removeprefix(folder).partition(os.sep)[0]
    return path.startswith(folder) and name.startswith(OF_TEMPFILE) and not os.path.lexists(folder + name)


def _how_written(place: str, path: str) -> Literal["new", "changed", "removed"] | None:
    """Return what was done with a path, of which a layer holds what lies at `place`; None if that is no file."""
    facts, exists = os.lstat(place), os.path.lexists(path)
    if stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0:
        return "removed" if exists else None
    if not stat.S_ISREG(facts.st_mode) and not stat.S_ISLNK(facts.st_mode):
        return None
    return "changed" if exists else "new"


def _place_for(path: str, target: str, base: str) -> str:
    is_near = path.startswith(os.path.join(base, ""))
    return os.path.join(target, os.path.relpath(path, base) if is_near else path.lstrip("/"))


def _remove_tree(folder: str) -> None:
    """Remove a store; overlays leave folders that nobody may read."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(path, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)
