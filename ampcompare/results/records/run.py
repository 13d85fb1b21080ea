"""What a run leaves behind: the record of a cell. Reading needs no torch."""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ampcompare.base.formatting import format_few_names
from ampcompare.base.notebook_display import ShownInNotebook
from ampcompare.results.records.document import (
    SCHEMA,
    ArmLabel,
    Count,
    Finite,
    FrozenRecord,
    Number,
    SchemaNumber,
    read_validated_json,
)
from ampcompare.results.records.evaluation import EpochResult, PrecisionResult
from ampcompare.results.records.ledger import Ledger
from ampcompare.results.records.metric import TOP1, TOP5, Metric
from ampcompare.settings.config import RunConfig, autocast_lists_of_older_settings

# Fields of a summary in records that knew only the classification of images.
OLDER_FIELDS = {
    f"{before}top1_{of}": f"{before}metric_{of}"
    for before in ("", "ema_")
    for of in ("final", "best", "last_mean")
}
OLDER_NAMES = frozenset({*OLDER_FIELDS, "top5_final"})
RECORDER_RUN = "recorder_run"  # in the environment of a record: which run of the recorder it was made of
NOT_STARTED = "not_started"  # likewise: its arm was refused before, so that there is no log
PARTS = 5  # the tail is the last of so many
RESULTS = ("completed", "diverged")  # the statuses of runs that ended by themselves


class RunSummary(FrozenRecord):
    """A run in numbers. Shares are 0 to 1, times in seconds, sizes in bytes."""

    metric_final: Number | None = Field(None, description="of the first metric, as it is stored")
    metric_best: Number | None = None
    metric_last_mean: Number | None = Field(None, description="mean over the last `last_epochs` epochs")
    last_epochs: Count = 0
    ema_metric_final: Number | None = Field(
        None, description="of the averaged weights (EMA), evaluated apart"
    )
    ema_metric_best: Number | None = None
    others_final: dict[str, Number] = Field({}, description="of the other metrics, by name")
    loss_final: Number | None = Field(None, description="mean validation loss of the last epoch")
    epochs: list[EpochResult] = Field([])
    in_precisions: list[PrecisionResult] = Field(
        [], description="the weights at the end in other precisions, if asked"
    )
    num_steps: Count = 0
    loss_tail: Number | None = Field(
        None, description="mean training loss of the last `loss_tail_steps` steps"
    )
    loss_tail_steps: Count = 0
    losses_sha256: str | None = Field(
        None, description="over the losses of all steps, as little-endian float64"
    )
    skipped_steps: Count = 0
    warmup_steps: Count = Field(0, description="first steps left out of the times below")
    step_seconds_median: Finite | None = None
    step_seconds_iqr: Finite | None = None
    data_seconds_median: Finite | None = None
    start_seconds: Finite | None = Field(
        None, description="from the start of the process, or of what starts several, until it trains its cell"
    )
    loader_start_seconds: Finite | None = Field(None, description="wait for the first batch of the run")
    samples_per_second: Finite | None = Field(
        None, description="in the unit of the record: images, tokens, ..."
    )
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
        None,
        description="what was seen: non-finite weights, k non-finite losses in a row, or a limit that was passed",
    )
    ended: str | None = Field(None, description="why training ended before its last epoch, in a good state")
    rollbacks: list[int] = Field([], description="updates made at each return to the last good state")
    weights_sha256: str | None = Field(
        None, description="of the weights at the end: parameters and buffers by value, as float32"
    )
    weights_moved: bool | None = Field(None, description="whether training changed any bit of a parameter")

    @model_validator(mode="before")
    @classmethod
    def _convert_older_summary(cls, values: Any) -> Any:
        """Read a summary that knew only top-1 and top-5."""
        if not isinstance(values, Mapping) or not OLDER_NAMES & values.keys():
            return values
        new = {OLDER_FIELDS.get(name, name): value for name, value in values.items() if name != "top5_final"}
        if values.get("top5_final") is not None:
            new.setdefault("others_final", {TOP5.name: values["top5_final"]})
        return new


