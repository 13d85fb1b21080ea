"""What a run leaves behind: step records and the record of a cell, to and from strict JSON.

Non-finite numbers are written as the strings "nan", "inf" and "-inf", since JSON has none. Reading needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from ampcompare.errors import RecordError
from ampcompare.files.read import FileFault, parse_json, read_text
from ampcompare.records.evaluation import EpochResult
from ampcompare.records.fields import Count, Finite, FrozenRecord, Number, to_float
from ampcompare.records.metric import TOP1, TOP5, Metric
from ampcompare.records.other_precisions import PrecisionResult
from ampcompare.settings.config import RunConfig

__all__ = [
    "SCHEMA",
    "Effective",
    "EngineInfo",
    "ProcessFacts",
    "Resumption",
    "RunRecord",
    "RunSummary",
    "SchemaNumber",
    "ScriptFacts",
    "StepRecord",
    "SystemReadings",
    "TimingRound",
    "Trace",
    "dump_json",
    "iter_steps",
    "parse_step",
    "read_model",
    "read_record",
    "record_checksum",
    "sealed_json",
]

SCHEMA = 2  # 1: results were top-1 and top-5, by these names
MAX_STEPS_BYTES = 2**31

# Fields of a summary in records that knew only the classification of images.
OLDER_FIELDS = {
    f"{before}top1_{of}": f"{before}metric_{of}" for before in ("", "ema_") for of in ("final", "best", "last_mean")
}
OLDER_NAMES = frozenset({*OLDER_FIELDS, "top5_final"})

Stored = TypeVar("Stored", bound=FrozenRecord)
SchemaNumber = Annotated[int, AfterValidator(lambda read: SCHEMA)]  # what is read has the fields of this version


class StepRecord(NamedTuple):
    """One update.

    Attributes:
        step: updates before this one.
        epoch: epochs before this one.
        loss: mean over the micro-batches, at the precision of the loss; not scaled. Several losses are summed.
        loss_scales_before: per loss scaler, the scale that multiplied this loss; empty where nothing is scaled.
        loss_scales: per loss scaler, after its update.
        applied: per optimizer; False means overflow, step skipped.
        grad_norm: norm of the unscaled gradients before clipping; None without clipping.
        seconds: from the start of the forward pass to the end of the optimizer step.
        data_seconds: wait for the batch before it; on a GPU, between two steps, the time without a step to compute.
        losses: each of several losses; empty where there is one.
        lr: learning rate of the first parameter group; None where it is not known, as in a user's own script.
    """

    step: int
    epoch: int
    loss: float
    loss_scales_before: tuple[float, ...]
    loss_scales: tuple[float, ...]
    applied: tuple[bool, ...]
    grad_norm: float | None
    seconds: float
    data_seconds: float
    losses: tuple[float, ...] = ()
    lr: float | None = None


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


class RunSummary(FrozenRecord):
    """A run in numbers. Shares are 0 to 1, times in seconds, sizes in bytes."""

    metric_final: Number | None = Field(None, description="of the first metric, as it is stored")
    metric_best: Number | None = None
    metric_last_mean: Number | None = Field(None, description="mean over the last `last_epochs` epochs")
    last_epochs: Count = 0
    ema_metric_final: Number | None = Field(None, description="of the averaged weights (EMA), evaluated apart")
    ema_metric_best: Number | None = None
    others_final: dict[str, Number] = Field({}, description="of the other metrics, by name")
    loss_final: Number | None = Field(None, description="mean validation loss of the last epoch")
    epochs: list[EpochResult] = Field([])
    in_precisions: list[PrecisionResult] = Field([], description="the weights at the end in other precisions, if asked")
    num_steps: Count = 0
    loss_tail: Number | None = Field(None, description="mean training loss of the last `loss_tail_steps` steps")
    loss_tail_steps: Count = 0
    losses_sha256: str | None = Field(None, description="over the losses of all steps, as little-endian float64")
    skipped_steps: Count = 0
    warmup_steps: Count = Field(0, description="first steps left out of the times below")
    step_seconds_median: Finite | None = None
    step_seconds_iqr: Finite | None = None
    data_seconds_median: Finite | None = None
    start_seconds: Finite | None = Field(
        None, description="from the start of the process, or of what starts several, until it trains its cell"
    )
    loader_start_seconds: Finite | None = Field(None, description="wait for the first batch of the run")
    samples_per_second: Finite | None = Field(None, description="in the unit of the record: images, tokens, ...")
    epoch_seconds: Finite | None = Field(
        None, description="median wall time of an epoch of training, without evaluation"
    )
    wall_seconds: Finite | None = Field(None, description="since the run was started, or last resumed")
    peak_bytes: Count | None = Field(
        None, description="CUDA: most allocated; CPU: peak of resident memory over its value before the run"
    )
    peak_reserved_bytes: Count | None = Field(None, description="CUDA: most reserved by the allocator")
    final_loss_scale: Number | None = None
    first_nonfinite_loss_step: Count | None = None
    diverged_step: Count | None = Field(None, description="first bad step of a run that diverged")
    divergence: str | None = Field(
        None, description="what was seen: non-finite weights, k non-finite losses in a row, or a limit that was passed"
    )
    ended: str | None = Field(None, description="why training ended before its last epoch, in a good state")
    rollbacks: list[int] = Field([], description="updates made at each return to the last good state")
    weights_sha256: str | None = Field(
        None, description="of the weights at the end: parameters and buffers by value, as float32"
    )
    weights_moved: bool | None = Field(None, description="whether training changed any bit of a parameter")

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, values: Any) -> Any:
        """Read a summary that knew only top-1 and top-5."""
        if not isinstance(values, Mapping) or not OLDER_NAMES & values.keys():
            return values
        new = {OLDER_FIELDS.get(name, name): value for name, value in values.items() if name != "top5_final"}
        if values.get("top5_final") is not None:
            new.setdefault("others_final", {TOP5.name: values["top5_final"]})
        return new


class Trace(FrozenRecord):
    """How a run went, in at most about a hundred of its steps, so that a record alone can be drawn."""

    steps: list[int] = Field([], description="updates before each point; the last step is always there")
    losses: list[Number] = Field([], description="loss of that one step, to six digits")
    loss_scales: list[Number] = Field([], description="after the update; empty where nothing is scaled")
    skipped: list[int] = Field([], description="skipped steps up to and with this one")
    step_seconds: list[float] = Field([], description="quantiles of step times after the warm-up, 0, 5, ... 100 %")


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
    """One more timing of a cell: a median over some steps of a process of its own, in turn with the other arms."""

    number: Annotated[int, Field(ge=1)]
    started: str | None = Field(None, description="ISO 8601, UTC")
    step_seconds_median: Finite | None = None
    data_seconds_median: Finite | None = None
    readings: SystemReadings | None = None


class Resumption(FrozenRecord):
    """One time that a run went on from a checkpoint."""

    step: int = Field(description="updates that the checkpoint held")
    processes: int = Field(1, description="that wrote the checkpoint")
    arm: str = Field("", description="that trained what the checkpoint holds")
    notes: list[str] = Field([], description="what is not as it was when the checkpoint was written")


class ScriptFacts(FrozenRecord):
    """What a user's script showed while an arm stood behind its calls."""

    weights: list[str] = Field([], description="hash of the parameters at each initialize, before any cast")
    batches: list[str] = Field([], description="hashes of what entered the model first")
    files: list[str] = Field([], description="files outside the folder of the cell that it wrote")
    notes: list[str] = Field([], description="in what the arm departs from what the script asks for")


