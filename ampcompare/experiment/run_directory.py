"""A run directory: its files, the lock for one command at a time, its plan, its cells, and the looks at its runs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ampcompare.base.environment.fingerprint import SWITCHES, environment_fingerprint
from ampcompare.base.environment.packages import installed_version
from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.base.files.loaded_code import changed_code_files
from ampcompare.base.files.read import FileFault, parse_json, read_json, read_text
from ampcompare.base.files.run_files import CellFile, RunFile
from ampcompare.base.files.write import append_line, write_atomically
from ampcompare.base.formatting import printable_line
from ampcompare.base.secrets.masking import hide_secrets_in_words
from ampcompare.experiment.launch.cell_files import base_folder_of_users_code, remove_temporary_files
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.plan import Plan
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.pairing.comparability import steps_by_other_arm_text
from ampcompare.results.analysis.pairing.record_checks import check_record, read_checked_record
from ampcompare.results.records.comparison import Look, Published
from ampcompare.results.records.document import ArmLabel, dump_json, read_validated_and_plain_json
from ampcompare.results.records.preflight import Preflight
from ampcompare.results.records.run import RESULTS, RunRecord
from ampcompare.settings.config import LAUNCHERS, RunConfig
from ampcompare.settings.validation import build_validated_model

# As long as any name below a run directory.
DEEPEST = Path(RunFile.CELLS, "0" * 12, f"{CellFile.CHECKPOINTS}.previous", "0" * 64)
MAX_SHOWN = 200
MAX_SHOWN_COMMAND = 300
MAX_NAMED = 3  # records in the message of an error, or files
DEFAULT_FOLDER = Path("runs")
REPORT = f"{RunFile.REPORT}.json"
CHANGED = (REPORT, RunFile.PLAN, RunFile.CELLS)  # which every command writes that adds to a run directory
STACK_FACTS = ("torch", "python", "apex", "ampcompare")


class StoredPlan(BaseModel):
    """What `plan.json` says: the rows of a comparison, and in which order its cells ran and will run.

    Attributes:
        order: every cell as LABEL@SEED.
        order_seed: None in plans of earlier versions.
        cells: the name of each cell's folder, under LABEL@SEED.
        journal: None in plans of versions that kept no journal.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    arms: list[ArmLabel] = Field(min_length=1)
    reference: ArmLabel
    seeds: list[int] = []
    order: list[ArmLabel]
    order_seed: int | None = None
    timing_rounds: int = 0
    command: str
    terms: Terms = Terms()
    cells: dict[ArmLabel, str]
    pilot: list[int] = []
    published: Published | None = None
    journal: str | None = None
    preflight: Preflight | None = None

    @classmethod
    def from_plan(cls, plan: Plan, *, command: str, terms: Terms, pilot: Collection[int]) -> StoredPlan:
        """Return what is stored of a plan."""
        names = ("arms", "reference", "seeds", "order", "order_seed", "timing_rounds", "published")
        cells = {label: cell.digest() for label, cell in zip(plan.order, plan.cells, strict=True)}
        facts: dict[str, Any] = {name: getattr(plan, name) for name in names}
        return cls(**facts, command=command, terms=terms, cells=cells, pilot=sorted(pilot), journal="")

    @property
    def arguments_of_summary(self) -> dict[str, Any]:
        """What `summarize` is told of a plan: its rows and terms, the order of its cells, and its command."""
        names = ("arms", "reference", "command", "order", "terms", "published")
        return {name: getattr(self, name) for name in names}


def row_label_of_cell_name(label: str) -> str:
    """Return the row of a cell that is written LABEL@SEED."""
    return label.rpartition("@")[0]


def record_with_label(record: RunRecord, label: str) -> RunRecord:
    """Return a record under the label of its row.

    Args:
        record: under the text of its arm, or another label.
        label: the arm, its stack, and what is varied.
    """
    return record if record.arm == label else record.model_copy(update={"arm": label})


