"""Several launchers as one, for cells that run at the same time."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path

from ampcompare.config import RunConfig
from ampcompare.launch.base import Launcher, Progress
from ampcompare.record import RunRecord

__all__ = ["Several"]


class Several(Launcher):
    """Gives each cell a launcher that is free; as many calls may be under way at once as there are launchers."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._all = tuple(launchers)
        self._free: queue.Queue[Launcher] = queue.Queue()
        for launcher in self._all:
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
