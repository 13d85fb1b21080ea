"""Options that say how the processes of a cell are started, and signals to the command."""

from __future__ import annotations

import contextlib
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ampcompare.base.errors import AmpCompareError, ConfigError, Ended
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.cli.help import PROCESSES, add_options, make_option_from_signature, option
from ampcompare.cli.output import discard_output_of_closed_terminal
from ampcompare.cli.shared_options import command_line_as_typed

if TYPE_CHECKING:
    from ampcompare.experiment.launch.contract import Launcher

Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options")

# Arguments in Python that are no options of the command, or settings: `settings_request_from` and
# `options_from_parameters` read them.
READ_ELSEWHERE = {"size", "config_file", "script", "mask", "shift_seeds", "slurm_options"}


def add_launch_options(function: Function) -> Function:
    """Add how many processes train a cell, and who starts them."""
    from ampcompare.experiment.run_options import LaunchOptions

    option_of = partial(make_option_from_signature(LaunchOptions), group=PROCESSES)
    options = [
        option(
            "--nproc-per-node",
            type=click.IntRange(min=1),
            metavar="N",
            group=PROCESSES,
            help="processes per cell  [default: 1]",
        ),
        option_of(
            "--slurm-option",
            "slurm_options",
            multiple=True,
            metavar="NAME=VALUE",
            help="sbatch option for --launcher slurm: partition=gpu, time=2:00:00; repeatable",
        ),
    ]
    return add_options(options, function)


def count_processes_asked_for(parameters: Mapping[str, Any]) -> int | None:
    """Return the number of processes that flags, or the launcher of this process, ask for; None if neither does."""
    from ampcompare.base.environment.ranks import read_distributed_env

    world = read_distributed_env(url=parameters.get("dist_url"))
    requested: int | None = parameters["nproc_per_node"]
    if world is None:
        return requested
    if requested not in (None, world.size):
        why = f"is not for processes that are there: {world.launcher} started {world.size}"
        raise ConfigError(refusal_sentence(f"--nproc-per-node {requested}", why, "leave it out"))
    return world.size


def options_from_parameters(
    kind: Callable[..., Options], parameters: Mapping[str, Any], **values: Any
) -> Options:
    """Return options of a run or comparison: each is the parameter of the command that has its name, or a value."""
    from ampcompare.experiment.launch.dispatch.slurm import parse_slurm_options
    from ampcompare.experiment.run_options import LaunchOptions

    names = inspect.signature(kind).parameters.keys() & parameters.keys() - READ_ELSEWHERE
    if "launch" in inspect.signature(kind).parameters:
        options = parse_slurm_options(parameters["slurm_options"])
        values["launch"] = LaunchOptions(slurm_options=options, dist_url=parameters.get("dist_url"))
    made: Any = kind(**{**{name: parameters[name] for name in names}, **values})
    return cast("Options", made.with_attributes(command=command_line_as_typed()))


@contextlib.contextmanager
def save_and_end_at_signals(launcher: Launcher) -> Iterator[None]:
    """Pass SIGTERM and SIGHUP on to the running cell, which saves and ends; end at once if none is running.

    A cell that has just ended when it is asked is not followed by another.
    """
    names: list[str] = []

    def end_cell(name: str) -> None:
        names.append(name)
        if not launcher.ask_cell_to_stop():
            raise Ended(f"ended by {name}; the same command resumes with the first cell that has no record")

    launcher.may_start = lambda: not names
    with _call_at_end_signals(end_cell):
        yield


@contextlib.contextmanager
def leave_block_at_signals() -> Iterator[None]:
    """Leave the block at SIGTERM and SIGHUP as at an error, so that what it has started is ended too."""

    def leave_block(name: str) -> None:
        raise Ended(f"ended by {name}; nothing was saved")

    with _call_at_end_signals(leave_block):
        yield


@contextlib.contextmanager
def _call_at_end_signals(act: Callable[[str], None]) -> Iterator[None]:
    """Call `act` with the name of a signal that asks the command to end.

    What `act` raises leaves the block, also where it has come up in a library that makes another error of it, as a
    module in C does of what interrupts an import.
    """
    from ampcompare.experiment.launch.stop_signal import stop_signals_handled

    raised: list[Ended] = []

    def call_act(number: int, frame: object) -> None:
        discard_output_of_closed_terminal()
        try:
            act(signal.Signals(number).name)
        except Ended as error:
            raised.append(error)
            raise

    with stop_signals_handled(call_act):
        try:
            yield
        except Exception as error:
            if raised and not isinstance(error, AmpCompareError):
                raise raised[0] from error
            raise
