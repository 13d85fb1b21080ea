"""Run directories: whether one can be made and written, the lock for one command at a time, and which there are."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.base.files.read import FileFault, read_json
from ampcompare.base.files.write import write_atomically
from ampcompare.base.secrets import hide
from ampcompare.launch.base import Launcher
from ampcompare.launch.cell_files import remove_leftovers
from ampcompare.records.run import dump_json

__all__ = [
    "DEFAULT_FOLDER",
    "LOCK",
    "OWNER",
    "RunFolder",
    "check_output_dir",
    "check_output_name",
    "describe_run",
    "find_runs",
    "newest_run",
    "newest_runs",
    "owned",
]

DEEPEST = Path("cells", "0" * 12, "checkpoints.previous", "0" * 64)  # as long as any name below a run directory
MAX_SHOWN = 200
LOCK = ".lock"
OWNER = ".owner.json"
POLL_SECONDS = 0.2
NAMING_SECONDS = 2.0  # an owner needs a moment to write its details
MAX_SHOWN_COMMAND = 300
DEFAULT_FOLDER = Path("runs")
CHANGED = ("report.json", "plan.json", "cells")  # which every command writes that adds to a run directory
RESULTS = ("completed", "diverged")


def check_output_name(folder: Path) -> None:
    """Check that a run directory of this name, with its files, can exist.

    Raises:
        ConfigError: it is too long, or below a file.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(folder.absolute() / DEEPEST)
    except (OSError, ValueError) as error:
        raise _cannot_make(folder, error) from None


def check_output_dir(folder: Path) -> None:
    """Create the run directory and check that files can be written there.

    Raises:
        ConfigError: it cannot be made or written.
    """
    check_output_name(folder)
    try:
        # One by one from the top: pathlib recurses once per level.
        missing = list(itertools.takewhile(lambda path: not os.path.isdir(path), (folder, *folder.parents)))
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
    except OSError as error:
        raise _cannot_make(folder, error) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the output folder {_shown(folder)} is not writable; choose another --output-dir")


def _cannot_make(folder: Path, error: OSError | ValueError) -> ConfigError:
    why = getattr(error, "strerror", None) or error  # a ValueError is about a null byte
    return ConfigError(f"cannot make the output folder {_shown(folder)}: {why}; choose another --output-dir")


def _shown(folder: Path) -> str:
    name = str(folder)
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}... ({len(name):,} characters)"


