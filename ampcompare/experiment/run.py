"""Run the cells of a plan into a run directory, and resume where an earlier call stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ampcompare.analysis.inference.criteria import Criteria
from ampcompare.analysis.runs.comparability import foreign_steps
from ampcompare.analysis.runs.record_checks import read_checked
from ampcompare.analysis.summary import summarize
from ampcompare.base.environment.versions import SWITCHES, fingerprint, installed_version
from ampcompare.base.errors import ConfigError, Ended, RecordError
from ampcompare.base.files.loaded_code import CODE, DIGITS, SETTINGS, Names, changed_code, differing
from ampcompare.base.files.read import FileFault, read_json
from ampcompare.base.files.write import write_atomically
from ampcompare.experiment.cell_runner import CellRunner, FinishedCell, cell_folder
from ampcompare.experiment.journal import Journal, journal_head, read_looks
from ampcompare.experiment.observer import Observer, Outline
from ampcompare.experiment.plan import Plan
from ampcompare.experiment.run_folder import check_output_dir
from ampcompare.experiment.timing_rounds import run_timing_rounds
from ampcompare.launch.base import Launcher
from ampcompare.launch.pool import LauncherPool
from ampcompare.launch.stop_signal import raised_later
from ampcompare.records.comparison import Comparison
from ampcompare.records.opened_files import OPENED
from ampcompare.records.run import RunRecord, dump_json, read_record
from ampcompare.settings.config import LAUNCHERS, RunConfig

__all__ = [
    "Reuse",
    "SameCode",
    "cell_folder",
    "labeled",
    "load_records",
    "order_as_run",
    "reusable",
    "run_plan",
    "trained_by_any_launcher",
    "with_recorded_order",
]

MAX_NAMED = 3  # records in the message of an error, or files


@dataclass(frozen=True)
class Reuse:
    """The record of a cell that need not run again, or None and the reason why it must; "" if it has no record yet."""

    record: RunRecord | None
    reason: str


def reusable(folder: Path, config: RunConfig) -> Reuse:
    """Return the record of a cell that need not run again, or why it must."""
    path = cell_folder(folder, config) / "record.json"
    if not os.path.lexists(path):
        return Reuse(None, "")
    try:
        record = read_record(path)
    except RecordError as error:
        return _kept_aside(path, "record.unreadable.json", error)
    if record.status not in ("completed", "diverged"):
        was = "was " if record.status == "interrupted" else ""
        return Reuse(None, f"it {was}{record.status} before")
    now = fingerprint()
    changed = [name for name, value in now.items() if record.environment.get(name) != value]
    changed += [name for name in SWITCHES if name not in now and record.environment.get(name)]
    ran = record.effective
    if ran is not None and installed_version(ran.library) not in (ran.version, None):
        changed.append(ran.library)
    changed += [name for name, version in record.packages.items() if installed_version(name) != version]
    code = changed_code(record.code or {}, _code_folder(config))
    gone = [name for name, how in code.items() if how == "gone"]
    changed += [name for name in code if name not in gone]
    if changed or gone:
        shown = [f"{_some(changed)} changed since"] if changed else []
        shown += [f"{_some(gone)} {'are' if len(gone) > 1 else 'is'} gone"] if gone else []
        return Reuse(None, " and ".join(shown))
    before = foreign_steps(record)
    if before and not config.saving.resume_into_other_arm:
        return Reuse(None, f"it was {before}")
    other = record.config.saving.resume
    if config.saving.resume_into_other_arm and config.saving.resume not in (other, "auto"):
        return Reuse(None, f"it resumed from {other or 'no checkpoint'} before")
    try:
        return Reuse(read_checked(path), "")
    except RecordError as error:
        return _kept_aside(path, "record.rejected.json", error)


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_NAMED], *(["..."] if len(names) > MAX_NAMED else [])])


def _kept_aside(path: Path, name: str, error: RecordError) -> Reuse:
    path.replace(path.with_name(name))
    return Reuse(None, f"{error}; the file is kept as {name}")


def load_records(folder: Path) -> tuple[list[RunRecord], list[str]]:
    """Read every valid record of a run directory, and the faults of the others.

    Raises:
        RecordError: there is no valid record.
    """
    records, excluded = [], []
    for path in sorted(folder.glob("cells/*/record.json")):
        try:
            records.append(read_checked(path))
        except RecordError as error:
            if os.path.lexists(path):  # else a command that runs this cell again has just set it aside
                excluded.append(str(error))
    if excluded and not records:
        again = f"run the command that wrote {folder} again to repeat such cells"
        raise RecordError(f"{folder} holds no usable record: {'; '.join(excluded[:MAX_NAMED])}; {again}")
    if not records:
        raise RecordError(f"{folder} holds no records (cells/*/record.json); name a folder that run or compare wrote")
    return records, excluded


def run_plan(
    plan: Plan,
    folder: Path,
    launcher: Launcher,
    *,
    command: str = "",
    terms: Criteria | None = None,
    force: bool = False,
    jobs: int = 1,
    observer: Observer | None = None,
    save: Callable[[Comparison, Path], None] | None = None,
    may_start: Callable[[Sequence[RunRecord]], bool] | None = None,
    pilot: Collection[int] = (),
    test: bool = True,
) -> Comparison:
    """Run every cell that has no usable record yet, and sum up.

    Args:
        folder: the run directory, whose lock the caller holds; nothing in it is deleted.
        terms: margins and preference of the verdicts.
        force: run every cell again.
        jobs: cells that run at the same time; `launcher` must be able to. Their times are comparable where its places
            are equal devices; then they may be of several seeds.
        save: called with the comparison after every cell, so that an interruption leaves a usable report.
        may_start: called before a seed with cells to run, with the records so far; a refused seed is left out.
        pilot: seeds whose spread determined the number of seeds.
        test: give verdicts at the end, which is a look at the runs and is recorded in their journal.

    Raises:
        ConfigError: the folder cannot be written, or code changed while cells ran; finished cells are saved.
        RecordError: the journal of the folder is damaged.
        KeyboardInterrupt: passed on; finished cells are saved.
        Ended: a cell was stopped by SIGTERM; finished cells are saved.
    """
    check_output_dir(folder)
    terms = terms or Criteria()
    observer = observer or Observer()
    launcher.on_note = observer.note
    plan = with_recorded_order(plan, folder)
    # Existing records are read first, so that an intermediate report has every row that an earlier one had.
    known: Sequence[Reuse] = [Reuse(None, "")] * len(plan.cells)
    if force:  # what other cells wrote before does not count
        for config in plan.cells:
            (cell_folder(folder, config) / OPENED).unlink(missing_ok=True)
    elif plan.timing_rounds:  # by this launcher
        known = [reusable(folder, config) for config in plan.cells]
    else:
        others = {path.name for path in folder.glob("cells/*")} - {config.digest() for config in plan.cells}
        cells, known = zip(*(trained_by_any_launcher(folder, config, others) for config in plan.cells), strict=True)
        plan = replace(plan, cells=cells)
    plan_text: dict[str, Any] = {
        "arms": plan.arms,
        "reference": plan.reference,
        "seeds": plan.seeds,
        "order": plan.order,
        "order_seed": plan.order_seed,
        "timing_rounds": plan.timing_rounds,
        "command": command,
        "terms": asdict(terms),
        "cells": {label: cell.digest() for label, cell in zip(plan.order, plan.cells, strict=True)},
        "pilot": sorted(pilot),
        "published": plan.published and plan.published.model_dump(),
        "journal": "",
    }
    journal = Journal(
        folder, tuple(read_looks(folder)), plan.arms, plan.reference, plan_text["cells"], terms, frozenset(pilot)
    )
    plan_text["journal"] = journal_head(folder)
    write_atomically(folder / "plan.json", dump_json(plan_text))
    write_atomically(folder / "env.json", dump_json(fingerprint()))
    records = [found.record for found in known]
    code = SameCode(plan.cells[0])
    starts = [None if record is None else record.started or "" for record in records]
    is_pool = isinstance(launcher, LauncherPool) and launcher.are_equal
    left = [cell for cell, found in zip(plan.cells, known, strict=True) if found.record is None]
    together = may_start is None and (is_pool or (bool(left) and all(map(launcher.is_queue, left))))
    observer.plan(Outline(plan.cells, plan.labels, tuple(records), folder, jobs, plan.timing_rounds, together=together))

    def done() -> list[RunRecord]:
        return [labeled(record, label) for record, label in zip(records, plan.labels, strict=True) if record]

    @raised_later()
    def saved(*, complete: bool = False) -> Comparison:
        complete = complete and launcher.is_main
        design = journal.design(done()) if complete else journal.untested()
        order = order_as_run(plan, starts)
        if order != plan_text["order"]:
            plan_text["order"] = order
            write_atomically(folder / "plan.json", dump_json(plan_text))
        comparison = summarize(
            done(), arms=plan.arms, reference=plan.reference, command=command, order=order, terms=terms, design=design,
            published=plan.published,
        )  # fmt: skip
        if complete:
            comparison = journal.record(comparison)  # before the report, so that no verdict is seen and not counted
            if plan_text["journal"] != (head := journal_head(folder)):
                plan_text["journal"] = head
                write_atomically(folder / "plan.json", dump_json(plan_text))
        if save is not None and comparison.records:
            save(comparison, folder)
        return comparison

    def name(index: int) -> str:
        return f"{plan.labels[index]}, seed {plan.cells[index].recipe.seed}"

    def begin(index: int) -> None:
        config, found = plan.cells[index], known[index]
        if found.record is None:
            code.check()
        else:
            code.add(found.record, name(index))
        if found.reason:
            observer.note(f"{name(index)}, runs again: {found.reason}")
        observer.begin(config, index + 1, len(plan.cells))

    def keep(cell: FinishedCell) -> None:
        index, record = cell.index, cell.record
        records[index] = record
        starts[index] = record.started or cell.started  # it may have ended before it recorded its start
        saved()
        observer.end(record, reused=False)
        if record.status in ("completed", "diverged"):
            code.add(record, name(index))
        if record.status == "interrupted":
            raise Ended(f"{plan.labels[index]} was {record.error}; the same command with --resume auto resumes there")

    def expect(indices: Iterable[int]) -> None:
        launcher.submit_ahead([(plan.cells[index], cell_folder(folder, plan.cells[index])) for index in indices])

    try:
        if may_start is None:
            expect(index for index, record in enumerate(records) if record is None)
        for block in [range(len(plan.cells))] if together else plan.blocks():
            missing = [index for index in block if records[index] is None]
            if missing and may_start is not None and not may_start(done()):
                break
            expect(missing)
            runner = CellRunner(
                plan, folder, launcher, jobs, begin, observer.place, observer.progress, by_seed=together
            )
            with runner.running(missing) as finished:
                for index in block:
                    if (reused := known[index].record) is None:
                        keep(next(finished))  # of several that run at once, the first to end
                    else:
                        begin(index)
                        observer.end(reused, reused=True)
            folders = [cell_folder(folder, cell) for cell in plan.cells]
            code.check()
            timed = run_timing_rounds(plan, block, records, folders, launcher, observer.note)
            for index, record in timed.items():
                records[index] = record
            if timed:
                saved()
    except (KeyboardInterrupt, Ended, ConfigError):
        saved()
        raise
    return saved(complete=test)


def labeled(record: RunRecord, label: str) -> RunRecord:
    """Return a record under the label of its row, which names the arm and what is varied."""
    return record if record.arm == label else record.model_copy(update={"arm": label})


def _code_folder(config: RunConfig) -> Path:
    """Return the folder to which the names of a run's own files are relative."""
    return Path.cwd() if config.script is None else config.script.folder


