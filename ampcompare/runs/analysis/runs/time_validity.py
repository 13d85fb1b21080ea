"""Check whether the step times of a run are valid. An invalid time is not a slow one: it gives no verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ampcompare.runs.analysis.inference.effect import MIN_PAIRS
from ampcompare.runs.records.run import RunRecord, SystemReadings

__all__ = ["invalid_reason", "invalid_reason_of_arm"]

MIN_STEPS = 30
# A median holds until half of the steps are others. At a quarter it stays within the spread of the rest, whatever the
# outliers are; beyond, a run may have one of two speeds for its median, and the next run the other.
MAX_OUTLIERS = 0.25
MAX_CHANGE = 0.05  # of the step time, from the first half of a run to the second
ERRORS_APART = 3  # standard errors by which the halves must differ as well, so that noise is not taken for a change
MAX_DATA_WAIT = 0.10
MIN_CPU_SHARE = 0.90
MAX_WAITING = 0.05  # of the wall time: beyond, cells that run at the same time slow each other down on the host
# A laptop's clock moves with what its other cores do; a GPU's stays where load and limits put it.
MAX_CLOCK_SPREAD = {"cpu": 0.15, "cuda": 0.05}
# Under a long fp16 product a GPU in good order runs at its power limit; where that moves the clock, the clock tells.
NORMAL = frozenset({"power limit"})


def invalid_reason(record: RunRecord) -> str:
    """Return what invalidates the step times of a run, with the value read; "" if nothing does.

    The reasons follow mudler/vllm.cpp#2005: enough samples, a steady clock, no throttling, no other process on the
    device, a load below the number of cores. Records without readings are judged by what they have. Slow or fast single
    steps are not a reason, since the median of a run passes over them.
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
    slowed = [reason for reason in readings.throttled if reason not in NORMAL]
    if slowed:
        return f"GPU slowed by {' and '.join(slowed)}"
    if readings.other_processes:
        return f"{readings.other_processes} other on the GPU"
    if readings.load_average is not None and readings.cores and readings.load_average > readings.cores:
        return f"load {readings.load_average:.1f} on {readings.cores} cores"
    if record.jobs > 1 and readings.waiting_share is not None and readings.waiting_share > MAX_WAITING:
        return f"waits {100 * readings.waiting_share:.0f} % of the time for a core, next to other cells"
    config = record.config
    alone = config.workers == 0 and config.threads == 1
    if alone and readings.cpu_share is not None and readings.cpu_share < MIN_CPU_SHARE:
        return f"had {100 * readings.cpu_share:.0f} % of a core"
    low, high = readings.clock_low_mhz, readings.clock_high_mhz
    kind = "cuda" if str(record.environment.get("device", "cpu")).startswith("cuda") else "cpu"
    if kind == "cuda" and record.jobs > 1 and low is None:  # an arm that heats its neighbors would go unseen
        return "the clock of a GPU next to other cells was not read (extra gpu)"
    if low and high and high / low - 1 > MAX_CLOCK_SPREAD[kind]:
        return f"clock {low:.0f} to {high:.0f} MHz"
    if readings.outlier_share is not None and readings.outlier_share > MAX_OUTLIERS:
        return f"{100 * readings.outlier_share:.0f} % of steps are outliers"
    return _change(readings)


def invalid_reason_of_arm(records: Sequence[RunRecord]) -> str:
    """Return the most frequent reason for invalid step times of an arm if fewer than three runs (or all) are valid."""
    reasons = [reason for record in records if (reason := invalid_reason(record))]
    is_valid = len(records) - len(reasons) >= min(MIN_PAIRS, len(records))
    return "" if is_valid else statistics.mode(reasons)


def _change(readings: SystemReadings) -> str:
    """Return how the step time changed from the first half of the run to the second, if it did; else ""."""
    first, second, error = readings.first_half_seconds, readings.second_half_seconds, readings.halves_error
    if not first or not second or error is None:
        return ""
    change = math.log(second / first)
    if abs(change) <= max(math.log1p(MAX_CHANGE), ERRORS_APART * error):
        return ""
    return f"second half {100 * abs(second / first - 1):.0f} % {'slower' if change > 0 else 'faster'}"
