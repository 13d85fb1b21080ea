"""Copies of a process are killed while they save, and what each leaves is what a kill leaves."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.script.resume.killed_saves import (
    FileChange,
    FileChangeReporter,
    KillPoint,
    SaveKiller,
    choose_kill_points,
    restore_files_of_killed_copy,
    restore_original_files,
)

pytestmark = pytest.mark.integration

WEIGHTS = {"a": torch.arange(4000, dtype=torch.float32)}


def kill(folder: Path, save: Callable[[FileChangeReporter], None]) -> list[dict[str, Any]]:
    """Let copies of this process save, and return what came of each."""
    found: list[dict[str, Any]] = []
    watches: list[FileChangeReporter] = []
    if SaveKiller(20, folder, ["/dev"]).kill_copies(watches.append, found.append):
        try:
            save(watches[0])
        finally:
            os._exit(0)
    return found


@pytest.mark.slow
def test_a_file_that_is_written_in_place_is_cut(tmp_path: Path) -> None:
    """Compiled code writes it, and the kernel kills the process once it is so large."""
    path = tmp_path / "last.pt"
    torch.save({"old": 1}, path)
    before = path.read_bytes()

    def save(changes: FileChangeReporter) -> None:
        changes.report_write_to_parent(str(path))
        torch.save(WEIGHTS, str(path))

    found = kill(tmp_path / "left", save)
    assert len(found) == 20
    assert {one["state"] for one in found} == {"killed"}
    assert path.read_bytes() == before
    assert found[0]["point"] == "before it writes last.pt"
    sizes = []
    for one in found:
        restore_files_of_killed_copy(tmp_path / "left" / one["left"])
        sizes.append(path.stat().st_size)
        if one is not found[0]:
            with pytest.raises((RuntimeError, EOFError, OSError)):
                torch.load(path)
        restore_original_files(tmp_path / "left" / one["left"])
    assert sizes[0] == len(before)
    assert sizes[1] == 0
    assert sizes[1:] == sorted(set(sizes[1:]))
    assert path.read_bytes() == before


def test_a_file_that_is_replaced_is_whole_after_every_kill(tmp_path: Path) -> None:
    path, folder = tmp_path / "last.pt", tmp_path / "old"
    torch.save({"old": 1}, path)
    folder.mkdir()
    (folder / "note").write_text("kept")

    def save(changes: FileChangeReporter) -> None:
        with open(tmp_path / "last.tmp", "wb") as file:
            torch.save(WEIGHTS, file)
        os.replace(tmp_path / "last.tmp", path)
        (tmp_path / "new" / "deep").mkdir(parents=True)
        __import__("shutil").rmtree(folder)

    found = kill(tmp_path / "left", save)
    assert {one["state"] for one in found} == {"killed"}
    seen = set()
    for name in dict.fromkeys(one["left"] for one in found):
        restore_files_of_killed_copy(tmp_path / "left" / name)
        seen.add((next(iter(torch.load(path))), folder.exists(), (tmp_path / "new").exists()))
        restore_original_files(tmp_path / "left" / name)
    assert ("old", True, False) in seen
    assert ("a", True, True) in seen
    assert {name for name, exists, _ in seen if not exists} <= {"a"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.pt", "left", "old"]
    assert (folder / "note").read_text() == "kept"


def test_points_lie_before_changes_and_within_what_is_written() -> None:
    changes = [
        FileChange("makes", ("/f",)),
        FileChange("writes", ("/f/a",)),
        FileChange("renames", ("/f/a", "/f/b")),
    ]
    points = choose_kill_points(changes, [0, 100, 0], 10)
    assert [point for point in points if point.size is None] == [KillPoint(0), KillPoint(1), KillPoint(2)]
    assert [point.size for point in points if point.size is not None] == [0, 14, 28, 42, 57, 71, 85]
    many = choose_kill_points([FileChange("writes", (f"/{number}",)) for number in range(30)], [10] * 30, 20)
    assert sum(point.size is None for point in many) == 8
    assert len(many) == 20
    assert choose_kill_points(changes, [0, 0, 0], 2) == [KillPoint(0), KillPoint(2)]
