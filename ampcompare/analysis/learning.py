"""Whether runs learned anything: where nothing was learned, equal accuracies say nothing about the arms.

Each rule needs what newer records hold; an older record is judged by the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from ampcompare.analysis.statistics import ERROR_RATE, Effect, min_resolvable_spread, p_values, paired
from ampcompare.records.run import RunRecord

__all__ = [
    "LEARNED_NOTHING",
    "NO_VERDICT",
    "idle_pairs",
    "idle_some",
    "idle_verdict",
    "still_improving",
    "too_wide",
    "why_idle",
]

LEARNED_NOTHING = "learned nothing"
NO_VERDICT = f"no verdict (the reference {LEARNED_NOTHING})"
CHANCE_DEVIATIONS = 3.0  # binomial standard deviations over chance: one model in 700 that guesses is above
MIN_POINTS = 15  # of a loss curve: fewer show no trend
FELL = 1.645  # normal deviate of a rank test, one-sided at 5 %
LAST_SHARE = 5  # the last fifth of the epochs is compared with the fifth before


def why_idle(record: RunRecord) -> str:
    """Return why a completed run learned nothing; "" if it did, or if its record cannot tell.

    It learned nothing if all steps were skipped, no parameter changed, top-1 is within three binomial standard
    deviations of always guessing the most frequent class, or the training loss did not fall.
    """
    summary = record.summary
    if summary.num_steps and summary.skipped_steps == summary.num_steps:
        return f"all {summary.num_steps} steps skipped"
    if summary.weights_moved is False:
        return "the weights did not move"
    if summary.epochs and (majority := summary.epochs[-1].majority_correct) is not None:
        last = summary.epochs[-1]
        chance = majority / last.samples
        if last.top1 <= chance + CHANCE_DEVIATIONS * math.sqrt(chance * (1 - chance) / last.samples):
            return f"top-1 {100 * last.top1:.1f} %, chance {100 * chance:.1f} %"
    if record.trace is not None and len(record.trace.losses) >= MIN_POINTS and not _fell(record.trace.losses):
        first, later = _ends(record.trace.losses)
        return f"the loss did not fall, {statistics.median(first):.3g} to {statistics.median(later):.3g}"
    return ""


def idle_verdict(records: Sequence[RunRecord]) -> str:
    """Return the verdict on an arm of which no completed run learned anything; "" if one did, or none is there.

    It has the reason of most runs, with the numbers of the best of them.
    """
    runs = [record for record in records if record.status == "completed"]
    runs.sort(key=lambda run: run.summary.metric_final or 0.0, reverse=True)
    reasons = [why_idle(record) for record in runs]
    if not reasons or not all(reasons):
        return ""
    kind = statistics.mode(reason.partition(" ")[0] for reason in reasons)
    return f"{LEARNED_NOTHING} ({next(reason for reason in reasons if reason.startswith(kind))})"


def idle_pairs(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> str:
    """Return the verdict where in some pairs neither run learned anything: such pairs agree whatever the arm does."""
    reasons = [reason for arm, other in pairs if (reason := why_idle(arm)) and why_idle(other)]
    if not reasons:
        return ""
    return f"{LEARNED_NOTHING} in {len(reasons)} of {len(pairs)} pairs ({statistics.mode(reasons)})"


def too_wide(runs: Sequence[RunRecord], reference: str, margin: float) -> str:
    """Return that an arm which only guesses would be equivalent, so that no verdict by the margin means anything.

    Args:
        runs: of the reference.
        margin: of top-1, as a share.
    """
    last = [(record.summary.metric_final, record.summary.epochs[-1]) for record in runs
            if record.status == "completed" and record.summary.epochs]  # fmt: skip
    gains = [top1 - (epoch.majority_correct or 0) / epoch.samples for top1, epoch in last if top1 is not None]
    if not gains or idle_verdict(runs) or margin < statistics.fmean(gains):
        return ""
    gain = 100 * statistics.fmean(gains)
    return (
        f"No verdict counts at a margin of ±{100 * margin:g} pp: {reference} is only {gain:.1f} pp better than "
        "guessing, so an arm that learned nothing would be equivalent."
    )


def idle_some(by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterator[str]:
    """Yield which arms learned nothing in some of their runs, though not in all."""
    some = []
    for arm, records in by_arm.items():
        completed = [record for record in records if record.status == "completed"]
        idle = sum(bool(why_idle(record)) for record in completed)
        if 0 < idle < len(completed):
            some.append(f"{arm} in {idle} of {len(completed)}")
    if some:
        yield f"Some runs learned nothing and count in the means: {', '.join(some)}."


def still_improving(by_arm: Mapping[str, Sequence[RunRecord]], margin: float) -> str:
    """Return which arms were still improving when they ended; "" if none was shown to be.

    The mean top-1 of the last fifth of the epochs is compared with that of the fifth before. An arm counts if that gain
    is above 0 in a one-sided t test over its runs, at 5 % for all arms together, and larger than the margin: smaller
    gains cannot change a verdict much. Fewer than three runs, or a single epoch, show nothing.

    Args:
        margin: as a share of the images.
    """
    gains = {arm: _late_gain(records) for arm, records in by_arm.items()}
    tested = {arm: gain for arm, gain in gains.items() if gain is not None and gain.testable}
    rising = [
        f"{arm} {100 * gain.mean:+.2f} pp"
        for arm, gain in tested.items()
        if gain.mean > margin and p_values(gain, 0.0).non_inferior < ERROR_RATE / len(tested)
    ]
    if not rising:
        return ""
    return f"Still improving at the end, so that more epochs may change the order: {', '.join(rising)}."


def _fell(losses: Sequence[float]) -> bool:
    """Return whether a loss curve shows a fall: over its length, or in its first steps before a plateau."""
    first, later = _ends(losses)
    half = losses[len(losses) // 2 :]
    return (
        _rank_deviate(first, later) > FELL
        or _rank_deviate(losses[:3], half) > FELL
        or _ordered(losses[0]) > max(map(_ordered, half))
    )


def _ends(losses: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last third of a curve."""
    third = len(losses) // 3
    return losses[:third], losses[-third:]


def _ordered(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _rank_deviate(early: Sequence[float], late: Sequence[float]) -> float:
    """Return the normal deviate of Mann and Whitney's U, large where early losses are above late ones.

    Ranks, because one spike of a loss would hide a fall from a test of means.
    """
    above = sum(
        1.0 if one > other else 0.5 if one == other else 0.0
        for one in map(_ordered, early)
        for other in map(_ordered, late)
    )
    product = len(early) * len(late)
    return (above - product / 2) / math.sqrt(product * (len(early) + len(late) + 1) / 12)


def _late_gain(records: Sequence[RunRecord]) -> Effect | None:
    """Return by how much top-1 rose from the last fifth of the epochs but one to the last, over completed runs."""
    late, before, samples = [], [], []
    for record in records:
        top1 = [epoch.top1 for epoch in record.summary.epochs]
        width = max(1, len(top1) // LAST_SHARE)
        if record.status == "completed" and len(top1) >= 2 * width:
            late.append(statistics.fmean(top1[-width:]))
            before.append(statistics.fmean(top1[-2 * width : -width]))
            samples.append(record.summary.epochs[-1].samples)
    return paired(late, before, min_resolvable_spread(min(samples))) if late else None