@contextlib.contextmanager
def owned(
    folder: Path,
    launcher: Launcher,
    *,
    command: str = "",
    wait_seconds: float = 0.0,
    note: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Make the run directory and hold its lock; of processes that take part in one command, the main one does.

    The system releases the lock of a process that dies, so that a dead owner does not block others. Reading needs no
    lock.

    Args:
        launcher: of the cells, which knows whether this process is the main one.
        command: what to show to others that want the folder.
        wait_seconds: how long to wait for another owner to end.
        note: called with the owner that it waits for.

    Raises:
        ConfigError: the folder cannot be made or written, or another command holds it.
    """
    if not launcher.is_main:
        yield
        return
    check_output_dir(folder)
    lock = FileLock(folder.resolve() / LOCK)
    try:
        _acquire(lock, folder, wait_seconds, note)
    except OSError as error:
        raise ConfigError(
            f"the output folder {folder} cannot be locked: {error.strerror or error}; choose another --output-dir"
        ) from None
    try:
        remove_leftovers(folder)  # left by processes that have ended: no other process may write here now
        write_atomically(folder / OWNER, dump_json(_this_process(command)))
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def _acquire(lock: FileLock, folder: Path, wait_seconds: float, note: Callable[[str], None] | None) -> None:
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=0)
        return
    owner = _name_owner(folder)
    if wait_seconds > 0:
        if note is not None:
            note(f"{folder} is in use by {owner}; waiting for it to end")
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=-1 if wait_seconds == float("inf") else wait_seconds, poll_interval=POLL_SECONDS)
            return
        owner = _name_owner(folder)
    waited = f" after {wait_seconds:g} s" if wait_seconds > 0 else ""
    raise ConfigError(
        f"{folder} is in use{waited} by {owner}; wait for it to end (--wait does that), or choose another --output-dir"
    )


def _this_process(command: str) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command or " ".join(hide(sys.argv)),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _name_owner(folder: Path) -> str:
    """Return who holds the folder, from the details that the owner wrote; a file left by an earlier, dead owner does
    not count."""
    end = time.monotonic() + NAMING_SECONDS
    while True:
        try:
            owner = read_json(folder / OWNER)
            pid, host = int(owner["pid"]), str(owner["host"])
            if host != socket.gethostname() or psutil.pid_exists(pid):
                said = f"process {pid} on {host}, since {owner['since']}: {owner['command']}"
                return said if len(said) <= MAX_SHOWN_COMMAND else f"{said[:MAX_SHOWN_COMMAND]}..."
        except (FileFault, KeyError, TypeError, ValueError, OverflowError):
            pass
        if time.monotonic() >= end:
            return "another command that left no details"
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run directory in brief.

    Attributes:
        changed: when a cell or a report was last written.
        cells: that completed or diverged, and that were planned; the latter None without a plan.
        headline: of its last report; "" where it has none.
        fault: why its files cannot be read; "" if they can.
    """

    path: Path
    changed: datetime
    tag: str = ""
    arms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    cells: tuple[int, int | None] = (0, None)
    headline: str = ""
    fault: str = ""


def find_runs(folder: Path = DEFAULT_FOLDER) -> list[Path]:
    """Return the run directories in a folder and in its folders, the one that changed last first.

    Raises:
        RecordError: the folder cannot be read.
    """
    if not folder.is_dir():
        raise RecordError(
            f"there is no folder {folder}; name a run directory, or the folder that holds run directories"
        )
    try:
        found = {path.parent for pattern in ("*/cells", "*/*/cells") for path in folder.glob(pattern) if path.is_dir()}
    except OSError as error:
        raise RecordError(f"cannot read the folder {folder}: {error.strerror or error}") from None
    return sorted(found, key=lambda path: (-_changed(path), str(path)))


def newest_runs(folder: Path = DEFAULT_FOLDER) -> list[Path]:
    """Return the run directories, at least one, that which changed last first.

    Raises:
        RecordError: there is none.
    """
    found = find_runs(folder) if folder.is_dir() else []
    if not found:
        raise RecordError(f"there is no run directory in {folder.absolute()}; name one, as in: ampcompare report DIR")
    return found


def newest_run(folder: Path = DEFAULT_FOLDER) -> Path:
    """Return the run directory that changed last.

    Raises:
        RecordError: there is none.
    """
    return newest_runs(folder)[0]


def describe_run(path: Path) -> RunFolder:
    """Return what a run directory holds; one with damaged files has a fault instead of facts."""
    changed = datetime.fromtimestamp(_changed(path)).astimezone()
    try:
        plan = _document(path / "plan.json")
        report = _document(path / "report.json")
        if plan:
            return _planned(path, changed, plan, report)
        records = [_document(record) for record in sorted(path.glob("cells/*/record.json"))]
        arms = tuple(dict.fromkeys(str(record.get("arm")) for record in records))
        seeds = {record["config"]["recipe"]["seed"] for record in records}
        return RunFolder(
            path, changed, "", arms, tuple(sorted(map(int, seeds))), (sum(map(_has_result, records)), None)
        )
    except (FileFault, KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if isinstance(error, FileFault) else "a file has unexpected contents"
        return RunFolder(path, changed, fault=f"cannot be read: {why}")


def _planned(path: Path, changed: datetime, plan: Mapping[str, Any], report: Mapping[str, Any]) -> RunFolder:
    cells = {str(label): str(cell) for label, cell in plan["cells"].items()}
    done = sum(_is_result(path / "cells" / cell / "record.json") for cell in cells.values())
    headline = report.get("headline")
    return RunFolder(
        path,
        changed,
        str((plan.get("terms") or {}).get("tag") or ""),
        tuple(map(str, plan["arms"])),
        tuple(sorted({int(label.rpartition("@")[2]) for label in cells})),
        (done, len(cells)),
        str(headline[0]) if isinstance(headline, list) and headline else "",
    )


def _is_result(record: Path) -> bool:
    """Return whether a cell was trained to its end; one whose record is damaged is not."""
    try:
        return _has_result(_document(record))
    except FileFault:
        return False


def _has_result(record: Mapping[str, Any]) -> bool:
    return record.get("status") in RESULTS


def _document(path: Path) -> Mapping[str, Any]:
    """Return a JSON object; empty where there is no such file."""
    if not os.path.lexists(path):
        return {}
    found = read_json(path)
    if not isinstance(found, dict):
        raise FileFault(f"{path.name} is not a JSON object")
    return found


def _changed(path: Path) -> float:
    times = [0.0]
    for name in CHANGED:
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)
