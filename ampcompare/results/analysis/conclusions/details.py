"""What neither the headline nor the tables show: rates, events, looks, and what was computed otherwise."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from ampcompare.results.analysis.conclusions.phrases import capitalize_sentence
from ampcompare.results.analysis.conclusions.recommendation import none_recommended_sentences
from ampcompare.results.analysis.inference.effect import ERROR_RATE, MIN_PAIRS
from ampcompare.results.analysis.pairing.learning import learned_nothing_verdict, why_margin_too_wide
from ampcompare.results.analysis.pairing.pairs import (
    are_pairs_identical,
    has_pair_of_unequal_final_weights,
    have_pairs_equal_losses,
    pairs_by_seed,
)
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import NOT_STARTED, RunRecord, RunSummary

HALF_ON_CPU = {
    "fp16 emulated": "fp16 was computed in fp32 and rounded (emulated)",
    "fp16 native": "fp16 ran natively",
    "bf16 emulated": "bf16 was computed in fp32 and rounded (emulated)",
    "gemm emulated": "operands of linear layers were rounded and multiplied in fp32 (emulated)",
    "fp8 emulated": "operands of fp8 were rounded and multiplied in fp32 (emulated)",
}
EVENTS: tuple[tuple[str, str, Callable[[RunSummary], bool]], ...] = (
    ("Ended before the last epoch, as the recipe allows", "why", lambda run: run.ended is not None),
    ("Rolled back to a good state", "at which steps", lambda run: bool(run.rollbacks)),
)
FP16_ON_CPU = (
    "{how} on this CPU: accuracy, divergence and loss scales carry over to a GPU, 16-bit step times do not."
)
CPU_LISTS = (
    "torch.autocast cast by the CPU's own lists (--autocast-lists cpu), which are not those of a GPU: accuracy, "
    "divergence and loss scales may differ there."
)


def detail_sentences(comparison: Comparison) -> Iterable[str]:
    """Yield what neither the headline nor the tables show of the runs of a comparison."""
    rows = comparison.arms
    records = comparison.records
    reference = comparison.reference
    margin, metric = comparison.margin, comparison.metric
    known = comparison.by_arm()
    by_arm = {arm: known.get(arm, []) for arm in [reference, *(row.arm for row in rows)]}
    enough = max((row.completed or 0 for row in rows), default=0) >= MIN_PAIRS
    untested = comparison.error_rate == 0
    blocked = (
        untested
        or learned_nothing_verdict(by_arm[reference])
        or why_margin_too_wide(by_arm[reference], reference, margin)
    )
    if enough and not blocked:
        yield from none_recommended_sentences(rows, reference, comparison.prefer, metric)
    diverged = [row for row in rows if row.diverged]
    if diverged:
        yield f"Rate of divergence: {'; '.join(map(_divergence_rate_text, diverged))}."
    failed = [row.arm for row in rows if row.failed and any(map(_has_log_of_failure, by_arm[row.arm]))]
    if failed:
        yield f"The logs of runs that failed or were interrupted are in their cells' folders: {', '.join(failed)}."
    if not any(row.has_completed for row in rows):
        return
    yield from sorted({f"{note}." for record in records for note in record.notes})
    yield from _early_end_and_rollback_sentences(rows, records)
    yield from _averaged_weights_sentences({row.arm: by_arm[row.arm] for row in rows}, metric)
    yield from _reference_correlation_sentences(rows, reference, metric)
    yield from _equal_loss_not_identical_sentences(by_arm, reference)
    yield from _cpu_16bit_arithmetic_sentences(records)


def _cpu_16bit_arithmetic_sentences(records: Sequence[RunRecord]) -> Iterable[str]:
    """Yield how 16 bits were computed on a CPU, if any run did so."""
    on_cpu = [record for record in records if record.device_kind == "cpu"]
    hows = {record.half for record in on_cpu}
    said = [HALF_ON_CPU[how] for how in sorted(how for how in hows if how in HALF_ON_CPU)]
    if any(record.config.autocast_lists == "cpu" for record in on_cpu):
        yield CPU_LISTS
    elif said:
        yield FP16_ON_CPU.format(how=" and ".join(said))


def interim_look_sentences(comparison: Comparison, next_error_rate: float) -> Iterable[str]:
    """Yield which look this is and what it may spend; nothing where looks are not counted or nothing was tested."""
    number = comparison.look
    if not number:
        return
    if not comparison.error_rate:
        yield (
            f"Nothing was tested: earlier looks have spent the error rate of {_percent_text(ERROR_RATE)}. "
            "Other seeds in another run directory are a new comparison."
        )
        return
    level = f"Look {number} at these arms, tested at an error rate of {_percent_text(comparison.error_rate)}"
    before = [
        f"look {other.number} at {_percent_text(other.error_rate)} with {len(other.seeds)} seeds"
        for other in comparison.looks
        if other.number and other.number != number
    ]
    if before:
        yield f"{level}; {', '.join(before)}. Together they spend at most {_percent_text(ERROR_RATE)}."
    elif next_error_rate > 0:
        yield f"{level}; the rest of {_percent_text(ERROR_RATE)} is kept for further looks."
    else:
        yield f"{level}, the only one that was planned."


def _has_log_of_failure(record: RunRecord) -> bool:
    return record.status in ("failed", "interrupted") and NOT_STARTED not in record.environment


def _percent_text(share: float) -> str:
    return f"{100 * share:.3g} %"


def _divergence_rate_text(row: ArmSummary) -> str:
    ran = (row.completed or 0) + row.diverged
    if row.diverged_low is None or row.diverged_high is None:
        return f"{row.arm} {row.diverged}/{ran}"
    interval = f"{100 * row.diverged_low:.0f} to {100 * row.diverged_high:.0f} %"
    return f"{row.arm} {row.diverged}/{ran} (95 % interval {interval})"


def _early_end_and_rollback_sentences(
    rows: Sequence[ArmSummary], records: Sequence[RunRecord]
) -> Iterable[str]:
    """Yield which arms trained for fewer epochs than others, and which rolled back to a good state."""
    for event, detail, happened in EVENTS:
        counts = {
            row.arm: [happened(record.summary) for record in records if record.arm == row.arm] for row in rows
        }
        shown = [f"{arm} {sum(its)}/{len(its)}" for arm, its in counts.items() if any(its)]
        if shown:
            yield f"{event}: {', '.join(shown)}; the records say {detail}."


def _reference_correlation_sentences(
    rows: Sequence[ArmSummary], reference: str, metric: Metric
) -> Iterable[str]:
    """Yield how far the metric of each arm follows the reference's over seeds."""
    shown = [
        f"{row.arm} {row.metric_correlation:.2f}"
        for row in rows
        if row.arm != reference and row.metric_correlation is not None
    ]
    if shown:
        yield f"Correlation of {metric.name} with {reference} over seeds: {', '.join(shown)}."


def _equal_loss_not_identical_sentences(
    by_arm: Mapping[str, Sequence[RunRecord]], reference: str
) -> Iterable[str]:
    """Yield which arms had the losses of the reference, and weights that differ or are not known."""
    pairs = {arm: pairs_by_seed(runs, by_arm[reference]) for arm, runs in by_arm.items() if arm != reference}
    alike = [
        arm for arm, its in pairs.items() if have_pairs_equal_losses(its) and not are_pairs_identical(its)
    ]
    apart = [arm for arm in alike if has_pair_of_unequal_final_weights(pairs[arm])]
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


def _averaged_weights_sentences(by_arm: Mapping[str, Sequence[RunRecord]], metric: Metric) -> Iterable[str]:
    """Yield the mean over completed runs of what the averaged weights reach, where some were kept."""
    shown = []
    for arm, records in by_arm.items():
        reached = [record.summary.ema_metric_final for record in records if record.status == "completed"]
        if known := [value for value in reached if value is not None]:
            shown.append(f"{arm} {metric.value_text(statistics.fmean(known))}")
    if shown:
        name = capitalize_sentence(metric.name)
        yield f"{name} of the averaged weights (EMA) after the last epoch: {', '.join(shown)}."