class RunTrace(FrozenRecord):
    """How a run went, in at most about a hundred of its steps, so that a record alone can be drawn."""

    steps: list[int] = Field([], description="updates before each point; the last step is always there")
    losses: list[Number] = Field([], description="loss of that one step, to six digits")
    loss_scales: list[Number] = Field([], description="after the update; empty where nothing is scaled")
    skipped: list[int] = Field([], description="skipped steps up to and with this one")
    step_seconds: list[float] = Field(
        [], description="quantiles of step times after the warm-up, 0, 5, ... 100 %"
    )


def loss_tail_summary_fields(losses: Sequence[float]) -> dict[str, float | int | None]:
    """Return the fields `loss_tail` and `loss_tail_steps` of a summary; no loss for a run without steps.

    Args:
        losses: of each step, in order.
    """
    if not losses:
        return {"loss_tail": None, "loss_tail_steps": 0}
    tail = losses[-max(1, len(losses) // PARTS) :]
    return {"loss_tail": statistics.fmean(tail), "loss_tail_steps": len(tail)}


class Placement(FrozenRecord):
    """The GPUs and cores that a pool gave to a cell."""

    gpus: list[str] = Field(
        [], description="as CUDA_VISIBLE_DEVICES names them; none where the pool chose none"
    )
    gpu_names: list[str] = Field([])
    cores: list[int] = Field([], description="that its processes ran on; none where the system chose")
    alone: bool = Field(
        False, description="whether no other cell of the command used these GPUs, which are whole ones"
    )


class SystemReadings(FrozenRecord):
    """What the machine did while steps were timed; None where it cannot be read. Shares are 0 to 1."""

    timed_steps: int
    outlier_share: float | None = Field(
        None, description="timed steps more than 3 scaled MADs, and more than 1 %, from the median"
    )
    first_half_seconds: float | None = Field(None, description="median of the first half of the timed steps")
    second_half_seconds: float | None = None
    halves_error: float | None = Field(
        None, description="standard error of the logarithm of the ratio of the two"
    )
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
        None,
        description="energy of the GPU over timed steps for each image, token, ..., by NVML's counter; of rank 0",
    )
    other_processes: int | None = Field(
        None, description="largest number of other compute processes on the GPU"
    )
    device_bytes: Count | None = Field(
        None,
        description="most memory of the GPU in use by all its processes, contexts and libraries included, by NVML",
    )


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


class FallbackArm(FrozenRecord):
    """The arm that trained a cell after the cell's own arm has diverged."""

    arm: ArmLabel
    diverged: dict[ArmLabel, int] = Field(description="first bad step of each arm that was tried before")


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
        None,
        description="share of a step for reducing gradients that nothing hides, by steps without it; 0 to 1",
    )
    step_seconds_by_rank: list[float] = Field([], description="median step time of each rank")
    step_seconds_slowest: float | None = None
    step_seconds_median: float | None = None
    peak_bytes_by_rank: list[int] = Field([])
    weights: str | None = Field(None, description="hash of the weights at the end, equal on all ranks")


OLDER_MACHINE = re.compile(r"(torch|processor|machine|host) .* then, .* now")


class Resumption(FrozenRecord):
    """One resume of a run from a checkpoint."""

    step: int = Field(description="updates that the checkpoint held")
    processes: int = Field(1, description="that wrote the checkpoint")
    arm: ArmLabel = Field("", description="that trained what the checkpoint holds")
    notes: list[str] = Field([], description="what is not as it was when the checkpoint was written")
    machine: list[str] = Field(
        [], description="those of the notes that are about what a step takes: torch and machine"
    )

    @model_validator(mode="before")
    @classmethod
    def _convert_older_resumption(cls, values: Any) -> Any:
        """Read records that have the notes alone."""
        if not isinstance(values, dict) or "machine" in values:
            return values
        return {
            **values,
            "machine": [note for note in values.get("notes", []) if OLDER_MACHINE.fullmatch(str(note))],
        }


