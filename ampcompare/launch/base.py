"""The contract of a launcher: a configuration and a folder in, a record out."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["Launcher", "Progress", "failed_record", "interrupted_record"]


@dataclass(frozen=True)
class Progress:
    """Progress of a cell, in updates and epochs."""

    steps: int
    total_steps: int
    epoch: int


class Launcher(abc.ABC):
    """Runs cells; use it as a context, so that no process is left behind.

    Attributes:
        is_main: whether this process prints the results; of several ranks one does.
        on_note: is called with a line for the user, for example about a process that was killed and replaced.
    """

    is_main: bool = True
    on_note: Callable[[str], None] | None = None

    @abc.abstractmethod
    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        """Train one cell and return its record, which is also written to `folder`.

        A cell that fails, or whose process dies, is a record with status "failed".

        Raises:
            LaunchError: no process could be started at all.
        """

    def note(self, text: str) -> None:
        """Report a line to the user, if `on_note` is set."""
        if self.on_note is not None:
            self.on_note(text)

    def submit_ahead(self, cells: Sequence[tuple[RunConfig, Path]]) -> None:  # noqa: B027 - most launchers have no queue
        """Announce the cells, with their folders, that `launch` is called for later; a queue takes them now."""

    def pending_message(self) -> str:
        """Return what continues after this process has ended, and how to stop it; "" if nothing does."""
        return ""

    def terminate(self) -> bool:
        """Ask the processes of the current cell to save and stop; its record then has status "interrupted".

        Returns:
            False if none is running.
        """
        return False

    def close(self) -> None:  # noqa: B027 - many launchers keep nothing between cells
        """End every process that still runs."""

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def failed_record(config: RunConfig, error: str) -> RunRecord:
    """Return the record of a cell that could not write one itself."""
    return RunRecord(cell=config.digest(), arm=config.arm, status="failed", config=config, error=error)


def interrupted_record(config: RunConfig) -> RunRecord:
    """Return the record of a cell that was asked to stop and could not save; earlier checkpoints are unchanged."""
    error = "asked to stop before it could save"
    return RunRecord(cell=config.digest(), arm=config.arm, status="interrupted", config=config, error=error)
