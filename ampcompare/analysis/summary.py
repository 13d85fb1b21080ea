"""From records to the rows of the table, each with its verdicts against the reference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampcompare.analysis.comparability import accuracy_incomparable_reason, time_incomparable_reason
from ampcompare.analysis.counterparts import find_twins, twin_sentence
from ampcompare.analysis.criteria import Criteria
from ampcompare.analysis.recommendation import read
from ampcompare.analysis.statistics import (
    MIN_PAIRS,
    Effect,
    decide,
    interval,
    min_resolvable_spread,
    paired,
    together,
    wilson,
)
from ampcompare.analysis.time_validity import invalid_reason
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.published import Published
from ampcompare.records.run import RunRecord

__all__ = ["TIME_FLOOR", "accuracy_effects", "summarize"]

TIME_FLOOR = 0.001  # spread of a log ratio: no median of step times is known to better than a thousandth
MAX_LOGARITHM = 709.0  # of a float
Pair = tuple[RunRecord, RunRecord]


def summarize(
    records: Sequence[RunRecord],
    *,
    arms: Sequence[str],
    reference: str,
    command: str = "",
    order: Sequence[str] = (),
    terms: Criteria | None = None,
    published: Published | None = None,
) -> Comparison:
    """Sum up records into one row per arm and a reading.

    Args:
        records: of any subset of the cells; what is missing is missing in the rows.
        arms: rows in order.
        reference: the arm that pairs are made with, by seed.
        command: what was run, for the report.
        order: cells as they ran.
        terms: margins and preference.
        published: published results of the rows.
    """
    terms = terms or Criteria()
    by_arm: dict[str, list[RunRecord]] = {arm: [] for arm in arms}
    for record in records:
        by_arm.setdefault(record.arm, []).append(record)
    rows = _rows(by_arm, arms, reference, terms)
    twins = find_twins(
        {arm: by_arm[arm] for arm in arms},
        lambda twin, its: rows if twin == reference else _rows(by_arm, [twin, *its], twin, terms),
    )
    return Comparison(
        command=command,
        reference=reference,
        seeds=sorted({record.config.recipe.seed for record in records}),
        order=list(order),
        environment=next((record.environment for record in records if record.status != "failed"), {}),
        tag=terms.tag,
        margin=terms.margin,
        time_margin=terms.time_margin,
        prefer=terms.prefer,
        arms=rows,
        reading=[*read(rows, records, reference, terms), *map(twin_sentence, twins)],
        twins=twins,
        records=list(records),
        published=published,
    )


def _rows(
    by_arm: Mapping[str, list[RunRecord]], arms: Sequence[str], reference: str, terms: Criteria
) -> list[ArmSummary]:
    """Return the row of each arm, with its verdicts against `reference`."""
    pairs = {arm: _pairs(by_arm[arm], by_arm.get(reference, [])) for arm in arms}
    others = [arm for arm in arms if arm != reference]
    accuracy = _accuracy_verdicts({arm: (by_arm[arm], pairs[arm]) for arm in others}, terms)
    times = {arm: _time(pairs[arm]) for arm in arms}
    time = _time_verdicts({arm: (by_arm[arm], times[arm]) for arm in others}, terms)
    sure = together([_accuracy(pairs[arm]) for arm in others])
    sure_of_time = together([times[arm].effect for arm in others])
    peak = _peak(by_arm.get(reference, []))
    return [
        _row(arm, by_arm[arm], pairs[arm], times[arm], sure, sure_of_time).model_copy(
            update={
                "accuracy_verdict": accuracy.get(arm) or _diverged(by_arm[arm]),
                "time_verdict": time.get(arm, ""),
                "memory_difference": _difference(_peak(by_arm[arm]), peak) if arm != reference else None,
            }
        )
        for arm in arms
    ]


def accuracy_effects(records: Sequence[RunRecord], arms: Sequence[str], reference: str) -> dict[str, Effect]:
    """Return the effect on top-1, as a share, of every arm that has pairs with the reference."""
    theirs = [record for record in records if record.arm == reference]
    found = {
        arm: _accuracy(_pairs([record for record in records if record.arm == arm], theirs))
        for arm in arms
        if arm != reference
    }
    return {arm: effect for arm, effect in found.items() if effect is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _sd(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 else None


def _peak(records: Sequence[RunRecord]) -> int | None:
    return max((value for record in records if (value := record.summary.peak_bytes) is not None), default=None)


def _difference(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def _pairs(arm: Sequence[RunRecord], reference: Sequence[RunRecord]) -> list[Pair]:
    """Return the completed runs of one seed of both arms."""
    partners = {record.config.recipe.seed: record for record in reference if record.status == "completed"}
    return [
        (record, partners[record.config.recipe.seed])
        for record in arm
        if record.status == "completed" and record.config.recipe.seed in partners
    ]


def _accuracy(pairs: Sequence[Pair]) -> Effect | None:
    """Return the effect on top-1, as a share."""
    both = [
        (arm.summary.top1_final, reference.summary.top1_final, arm.summary.epochs[-1].samples)
        for arm, reference in pairs
        if arm.summary.top1_final is not None and arm.summary.epochs
    ]
    whole = [(here, there, samples) for here, there, samples in both if there is not None]
    if not whole:
        return None
    samples = min(samples for *_, samples in whole)
    return paired([here for here, *_ in whole], [there for _, there, _ in whole], min_resolvable_spread(samples))


def _diverged(records: Sequence[RunRecord]) -> str:
    count = sum(record.status == "diverged" for record in records)
    return f"diverged {count}/{len(_ran(records))}" if count else ""


def _ran(records: Sequence[RunRecord]) -> list[RunRecord]:
    return [record for record in records if record.status in ("completed", "diverged")]


def _accuracy_verdicts(arms: dict[str, tuple[list[RunRecord], list[Pair]]], terms: Criteria) -> dict[str, str]:
    """Return the verdict of each arm; the accuracy of an arm that diverged in some runs cannot be judged."""
    verdicts: dict[str, str] = {}
    for arm, (records, pairs) in arms.items():
        differs = next(filter(None, (accuracy_incomparable_reason(*pair) for pair in pairs)), "")
        verdicts[arm] = _diverged(records) or (f"not comparable ({differs})" if differs else "")
    open_arms = [arm for arm in arms if not verdicts[arm]]
    words = decide([_accuracy(arms[arm][1]) for arm in open_arms], terms.accuracy())
    return {**verdicts, **dict(zip(open_arms, words, strict=True))}


@dataclass(frozen=True)
class _Time:
    """What the step times of pairs say: an effect over the valid pairs, or why there is none, and the plain ratio."""

    effect: Effect | None
    ratio: float | None
    why_not: str


def _time(pairs: Sequence[Pair]) -> _Time:
    timed = [pair for pair in pairs if all(record.summary.step_seconds_median for record in pair)]
    ratio = _ratio(-_time_effect(timed).mean) if timed else None
    differs = next(filter(None, (time_incomparable_reason(*pair) for pair in pairs)), "")
    if differs:
        return _Time(None, ratio, f"not comparable ({differs})")
    reasons = [invalid_reason(arm) or invalid_reason(reference) for arm, reference in pairs]
    valid = [pair for pair, reason in zip(pairs, reasons, strict=True) if not reason]
    if not pairs:
        return _Time(None, None, "")
    if len(valid) < min(MIN_PAIRS, len(pairs)):
        return _Time(None, ratio, f"invalid measurement ({statistics.mode(filter(None, reasons))})")
    effect = _time_effect(valid)
    return _Time(effect, _ratio(-effect.mean), "")


def _ratio(logarithm: float) -> float:
    """Return a ratio of times by its logarithm, which an absurd record may have beyond what a float can hold."""
    return math.exp(logarithm) if logarithm < MAX_LOGARITHM else math.inf


def _time_effect(pairs: Sequence[Pair]) -> Effect:
    """Return the effect on the logarithm of the step time, positive where the arm is faster."""
    logs = [[math.log(record.summary.step_seconds_median or 1) for record in pair] for pair in pairs]
    return paired([there for _, there in logs], [here for here, _ in logs], TIME_FLOOR)


def _time_verdicts(arms: dict[str, tuple[list[RunRecord], _Time]], terms: Criteria) -> dict[str, str]:
    words = decide([time.effect for _, time in arms.values()], terms.time())
    return {
        arm: time.why_not or word or _diverged(records)
        for (arm, (records, time)), word in zip(arms.items(), words, strict=True)
    }


def _row(
    arm: str, records: Sequence[RunRecord], pairs: Sequence[Pair], time: _Time, sure: float, sure_of_time: float
) -> ArmSummary:
    done = [record for record in records if record.status == "completed"]
    ran = _ran(records)
    top1 = [record.summary.top1_final for record in done]
    accuracy = _accuracy(pairs)
    accuracy_bounds = interval(accuracy, sure) if accuracy else None
    time_bounds = interval(time.effect, sure_of_time) if time.effect else None
    engines = sorted({f"{record.engine.name} {record.engine.version}" for record in ran if record.engine})
    others = [record.effective for record in ran if record.effective]
    engines += sorted({f"{other.library} {other.version}" for other in others if other.library != "ampcompare"})
    diverged = sum(record.status == "diverged" for record in records)
    rate = wilson(diverged, len(ran)) if diverged else (None, None)
    return ArmSummary(
        arm=arm,
        engine=", ".join(engines) or None,
        half=next((record.half for record in ran if record.half), None),
        lr=records[0].config.recipe.optimizer.lr if records else float("nan"),
        seeds=sorted(record.config.recipe.seed for record in records),
        completed=len(done),
        diverged=diverged,
        failed=sum(record.status in ("failed", "interrupted") for record in records),
        top1_mean=_mean(top1),
        top1_sd=_sd(top1),
        top1_best=max((value for record in ran if (value := record.summary.top1_best) is not None), default=None),
        epoch_seconds=_mean(record.summary.epoch_seconds for record in ran),
        epoch_seconds_sd=_sd(record.summary.epoch_seconds for record in ran),
        step_seconds_median=_mean(record.summary.step_seconds_median for record in ran),
        samples_per_second=_mean(record.summary.samples_per_second for record in ran),
        start_seconds=_mean(_start_seconds(record) for record in ran),
        loader_start_seconds=_mean(record.summary.loader_start_seconds for record in ran),
        allreduce_share=_mean(record.processes.allreduce_share for record in ran if record.processes),
        peak_bytes=_peak(ran),
        time_ratio=time.ratio,
        time_ratio_low=_ratio(-time_bounds[1]) if time_bounds else None,
        time_ratio_high=_ratio(-time_bounds[0]) if time_bounds else None,
        top1_difference=accuracy.mean if accuracy else None,
        top1_difference_low=accuracy_bounds[0] if accuracy_bounds else None,
        top1_difference_high=accuracy_bounds[1] if accuracy_bounds else None,
        top1_correlation=_correlation(pairs),
        pairs=len(pairs),
        diverged_low=rate[0],
        diverged_high=rate[1],
        final_loss_scale=_mean(record.summary.final_loss_scale for record in ran),
        skipped_steps=sum(record.summary.skipped_steps for record in ran) if ran else None,
        num_steps=sum(record.summary.num_steps for record in ran) if ran else None,
        status=_status(records),
        ran=next((other.arm for other in others if not other.as_asked), None),
    )


def _start_seconds(record: RunRecord) -> float | None:
    """Return when the slowest of several processes was there, or the only one."""
    return record.processes.start_seconds if record.processes else record.summary.start_seconds


def _correlation(pairs: Sequence[Pair]) -> float | None:
    """Return how far the accuracies of two arms move together over seeds; it is what pairing gains."""
    here = [arm.summary.top1_final or 0.0 for arm, _ in pairs]
    there = [reference.summary.top1_final or 0.0 for _, reference in pairs]
    if len(pairs) < MIN_PAIRS or min(here) == max(here) or min(there) == max(there):
        return None
    return statistics.correlation(here, there)


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
