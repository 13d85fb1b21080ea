"""The rows in words: the recommendation with its reason, and what a table does not show."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from ampcompare.analysis.criteria import Criteria
from ampcompare.analysis.identity import IDENTICAL, equal_losses, identical, other_weights
from ampcompare.analysis.learning import idle_sentences, idle_verdict, still_improving, too_wide
from ampcompare.analysis.pairs import pairs_by_seed
from ampcompare.analysis.statistics import MIN_PAIRS
from ampcompare.records.comparison import ArmSummary
from ampcompare.records.run import RunRecord

__all__ = ["KEEPS_ACCURACY", "read", "recommend"]

KEEPS_ACCURACY = (IDENTICAL, "equivalent", "non-inferior", "better")
NOT_TESTED = "inconclusive (not tested)"
MIN_SAVING = 0.05  # of memory: less than that is the noise of an allocator
HALF_ON_CPU = {
    "fp16 emulated": "fp16 was computed in fp32 and rounded (emulated)",
    "fp16 native": "fp16 ran natively",
    "bf16 emulated": "bf16 was computed in fp32 and rounded (emulated)",
}
FP16_ON_CPU = (
    "These runs are on a CPU: 16-bit times here say nothing about a GPU. {how} on this CPU; "
    "accuracy, divergence and loss scales carry over, times do not."
)


def read(
    rows: Sequence[ArmSummary], records: Sequence[RunRecord], reference: str, terms: Criteria, margin: float
) -> Iterable[str]:
    """Yield the lines under the table: what learned nothing, then the recommendation, then the rest.

    Args:
        margin: of top-1, as a share.
    """
    by_arm = {
        arm: [record for record in records if record.arm == arm] for arm in [reference, *(row.arm for row in rows)]
    }
    yield from idle_sentences(by_arm, reference)
    completed = [row for row in rows if row.completed]
    seeds = max((row.completed for row in rows), default=0)
    if completed and len(rows) > 1 and not idle_verdict(by_arm[reference]):
        if seeds < MIN_PAIRS:
            yield (
                f"{seeds} seed{'s' if seeds > 1 else ''} cannot separate arms from run-to-run noise, so "
                "no winner is reported; use --seeds 0-4 or more."
            )
        else:
            yield too_wide(by_arm[reference], reference, margin) or recommend(rows, reference, terms)
    diverged = [row for row in rows if row.diverged]
    if diverged:
        yield f"Diverged: {'; '.join(map(_rate, diverged))}."
    failed = [row for row in rows if row.failed]
    if failed:
        yield f"Failed or interrupted: {', '.join(row.arm for row in failed)}; the logs are in the cells' folders."
    if not completed:
        yield "No run was completed, so there is nothing to compare."
        return
    yield from sorted({f"{note}." for record in records for note in record.notes})
    yield from _events(rows, records)
    averaged = [text for row in completed if (text := _averaged(row.arm, records))]
    if averaged:
        yield f"Top-1 of the averaged weights (EMA) after the last epoch: {', '.join(averaged)}."
    yield from filter(None, (still_improving(by_arm, margin), _correlations(rows, reference)))
    yield from _same_bits(by_arm, reference)
    hows = {record.half for record in records if str(record.environment.get("device", "")).startswith("cpu")}
    said = [HALF_ON_CPU[how] for how in sorted(how for how in hows if how in HALF_ON_CPU)]
    if said:
        yield FP16_ON_CPU.format(how=" and ".join(said))


def _rate(row: ArmSummary) -> str:
    ran = row.completed + row.diverged
    if row.diverged_low is None or row.diverged_high is None:
        return f"{row.arm} {row.diverged}/{ran}"
    return (
        f"{row.arm} {row.diverged}/{ran} (95 % interval of the rate "
        f"{100 * row.diverged_low:.0f} to {100 * row.diverged_high:.0f} %)"
    )


def recommend(
    rows: Sequence[ArmSummary],
    reference: str,
    terms: Criteria,
    quality: str = "accuracy",
    factor: float | None = None,
) -> str:
    """Return one sentence: the arm to take for what is preferred, with its reason, or why there is none.

    An arm qualifies for time or memory where its accuracy is kept by verdict, not by a look at the mean.

    Args:
        quality: what stands for the accuracy in a table of another metric.
        factor: of the differences in that table, positive where an arm is better; None for points of accuracy.
    """
    others = [row for row in rows if row.arm != reference]
    keeps = [
        row
        for row in others
        if row.accuracy_verdict.startswith(KEEPS_ACCURACY)
        and (row.accuracy_verdict != IDENTICAL or row.pairs >= MIN_PAIRS)
    ]
    if terms.prefer == "accuracy":
        better = [row for row in others if row.accuracy_verdict == "better"]
        gain = _gain if factor is None else lambda row: f"{quality} better by {factor * (row.top1_difference or 0):.3g}"
        why = f"no arm is better than {reference}"
        return _chosen(better, terms, lambda row: -(row.top1_difference or 0), gain, why, quality)
    if others and all(row.accuracy_verdict.startswith(NOT_TESTED) for row in others):
        return f"No arm is recommended for {terms.prefer}: nothing was tested."
    if not keeps:
        return (
            f"No arm is recommended for {terms.prefer}: none was shown to be non-inferior in {quality} to {reference}."
        )
    if terms.prefer == "time":
        faster = [row for row in keeps if row.time_verdict == "better"]
        why = f"none was shown to be both non-inferior in {quality} to {reference} and faster"
        return _chosen(faster, terms, lambda row: row.time_ratio or 1, _speed, why, quality)
    smaller = [row for row in keeps if _saving(row) >= MIN_SAVING]
    why = f"no arm is both non-inferior in {quality} to {reference} and {100 * MIN_SAVING:.0f} % smaller in memory"
    return _chosen(smaller, terms, lambda row: -_saving(row), _size, why, quality)


def _chosen(
    fit: Sequence[ArmSummary],
    terms: Criteria,
    key: Callable[[ArmSummary], float],
    reason: Callable[[ArmSummary], str],
    why_none: str,
    quality: str,
) -> str:
    if not fit:
        return f"No arm is recommended for {terms.prefer}: {why_none}."
    first, *rest = sorted(fit, key=key)
    also = f"; {', '.join(f'{_named(row)} ({reason(row)})' for row in rest)} would do too" if rest else ""
    kept = "" if terms.prefer == "accuracy" else f"{quality} {first.accuracy_verdict}, "
    return f"Recommended for {terms.prefer}: {_named(first)} ({kept}{reason(first)}){also}."


def _named(row: ArmSummary) -> str:
    return row.arm if row.ran is None else f"{row.arm}, which ran as {row.ran},"


def _gain(row: ArmSummary) -> str:
    return f"{100 * (row.top1_difference or 0):+.2f} points"


def _speed(row: ArmSummary) -> str:
    return f"{row.time_ratio:.2f}x the step time"


def _saving(row: ArmSummary) -> float:
    """Return the share of the reference's peak that an arm saves."""
    if row.memory_difference is None or row.peak_bytes is None or row.peak_bytes <= row.memory_difference:
        return 0.0
    return -row.memory_difference / (row.peak_bytes - row.memory_difference)


