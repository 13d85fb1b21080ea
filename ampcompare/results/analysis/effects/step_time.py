"""Step time: which times are valid, and from pairs of runs an effect over the valid ones and a verdict for each arm.

An invalid time is not a slow one: it gives no verdict. Where all cells have timing rounds, these are compared and the
times of the runs themselves are left out: a round compares seconds that are close to each other. The rounds of a seed
are averaged into one pair. They share its data, weights and minutes, and what those do to an arm is in all of them: as
pairs they would pass for seeds that never ran.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from ampcompare.results.analysis.inference.effect import MIN_PAIRS, Effect, paired_effect
from ampcompare.results.analysis.inference.verdict import Evidence
from ampcompare.results.analysis.pairing.comparability import incomparable_time_verdict
from ampcompare.results.analysis.pairing.pairs import Pair, Pairing, divergence_verdict
from ampcompare.results.records.run import RunRecord, SystemReadings, TimingRound
from ampcompare.results.records.verdict import Verdict

MIN_STEPS = 30
# A median holds until half of the steps are others. At a quarter it stays within the spread of the rest, whatever the
# outliers are; beyond, a run may have one of two speeds for its median, and the next run the other.
MAX_OUTLIERS = 0.25
MAX_CHANGE = 0.05  # of the step time, from the first half of a run to the second
# standard errors by which the halves must differ as well, so that noise is not taken for a change
ERRORS_APART = 3
MAX_DATA_WAIT = 0.10
MIN_CPU_SHARE = 0.90
# of the wall time: beyond, cells that run at the same time slow each other down on the host
MAX_WAITING = 0.05
# A laptop's clock moves with what its other cores do; a GPU's stays where load and limits put it.
MAX_CLOCK_SPREAD = {"cpu": 0.15, "cuda": 0.05}
# Under a long fp16 product a GPU in good order runs at its power limit; where that moves the clock, the clock tells.
NORMAL = frozenset({"power limit"})


def invalid_time_reason(record: RunRecord) -> str:
    """Return what invalidates the step times of a run, with the value read; "" if nothing does.

    The reasons follow mudler/vllm.cpp#2005: enough samples, a steady clock, no throttling, no other process on the
    device, a load below the number of cores. Records without readings are judged by what they have.
    """
    summary, readings = record.summary, record.readings
    timed = readings.timed_steps if readings else max(0, summary.num_steps - summary.warmup_steps)
    if timed < MIN_STEPS:
        return f"{timed} timed steps, {MIN_STEPS} needed"
    step, wait = summary.step_seconds_median, summary.data_seconds_median
    if step and wait and wait > MAX_DATA_WAIT * step:
        return f"data-bound: waits {100 * wait / step:.0f} % of a step for data"
    if readings is None:
        return ""
    others = _timing_interference_reason(record, readings) or _unsteady_clock_reason(record, readings)
    if not others and readings.outlier_share is not None and readings.outlier_share > MAX_OUTLIERS:
        return f"{100 * readings.outlier_share:.0f} % of steps are outliers"
    return others or _step_time_drift_reason(readings)


def _timing_interference_reason(record: RunRecord, readings: SystemReadings) -> str:
    """Return what else held up the device or the cores of a run; "" if nothing did."""
    slowed = [reason for reason in readings.throttled if reason not in NORMAL]
    if slowed:
        return f"GPU slowed by {' and '.join(slowed)}"
    if readings.other_processes:
        return f"{readings.other_processes} other on the GPU"
    if readings.load_average is not None and readings.cores and readings.load_average > readings.cores:
        return f"load {readings.load_average:.1f} on {readings.cores} cores"
    if record.jobs > 1 and readings.waiting_share is not None and readings.waiting_share > MAX_WAITING:
        return f"waits {100 * readings.waiting_share:.0f} % of the time for a core, next to other cells"
    alone = record.config.workers == 0 and record.config.threads == 1
    if alone and readings.cpu_share is not None and readings.cpu_share < MIN_CPU_SHARE:
        return f"had {100 * readings.cpu_share:.0f} % of a core"
    return ""


def _unsteady_clock_reason(record: RunRecord, readings: SystemReadings) -> str:
    """Return how the clock of a run's device moved, or that it was not read where it must be; "" if it was steady."""
    low, high = readings.clock_low_mhz, readings.clock_high_mhz
    kind = "cuda" if record.device_kind == "cuda" else "cpu"
    if kind == "cuda" and record.jobs > 1 and low is None:  # an arm that heats its neighbors would go unseen
        return "the clock of a GPU next to other cells was not read (extra gpu)"
    if low and high and high / low - 1 > MAX_CLOCK_SPREAD[kind]:
        return f"clock {low:.0f} to {high:.0f} MHz"
    return ""