class SameCode:
    """What the cells of a plan have loaded so far.

    Args:
        config: of any cell: all train the same script or recipe.
    """

    def __init__(self, config: RunConfig) -> None:
        self._folder = _code_folder(config)
        self._known: dict[str, str] = {}
        self._cells: dict[str, str] = {}
        script = config.script
        if script is not None and script.sha256 is not None and not script.is_module:
            path = Path(script.name).resolve()
            self._known[path.name] = script.sha256[:DIGITS]

    def check(self) -> None:
        """Compare the files on disk with those that cells have loaded.

        Raises:
            ConfigError: one has changed.
        """
        changed = changed_code(self._known, self._folder)
        for name, how in changed.items():
            self._refuse(name, f"is {how}")

    def add(self, record: RunRecord, cell: str) -> None:
        """Add what a cell has loaded.

        Raises:
            ConfigError: it is not what earlier cells have loaded, or what lies on the disk.
        """
        # Files of data may change: a script often writes what another cell reads, and then the cells are no pairs.
        found = (record.code or {}).items()
        code = {name: digest for name, digest in found if name.endswith((*CODE, *SETTINGS))}
        for name in differing(code, self._known):
            self._refuse(name, f"was changed before {cell}")
        names = Names(self._folder)
        for name, digest in code.items():
            if names.path(name) is not None:  # what was removed cannot be loaded in another form
                self._known.setdefault(name, digest)
                self._cells.setdefault(name, cell)
        self.check()

    def _refuse(self, name: str, how: str) -> None:
        since = f"since {self._cells[name]} loaded it" if name in self._cells else "since the command began"
        raise ConfigError(
            f"{name} {how}, {since}: cells of other code are not comparable. Leave the code as it is while a "
            "comparison runs, and run the same command again: cells of earlier code are trained again"
        )


