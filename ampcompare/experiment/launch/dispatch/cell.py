"""A cell as a command, which any scheduler can start: Slurm and Ray do, and `compare --emit-cells` writes it.

`python -m ampcompare.experiment.launch.dispatch.cell FOLDER` trains the cell whose `config.json` lies in the folder,
and writes its progress there. A cell that has a result stays as it is, and one that was stopped or lost resumes from
its newest checkpoint, so that the same command again is always right. Under torchrun, mpirun or srun it joins the other
ranks. The exit code is 3 where the cell failed, and 143 where it was asked to stop and has saved.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from ampcompare.base.environment.extras import require_torch
from ampcompare.base.environment.ranks import read_distributed_env
from ampcompare.base.errors import AmpCompareError, Ended, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.processes.start import module_command
from ampcompare.base.version import __version__
from ampcompare.experiment.launch.cell_files import make_writer_of_progress, read_config
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.dispatch.local import ExternalLauncher, LocalLauncher
from ampcompare.experiment.launch.stop_signal import stop_signals_handled, stop_signals_held
from ampcompare.results.records.run import RunRecord, read_record


def command_of_cell(folder: Path) -> list[str]:
    """Return the command line that trains the cell of a folder."""
    return module_command(__spec__.name, str(folder))


def find_ampcompare_version() -> str:
    """Return the version of this ampcompare, by which the Python of a stack can train cells.

    Raises:
        ExtraMissing: torch is too old for it, or something that training needs is not installed.
    """
    require_torch()
    return __version__


def train_unfinished_cell(folder: Path, launcher: Launcher, where: str = "") -> RunRecord:
    """Train the cell of a folder, unless it has a result, and return its record."""
    path = folder / CellFile.RECORD
    if path.exists() and (record := read_record(path)).has_result:
        return record
    config = read_config(folder)
    if (folder / CellFile.PROGRESS).exists():  # it has begun before
        config = config.model_copy(update={"saving": config.saving.model_copy(update={"resume": "auto"})})
    return launcher.launch(
        config, folder, make_writer_of_progress(folder, where) if launcher.is_main else None
    )


def train_cell_on_this_machine(folder: Path, where: str = "") -> None:
    """Train the cell of a folder on this machine, or as one of ranks that were started together; SIGTERM stops it."""
    world = read_distributed_env()
    launcher = LocalLauncher() if world is None else ExternalLauncher(world)
    with launcher, _cell_stopped_at_signal(launcher) if world is None else stop_signals_held():
        record = train_unfinished_cell(folder, launcher, where)
    if record.status == "interrupted":
        raise Ended("the command was asked to stop; the same command resumes the cell")
    if record.status == "failed" and launcher.is_main:
        raise LaunchError(f"{record.arm} failed: {record.error}")


@contextlib.contextmanager
def _cell_stopped_at_signal(launcher: Launcher) -> Iterator[None]:
    stopped = False

    def stop_launcher(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        launcher.ask_cell_to_stop()

    launcher.may_start = lambda: not stopped
    with stop_signals_handled(stop_launcher):
        yield


def main(arguments: list[str]) -> int:
    """Train the cell of a folder; what goes wrong is one line."""
    try:
        train_cell_on_this_machine(Path(arguments[0]))
    except AmpCompareError as error:
        sys.stderr.write(f"ampcompare: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
