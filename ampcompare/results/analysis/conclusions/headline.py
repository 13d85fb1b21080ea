"""The answer in a few sentences: what to use, what it costs, and what these runs cannot show."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from ampcompare.base.formatting import printable
from ampcompare.results.analysis.conclusions.phrases import (
    Quality,
    count_of,
    names_of,
    sentence_start,
    with_verb,
)
from ampcompare.results.analysis.effects.samples import samples_noun
from ampcompare.results.analysis.inference.effect import ERROR_RATE, MIN_PAIRS
from ampcompare.results.analysis.pairing.declared import not_as_declared
from ampcompare.results.analysis.pairing.learning import (
    divergence_cause,
    first_divergence,
    idle_some,
    idle_verdict,
    still_improving,
    too_wide,
)
from ampcompare.results.analysis.pairing.pairs import equal_losses, identical, other_weights, pairs_by_seed
from ampcompare.results.records.comparison import SEEDS_ITSELF, ArmSummary, Comparison
from ampcompare.results.records.evaluation import emulated_type
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import KEPT, OPEN, Kind

__all__ = [
    "details",
    "headline",
    "look_sentences",
    "recommended_arms",
    "use_sentence",
    "warnings_and_answer",
    "why_none_recommended",
]

HALF_ON_CPU = {
    "fp16 emulated": "fp16 was computed in fp32 and rounded (emulated)",
    "fp16 native": "fp16 ran natively",
    "bf16 emulated": "bf16 was computed in fp32 and rounded (emulated)",
    "fp8 emulated": "operands of fp8 were rounded and multiplied in fp32 (emulated)",
}
FP16_ON_CPU = "{how} on this CPU: accuracy, divergence and loss scales carry over to a GPU, 16-bit step times do not."
MAX_ERROR, END_OF_ERROR = 300, 200  # characters; the end has the line of the script and the remedy
MAX_DIFFERENCES = 3
_MIN_SAVING = 0.05  # of memory: less than that is the noise of an allocator
MAX_NAMED = 4
HALF = ("fp16", "bf16")


def headline(comparison: Comparison) -> list[str]:
    """Return one sentence for each thing that is known, the most important first.

    Caveats come before the claims that they weaken. A sentence claims no more than the verdicts of the rows do.

    Args:
        comparison: with its rows; its own headline is not used.
    """
    return [*_warnings(comparison), *_answer_sentences(comparison, comparison.by_arm())]


def warnings_and_answer(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Return the first sentences of a headline, which weaken what follows, apart from the answer."""
    count = len(list(_warnings(comparison)))
    return comparison.headline[:count], comparison.headline[count:]


def _warnings(comparison: Comparison) -> Iterable[str]:
    """Yield what weakens every claim: terms that were changed, in older reports, and records that are not used."""
    for look in comparison.looks:
        if look.number == comparison.look and look.changes:
            yield f"Changed after runs were seen: {'; '.join(look.changes)}."
    count = len(comparison.excluded)
    if comparison.only_copies:
        yield f"{count} of the runs {'are copies' if count > 1 else 'is a copy'} of another seed's: {SEEDS_ITSELF}."
    elif count and comparison.judged:
        yield f"{count} row{'s are copies' if count > 1 else ' is a copy'} of other runs, and not used."
    elif count:
        yield f"{count} record{'s are' if count > 1 else ' is'} not used; the details have the reason."


