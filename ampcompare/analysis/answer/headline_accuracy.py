"""Results on accuracy, one sentence for each group of arms with the same outcome."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ampcompare.analysis.answer.phrases import Quality, count_of, label_of, names_of, with_verb
from ampcompare.analysis.inference.effect import MIN_PAIRS
from ampcompare.analysis.runs.divergence_cause import divergence_cause, first_divergence
from ampcompare.analysis.runs.identity import IDENTICAL
from ampcompare.analysis.runs.learning import LEARNED_NOTHING
from ampcompare.analysis.verdicts.samples import samples_noun
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.run import RunRecord

__all__ = ["accuracy_sentences", "on_these_samples", "outcome_sentences", "with_interval"]

TOO_FEW = f"inconclusive (fewer than {MIN_PAIRS} seeds)"
MAX_ERROR = 90  # characters of an error message
LOCATION = re.compile(r" \([^()\n]+:\d+\)$")
MAX_DIFFERENCES = 3
KEPT = ("equivalent", "non-inferior")


def accuracy_sentences(comparison: Comparison, rows: Sequence[ArmSummary], quality: Quality) -> Iterable[str]:
    """Yield the decided results of these rows, then the open ones, then what could not be compared.

    Args:
        rows: arms besides the reference of which nothing was said yet; something was said of all others.
    """
    everyone = [row.arm for row in comparison.arms if row.arm != comparison.reference]
    said = set(everyone).difference(row.arm for row in rows)
    words = {row.arm: row.accuracy_verdict for row in rows}
    reference = comparison.reference

    def those(*beginnings: str) -> list[ArmSummary]:
        return [row for row in rows if row.arm not in said and words[row.arm].startswith(beginnings)]

    tried = [row for row in those(IDENTICAL) if row.pairs >= MIN_PAIRS]
    if those(*KEPT):
        kept = [row for row in rows if row in tried or row in those(*KEPT)]
        yield _kept(kept, everyone, said, comparison, quality)
        said.update(row.arm for row in kept)
    if same := [row.arm for row in those(IDENTICAL)]:
        subject = with_verb(same, everyone, "is", "are", said=said)
        yield f"{subject} identical to {reference}, every loss and all weights to the last bit."
        said.update(same)
    for word in ("better", "worse"):
        if different := those(word):
            yield _different(word, different, everyone, comparison, quality)
            said.update(row.arm for row in different)
    yield from _open(those("inconclusive"), everyone, said, comparison, quality)
    for row in those("conditional on"):
        share, _, rest = row.accuracy_verdict.removeprefix("conditional on ").partition(" (")
        yield (
            f"{label_of(row)} is {rest.removesuffix(')')} only on the {share} that both it and {reference} completed, "
            "so it is not recommended."
        )
        said.add(row.arm)
    yield from _not_compared(those("not comparable"), everyone, said, reference)
    idle: dict[str, list[str]] = {}
    for row in those(LEARNED_NOTHING):
        idle.setdefault(row.accuracy_verdict, []).append(row.arm)
    for word, arms in idle.items():
        yield f"{with_verb(arms, everyone, word, word, said=said)}."
        said.update(arms)
    apart = [row.arm for row in rows if not words[row.arm] and row.completed and not row.pairs]
    if apart:
        yield f"No verdict on {names_of(apart, everyone, said)}: no seed was completed by both sides."


def _not_compared(rows: Sequence[ArmSummary], everyone: Sequence[str], said: set[str], reference: str) -> Iterable[str]:
    """Yield the arms that did not do the work of the reference, with one of the reasons."""
    if rows:
        arms = [row.arm for row in rows]
        reasons = list(dict.fromkeys(row.accuracy_verdict for row in rows))
        reason = reasons[0].removeprefix("not comparable (").removesuffix(")")
        such = "such as " if len(reasons) > 1 else ""
        yield f"Not compared with {reference}: {names_of(arms, everyone, said)} ({such}{reason})."
        said.update(arms)


def _kept(
    rows: Sequence[ArmSummary], everyone: Sequence[str], said: set[str], comparison: Comparison, quality: Quality
) -> str:
    """Return that these rows keep the accuracy, and which of them are identical."""
    tested = [row for row in rows if row.accuracy_verdict != IDENTICAL]
    what = f"{comparison.reference}'s {quality.name}{on_these_samples(tested, comparison)}"
    by_name = any(row.ran is not None for row in rows)  # which "all five arms" would hide
    verb = with_verb([label_of(row) for row in rows], () if by_name else everyone, "keeps", "keep", said=said)
    sides = "within ±" if all(row.accuracy_verdict.startswith("equivalent") for row in tested) else "margin "
    same = [row.arm for row in rows if row not in tested]
    identical = f"; {with_verb(same, (), 'is', 'are')} identical to the last bit" if same else ""
    margin = comparison.metric.margin_text(comparison.margin)
    return f"{verb} {what} ({_differences(rows, quality)}, {sides}{margin}){identical}."


def on_these_samples(rows: Sequence[ArmSummary], comparison: Comparison) -> str:
    """Return the caveat if a verdict on one of these rows does not extend beyond the validation samples."""
    open_ones = [row.samples for row in rows if row.samples is not None and row.samples.holds is False]
    noun = samples_noun(comparison.records)
    return f" on these {open_ones[0].samples:,} {noun}, not shown for new ones" if open_ones else ""


def _differences(rows: Sequence[ArmSummary], quality: Quality) -> str:
    """Return the differences of a few rows in their order, or the least and the largest of many."""
    known = [row.metric_difference for row in rows if row.metric_difference is not None]
    shown = list(map(quality.signed, known))
    if len(set(shown)) == 1:
        shown = shown[:1]
    elif len(shown) > MAX_DIFFERENCES:
        shown = [f"{quality.signed(min(known))} to {quality.signed(max(known))}"]
    return f"Δ {names_of(shown)}{quality.unit}"


def _different(
    word: str, rows: Sequence[ArmSummary], everyone: Sequence[str], comparison: Comparison, quality: Quality
) -> str:
    parts = [f"{label_of(row)} ({with_interval(row, quality)})" for row in rows]
    name = quality.name if quality.name != "accuracy" else "accurate"
    how = f"{'more' if word == 'better' else 'less'} {name} than" if name == "accurate" else f"{word} in {name} than"
    verb = "is" if len(rows) == 1 else "are"
    return f"{names_of(parts)} {verb} {how} {comparison.reference}{on_these_samples(rows, comparison)}."


def with_interval(row: ArmSummary, quality: Quality) -> str:
    """Return a difference with the interval of the test that decided on it."""
    shown = f"Δ {quality.signed(row.metric_difference or 0)}{quality.unit}"
    if row.metric_difference_low is None or row.metric_difference_high is None:
        return shown
    return f"{shown}, {quality.signed(row.metric_difference_low)} to {quality.signed(row.metric_difference_high)}"


def _open(
    rows: Sequence[ArmSummary], everyone: Sequence[str], said: set[str], comparison: Comparison, quality: Quality
) -> Iterable[str]:
    """Yield which arms are undecided: too few seeds for any test, or intervals that are too wide."""
    few = [row for row in rows if row.accuracy_verdict == TOO_FEW]
    if few:
        seeds = max(row.pairs for row in few)
        arms = [row.arm for row in few]
        whose = "between arms" if len(arms) == len(everyone) else f"of {names_of(arms, everyone, said)}"
        what = "run" if comparison.judged else "seed"
        noun = f"One {what}" if seeds == 1 else f"{count_of(seeds).capitalize()} {what}s"
        yield f"{noun}: differences {whose} cannot be distinguished from run-to-run noise."
        said.update(arms)
    tested = [row for row in rows if row not in few and row.metric_difference_low is not None]
    if tested:
        arms = [row.arm for row in tested]
        width = f"±{comparison.margin:g}{quality.unit}"
        noun = "the interval reaches" if len(arms) == 1 else "their intervals reach"
        shown = f" ({with_interval(tested[0], quality)})" if len(arms) == 1 else ""
        yield f"Inconclusive for {names_of(arms, everyone, said)}: {noun} beyond the margin of {width}{shown}."
        said.update(arms)
    others: dict[str, list[str]] = {}
    for row in rows:
        if row not in few and row not in tested and "not tested" not in row.accuracy_verdict:
            others.setdefault(row.accuracy_verdict, []).append(row.arm)
    for word, arms in others.items():
        why = word.removeprefix("inconclusive").strip(" ()")
        yield f"Inconclusive for {names_of(arms, everyone, said)}{f': {why}' if why else ''}."
        said.update(arms)


def outcome_sentences(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterable[str]:
    """Yield which arms diverged, with the cause where it is proven, and which failed, with their error.

    Args:
        by_arm: the records of each row; a table of others has none.
    """
    everyone = [row.arm for row in comparison.arms if row.arm != comparison.reference]
    diverged: dict[tuple[str, str], list[str]] = {}
    for row in comparison.arms:
        if row.diverged:
            records = by_arm.get(row.arm, [])
            ran = row.completed + row.diverged
            share = f"{row.diverged} of {ran} {'seed' if records else 'run'}{'s' if ran > 1 else ''}"
            diverged.setdefault((share, divergence_cause(records)), []).append(row.arm)
    for (share, cause), arms in diverged.items():
        first = first_divergence([record for arm in arms for record in by_arm.get(arm, [])])
        where = f", {first}" if first.startswith("first") else f" {first}" if first else ""
        yield f"{with_verb(arms, everyone, 'diverged', 'diverged')} in {share}{where}{f': {cause}' if cause else ''}."
    failed: dict[tuple[str, str], list[str]] = {}
    for row in comparison.arms:
        records = by_arm.get(row.arm, [])
        for status in ("failed", "interrupted"):
            ended = [record for record in records if record.status == status]
            if ended:
                share = f"{len(ended)} of {len(records)} seed{'s' if len(records) > 1 else ''}"
                how = "failed" if status == "failed" else "was interrupted"
                error = _short(ended[0].error) if status == "failed" else ""
                failed.setdefault((f"{how} in {share}", error), []).append(row.arm)
    for (what, error), arms in failed.items():
        said = what if len(arms) == 1 else what.replace("was ", "were ")
        stop = "" if error.endswith("...") else "."
        yield f"{with_verb(arms, everyone, said, said)}{f': {error}' if error else ''}{stop}"


def _short(error: str | None) -> str:
    """Return the first line of an error, cut at a word, with the location that ends it."""
    text = (error or "").strip()
    location = LOCATION.search(text)
    line = " ".join((text[: location.start() if location else None].splitlines() or [""])[0].split()).rstrip(".")
    if len(line) > MAX_ERROR:
        line = f"{line[:MAX_ERROR].rpartition(' ')[0] or line[:MAX_ERROR]} ..."
    return line + (location[0] if location else "")
