"""Frozen options of `run` and `compare`, shared by Python and the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ampcompare.analysis.inference.criteria import Preference
from ampcompare.base.errors import ConfigError
from ampcompare.experiment.sources import SettingsRequest
from ampcompare.launch.base import Launcher
from ampcompare.launch.dispatch import make_launcher
from ampcompare.launch.places import Places
from ampcompare.launch.pool import launcher_at
from ampcompare.records.callback import Callback
from ampcompare.settings.config import RunConfig
from ampcompare.settings.durations import parse_duration

__all__ = ["CompareOptions", "Jobs", "LaunchOptions", "RunOptions", "check_jobs", "to_seconds"]

Jobs: TypeAlias = int | Literal["auto"] | None


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the processes of a cell are started.

    Attributes:
        nnodes: machines.
        node_rank: which of them this is.
        rdzv_endpoint: HOST:PORT address on node 0 at which several machines meet.
        max_restarts: how often all processes of a cell are restarted after one fails.
        dist_url: where processes meet: env://, tcp://HOST:PORT or file://PATH.
        slurm_options: sbatch options for cells whose launcher is slurm, as in {"partition": "gpu", "exclusive": ""}.
        cells_per_job: cells that a Slurm job trains in turn.
    """

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    dist_url: str | None = None
    slurm_options: Mapping[str, str] = field(default_factory=dict)
    cells_per_job: int = 1

    def check(self, launchers: Collection[str], jobs: Jobs = None) -> None:
        """Check that Slurm options and the launchers of all cells are compatible.

        Raises:
            ConfigError: they do not.
        """
        if self.slurm_options and "slurm" not in launchers:
            raise ConfigError("--slurm-option is for Slurm jobs; add --launcher slurm")
        if self.cells_per_job < 1:
            raise ConfigError(f"cells per job are {self.cells_per_job}; give at least 1")
        if self.cells_per_job > 1 and "slurm" not in launchers:
            raise ConfigError("--cells-per-job is for Slurm jobs; add --launcher slurm")
        if self.nnodes > 1 and "ray" in launchers:
            raise ConfigError(
                f"a task of Ray is on one machine, but --nnodes is {self.nnodes}; leave it out, or use another launcher"
            )
        if jobs not in (None, 1) and "ray" in launchers:
            raise ConfigError("--jobs is not for Ray, which runs as many cells as fit; leave it out")

    def launcher(self, config: RunConfig) -> Launcher:
        """Return the launcher for one cell."""
        return make_launcher(config, **self._arguments())

    def pool(self, config: RunConfig, places: Places, jobs: Jobs = None) -> Launcher:
        """Return the launcher for a configuration, and for others that differ from it in what `compare` varies.

        Args:
            jobs: under Slurm, tasks of an array that run at the same time; as many as Slurm likes if it is no number.
        """
        return launcher_at(places, config, **self._arguments(jobs))

    def _arguments(self, jobs: Jobs = None) -> dict[str, Any]:
        return {
            "dist_url": self.dist_url,
            "nnodes": self.nnodes,
            "node_rank": self.node_rank,
            "rdzv_endpoint": self.rdzv_endpoint,
            "max_restarts": self.max_restarts,
            "slurm": {
                "options": dict(self.slurm_options),
                "running": jobs if isinstance(jobs, int) else None,
                "cells_per_job": self.cells_per_job,
            },
        }


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """All options of `run`.

    Attributes:
        config: what to train.
        output_dir: run directory, by default `runs/run-<digest of config>`.
        force: ignore records of earlier calls and run again.
        wait_seconds: how long to wait for another command that uses the run directory.
        callbacks: called while the arm trains.
        command: shown to other commands that wait for the run directory.
    """

    config: RunConfig
    output_dir: Path | None = None
    force: bool = False
    wait_seconds: float = 0.0
    launch: LaunchOptions = LaunchOptions()
    callbacks: tuple[Callback, ...] = ()
    command: str = ""

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.output_dir or Path("runs") / f"run-{self.config.digest()}"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """All options of `compare`.

    Attributes:
        settings: of all cells, and the rows that a recipe or file describes.
        arms: such as "fp32" or "bf16,apex:O2"; by default those of recipe and file, or else nine.
        reference: the arm that the others are compared with, added if it is none of them; by default fp32, or else the
            first.
        seeds: such as "0-4", or "auto": as many as the margin needs; by default those of recipe and file, or else
            three.
        budget_seconds: wall time limit of seeds "auto".
        sweep: settings with the values that are crossed with the arms; see `ampcompare.experiment.plan.parse_vary`.
        margin: equivalence margin of the metric as in `Criteria`; by default that of recipe and file, or else "auto".
        time_margin: equivalence margin in percent of the step time.
        loss_margin: equivalence margin in percent of the training loss over the last fifth of the steps.
        looks: number of planned looks at the runs; None leaves it open.
        objective: what the recommended arm should improve while keeping the accuracy.
        tag: label of the report and its folder.
        jobs: cells that run in parallel; "auto": as many as there are GPUs, or cores for the threads of a cell; None:
            "auto" where several GPUs are visible, else one. Step times of cells that run in parallel are compared on
            equal GPUs only.
        gpus: numbers of the GPUs to use, such as "0,2-3"; all that nobody uses by default.
        profile: profile each arm after all runs, with the first seed.
        timing_rounds: times that the arms of a seed are timed again after their runs, in turns.
        fail_on: limits such as "accuracy<-0.5" or "time>1.10x".
        baseline: report.json or run directory that the limits compare with; by default the reference arm.
        strict: a failed arm is a failure of the comparison.
        output_dir: run directory, by default `runs/compare-<digest of the plan>`.
        force: ignore records of earlier calls and run again.
        wait_seconds: how long to wait for another command that uses the run directory.
        tensorboard: folder for an event file per arm and seed.
        junit: file for the results of arms and limits as JUnit XML.
        callbacks: called while cells train.
        command: stored in the plan and the report.
    """

    settings: SettingsRequest = field(default_factory=SettingsRequest)
    arms: tuple[str, ...] = ()
    reference: str | None = None
    seeds: str | None = None
    budget_seconds: float = 1800.0
    sweep: tuple[tuple[str, Sequence[Any]], ...] = ()
    margin: float | str | None = None
    time_margin: float = 2.0
    loss_margin: float = 1.0
    looks: int | None = None
    objective: Preference = "time"
    tag: str = ""
    jobs: Jobs = None
    gpus: str | None = None
    timing_rounds: int = 0
    profile: bool = False
    fail_on: tuple[str, ...] = ()
    baseline: Path | None = None
    strict: bool = False
    output_dir: Path | None = None
    force: bool = False
    wait_seconds: float = 0.0
    launch: LaunchOptions = LaunchOptions()
    tensorboard: Path | None = None
    junit: Path | None = None
    callbacks: tuple[Callback, ...] = ()
    command: str = ""

    def __post_init__(self) -> None:
        check_jobs(self.jobs)
        if self.timing_rounds < 0:
            raise ConfigError(f"timing rounds are {self.timing_rounds}; give how often arms are timed again, or 0")


def check_jobs(jobs: Jobs) -> None:
    """Check a number of cells.

    Raises:
        ConfigError: it is below 1.
    """
    if isinstance(jobs, int) and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; give the number of cells that run in parallel, at least 1, or auto")


def to_seconds(name: str, value: float | str) -> float:
    """Return a positive time in seconds from a number or a text such as 30m, 1h30m or 90s.

    Args:
        name: of the option, for the message.

    Raises:
        ConfigError: it is not a time above 0.
    """
    seconds = parse_duration(value) if isinstance(value, str) else float(value)
    if not seconds or not seconds > 0:
        raise ConfigError(f"{name} {value!r} is not a time such as 30m, 1h30m or 90s")
    return seconds
