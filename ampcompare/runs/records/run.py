"""What a run leaves behind: the record of a cell. Reading needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ampcompare.base.shown import Shown
from ampcompare.runs.records.document import SCHEMA, SchemaNumber, dump_json, read_model
from ampcompare.runs.records.fields import Finite, FrozenRecord
from ampcompare.runs.records.metric import TOP1, TOP5, Metric
from ampcompare.runs.records.step import StepRecord
from ampcompare.runs.records.summary import RunSummary, Trace
from ampcompare.runs.settings.config import RunConfig

__all__ = [
    "Effective",
    "EngineInfo",
    "Placement",
    "ProcessFacts",
    "Resumption",
    "RunRecord",
    "RunSummary",
    "ScriptFacts",
    "StepRecord",
    "SystemReadings",
    "TimingRound",
    "dump_json",
    "read_record",
]


class Placement(FrozenRecord):
    """The GPUs and cores that a pool gave to a cell."""

    gpus: list[str] = Field([], description="as CUDA_VISIBLE_DEVICES names them; none where the pool chose none")
    gpu_names: list[str] = Field([])
    cores: list[int] = Field([], description="that its processes ran on; none where the system chose")
    alone: bool = Field(False, description="whether no other cell of the command used these GPUs, which are whole ones")


class SystemReadings(FrozenRecord):
    """What the machine did while steps were timed; None where it cannot be read. Shares are 0 to 1."""

    timed_steps: int
    outlier_share: float | None = Field(
        None, description="timed steps more than 3 scaled MADs, and more than 1 %, from the median"
    )
    first_half_seconds: float | None = Field(None, description="median of the first half of the timed steps")
    second_half_seconds: float | None = None
    halves_error: float | None = Field(None, description="standard error of the logarithm of the ratio of the two")
    cpu_share: float | None = Field(None, description="CPU: processor time of the process over wall time")
    waiting_share: float | None = Field(
        None, description="time for which the training thread was ready but had no core, over wall time"
    )
    load_average: float | None = Field(None, description="highest one-minute load average")
    cores: int | None = None
    clock_low_mhz: float | None = None
    clock_high_mhz: float | None = None
    throttled: list[str] = Field([], description="reasons for which the GPU lowered its clock")
    joules_per_unit: float | None = Field(
        None, description="energy of the GPU over timed steps for each image, token, ..., by NVML's counter; of rank 0"
    )
    other_processes: int | None = Field(None, description="largest number of other compute processes on the GPU")


class TimingRound(FrozenRecord):
    """One more timing of a cell: a median over some steps of a separate process, in turn with the other arms."""

    number: Annotated[int, Field(ge=1)]
    started: str | None = Field(None, description="ISO 8601, UTC")
    step_seconds_median: Finite | None = None
    data_seconds_median: Finite | None = None
    readings: SystemReadings | None = None


class EngineInfo(FrozenRecord):
    """Which implementation of `apex.amp` ran, and why that one."""

    name: Literal["nvidia", "compat"]
    version: str
    reason: str


class Effective(FrozenRecord):
    """What really ran where another library decides it, in the words of this package's own arms."""

    arm: str = Field(description="our arm of the precision that ran, such as native:bf16")
    library: str
    version: str
    as_asked: bool = Field(True, description="whether that is the precision that was asked for")
    reason: str = Field("", description="why it is another one")


class ProcessFacts(FrozenRecord):
    """How several processes trained one cell together."""

    world_size: int
    nodes: int
    global_batch_size: int
    backend: str
    wrapper: str = Field(description="module and class around the model")
    launcher: str = Field(description="what started the processes: torchrun, spawn, slurm or the environment")
    start_seconds: float | None = Field(
        None, description="from the start of what starts the processes to their meeting, slowest"
    )
    allreduce_share: float | None = Field(
        None, description="share of a step for reducing gradients that nothing hides, by steps without it; 0 to 1"
    )
    step_seconds_by_rank: list[float] = Field([], description="median step time of each rank")
    step_seconds_slowest: float | None = None
    step_seconds_median: float | None = None
    peak_bytes_by_rank: list[int] = Field([])
    weights: str | None = Field(None, description="hash of the weights at the end, equal on all ranks")