class SeedCall(FrozenRecord):
    """A line of a script that seeds a generator, or takes weights or the state of a generator from elsewhere."""

    place: str = Field(
        description="file and line of the script, also where a library that it calls does this"
    )
    function: str
    seed: str = Field(
        "", description="the first one as written; empty for the system's entropy, and where there is none"
    )
    used: str = Field("", description="what the generator was seeded with, where an offset was added")
    kind: Literal["global", "own", "load", "state"] = Field(
        "global",
        description="whose generator; load: weights that it takes; state: that of a generator, which it sets",
    )
    calls: int = 1


OLDER_EQUAL_NUMBERS = re.compile(
    r"of the (?:bf16|fp16) numbers that an evaluation compares, .*\((?P<place>[^()]*)\)"
)


class ScriptFacts(FrozenRecord):
    """What a user's script showed while an arm replaced its calls of amp."""

    weights: list[str] = Field([], description="hash of the parameters at each initialize, before any cast")
    batches: list[str] = Field([], description="hashes of what entered the model first")
    draws: list[str] = Field(
        [],
        description="hashes of the generators before those of the first forward passes that draw random numbers",
    )
    seeds: list[SeedCall] | None = Field(
        None, description="where the script seeds generators; older records do not say it"
    )
    files: list[str] = Field(
        [], description="files that it wrote; they lie in `written` in the folder of the cell"
    )
    resumed: list[str] = Field(
        [], description="files of an earlier attempt in the folder of the cell that it read"
    )
    notes: list[str] = Field([], description="in what the arm departs from what the script asks for")
    remarks: list[str] = Field([], description="what goes wrong by the script's own lines, as by rounding")
    rounded_codes: str = Field(
        "", description="which labels or codes the arm has rounded to others; empty for none"
    )
    equal_numbers: list[str] = Field(
        [],
        description="places where an evaluation compares 16-bit numbers of which many are equal, as for a rank",
    )
    lost_statistics: list[str] = Field(
        [], description="layers whose running statistics are not finite at the end, though their weights are"
    )
    printed: dict[str, float] = Field(
        {},
        description="step of the last digit that was printed, of each metric that was read from the output",
    )
    seen: dict[str, int] = Field({}, description="how many values of each metric were printed or logged")

    @model_validator(mode="before")
    @classmethod
    def _convert_older_facts(cls, values: Any) -> Any:
        """Read records that say in a remark alone that an evaluation compares equal numbers."""
        if not isinstance(values, dict) or "equal_numbers" in values:
            return values
        found = map(OLDER_EQUAL_NUMBERS.match, map(str, values.get("remarks", ())))
        return {**values, "equal_numbers": [match["place"] for match in found if match]}


def nonfinite_statistics_text(layers: Sequence[str]) -> str:
    """Return what has happened to layers whose running statistics are not finite, in words."""
    return (
        f"running statistics of {format_few_names(layers)} are not finite, though the weights are: a forward pass "
        "overflowed, and a step that is skipped keeps what that has written there"
    )


def script_fault_remarks(record: "RunRecord") -> list[str]:
    """Return what goes wrong by the lines of a run's script, also statistics that it lost and did not diverge by."""
    if record.script is None:
        return []
    lost = record.script.lost_statistics if record.status != "diverged" else []
    return [*record.script.remarks, *([nonfinite_statistics_text(lost)] if lost else [])]