def invalid_time_reason_of_arm(records: Sequence[RunRecord]) -> str:
    """Return the most frequent reason for invalid step times of an arm if fewer than three runs (or all) are valid."""
    reasons = [reason for record in records if (reason := invalid_time_reason(record))]
    is_valid = len(records) - len(reasons) >= min(MIN_PAIRS, len(records))
    return "" if is_valid else statistics.mode(reasons)


def _step_time_drift_reason(readings: SystemReadings) -> str:
    """Return how the step time changed from the first half of the run to the second, if it did; else ""."""
    first = readings.first_half_seconds
    second = readings.second_half_seconds
    error = readings.halves_error
    if not first or not second or error is None:
        return ""
    change = math.log(second / first)
    if abs(change) <= max(math.log1p(MAX_CHANGE), ERRORS_APART * error):
        return ""
    return f"second half {100 * abs(second / first - 1):.0f} % {'slower' if change > 0 else 'faster'}"


TIME_FLOOR = 0.001  # spread of a log ratio: no median of step times is known to better than a thousandth
MAX_LOGARITHM = 709.0  # of a float


def step_time_evidence(pairing: Pairing) -> Evidence:
    """Return the effect over the valid pairs, or a verdict without a test; the mean is over all pairs where none is
    valid.
    """
    pairs = pairing.pairs
    untested = incomparable_time_verdict(pairing)
    rounds = [_timing_round_pairs(pair) for pair in pairs]
    seeds = rounds if all(rounds) else [[pair] for pair in pairs]
    timed = _usable_pairs_by_seed(
        seeds, lambda pair: all(record.summary.step_seconds_median for record in pair)
    )
    mean = _time_effect(timed).mean if timed else None
    if untested:
        return Evidence(None, untested, mean)
    valid = _usable_pairs_by_seed(seeds, lambda pair: not _invalid_time_reason_of_pair(pair))
    if not pairs:
        return Evidence(untested=divergence_verdict(pairing.arm))
    if len(valid) < min(MIN_PAIRS, len(seeds)):
        reasons = [_invalid_time_reason_of_pair(pair) for seed in seeds for pair in seed]
        return Evidence(None, Verdict(kind="invalid", why=statistics.mode(filter(None, reasons))), mean)
    effect = _time_effect(valid)
    return Evidence(effect, mean=effect.mean)


def _invalid_time_reason_of_pair(pair: Pair) -> str:
    arm, reference = pair
    return invalid_time_reason(arm) or invalid_time_reason(reference)


def _usable_pairs_by_seed(
    pairs_by_seed: Sequence[Sequence[Pair]], is_usable: Callable[[Pair], bool]
) -> list[list[Pair]]:
    """Return the measurements of each seed that are of use, without seeds that have none."""
    return [kept for seed in pairs_by_seed if (kept := [pair for pair in seed if is_usable(pair)])]


def _timing_round_pairs(pair: Pair) -> list[Pair]:
    """Return each timing round of both cells as a pair of records with its times."""
    arm, reference = (
        {timing.number: timing for timing in record.timing_rounds if timing.step_seconds_median}
        for record in pair
    )
    both = sorted(set(arm) & set(reference))
    return [
        (_record_with_round_times(pair[0], arm[number]), _record_with_round_times(pair[1], reference[number]))
        for number in both
    ]


def _record_with_round_times(record: RunRecord, timing: TimingRound) -> RunRecord:
    """Return the record of a cell with the times and readings of a round instead of those of its run."""
    times = {
        "step_seconds_median": timing.step_seconds_median,
        "data_seconds_median": timing.data_seconds_median,
    }
    return record.model_copy(
        update={
            "summary": record.summary.model_copy(update=times),
            "readings": timing.readings or record.readings,
        }
    )


def timing_rounds_sentence(records: Sequence[RunRecord]) -> str:
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


def time_ratio_of_log(logarithm: float) -> float:
    """Return a ratio of times by its logarithm, which an absurd record may have beyond what a float can hold."""
    return math.exp(logarithm) if logarithm < MAX_LOGARITHM else math.inf


def _time_effect(pairs_by_seed: Sequence[Sequence[Pair]]) -> Effect:
    """Return the effect on the logarithm of the step time over the means of seeds, positive where the arm is faster."""
    logs = [
        [statistics.fmean(map(_logarithm_of_step_time, side)) for side in zip(*seed, strict=True)]
        for seed in pairs_by_seed
    ]
    return paired_effect([there for _, there in logs], [here for here, _ in logs], TIME_FLOOR)


def _logarithm_of_step_time(record: RunRecord) -> float:
    return math.log(record.summary.step_seconds_median or 1)