class Resumption(FrozenRecord):
    """One resume of a run from a checkpoint."""

    step: int = Field(description="updates that the checkpoint held")
    processes: int = Field(1, description="that wrote the checkpoint")
    arm: str = Field("", description="that trained what the checkpoint holds")
    notes: list[str] = Field([], description="what is not as it was when the checkpoint was written")


class ScriptFacts(FrozenRecord):
    """What a user's script showed while an arm replaced its calls of amp."""

    weights: list[str] = Field([], description="hash of the parameters at each initialize, before any cast")
    batches: list[str] = Field([], description="hashes of what entered the model first")
    files: list[str] = Field([], description="files outside the folder of the cell that it wrote")
    inherited: list[str] = Field(
        [], description="files outside its folder that it read, and that another cell, or an earlier run, had written"
    )
    resumed: list[str] = Field([], description="files of an earlier attempt in the folder of the cell that it read")
    notes: list[str] = Field([], description="in what the arm departs from what the script asks for")
    printed: dict[str, float] = Field(
        {}, description="step of the last digit that was printed, of each metric that was read from the output"
    )
    without_arm: int | None = Field(
        None, description="steps of optimizers whose gradients came from forward passes without the arm's casts"
    )
    optimizer_steps: int | None = Field(None, description="steps of optimizers in all, skipped ones too")
    seen: dict[str, int] = Field({}, description="how many values of each metric were printed or logged")


class RunRecord(Shown, FrozenRecord):
    """Everything known about one cell."""

    _view: ClassVar[str] = "ampcompare.runs.report.html.notebook:record_view"

    schema_number: SchemaNumber = Field(SCHEMA, alias="schema")
    cell: str
    arm: str
    status: Literal["completed", "diverged", "failed", "interrupted"]
    config: RunConfig
    engine: EngineInfo | None = None
    effective: Effective | None = Field(None, description="only of backends that hand training to another library")
    half: str | None = Field(None, description="how 16-bit arithmetic ran: fp16 or bf16, native or emulated")
    host: str | None = Field(None, description="name of the machine; of rank 0 where several trained together")
    environment: dict[str, Any] = Field({})
    code: dict[str, str] | None = Field(
        None,
        description="start of the SHA-256 of each of the user's files that the run loaded, and of each variable "
        "that its code asked for, as `$NAME`; None in old records",
    )
    packages: dict[str, str] = Field({}, description="versions of installed packages that the user's code imported")
    metrics: list[Metric] = Field(
        [TOP1, TOP5], min_length=1, description="what the task measures; the first is the one of verdicts"
    )
    unit: str = Field("images", description="what `samples_per_second` counts, such as images or tokens")
    summary: RunSummary = RunSummary()
    trace: Trace | None = None
    processes: ProcessFacts | None = Field(None, description="only where processes trained together")
    readings: SystemReadings | None = None
    script: ScriptFacts | None = Field(None, description="only where a user's own script trained")
    started: str | None = Field(None, description="when the run was started, or last resumed: ISO 8601, UTC")
    timing_rounds: list[TimingRound] = Field([], description="timings after the runs of the seed, if asked for")
    jobs: int = Field(1, description="cells that ran at the same time")
    placement: Placement | None = Field(None, description="only where a pool gave the cell GPUs or cores")
    guards: list[str] = Field([], description="mistakes in the use of amp, with file and line")
    resumed: list[Resumption] = Field([], description="checkpoints that the run went on from, in order")
    notes: list[str] = Field([], description="settings that change nothing on this device, and why")
    error: str | None = None

    @property
    def metric(self) -> Metric:
        """The metric that verdicts are about."""
        return self.metrics[0]

    def __str__(self) -> str:
        """Return the outcome in a line; the fields have the rest."""
        final = self.summary.metric_final
        reached = "" if final is None else f", {self.metric.name} {self.metric.shown(final)}"
        failure = f" ({self.error})" if self.error else ""
        return f"{self.arm}, seed {self.config.recipe.seed}: {self.status}{reached}{failure}"

    def __repr__(self) -> str:
        return f"<RunRecord {self.cell} of {self}>"


def read_record(path: Path) -> RunRecord:
    """Read the record of a cell.

    Raises:
        RecordError: as for `read_model`.
    """
    return read_model(path, RunRecord, "run record")
