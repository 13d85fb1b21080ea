"""The files in the folder of a cell: settings, record, steps, logs, progress, and those of an earlier run."""

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.base.files.loaded_code import PortableFileNames, read_loaded_code
from ampcompare.base.files.run_files import CellFile, RunFile, log_name
from ampcompare.base.files.snapshot import is_name_of_tool_file, mtimes_and_sizes_by_path
from ampcompare.base.files.write import write_atomically
from ampcompare.base.processes.sandbox import Sandbox, WrittenFile, open_sandbox, remove_sandbox_store
from ampcompare.base.secrets.masking import mask_secrets
from ampcompare.experiment.launch.contract import Progress
from ampcompare.results.records.document import dump_json, json_with_checksum
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model

# The number in a name is the PID of the process that writes there.
LEFTOVER = re.compile(r"\..+\.(?P<writer>\d+)\.tmp|\.rendezvous\.(?P<agent>\d+)\..+")
FOLDERS = (*(f"{RunFile.CELLS}/*", f"{RunFile.VERIFY_RESUME}/*", *RunFile.VERIFIED),)
MAX_AGE_SECONDS = 3600.0
COMPILERS = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor_cache", "TRITON_CACHE_DIR": ".triton"}
OWN = re.compile(
    r"(config|record|steps|epochs|script|log|loaded|progress|launcher)\b.*\.(json|jsonl|txt|log)|script\w*\.jsonl|"
    r"recorder\.py|by-hand\.txt|script\b.*\.tail"
)


