"""Arms run by another library, each compared with ampcompare's arm of the precision that really ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ampcompare.runs.analysis.answer.phrases import Quality
from ampcompare.runs.analysis.runs.identity import equal_losses
from ampcompare.runs.analysis.runs.pairs import pairs_by_seed
from ampcompare.runs.records.comparison import ArmSummary, Twin
from ampcompare.runs.records.metric import Metric
from ampcompare.runs.records.run import Effective, RunRecord

__all__ = ["find_twins", "twin_sentence"]


def find_twins(
    by_arm: Mapping[str, Sequence[RunRecord]], rows: Callable[[str, Sequence[str]], Sequence[ArmSummary]]
) -> list[Twin]:
    """Return a verdict for each arm that another library ran.

    Args:
        by_arm: the records of each row of the table.
        rows: from the label of a twin, and of those that are compared with it, to their rows against it.
    """
    found = {label: _effective(records) for label, records in by_arm.items()}
    twins = {
        label: twin
        for label, ran in found.items()
        if ran is not None and (twin := _twin_label(label, by_arm[label], ran)) != label
    }
    results = []
    for label, twin in twins.items():
        ran = found[label]
        assert ran is not None
        bare = Twin(arm=label, twin=twin, library=f"{ran.library} {ran.version}")
        if twin not in by_arm:
            results.append(bare)
            continue
        together = [other for other, its in twins.items() if its == twin]
        row = next(row for row in rows(twin, together) if row.arm == label)
        results.append(
            bare.model_copy(
                update={
                    "pairs": row.pairs,
                    "metric_difference": row.metric_difference,
                    "accuracy_verdict": row.accuracy_verdict,
                    "time_ratio": row.time_ratio,
                    "same_bits": equal_losses(pairs_by_seed(by_arm[label], by_arm[twin])),
                }
            )
        )
    return results


def twin_sentence(twin: Twin, metric: Metric) -> str:
    """Return a verdict in words."""
    who = f"{twin.arm} ({twin.library}) against {twin.twin}, the precision that it ran in"
    if twin.pairs:
        pairs = f"{twin.pairs} seed{'s' if twin.pairs > 1 else ''}"
        if twin.same_bits:
            return f"{who}: {twin.accuracy_verdict}, every loss the same to the last bit, {pairs}."
        difference = "" if twin.metric_difference is None else f", {Quality(metric).with_unit(twin.metric_difference)}"
        return f"{who}: {twin.accuracy_verdict}{difference}, {pairs}."
    return f"{who}: {twin.accuracy_verdict or f'not known, add --arm {twin.twin}'}."


def _effective(records: Sequence[RunRecord]) -> Effective | None:
    return next((record.effective for record in records if record.effective is not None), None)


def _twin_label(label: str, records: Sequence[RunRecord], ran: Effective) -> str:
    """Return the row of the twin: its arm, and behind it what is varied in the matrix."""
    return ran.arm + label.removeprefix(records[0].config.arm)
