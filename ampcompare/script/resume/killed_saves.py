"""Kill copies of a process while it saves, each at another point, and keep what each leaves on the disk.

The process is forked behind a step that it saves after. Each copy goes on until its point: the kernel kills it as it is
about to open, write, rename or remove a file, or once it has written so many bytes of one (`RLIMIT_FSIZE`, which holds
for what compiled code writes too). What it has left is copied, and the files are put back as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ampcompare.base.files.temporary import temporary_root
from ampcompare.script.resume.saved_files import is_open_for_writing

SECONDS = 60.0  # that a copy may take
ACKNOWLEDGED = b"."
NAMES = {
    "os.rename": "renames",
    "os.remove": "removes",
    "os.rmdir": "removes",
    "shutil.rmtree": "removes",
    "os.mkdir": "makes",
    "os.link": "links",
    "os.symlink": "links",
    "os.truncate": "truncates",
}
TWO_PATHS = ("os.rename", "os.link", "os.symlink")


@dataclass(frozen=True)
class FileChange:
    """What a process is about to do to files: open and write the first path, unless `how` is another thing."""

    how: str
    paths: tuple[str, ...]

    @property
    def is_write_of_bytes(self) -> bool:
        """Whether bytes are written."""
        return self.how == "writes"


@dataclass(frozen=True)
class KillPoint:
    """Where a copy is killed: before a change, by its number, or once that has written `size` bytes of `whole`."""

    change: int
    size: int | None = None
    whole: int = 0


@dataclass
class KilledCopy:
    """What became of a copy: its changes, and whether it was killed."""

    changes: list[FileChange] = field(default_factory=list)
    is_killed: bool = False
    has_hung: bool = False


class FileChangeReporter:
    """In a copy: says each change of files to the parent before it is made, and dies at a point."""

    def __init__(self, point: KillPoint | None, say: int, hear: int, ignored: Sequence[str]) -> None:
        self._point = point
        self._say = say
        self._hear = hear
        self._ignored = tuple(os.path.join(each, "") for each in ignored)
        self._number = -1
        self._last: FileChange | None = None
        self._inside = False
        import resource  # of POSIX, as `os.fork` is

        self._limits = resource
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.addaudithook(self._see_audit_event)

    def report_write_to_parent(self, path: str) -> None:
        """Follow a file that compiled code is about to write."""
        self._say_change_to_parent(FileChange("writes", (path,)))

    def _see_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._inside:
            return
        if event == "open":
            if is_open_for_writing(args):
                self._say_change_to_parent(FileChange("writes", (os.path.abspath(os.fsdecode(args[0])),)))
        elif event in NAMES and isinstance(args[0], (str, bytes, os.PathLike)):
            names = args[:2] if event in TWO_PATHS else args[:1]
            if event == "os.mkdir" and os.path.lexists(names[0]):
                return  # it changes nothing
            self._say_change_to_parent(
                FileChange(NAMES[event], tuple(os.path.abspath(os.fsdecode(each)) for each in names))
            )

    def _say_change_to_parent(self, change: FileChange) -> None:
        if change == self._last or any(path.startswith(self._ignored) for path in change.paths):
            return  # a file is opened once more, or one of the machine
        self._inside = True
        try:
            self._last = change
            self._number += 1
            self._limit_file_size(None)
            line = json.dumps({"how": change.how, "paths": change.paths}) + "\n"
            os.write(self._say, line.encode("utf-8"))
            os.read(self._hear, 1)  # until the parent has kept what is there
            if self._point is not None and self._number == self._point.change:
                if self._point.size is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                else:
                    self._limit_file_size(self._point.size)
        finally:
            self._inside = False

    def _limit_file_size(self, size: int | None) -> None:
        limits = self._limits
        hard = limits.RLIM_INFINITY
        limits.setrlimit(limits.RLIMIT_FSIZE, (hard if size is None else size, hard))


class SaveKiller:
    """Makes the copies of this process, and writes what they leave into a folder.

    Args:
        count: of the points.
        folder: gets a folder for each that leaves other files than those before.
        ignored: folders whose files are no part of what the script saves.
    """

    def __init__(self, count: int, folder: Path, ignored: Sequence[str]) -> None:
        self._count, self._folder = count, folder
        self._ignored = [*ignored, "/dev", "/proc", "/sys", "/run"]
        self._before: dict[str, Path | None] = {}  # what was at a path; None for nothing
        self._seen: dict[str, str] = {}

    def kill_copies(
        self, call_in_copy: Callable[[FileChangeReporter], None], note: Callable[[dict[str, Any]], None]
    ) -> bool:
        """Kill copies; return True in a copy, which is to go on, and False in this process when all have ended.

        Args:
            call_in_copy: is called in a copy.
            note: gets, for each point, its words and the folder of what was left.
        """
        first = self._fork_copy(None, call_in_copy)
        if first is None:
            return True
        changes, sizes = (
            first.changes,
            [self._size_of_written_file(number, first.changes) for number in range(len(first.changes))],
        )
        self._put_back_paths(changes)
        for point in choose_kill_points(changes, sizes, self._count):
            copy = self._fork_copy(point, call_in_copy)
            if copy is None:
                return True
            left = self._store_files_left_by_copy(copy.changes)
            self._put_back_paths(copy.changes)
            state = "passed"
            if copy.is_killed:
                state = "killed"
            elif copy.has_hung:
                state = "hung"
            note({"point": _kill_point_text(point, changes), "left": left, "state": state})
        return False

    def _fork_copy(
        self, point: KillPoint | None, call_in_copy: Callable[[FileChangeReporter], None]
    ) -> KilledCopy | None:
        heard, say = os.pipe()
        hear, answer = os.pipe()
        child = os.fork()
        if not child:
            os.close(heard)
            os.close(answer)
            torch.set_num_threads(1)  # the threads of OpenMP are those of the parent
            call_in_copy(FileChangeReporter(point, say, hear, self._ignored))
            return None
        os.close(say)
        os.close(hear)
        copy = KilledCopy()
        try:
            self._answer_copy_until_end(heard, answer, copy)
            if copy.has_hung:
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        finally:
            os.close(heard)
            os.close(answer)
        copy.is_killed = not copy.has_hung and os.WIFSIGNALED(status)
        return copy

    def _answer_copy_until_end(self, heard: int, answer: int, copy: KilledCopy) -> None:
        text = b""
        while True:
            if not select.select([heard], [], [], SECONDS)[0]:
                copy.has_hung = True
                return
            given = os.read(heard, 65536)
            if not given:
                return
            text += given
            while b"\n" in text:
                line, _, text = text.partition(b"\n")
                row = json.loads(line)
                copy.changes.append(FileChange(row["how"], tuple(row["paths"])))
                for path in row["paths"]:
                    self._back_up_path(path)
                with contextlib.suppress(BrokenPipeError):
                    os.write(answer, ACKNOWLEDGED)

    def _back_up_path(self, path: str) -> None:
        if path not in self._before:
            self._before[path] = None
            inside = [
                each for each, kept in self._before.items() if kept is None and path.startswith(each + os.sep)
            ]
            if os.path.lexists(path) and not inside:  # else a folder that a copy has made
                place = self._folder / "before" / str(len(self._before))
                place.parent.mkdir(parents=True, exist_ok=True)
                _copy_path(path, place)
                self._before[path] = place

    def _put_back_paths(self, changes: list[FileChange]) -> None:
        paths = sorted({path for change in changes for path in change.paths}, key=len, reverse=True)
        for path in paths:
            _remove_path(path)
        for path in reversed(paths):
            if (kept := self._before[path]) is not None and not os.path.lexists(path):
                _copy_path(path=str(kept), place=Path(path))

    def _size_of_written_file(self, number: int, changes: list[FileChange]) -> int:
        """Return how large a file became that was written, wherever it was renamed to."""
        change = changes[number]
        if not change.is_write_of_bytes:
            return 0
        path = change.paths[0]
        for each in changes[number + 1 :]:
            if each.how == "renames":
                before, behind = each.paths
                if path == before or path.startswith(before + os.sep):
                    path = behind + path.removeprefix(before)
        return os.path.getsize(path) if os.path.isfile(path) else 0

    def _store_files_left_by_copy(self, changes: list[FileChange]) -> str:
        """Keep what is at the paths of a copy's changes, once for all that left the same; return the folder's name."""
        paths = sorted({path for change in changes for path in change.paths})
        digest = hashlib.blake2b(digest_size=12)
        for path in paths:
            if not temporary_root(path):
                digest.update(
                    path.encode("utf-8", "surrogateescape") + b"\0" + _digest_of_files_at_path(path)
                )
        key = digest.hexdigest()
        if key not in self._seen:
            name = self._seen[key] = str(len(self._seen))
            folder = self._folder / name
            folder.mkdir(parents=True)
            rows = []
            for number, path in enumerate(paths):
                exists = os.path.lexists(path)
                if exists:
                    _copy_path(path, folder / str(number))
                before = self._before[path]
                rows.append([path, str(number) if exists else None, None if before is None else str(before)])
            (folder / "paths.json").write_text(json.dumps(rows), encoding="utf-8")
        return self._seen[key]


def restore_files_of_killed_copy(folder: Path) -> None:
    """Put what a copy has left at its paths."""
    _put_files_of_column_at_paths(folder, 1)


def restore_original_files(folder: Path) -> None:
    """Put what was at these paths before the copies."""
    _put_files_of_column_at_paths(folder, 2)


def _put_files_of_column_at_paths(folder: Path, column: int) -> None:
    rows = json.loads((folder / "paths.json").read_text(encoding="utf-8"))
    for row in sorted(rows, key=lambda row: -len(row[0])):
        _remove_path(row[0])
    for row in sorted(rows, key=lambda row: len(row[0])):
        if row[column] is not None and not os.path.lexists(row[0]):
            _copy_path(str(folder / row[column]), Path(row[0]))


def choose_kill_points(changes: list[FileChange], sizes: list[int], count: int) -> list[KillPoint]:
    """Return `count` points, of which at most eight lie before changes, and the others within what is written."""
    before = list(range(len(changes)))
    written = [number for number in before if sizes[number]]
    room = 8 if written else count
    if len(before) > room:
        before = sorted({before[number * (len(before) - 1) // (room - 1)] for number in range(room)})
    points = [KillPoint(number) for number in before[:count]]
    left = count - len(points)
    for place, number in enumerate(written):
        share = left // len(written) + (place < left % len(written))
        parts = sorted({sizes[number] * part // share for part in range(share)})
        points += [KillPoint(number, size, sizes[number]) for size in parts]
    return sorted(points, key=lambda point: (point.change, -1 if point.size is None else point.size))


def _kill_point_text(point: KillPoint, changes: list[FileChange]) -> str:
    change = changes[point.change]
    names = " to ".join(map(os.path.basename, change.paths))
    if point.size is None:
        return f"before it {change.how} {names}"
    return f"{100 * point.size // point.whole} % of {names} written"


def _copy_path(path: str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path) or not os.path.isdir(path):
        shutil.copy2(path, place, follow_symlinks=False)
    else:
        shutil.copytree(path, place, symlinks=True)


def _remove_path(path: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)


def _digest_of_files_at_path(path: str) -> bytes:
    """Return a digest of what is at a path, in a folder too."""
    digest = hashlib.blake2b(digest_size=12)
    if os.path.isdir(path):
        for name in sorted(os.listdir(path)):
            digest.update(
                name.encode("utf-8", "surrogateescape") + _digest_of_files_at_path(os.path.join(path, name))
            )
    elif os.path.lexists(path):
        digest.update(b"file" + (Path(path).read_bytes() if os.path.isfile(path) else b""))
    return digest.digest()
