"""Let what processes write land in a folder of its own, wherever they write, while the user's files stay as they are.

A sandbox guards against accidents. It holds for the processes that are started in it and all that they start, for what
any library, shell or compiled program writes, and where processes are killed: the user's files are never opened for
writing (`overlay.py`). `/proc`, `/sys`, `/dev` and `/run` stay those of the machine, and so do sockets.

Where the machine allows no overlays, the processes run in copies of the folders of the user (`working_copy.py`). That
holds for all paths that begin at the working directory or at the script.
"""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ampcompare.base.environment.variables import SANDBOX
from ampcompare.base.files.temporary import is_bytecode, temporary_root
from ampcompare.base.processes.overlay import LAYERS, NAMES
from ampcompare.base.processes.start import module_command
from ampcompare.base.processes.working_copy import WorkingCopies

WITHOUT_OVERLAYS = (  # where a sandbox is partial
    "this machine allows no overlays, so the script runs in a copy of its folder; what it writes to a full path "
    "elsewhere, as below the home, changes your files"
)
How = Literal["new", "changed", "removed"]
PROBE_SECONDS = 20.0


@dataclass(frozen=True)
class WrittenFile:
    """A file that a process in a sandbox has written at `path`, and the `place` where it lies now, "" if nowhere."""

    path: str
    how: How
    place: str = ""


@dataclass
class Sandbox:
    """Processes that are sandboxed together, by the variables with which they are started.

    Attributes:
        place_of: returns where the processes find a file of the user, if that is not its path.
        is_partial: there are only copies, in which the processes run; what they write to a full path changes the
            user's files.
        written: what they have written, by path; known at the end.
    """

    environment: dict[str, str]
    place_of: Callable[[str], str | None] = lambda path: None
    is_partial: bool = False
    written: list[WrittenFile] = field(default_factory=list)

    def path_seen_in_sandbox(self, path: str) -> str:
        """Return where the processes find a file of the user."""
        return (self.place_of(path) if os.path.isabs(path) else None) or path


@contextlib.contextmanager
def open_sandbox(
    store: Path, *, shared_paths: Sequence[Path] = (), roots: Sequence[Path] = (), target: Path | None = None
) -> Iterator[Sandbox]:
    """Yield what sandboxes the processes of a block; when they have ended, move what they have written.

    Compiled Python, and what `tempfile` has left behind, does not count.

    Args:
        store: a new folder below none of the `shared_paths` ones, which is removed at the end.
        shared_paths: folders and files that stay the real ones for the processes.
        roots: further folders of the user where the processes may write; those that they start in need not be named.
        target: gets the files, by their paths below the working directory, or their full paths; None removes them.

    Raises:
        ConfigError: there can only be copies, and the user's files are too large.
    """
    store.mkdir(parents=True)
    place, here = os.path.realpath(store), os.getcwd()
    if not can_sandbox(os.path.dirname(place)) and can_sandbox(tempfile.gettempdir()):
        place = tempfile.mkdtemp(prefix="ampcompare-sandbox-")
    real, users = [*map(os.path.realpath, shared_paths)], [*map(os.path.realpath, roots)]
    try:
        if can_sandbox(os.path.dirname(place)):
            sandbox, copies = (
                Sandbox({SANDBOX: json.dumps({"store": place, "shared": real, "roots": users})}),
                None,
            )
        else:
            copies = WorkingCopies(place, [os.path.realpath(here), *users], real)
            folder = copies.path_of_copy(os.path.realpath(here))
            sandbox = Sandbox({SANDBOX: json.dumps({"folder": folder})}, copies.path_of_copy, is_partial=True)
        try:
            yield sandbox
        finally:
            found = _files_in_layers(place) if copies is None else copies.written_files()
            sandbox.written = _move_written_files(
                found, None if target is None else os.path.realpath(target), here
            )
    finally:
        for folder in {place, str(store)}:
            remove_sandbox_store(folder)


def can_sandbox(folder: str) -> bool:
    """Return whether processes whose store is in a folder can be sandboxed here; it tries that once for each disk."""
    disk = os.stat(folder).st_dev
    if disk not in _tried:
        _tried[disk] = sys.platform.startswith("linux") and _is_sandbox_possible(folder)
    return _tried[disk]


_tried: dict[int, bool] = {}


def _is_sandbox_possible(folder: str) -> bool:
    store = tempfile.mkdtemp(prefix=".sandbox.", dir=folder)
    request = {"store": store, "shared": [], "roots": []}
    null = subprocess.DEVNULL
    process = None
    try:
        command = module_command("ampcompare.base.processes.overlay")
        environment = {**os.environ, SANDBOX: json.dumps(request)}
        process = subprocess.Popen(command, env=environment, stdin=null, stdout=null, stderr=null)
        return process.wait(PROBE_SECONDS) == 0
    except (OSError, subprocess.TimeoutExpired):
        if process is not None:
            process.kill()
            # a file system that does not answer holds it
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        return False
    finally:
        remove_sandbox_store(store)


def _files_in_layers(store: str) -> Iterator[tuple[str, str, How]]:
    """Yield each file that overlays have written: its path, where it lies, and what was done."""
    for layers in sorted(Path(store).glob(f"*/{LAYERS}"), key=os.path.getmtime):
        for root, upper in json.loads(layers.read_text()).items():
            for folder, folders, names in os.walk(upper):
                folders[:] = [name for name in folders if name != "__pycache__"]
                links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
                for name in [*names, *links]:
                    place = os.path.join(folder, name)
                    path = os.path.normpath(os.path.join(root, os.path.relpath(place, upper)))
                    how = (
                        None
                        if _is_temporary_leftover(path) or is_bytecode(path)
                        else _how_path_was_changed(place, path)
                    )
                    if how is not None and (how == "new" or not upper.endswith(NAMES)):
                        yield path, place, how


def _move_written_files(
    found: Iterable[tuple[str, str, How]], target: str | None, base: str
) -> list[WrittenFile]:
    """Move files into a folder, if any, and return them by path."""
    written = {}
    for path, place, how in found:
        there = ""
        if target is not None and how != "removed":
            is_near = path.startswith(os.path.join(base, ""))
            there = os.path.join(target, os.path.relpath(path, base) if is_near else path.lstrip("/"))
            os.makedirs(os.path.dirname(there), exist_ok=True)
            shutil.move(place, there)
        written[path] = WrittenFile(path, how, there)
    return [written[path] for path in sorted(written)]


def _is_temporary_leftover(path: str) -> bool:
    """Return whether a path belongs to a temporary file or folder of a process; one that was there before does not."""
    root = temporary_root(path)
    return bool(root) and not os.path.lexists(root)


def _how_path_was_changed(place: str, path: str) -> How | None:
    """Return what was done with a path, of which a layer holds what lies at `place`; None if that is no file."""
    facts, exists = os.lstat(place), os.path.lexists(path)
    if stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0:
        is_temporary = bool(temporary_root(path))  # such as a folder of the process that it was forked from
        return "removed" if exists and not is_temporary else None
    if not stat.S_ISREG(facts.st_mode) and not stat.S_ISLNK(facts.st_mode):
        return None
    return "changed" if exists else "new"


def remove_sandbox_store(folder: str) -> None:
    """Remove a store, as far as that is possible; overlays leave folders that nobody may read."""
    for path, folders, _ in os.walk(folder):
        for each in (os.path.join(path, name) for name in folders):
            if not os.path.islink(each):  # it may lead to a folder of the user
                with contextlib.suppress(OSError):
                    os.chmod(each, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
