"""Which launcher runs a cell: its processes, and who starts them, decide."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from ampcompare.errors import UnsupportedCombination
from ampcompare.launch.base import Launcher
from ampcompare.launch.world import world_of

__all__ = ["make_launcher"]


def make_launcher(
    processes: int,
    launcher: Literal["torchrun", "spawn"] | None = None,
    *,
    several_cells: bool = False,
    dist_url: str | None = None,
    **options: Any,
) -> Launcher:
    """Return the launcher for cells of so many processes.

    Args:
        launcher: who starts them; None forks single processes and leaves several to torchrun.
        several_cells: more than one cell will be asked for.
        dist_url: where processes meet.
        options: further arguments of `ProcessesLauncher`.

    Raises:
        ConfigError: the environment says that this is one of several processes, and not which.
        UnsupportedCombination: several cells inside processes that were started for one.
    """
    world = world_of(url=dist_url)
    if world is not None and several_cells:
        raise UnsupportedCombination(
            f"this is rank {world.rank} of {world.size} that {world.launcher} has started, and a comparison starts the "
            f"processes of each cell itself; call it once, with --nproc-per-node {world.size}"
        )
    if world is not None:
        from ampcompare.launch.member import MemberLauncher

        return MemberLauncher(world)
    if processes == 1 and launcher is None:
        forked: Launcher = importlib.import_module("ampcompare.launch.forked").ForkedLauncher()
        return forked
    from ampcompare.launch.processes import ProcessesLauncher

    return ProcessesLauncher(launcher or "torchrun", dist_url=dist_url, **options)
