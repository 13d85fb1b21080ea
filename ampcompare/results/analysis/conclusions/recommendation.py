"""Which arms to use, and why none."""

from collections.abc import Collection, Iterable, Sequence

from ampcompare.results.analysis.conclusions.phrases import saved_memory_share
from ampcompare.results.analysis.inference.effect import MIN_PAIRS
from ampcompare.results.records.comparison import ArmSummary
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.verdict import KEPT, OPEN
from ampcompare.settings.script import LOSS

MIN_SAVING = 0.05  # of memory: less than that is the noise of an allocator


def arms_doubted_for_ranking_ties(
    rows: Sequence[ArmSummary], reference: str, metric: Metric
) -> dict[str, list[str]]:
    """Return the arms whose difference in quality may come from ties in a ranking, with the places of these rankings.

    It may where an evaluation of the arm or of the reference compares 16-bit numbers of which many are equal. No
    number of seeds tells such a difference from one of the weights. A training loss is none of an evaluation.
    """
    if metric.name == LOSS:
        return {}
    of_reference = [place for row in rows if row.arm == reference for place in row.equal_numbers]
    return {
        row.arm: places
        for row in rows
        if row.arm != reference
        and row.quality.kind in ("better", "worse", *OPEN)
        and (places := list(dict.fromkeys([*row.equal_numbers, *of_reference])))
    }


def recommended_arms(
    rows: Sequence[ArmSummary], prefer: str, metric: Metric, doubted: Collection[str] = ()
) -> list[ArmSummary]:
    """Return the arms to use for what is preferred, the best first.

    For time or memory an arm qualifies where its quality is kept by verdict, not by a look at the mean. An arm that is
    identical in fewer than three pairs was hardly tried. The reference is not among the rows.

    Args:
        doubted: arms whose difference in quality may be none of their weights.
    """
    rows = [row for row in rows if row.arm not in doubted]
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
    doubted = arms_doubted_for_ranking_ties(rows, reference, metric)
    rows, quality = [row for row in rows if row.arm != reference], metric.quality_noun
    if not rows or recommended_arms(rows, prefer, metric, doubted):
        return
    if recommended := recommended_arms(rows, prefer, metric):
        why = f"the difference of {recommended[0].arm} in {quality} may be that of a ranking of equal numbers"
    elif prefer == "accuracy":
        why = f"no arm is better than {reference}"
    elif not _rows_that_keep_quality(rows):
        why = f"none was shown to be non-inferior in {quality} to {reference}"
    elif prefer == "time":
        why = f"none was shown to be both non-inferior in {quality} to {reference} and faster"
    else:
        why = f"no arm is both non-inferior in {quality} to {reference} and {100 * MIN_SAVING:.0f} % smaller in memory"
    yield f"No arm is recommended for {prefer}: {why}."
