"""The answer in a few sentences: what to use, what it costs, and what these runs cannot show."""

import math
from collections.abc import Iterable, Mapping, Sequence

from ampcompare.base.formatting import printable_line
from ampcompare.base.tensors.type_names import HALF_NAMES
from ampcompare.results.analysis.conclusions.phrases import (
    ArmNaming,
    difference_interval_text,
    memory_saving_text,
    names_text,
    new_samples_caveat,
    non_gpu_timing_phrase,
    number_word,
    saved_memory_share,
    step_time_ratio_text,
)
from ampcompare.results.analysis.conclusions.recommendation import (
    MIN_SAVING,
    arms_doubted_for_ranking_ties,
    recommended_arms,
)
from ampcompare.results.analysis.effects.quality import quality_effect
from ampcompare.results.analysis.inference.effect import MIN_PAIRS
from ampcompare.results.analysis.pairing.declared import not_as_declared_verdict
from ampcompare.results.analysis.pairing.learning import (
    first_divergence_phrase,
    learned_nothing_verdict,
    proven_divergence_cause,
    skipped_steps_sentences,
    some_runs_learned_nothing_sentences,
    why_margin_too_wide,
)
from ampcompare.results.analysis.pairing.pairs import pairs_by_seed
from ampcompare.results.analysis.pairing.seeding import why_seeds_are_one_run
from ampcompare.results.records.comparison import SEEDS_ITSELF, ArmSummary, Comparison
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import OPEN, Kind

MAX_ERROR, END_OF_ERROR = 300, 200  # characters; the end has the line of the script and the remedy
MAX_DIFFERENCES = 3
MAX_NAMED = 4
ENDS = {
    "diverged": ("diverged", "diverged"),
    "failed": ("failed", "failed"),
    "interrupted": ("was interrupted", "were interrupted"),
}


def headline(comparison: Comparison) -> list[str]:
    """Return one sentence for each thing that is known, the most important first.

    Caveats come before the claims that they weaken. A sentence claims no more than the verdicts of the rows do. An arm
    whose first weights were changed a little, the twin, is no answer: how far it ends says what can be told at all.
    """
    changed = {record.arm for record in comparison.records if record.config.first_weights == "twin"}
    others = [row for row in comparison.arms if row.arm not in changed]
    about = comparison.model_copy(update={"arms": others})
    by_arm = about.by_arm()
    return [
        *_warning_sentences(comparison),
        *_answer_sentences(about, by_arm),
        *filter(None, (_sentence_on_twin_distance(comparison, arm, by_arm) for arm in sorted(changed))),
    ]