class RunRecord(ShownInNotebook, FrozenRecord):
    """Everything known about one cell."""

    _view: ClassVar[str] = "ampcompare.results.report.html.notebook:record_text_and_html"

    schema_number: SchemaNumber = Field(SCHEMA, alias="schema")
    cell: str
    arm: ArmLabel
    status: Literal["completed", "diverged", "failed", "interrupted"]
    config: RunConfig
    engine: EngineInfo | None = None
    fell_back: FallbackArm | None = Field(
        None, description="the arm that trained instead, after its own has diverged"
    )
    ledger: Ledger | None = Field(None, description="in which types it really ran; None in old records")
    half: str | None = Field(None, description="how 16-bit arithmetic ran: fp16 or bf16, native or emulated")
    host: str | None = Field(
        None, description="name of the machine; of rank 0 where several trained together"
    )
    environment: dict[str, Any] = Field({})
    code: dict[str, str] | None = Field(
        None,
        description="start of the SHA-256 of each of the user's modules in the run, of each file that they or the "
        "settings name, and of each variable that they ask for, as `$NAME`; None in old records",
    )
    packages: dict[str, str] = Field(
        {}, description="versions of packages that the user's code imported, or that train"
    )
    metrics: list[Metric] = Field(
        [TOP1, TOP5], min_length=1, description="what the task measures; the first is the one of verdicts"
    )
    unit: str = Field("images", description="what `samples_per_second` counts, such as images or tokens")
    summary: RunSummary = RunSummary()
    trace: RunTrace | None = None
    processes: ProcessFacts | None = Field(None, description="only where processes trained together")
    readings: SystemReadings | None = None
    script: ScriptFacts | None = Field(None, description="only where a user's own script trained")
    started: str | None = Field(None, description="when the run was started, or last resumed: ISO 8601, UTC")
    timing_rounds: list[TimingRound] = Field(
        [], description="timings after the runs of the seed, if asked for"
    )
    jobs: int = Field(1, description="cells that ran at the same time")
    placement: Placement | None = Field(None, description="only where a pool gave the cell GPUs or cores")
    guards: list[str] = Field([], description="mistakes in the use of amp, with file and line")
    resumed: list[Resumption] = Field([], description="checkpoints that the run went on from, in order")
    notes: list[str] = Field([], description="settings that change nothing on this device, and why")
    error: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _convert_older_record(cls, data: Any) -> Any:
        """Read records that held the library behind an arm, and why it ran another precision, apart.

        Those from before `autocast_lists` have trained by the lists of their device.
        """
        config = data.get("config") if isinstance(data, dict) else None
        if isinstance(config, dict) and "autocast_lists" not in config:
            lists = autocast_lists_of_older_settings(
                config, str((data.get("environment") or {}).get("device", ""))
            )
            data = {**data, "config": {**config, "autocast_lists": lists}}
        ran = data.get("effective") if isinstance(data, dict) else None
        if not isinstance(ran, dict) or not {"library", "version"} <= ran.keys():
            return data
        packages = {ran["library"]: ran["version"], **data.get("packages", {})}
        return {
            **data,
            "packages": packages,
            "notes": [*data.get("notes", []), *filter(None, [ran.get("reason")])],
        }

    @property
    def has_result(self) -> bool:
        """Whether the run ended by itself, in a good state or not."""
        return self.status in RESULTS

    @property
    def metric(self) -> Metric:
        """The metric that verdicts are about."""
        return self.metrics[0]

    @property
    def device_kind(self) -> str:
        """The kind of the device that the run found, such as cpu or cuda; cpu for old records that do not say."""
        return str(self.environment.get("device", "cpu")).partition(":")[0]

    @property
    def training_library_text(self) -> str:
        """Name and version of the library that has trained in the place of ampcompare; "" if there is none."""
        library = self.config.parsed_arm.spec.library
        names = () if library is None else library.distributions
        return next((f"{name} {self.packages[name]}" for name in names if name in self.packages), "")

    def __str__(self) -> str:
        """Return the outcome in a line; the fields have the rest."""
        final = self.summary.metric_final
        reached = "" if final is None else f", {self.metric.name} {self.metric.value_text(final)}"
        failure = f" ({self.error})" if self.error else ""
        return f"{self.arm}, seed {self.config.recipe.seed}: {self.status}{reached}{failure}"

    def __repr__(self) -> str:
        return f"<RunRecord {self.cell} of {self}>"


def read_record(path: Path) -> RunRecord:
    """Read the record of a cell; errors are those of `read_validated_json`."""
    return read_validated_json(path, RunRecord, "run record")
