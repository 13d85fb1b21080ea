"""The file by which the processes of a cell tell how far it is."""

from __future__ import annotations

from pathlib import Path

from ampcompare.launch.base import Progress
from ampcompare.launch.progress import PROGRESS_FILE, progress_teller, report_to


def test_each_progress_is_told_once(tmp_path: Path) -> None:
    """What was reported arrives as it was, and is not told again until there is something new."""
    told: list[Progress] = []
    report, tell = report_to(tmp_path), progress_teller(tmp_path, told.append)
    report(Progress(3, 10, 0))
    tell()
    tell()
    report(Progress(7, 10, 1))
    tell()
    assert told == [Progress(3, 10, 0), Progress(7, 10, 1)]


def test_nothing_is_told_of_a_file_that_says_nothing(tmp_path: Path) -> None:
    """Before a first report, and of a file that cannot be read, nothing is told and nothing raised."""
    told: list[Progress] = []
    tell = progress_teller(tmp_path, told.append)
    tell()
    (tmp_path / PROGRESS_FILE).write_text("[3, 10")
    tell()
    assert told == []