def warnings_and_answer(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Return the first sentences of a headline, which weaken what follows, apart from the answer."""
    count = len(list(_warning_sentences(comparison)))
    return comparison.headline[:count], comparison.headline[count:]


def _warning_sentences(comparison: Comparison) -> Iterable[str]:
    """Yield what weakens every claim: terms that were changed, in older reports, and records that are not used."""
    for look in comparison.looks:
        if look.number == comparison.look and look.changes:
            yield f"Changed after runs were seen: {'; '.join(look.changes)}."
    count = len(comparison.excluded)
    if comparison.only_copies:
        of_script = next((record for record in comparison.records if record.script is not None), None)
        script = None if of_script is None else of_script.config.script
        why = (
            SEEDS_ITSELF
            if of_script is None or script is None
            else why_seeds_are_one_run(script, of_script.script)
        )
        yield f"{count} of the runs {'are copies' if count > 1 else 'is a copy'} of another seed's: {why}."
    elif count and comparison.judged:
        yield f"{count} row{'s are copies' if count > 1 else ' is a copy'} of other runs, and not used."
    elif count:
        yield f"{count} record{'s are' if count > 1 else ' is'} not used; the details have the reason."


def _answer_sentences(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterable[str]:
    rows = [row for row in comparison.arms if row.arm != comparison.reference]
    everyone = [row.arm for row in rows]
    outcomes = list(_divergence_and_failure_sentences(comparison, by_arm))
    blocked = _why_nothing_to_compare(comparison, by_arm)
    if blocked or not rows:
        yield from [blocked] if blocked else _sentences_on_only_arm(comparison, by_arm)
        yield from outcomes
        yield from _speed_sentences(comparison, rows, everyone)
        return
    yield from some_runs_learned_nothing_sentences(by_arm)
    yield from skipped_steps_sentences({row.arm: by_arm.get(row.arm, []) for row in rows})
    if comparison.error_rate == 0 and comparison.look != 0:
        yield _why_no_verdicts(comparison)
    wide = why_margin_too_wide(by_arm.get(comparison.reference, []), comparison.reference, comparison.margin)
    tied = arms_doubted_for_ranking_ties(comparison.arms, comparison.reference, comparison.metric)
    chosen = [] if wide else recommended_arms(rows, comparison.prefer, comparison.metric, tied)[:1]
    rest = [row for row in rows if row not in chosen]
    # ties explain that metric and loss differ in opposite ways, and say nothing of the metric's direction
    yield from _metric_loss_contradiction_sentences(
        [row for row in rows if row.arm not in tied], comparison.metric
    )
    yield from _sentences_on_ranking_ties(tied, comparison)
    if wide:
        yield wide
    else:
        yield from (recommendation_sentence(row, comparison) for row in chosen)
        yield from _quality_sentences(comparison, rest, ArmNaming(everyone, {row.arm for row in chosen}))
    yield from outcomes
    yield from _speed_sentences(
        comparison, [row for row in rows if row not in chosen or row.time.kind != "better"], everyone
    )
    yield from filter(
        None, [_gpu_memory_sentence(comparison, rest), _mixed_engines_sentence(comparison, by_arm)]
    )


def recommendation_sentence(row: ArmSummary, comparison: Comparison) -> str:
    """Return the recommendation of an arm, with what it keeps and what it saves."""
    reference, metric = comparison.reference, comparison.metric
    samples = new_samples_caveat([row], comparison)
    if row.quality.kind == "better":
        kept = f"better {metric.quality_noun} than {reference} ({difference_interval_text(row, metric)}){samples}"
    elif row.quality.kind == "identical":
        kept = f"identical to {reference}"
    else:
        side = "within ±" if row.quality.kind == "equivalent" else "margin "
        change = metric.difference_text_with_unit(row.quality.effect or 0)
        kept = (
            f"{metric.quality_noun} of {reference} kept (Δ {change}, {side}{metric.margin_text(comparison.margin)}"
            f"{'; ' * bool(row.quality.update_counts_text)}{row.quality.update_counts_text}){samples}"
        )
    gains = []
    if row.time.kind == "better":
        gains.append(f"{step_time_ratio_text(row)} its step time{non_gpu_timing_phrase(comparison)}")
    if saved_memory_share(row) >= MIN_SAVING and (
        comparison.prefer == "memory" or not non_gpu_timing_phrase(comparison)
    ):
        gains.append(f"{memory_saving_text(row)} peak memory")
    if comparison.prefer == "memory":
        gains.reverse()
    return f"Use {row.arm}: {', '.join([kept, *gains])}."


def _metric_loss_contradiction_sentences(rows: Sequence[ArmSummary], metric: Metric) -> Iterable[str]:
    """Yield which arms the metric and the training loss show to differ in opposite ways; a wrong direction shows so."""
    arms = []
    for row in rows:
        if row.loss_contradicts:
            losses, quality = ("higher", "better") if (row.loss.effect or 0) > 0 else ("lower", "worse")
            arms.append(f"{row.arm} has {losses} losses, but is {quality} in that")
    if arms:
        sign = "larger" if metric.better == "higher" else "smaller"
        yield (
            f"The training loss at the end contradicts {metric.name}, of which {sign} values are taken for the better "
            f"ones: {', '.join(arms)}."
        )


def _sentences_on_ranking_ties(tied: Mapping[str, Sequence[str]], comparison: Comparison) -> Iterable[str]:
    """Yield which differences of the metric may come from an evaluation that compares rounded numbers.

    Args:
        tied: such arms, each with the places of these comparisons, also those of the reference.
    """
    if tied:
        own = [
            row.arm
            for row in comparison.arms
            if row.equal_numbers and row.arm in (comparison.reference, *tied)
        ]
        places = list(dict.fromkeys(place for one in tied.values() for place in one))
        yield (
            f"The evaluation of {names_text(own)} compares numbers of which many are equal in 16 bits "
            f"({printable_line(names_text(places), MAX_ERROR)}), so the difference in "
            f"{comparison.metric.quality_noun} may be that of the ranking and not of the weights, at any number of "
            "seeds."
        )


def _why_nothing_to_compare(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return why there is nothing to compare; "" if there is."""
    reference = comparison.reference
    records = by_arm.get(reference, [])
    if other := not_as_declared_verdict(records):
        return f"Nothing to compare: {reference} is {other}."
    if idle := learned_nothing_verdict(records):
        return f"Nothing to compare: {reference} {idle}."
    if not any(row.has_completed for row in comparison.arms):
        return "Nothing to compare: no run was completed."
    has_others = len(comparison.arms) > 1 and comparison.records
    if has_others and not any(run.status == "completed" for run in records):
        return f"Nothing to compare: {reference}, the reference, completed no run."
    return ""


def _sentences_on_only_arm(
    comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]
) -> Iterable[str]:
    """Yield what the only arm reached."""
    row = comparison.arms[0]
    if row.metric_mean is None or not by_arm.get(row.arm):
        return
    count = row.completed or 0
    seeds = f"{number_word(count)} seed{'s' if count > 1 else ''}"
    metric = comparison.metric
    reached = f"{metric.value_text(row.metric_mean)} {metric.name}"
    yield f"{row.arm} reached {reached} in {seeds}; there is no other arm to compare it with."


