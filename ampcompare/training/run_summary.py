"""From steps and evaluations to the numbers of one run."""

from __future__ import annotations

import hashlib
import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import TOP1, Metric
from ampcompare.results.records.run import RunSummary, RunTrace, loss_tail_summary_fields
from ampcompare.results.records.step import StepRecord
from ampcompare.training.meters import PeakMemory

if TYPE_CHECKING:
    from ampcompare.training.policies import DivergenceDetector

MAX_LENGTH = 100
QUANTILES = 20
LAST_EPOCHS = 3
OUTLIER_MADS = 3
MIN_OUTLIER = 0.01  # of the median: what is nearer to it cannot move a verdict with a margin of 2 %
MAD_TO_SD = 1.4826  # of a normal distribution
MEDIAN_TO_MEAN_ERROR = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, likewise


@dataclass
class StepSampler:
    """Keeps every n-th step while steps pass; n doubles when there are too many, so that memory stays bounded.

    Steps kept are multiples of n, so that runs of one length keep the same ones and can be averaged point by point.
    """

    stride: int = 1
    points: list[tuple[int, float, float | None, int]] = field(default_factory=list)
    last: tuple[int, float, float | None, int] | None = None

    def add_step(self, record: StepRecord, skipped: int) -> None:
        """Add a step.

        Args:
            record: of the step.
            skipped: steps skipped so far, this one included.
        """
        self.last = (record.step, record.loss, record.loss_scales[0] if record.loss_scales else None, skipped)
        if record.step % self.stride == 0:
            self.points.append(self.last)
            if len(self.points) >= MAX_LENGTH:
                self.points = self.points[::2]
                self.stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the points: plain values."""
        return {"stride": self.stride, "points": list(self.points), "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.stride = int(state["stride"])
        self.points = [tuple(point) for point in state["points"]]
        self.last = None if state["last"] is None else tuple(state["last"])

    def find_trace_of_run(self, seconds: Sequence[float]) -> RunTrace | None:
        """Return the points with the last step, and quantiles of step times; None before the first step."""
        if self.last is None:
            return None
        points = (
            self.points if self.points and self.points[-1][0] == self.last[0] else [*self.points, self.last]
        )
        scales = [scale for _, _, scale, _ in points if scale is not None]
        return RunTrace(
            steps=[step for step, *_ in points],
            losses=[float(f"{loss:.6g}") for _, loss, _, _ in points],
            loss_scales=scales if len(scales) == len(points) else [],
            skipped=[skipped for *_, skipped in points],
            step_seconds=_quantiles_of_step_times(seconds),
        )


def _quantiles_of_step_times(seconds: Sequence[float]) -> list[float]:
    """Return the 0, 5, ... 100 % quantiles, to four digits."""
    if len(seconds) < 2:
        return []
    inner = statistics.quantiles(seconds, n=QUANTILES, method="inclusive")
    return [float(f"{value:.4g}") for value in (min(seconds), *inner, max(seconds))]


@dataclass
class RunMetrics:
    """Collects the numbers of a run while it trains: three floats per step."""

    warmup_steps: int  # first steps, whose times are left out
    batch_size: int  # units in one update of all processes, such as images or tokens
    metric: Metric = TOP1  # that verdicts are about
    num_steps: int = 0
    skipped_steps: int = 0
    final_loss_scale: float | None = None
    seconds: list[float] = field(default_factory=list)
    data_seconds: list[float] = field(default_factory=list)
    loader_start_seconds: float | None = None
    epochs: list[EpochResult] = field(default_factory=list)
    losses: array[float] = field(default_factory=lambda: array("d"))
    tracer: StepSampler = field(default_factory=StepSampler)
    initial_parameters: str | None = None  # hash before the first step, where it is known

    def add_steps(self, records: Sequence[StepRecord]) -> None:
        """Add a block of steps."""
        if self.loader_start_seconds is None and records:
            self.loader_start_seconds = records[0].data_seconds
        for record in records:
            self.num_steps += 1
            self.losses.append(record.loss)
            self.skipped_steps += not all(record.applied)
            self.tracer.add_step(record, self.skipped_steps)
            # Reset to None after a resume from an arm that scales its loss into one that does not.
            self.final_loss_scale = record.loss_scales[0] if record.loss_scales else None
            if record.step >= self.warmup_steps:
                self.seconds.append(record.seconds)
                self.data_seconds.append(record.data_seconds)

    def add_epoch(self, result: EpochResult) -> None:
        """Add an evaluation; only the last one keeps its results by sample."""
        if self.epochs:
            self.epochs[-1] = self.epochs[-1].model_copy(update={"per_sample": None})
        self.epochs.append(result)

    def state_dict(self) -> dict[str, Any]:
        """Return what was collected: plain values and float64 tensors, which keep every bit of a NaN."""
        return {
            "num_steps": self.num_steps,
            "skipped_steps": self.skipped_steps,
            "final_loss_scale": self.final_loss_scale,
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
            "data_seconds": torch.tensor(self.data_seconds, dtype=torch.float64),
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "epochs": [epoch.model_dump() for epoch in self.epochs],
            "tracer": self.tracer.state_dict(),
            "initial_parameters": self.initial_parameters,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.num_steps = int(state["num_steps"])
        self.skipped_steps = int(state["skipped_steps"])
        self.final_loss_scale = state["final_loss_scale"]
        self.seconds = state["seconds"].tolist()
        self.data_seconds = state["data_seconds"].tolist()
        self.losses = array("d", state["losses"].tolist())
        self.epochs = [EpochResult.model_validate(epoch) for epoch in state["epochs"]]
        self.tracer.load_state_dict(state["tracer"])
        self.initial_parameters = state.get("initial_parameters")  # older checkpoints lack it

    def summary_of_run(
        self, divergence: DivergenceDetector, memory: PeakMemory, wall_seconds: float, **facts: Any
    ) -> RunSummary:
        """Return the numbers of the run; final accuracy is None after divergence.

        Args:
            divergence: what the detector has seen.
            memory: the peak, in bytes.
            wall_seconds: of the whole run.
            facts: further fields of the summary.
        """
        epochs = self.epochs
        last = epochs[-LAST_EPOCHS:]
        ended_well = bool(epochs) and divergence.diverged_step is None
        median = statistics.median(self.seconds) if self.seconds else None
        iqr = None
        if len(self.seconds) >= 4:
            quarter, _, three_quarters = statistics.quantiles(self.seconds, n=4)
            iqr = three_quarters - quarter
        return RunSummary(
            metric_final=epochs[-1].value if ended_well else None,
            metric_best=self.metric.best(epoch.value for epoch in epochs),
            metric_last_mean=statistics.fmean(epoch.value for epoch in last) if ended_well else None,
            last_epochs=len(last),
            ema_metric_final=epochs[-1].ema_value if ended_well else None,
            ema_metric_best=self.metric.best(
                epoch.ema_value for epoch in epochs if epoch.ema_value is not None
            ),
            others_final=dict(list(epochs[-1].values.items())[1:]) if ended_well else {},
            loss_final=epochs[-1].loss if epochs else None,
            epochs=epochs,
            num_steps=self.num_steps,
            losses_sha256=hashlib.sha256(self.losses.tobytes()).hexdigest(),
            **loss_tail_summary_fields(self.losses),
            skipped_steps=self.skipped_steps,
            warmup_steps=self.warmup_steps,
            step_seconds_median=median,
            step_seconds_iqr=iqr,
            data_seconds_median=statistics.median(self.data_seconds) if self.data_seconds else None,
            loader_start_seconds=self.loader_start_seconds,
            samples_per_second=self.batch_size / median if median else None,
            epoch_seconds=statistics.median(epoch.train_seconds for epoch in epochs) if epochs else None,
            wall_seconds=wall_seconds,
            peak_bytes=memory.used,
            peak_reserved_bytes=memory.reserved,
            final_loss_scale=self.final_loss_scale,
            first_nonfinite_loss_step=divergence.first_nonfinite_loss_step,
            diverged_step=divergence.diverged_step,
            divergence=divergence.reason,
            **facts,
        )


@dataclass(frozen=True)
class _MedianStepTimesOfHalves:
    """The median step time of the first and of the second half of a run, in seconds."""

    first: float
    second: float
    error: float  # standard error of the logarithm of their ratio, by the MAD of each half


def outlier_share_of_times(seconds: Sequence[float]) -> float | None:
    """Return the share of step times that are far from the median: 3 scaled MADs, and at least a hundredth of it.

    None without step times.
    """
    if not seconds:
        return None
    median = statistics.median(seconds)
    limit = max(OUTLIER_MADS * MAD_TO_SD * _median_deviation_from(seconds, median), MIN_OUTLIER * median)
    return sum(abs(value - median) > limit for value in seconds) / len(seconds)


def find_medians_of_halves(seconds: Sequence[float]) -> _MedianStepTimesOfHalves | None:
    """Return the medians of the first and the second half, or None where one of them has no positive one."""
    parts = seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :]
    if not parts[0]:
        return None
    medians = [statistics.median(part) for part in parts]
    if min(medians) <= 0:
        return None
    errors = [
        MEDIAN_TO_MEAN_ERROR
        * MAD_TO_SD
        * _median_deviation_from(part, median)
        / (median * math.sqrt(len(part)))
        for part, median in zip(parts, medians, strict=True)
    ]
    return _MedianStepTimesOfHalves(medians[0], medians[1], math.hypot(*errors))


def _median_deviation_from(values: Sequence[float], median: float) -> float:
    return statistics.median(abs(value - median) for value in values)