class _RecordedOrder(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    order: list[str]
    order_seed: int | None = None  # missing in plans of earlier versions


def with_recorded_order(plan: Plan, folder: Path) -> Plan:
    """Return a plan in the order recorded in the run directory, extended by missing cells; else the plan unchanged."""
    path = folder / "plan.json"
    if not os.path.lexists(path):
        return plan
    try:
        recorded = _RecordedOrder.model_validate(read_json(path))
    except (FileFault, ValidationError):  # the run writes it again; other readers refuse it
        return plan
    seed = plan.order_seed if recorded.order_seed is None else recorded.order_seed
    return plan.in_order(recorded.order, seed)


def trained_by_any_launcher(folder: Path, config: RunConfig, others: Collection[str]) -> tuple[RunConfig, Reuse]:
    """Return a cell and its record; that of another launcher where it has one alone.

    A launcher changes no weight or loss. It is part of a cell's name all the same, so that launchers can be rows of a
    comparison.

    Args:
        others: names of cells in the run directory that are not of the plan.
    """
    found = reusable(folder, config)
    for name in LAUNCHERS if others and found.record is None else ():
        other = config.model_copy(update={"launcher": name})
        if other.digest() in others and (reused := reusable(folder, other)).record is not None:
            return other, reused
    return config, found


def order_as_run(plan: Plan, starts: Sequence[str | None]) -> list[str]:
    """Return the cells as LABEL@SEED: those that ran by their start, then the others as they are planned.

    Args:
        starts: of each cell of the plan in ISO 8601, UTC; None where it did not run yet, "" where its record is of an
            earlier version, which kept no start.
    """
    order = plan.order
    ran = [(start, index) for index, start in enumerate(starts) if start is not None]
    waiting = [index for index, start in enumerate(starts) if start is None]
    return [order[index] for index in [*(index for _, index in sorted(ran)), *waiting]]
