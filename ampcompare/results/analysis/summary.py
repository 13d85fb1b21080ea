"""Summarize records as rows of the table, each with its verdicts against the reference."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampcompare.base.environment.extras import require_statistics_packages
from ampcompare.results.analysis.conclusions.details import detail_sentences, look_sentences
from ampcompare.results.analysis.conclusions.headline import headline
from ampcompare.results.analysis.conclusions.next_step import next_steps
from ampcompare.results.analysis.effects.quality import (
    failure_verdict,
    precision_rows,
    quality_effect,
    quality_margin,
)
from ampcompare.results.analysis.effects.quantities import quantity_tests
from ampcompare.results.analysis.effects.samples import compare_samples, sample_sentences, samples_noun
from ampcompare.results.analysis.effects.step_time import (
    invalid_time_reason,
    invalid_time_reason_of_arm,
    rounds_sentence,
    time_evidence,
)
from ampcompare.results.analysis.inference.effect import MIN_PAIRS, wilson_interval
from ampcompare.results.analysis.inference.terms import QualityMargin, Terms
from ampcompare.results.analysis.inference.verdict import (
    NOTHING,
    Evidence,
    SequentialDesign,
    arms_in_opposite_directions,
)
from ampcompare.results.analysis.pairing.comparability import (
    circumstance_lines,
    foreign_steps_text,
    incomparable_memory_verdict,
    script_pairing_sentences,
)
from ampcompare.results.analysis.pairing.declared import ineffective_option_sentences, not_as_declared_verdict
from ampcompare.results.analysis.pairing.pairs import (
    Pair,
    Pairing,
    finished_runs,
    pairs_by_seed,
    pairs_of_counterparts,
)
from ampcompare.results.analysis.pairing.record_checks import unique_runs
from ampcompare.results.analysis.pairing.scores import common_metric, metric_of_runs
from ampcompare.results.records.comparison import (
    ArmSummary,
    Comparison,
    Published,
    Quantity,
    SampleComparison,
)
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RECORDER_RUN, RunRecord
from ampcompare.results.records.verdict import Verdict
from ampcompare.settings.script import LOSS


def summarize(
    records: Sequence[RunRecord],
    *,
    arms: Sequence[str],
    reference: str,
    command: str = "",
    order: Sequence[str] = (),
    terms: Terms | None = None,
    design: SequentialDesign | None = None,
    published: Published | None = None,
    excluded: Sequence[str] = (),
) -> Comparison:
    """Sum up records into a headline, one row per arm, next steps and details.

    Args:
        records: of any subset of the cells; what is missing is missing in the rows.
        arms: labels of the rows, in their order.
        reference: the label of the row that the others are compared with.
        command: as typed, from which next steps are made; "" for none, and then there are no steps.
        order: cells as they ran.
        terms: margins, and what the recommendation improves; None for the default ones.
        design: error rates of the tests; by default of one test at 5 %.
        published: figures of a recipe, shown next to the measured ones; None for none.
        excluded: files that were read and are not used, each with its reason.

    Raises:
        ConfigError: the records are of several tasks, or the margin does not apply to their metric.
    """
    require_statistics_packages()
    terms, design = terms or Terms(), design or SequentialDesign()
    metric = common_metric(records)
    records, copies = unique_runs(records)
    only_copies = bool(copies) and not excluded and all(copy.by_script for copy in copies)
    excluded = [*excluded, *(copy.text for copy in copies)]
    by_arm: dict[str, list[RunRecord]] = {arm: [] for arm in arms}
    for record in records:
        by_arm.setdefault(record.arm, []).append(record)
    against = by_arm.get(reference, [])
    margin = quality_margin(against, reference, terms, metric)
    evidence = {name: quantity.evidence for name, quantity in quantity_tests(margin, terms, design).items()}
    lines = []
    for arm in arms:
        if arm == reference:
            lines.append(_line_of_reference(arm, against))
        else:
            lines.append(_line_of_arm(arm, Pairing.by_seed(by_arm[arm], against), evidence, margin))
    rows = decided_rows(lines, margin, terms, design)
    changed = {record.arm for record in records if record.config.first_weights == "twin"}
    comparison = conclude_comparison(
        rows,
        answered=[row for row in rows if row.arm not in changed],
        metric=metric,
        margin=margin,
        terms=terms,
        design=design,
        command=command,
        reference=reference,
        seeds=sorted({record.config.recipe.seed for record in records}),
        order=list(order),
        environment=_environment_of_records(records),
        reading=[],
        excluded=excluded,
        only_copies=only_copies,
        precisions=precision_rows({arm: by_arm[arm] for arm in arms}, metric),
        records=list(records),
        published=published,
    )
    floors = [_floor_sentence(comparison, arm, by_arm[arm], against) for arm in sorted(changed)]
    return comparison.model_copy(
        update={
            "headline": [*comparison.headline, *filter(None, floors)],
            "next_steps": next_steps(comparison, design.next_error_rate),
            "reading": [
                *(f"Not used: {text}." for text in excluded),
                *detail_sentences(comparison),
                *sample_sentences(rows, margin.points, metric, samples_noun(records)),
                *_ineffective_option_lines(by_arm),
                *script_pairing_sentences(records, reference),
                *circumstance_lines(records, reference),
                *filter(None, [rounds_sentence(records)]),
                *look_sentences(comparison, design.next_error_rate),
                *design.notes,
            ],
        }
    )


@dataclass(frozen=True)
class UndecidedRow:
    """A line of the result before any verdict.

    Attributes:
        row: with what no test gives.
        evidence: on what is known of the arm.
        survivors, updates: as those of a `Pairing`.
        samples: from the verdict on the metric to what single samples say.
    """

    row: ArmSummary
    evidence: Mapping[Quantity, Evidence]
    survivors: tuple[int, int] | None = None
    updates: tuple[float, float] | None = None
    samples: Callable[[Verdict], SampleComparison | None] = lambda _: None


def _environment_of_records(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return that of the first run that has one: of one here, if there is any, rather than of one in a stack."""
    ran = [record for record in records if record.status != "failed"]
    own = [record for record in ran if record.config.stack is None]
    first = next(iter(own or ran), None)
    return (
        {}
        if first is None
        else {name: value for name, value in first.environment.items() if name != RECORDER_RUN}
    )


