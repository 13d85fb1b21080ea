"""From what a script's process has left to the record of its cell."""

from __future__ import annotations

import hashlib
import math
import statistics
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ampcompare.base.environment.versions import fingerprint, host_name
from ampcompare.base.secrets import mask
from ampcompare.launch.script.rows import ScriptRows
from ampcompare.records.evaluation import EpochResult
from ampcompare.records.loss_tail import loss_tail
from ampcompare.records.run import EngineInfo, RunRecord, RunSummary, StepRecord
from ampcompare.records.script_metrics import metrics_of
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import LOSS, ScriptMetric
from ampcompare.training.metrics.loss_curve import Tracer

__all__ = ["failed_script", "picked", "script_record"]

TAIL_SHARE = 10  # the default metric is over the last tenth of the losses


def failed_script(config: RunConfig, error: str, *, exit_code: int = 3, **facts: Any) -> RunRecord:
    """Return the record of a script that gave no result."""
    assert config.script is not None
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status="failed",
        config=config,
        host=host_name(),
        environment={**fingerprint(), "exit_code": exit_code},
        metrics=metrics_of(config.script),
        error=mask(error, of_script=True),
        **facts,
    )


def script_record(
    config: RunConfig, rows: ScriptRows, printed: Mapping[str, Sequence[float]], *, wall_seconds: float, started: str
) -> RunRecord:
    """Return the record of a script that ended well.

    Args:
        rows: of its first process.
        printed: values of metrics with a pattern.
        wall_seconds: of the whole process.
        started: ISO 8601, UTC.
    """
    assert config.script is not None
    script, losses = config.script, [step.loss for step in rows.steps]
    values: dict[str, float] = {}
    for metric in script.metrics:
        found = list(printed[metric.name] if metric.pattern is not None else rows.scalars.get(metric.name, []))
        if not found:
            return failed_script(config, _unseen(metric, rows), started=started)
        values[metric.name] = picked(metric, found)
    if not script.metrics:
        values[LOSS] = statistics.fmean(losses[-max(1, len(losses) // TAIL_SHARE) :])
    diverged, divergence = _divergence(losses, config.nan_patience)
    status: Literal["completed", "diverged"] = "completed" if diverged is None else "diverged"
    first, *others = values
    summary = _summary(config, rows, losses, wall_seconds).model_copy(
        update={
            "metric_final": values[first] if diverged is None else None,
            "metric_best": None if math.isnan(values[first]) else values[first],
            "others_final": {name: values[name] for name in others} if diverged is None else {},
            "epochs": [EpochResult(epoch=0, samples=1, values=values, train_seconds=wall_seconds, eval_seconds=0.0)],
            "diverged_step": diverged,
            "divergence": divergence,
        }
    )
    tracer = Tracer()
    skipped = 0
    for step in rows.steps:
        skipped += not all(step.applied)
        tracer.add(step, skipped)
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status=status,
        config=config,
        engine=_engine(config, rows),
        half=rows.setup.get("half"),
        host=host_name(),
        environment={**fingerprint(), **rows.setup.get("device", {})},
        metrics=metrics_of(script),
        unit="steps",
        summary=summary,
        trace=tracer.trace(_timed(config, rows.steps)),
        started=started,
        script=rows.facts(),
    )


def picked(metric: ScriptMetric, values: Sequence[float]) -> float:
    """Return which of several values of a metric counts."""
    if metric.pick == "best":
        known = [value for value in values if not math.isnan(value)]
        choose = max if metric.goal == "max" else min
        return choose(known, default=math.nan)
    return values[0 if metric.pick == "first" else -1]


def _unseen(metric: ScriptMetric, rows: ScriptRows) -> str:
    if metric.pattern is not None:
        reason = f"no line of the script's output matches metric {metric.name}, {metric.pattern!r}"
    else:
        logged = ", ".join(sorted(rows.scalars)) or "nothing"
        reason = f"the script never logged metric {metric.name}; it logged {logged}"
    return f"{reason}. --list-metrics shows the available metrics"


def _divergence(losses: Sequence[float], patience: int) -> tuple[int | None, str | None]:
    """Return the first of `patience` non-finite losses in a row, or of two or more that end the run, and which it is.

    What a script prints as `nan` seldom matches the pattern of a metric, whose last value is then an older one.
    """
    row = 0
    for step, loss in enumerate(losses):
        row = 0 if math.isfinite(loss) else row + 1
        if row == patience:
            return step - patience + 1, f"{patience} non-finite losses in a row"
    if row > 1:
        return len(losses) - row, f"the last {row} losses are not finite"
    return None, None


def _summary(config: RunConfig, rows: ScriptRows, losses: Sequence[float], wall_seconds: float) -> RunSummary:
    steps, seconds = rows.steps, _timed(config, rows.steps)
    iqr = None
    if len(seconds) >= 4:
        quarter, _, three_quarters = statistics.quantiles(seconds, n=4)
        iqr = three_quarters - quarter
    return RunSummary(
        num_steps=len(steps),
        **loss_tail(losses),
        losses_sha256=hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses)).hexdigest(),
        skipped_steps=sum(not all(step.applied) for step in steps),
        warmup_steps=config.warmup_steps,
        step_seconds_median=statistics.median(seconds) if seconds else None,
        step_seconds_iqr=iqr,
        wall_seconds=wall_seconds,
        epoch_seconds=wall_seconds,
        peak_bytes=rows.peak_bytes,
        peak_reserved_bytes=rows.peak_reserved_bytes,
        final_loss_scale=steps[-1].loss_scales[0] if steps and steps[-1].loss_scales else None,
        first_nonfinite_loss_step=next((step.step for step in steps if not math.isfinite(step.loss)), None),
    )


def _timed(config: RunConfig, steps: Sequence[StepRecord]) -> list[float]:
    return [step.seconds for step in steps if step.step >= config.warmup_steps]


def _engine(config: RunConfig, rows: ScriptRows) -> EngineInfo | None:
    if config.parsed_arm.backend != "apex":
        return None
    version = str(rows.header.get("engine_version", "unknown"))
    name: Literal["nvidia", "compat"] = "nvidia" if rows.header.get("engine") == "nvidia" else "compat"
    return EngineInfo(name=name, version=version, reason="what the script imports as apex")