def _answer_sentences(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterable[str]:
    rows = [row for row in comparison.arms if row.arm != comparison.reference]
    outcomes = list(_outcome_sentences(comparison, by_arm))
    blocked = _nothing_to_compare(comparison, by_arm)
    if blocked or not rows:
        yield from [blocked] if blocked else _sentence_on_one_arm(comparison, by_arm)
        yield from outcomes
        yield from _speed_sentences(comparison, rows)
        return
    quality = Quality(comparison.metric)
    yield from idle_some(by_arm)
    if comparison.error_rate == 0 and comparison.look != 0:
        yield _why_untested(comparison)
    wide = too_wide(by_arm.get(comparison.reference, []), comparison.reference, comparison.margin)
    chosen: list[ArmSummary] = []
    if wide:
        yield wide
    else:
        chosen = recommended_arms(rows, comparison.prefer, comparison.metric)[:1]
        yield from (use_sentence(row, comparison, quality) for row in chosen)
        yield from _accuracy_sentences(comparison, [row for row in rows if row not in chosen], quality)
    yield from outcomes
    rest = [row for row in rows if row not in chosen]
    yield from _speed_sentences(comparison, [row for row in rows if row not in chosen or row.time.kind != "better"])
    if memory := _memory_sentence(comparison, rest):
        yield memory
    if engines := _engines(comparison, by_arm):
        yield engines


def _nothing_to_compare(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return why there is nothing to compare; "" if there is."""
    reference = comparison.reference
    records = by_arm.get(reference, [])
    if other := not_as_declared(records):
        return f"Nothing to compare: {reference} is {other}."
    if idle := idle_verdict(records):
        return f"Nothing to compare: {reference} {idle}."
    if not any(row.completed for row in comparison.arms):
        return "Nothing to compare: no run was completed."
    if len(comparison.arms) > 1 and comparison.records and not any(run.status == "completed" for run in records):
        return f"Nothing to compare: {reference}, the reference, completed no run."
    return ""


def _sentence_on_one_arm(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterable[str]:
    """Yield what the only arm reached."""
    row = comparison.arms[0]
    if row.metric_mean is None or not by_arm.get(row.arm):
        return
    seeds = f"{count_of(row.completed)} seed{'s' if row.completed > 1 else ''}"
    metric = comparison.metric
    reached = f"{metric.shown(row.metric_mean)} {metric.name}"
    yield f"{row.arm} reached {reached} in {seeds}; there is no other arm to compare it with."


def _why_untested(comparison: Comparison) -> str:
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
    arms: dict[tuple[str, str], list[str]] = {}
    for arm, records in by_arm.items():
        for engine in dict.fromkeys((run.engine.name, run.engine.version) for run in records if run.engine):
            arms.setdefault(engine, []).append(arm)
    if len({name for name, _ in arms}) < 2:
        return ""
    parts = [f"{', '.join(its)} on {name} {version}" for (name, version), its in sorted(arms.items())]
    return f"Two engines of apex.amp ran: {'; '.join(parts)}. Results of compat are not results of NVIDIA's Apex."


def recommended_arms(rows: Sequence[ArmSummary], prefer: str, metric: Metric) -> list[ArmSummary]:
    """Return the arms to use for what is preferred, the best first.

    For time or memory an arm qualifies where its accuracy is kept by verdict, not by a look at the mean. An arm that is
    identical in fewer than three pairs was hardly tried.

    Args:
        rows: without the reference.
        metric: of the differences.
    """
    if prefer == "accuracy":
        better = [row for row in rows if row.quality.kind == "better"]
        return sorted(better, key=lambda row: -metric.scores_of(row.quality.effect or 0))
    keeps = _keeping(rows)
    if prefer == "time":
        return sorted((row for row in keeps if row.time.kind == "better"), key=lambda row: row.time.effect or 1)
    return sorted((row for row in keeps if _memory_saving(row) >= _MIN_SAVING), key=lambda row: -_memory_saving(row))


def _keeping(rows: Sequence[ArmSummary]) -> list[ArmSummary]:
    return [
        row for row in rows if row.quality.kind in KEPT and (row.quality.kind != "identical" or row.pairs >= MIN_PAIRS)
    ]


def use_sentence(row: ArmSummary, comparison: Comparison, quality: Quality) -> str:
    """Return the recommendation of an arm, with what it keeps and what it saves."""
    reference, samples = comparison.reference, _on_these_samples([row], comparison)
    change = _with_interval(row, quality)
    if row.quality.kind == "better":
        kept = f"better {quality.name} than {reference} ({change}){samples}"
    elif row.quality.kind == "identical":
        kept = f"identical to {reference}"
    else:
        side = "within ±" if row.quality.kind == "equivalent" else "margin "
        change = quality.with_unit(row.quality.effect or 0)
        shown = f"Δ {change}, {side}{comparison.metric.margin_text(comparison.margin)}"
        kept = f"{quality.name} of {reference} kept ({shown}){samples}"
    gains = []
    if row.time.kind == "better":
        gains.append(f"{_step_time_of(row)} its step time{_on_device(comparison)}")
    if _memory_saving(row) >= _MIN_SAVING and (comparison.prefer == "memory" or not _on_device(comparison)):
        gains.append(f"{shown_saving(row)} peak memory")
    if comparison.prefer == "memory":
        gains.reverse()
    return f"Use {row.arm}: {', '.join([kept, *gains])}."


def why_none_recommended(rows: Sequence[ArmSummary], reference: str, prefer: str, metric: Metric) -> Iterable[str]:
    """Yield why no arm is recommended; nothing where one is, or where there is none besides the reference."""
    rows, quality = [row for row in rows if row.arm != reference], metric.quality
    if not rows or recommended_arms(rows, prefer, metric):
        return
    if prefer == "accuracy":
        why = f"no arm is better than {reference}"
    elif not _keeping(rows):
        why = f"none was shown to be non-inferior in {quality} to {reference}"
    elif prefer == "time":
        why = f"none was shown to be both non-inferior in {quality} to {reference} and faster"
    else:
        why = f"no arm is both non-inferior in {quality} to {reference} and {100 * _MIN_SAVING:.0f} % smaller in memory"
    yield f"No arm is recommended for {prefer}: {why}."


def details(comparison: Comparison) -> Iterable[str]:
    """Yield what neither the headline nor the tables show of the runs of a comparison."""
    rows, records, reference = comparison.arms, comparison.records, comparison.reference
    margin, metric = comparison.margin, comparison.metric
    known = comparison.by_arm()
    by_arm = {arm: known.get(arm, []) for arm in [reference, *(row.arm for row in rows)]}
    enough = max((row.completed for row in rows), default=0) >= MIN_PAIRS
    untested = comparison.error_rate == 0
    blocked = untested or idle_verdict(by_arm[reference]) or too_wide(by_arm[reference], reference, margin)
    if enough and not blocked:
        yield from why_none_recommended(rows, reference, comparison.prefer, metric)
    diverged = [row for row in rows if row.diverged]
    if diverged:
        yield f"Rate of divergence: {'; '.join(map(_rate, diverged))}."
    failed = [row.arm for row in rows if row.failed]
    if failed:
        yield f"The logs of runs that failed or were interrupted are in their cells' folders: {', '.join(failed)}."
    if not any(row.completed for row in rows):
        return
    yield from sorted({f"{note}." for record in records for note in record.notes})
    yield from _events(rows, records)
    averaged = [text for row in rows if row.completed and (text := _averaged_metric(row.arm, records, metric))]
    if averaged:
        name = sentence_start(metric.name)
        yield f"{name} of the averaged weights (EMA) after the last epoch: {', '.join(averaged)}."
    yield from filter(None, (still_improving(by_arm, margin), _correlations(rows, reference, metric)))
    yield from _same_bits(by_arm, reference)
    hows = {record.half for record in records if str(record.environment.get("device", "")).startswith("cpu")}
    said = [HALF_ON_CPU[how] for how in sorted(how for how in hows if how in HALF_ON_CPU)]
    if said:
        yield FP16_ON_CPU.format(how=" and ".join(said))


def look_sentences(comparison: Comparison, next_error_rate: float) -> Iterable[str]:
    """Yield which look this is and what it may spend; nothing where looks are not counted or nothing was tested."""
    number = comparison.look
    if not number:
        return
    if not comparison.error_rate:
        yield (
            f"Nothing was tested: earlier looks have spent the error rate of {_percent(ERROR_RATE)}. Other seeds in "
            "another run directory are a new comparison."
        )
        return
    level = f"Look {number} at these arms, tested at an error rate of {_percent(comparison.error_rate)}"
    before = [
        f"look {other.number} at {_percent(other.error_rate)} with {len(other.seeds)} seeds"
        for other in comparison.looks
        if other.number and other.number != number
    ]
    if before:
        yield f"{level}; {', '.join(before)}. Together they spend at most {_percent(ERROR_RATE)}."
    elif next_error_rate > 0:
        yield f"{level}; the rest of {_percent(ERROR_RATE)} is kept for further looks."
    else:
        yield f"{level}, the only one that was planned."


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _rate(row: ArmSummary) -> str:
    ran = row.completed + row.diverged
    if row.diverged_low is None or row.diverged_high is None:
        return f"{row.arm} {row.diverged}/{ran}"
    interval = f"{100 * row.diverged_low:.0f} to {100 * row.diverged_high:.0f} %"
    return f"{row.arm} {row.diverged}/{ran} (95 % interval {interval})"


def _events(rows: Sequence[ArmSummary], records: Sequence[RunRecord]) -> Iterable[str]:
    """Yield which arms trained for fewer epochs than others, and which rolled back to a good state."""
    ended, returned = [], []
    for row in rows:
        runs = [record.summary for record in records if record.arm == row.arm]
        if early := sum(run.ended is not None for run in runs):
            ended.append(f"{row.arm} {early}/{len(runs)}")
        if back := sum(bool(run.rollbacks) for run in runs):
            returned.append(f"{row.arm} {back}/{len(runs)}")
    if ended:
        yield f"Ended before the last epoch, as the recipe allows: {', '.join(ended)}; the records say why."
    if returned:
        yield f"Rolled back to a good state: {', '.join(returned)}; the records say at which steps."


def _correlations(rows: Sequence[ArmSummary], reference: str, metric: Metric) -> str:
    """Return how far the values of the arms follow the reference's over seeds; "" where that is not known."""
    shown = [
        f"{row.arm} {row.metric_correlation:.2f}"
        for row in rows
        if row.arm != reference and row.metric_correlation is not None
    ]
    if not shown:
        return ""
    return f"Correlation of {metric.name} with {reference} over seeds: {', '.join(shown)}."


def _same_bits(by_arm: Mapping[str, Sequence[RunRecord]], reference: str) -> Iterable[str]:
    """Yield which arms had the losses of the reference, and weights that differ or are not known."""
    pairs = {arm: pairs_by_seed(runs, by_arm[reference]) for arm, runs in by_arm.items() if arm != reference}
    alike = [arm for arm, its in pairs.items() if equal_losses(its) and not identical(its)]
    apart = [arm for arm in alike if other_weights(pairs[arm])]
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


def _averaged_metric(arm: str, records: Sequence[RunRecord], metric: Metric) -> str:
    """Return the mean over completed runs of what the averaged weights reach; "" where none were kept."""
    reached = [
        record.summary.ema_metric_final for record in records if record.arm == arm and record.status == "completed"
    ]
    known = [value for value in reached if value is not None]
    return f"{arm} {metric.shown(statistics.fmean(known))}" if known else ""


def _accuracy_sentences(comparison: Comparison, rows: Sequence[ArmSummary], quality: Quality) -> Iterable[str]:
    """Yield the decided results of these rows, then the open ones, then what could not be compared.

    Args:
        rows: arms besides the reference of which nothing was said yet; something was said of all others.
    """
    everyone = [row.arm for row in comparison.arms if row.arm != comparison.reference]
    said = set(everyone).difference(row.arm for row in rows)
    reference = comparison.reference

    def those(*kinds: Kind) -> list[ArmSummary]:
        return [row for row in rows if row.arm not in said and row.quality.kind in kinds]

    tried = [row for row in those("identical") if row.pairs >= MIN_PAIRS]
    if tested := those("equivalent", "non-inferior"):
        kept = [row for row in rows if row in tried or row in tested]
        yield _sentence_on_kept(kept, everyone, said, comparison, quality)
        said.update(row.arm for row in kept)
    if same := [row.arm for row in those("identical")]:
        subject = with_verb(same, everyone, "is", "are", said=said)
        yield f"{subject} identical to {reference}, every loss and all weights to the last bit."
        said.update(same)
    for better in (True, False):
        if different := those("better" if better else "worse"):
            yield _sentence_on_difference(better, different, comparison, quality)
            said.update(row.arm for row in different)
    yield from _sentences_on_open(those(*OPEN), everyone, said, comparison, quality)
    for row in those("conditional"):
        some, total = row.quality.survivors or (0, 0)
        yield (
            f"{row.arm} is {row.quality.on_survivors} only on the {some} of {total} seeds that both it and "
            f"{reference} completed, so it is not recommended."
        )
        said.add(row.arm)
    yield from _sentence_on_incomparable(those("not comparable"), everyone, said, reference)
    for row in those("not as declared"):
        yield f"No verdict on {row.arm}: it is {row.quality}."
        said.add(row.arm)
    idle: dict[str, list[str]] = {}
    for row in those("learned nothing"):
        idle.setdefault(str(row.quality), []).append(row.arm)
    for word, arms in idle.items():
        yield f"{with_verb(arms, everyone, word, word, said=said)}."
        said.update(arms)
    apart = [row for row in rows if not row.quality and row.completed and not row.pairs]
    measured = {row.arm for row in comparison.arms if row.metric_mean is not None}
    if not measured:
        reasons = {row.arm: "there is no metric" for row in apart}
    elif reference not in measured:
        reasons = {row.arm: f"{reference} has no {quality.name}" for row in apart}
    else:
        reasons = {
            row.arm: "no seed was completed by both sides" if row.arm in measured else f"no {quality.name} was measured"
            for row in apart
        }
    for reason in dict.fromkeys(reasons.values()):
        arms = [arm for arm, its in reasons.items() if its == reason]
        yield f"No verdict on {names_of(arms, everyone, said)}: {reason}."


def _sentence_on_incomparable(
    rows: Sequence[ArmSummary], everyone: Sequence[str], said: set[str], reference: str
) -> Iterable[str]:
    """Yield the arms that did not do the work of the reference, with one of the reasons."""
    if rows:
        arms = [row.arm for row in rows]
        reasons = list(dict.fromkeys(row.quality.why for row in rows))
        such = "such as " if len(reasons) > 1 else ""
        yield f"Not compared with {reference}: {names_of(arms, everyone, said)} ({such}{reasons[0]})."
        said.update(arms)


def _sentence_on_kept(
    rows: Sequence[ArmSummary], everyone: Sequence[str], said: set[str], comparison: Comparison, quality: Quality
) -> str:
    """Return that these rows keep the accuracy, and which of them are identical."""
    tested = [row for row in rows if row.quality.kind != "identical"]
    what = f"{comparison.reference}'s {quality.name}{_on_these_samples(tested, comparison)}"
    verb = with_verb([row.arm for row in rows], everyone, "keeps", "keep", said=said)
    sides = "within ±" if all(row.quality.kind == "equivalent" for row in tested) else "margin "
    same = [row.arm for row in rows if row not in tested]
    identical = f"; {with_verb(same, (), 'is', 'are')} identical to the last bit" if same else ""
    margin = comparison.metric.margin_text(comparison.margin)
    return f"{verb} {what} ({_differences(rows, quality)}, {sides}{margin}){identical}."


def _on_these_samples(rows: Sequence[ArmSummary], comparison: Comparison) -> str:
    """Return the caveat if a verdict on one of these rows does not extend beyond the validation samples."""
    open_ones = [row.samples for row in rows if row.samples is not None and row.samples.holds is False]
    noun = samples_noun(comparison.records)
    return f" on these {open_ones[0].samples:,} {noun}, not shown for new ones" if open_ones else ""


def _differences(rows: Sequence[ArmSummary], quality: Quality) -> str:
    """Return the differences of a few rows in their order, or the least and the largest of many."""
    known = [row.quality.effect for row in rows if row.quality.effect is not None]
    shown = list(map(quality.signed, known))
    if len(set(shown)) == 1:
        shown = shown[:1]
    elif len(shown) > MAX_DIFFERENCES:
        shown = [f"{quality.signed(min(known))} to {quality.signed(max(known))}"]
    return f"Δ {names_of(shown)}{quality.unit}"


def _sentence_on_difference(better: bool, rows: Sequence[ArmSummary], comparison: Comparison, quality: Quality) -> str:
    parts = [f"{row.arm} ({_with_interval(row, quality)})" for row in rows]
    if quality.name == "accuracy":
        how = f"{'more' if better else 'less'} accurate than"
    else:
        how = f"{'better' if better else 'worse'} in {quality.name} than"
    verb = "is" if len(rows) == 1 else "are"
    return f"{names_of(parts)} {verb} {how} {comparison.reference}{_on_these_samples(rows, comparison)}."


def _with_interval(row: ArmSummary, quality: Quality) -> str:
    """Return a difference with the interval of the test that decided on it."""
    its = row.quality
    shown = f"Δ {quality.signed(its.effect or 0)}{quality.unit}"
    if its.low is None or its.high is None:
        return shown
    return f"{shown}, {quality.signed(its.low)} to {quality.signed(its.high)}"


def _sentences_on_open(
    rows: Sequence[ArmSummary], everyone: Sequence[str], said: set[str], comparison: Comparison, quality: Quality
) -> Iterable[str]:
    """Yield which arms are undecided: too few seeds for any test, or intervals that are too wide."""
    few = [row for row in rows if row.quality.kind == "few seeds"]
    if few:
        seeds = max(row.pairs for row in few)
        arms = [row.arm for row in few]
        whose = "between arms" if len(arms) == len(everyone) else f"of {names_of(arms, everyone, said)}"
        what = "run" if comparison.judged else "seed"
        noun = f"One {what}" if seeds == 1 else f"{count_of(seeds).capitalize()} {what}s"
        yield f"{noun}: differences {whose} cannot be distinguished from run-to-run noise."
        said.update(arms)
    tested = [row for row in rows if row not in few and row.quality.low is not None]
    if tested:
        arms = [row.arm for row in tested]
        width = f"±{comparison.margin:g}{quality.unit}"
        noun = "the interval reaches" if len(arms) == 1 else "their intervals reach"
        shown = f" ({_with_interval(tested[0], quality)})" if len(arms) == 1 else ""
        yield f"Inconclusive for {names_of(arms, everyone, said)}: {noun} beyond the margin of {width}{shown}."
        said.update(arms)
    others: dict[str, list[str]] = {}
    for row in rows:
        if row.quality.kind == "inconclusive" and row not in tested:
            others.setdefault(row.quality.detail, []).append(row.arm)
    for why, arms in others.items():
        yield f"Inconclusive for {names_of(arms, everyone, said)}{f': {why}' if why else ''}."
        said.update(arms)


def _outcome_sentences(comparison: Comparison, by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterable[str]:
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
        yield f"{with_verb(arms, everyone, 'diverged', 'diverged')} in {share}{first}{f': {cause}' if cause else ''}."
    failed: dict[tuple[str, str, str], list[str]] = {}
    for row in comparison.arms:
        records = by_arm.get(row.arm, [])
        for status in ("failed", "interrupted"):
            ended = [record for record in records if record.status == status]
            if ended:
                share = f"{len(ended)} of {len(records)} seed{'s' if len(records) > 1 else ''}"
                error = (ended[0].error or "") if status == "failed" else ""
                error = printable(error, MAX_ERROR, keep_end=END_OF_ERROR).rstrip(".")
                failed.setdefault((status, share, error), []).append(row.arm)
    for (status, share, error), arms in failed.items():
        one, several = ("failed", "failed") if status == "failed" else ("was interrupted", "were interrupted")
        yield f"{with_verb(arms, everyone, one, several)} in {share}{f': {error}' if error else ''}."


def _on_device(comparison: Comparison) -> str:
    """Return where times were measured, if that is no GPU."""
    devices = {str(record.environment.get("device", "cpu")).partition(":")[0] for record in comparison.records}
    return " on this CPU" if devices == {"cpu"} else ""


def _step_time_of(row: ArmSummary) -> str:
    """Return the relative step time of an arm with its interval, such as `0.61x (0.58 to 0.65)`."""
    its = row.time
    if its.effect is None:
        return ""
    if its.low is None or its.high is None:
        return f"{its.effect:.2f}x"
    return f"{its.effect:.2f}x ({its.low:.2f} to {its.high:.2f})"


def _speed_sentences(comparison: Comparison, rows: Sequence[ArmSummary]) -> Iterable[str]:
    """Yield the relative step times of these rows, and of which the speed is not known, with the reason."""
    everyone = [row.arm for row in comparison.arms if row.arm != comparison.reference]
    known = [row for row in rows if row.time.low is not None]
    where = _on_device(comparison)
    if len(known) == 1:
        (row,) = known
        doubt = ", inconclusive" if row.time.kind in OPEN else ""
        yield f"{row.arm} takes {_step_time_of(row)} the step time of {comparison.reference}{where}{doubt}."
    elif known:
        known.sort(key=lambda row: row.time.effect or 0.0)
        parts = [f"{row.arm} {_ratio_with_doubt(row)}" for row in known[:MAX_NAMED]]
        more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
        yield f"Step time relative to {comparison.reference}{where}: {', '.join(parts)}{more}."
    unknown = _unknown_speeds([row for row in rows if row not in known], _emulated_by(comparison))
    if len(unknown) == 1 and not known:
        yield f"Speed is not known: {unknown[0][1]}."
    elif unknown:
        (names, why), *rest = [(names_of(arms, everyone), why) for arms, why in unknown]
        yield f"Speed of {names} is not known: {why}{''.join(f'; of {others}: {its}' for others, its in rest)}."


def _emulated_by(comparison: Comparison) -> str:
    """Return what has 16-bit types emulated: `--device cpu` alone, for a script, whatever the CPU can do."""
    scripts = [run.config for run in comparison.records if emulated_type(run.half)]
    is_asked = scripts and all(config.script is not None and config.device == "cpu" for config in scripts)
    return "by --device cpu" if is_asked else "on this CPU"


def _unknown_speeds(rows: Sequence[ArmSummary], emulated_by: str) -> list[tuple[list[str], str]]:
    """Return the arms whose step times are not usable, with one reason: emulated ones, then invalid ones, then the
    rest.

    An arm whose accuracy could not be compared for the same reason is left out.
    """
    types = set()
    emulated: list[str] = []
    invalid: dict[str, str] = {}
    others: dict[str, str] = {}
    for row in rows:
        its = row.time
        if (its.kind, its.why) == (row.quality.kind, row.quality.why):
            continue
        if its.kind == "emulated" and its.why in HALF:
            emulated.append(row.arm)
            types.add(its.why)
        elif its.kind == "invalid":
            invalid[row.arm] = its.detail
        elif its.kind in ("not comparable", "emulated"):
            others[row.arm] = its.detail
    found = []
    if emulated:
        verb = "is" if len(types) == 1 else "are"
        why = f"{' and '.join(sorted(types))} {verb} emulated {emulated_by}, measure on a GPU"
        found.append((emulated, why))
    if invalid:
        reasons = list(dict.fromkeys(invalid.values()))
        such = "such as " if len(reasons) > 1 else ""
        found.append((list(invalid), f"the measurement was invalid ({such}{reasons[0]})"))
    if others:
        reasons = list(dict.fromkeys(others.values()))
        such = "several reasons, such as " if len(reasons) > 1 else ""
        found.append((list(others), f"{such}{reasons[0]}"))
    return found


def _ratio_with_doubt(row: ArmSummary) -> str:
    """Return the relative step time of an arm with its interval, and that it is inconclusive, if it is."""
    its = row.time
    if its.kind not in OPEN or its.low is None or its.high is None:
        return _step_time_of(row)
    return f"{its.effect:.2f}x ({its.low:.2f} to {its.high:.2f}, inconclusive)"


def _memory_saving(row: ArmSummary) -> float:
    """Return the share of the reference's peak that an arm saves, below 0 where it needs more; 0 if not known."""
    more, peak = row.memory.effect, row.peak_bytes
    return 0.0 if more is None or peak is None or peak <= more else -more / (peak - more)


def _memory_sentence(comparison: Comparison, rows: Sequence[ArmSummary]) -> str:
    """Return which of these rows need less or more memory than the reference; "" if none does, and on a CPU.

    The resident memory of a CPU moves by some MiB between runs.
    """
    if _on_device(comparison) and comparison.records:
        return ""
    apart = sorted((row for row in rows if abs(_memory_saving(row)) >= _MIN_SAVING), key=_memory_saving, reverse=True)
    parts = [f"{row.arm} {shown_saving(row)}" for row in apart[:MAX_NAMED]]
    more = f" and {len(apart) - MAX_NAMED} more" if len(apart) > MAX_NAMED else ""
    return f"Peak memory: {', '.join(parts)} than {comparison.reference}{more}." if parts else ""


def shown_saving(row: ArmSummary) -> str:
    """Return how much less, or more, memory an arm needs."""
    saving = _memory_saving(row)
    return f"{100 * abs(saving):.0f} % {'less' if saving > 0 else 'more'}"
