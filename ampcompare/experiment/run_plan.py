"""Run the cells of a plan into a run directory, and resume where an earlier call stopped."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.base.errors import ConfigError, Ended
from ampcompare.base.files.loaded_code import CODE, SETTINGS, changed_code_files
from ampcompare.base.files.run_files import RunFile
from ampcompare.base.files.write import write_atomically
from ampcompare.experiment.interim_analyses import Journal
from ampcompare.experiment.launch.cell_files import (
    base_folder_of_users_code,
    make_cell_folder,
    write_config,
    write_record,
)
from ampcompare.experiment.launch.contract import Launcher, Progress, record_of_failed_cell
from ampcompare.experiment.launch.dispatch.dispatch import LauncherPool
from ampcompare.experiment.observer import Observer, PlanOutline
from ampcompare.experiment.plan import Plan, device_by_arm_per_seed
from ampcompare.experiment.preflight import (
    preflight,
    require_different_runs_by_seed,
    require_trainable_arm_and_metrics,
)
from ampcompare.experiment.run_directory import ReusableRecord, RunDirectory, StoredPlan, record_with_label
from ampcompare.experiment.timing_rounds import run_timing_rounds
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.document import dump_json
from ampcompare.results.records.preflight import ArmTrial
from ampcompare.results.records.run import NOT_STARTED, RunRecord
from ampcompare.settings.config import RunConfig

REFUSED = ConfigError.exit_code
LOOK_SECONDS = 0.2  # a wait without a timeout cannot be interrupted on every system

Save = Callable[[Comparison, Path], None]


def run_plan(
    plan: Plan,
    folder: Path,
    launcher: Launcher,
    *,
    command: str = "",
    terms: Terms | None = None,
    force: bool = False,
    jobs: int = 1,
    observer: Observer | None = None,
    save: Save | None = None,
    may_start: Callable[[Sequence[RunRecord]], bool] | None = None,
    pilot: Collection[int] = (),
    test: bool = True,
    check: bool = False,
    are_seeds_asked: bool = False,
) -> Comparison:
    """Run every cell that has no usable record yet, and sum up.

    Args:
        folder: the run directory, whose lock the caller holds; nothing in it is deleted.
        jobs: cells that run at the same time; `launcher` must be able to. Their times are comparable where its places
            are equal devices; then they may be of several seeds.
        save: called with the comparison after every cell, so that an interruption leaves a usable report.
        may_start: called before a seed with cells to run, with the records so far; a refused seed is left out.
        pilot: seeds whose spread determined the number of seeds.
        test: give verdicts at the end, which is a look at the runs and is recorded in their journal.
        check: first train a few steps of each row that has no record; a row that cannot train fails without a start.
        are_seeds_asked: somebody has named the seeds, which are of no use where all of them give the same run.

    Raises:
        ConfigError: the folder cannot be written, or code changed while cells ran; finished cells are saved.
        ConfigError, EnvironmentUnfit, LaunchError: no row can train.
        CommonFailure: cells of the reference and of another row failed with one error, and none has finished.
        RecordError: the journal of the folder is damaged.
        KeyboardInterrupt: passed on; finished cells are saved.
        Ended: a cell was stopped by SIGTERM; finished cells are saved.
    """
    observer = observer or Observer()
    launcher.on_note = observer.note
    running = RunningPlan(
        plan, RunDirectory(folder), launcher, command=command, terms=terms or Terms(), force=force, pilot=pilot,
        observer=observer, save=save,
    )  # fmt: skip
    plan, records = running.plan, running.records
    every = range(len(plan.cells))
    is_pool = isinstance(launcher, LauncherPool) and launcher.are_equal
    left = [plan.cells[index] for index in running.indices_to_run(every)]
    together = may_start is None and (is_pool or (bool(left) and all(map(launcher.is_queue, left))))
    observer.plan(PlanOutline(plan.cells, plan.labels, tuple(records), folder, jobs, plan.timing_rounds))
    try:
        if check and left:
            running.run_and_store_preflight(are_seeds_asked=are_seeds_asked)
        if may_start is None:
            running.announce_cells_to_queue(every)
        for block in [every] if together else plan.cell_ranges_by_seed():
            missing = running.indices_to_run(block)
            if missing and may_start is not None and not may_start(running.done_records()):
                break
            running.announce_cells_to_queue(missing)
            CellRunner(running, jobs, by_seed=together).run_or_report_each_cell(block, missing)
            running.run_block_timing_rounds(block)
        return running.save(test=test)
    except CommonFailure as failure:
        failure.comparison = running.save()
        raise
    except (KeyboardInterrupt, Ended, ConfigError):
        running.save()
        raise


class CommonFailure(Exception):
    """What ended cells of the reference and of another row would end all; `comparison` has the cells that ran."""

    comparison: Comparison


@dataclass(frozen=True)
class FinishedCell:
    """A cell that has run: its index in the plan, its record, and when it started (ISO 8601, UTC)."""

    index: int
    record: RunRecord
    started: str


class RunningPlan:
    """A plan whose cells run into a run directory: what each of them has given so far, and the report on all.

    It makes the directory, writes the plan, and reads the records that are there, so that an intermediate report has
    every row that an earlier one had.

    Attributes:
        records: of each cell of the plan; None where it must run.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunDirectory,
        launcher: Launcher,
        *,
        command: str,
        terms: Terms,
        force: bool = False,
        pilot: Collection[int] = (),
        observer: Observer,
        save: Save | None = None,
    ) -> None:
        run.make()
        self.run = run
        plan = run.plan_in_recorded_order(plan)
        looks = tuple(run.read_looks())
        self._known: Sequence[ReusableRecord] = [ReusableRecord(None, "")] * len(plan.cells)
        if any(cell.stack is not None for cell in plan.cells):
            # it imports torch
            from ampcompare.experiment.launch.script.stacks import write_record_of_recorded_cell

            for cell in plan.cells:
                write_record_of_recorded_cell(cell, run.cell_folder(cell), observer.note)
        if not force:
            # Timing rounds are made by this launcher, with cells that it has trained.
            others = (
                set() if plan.timing_rounds else run.cell_names() - {cell.digest() for cell in plan.cells}
            )
            cells, self._known = zip(
                *(run.find_cell_and_reusable_record(cell, others) for cell in plan.cells), strict=True
            )
            plan = replace(plan, cells=cells)
        self.plan = plan
        self._every = range(len(plan.cells))
        self._stored = StoredPlan.from_plan(plan, command=command, terms=terms, pilot=pilot)
        self._stored = self._stored.model_copy(update={"preflight": run.read_stored_preflight()})
        self._refused: dict[str, ArmTrial] = {}
        self._journal = Journal(run, self._stored, looks)
        run.write_plan(self._stored)
        write_atomically(run.path / RunFile.ENVIRONMENT, dump_json(environment_fingerprint()))
        self.records = [found.record for found in self._known]
        self._starts = [None if record is None else record.started or "" for record in self.records]
        self.launcher = launcher
        self.observer = observer
        self._write = save
        self._saved: Comparison | None = None  # of the records as they are

    def done_records(self) -> list[RunRecord]:
        """Return the records so far, under the labels of their rows."""
        return [
            record_with_label(record, label)
            for record, label in zip(self.records, self.plan.labels, strict=True)
            if record
        ]

    def indices_to_run(self, indices: Iterable[int]) -> list[int]:
        """Return those of some cells that must run."""
        return [index for index in indices if self.records[index] is None]

    def cell_and_folder(self, index: int) -> tuple[RunConfig, Path]:
        """Return a cell and its folder."""
        config = self.plan.cells[index]
        return config, self.run.cell_folder(config)

    def announce_cells_to_queue(self, indices: Iterable[int]) -> None:
        """Announce those of some cells that must run to a launcher with a queue."""
        self.launcher.submit_cells_ahead(
            [self.cell_and_folder(index) for index in self.indices_to_run(indices)]
        )

    def run_and_store_preflight(self, *, are_seeds_asked: bool = False) -> None:
        """Train a few steps of each row without a record, and store and report what they show."""
        found = preflight(self.plan, self.launcher, self.records, self.run.path)
        if not found.arms:
            return
        earlier = self._stored.preflight
        stored = (
            found if earlier is None else earlier.model_copy(update={"arms": {**earlier.arms, **found.arms}})
        )
        self._stored = self._stored.model_copy(update={"preflight": stored})
        self.run.write_plan(self._stored)
        if not self.done_records():
            require_trainable_arm_and_metrics(found)
            if are_seeds_asked:
                require_different_runs_by_seed(found, self.plan.seeds)
        self._refused = {label: trial for label, trial in found.arms.items() if trial.error}
        self.observer.preflight(
            found.summary_lines([self.plan.labels[index] for index in self.indices_to_run(self._every)])
        )

    def write_refusal_record(self, index: int) -> RunRecord | None:
        """Return the record of a cell whose row was seen not to train; None for others."""
        trial = self._refused.get(self.plan.labels[index])
        if trial is None:
            return None
        config, folder = self.cell_and_folder(index)
        make_cell_folder(folder)
        write_config(config, folder)
        facts = {"exit_code": trial.exit_code, NOT_STARTED: True}
        record = record_of_failed_cell(config, trial.error, **facts)
        write_record(record, folder)
        return record

    def begin_cell(self, index: int) -> None:
        """Check that the code is still that of the other cells, and say that a cell begins and why it runs again."""
        found = self._known[index]
        if found.record is None:
            self._check_loaded_code_exists()
        if found.reason:
            self.observer.note(f"{self._name_of_cell(index)}, runs again: {found.reason}")
        self.observer.begin(self.plan.cells[index], index + 1, len(self.plan.cells))

    def report_reused_cell(self, index: int) -> None:
        """Report a cell that need not run."""
        self.begin_cell(index)
        record = self.records[index]
        assert record is not None
        self.observer.end(record, reused=True)

    def record_finished_cell_and_save_report(self, cell: FinishedCell) -> None:
        """Record the result of a cell, and save the report, unless it is the last one, which `save` follows."""
        record = cell.record
        # it may have ended before it recorded its start
        self._starts[cell.index] = record.started or cell.started
        self._replace_records({cell.index: record})
        if self.plan.timing_rounds or self.indices_to_run(self._every):
            self.write_interim_report()
        self.observer.end(record, reused=False)
        if record.status == "interrupted":
            label = self.plan.labels[cell.index]
            raise Ended(f"{label} was {record.error}; the same command with --resume auto resumes there")
        self._end_if_failures_are_alike()

    def _end_if_failures_are_alike(self) -> None:
        """End the plan where the reference and another row, or two seeds of the only row, have failed alike.

        What an arm refuses, with exit code 2, holds for that arm alone.
        """
        done = {index: record for index, record in enumerate(self.records) if record is not None}
        errors = {record.error for record in done.values() if record.environment.get("exit_code") != REFUSED}
        if any(record.status != "failed" for record in done.values()) or len(errors) != 1 or len(done) < 2:
            return
        rows = {self.plan.labels[index] for index in done}
        is_pair_tried = self.plan.reference in rows and (len(rows) > 1 or len(self.plan.arms) == 1)
        if is_pair_tried and self.indices_to_run(self._every):
            raise CommonFailure

    def run_block_timing_rounds(self, block: Sequence[int]) -> None:
        """Run the timing rounds of some cells."""
        self._check_loaded_code_exists()
        folders = [self.run.cell_folder(cell) for cell in self.plan.cells]
        timed = run_timing_rounds(self.plan, block, self.records, folders, self.launcher, self.observer.note)
        self._replace_records(timed)
        if timed and self.indices_to_run(self._every):
            self.write_interim_report()

    def save(self, *, test: bool = False) -> Comparison:
        """Sum up, and write the report and the order in which the cells have run; once for the same records.

        It is done by another thread, so that what a signal raises in this one cuts nothing off: NumPy, for one, refuses
        to be imported again after an import that was left in the middle.

        Args:
            test: give verdicts, which is a look at the runs and is recorded in their journal.
        """
        with ThreadPoolExecutor(1) as saver:
            return saver.submit(self._summarize_and_save, test=test).result()

    def _summarize_and_save(self, *, test: bool) -> Comparison:
        if self._saved is not None and not test:
            return self._saved
        done, journal = self.done_records(), self._journal
        self._write_cell_order()
        design = journal.sequential_design(done) if test else journal.sequential_design_without_test()
        comparison = summarize(done, design=design, **self._stored.arguments_of_summary)
        if test:
            # Before the report: no verdict is seen and not counted.
            comparison = journal.append_last_look(comparison)
        if self._write is not None and comparison.records:
            self._write(comparison, self.run.path)
        self._saved = comparison
        return comparison

    def write_interim_report(self) -> None:
        """Write the order in which the cells have run, and the report, if there is one."""
        if self._write is None:
            self._write_cell_order()
        else:
            self.save()

    def _write_cell_order(self) -> None:
        order = cell_order_as_run(self.plan, self._starts)
        if order != self._stored.order:
            self._stored = self._stored.model_copy(update={"order": order})
            self.run.write_plan(self._stored)

    def _replace_records(self, records: dict[int, RunRecord]) -> None:
        for index, record in records.items():
            self.records[index] = record
            self._saved = None

    def _check_loaded_code_exists(self) -> None:
        """Check that the code which finished cells have loaded is still there."""
        # Files of data may change: a script often writes what another cell reads, and then the cells are no pairs.
        loaded = {
            name: digest
            for record in self.done_records()
            for name, digest in (record.code or {}).items()
            if name.endswith((*CODE, *SETTINGS))
        }
        changed = changed_code_files(loaded, base_folder_of_users_code(self.plan.cells[0]))
        for name in [name for name, how in changed.items() if how != "gone"]:
            raise ConfigError(
                f"{name} is changed since an earlier cell loaded it: cells of other code are not comparable. Leave the "
                "code as it is while a comparison runs, and run the same command again: cells of earlier code are "
                "trained again"
            )

    def _name_of_cell(self, index: int) -> str:
        return f"{self.plan.labels[index]}, seed {self.plan.cells[index].recipe.seed}"