def make_cell_folder(folder: Path) -> None:
    """Make the folder of a cell, and archive the files of an earlier run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot make {folder}: {error.strerror}; choose another --output-dir"
        ) from None
    move_run_to_previous(folder)


def write_cell_inputs(config: RunConfig, folder: Path) -> None:
    """Write what the command of a cell reads, which is to begin from the start of the cell."""
    make_cell_folder(folder)
    (folder / CellFile.PROGRESS).unlink(missing_ok=True)
    write_config(config, folder)


def make_finder_of_stale_files_read(folder: Path) -> Callable[[], list[str]]:
    """Return a function that names the files of an earlier attempt in the folder of a cell that were read since then.

    The system notes when a file is read; where it does not, each of them counts.
    """
    found: dict[Path, int] = {}
    for path in folder.rglob("*"):
        if path.is_file() and not (path.parent == folder and OWN.match(path.name)):
            facts = path.stat()
            os.utime(path, ns=(0, facts.st_mtime_ns))
            found[path] = facts.st_ino
    is_unknown = not hasattr(os, "statvfs") or bool(os.statvfs(folder).f_flag & os.ST_NOATIME)

    def read_since_start() -> list[str]:
        kept = {
            path: path.stat()
            for path, inode in found.items()
            if path.exists() and path.stat().st_ino == inode
        }
        return sorted(str(path) for path, facts in kept.items() if is_unknown or facts.st_atime_ns)

    return read_since_start


def make_finder_of_other_cells_files_read(config: RunConfig) -> Callable[[], list[str]]:
    """Return a function that names the files of other cells that a cell could read, and remembers those it has written.

    They lie in folders of `--allow-writes`, which all cells share; hidden ones, such as `~/.cache`, do not count.
    """
    folders = [
        path
        for path in map(os.path.abspath, config.allow_writes)
        if not any(map(is_name_of_tool_file, path.split("/")))
    ]

    def states_of_files() -> dict[str, tuple[int, int]]:
        return {path: state for folder in folders for path, state in mtimes_and_sizes_by_path(folder).items()}

    before = states_of_files()
    readable = [path for path, state in before.items() if _left_by_cells.get(path) == state]

    def names_of_files_read() -> list[str]:
        _left_by_cells.update(
            {path: state for path, state in states_of_files().items() if before.get(path) != state}
        )
        return readable

    return names_of_files_read


_left_by_cells: dict[str, tuple[int, int]] = {}  # of this process, in folders that they share


def require_writable_folders_exist(config: RunConfig) -> None:
    """Refuse `--allow-writes` of a folder that this machine has not.

    Args:
        config: of the run.

    Raises:
        ConfigError: names it.
    """
    for path in config.allow_writes:
        if not os.path.exists(path):
            raise ConfigError(f"--allow-writes {path}: there is no such folder; make it first")


@contextlib.contextmanager
def sandbox_of_cell(config: RunConfig, folder: Path) -> Iterator[Sandbox]:
    """Yield the sandbox of a cell's processes; an open one if they run no code of the user.

    What they write outside of the folder of the cell lies in `written` there afterwards.
    """
    shared = config.writable_paths(folder)
    if shared is None:
        yield Sandbox({})
        return
    require_writable_folders_exist(config)
    target = folder / CellFile.WRITTEN
    shutil.rmtree(target, ignore_errors=True)
    is_of_run = folder.parent.name == RunFile.CELLS
    above = folder.parent.parent if is_of_run else folder.parent
    store = above / f".{folder.name}.{os.getpid()}.tmp"
    roots = [] if config.script is None else [config.script.import_folder]
    caches = (above if is_of_run else folder) / RunFile.CACHES
    caches.mkdir(parents=True, exist_ok=True)
    with open_sandbox(store, shared_paths=[*shared, caches], roots=roots, target=target) as sandbox:
        for variable, name in COMPILERS.items():
            if variable not in os.environ:
                sandbox.environment[variable] = str(caches.resolve() / name)
        yield sandbox


def write_config(config: RunConfig, folder: Path) -> None:
    """Write `config.json`, from which the processes of a cell read what to train."""
    write_atomically(folder / CellFile.CONFIG, dump_json(config))


def read_config(folder: Path) -> RunConfig:
    """Read what `write_config` wrote."""
    return build_validated_model(
        RunConfig, json.loads((folder / CellFile.CONFIG).read_text(encoding="utf-8"))
    )


def write_steps(folder: Path, steps: Iterable[StepRecord]) -> None:
    """Write `steps.jsonl` of a cell at once, a line for each step."""
    (folder / CellFile.STEPS).write_text("".join(dump_json(step, indent=None) + "\n" for step in steps))


def write_record(record: RunRecord, folder: Path) -> None:
    """Write `record.json` atomically, with its checksum, and without secrets."""
    text = dump_json(record)
    if (masked := mask_secrets(text)) != text:  # before the checksum
        record = RunRecord.model_validate_json(masked)
    write_atomically(folder / CellFile.RECORD, json_with_checksum(record))


def move_run_to_previous(folder: Path) -> None:
    """Rename the files of an earlier run of this cell to `*.previous.*`, so that none is mistaken for a new one."""
    for name in (CellFile.RECORD, CellFile.STEPS, CellFile.EPOCHS):
        path = folder / name
        if path.exists():
            path.replace(path.with_suffix(f".previous{path.suffix}"))
    (folder / CellFile.LOADED).unlink(missing_ok=True)


def drop_cell_outputs_from_code(
    record: RunRecord, folder: Path, written_files: Sequence[WrittenFile]
) -> RunRecord:
    """Return the record of a cell, written again if files count as its code that it has made itself."""
    names = PortableFileNames(base_folder_of_users_code(record.config))
    own = {names.portable_name_of(one.path) for one in written_files}
    code = {name: digest for name, digest in (record.code or {}).items() if name not in own}
    if code != (record.code or {}):
        record = record.model_copy(update={"code": code})
        write_record(record, folder)
    return record


def base_folder_of_users_code(config: RunConfig) -> Path:
    """Return the folder to which the names of a run's own files are relative."""
    return Path.cwd() if config.script is None else config.script.import_folder


def record_with_loaded_code(record: RunRecord, folder: Path) -> RunRecord:
    """Return a record with the code that the processes of its cell have loaded."""
    loaded = read_loaded_code(folder)
    return record.model_copy(
        update={"code": loaded.files, "packages": {**record.packages, **loaded.packages}}
    )


def copy_first_steps(folder: Path, step_files: Sequence[Path], step: int) -> bool:
    """Write `steps.jsonl` in `folder` with the first `step` steps, from the first file that has them all.

    Returns:
        Whether such a file exists; otherwise `steps.jsonl` is empty.
    """
    steps = folder / CellFile.STEPS
    for path in (steps, steps.with_suffix(f".previous{steps.suffix}"), *step_files):
        lines = _lines_of_first_steps(path, step)
        if len(lines) == step:
            write_atomically(steps, "".join(lines))
            return True
    write_atomically(steps, "")
    return False


def _lines_of_first_steps(path: Path, count: int) -> list[str]:
    """Return the lines of the first `count` steps, up to the first that is missing, out of order or incomplete."""
    lines: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if len(lines) == count or not line.endswith("\n") or json.loads(line)["step"] != len(lines):
                    break
                lines.append(line)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return lines


