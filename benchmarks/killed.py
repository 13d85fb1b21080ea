"""Comparisons that a benchmark kills: the command in a process of its own, and what its folder holds then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ampcompare.runs.records.comparison import read_comparison
from ampcompare.runs.records.run import RunRecord, read_record

__all__ = ["folders", "records", "start"]

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """Return the folders of an undisturbed comparison and of one that is killed."""
    with TemporaryDirectory() as name:
        undisturbed, disturbed = Path(name) / "undisturbed", Path(name) / "disturbed"
        undisturbed.mkdir()
        disturbed.mkdir()
        yield undisturbed, disturbed


def start(folder: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command in a folder, where it writes to `run`; what it prints is not kept."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "ampcompare", *words, "-o", "run"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def records(folder: Path) -> list[RunRecord]:
    """Read the report and every record of a comparison that are there; half a file is an error."""
    if (folder / "run" / "report.json").exists():
        read_comparison(folder / "run" / "report.json")
    return [read_record(path) for path in folder.glob("run/cells/*/record.json")]
