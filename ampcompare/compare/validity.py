"""Whether the step times of a run mean anything. An invalid time is not a slow one: it gives no verdict at all."""

from __future__ import annotations

from ampcompare.record import RunRecord

__all__ = ["why_invalid"]

LEAST_STEPS = 30
MOST_OUTLIERS = 0.10
MOST_DATA_WAIT = 0.10
LEAST_CPU_SHARE = 0.90
# A laptop's clock moves with what its other cores do; a GPU's stays where load and limits put it.
MOST_CLOCK_SPREAD = {"cpu": 0.15, "cuda": 0.05}


def why_invalid(record: RunRecord) -> str:
    """Return what makes the step times of a run worthless, with the value that was read; "" if nothing does.

    The reasons follow mudler/vllm.cpp#2005: enough samples, a steady clock, no throttling, no other process on the
    device, a load below the number of cores. Records without readings are judged by what they have.
    """
    summary, readings = record.summary, record.readings
    timed = readings.timed_steps if readings else max(0, summary.num_steps - summary.warmup_steps)
    if timed < LEAST_STEPS:
        return f"{timed} timed steps, {LEAST_STEPS} needed"
    step, wait = summary.step_seconds_median, summary.data_seconds_median
    if step and wait and wait > MOST_DATA_WAIT * step:
        return f"data-bound: waits {100 * wait / step:.0f} % of a step for data"
    if readings is None:
        return ""
    if readings.throttled:
        return f"GPU slowed by {' and '.join(readings.throttled)}"
    if readings.other_processes:
        return f"{readings.other_processes} other on the GPU"
    if readings.load_average is not None and readings.cores and readings.load_average > readings.cores:
        return f"load {readings.load_average:.1f} on {readings.cores} cores"
    config = record.config
    alone = config.workers == 0 and config.threads == 1
    if alone and readings.cpu_share is not None and readings.cpu_share < LEAST_CPU_SHARE:
        return f"had {100 * readings.cpu_share:.0f} % of a core"
    low, high = readings.clock_low_mhz, readings.clock_high_mhz
    kind = "cuda" if str(record.environment.get("device", "cpu")).startswith("cuda") else "cpu"
    if low and high and high / low - 1 > MOST_CLOCK_SPREAD[kind]:
        return f"clock {low:.0f} to {high:.0f} MHz"
    if readings.outlier_share is not None and readings.outlier_share > MOST_OUTLIERS:
        return f"{100 * readings.outlier_share:.0f} % of steps are outliers"
    return ""