def move_checkpoints_to_previous(folder: Path) -> None:
    """Rename the checkpoints of an earlier run to `checkpoints.previous`, so that none is mistaken for a new one."""
    path = folder / CellFile.CHECKPOINTS
    if path.exists():
        previous = folder / f"{CellFile.CHECKPOINTS}.previous"
        shutil.rmtree(previous, ignore_errors=True)
        path.replace(previous)


def make_writer_of_progress(folder: Path, place: str = "") -> Callable[[Progress], None]:
    """Return a function that writes the progress of a cell, and where it runs, to a file in its folder."""

    path = folder / CellFile.PROGRESS
    temporary = folder / f".{CellFile.PROGRESS}.{os.getpid()}.tmp"

    def write_progress(progress: Progress) -> None:
        # the disk may be full; what must be there is flushed to it elsewhere
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({"place": place, "progress": progress}), encoding="utf-8")
            temporary.replace(path)

    if place:
        write_progress(Progress(0, 0, 0, "starting"))
    return write_progress


def make_forwarder_of_new_progress(
    folder: Path, on_progress: Callable[[Progress], None] | None
) -> Callable[[], None]:
    """Return a reader of progress of a process that is about to start, to which nothing that is there now is news."""
    make_writer_of_progress(folder)(Progress(0, 0, 0, "starting"))
    path = folder / CellFile.PROGRESS
    return make_forwarder_of_progress(
        folder, on_progress, last=path.read_text(encoding="utf-8") if path.exists() else ""
    )


def make_forwarder_of_progress(
    folder: Path,
    on_progress: Callable[[Progress], None] | None,
    on_place: Callable[[str], None] = lambda place: None,
    last: str = "",
) -> Callable[[], None]:
    """Return a function that reads the file, and reports a new place and new progress; what is in `last` is no news."""
    last_place = ""

    def report_new_progress() -> None:
        nonlocal last, last_place
        if on_progress is None:
            return
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            text = (folder / CellFile.PROGRESS).read_text(encoding="utf-8")
            if text != last:  # compared as text: no NaN equals another
                facts = json.loads(text)
                place, progress = facts["place"], Progress(*facts["progress"])
                last = text
                if place and place != last_place:  # a rank that writes does not know it
                    last_place = place
                    on_place(place)
                on_progress(progress)

    return report_new_progress


def redirect_output_to(path: Path) -> None:
    """Redirect standard output and error of this process to a new file; a killed process leaves its last lines."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def last_lines_of_file(path: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a file; none if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def log_tail(folder: Path, lines: int = 1, rank: int = 0) -> str:
    """Return the last non-empty lines of a cell's log."""
    return "\n".join(last_lines_of_file(folder / log_name(rank), lines))


@contextlib.contextmanager
def private_temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder with an unpredictable name that no other user can read or write; remove it afterwards."""
    path = Path(tempfile.mkdtemp(prefix=f".rendezvous.{os.getpid()}.", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_temporary_files(folder: Path) -> None:
    """Remove from a run directory the temporary files of processes that have ended.

    In cells of Slurm, whose processes may be on other machines, files stay for an hour.
    """
    remove_temporary_files_of_cell(folder)
    for cell in (cell for pattern in FOLDERS for cell in folder.glob(pattern)):
        remote = (cell / CellFile.JOB).exists()
        for path in (cell, cell / CellFile.CHECKPOINTS):
            remove_temporary_files_of_cell(path, remote=remote)


def remove_temporary_files_of_cell(folder: Path, *, remote: bool = False) -> None:
    """Remove from a cell the temporary files of an agent that was killed, and of its ranks."""
    with contextlib.suppress(OSError):  # a file that cannot be removed costs space only
        for entry in os.scandir(folder):
            match = LEFTOVER.fullmatch(entry.name)
            if match is None:
                continue
            is_old = time.time() - entry.stat(follow_symlinks=False).st_mtime > MAX_AGE_SECONDS
            may_run = remote or psutil.pid_exists(int(match["writer"] or match["agent"]))
            if may_run and not (is_old and (remote or match["writer"])):  # another process may have its PID
                continue
            if entry.is_dir(follow_symlinks=False):
                remove_sandbox_store(entry.path)
            else:
                Path(entry.path).unlink(missing_ok=True)
