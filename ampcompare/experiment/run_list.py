"""The run directories below a folder: which is the newest, and what each of them holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ampcompare.base.errors import RecordError
from ampcompare.base.files.read import FileFault, read_json

__all__ = ["DEFAULT_FOLDER", "RunFolder", "describe_run", "find_runs", "newest_run", "newest_runs"]

DEFAULT_FOLDER = Path("runs")
CHANGED = ("report.json", "plan.json", "cells")  # which every command writes that adds to a run directory
RESULTS = ("completed", "diverged")


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
