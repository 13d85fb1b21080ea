"""From steps and evaluations to the numbers of one run."""

from __future__ import annotations

import hashlib
import statistics
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcompare.records.evaluation import EpochResult
from ampcompare.records.loss_tail import loss_tail
from ampcompare.records.metric import TOP1, Metric
from ampcompare.records.run import RunSummary, StepRecord
from ampcompare.training.metrics.loss_curve import Tracer
from ampcompare.training.metrics.memory import PeakMemory
from ampcompare.training.policies.divergence import DivergenceDetector

__all__ = ["RunMetrics"]

LAST_EPOCHS = 3


@dataclass
class RunMetrics:
    """Collects the numbers of a run while it trains: three floats per step.

    Args:
        warmup_steps: first steps, whose times are left out.
        batch_size: units in one update of all processes, such as images or tokens.
        metric: that verdicts are about.
        initial_parameters: hash of the parameters before the first step of the run; None where it is not known.
    """

    warmup_steps: int
    batch_size: int
    metric: Metric = TOP1
    num_steps: int = 0
    skipped_steps: int = 0
    final_loss_scale: float | None = None
    seconds: list[float] = field(default_factory=list)
    data_seconds: list[float] = field(default_factory=list)
    loader_start_seconds: float | None = None
    epochs: list[EpochResult] = field(default_factory=list)
    losses: array[float] = field(default_factory=lambda: array("d"))
    tracer: Tracer = field(default_factory=Tracer)
    initial_parameters: str | None = None

    def add_steps(self, records: Sequence[StepRecord]) -> None:
        """Add a block of steps."""
        if self.loader_start_seconds is None and records:
            self.loader_start_seconds = records[0].data_seconds
        for record in records:
            self.num_steps += 1
            self.losses.append(record.loss)
            self.skipped_steps += not all(record.applied)
            self.tracer.add(record, self.skipped_steps)
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

    def summary(
        self, divergence: DivergenceDetector, memory: PeakMemory, wall_seconds: float, **facts: Any
    ) -> RunSummary:
        """Return the numbers of the run, with further fields from `facts`; final accuracy is None after divergence."""
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
            ema_metric_best=self.metric.best(epoch.ema_value for epoch in epochs if epoch.ema_value is not None),
            others_final=dict(list(epochs[-1].values.items())[1:]) if ended_well else {},
            loss_final=epochs[-1].loss if epochs else None,
            epochs=epochs,
            num_steps=self.num_steps,
            losses_sha256=_sha256(self.losses),
            **loss_tail(self.losses),
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


def _sha256(values: array[float]) -> str:
    """Return the hash of the values as little-endian float64."""
    if sys.byteorder == "big":
        values = array("d", values)
        values.byteswap()
    return hashlib.sha256(values.tobytes()).hexdigest()