def decided_rows(
    lines: Sequence[UndecidedRow], margin: QualityMargin, terms: Terms, design: SequentialDesign
) -> list[ArmSummary]:
    """Return a row for each line; the tests of all lines on one quantity are a family, with one error rate."""
    decided: list[dict[str, Any]] = [{} for _ in lines]
    tests = quantity_tests(margin, terms, design)
    evidence = {
        name: {number: line.evidence.get(name, NOTHING) for number, line in enumerate(lines)}
        for name in tests
    }
    for name, quantity in tests.items():
        for number, verdict in quantity.verdicts(evidence[name], design).items():
            line = lines[number]
            decided[number][name] = quantity.as_conditional(verdict, line.survivors, line.updates)
            if name == "quality":
                decided[number]["samples"] = line.samples(verdict)
    if margin.metric.name != LOSS:
        for number in arms_in_opposite_directions(evidence["quality"], evidence["loss"], design.error_rate):
            kinds = {decided[number][name].kind for name in ("quality", "loss")}
            decided[number]["loss_contradicts"] = kinds != {"equivalent"}
    return [
        ArmSummary.model_validate({**dict(line.row), **its}) for line, its in zip(lines, decided, strict=True)
    ]


def conclude_comparison(
    rows: Sequence[ArmSummary],
    *,
    metric: Metric,
    margin: QualityMargin,
    terms: Terms,
    design: SequentialDesign,
    answered: Sequence[ArmSummary] | None = None,
    **facts: Any,
) -> Comparison:
    """Return the comparison of rows, with the terms that they were decided by and the answer.

    Args:
        answered: rows that the headline is about; all by default.
        facts: other fields of the comparison.
    """
    comparison = Comparison(
        metric=metric,
        margin=margin.points,
        margin_rule=str(terms.margin),
        margin_reason=margin.reason,
        time_margin=terms.time_margin,
        loss_margin=terms.loss_margin,
        prefer=terms.prefer,
        tag=terms.tag,
        error_rate=design.error_rate,
        look=design.look,
        looks=list(design.looks),
        arms=list(rows),
        **facts,
    )
    about = comparison.model_copy(update={"arms": list(rows if answered is None else answered)})
    return comparison.model_copy(update={"headline": headline(about)})


def _line_of_reference(arm: str, records: Sequence[RunRecord]) -> UndecidedRow:
    itself = Pairing.by_seed(records, records)
    effect = quality_effect(itself.pairs)
    verdict = not_as_declared_verdict(records) or failure_verdict(records)
    quality = Evidence(untested=verdict, mean=None if effect is None else effect.mean)
    return UndecidedRow(
        _untested_row(arm, itself), {"quality": quality, "time": Evidence(mean=time_evidence(itself).mean)}
    )


