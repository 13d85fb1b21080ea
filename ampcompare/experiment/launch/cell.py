"""A cell as a command, which any scheduler can start: Slurm and Ray do, and `compare --emit-cells` writes it.

`python -m ampcompare.experiment.launch.cell FOLDER...` trains the cells whose `config.json` lie in the folders, one
after the other, and writes their progress there. A cell that has a result stays as it is, and one that was stopped or
lost resumes from its newest checkpoint, so that the same command again is always right. Under torchrun, mpirun or srun
it joins the other ranks. The exit code is 3 where a cell failed, and 143 where it was asked to stop and has saved.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ampcompare.base.environment.ranks import world_of
from ampcompare.base.errors import AmpCompareError, ConfigError, Ended, LaunchError
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.processes.start import start_command
from ampcompare.experiment.launch.cell_files import progress_writer, read_config
from ampcompare.experiment.launch.contract import Launcher
from ampcompare.experiment.launch.local import ExternalLauncher, LocalLauncher
from ampcompare.experiment.launch.stop_signal import end_signals, held_signals
from ampcompare.results.records.run import RunRecord, read_record

__all__ = ["command_of", "train_cell", "train_cells"]


def command_of(*folders: Path) -> list[str]:
    """Return the command line that trains the cells of some folders."""
    return start_command(__spec__.name, *map(str, folders))


def train_cell(folder: Path, launcher: Launcher, where: str = "") -> RunRecord:
    """Train the cell of a folder, unless it has a result, and return its record.

    Args:
        where: the machine or job, for the readers of its progress.
    """
    path = folder / CellFile.RECORD
    if path.exists() and (record := read_record(path)).status in ("completed", "diverged"):
        return record
    config = read_config(folder)
    if (folder / CellFile.PROGRESS).exists():  # it has begun before
        config = config.model_copy(update={"saving": config.saving.model_copy(update={"resume": "auto"})})
    return launcher.launch(config, folder, progress_writer(folder, where) if launcher.is_main else None)


def train_cells(folders: Sequence[Path], where: str = "") -> None:
    """Train the cells of some folders, one after the other; SIGTERM stops the one that runs, and no other one starts.

    Raises:
        Ended: it was asked to stop, and cells are left.
        LaunchError: a cell failed; the others were trained.
    """
    world = world_of()
    if world is None:
        records, is_main = _train_in_turn(folders, where), True
    elif len(folders) > 1:
        raise ConfigError(f"ranks train one cell, but {len(folders)} were named; start one command for each")
    else:
        launcher = ExternalLauncher(world)
        with held_signals():
            records = [train_cell(folders[0], launcher, where)]
        is_main = launcher.is_main
    if len(records) < len(folders) or any(record.status == "interrupted" for record in records):
        raise Ended("the command was asked to stop, and cells are left; the same command resumes them")
    failed = [f"{record.arm} failed: {record.error}" for record in records if record.status == "failed"]
    if failed and is_main:
        raise LaunchError("; ".join(failed))


def _train_in_turn(folders: Sequence[Path], where: str) -> list[RunRecord]:
    """Return the records of cells that are trained on this machine, up to one that was asked to stop."""
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        launcher.terminate()

    with LocalLauncher() as launcher:
        before = [(number, signal.signal(number, stop)) for number in end_signals()]
        try:
            return [train_cell(folder, launcher, where) for folder in folders if not stopped]
        finally:
            for number, handler in before:
                signal.signal(number, handler)


def main(arguments: list[str]) -> int:
    """Train the cells of some folders; what goes wrong is one line."""
    try:
        train_cells([Path(argument) for argument in arguments])
    except AmpCompareError as error:
        sys.stderr.write(f"ampcompare: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