def records_of_plan(plan: StoredPlan, records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records of the cells of a plan, in its order, each under the label of its row."""
    by_cell = {record.cell: record for record in records}
    return [
        record_with_label(by_cell[cell], row_label_of_cell_name(label))
        for label, cell in plan.cells.items()
        if cell in by_cell
    ]


class ReusableRecord(NamedTuple):
    """The record of a cell that need not run again, or None and the reason why it must; "" if it has no record yet."""

    record: RunRecord | None
    reason: str


@dataclass(frozen=True)
class RunBrief:
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


@dataclass(frozen=True)
class RunDirectory:
    """A run directory, which need not exist. The command that writes into it holds its lock; reading needs none."""

    path: Path

    @property
    def plan_file(self) -> Path:
        """The file of the plan."""
        return self.path / RunFile.PLAN

    @property
    def journal_file(self) -> Path:
        """The file of the looks at its runs."""
        return self.path / RunFile.JOURNAL

    def cell_folder(self, config: RunConfig) -> Path:
        """Return the folder of a cell; it is named by its digest, never by the text of its arm."""
        return self.cell_folder_of_digest(config.digest())

    def cell_folder_of_digest(self, digest: str) -> Path:
        """Return the folder of a cell by the digest of its settings."""
        return self.path / RunFile.CELLS / digest

    def cell_names(self) -> set[str]:
        """Return the names of all cells that have a folder."""
        return {path.name for path in (self.path / RunFile.CELLS).glob("*")}

    def record_files(self) -> list[Path]:
        """Return the file of each record that is there, by the names of the cells."""
        return sorted(self.path.glob(f"{RunFile.CELLS}/*/{CellFile.RECORD}"))

    def check_name(self) -> None:
        """Check that a run directory of this name, with its files, can exist."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(self.path.absolute() / DEEPEST)
        except (OSError, ValueError) as error:
            raise self._creation_error(error) from None

    def make(self) -> None:
        """Create the run directory and check that files can be written there."""
        self.check_name()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._creation_error(error) from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigError(
                f"the output folder {self._short_path()} is not writable; choose another --output-dir"
            )

    def _creation_error(self, error: OSError | ValueError) -> ConfigError:
        why = getattr(error, "strerror", None) or error  # a ValueError is about a null byte
        return ConfigError(
            f"cannot make the output folder {self._short_path()}: {why}; choose another --output-dir"
        )

    def _short_path(self) -> str:
        return printable_line(str(self.path), MAX_SHOWN)

    def file_lock(self) -> FileLock:
        """Return the lock, which the system releases when its process ends, so that a dead owner blocks nobody."""
        return FileLock(self.path.resolve() / RunFile.LOCK)

    @contextlib.contextmanager
    def with_lock(self, launcher: Launcher, *, command: str = "") -> Iterator[None]:
        """Make the run directory and hold its lock; of processes that take part in one command, the main one does.

        Raises:
            ConfigError: the folder cannot be made or written, or another command holds it.
        """
        if not launcher.is_main:
            yield
            return
        self.make()
        lock, owner = self.file_lock(), self.path / RunFile.OWNER
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"{self.path} is in use by {self._owner_text()}; wait for it to end, or choose another --output-dir"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the output folder {self.path} cannot be locked: {error.strerror or error}; choose another "
                "--output-dir"
            ) from None
        try:
            # left by processes that have ended: no other process may write here now
            remove_temporary_files(self.path)
            this_process = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "command": command or " ".join(hide_secrets_in_words(sys.argv)),
                "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            }
            write_atomically(owner, dump_json(this_process))
            yield
        finally:
            with contextlib.suppress(OSError):
                owner.unlink(missing_ok=True)
            lock.release()

    def _owner_text(self) -> str:
        """Return who holds the folder, by the details that it wrote."""
        try:
            owner = read_json(self.path / RunFile.OWNER)
            return printable_line(
                f"process {owner['pid']} on {owner['host']}, since {owner['since']}: {owner['command']}",
                MAX_SHOWN_COMMAND,
            )
        except (FileFault, KeyError, TypeError):
            return "another command that left no details"

    def read_plan(self) -> StoredPlan | None:
        """Read the plan; None where there is none."""
        return (
            build_validated_model(StoredPlan, _read_json_object(self.plan_file))
            if os.path.lexists(self.plan_file)
            else None
        )

    def read_stored_preflight(self) -> Preflight | None:
        """Return what an earlier command has seen of the arms; None without a plan that can be read."""
        with contextlib.suppress(FileFault, ConfigError):
            return None if (plan := self.read_plan()) is None else plan.preflight
        return None

    def write_plan(self, plan: StoredPlan) -> None:
        """Write the plan; of one that was read, only what was there and what was changed."""
        values = {name: value for name, value in plan.model_dump().items() if name in plan.model_fields_set}
        write_atomically(self.plan_file, dump_json(values))

    def plan_in_recorded_order(self, plan: Plan) -> Plan:
        """Return a plan in the order recorded here, extended by missing cells; else the plan unchanged."""
        try:
            recorded = self.read_plan()
        except (FileFault, ConfigError):  # the run writes it again; other readers refuse it
            return plan
        if recorded is None:
            return plan
        return plan.with_recorded_order(
            recorded.order, plan.order_seed if recorded.order_seed is None else recorded.order_seed
        )

    def read_records_and_faults(self) -> tuple[list[RunRecord], list[str]]:
        """Read every valid record, and the faults of the others; without a valid one a `RecordError` says why."""
        records, excluded = [], []
        for path in self.record_files():
            try:
                records.append(read_checked_record(path))
            except RecordError as error:
                if os.path.lexists(path):  # else a command that runs this cell again has just set it aside
                    excluded.append(str(error))
        if excluded and not records:
            again = f"run the command that wrote {self.path} again to repeat such cells"
            raise RecordError(
                f"{self.path} holds no usable record: {'; '.join(excluded[:MAX_NAMED])}; {again}"
            )
        if not records:
            raise RecordError(
                f"{self.path} holds no records ({RunFile.CELLS}/*/{CellFile.RECORD}); name a folder in which "
                "run or compare has finished a cell"
            )
        return records, excluded

    def find_reusable_record_and_reason(self, config: RunConfig) -> ReusableRecord:
        """Return the record of a cell that need not run again, or why it must; a damaged one is set aside."""
        path = self.cell_folder(config) / CellFile.RECORD
        if not os.path.lexists(path):
            return ReusableRecord(None, "")
        try:
            record, raw = read_validated_and_plain_json(path, RunRecord, "run record")
        except RecordError as error:
            return _set_record_aside(path, CellFile.UNREADABLE, error)
        if reason := _why_record_not_reused(record, config):
            return ReusableRecord(None, reason)
        try:
            check_record(path, raw, record)
            return ReusableRecord(record, "")
        except RecordError as error:
            return _set_record_aside(path, CellFile.REJECTED, error)

    def find_cell_and_reusable_record(
        self, config: RunConfig, other_launchers: Collection[str]
    ) -> tuple[RunConfig, ReusableRecord]:
        """Return a cell and its record; that of another launcher where it has one alone.

        A launcher changes no weight or loss. It is part of a cell's name all the same, so that launchers can be rows of
        a comparison.
        """
        found = self.find_reusable_record_and_reason(config)
        for name in LAUNCHERS if other_launchers and found.record is None else ():
            other = config.model_copy(update={"launcher": name})
            if (
                other.digest() in other_launchers
                and (reused := self.find_reusable_record_and_reason(other)).record is not None
            ):
                return other, reused
        return config, found

    def read_looks(self) -> list[Look]:
        """Return the looks at the runs, in order; none where there is no journal. A damaged line is a `RecordError`."""
        path = self.journal_file
        if not os.path.lexists(path):
            return []
        try:
            lines = read_text(path).splitlines()
        except FileFault as fault:
            raise RecordError(f"cannot read the journal {path}: {fault}") from None
        looks = []
        for number, line in enumerate(lines, 1):
            try:
                looks.append(Look.model_validate(parse_json(line)["look"]))
            except (FileFault, KeyError, TypeError, ValidationError) as error:
                why = f"{error}".splitlines()[0]
                raise RecordError(
                    f"{path}, line {number}, is damaged: {why}; how often these runs were looked at is not known, so "
                    "restore the file or choose another --output-dir"
                ) from None
        return looks

    def append_look(self, look: Look) -> None:
        """Append a look to the journal, and sync it to disk."""
        append_line(self.journal_file, dump_json({"look": look.model_dump()}, indent=None))

    def brief(self) -> RunBrief:
        """Return what it holds in brief; one with damaged files has a fault instead of facts."""
        changed = datetime.fromtimestamp(self.time_of_change()).astimezone()
        try:
            plan, report = self.read_plan(), _read_json_object(self.path / REPORT)
            if plan is not None:
                done = sum(
                    _is_trained_to_end(self.cell_folder_of_digest(cell) / CellFile.RECORD)
                    for cell in plan.cells.values()
                )
                headline = report.get("headline")
                return RunBrief(
                    self.path,
                    changed,
                    plan.terms.tag,
                    tuple(plan.arms),
                    tuple(sorted({int(label.rpartition("@")[2]) for label in plan.cells})),
                    (done, len(plan.cells)),
                    str(headline[0]) if isinstance(headline, list) and headline else "",
                )
            records = [_read_json_object(record) for record in self.record_files()]
            arms = tuple(dict.fromkeys(str(record.get("arm")) for record in records))
            seeds = {int(record["config"]["recipe"]["seed"]) for record in records}
            done = sum(record.get("status") in RESULTS for record in records)
            return RunBrief(self.path, changed, "", arms, tuple(sorted(seeds)), (done, None))
        except (FileFault, ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            why = str(error) if isinstance(error, FileFault) else "a file has unexpected contents"
            return RunBrief(self.path, changed, fault=f"cannot be read: {why}")

    def time_of_change(self) -> float:
        """Return when a cell or a report was last written, in seconds since the epoch."""
        paths = [self.path / name for name in CHANGED]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _why_record_not_reused(record: RunRecord, config: RunConfig) -> str:
    """Return why a cell must run again that has a record; "" if it need not."""
    if not record.has_result:
        was = "was " if record.status == "interrupted" else ""
        return f"it {was}{record.status} before"
    if config.stack is not None:
        return _why_stack_differs(record, config)
    if moved := _changes_since_record_text(record, config):
        return moved
    before = steps_by_other_arm_text(record)
    if before and not config.saving.resume_into_other_arm:
        return f"it was {before}"
    other = record.config.saving.resume
    if config.saving.resume_into_other_arm and config.saving.resume not in (other, "auto"):
        return f"it resumed from {other or 'no checkpoint'} before"
    return ""


def _changes_since_record_text(record: RunRecord, config: RunConfig) -> str:
    """Return what of the machine, the packages and the code of a run is no longer as it was; "" if all is."""
    now = environment_fingerprint()
    changed = [name for name, value in now.items() if record.environment.get(name) != value]
    changed += [name for name in SWITCHES if name not in now and record.environment.get(name)]
    changed += [name for name, version in record.packages.items() if installed_version(name) != version]
    code = changed_code_files(record.code or {}, base_folder_of_users_code(config))
    gone = [name for name, how in code.items() if how == "gone"]
    changed += [name for name in code if name not in gone]
    words = [f"{_some_names_text(changed)} changed since"] if changed else []
    if gone:
        words.append(f"{_some_names_text(gone)} {'are' if len(gone) > 1 else 'is'} gone")
    return " and ".join(words)


def _why_stack_differs(record: RunRecord, config: RunConfig) -> str:
    """Return in what a stack is no longer that of a record; "" if it is, or if it cannot be asked now."""
    from ampcompare.experiment.launch.script.stacks import current_stack_facts  # it imports torch

    now, then = current_stack_facts(config), record.environment
    changed = [name for name in STACK_FACTS if now.get(name) and then.get(name) and now[name] != then[name]]
    code = changed_code_files(record.code or {}, base_folder_of_users_code(config))
    changed += [name for name, how in code.items() if how == "changed"]
    return f"{_some_names_text(changed)} changed since" if changed else ""


def _some_names_text(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_NAMED], *(["..."] if len(names) > MAX_NAMED else [])])