def _line_of_arm(
    arm: str,
    pairing: Pairing,
    evidence: Mapping[Quantity, Callable[[Pairing], Evidence]],
    margin: QualityMargin,
) -> UndecidedRow:
    row, pairs = _untested_row(arm, pairing), pairing.pairs
    if other := not_as_declared_verdict(pairing.arm):
        return UndecidedRow(row, dict.fromkeys(evidence, Evidence(untested=other)))
    return UndecidedRow(
        row.model_copy(update={"memory": _memory_verdict(pairing)}),
        {name: evidence_of(pairing) for name, evidence_of in evidence.items()},
        pairing.surviving_seed_counts,
        pairing.mean_updates,
        lambda verdict: compare_samples(
            pairs, quality_effect(pairs), verdict, margin.margin_of_score_differences()
        ),
    )


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


def _memory_verdict(pairing: Pairing) -> Verdict:
    """Return the difference of the largest peaks, or why there is none."""
    pairs = pairs_of_counterparts(finished_runs(pairing.arm), finished_runs(pairing.reference))
    here, there = (
        _largest_peak_of_memory(arm for arm, _ in pairs),
        _largest_peak_of_memory(other for _, other in pairs),
    )
    verdict = incomparable_memory_verdict(replace(pairing, pairs=pairs))
    return verdict if verdict or here is None or there is None else Verdict(effect=here - there)


def _untested_row(arm: str, pairing: Pairing) -> ArmSummary:
    """Return a row with what no test gives, and without what takes the runs of the reference."""
    records, pairs = pairing.arm, pairing.pairs
    done = [record for record in records if record.status == "completed"]
    ran = finished_runs(records)
    diverged = len(ran) - len(done)
    rate = wilson_interval(diverged, len(ran)) if diverged else (None, None)
    metric = metric_of_runs(records)
    finals = [record.summary.metric_final for record in done]
    return ArmSummary(
        **_time_fields_of_row(ran),
        arm=arm,
        engine=_engine_names(ran),
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
        metric_correlation=_metric_correlation(pairs),
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


def _engine_names(ran: Sequence[RunRecord]) -> str | None:
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
        "start_seconds": _mean_if_known(_start_seconds(record) for record in ran),
        "loader_start_seconds": _mean_if_known(record.summary.loader_start_seconds for record in ran),
        "allreduce_share": _mean_if_known(
            record.processes.allreduce_share for record in ran if record.processes
        ),
    }


def _start_seconds(record: RunRecord) -> float | None:
    """Return when the slowest of the processes was ready."""
    return record.processes.start_seconds if record.processes else record.summary.start_seconds


def _metric_correlation(pairs: Sequence[Pair]) -> float | None:
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
    if not records:
        return "not run"
    words = []
    for status in ("completed", "diverged", "failed", "interrupted"):
        if matching := [record for record in records if record.status == status]:
            share = "" if len(matching) == len(records) else f" {len(matching)}/{len(records)}"
            first_step = min(record.summary.diverged_step or 0 for record in matching)
            details = {"diverged": f" at step {first_step}", "failed": f": {matching[0].error}"}
            words.append(("ok" if status == "completed" else status) + share + details.get(status, ""))
    mixed = list(filter(None, map(foreign_steps_text, records)))
    words += [f"{text} {mixed.count(text)}/{len(records)}" for text in dict.fromkeys(mixed)]
    return "; ".join(words)


def _ineffective_option_lines(by_arm: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """Return a line for each option of an arm that had no effect in one of its runs."""
    found: list[str] = []
    for label, records in by_arm.items():
        for record in records:
            if record.ledger is not None:
                sentences = ineffective_option_sentences(record.config.parsed_arm, record.ledger)
                found += [f"{label}: {text}." for text in sentences]
    return list(dict.fromkeys(found))


def _floor_sentence(
    comparison: Comparison, twin: str, records: Sequence[RunRecord], against: Sequence[RunRecord]
) -> str:
    """Return how far apart two equal trainings end, and which arms differ from the reference by no more."""
    pairs = pairs_by_seed(records, against)
    effect = quality_effect(pairs)
    if effect is None:
        return ""
    metric = comparison.metric
    floor = abs(metric.difference_of_scores(math.hypot(effect.mean, effect.spread)))
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
        f"{comparison.reference} again from weights changed by 1/512 differs by {by}"
        f"{metric.difference_with_unit(floor)}"
    )
    if not below:
        return f"{end}: smaller differences cannot be told."
    return f"{end}: the difference of {', '.join(below)} is no larger, so this training cannot tell it from chance."
