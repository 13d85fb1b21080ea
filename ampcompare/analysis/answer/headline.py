"""The answer in a few sentences: what to use, what it costs, and what these runs cannot show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ampcompare.analysis.answer.headline_accuracy import accuracy_sentences, outcome_sentences
from ampcompare.analysis.answer.headline_cost import memory_sentence, speed_sentences
from ampcompare.analysis.answer.phrases import count_of, quality_of
from ampcompare.analysis.answer.recommendation import recommended, use_sentence
from ampcompare.analysis.inference.looks import changes_sentence
from ampcompare.analysis.runs.learning import idle_some, idle_verdict, too_wide
from ampcompare.analysis.runs.record_checks import SEEDS_ITSELF
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.run import RunRecord

__all__ = ["CORRECTED", "headline", "warnings_and_answer"]

CORRECTED = "what its records give is shown."  # the end of a warning about a report that says something else


def headline(comparison: Comparison, warnings: Sequence[str] = ()) -> list[str]:
    """Return one sentence for each thing that is known, the most important first.

    Caveats come before the claims that they weaken. A sentence claims no more than the verdicts of the rows do.

    Args:
        comparison: with its rows; its own headline is not used.
        warnings: what weakens every claim, such as terms that were changed after runs were seen.
    """
    by_arm: dict[str, list[RunRecord]] = {row.arm: [] for row in comparison.arms}
    for record in comparison.records:
        by_arm.setdefault(record.arm, []).append(record)
    return [*warnings, *_excluded(comparison), *_answer(comparison, by_arm)]


def warnings_and_answer(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Return the first sentences of a headline, which weaken what follows, apart from the answer."""
    look = next((look for look in comparison.looks if look.number == comparison.look), None)
    warnings = {*_excluded(comparison), *changes_sentence(look.changes if look else [])}
    sentences = comparison.headline
    count = 0
    while count < len(sentences) and (sentences[count] in warnings or sentences[count].endswith(CORRECTED)):
        count += 1
    return list(sentences[:count]), list(sentences[count:])


def _excluded(comparison: Comparison) -> Iterable[str]:
    count = len(comparison.excluded)
    if count and all(text.endswith(SEEDS_ITSELF) for text in comparison.excluded):
        yield f"{count} of the runs {'are copies' if count > 1 else 'is a copy'} of another seed's: {SEEDS_ITSELF}."
    elif count and comparison.judged:
        yield f"{count} row{'s are copies' if count > 1 else ' is a copy'} of other runs, and not used."
    elif count:
        yield f"{count} record{'s are' if count > 1 else ' is'} not used; the details have the reason."


def _answer(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterable[str]:
    rows = [row for row in comparison.arms if row.arm != comparison.reference]
    outcomes = list(outcome_sentences(comparison, by_arm))
    blocked = _nothing_to_compare(comparison, by_arm)
    if blocked or not rows:
        yield from [blocked] if blocked else _alone(comparison, by_arm)
        yield from outcomes
        yield from speed_sentences(comparison, rows)
        return
    quality = quality_of(comparison)
    yield from idle_some(by_arm)
    if comparison.error_rate == 0 and comparison.look != 0:
        yield _untested(comparison)
    wide = too_wide(by_arm.get(comparison.reference, []), comparison.reference, comparison.margin)
    chosen: list[ArmSummary] = []
    if wide:
        yield wide
    else:
        chosen = recommended(rows, comparison.prefer, comparison.metric)[:1]
        yield from (use_sentence(row, comparison, quality) for row in chosen)
        yield from accuracy_sentences(comparison, [row for row in rows if row not in chosen], quality)
    yield from outcomes
    rest = [row for row in rows if row not in chosen]
    yield from speed_sentences(comparison, [row for row in rows if row not in chosen or row.time_verdict != "better"])
    if memory := memory_sentence(comparison, rest):
        yield memory
    if engines := _engines(comparison, by_arm):
        yield engines


def _nothing_to_compare(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return why there is nothing to compare; "" if there is."""
    reference = comparison.reference
    records = by_arm.get(reference, [])
    if idle := idle_verdict(records):
        return f"Nothing to compare: {reference} {idle}."
    if not any(row.completed for row in comparison.arms):
        return "Nothing to compare: no run was completed."
    if len(comparison.arms) > 1 and comparison.records and not any(run.status == "completed" for run in records):
        return f"Nothing to compare: {reference}, the reference, completed no run."
    return ""


def _alone(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterable[str]:
    """Yield what the only arm reached."""
    row = comparison.arms[0]
    if row.metric_mean is None or not by_arm.get(row.arm):
        return
    seeds = f"{count_of(row.completed)} seed{'s' if row.completed > 1 else ''}"
    metric = comparison.metric
    reached = f"{metric.shown(row.metric_mean)} {metric.name}"
    yield f"{row.arm} reached {reached} in {seeds}; there is no other arm to compare it with."


def _untested(comparison: Comparison) -> str:
    """Return why there are no verdicts: runs are missing, or no look is left. Look 0 had too few seeds for any."""
    ended = {f"{run.arm}@{run.config.recipe.seed}" for run in comparison.records if run.status != "interrupted"}
    missing = [cell for cell in comparison.order if cell not in ended]
    if missing:
        return f"No verdicts yet: {len(missing)} of {len(comparison.order)} runs are missing."
    if comparison.look:
        return "No verdicts: earlier looks at these arms have spent the error rate of 5 %."
    return "No verdicts: nothing was tested; the details have the reason."


def _engines(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return which arms ran on which engine of `apex.amp`, where both did."""
    arms: dict[str, list[str]] = {}
    for arm, records in by_arm.items():
        for name in dict.fromkeys(f"{run.engine.name} {run.engine.version}" for run in records if run.engine):
            arms.setdefault(name, []).append(arm)
    if len({name.partition(" ")[0] for name in arms}) < 2:
        return ""
    parts = [f"{', '.join(its)} on {name}" for name, its in sorted(arms.items())]
    return f"Two engines of apex.amp ran: {'; '.join(parts)}. Results of compat are not results of NVIDIA's Apex."
