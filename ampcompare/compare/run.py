"""Runs the cells of a plan into a run directory, and goes on where an earlier call stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampcompare.compare.plan import Plan
from ampcompare.compare.summary import summarize
from ampcompare.compare.terms import Terms
from ampcompare.config import RunConfig
from ampcompare.environment import fingerprint
from ampcompare.errors import ConfigError, RecordError
from ampcompare.launch.base import Launcher, Progress
from ampcompare.record import Comparison, RunRecord, dump_json, read_record, write_atomically

__all__ = ["Observer", "cell_folder", "check_output_dir", "load_records", "reusable", "run_plan"]


class Observer:
    """Told what happens while a plan runs; the command line shows it, the Python API leaves it as it is."""

    def begin(self, config: RunConfig, number: int, total: int) -> None:
        """A cell starts."""

    def progress(self, progress: Progress) -> None:
        """The present cell has come so far."""

    def end(self, record: RunRecord, *, reused: bool) -> None:
        """A cell has ended, or its record was there already."""

    def note(self, text: str) -> None:
        """Something worth a line on stderr."""


@dataclass(frozen=True)
class _Reuse:
    record: RunRecord | None
    reason: str


def check_output_dir(folder: Path) -> None:
    """Make the run directory and see that files can be written there.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the output folder {folder}: {error.strerror}; choose another --output-dir"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the output folder {folder} is not writable; choose another --output-dir")


def cell_folder(folder: Path, config: RunConfig) -> Path:
    """Return where a cell of a run directory lies; it is named by its digest, never by the text of its arm."""
    return folder / "cells" / config.digest()


def reusable(folder: Path, config: RunConfig) -> _Reuse:
    """Return the record of a cell that need not run again, or why it must."""
    path = cell_folder(folder, config) / "record.json"
    if not path.exists():
        return _Reuse(None, "")
    try:
        record = read_record(path)
    except RecordError as error:
        path.replace(path.with_name("record.unreadable.json"))
        return _Reuse(None, f"{error}; the file is kept as record.unreadable.json")
    if record.status not in ("completed", "diverged"):
        return _Reuse(None, f"it {record.status} before")
    now = fingerprint()
    changed = [name for name, value in now.items() if record.environment.get(name) != value]
    if changed:
        return _Reuse(None, f"{', '.join(changed)} changed since")
    return _Reuse(record, "")


def load_records(folder: Path) -> list[RunRecord]:
    """Read every record of a run directory.

    Raises:
        RecordError: there is none, or one cannot be read.
    """
    paths = sorted(folder.glob("cells/*/record.json"))
    if not paths:
        raise RecordError(
            f"{folder} holds no records (cells/*/record.json); name a folder that run or compare has written"
        )
    return [read_record(path) for path in paths]


def run_plan(
    plan: Plan,
    folder: Path,
    launcher: Launcher,
    *,
    command: str = "",
    terms: Terms | None = None,
    force: bool = False,
    observer: Observer | None = None,
    save: Callable[[Comparison, Path], None] | None = None,
) -> Comparison:
    """Run every cell that has no usable record yet, and sum up.

    Args:
        folder: the run directory; nothing in it is deleted.
        terms: margins and preference of the verdicts.
        force: run every cell again.
        save: called with the comparison after every cell, so that an interruption leaves a usable report.

    Raises:
        ConfigError: the folder cannot be written.
        KeyboardInterrupt: passed on; what is done is saved.
    """
    check_output_dir(folder)
    observer = observer or Observer()
    terms = terms or Terms()
    order = [f"{cell.arm}@{cell.recipe.seed}" for cell in plan.cells]
    plan_text: dict[str, Any] = {
        "arms": plan.arms,
        "reference": plan.reference,
        "seeds": plan.seeds,
        "order": order,
        "command": command,
        "terms": asdict(terms),
        "cells": {label: cell.digest() for label, cell in zip(order, plan.cells, strict=True)},
    }
    write_atomically(folder / "plan.json", dump_json(plan_text))
    write_atomically(folder / "env.json", dump_json(fingerprint()))
    # All that is there is looked up first: a report saved on the way leaves out nothing that an earlier one had.
    known = [_Reuse(None, "") if force else reusable(folder, config) for config in plan.cells]
    records = [found.record for found in known]

    def saved() -> Comparison:
        done = [record for record in records if record is not None]
        comparison = summarize(
            done, arms=plan.arms, reference=plan.reference, command=command, order=order, terms=terms
        )
        if save is not None and done:
            save(comparison, folder)
        return comparison

    try:
        for place, config in enumerate(plan.cells):
            if known[place].reason:
                observer.note(f"{config.arm}, seed {config.recipe.seed}, runs again: {known[place].reason}")
            observer.begin(config, place + 1, len(plan.cells))
            record = known[place].record
            if record is None:
                record = launcher.launch(config, cell_folder(folder, config), observer.progress)
                records[place] = record
                saved()
            observer.end(record, reused=known[place].record is not None)
    except KeyboardInterrupt:
        saved()
        raise
    return saved()