class RunRecord(FrozenRecord):
    """Everything known about one cell."""

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


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


def dump_json(value: Any, *, indent: int | None = 1) -> str:
    """Return strict JSON of a record, a step or plain data."""
    if isinstance(value, BaseModel):
        value = value.model_dump(by_alias=True)
    elif isinstance(value, StepRecord):
        value = value._asdict()
    # Escapes beyond ASCII, so that a name in a record can neither steer a terminal nor fail to be written.
    return json.dumps(_strict(value), indent=indent, allow_nan=False)


def record_checksum(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 over what JSON holds of a record, without the field of the checksum itself."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed_json(record: RunRecord) -> str:
    """Return the JSON of a record with a checksum, by which a later edit of its file is noticed."""
    values = _strict(record.model_dump(by_alias=True))
    return dump_json({**values, "checksum": record_checksum(values)})


def read_model(path: Path, model: type[Stored], what: str) -> Stored:
    """Read a file that holds one `model`, called `what` in messages.

    Raises:
        RecordError: no such file, not JSON, another schema, or a field that is missing or wrong.
    """
    try:
        text = read_text(path)
    except FileFault as fault:
        raise RecordError(f"cannot read {what} {path}: {fault}") from None
    try:
        data = parse_json(text)
    except FileFault as fault:
        raise RecordError(f"{path} is not a {what}: {fault}") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise RecordError(f"{path} is not a {what}: it has no schema number")
    if data["schema"] > SCHEMA:
        raise RecordError(
            f"{path} has schema {data['schema']}, written by a newer ampcompare, and this one reads up to {SCHEMA}; "
            "upgrade ampcompare"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordError(f"{path} is not a {what}: {where}: {first['msg']}") from None


def read_record(path: Path) -> RunRecord:
    """Read the record of a cell.

    Raises:
        RecordError: as for `read_model`.
    """
    return read_model(path, RunRecord, "run record")


def parse_step(line: str) -> StepRecord:
    """Return the step of a line of `steps.jsonl`.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    raw = parse_json(line)
    return StepRecord(
        step=raw["step"],
        epoch=raw["epoch"],
        loss=to_float(raw["loss"]),
        loss_scales_before=tuple(to_float(scale) for scale in raw["loss_scales_before"]),
        loss_scales=tuple(to_float(scale) for scale in raw["loss_scales"]),
        applied=tuple(raw["applied"]),
        grad_norm=None if raw["grad_norm"] is None else to_float(raw["grad_norm"]),
        seconds=raw["seconds"],
        data_seconds=raw["data_seconds"],
        losses=tuple(to_float(loss) for loss in raw.get("losses", [])),
        lr=None if raw.get("lr") is None else to_float(raw["lr"]),
    )


def iter_steps(path: Path) -> Iterator[StepRecord]:
    """Yield the steps of a `steps.jsonl`; a last line that was cut off ends the iteration.

    Raises:
        RecordError: the file cannot be read, or a line before the last is not a step.
    """
    try:
        lines = read_text(path, most=MAX_STEPS_BYTES).splitlines()
    except FileFault as fault:
        raise RecordError(f"cannot read steps {path}: {fault}") from None
    for number, line in enumerate(lines):
        try:
            yield parse_step(line)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) - 1:
                return
            raise RecordError(f"{path}, line {number + 1}, is not a step record: {error!r}") from None
