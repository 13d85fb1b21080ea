"""Options that say how the processes of a cell are started, and what they mean for the settings."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ampcompare.errors import ConfigError, Ended

if TYPE_CHECKING:
    from ampcompare.config import RunConfig
    from ampcompare.launch.base import Launcher

__all__ = ["check_slurm", "count_processes", "launch_options", "launcher_for", "sigterm_saves"]

Function = TypeVar("Function", bound=Callable[..., Any])


def launch_options(function: Function) -> Function:
    """Add how many processes train a cell, and who starts them."""
    options = [
        click.option(
            "--nproc-per-node",
            type=click.IntRange(min=1),
            help="processes on each machine that train a cell together  [default: 1]",
        ),
        click.option("--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="machines"),
        click.option(
            "--node-rank",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="which of the machines this is",
        ),
        click.option("--rdzv-endpoint", metavar="HOST:PORT", help="on node 0, where several machines meet"),
        click.option(
            "--max-restarts",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="starts of all processes after one has failed",
        ),
        click.option(
            "--slurm-option",
            "slurm_options",
            multiple=True,
            metavar="NAME=VALUE",
            help="of sbatch, for --launcher slurm: partition=gpu, time=2:00:00, account=lab; repeat it",
        ),
        click.option("--dist-url", metavar="URL", help="where processes meet: env://, tcp://HOST:PORT or file://PATH"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def count_processes(parameters: dict[str, Any]) -> int | None:
    """Return the number of processes that flags, or whoever started this process, ask for; None where nobody does.

    Raises:
        ConfigError: both do, and they differ.
    """
    from ampcompare.launch.world import world_of

    world = world_of(url=parameters["dist_url"])
    asked = parameters["nproc_per_node"]
    asked = None if asked is None else asked * parameters["nnodes"]
    if asked is None and parameters["nnodes"] > 1:
        raise ConfigError(f"--nnodes {parameters['nnodes']} was given; say with --nproc-per-node how many on each")
    if world is None:
        return asked
    if asked not in (None, world.size):
        raise ConfigError(
            f"--nproc-per-node asks for {asked} processes, and {world.size} were started by {world.launcher}; "
            "leave the flag out"
        )
    return world.size


def check_slurm(parameters: dict[str, Any], kinds: set[str], jobs: int = 1) -> None:
    """See that options about jobs of Slurm and the launchers of all cells go together.

    Raises:
        ConfigError: they do not.
    """
    if parameters["slurm_options"] and "slurm" not in kinds:
        raise ConfigError("--slurm-option is for jobs of Slurm; add --launcher slurm")
    if jobs > 1 and "slurm" in kinds:
        raise ConfigError("--jobs is for cells on this machine; under Slurm all are submitted, and the queue decides")


def launcher_for(config: RunConfig, parameters: dict[str, Any], *, several_cells: bool) -> Launcher:
    """Return the launcher for a configuration, and for others that differ from it in what `compare` varies."""
    from ampcompare.launch.factory import make_launcher
    from ampcompare.launch.slurm import parse_slurm_options

    names = ("nnodes", "node_rank", "rdzv_endpoint", "max_restarts", "dist_url")
    return make_launcher(
        config,
        several_cells=several_cells,
        slurm_options=parse_slurm_options(parameters["slurm_options"]),
        **{name: parameters[name] for name in names},
    )


@contextlib.contextmanager
def sigterm_saves(launcher: Launcher) -> Iterator[None]:
    """Pass SIGTERM on to the cell that is running, which then saves and ends; end at once where none is.

    Raises:
        Ended: SIGTERM came between two cells.
    """

    def end(number: int, frame: object) -> None:
        if not launcher.terminate():
            raise Ended("ended by SIGTERM; the same command goes on with the first cell that has no record")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
