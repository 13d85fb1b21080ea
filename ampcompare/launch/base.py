"""The contract of a launcher, and the files of a cell."""

from __future__ import annotations

import abc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.config import RunConfig
from ampcompare.errors import EnvironmentUnfit
from ampcompare.record import RunRecord, dump_json, write_atomically
from ampcompare.validation import validated

__all__ = [
    "Launcher",
    "Progress",
    "failed_record",
    "interrupted_record",
    "last_lines",
    "log_name",
    "log_tail",
    "make_cell_folder",
    "read_config",
    "send_output_to",
    "set_aside",
    "write_config",
    "write_record",
]


@dataclass(frozen=True)
class Progress:
    """How far a cell has come, in updates and epochs."""

    steps: int
    total_steps: int
    epoch: int


class Launcher(abc.ABC):
    """Runs cells; use it as a context, so that no process is left behind.

    Attributes:
        speaks: whether this process prints results, and not another one that takes part.
    """

    speaks: bool = True

    @abc.abstractmethod
    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        """Train one cell and return its record, which is written to `folder` as well.

        A cell that fails, or whose process dies, is a record with status "failed".

        Raises:
            LaunchError: no process could be started at all.
        """

    def expect(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:  # noqa: B027 - most launchers run one at a time
        """Hear which cells, with their folders, will be asked for; one that hands them to a queue does so at once."""

    def remains(self) -> str:
        """Return what goes on after this process has ended, and how to end it; "" where nothing does."""
        return ""

    def terminate(self) -> bool:
        """Tell the processes of the present cell to save and end, whose record then says "interrupted".

        Returns:
            False where none is running.
        """
        return False

    def close(self) -> None:  # noqa: B027 - most launchers hold nothing between cells
        """End every process that is still there."""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def make_cell_folder(folder: Path) -> None:
    """Make the folder of a cell that is to run, with the files of an earlier run set aside.

    Raises:
        EnvironmentUnfit: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentUnfit(f"cannot make {folder}: {error.strerror}; choose another --output-dir") from None
    set_aside(folder)


def write_config(config: RunConfig, folder: Path) -> None:
    """Write `config.json`, which says to the processes of a cell what they train."""
    (folder / "config.json").write_text(dump_json(config), encoding="utf-8")


def read_config(folder: Path) -> RunConfig:
    """Read what `write_config` wrote.

    Raises:
        ConfigError: a setting that this version does not know, or takes otherwise.
    """
    return validated(RunConfig, json.loads((folder / "config.json").read_text(encoding="utf-8")))


def write_record(record: RunRecord, folder: Path) -> None:
    """Write `record.json` in one move."""
    write_atomically(folder / "record.json", dump_json(record))


def set_aside(folder: Path) -> None:
    """Keep the files of an earlier run of this cell as `*.previous.*`, so that none is taken for the coming one's."""
    for name in ("record.json", "steps.jsonl"):
        path = folder / name
        if path.exists():
            path.replace(path.with_suffix(f".previous{path.suffix}"))


def failed_record(config: RunConfig, error: str) -> RunRecord:
    """Return the record of a cell that could not say what happened to it."""
    return RunRecord(cell=config.digest(), arm=config.arm, status="failed", config=config, error=error)


def interrupted_record(config: RunConfig) -> RunRecord:
    """Return the record of a cell that was told to end and could not save; earlier checkpoints are as they were."""
    error = "told to end before it could save"
    return RunRecord(cell=config.digest(), arm=config.arm, status="interrupted", config=config, error=error)


def send_output_to(path: Path) -> None:
    """Send standard output and error of this process to a new file for good; a killed one leaves its last lines."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def log_name(rank: int) -> str:
    """Return the name of the file that holds the output of a rank."""
    return "log.txt" if rank == 0 else f"rank{rank}.log"


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a file; none of one that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


def log_tail(folder: Path, lines: int = 1, rank: int = 0) -> str:
    """Return the last non-empty lines of a cell's log."""
    return "\n".join(last_lines(folder / log_name(rank), lines))
