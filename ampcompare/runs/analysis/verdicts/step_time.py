"""Step time from pairs of runs: an effect over the valid pairs and a verdict for each arm.

Where all cells have timing rounds, these are compared and the times of the runs themselves are left out: a round
compares seconds that are close to each other. The rounds of a seed are averaged into one pair. They share its data,
weights and minutes, and what those do to an arm is in all of them: as pairs they would pass for seeds that never ran.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from ampcompare.runs.analysis.inference.effect import MIN_PAIRS, Effect, paired
from ampcompare.runs.analysis.inference.verdict import Evidence
from ampcompare.runs.analysis.runs.comparability import time_reason
from ampcompare.runs.analysis.runs.pairs import Pair, divergence_verdict
from ampcompare.runs.analysis.runs.time_validity import invalid_reason
from ampcompare.runs.records.run import RunRecord, TimingRound

__all__ = ["TIME_FLOOR", "ratio_of", "rounds_sentence", "step_times", "time_evidence"]

TIME_FLOOR = 0.001  # spread of a log ratio: no median of step times is known to better than a thousandth
MAX_LOGARITHM = 709.0  # of a float


def step_times(pairs: Sequence[Pair], *, same_software: bool = True) -> Evidence:
    """Return the effect over the valid pairs, or why there is none; the mean is over all pairs where none is valid."""
    differs = time_reason(pairs, same_software=same_software)
    rounds = [_rounds_of(pair) for pair in pairs]
    seeds = rounds if all(rounds) else [[pair] for pair in pairs]
    timed = _kept(seeds, lambda pair: all(record.summary.step_seconds_median for record in pair))
    mean = _time_effect(timed).mean if timed else None
    if differs:
        return Evidence(None, f"not comparable ({differs})", mean)
    valid = _kept(seeds, lambda pair: not _invalid(pair))
    if not pairs:
        return Evidence()
    if len(valid) < min(MIN_PAIRS, len(seeds)):
        reasons = [_invalid(pair) for seed in seeds for pair in seed]
        return Evidence(None, f"invalid measurement ({statistics.mode(filter(None, reasons))})", mean)
    effect = _time_effect(valid)
    return Evidence(effect, mean=effect.mean)


def _invalid(pair: Pair) -> str:
    arm, reference = pair
    return invalid_reason(arm) or invalid_reason(reference)


def _kept(seeds: Sequence[Sequence[Pair]], use: Callable[[Pair], bool]) -> list[list[Pair]]:
    """Return the measurements of each seed that are of use, without seeds that have none."""
    return [kept for seed in seeds if (kept := [pair for pair in seed if use(pair)])]


def _rounds_of(pair: Pair) -> list[Pair]:
    """Return each timing round of both cells as a pair of records with its times."""
    arm, reference = (
        {timing.number: timing for timing in record.timing_rounds if timing.step_seconds_median} for record in pair
    )
    both = sorted(set(arm) & set(reference))
    return [(_in_round(pair[0], arm[number]), _in_round(pair[1], reference[number])) for number in both]


def _in_round(record: RunRecord, timing: TimingRound) -> RunRecord:
    """Return the record of a cell with the times and readings of a round instead of those of its run."""
    times = {"step_seconds_median": timing.step_seconds_median, "data_seconds_median": timing.data_seconds_median}
    return record.model_copy(
        update={"summary": record.summary.model_copy(update=times), "readings": timing.readings or record.readings}
    )


def rounds_sentence(records: Sequence[RunRecord]) -> str:
    """Return a sentence on the timing rounds that the verdicts on time are from; "" if there are none."""
    counts = [len(record.timing_rounds) for record in records if record.status == "completed"]
    if not any(counts):
        return ""
    if not all(counts):
        lacking = f"{counts.count(0)} of {len(counts)} cells lack them"
        return f"Step times of an arm are compared over runs, not over timing rounds, where a cell has none: {lacking}."
    each = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return (
        f"Step times are compared over timing rounds ({each} of each cell), in which arms take turns, not over runs; "
        "the rounds of a seed count as one pair."
    )


def ratio_of(logarithm: float) -> float:
    """Return a ratio of times by its logarithm, which an absurd record may have beyond what a float can hold."""
    return math.exp(logarithm) if logarithm < MAX_LOGARITHM else math.inf


def _time_effect(seeds: Sequence[Sequence[Pair]]) -> Effect:
    """Return the effect on the logarithm of the step time over the means of seeds, positive where the arm is faster."""
    logs = [[statistics.fmean(map(_log_time, side)) for side in zip(*seed, strict=True)] for seed in seeds]
    return paired([there for _, there in logs], [here for here, _ in logs], TIME_FLOOR)


def _log_time(record: RunRecord) -> float:
    return math.log(record.summary.step_seconds_median or 1)


def time_evidence(records: Sequence[RunRecord], pairs: Sequence[Pair], *, same_software: bool = True) -> Evidence:
    """Return what pairs say of the step time; without a test there is a word."""
    times = step_times(pairs, same_software=same_software)
    return times if times.effect or times.word else replace(times, word=divergence_verdict(records))
