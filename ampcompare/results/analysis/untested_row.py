"""What a row has without any test: the figures of its runs, its memory against that of the reference, and its state."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ampcompare.results.analysis.effects.step_time import invalid_time_reason, invalid_time_reason_of_arm
from ampcompare.results.analysis.inference.effect import MIN_PAIRS, wilson_interval
from ampcompare.results.analysis.pairing.comparability import (
    incomparable_memory_verdict,
    steps_by_other_arm_text,
)
from ampcompare.results.analysis.pairing.pairs import (
    Pair,
    Pairing,
    completed_or_diverged_runs,
    pairs_by_seed_or_with_first,
)
from ampcompare.results.analysis.pairing.scores import metric_of_runs
from ampcompare.results.records.comparison import ArmSummary
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import Verdict


def untested_row(arm: str, pairing: Pairing) -> ArmSummary:
    """Return a row with what no test gives, and without what takes the runs of the reference."""
    records, pairs = pairing.arm, pairing.pairs
    done = [record for record in records if record.status == "completed"]
    ran = completed_or_diverged_runs(records)
    diverged = len(ran) - len(done)
    rate = wilson_interval(diverged, len(ran)) if diverged else (None, None)
    metric = metric_of_runs(records)
    finals = [record.summary.metric_final for record in done]
    return ArmSummary(
        **_time_fields_of_row(ran),
        arm=arm,
        engine=_engine_names_text(ran),
        half=next((record.half for record in ran if record.half), None),
        lr=records[0].config.recipe.optimizer.lr
        if records and records[0].config.script is None
        else float("nan"),
        seeds=sorted(record.config.recipe.seed for record in records),
        completed=len(done),
        diverged=diverged,
        diverged_low=rate[0],
        diverged_high=rate[1],
        failed=sum(record.status in ("failed", "interrupted") for record in records),
        metric_mean=_mean_if_known(finals),
        metric_sd=_sd_if_known(finals),
        metric_best=metric.best(value for record in ran if (value := record.summary.metric_best) is not None),
        peak_bytes=_largest_peak_of_memory(ran),
        metric_correlation=_metric_correlation_with_reference(pairs),
        equal_numbers=list(
            dict.fromkeys(place for record in done if record.script for place in record.script.equal_numbers)
        ),
        pairs=len(pairs),
        loss_tail=_mean_if_known(record.summary.loss_tail for record in ran),
        # The middle one, so that it is that of a run.
        final_loss_scale=_mean_if_known(
            (record.summary.final_loss_scale for record in ran), statistics.median_low
        ),
        skipped_steps=sum(record.summary.skipped_steps for record in ran) if ran else None,
        num_steps=sum(record.summary.num_steps for record in ran) if ran else None,
        status=_status_text(records),
    )


def memory_verdict(pairing: Pairing) -> Verdict:
    """Return the difference of the largest peaks, or why there is none."""
    pairs = pairs_by_seed_or_with_first(
        completed_or_diverged_runs(pairing.arm), completed_or_diverged_runs(pairing.reference)
    )
    here, there = (
        _largest_peak_of_memory(arm for arm, _ in pairs),
        _largest_peak_of_memory(other for _, other in pairs),
    )
    verdict = incomparable_memory_verdict(replace(pairing, pairs=pairs))
    return verdict if verdict or here is None or there is None else Verdict(effect=here - there)


def _engine_names_text(ran: Sequence[RunRecord]) -> str | None:
    """Return the engines and libraries that runs were trained by, with their versions; None without any."""
    engines = sorted({f"{record.engine.name} {record.engine.version}" for record in ran if record.engine})
    libraries = sorted({record.training_library_text for record in ran if record.training_library_text})
    return ", ".join([*engines, *libraries]) or None


def _time_fields_of_row(ran: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the fields of a row that are times, in seconds: those of steps and epochs of valid runs alone."""
    invalid_time = invalid_time_reason_of_arm(ran)
    timed = ran if invalid_time else [record for record in ran if not invalid_time_reason(record)]
    return {
        "invalid_time": invalid_time,
        "epoch_seconds": _mean_if_known(record.summary.epoch_seconds for record in timed),
        "epoch_seconds_sd": _sd_if_known(record.summary.epoch_seconds for record in timed),
        "step_seconds_median": _mean_if_known(record.summary.step_seconds_median for record in timed),
        "samples_per_second": _mean_if_known(record.summary.samples_per_second for record in timed),
        "start_seconds": _mean_if_known(_startup_seconds(record) for record in ran),
        "loader_start_seconds": _mean_if_known(record.summary.loader_start_seconds for record in ran),
        "allreduce_share": _mean_if_known(
            record.processes.allreduce_share for record in ran if record.processes
        ),
    }


def _startup_seconds(record: RunRecord) -> float | None:
    """Return when the slowest of the processes was ready."""
    return record.processes.start_seconds if record.processes else record.summary.start_seconds


def _metric_correlation_with_reference(pairs: Sequence[Pair]) -> float | None:
    """Return how far the values of two arms move together over seeds; it is what pairing gains."""
    known = []
    for arm, reference in pairs:
        value, other = arm.summary.metric_final, reference.summary.metric_final
        if value is not None and other is not None and math.isfinite(value) and math.isfinite(other):
            known.append((value, other))
    if len(known) < MIN_PAIRS or any(min(side) == max(side) for side in zip(*known, strict=True)):
        return None
    here, there = zip(*known, strict=True)
    return statistics.correlation(here, there)


def _status_text(records: Sequence[RunRecord]) -> str:
    """Return in words how many runs of an arm completed, diverged or failed."""
    if not records:
        return "not run"
    words = []
    for status in ("completed", "diverged", "failed", "interrupted"):
        if matching := [record for record in records if record.status == status]:
            share = "" if len(matching) == len(records) else f" {len(matching)}/{len(records)}"
            first_step = min(record.summary.diverged_step or 0 for record in matching)
            details = {"diverged": f" at step {first_step}", "failed": f": {matching[0].error}"}
            words.append(("ok" if status == "completed" else status) + share + details.get(status, ""))
    mixed = list(filter(None, map(steps_by_other_arm_text, records)))
    words += [f"{text} {mixed.count(text)}/{len(records)}" for text in dict.fromkeys(mixed)]
    return "; ".join(words)


def _mean_if_known(
    values: Iterable[float | None], average: Callable[[list[float]], float] = statistics.fmean
) -> float | None:
    known = [value for value in values if value is not None]
    return average(known) if known else None


def _sd_if_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 and all(map(math.isfinite, known)) else None


def _largest_peak_of_memory(records: Iterable[RunRecord]) -> int | None:
    return max(
        (value for record in records if (value := record.summary.peak_bytes) is not None), default=None
    )
