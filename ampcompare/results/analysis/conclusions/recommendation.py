"""Which arms to use, and why none."""

from collections.abc import Iterable, Sequence

from ampcompare.results.analysis.conclusions.phrases import saved_memory_share
from ampcompare.results.analysis.inference.effect import MIN_PAIRS
from ampcompare.results.records.comparison import ArmSummary
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
        return sorted(
            better, key=lambda row: -metric.score_difference_from_difference(row.quality.effect or 0)
        )
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


def none_recommended_sentences(
    rows: Sequence[ArmSummary], reference: str, prefer: str, metric: Metric
) -> Iterable[str]:
    """Yield why no arm is recommended; nothing where one is, or where there is none besides the reference."""
    rows, quality = [row for row in rows if row.arm != reference], metric.quality_noun
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
