"""From records to the rows of the table and a plain reading of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ampcompare.compare.verdict import MIN_PAIRS, paired_difference, paired_ratio
from ampcompare.record import ArmSummary, Comparison, RunRecord

__all__ = ["summarize"]

ERROR_RATE = 0.05
HALF_ON_CPU = {"fp16 emulated": "was computed in fp32 and rounded (emulated)", "fp16 native": "ran natively"}
FP16_ON_CPU = (
    "These runs are on a CPU: fp16 times here say nothing about a GPU. fp16 {how} on this CPU; "
    "accuracy, divergence and loss scales carry over, times do not."
)


def summarize(
    records: Sequence[RunRecord],
    *,
    arms: Sequence[str],
    reference: str,
    command: str = "",
    order: Sequence[str] = (),
) -> Comparison:
    """Sum up records into one row per arm and a reading.

    Args:
        records: of any subset of the cells; what is missing is missing in the rows.
        arms: rows in order.
        reference: the arm that pairs are made with, by seed.
        command: what was run, for the report.
        order: cells as they ran.
    """
    by_arm = {arm: [record for record in records if record.arm == arm] for arm in arms}
    confidence = 1 - ERROR_RATE / max(1, len(arms) - 1)  # Bonferroni: each arm is one more chance to be misled
    rows = [_row(arm, by_arm[arm], by_arm.get(reference, []), confidence) for arm in arms]
    seeds = sorted({record.config.recipe.seed for record in records})
    return Comparison(
        command=command,
        reference=reference,
        seeds=seeds,
        order=list(order),
        environment=next((record.environment for record in records if record.status != "failed"), {}),
        arms=rows,
        reading=list(_reading(rows, records, reference)),
        records=list(records),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _sd(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 else None


def _row(arm: str, records: Sequence[RunRecord], reference: Sequence[RunRecord], confidence: float) -> ArmSummary:
    done = [record for record in records if record.status == "completed"]
    ran = [record for record in records if record.status in ("completed", "diverged")]
    top1 = [record.summary.top1_final for record in done]
    accuracy = _paired(done, reference, paired_difference, lambda record: record.summary.top1_final, confidence)
    time = _paired(done, reference, paired_ratio, lambda record: record.summary.step_seconds_median, confidence)
    engines = sorted({f"{record.engine.name} {record.engine.version}" for record in ran if record.engine})
    return ArmSummary(
        arm=arm,
        engine=", ".join(engines) or None,
        half=next((record.half for record in ran if record.half), None),
        lr=records[0].config.recipe.optimizer.lr if records else float("nan"),
        seeds=sorted(record.config.recipe.seed for record in records),
        completed=len(done),
        diverged=sum(record.status == "diverged" for record in records),
        failed=sum(record.status in ("failed", "interrupted") for record in records),
        top1_mean=_mean(top1),
        top1_sd=_sd(top1),
        top1_best=max((value for record in ran if (value := record.summary.top1_best) is not None), default=None),
        epoch_seconds=_mean(record.summary.epoch_seconds for record in ran),
        epoch_seconds_sd=_sd(record.summary.epoch_seconds for record in ran),
        step_seconds_median=_mean(record.summary.step_seconds_median for record in ran),
        samples_per_second=_mean(record.summary.samples_per_second for record in ran),
        peak_bytes=max((value for record in ran if (value := record.summary.peak_bytes) is not None), default=None),
        time_ratio=time[0],
        time_ratio_low=time[1],
        time_ratio_high=time[2],
        top1_difference=accuracy[0],
        top1_difference_low=accuracy[1],
        top1_difference_high=accuracy[2],
        final_loss_scale=_mean(record.summary.final_loss_scale for record in ran),
        skipped_steps=sum(record.summary.skipped_steps for record in ran) if ran else None,
        num_steps=sum(record.summary.num_steps for record in ran) if ran else None,
        status=_status(records),
    )


def _status(records: Sequence[RunRecord]) -> str:
    if not records:
        return "not run"
    words = []
    for status in ("completed", "diverged", "failed", "interrupted"):
        matching = [record for record in records if record.status == status]
        if not matching:
            continue
        share = "" if len(matching) == len(records) else f" {len(matching)}/{len(records)}"
        detail = ""
        if status == "diverged":
            detail = f" at step {min(record.summary.diverged_step or 0 for record in matching)}"
        elif status == "failed":
            detail = f": {matching[0].error}"
        words.append(("ok" if status == "completed" else status) + share + detail)
    return "; ".join(words)


def _paired(
    arm: Sequence[RunRecord],
    reference: Sequence[RunRecord],
    method: Callable[..., Any],
    value: Callable[[RunRecord], float | None],
    confidence: float,
) -> tuple[float | None, float | None, float | None]:
    """Apply `method` to the pairs of two arms: completed runs of one seed."""
    others = {record.config.recipe.seed: value(record) for record in reference if record.status == "completed"}
    pairs = [(value(record), others.get(record.config.recipe.seed)) for record in arm]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not whole:
        return None, None, None
    interval = method([a for a, _ in whole], [b for _, b in whole], confidence)
    return interval.estimate, interval.low, interval.high


def _reading(rows: Sequence[ArmSummary], records: Sequence[RunRecord], reference: str) -> Iterable[str]:
    completed = [row for row in rows if row.completed]
    seeds = max((row.completed for row in rows), default=0)
    diverged = [row for row in rows if row.diverged]
    if diverged:
        listed = ", ".join(f"{row.arm} ({row.diverged} of {len(row.seeds)})" for row in diverged)
        yield f"Diverged: {listed}."
    failed = [row for row in rows if row.failed]
    if failed:
        yield f"Failed or interrupted: {', '.join(row.arm for row in failed)}; the logs are in the cells' folders."
    if not completed:
        yield "No run was completed, so there is nothing to compare."
        return
    if len(rows) > 1 and seeds < MIN_PAIRS:
        yield (
            f"{seeds} seed{'s' if seeds > 1 else ''} cannot tell arms from the luck of the draw, so "
            "no winner is named; give --seeds 0-4 or more."
        )
    else:
        yield from _read_accuracy(rows, reference)
        yield from _read_time(rows, reference)
    same = [row.arm for row in rows if row.arm != reference and _bitwise_equal(row.arm, reference, records)]
    if same:
        yield f"Equal to {reference} to the last bit of every loss, training and validation: {', '.join(same)}."
    hows = {record.half for record in records if str(record.environment.get("device", "")).startswith("cpu")}
    said = [HALF_ON_CPU[how] for how in sorted(how for how in hows if how in HALF_ON_CPU)]
    if said:
        yield FP16_ON_CPU.format(how=" and ".join(said))


def _read_accuracy(rows: Sequence[ArmSummary], reference: str) -> Iterable[str]:
    apart: list[str] = []
    unclear: list[str] = []
    same: list[str] = []
    for row in rows:
        mean, low, high = row.top1_difference, row.top1_difference_low, row.top1_difference_high
        if row.arm != reference and mean is not None and low is not None and high is not None:
            if low == high == 0:
                same.append(row.arm)
                continue
            shown = f"{row.arm} {100 * mean:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
            (unclear if low <= 0 <= high else apart).append(shown)
    yield from _read("Top-1 in points", apart, unclear, reference)
    if same:
        yield f"Top-1 equal to {reference}'s in every seed: {', '.join(same)}."


def _read_time(rows: Sequence[ArmSummary], reference: str) -> Iterable[str]:
    apart: list[str] = []
    unclear: list[str] = []
    for row in rows:
        ratio, low, high = row.time_ratio, row.time_ratio_low, row.time_ratio_high
        if row.arm != reference and ratio is not None and low is not None and high is not None:
            shown = f"{row.arm} {ratio:.2f}x ({low:.2f} to {high:.2f})"
            (unclear if low <= 1 <= high else apart).append(shown)
    yield from _read("Step time", apart, unclear, reference)


def _read(what: str, apart: Sequence[str], unclear: Sequence[str], reference: str) -> Iterable[str]:
    if apart:
        yield f"{what}, apart from {reference} (paired interval, 95 % over all arms): {'; '.join(apart)}."
    if unclear:
        yield f"{what}, against {reference}: cannot tell {'; '.join(unclear)}."


def _bitwise_equal(arm: str, reference: str, records: Sequence[RunRecord]) -> bool:
    """Tell whether all seeds of two arms have the same losses to the last bit, and the same counts."""
    seen: dict[str, dict[int, Any]] = {arm: {}, reference: {}}
    for record in records:
        if record.arm in seen and record.status == "completed":
            results = [(epoch.loss, epoch.top1_correct, epoch.top5_correct) for epoch in record.summary.epochs]
            seen[record.arm][record.config.recipe.seed] = (record.summary.losses_sha256, results)
    return bool(seen[arm]) and seen[arm] == seen[reference]
