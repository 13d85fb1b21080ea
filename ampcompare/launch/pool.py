"""Several launchers as one, for cells that run concurrently."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path

from ampcompare.launch.base import Launcher, Progress
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["LauncherPool"]


class LauncherPool(Launcher):
    """Gives each cell a free launcher; at most as many calls may run concurrently as there are launchers."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._all = tuple(launchers)
        self.is_main = self._all[0].is_main
        self._free: queue.Queue[Launcher] = queue.Queue()
        for launcher in self._all:
            launcher.on_note = self.note
            self._free.put(launcher)

    def launch(
        self, config: RunConfig, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> RunRecord:
        launcher = self._free.get()
        try:
            return launcher.launch(config, folder, on_progress)
        finally:
            self._free.put(launcher)

    def terminate(self) -> bool:
        return sum(launcher.terminate() for launcher in self._all) > 0

    def close(self) -> None:
        for launcher in self._all:
            launcher.close()