def _size(row: ArmSummary) -> str:
    return f"{100 * _saving(row):.0f} % less memory"


def _events(rows: Sequence[ArmSummary], records: Sequence[RunRecord]) -> Iterable[str]:
    """Yield which arms trained for fewer epochs than others, and which went back to a good state."""
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
        yield f"Went back to a good state: {', '.join(returned)}; the records say at which steps."


def _correlations(rows: Sequence[ArmSummary], reference: str) -> str:
    """Return how far the accuracies of the arms follow the reference's over seeds; "" where that is not known."""
    shown = [
        f"{row.arm} {row.top1_correlation:.2f}"
        for row in rows
        if row.arm != reference and row.top1_correlation is not None
    ]
    if not shown:
        return ""
    return f"Correlation of top-1 with {reference} over seeds, which is what pairs gain by: {', '.join(shown)}."


def _same_bits(by_arm: Mapping[str, Sequence[RunRecord]], reference: str) -> Iterable[str]:
    """Yield which arms computed what the reference did, by weights and losses or by losses alone."""
    pairs = {arm: pairs_by_seed(runs, by_arm[reference]) for arm, runs in by_arm.items() if arm != reference}
    same = [arm for arm, its in pairs.items() if identical(its)]
    if same:
        yield f"Identical to {reference}, all final weights and every loss to the last bit: {', '.join(same)}."
    alike = [arm for arm, its in pairs.items() if equal_losses(its) and arm not in same]
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


def _averaged(arm: str, records: Sequence[RunRecord]) -> str:
    """Return the mean over completed runs of what the averaged weights reach; "" where none were kept."""
    reached = [
        record.summary.ema_top1_final for record in records if record.arm == arm and record.status == "completed"
    ]
    known = [share for share in reached if share is not None]
    return f"{arm} {100 * statistics.fmean(known):.2f} %" if known else ""
