"""Which arm to use, and what it keeps and saves."""

from collections.abc import Iterable, Sequence

from ampcompare.results.analysis.effects.samples import samples_noun
from ampcompare.results.analysis.inference.effect import MIN_PAIRS
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.verdict import KEPT

MIN_SAVING = 0.05  # of memory: less than that is the noise of an allocator


def recommended_arms(rows: Sequence[ArmSummary], prefer: str, metric: Metric) -> list[ArmSummary]:
    """Return the arms to use for what is preferred, the best first.

    For time or memory an arm qualifies where its quality is kept by verdict, not by a look at the mean. An arm that is
    identical in fewer than three pairs was hardly tried. The reference is not among the rows.
    """
    if prefer == "accuracy":
        better = [row for row in rows if row.quality.kind == "better"]
        return sorted(better, key=lambda row: -metric.score_difference(row.quality.effect or 0))
    keeps = _rows_that_keep_quality(rows)
    if prefer == "time":
        return sorted(
            (row for row in keeps if row.time.kind == "better"), key=lambda row: row.time.effect or 1
        )
    return sorted(
        (row for row in keeps if saved_memory_share(row) >= MIN_SAVING),
        key=lambda row: -saved_memory_share(row),
    )


def _rows_that_keep_quality(rows: Sequence[ArmSummary]) -> list[ArmSummary]:
    kept = [row for row in rows if row.quality.kind in KEPT]
    return [row for row in kept if row.quality.kind != "identical" or row.pairs >= MIN_PAIRS]


def why_none_recommended(
    rows: Sequence[ArmSummary], reference: str, prefer: str, metric: Metric
) -> Iterable[str]:
    """Yield why no arm is recommended; nothing where one is, or where there is none besides the reference."""
    rows, quality = [row for row in rows if row.arm != reference], metric.quality
    if not rows or recommended_arms(rows, prefer, metric):
        return
    if prefer == "accuracy":
        why = f"no arm is better than {reference}"
    elif not _rows_that_keep_quality(rows):
        why = f"none was shown to be non-inferior in {quality} to {reference}"
    elif prefer == "time":
        why = f"none was shown to be both non-inferior in {quality} to {reference} and faster"
    else:
        why = f"no arm is both non-inferior in {quality} to {reference} and {100 * MIN_SAVING:.0f} % smaller in memory"
    yield f"No arm is recommended for {prefer}: {why}."


def use_sentence(row: ArmSummary, comparison: Comparison) -> str:
    """Return the recommendation of an arm, with what it keeps and what it saves."""
    reference, metric = comparison.reference, comparison.metric
    samples = sample_caveat([row], comparison)
    if row.quality.kind == "better":
        kept = f"better {metric.quality} than {reference} ({difference_interval_text(row, metric)}){samples}"
    elif row.quality.kind == "identical":
        kept = f"identical to {reference}"
    else:
        side = "within ±" if row.quality.kind == "equivalent" else "margin "
        change = metric.difference_with_unit(row.quality.effect or 0)
        kept = (
            f"{metric.quality} of {reference} kept (Δ {change}, {side}{metric.margin_text(comparison.margin)}"
            f"{'; ' * bool(row.quality.update_counts_text)}{row.quality.update_counts_text}){samples}"
        )
    gains = []
    if row.time.kind == "better":
        gains.append(f"{step_time_ratio_text(row)} its step time{device_phrase(comparison)}")
    if saved_memory_share(row) >= MIN_SAVING and (
        comparison.prefer == "memory" or not device_phrase(comparison)
    ):
        gains.append(f"{memory_saving_text(row)} peak memory")
    if comparison.prefer == "memory":
        gains.reverse()
    return f"Use {row.arm}: {', '.join([kept, *gains])}."


def sample_caveat(rows: Sequence[ArmSummary], comparison: Comparison) -> str:
    """Return the caveat if a verdict on one of these rows does not extend beyond the validation samples."""
    open_ones = [row.samples for row in rows if row.samples is not None and row.samples.holds is False]
    noun = samples_noun(comparison.records)
    return f" on these {open_ones[0].samples:,} {noun}, not shown for new ones" if open_ones else ""


def difference_interval_text(row: ArmSummary, metric: Metric) -> str:
    """Return a difference with the interval of the test that decided on it, and updates that may explain it."""
    its = row.quality
    shown = f"Δ {metric.difference_with_unit(its.effect or 0)}"
    if its.low is not None and its.high is not None:
        shown += f", {metric.difference_text(its.low)} to {metric.difference_text(its.high)}"
    return "; ".join(filter(None, [shown, its.update_counts_text]))


def step_time_ratio_text(row: ArmSummary, doubt: str = "") -> str:
    """Return the relative step time of an arm with its interval and a doubt, such as `0.61x (0.58 to 0.65)`."""
    its = row.time
    if its.effect is None:
        return ""
    if its.low is None or its.high is None:
        return f"{its.effect:.2f}x"
    return f"{its.effect:.2f}x ({its.low:.2f} to {its.high:.2f}{doubt})"


def device_phrase(comparison: Comparison) -> str:
    """Return where times were measured, if that is no GPU."""
    devices = {
        str(record.environment.get("device", "cpu")).partition(":")[0] for record in comparison.records
    }
    return " on this CPU" if devices == {"cpu"} else ""


def saved_memory_share(row: ArmSummary) -> float:
    """Return the share of the reference's peak that an arm saves, below 0 where it needs more; 0 if not known."""
    more, peak = row.memory.effect, row.peak_bytes
    return 0.0 if more is None or peak is None or peak <= more else -more / (peak - more)


def memory_saving_text(row: ArmSummary) -> str:
    """Return how much less, or more, memory an arm needs."""
    saving = saved_memory_share(row)
    return f"{100 * abs(saving):.0f} % {'less' if saving > 0 else 'more'}"