@dataclass(frozen=True)
class CellRunner:
    """Runs cells of a plan.

    Where they run at the same time and can be timed, each has its device by the design of the plan, and every device
    runs its cells in order; else the next cell goes to the first device that is free.
    """

    running: RunningPlan
    jobs: int
    by_seed: bool = False

    def run_or_report_each_cell(self, block: Sequence[int], missing_indices: Sequence[int]) -> None:
        """Run those of a block of cells that are missing, and report the others, in the order of the block."""
        waiting = set(missing_indices)
        with self.run_and_yield_finished_cells(missing_indices) as finished:
            for index in block:
                if index in waiting:
                    # of several that run at once, the first to end
                    self.running.record_finished_cell_and_save_report(next(finished))
                else:
                    self.running.report_reused_cell(index)

    @contextlib.contextmanager
    def run_and_yield_finished_cells(self, indices: Sequence[int]) -> Iterator[Iterator[FinishedCell]]:
        """Yield the cells of some indices as they end; `begin` and `progress` are called while the next is awaited."""
        if indices and all(
            self.running.launcher.is_queue(self.running.plan.cells[index]) for index in indices
        ):
            yield self._follow_queued_cells(indices)
            return
        if self.jobs == 1:
            yield self._run_cells_one_by_one(indices)
            return
        executor = ThreadPoolExecutor(self.jobs)
        stopped = threading.Event()
        try:
            yield self._run_cells_in_parallel(indices, executor, stopped)
        except Ended:
            stopped.set()
            # the other running cells were asked to stop too, and are saving
            executor.shutdown(cancel_futures=True)
            raise
        except BaseException:
            stopped.set()
            self.running.launcher.close()  # ends the cells that threads wait for
            executor.shutdown(cancel_futures=True)
            raise
        executor.shutdown()

    def _run_cells_one_by_one(self, indices: Sequence[int]) -> Iterator[FinishedCell]:
        for index in indices:
            self.running.begin_cell(index)
            yield self._run_cell(index, functools.partial(self.running.observer.progress, index + 1))

    def _follow_queued_cells(self, indices: Sequence[int]) -> Iterator[FinishedCell]:
        """Follow cells that a queue runs: one begins when it is seen at its place, or when it has ended."""
        started: dict[int, str] = {}

        def begin(index: int) -> None:
            if index not in started:
                started[index] = _time_now_text()
                self.running.begin_cell(index)

        def place(number: int, name: str) -> None:
            begin(indices[number])
            self.running.observer.place(indices[number] + 1, name)

        def report(number: int, progress: Progress) -> None:
            begin(indices[number])
            self.running.observer.progress(indices[number] + 1, progress)

        cells = [self.running.cell_and_folder(index) for index in indices]
        for number, record in self.running.launcher.collect_records(cells, place, report):
            begin(indices[number])
            yield FinishedCell(indices[number], record, started[indices[number]])

    def _run_cells_in_parallel(
        self, indices: Sequence[int], executor: ThreadPoolExecutor, stopped: threading.Event
    ) -> Iterator[FinishedCell]:
        # Worker threads put calls for this thread here, and each cell that has ended.
        news: queue.SimpleQueue[Callable[[], None] | FinishedCell | Future[None]] = queue.SimpleQueue()

        def run(index: int, device: int) -> None:
            name = (
                self.running.launcher.names[device] if isinstance(self.running.launcher, LauncherPool) else ""
            )
            news.put(functools.partial(self.running.begin_cell, index))
            if name:
                news.put(functools.partial(self.running.observer.place, index + 1, name))
            report = functools.partial(self.running.observer.progress, index + 1)
            cell = self._run_cell(
                index, lambda progress: news.put(functools.partial(report, progress)), device
            )
            record = cell.record.model_copy(update={"jobs": self.jobs})
            write_record(record, self.running.cell_and_folder(index)[1])
            news.put(FinishedCell(index, record, cell.started))

        def run_all(waiting: deque[int], device: int) -> None:
            with contextlib.suppress(IndexError):  # none is left
                while not stopped.is_set():
                    run(waiting.popleft(), device)

        for device, waiting in enumerate(self._cells_by_device(indices)):
            executor.submit(run_all, waiting, device).add_done_callback(news.put)
        left = len(indices)
        while left:
            with contextlib.suppress(queue.Empty):
                item = news.get(timeout=LOOK_SECONDS)
                if isinstance(item, FinishedCell):
                    left -= 1
                    yield item
                elif isinstance(item, Future):
                    item.result()  # raises what ended a thread
                else:
                    item()

    def _cells_by_device(self, indices: Sequence[int]) -> list[deque[int]]:
        """Return for each device the cells that it runs; without a design they share one queue."""
        if not isinstance(self.running.launcher, LauncherPool) or not self.running.launcher.are_equal:
            return [deque(indices)] * self.jobs
        plan = self.running.plan
        rows = device_by_arm_per_seed(
            plan.arms, len(plan.seeds), self.jobs, plan.order_seed, by_seed=self.by_seed
        )
        of_seed = dict(zip(plan.seeds, rows, strict=True))
        queues: list[deque[int]] = [deque() for _ in range(self.jobs)]
        for index in indices:
            queues[of_seed[plan.cells[index].recipe.seed][plan.labels[index]]].append(index)
        return queues

    def _run_cell(
        self, index: int, on_progress: Callable[[Progress], None], device: int | None = None
    ) -> FinishedCell:
        config, folder = self.running.cell_and_folder(index)
        started = _time_now_text()
        if (refusal := self.running.write_refusal_record(index)) is not None:
            return FinishedCell(index, refusal, started)
        if device is not None and isinstance(self.running.launcher, LauncherPool):
            record = self.running.launcher.launch_at_place(device, config, folder, on_progress)
        else:
            record = self.running.launcher.launch(config, folder, on_progress)
        return FinishedCell(index, record, started)


def _time_now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def cell_order_as_run(plan: Plan, starts: Sequence[str | None]) -> list[str]:
    """Return the cells as LABEL@SEED: those that ran by their start, in ISO 8601, then the others as they are planned.

    The start is None where a cell did not run yet, and "" in records of versions that kept none.
    """
    order = plan.order
    ran = [(start, index) for index, start in enumerate(starts) if start is not None]
    waiting = [index for index, start in enumerate(starts) if start is None]
    return [order[index] for index in [*(index for _, index in sorted(ran)), *waiting]]