def _why_no_verdicts(comparison: Comparison) -> str:
    """Return why there are no verdicts: runs are missing, or no look is left. Look 0 had too few seeds for any."""
    if comparison.missing_cells:
        return (
            f"No verdicts yet: {len(comparison.missing_cells)} of {len(comparison.order)} runs are missing."
        )
    if comparison.look:
        return "No verdicts: earlier looks at these arms have spent the error rate of 5 %."
    return "No verdicts: nothing was tested; the details have the reason."


def _mixed_engines_sentence(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return which arms ran on which engine of `apex.amp`, where both did."""
    arms: dict[tuple[str, str], list[str]] = {}
    for arm, records in by_arm.items():
        for engine in dict.fromkeys((run.engine.name, run.engine.version) for run in records if run.engine):
            arms.setdefault(engine, []).append(arm)
    if len({name for name, _ in arms}) < 2:
        return ""
    parts = [f"{', '.join(its)} on {name} {version}" for (name, version), its in sorted(arms.items())]
    return f"Two engines of apex.amp ran: {'; '.join(parts)}. Results of compat are not results of NVIDIA's Apex."


def _quality_sentences(
    comparison: Comparison, rows: Sequence[ArmSummary], naming: ArmNaming
) -> Iterable[str]:
    """Yield the decided results of these rows, then the open ones, then what could not be compared.

    Args:
        rows: arms besides the reference of which nothing was said yet; something was said of all others.
    """
    reference = comparison.reference

    def rows_of_kind(*kinds: Kind) -> list[ArmSummary]:
        return [row for row in rows if row.arm not in naming.said and row.quality.kind in kinds]

    tried = [row for row in rows_of_kind("identical") if row.pairs >= MIN_PAIRS]
    if tested := rows_of_kind("equivalent", "non-inferior"):
        yield _sentence_on_kept_quality(
            [row for row in rows if row in tried or row in tested], comparison, naming
        )
    if same := [row.arm for row in rows_of_kind("identical")]:
        yield (
            f"{naming.sentence_beginning(same, 'is', 'are')} identical to {reference}, every loss and all "
            "weights to the last bit."
        )
    for kind in ("better", "worse"):
        if different := rows_of_kind(kind):
            yield _sentence_on_difference(kind, different, comparison)
            naming.said.update(row.arm for row in different)
    yield from _sentences_on_undecided_arms(rows_of_kind(*OPEN), comparison, naming)
    for row in rows_of_kind("conditional"):
        some, total = row.quality.survivors or (0, 0)
        yield (
            f"{row.arm} is {row.quality.on_survivors} only on the {some} of {total} seeds that both it and "
            f"{reference} completed, so it is not recommended."
        )
        naming.said.add(row.arm)
    if apart := rows_of_kind("not comparable"):
        why = _first_reason_noting_others(row.quality.detail for row in apart)
        yield f"Not compared with {reference}: {naming.names_in_sentence([row.arm for row in apart])} ({why})."
    for row in rows_of_kind("not as declared"):
        yield f"No verdict on {row.arm}: it is {row.quality}."
        naming.said.add(row.arm)
    for word, arms in _group_arms_by_reason(
        (str(row.quality), row) for row in rows_of_kind("learned nothing")
    ).items():
        yield f"{naming.sentence_beginning(arms, word, word)}."
    for reason, arms in _group_arms_by_reason(_reasons_and_rows_without_pairs(comparison, rows)).items():
        yield f"No verdict on {naming.names_in_sentence(arms)}: {reason}."


def _group_arms_by_reason(reasons: Iterable[tuple[str, ArmSummary]]) -> dict[str, list[str]]:
    """Return the arms of each reason."""
    arms: dict[str, list[str]] = {}
    for reason, row in reasons:
        arms.setdefault(reason, []).append(row.arm)
    return arms


def _first_reason_noting_others(reasons: Iterable[str], several: str = "") -> str:
    """Return the first of some reasons, and that there are others."""
    first, *others = dict.fromkeys(reasons)
    return f"{several}such as {first}" if others else first


def _reasons_and_rows_without_pairs(
    comparison: Comparison, rows: Sequence[ArmSummary]
) -> Iterable[tuple[str, ArmSummary]]:
    """Yield each row that has runs and no verdict, with why it has no pair."""
    quality, measured = (
        comparison.metric.quality_noun,
        {row.arm for row in comparison.arms if row.metric_mean is not None},
    )
    for row in rows:
        if row.quality or not row.has_completed or row.pairs:
            continue
        if not measured:
            yield "there is no metric", row
        elif comparison.reference not in measured:
            yield f"{comparison.reference} has no {quality}", row
        else:
            is_measured = row.arm in measured
            yield "no seed was completed by both sides" if is_measured else f"no {quality} was measured", row


def _sentence_on_kept_quality(rows: Sequence[ArmSummary], comparison: Comparison, naming: ArmNaming) -> str:
    """Return that these rows keep the quality, and which of them are identical."""
    metric = comparison.metric
    tested = [row for row in rows if row.quality.kind != "identical"]
    same = [row.arm for row in rows if row not in tested]
    sides = "within ±" if all(row.quality.kind == "equivalent" for row in tested) else "margin "
    shown = f"{_differences_or_range_text(rows, metric)}, {sides}{metric.margin_text(comparison.margin)}"
    for row in tested:
        if row.quality.update_counts_text:
            shown += f"; {row.arm} after {row.quality.update_counts_text}"
    identical = (
        f"; {names_text(same)} {'is' if len(same) == 1 else 'are'} identical to the last bit" if same else ""
    )
    keep = naming.sentence_beginning([row.arm for row in rows], "keeps", "keep")
    what = f"{comparison.reference}'s {metric.quality_noun}{new_samples_caveat(tested, comparison)}"
    return f"{keep} {what} ({shown}){identical}."


def _differences_or_range_text(rows: Sequence[ArmSummary], metric: Metric) -> str:
    """Return the differences of a few rows in their order, or the least and the largest of many."""
    known = [row.quality.effect for row in rows if row.quality.effect is not None]
    shown = list(map(metric.difference_text_without_unit, known))
    if len(set(shown)) == 1:
        shown = shown[:1]
    elif len(shown) > MAX_DIFFERENCES:
        least, most = map(metric.difference_text_without_unit, (min(known), max(known)))
        shown = [f"{least} to {most}"]
    return f"Δ {names_text(shown)}{metric.difference_suffix}"


def _sentence_on_difference(kind: Kind, rows: Sequence[ArmSummary], comparison: Comparison) -> str:
    metric = comparison.metric
    parts = [f"{row.arm} ({difference_interval_text(row, metric)})" for row in rows]
    how = f"{kind} in {metric.quality_noun} than"
    if metric.quality_noun == "accuracy":
        how = f"{'more' if kind == 'better' else 'less'} accurate than"
    verb = "is" if len(rows) == 1 else "are"
    return f"{names_text(parts)} {verb} {how} {comparison.reference}{new_samples_caveat(rows, comparison)}."


def _sentences_on_undecided_arms(
    rows: Sequence[ArmSummary], comparison: Comparison, naming: ArmNaming
) -> Iterable[str]:
    """Yield which arms are undecided: too few seeds for any test, or intervals that are too wide."""
    metric = comparison.metric
    few = [row for row in rows if row.quality.kind == "few seeds"]
    if few:
        seeds = max(row.pairs for row in few)
        whose = naming.names_in_sentence([row.arm for row in few])
        whose = "between arms" if len(few) == len(naming.everyone) else f"of {whose}"
        what = "run" if comparison.judged else "seed"
        noun = f"One {what}" if seeds == 1 else f"{number_word(seeds).capitalize()} {what}s"
        yield f"{noun}: differences {whose} cannot be distinguished from run-to-run noise."
    tested = [row for row in rows if row not in few and row.quality.low is not None]
    if tested:
        noun = "the interval reaches" if len(tested) == 1 else "their intervals reach"
        shown = f" ({difference_interval_text(tested[0], metric)})" if len(tested) == 1 else ""
        width = f"±{comparison.margin:g}{metric.difference_suffix}"
        arms = naming.names_in_sentence([row.arm for row in tested])
        yield f"Inconclusive for {arms}: {noun} beyond the margin of {width}{shown}."
    others = [row for row in rows if row.quality.kind == "inconclusive" and row not in tested]
    for why, undecided in _group_arms_by_reason((row.quality.detail, row) for row in others).items():
        yield f"Inconclusive for {naming.names_in_sentence(undecided)}{f': {why}' if why else ''}."


def _divergence_and_failure_sentences(
    comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]
) -> Iterable[str]:
    """Yield which arms diverged, with the cause where it is proven, and which failed, with their error.

    Args:
        by_arm: the records of each row; a table of others has none.
    """
    names = [row.arm for row in comparison.arms if row.arm != comparison.reference]
    for status, (one, several) in ENDS.items():
        groups: dict[tuple[str, str], list[str]] = {}
        for row in comparison.arms:
            records = by_arm.get(row.arm, [])
            ended = [record for record in records if record.status == status]
            count = len(ended)
            total = len(records)
            why = ""
            if status == "diverged":
                count, total = row.diverged, (row.completed or 0) + row.diverged
                why = proven_divergence_cause(records)
            elif status == "failed" and ended:
                why = printable_line(ended[0].error or "", MAX_ERROR, keep_end=END_OF_ERROR).rstrip(".")
            if count:
                share = f"{count} of {total} {'seed' if records else 'run'}{'s' if total > 1 else ''}"
                groups.setdefault((share, why), []).append(row.arm)
        for (share, why), arms in groups.items():
            first = first_divergence_phrase([record for arm in arms for record in by_arm.get(arm, [])])
            where = first if status == "diverged" else ""
            beginning = ArmNaming(names).sentence_beginning(arms, one, several)
            yield f"{beginning} in {share}{where}{f': {why}' if why else ''}."


def _speed_sentences(
    comparison: Comparison, rows: Sequence[ArmSummary], everyone: Sequence[str]
) -> Iterable[str]:
    """Yield the relative step times of these rows, and of which the speed is not known, with the reason."""
    known = [row for row in rows if row.time.low is not None]
    where = non_gpu_timing_phrase(comparison)
    if len(known) == 1:
        (row,) = known
        doubt = ", inconclusive" if row.time.kind in OPEN else ""
        yield f"{row.arm} takes {step_time_ratio_text(row)} the step time of {comparison.reference}{where}{doubt}."
    elif known:
        known.sort(key=lambda row: row.time.effect or 0.0)
        parts = []
        for row in known[:MAX_NAMED]:
            doubt = ", inconclusive" if row.time.kind in OPEN else ""
            parts.append(f"{row.arm} {step_time_ratio_text(row, doubt)}")
        more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
        yield f"Step time relative to {comparison.reference}{where}: {', '.join(parts)}{more}."
    unknown = _arms_and_reasons_of_unknown_speed([row for row in rows if row not in known])
    if len(unknown) == 1 and not known:
        yield f"Speed is not known: {unknown[0][1]}."
    elif unknown:
        (names, why), *rest = [(ArmNaming(everyone).names_in_sentence(arms), why) for arms, why in unknown]
        yield f"Speed of {names} is not known: {why}{''.join(f'; of {others}: {its}' for others, its in rest)}."


def _arms_and_reasons_of_unknown_speed(rows: Sequence[ArmSummary]) -> list[tuple[list[str], str]]:
    """Return the arms whose step times are not usable, with one reason: emulated ones, invalid ones, then the rest.

    An arm whose quality could not be compared for the same reason is left out.
    """
    rows = [row for row in rows if (row.time.kind, row.time.why) != (row.quality.kind, row.quality.why)]
    emulated = [row for row in rows if row.time.kind == "emulated" and row.time.why in HALF_NAMES]
    invalid = [row for row in rows if row.time.kind == "invalid"]
    others = [row for row in rows if row.time.kind in ("not comparable", "emulated") and row not in emulated]
    found = []
    if emulated:
        types = sorted({row.time.why for row in emulated})
        verb = "is" if len(types) == 1 else "are"
        found.append((emulated, f"{' and '.join(types)} {verb} emulated on this CPU, measure on a GPU"))
    if invalid:
        found.append(
            (
                invalid,
                f"the measurement was invalid ({_first_reason_noting_others(row.time.detail for row in invalid)})",
            )
        )
    if others:
        found.append(
            (
                others,
                _first_reason_noting_others((row.time.detail for row in others), "several reasons, "),
            )
        )
    return [([row.arm for row in its], why) for its, why in found]


def _gpu_memory_sentence(comparison: Comparison, rows: Sequence[ArmSummary]) -> str:
    """Return which of these rows need less or more memory; nothing of a CPU, whose peaks move between runs."""
    if non_gpu_timing_phrase(comparison) and comparison.records:
        return ""
    apart = sorted(
        (row for row in rows if abs(saved_memory_share(row)) >= MIN_SAVING),
        key=saved_memory_share,
        reverse=True,
    )
    parts = [f"{row.arm} {memory_saving_text(row)}" for row in apart[:MAX_NAMED]]
    more = f" and {len(apart) - MAX_NAMED} more" if len(apart) > MAX_NAMED else ""
    return f"Peak memory: {', '.join(parts)} than {comparison.reference}{more}." if parts else ""


def _twin_weight_change_text(records: Sequence[RunRecord]) -> str:
    """Return by how much a twin's weights are changed; those that a script holds in bf16 by their last place."""
    ledgers = [run.ledger for run in records if run.config.script is not None and run.ledger is not None]
    held = {kind for ledger in ledgers for group in ledger.groups for kind in group.weights}
    if "bf16" not in held:
        return "1/512"
    unit = "a unit in the last place of bf16 (1/256 to 1/128)"
    return unit if held == {"bf16"} else f"1/512, those in bf16 by {unit},"


def _sentence_on_twin_distance(
    comparison: Comparison, twin: str, by_arm: Mapping[str, Sequence[RunRecord]]
) -> str:
    """Return how far apart two equal trainings end, and which arms differ from the reference by no more."""
    pairs = pairs_by_seed(by_arm[twin], by_arm.get(comparison.reference, []))
    effect = quality_effect(pairs)
    if effect is None:
        return ""
    metric = comparison.metric
    floor = abs(metric.difference_from_score_difference(math.hypot(effect.mean, effect.spread)))
    below = [
        row.arm
        for row in comparison.arms
        if row.arm not in (twin, comparison.reference)
        and row.quality.effect is not None
        and abs(row.quality.effect) <= floor
    ]
    is_equal = all(run.summary.metric_final == other.summary.metric_final for run, other in pairs)
    by = "no more than the rounding of its values, " * is_equal
    end = (
        f"{comparison.reference} again from weights changed by {_twin_weight_change_text(by_arm[twin])} differs by {by}"
        f"{metric.difference_text_with_unit(floor)}"
    )
    if not below:
        return f"{end}: smaller differences cannot be told."
    return f"{end}: the difference of {', '.join(below)} is no larger, so this training cannot tell it from chance."
