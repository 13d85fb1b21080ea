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
from ampcompare.launch.script.output import Printed
from ampcompare.launch.script.rows import ScriptRows
from ampcompare.records.evaluation import EpochResult
from ampcompare.records.metric import metrics_of
from ampcompare.records.run import EngineInfo, RunRecord, RunSummary, StepRecord
from ampcompare.records.summary import loss_tail
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import LOSS, ScriptMetric
from ampcompare.training.metrics.run_summary import Tracer

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
    config: RunConfig,
    rows: ScriptRows,
    printed: Mapping[str, Sequence[float]],
    *,
    wall_seconds: float,
    started: str,
    faults: Mapping[str, str] | None = None,
) -> RunRecord:
    """Return the record of a script that ended well.

    Args:
        rows: of its first process.
        printed: values of metrics with a pattern.
        faults: numbers of which a pattern has matched a part, by metric.
        wall_seconds: of the whole process.
        started: ISO 8601, UTC.
    """
    assert config.script is not None
    script, losses = config.script, [step.loss for step in rows.steps]
    values: dict[str, float] = {}
    steps: dict[str, float] = {}
    seen: dict[str, int] = {}
    notes: list[str] = []
    lost = ""
    for metric in script.metrics:
        found = list(printed[metric.name] if metric.pattern is not None else rows.scalars.get(metric.name, []))
        if not found:
            return failed_script(config, _unseen(metric, rows), started=started)
        found, fault, note = _of_one_rank(metric.name, found)
        if fault := fault or (faults or {}).get(metric.name, ""):
            return failed_script(config, fault, started=started)
        notes += [note] if note else []
        seen[metric.name] = sum(not getattr(value, "passing", False) for value in found)
        values[metric.name] = picked(metric, found)
        if isinstance(value := values[metric.name], Printed):
            steps[metric.name] = value.step
        lost = lost or ("" if values.keys() - {metric.name} else _lost(metric, found, values[metric.name]))
    if not script.metrics:
        values[LOSS] = statistics.fmean(losses[-max(1, len(losses) // TAIL_SHARE) :])
    diverged, divergence = _divergence(losses, config.nan_patience)
    if diverged is None and lost:
        diverged, divergence = max(0, len(losses) - 1), lost
    status: Literal["completed", "diverged"] = "completed" if diverged is None else "diverged"
    first, *others = values
    summary = _summary(config, rows, losses, wall_seconds).model_copy(
        update={
            "metric_final": values[first] if diverged is None else None,
            "metric_best": values[first] if math.isfinite(values[first]) else None,
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
        script=rows.facts().model_copy(update={"notes": [*rows.notes, *notes], "printed": steps, "seen": seen}),
    )


def _of_one_rank(name: str, values: list[float]) -> tuple[list[float], str, str]:
    """Return the values of rank 0, or of the rank that printed any; why there are none, and a note if ranks differ."""
    by_rank: dict[int | None, list[float]] = {}
    for value in values:
        by_rank.setdefault(getattr(value, "rank", None), []).append(value)
    if len(by_rank) == 1:
        return values, "", ""
    first = min(rank for rank in by_rank if rank is not None)
    others = {rank: its for rank, its in by_rank.items() if repr(its) != repr(by_rank[first])}
    if not others:
        return by_rank[first], "", ""
    other, its = next(iter(others.items()))
    shown = f"{by_rank[first][-1]:g} and {its[-1]:g}"
    whom = f"rank {first} and {'another process' if other is None else f'rank {other}'}"
    if first == 0:
        return by_rank[0], "", f"{whom} printed different values of {name} ({shown} in the end), and rank 0's count"
    return values, f"{whom} printed different values of metric {name} ({shown} in the end); print it on rank 0", ""


def _lost(metric: ScriptMetric, values: Sequence[float], value: float) -> str:
    """Return that a metric ended as no number, or has none that counts; "" if it is one."""
    if metric.pick != "first" and not math.isfinite(values[-1]):
        return f"the last {metric.name} is {values[-1]:g}"
    return "" if math.isfinite(value) else f"the {metric.pick} {metric.name} is {value:g}"


def picked(metric: ScriptMetric, values: Sequence[float]) -> float:
    """Return which of several values of a metric counts."""
    if metric.pick == "best":
        known = [value for value in values if math.isfinite(value)]
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
    """Return the first of `patience` non-finite losses in a row, or of two or more at the end, and which it is."""
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
