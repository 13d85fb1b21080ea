"""The recommended arm, from the verdicts only, and notes that neither tables nor headline show."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from ampcompare.analysis.answer.headline_accuracy import on_these_samples, with_interval
from ampcompare.analysis.answer.headline_cost import MIN_SAVING, memory_saving, on_device, shown_saving, step_time_of
from ampcompare.analysis.answer.phrases import Quality, label_of, sentence_start
from ampcompare.analysis.inference.effect import MIN_PAIRS
from ampcompare.analysis.runs.identity import IDENTICAL, equal_losses, identical, other_weights
from ampcompare.analysis.runs.learning import idle_verdict, still_improving, too_wide
from ampcompare.analysis.runs.pairs import pairs_by_seed
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.metric import Metric
from ampcompare.records.run import RunRecord

__all__ = ["KEEPS_ACCURACY", "details", "not_recommended", "recommended", "use_sentence"]

KEEPS_ACCURACY = (IDENTICAL, "equivalent", "non-inferior", "better")
HALF_ON_CPU = {
    "fp16 emulated": "fp16 was computed in fp32 and rounded (emulated)",
    "fp16 native": "fp16 ran natively",
    "bf16 emulated": "bf16 was computed in fp32 and rounded (emulated)",
    "fp8 emulated": "operands of fp8 were rounded and multiplied in fp32 (emulated)",
}
FP16_ON_CPU = "{how} on this CPU: accuracy, divergence and loss scales carry over to a GPU, 16-bit step times do not."


def recommended(rows: Sequence[ArmSummary], prefer: str, metric: Metric) -> list[ArmSummary]:
    """Return the arms to use for what is preferred, the best first.

    For time or memory an arm qualifies where its accuracy is kept by verdict, not by a look at the mean. An arm that is
    identical in fewer than three pairs was hardly tried.

    Args:
        rows: without the reference.
        metric: of the differences.
    """
    if prefer == "accuracy":
        better = [row for row in rows if row.accuracy_verdict == "better"]
        return sorted(better, key=lambda row: -metric.scores_of(row.metric_difference or 0))
    keeps = _keeping(rows)
    if prefer == "time":
        return sorted((row for row in keeps if row.time_verdict == "better"), key=lambda row: row.time_ratio or 1)
    return sorted((row for row in keeps if memory_saving(row) >= MIN_SAVING), key=lambda row: -memory_saving(row))


def _keeping(rows: Sequence[ArmSummary]) -> list[ArmSummary]:
    return [
        row
        for row in rows
        if row.accuracy_verdict.startswith(KEEPS_ACCURACY)
        and (row.accuracy_verdict != IDENTICAL or row.pairs >= MIN_PAIRS)
    ]


def use_sentence(row: ArmSummary, comparison: Comparison, quality: Quality) -> str:
    """Return the recommendation of an arm, with what it keeps and what it saves."""
    reference, samples = comparison.reference, on_these_samples([row], comparison)
    change = with_interval(row, quality)
    if row.accuracy_verdict == "better":
        kept = f"better {quality.name} than {reference} ({change}){samples}"
    elif row.accuracy_verdict == IDENTICAL:
        kept = f"identical to {reference}"
    else:
        side = "within ±" if row.accuracy_verdict.startswith("equivalent") else "margin "
        change = quality.with_unit(row.metric_difference or 0)
        shown = f"Δ {change}, {side}{comparison.metric.margin_text(comparison.margin)}"
        kept = f"{quality.name} of {reference} kept ({shown}){samples}"
    gains = []
    if row.time_verdict == "better":
        gains.append(f"{step_time_of(row)} its step time{on_device(comparison)}")
    if memory_saving(row) >= MIN_SAVING and (comparison.prefer == "memory" or not on_device(comparison)):
        gains.append(f"{shown_saving(row)} peak memory")
    if comparison.prefer == "memory":
        gains.reverse()
    return f"Use {label_of(row)}: {', '.join([kept, *gains])}."


def not_recommended(rows: Sequence[ArmSummary], reference: str, prefer: str, quality: str = "accuracy") -> str:
    """Return why no arm is recommended, for rows of which none is."""
    if prefer == "accuracy":
        why = f"no arm is better than {reference}"
    elif not _keeping(rows):
        why = f"none was shown to be non-inferior in {quality} to {reference}"
    elif prefer == "time":
        why = f"none was shown to be both non-inferior in {quality} to {reference} and faster"
    else:
        why = f"no arm is both non-inferior in {quality} to {reference} and {100 * MIN_SAVING:.0f} % smaller in memory"
    return f"No arm is recommended for {prefer}: {why}."


def details(comparison: Comparison) -> Iterable[str]:
    """Yield what neither the headline nor the tables show of the runs of a comparison."""
    rows, records, reference = comparison.arms, comparison.records, comparison.reference
    margin, metric = comparison.margin, comparison.metric
    by_arm = {
        arm: [record for record in records if record.arm == arm] for arm in [reference, *(row.arm for row in rows)]
    }
    others = [row for row in rows if row.arm != reference]
    enough = max((row.completed for row in rows), default=0) >= MIN_PAIRS
    untested = comparison.error_rate == 0
    blocked = untested or idle_verdict(by_arm[reference]) or too_wide(by_arm[reference], reference, margin)
    if others and enough and not blocked and not recommended(others, comparison.prefer, metric):
        yield not_recommended(others, reference, comparison.prefer, metric.quality)
    diverged = [row for row in rows if row.diverged]
    if diverged:
        yield f"Rate of divergence: {'; '.join(map(_rate, diverged))}."
    failed = [row.arm for row in rows if row.failed]
    if failed:
        yield f"The logs of runs that failed or were interrupted are in their cells' folders: {', '.join(failed)}."
    if not any(row.completed for row in rows):
        return
    yield from sorted({f"{note}." for record in records for note in record.notes})
    yield from _events(rows, records)
    averaged = [text for row in rows if row.completed and (text := _averaged(row.arm, records, metric))]
    if averaged:
        name = sentence_start(metric.name)
        yield f"{name} of the averaged weights (EMA) after the last epoch: {', '.join(averaged)}."
    yield from filter(None, (still_improving(by_arm, margin), _correlations(rows, reference, metric)))
    yield from _same_bits(by_arm, reference)
    hows = {record.half for record in records if str(record.environment.get("device", "")).startswith("cpu")}
    said = [HALF_ON_CPU[how] for how in sorted(how for how in hows if how in HALF_ON_CPU)]
    if said:
        yield FP16_ON_CPU.format(how=" and ".join(said))


def _rate(row: ArmSummary) -> str:
    ran = row.completed + row.diverged
    if row.diverged_low is None or row.diverged_high is None:
        return f"{row.arm} {row.diverged}/{ran}"
    interval = f"{100 * row.diverged_low:.0f} to {100 * row.diverged_high:.0f} %"
    return f"{row.arm} {row.diverged}/{ran} (95 % interval {interval})"


def _events(rows: Sequence[ArmSummary], records: Sequence[RunRecord]) -> Iterable[str]:
    """Yield which arms trained for fewer epochs than others, and which rolled back to a good state."""
    ended, returned = [], []
    for row in rows:
        runs = [record.summary for record in records if record.arm == row.arm]
        if early := sum(run.ended is not None for run in runs):
            ended.append(f"{row.arm} {early}/{len(runs)}")
        if back := sum(bool(run.rollbacks) for run in runs):
            returned.append(f"{row.arm} {back}/{len(runs)}")
    if ended:
        yield f"Ended before the last epoch, as the recipe allows: {', '.join(ended)}; the records say why."
    if returned:
        yield f"Rolled back to a good state: {', '.join(returned)}; the records say at which steps."


def _correlations(rows: Sequence[ArmSummary], reference: str, metric: Metric) -> str:
    """Return how far the values of the arms follow the reference's over seeds; "" where that is not known."""
    shown = [
        f"{row.arm} {row.metric_correlation:.2f}"
        for row in rows
        if row.arm != reference and row.metric_correlation is not None
    ]
    if not shown:
        return ""
    return f"Correlation of {metric.name} with {reference} over seeds: {', '.join(shown)}."


def _same_bits(by_arm: Mapping[str, Sequence[RunRecord]], reference: str) -> Iterable[str]:
    """Yield which arms had the losses of the reference, and weights that differ or are not known."""
    pairs = {arm: pairs_by_seed(runs, by_arm[reference]) for arm, runs in by_arm.items() if arm != reference}
    alike = [arm for arm, its in pairs.items() if equal_losses(its) and not identical(its)]
    apart = [arm for arm in alike if other_weights(pairs[arm])]
    unknown = [arm for arm in alike if arm not in apart]
    for arms, weights in (
        (apart, "their final weights differ"),
        (unknown, "their final weights are not known to be equal"),
    ):
        if arms:
            yield (
                f"Equal to {reference} to the last bit of every loss, training and validation: {', '.join(arms)}; "
                f"{weights}."
            )


def _averaged(arm: str, records: Sequence[RunRecord], metric: Metric) -> str:
    """Return the mean over completed runs of what the averaged weights reach; "" where none were kept."""
    reached = [
        record.summary.ema_metric_final for record in records if record.arm == arm and record.status == "completed"
    ]
    known = [value for value in reached if value is not None]
    return f"{arm} {metric.shown(statistics.fmean(known))}" if known else ""