def _set_record_aside(path: Path, name: str, error: RecordError) -> ReusableRecord:
    path.replace(path.with_name(name))
    return ReusableRecord(None, f"{error}; the file is kept as {name}")


def find_run_directories_newest_first(folder: Path = DEFAULT_FOLDER) -> list[RunDirectory]:
    """Return the run directories in a folder and in its folders, the one that changed last first.

    Raises:
        RecordError: there is no such folder, or it cannot be read.
    """
    if not folder.is_dir():
        raise RecordError(
            f"there is no folder {folder}; name a run directory, or the folder that holds run directories"
        )
    patterns = (f"*/{RunFile.CELLS}", f"*/*/{RunFile.CELLS}")
    try:
        found = {path.parent for pattern in patterns for path in folder.glob(pattern) if path.is_dir()}
    except OSError as error:
        raise RecordError(f"cannot read the folder {folder}: {error.strerror or error}") from None
    return sorted(map(RunDirectory, found), key=lambda run: (-run.time_of_change(), str(run.path)))


def require_run_directories_newest_first(folder: Path = DEFAULT_FOLDER) -> list[Path]:
    """Return the run directories, at least one, that which changed last first.

    Raises:
        RecordError: there is none, or no such folder.
    """
    found = find_run_directories_newest_first(folder) if folder.is_dir() else []
    if not found:
        raise RecordError(
            f"there is no run directory in {folder.absolute()}; name one, as in: ampcompare report DIR"
        )
    return [run.path for run in found]


def _is_trained_to_end(record: Path) -> bool:
    """Return whether a cell was trained to its end; one whose record is damaged is not."""
    try:
        return _read_json_object(record).get("status") in RESULTS
    except FileFault:
        return False


def _read_json_object(path: Path) -> Mapping[str, Any]:
    """Return a JSON object; empty where there is no such file."""
    if not os.path.lexists(path):
        return {}
    found = read_json(path)
    if not isinstance(found, dict):
        raise FileFault(f"{path.name} is not a JSON object")
    return found
