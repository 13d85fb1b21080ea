"""The way of all verdicts, from records to a comparison: pairs, evidence, tests, rows, and the answer in sentences.

`summarize` goes it in order. What pairs show, `effects/` says; what a test decides, `inference/`; the sentences,
`conclusions/`.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ampcompare.base.environment.extras import require_statistics_packages
from ampcompare.results.analysis.conclusions.details import detail_sentences, look_sentences
from ampcompare.results.analysis.conclusions.headline import headline
from ampcompare.results.analysis.conclusions.next_step import next_steps
from ampcompare.results.analysis.effects.loss_tail import loss_evidence
from ampcompare.results.analysis.effects.quality import (
    failure_verdict,
    precision_rows,
    quality_effect,
    quality_evidence,
    quality_margin,
)
from ampcompare.results.analysis.effects.samples import compare_samples, sample_sentences, samples_noun
from ampcompare.results.analysis.effects.step_time import (
    rounds_sentence,
    time_evidence,
    time_ratio_of_log,
)
from ampcompare.results.analysis.inference.terms import QualityMargin, Terms
from ampcompare.results.analysis.inference.verdict import (
    NOTHING,
    Evidence,
    Margin,
    SequentialDesign,
    arms_in_opposite_directions,
    verdicts_on,
)
from ampcompare.results.analysis.pairing.comparability import (
    lines_on_differing_circumstances,
    script_pairing_sentences,
)
from ampcompare.results.analysis.pairing.declared import ineffective_option_sentences, not_as_declared_verdict
from ampcompare.results.analysis.pairing.pairs import (
    Pairing,
    pairs_by_seed,
)
from ampcompare.results.analysis.pairing.record_checks import unique_runs_and_unused_copies
from ampcompare.results.analysis.pairing.scores import common_metric
from ampcompare.results.analysis.untested_row import memory_verdict, untested_row
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

Key = TypeVar("Key", bound=Hashable)


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
    records, copies = unique_runs_and_unused_copies(records)
    only_copies = bool(copies) and not excluded and all(copy.by_script for copy in copies)
    excluded = [*excluded, *(copy.text for copy in copies)]
    by_arm: dict[str, list[RunRecord]] = {arm: [] for arm in arms}
    for record in records:
        by_arm.setdefault(record.arm, []).append(record)
    against = by_arm.get(reference, [])
    margin = quality_margin(against, reference, terms, metric)
    evidence = {name: quantity.evidence for name, quantity in quantity_tests(margin, terms, design).items()}
    undecided = []
    for arm in arms:
        if arm == reference:
            undecided.append(_undecided_row_of_reference(arm, against))
        else:
            undecided.append(
                _undecided_row_of_arm(arm, Pairing.by_seed(by_arm[arm], against), evidence, margin)
            )
    rows = decided_rows(undecided, margin, terms, design)
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
        environment=_environment_of_first_run_here(records),
        reading=[],
        excluded=excluded,
        only_copies=only_copies,
        precisions=precision_rows({arm: by_arm[arm] for arm in arms}, metric),
        records=list(records),
        published=published,
    )
    floors = [_sentence_on_twin_distance(comparison, arm, by_arm[arm], against) for arm in sorted(changed)]
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
                *lines_on_differing_circumstances(records, reference),
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


def _undecided_row_of_reference(arm: str, records: Sequence[RunRecord]) -> UndecidedRow:
    itself = Pairing.by_seed(records, records)
    effect = quality_effect(itself.pairs)
    verdict = not_as_declared_verdict(records) or failure_verdict(records)
    quality = Evidence(untested=verdict, mean=None if effect is None else effect.mean)
    return UndecidedRow(
        untested_row(arm, itself), {"quality": quality, "time": Evidence(mean=time_evidence(itself).mean)}
    )


def _undecided_row_of_arm(
    arm: str,
    pairing: Pairing,
    evidence: Mapping[Quantity, Callable[[Pairing], Evidence]],
    margin: QualityMargin,
) -> UndecidedRow:
    row, pairs = untested_row(arm, pairing), pairing.pairs
    if other := not_as_declared_verdict(pairing.arm):
        return UndecidedRow(row, dict.fromkeys(evidence, Evidence(untested=other)))
    return UndecidedRow(
        row.model_copy(update={"memory": memory_verdict(pairing)}),
        {name: evidence_of(pairing) for name, evidence_of in evidence.items()},
        pairing.surviving_and_common_seed_counts,
        pairing.differing_mean_updates,
        lambda verdict: compare_samples(
            pairs, quality_effect(pairs), verdict, margin.margin_of_score_differences()
        ),
    )


@dataclass(frozen=True)
class QuantityTest:
    """What an arm is compared with the reference in, and tested.

    Attributes:
        evidence: what paired runs say of it.
        margin: in the unit of effects, in which more is better.
        on_rows: an effect in the unit of rows.
        of_training: whether it is what training reaches, so that a lost seed makes its verdict conditional.
    """

    evidence: Callable[[Pairing], Evidence]
    margin: Margin
    on_rows: Callable[[float], float]
    of_training: bool = True

    def verdicts(self, evidence: Mapping[Key, Evidence], design: SequentialDesign) -> dict[Key, Verdict]:
        """Return the verdict on each arm of a family of tests, with effect and interval in the unit of rows."""
        return {
            key: self._verdict_in_row_unit(verdict)
            for key, verdict in verdicts_on(evidence, self.margin, design).items()
        }

    def _verdict_in_row_unit(self, verdict: Verdict) -> Verdict:
        effect = None if verdict.effect is None else self.on_rows(verdict.effect)
        bounds = sorted(self.on_rows(bound) for bound in (verdict.low, verdict.high) if bound is not None)
        low, high = bounds if bounds else (None, None)
        return verdict.model_copy(update={"effect": effect, "low": low, "high": high})

    def as_conditional(
        self, verdict: Verdict, survivors: tuple[int, int] | None, updates: tuple[float, float] | None
    ) -> Verdict:
        """Return a verdict as one on the seeds that survived and after the updates that were made, if it rests on them.

        Args:
            verdict: on what training reaches, or on another quantity.
            survivors: as `Pairing.surviving_and_common_seed_counts`.
            updates: as `Pairing.differing_mean_updates`.
        """
        if not self.of_training:
            return verdict
        return verdict.with_updates(updates, self.margin.shown).with_survivors(survivors)


def quantity_tests(
    margin: QualityMargin, terms: Terms, design: SequentialDesign
) -> dict[Quantity, QuantityTest]:
    """Return what is tested, under the terms of a comparison."""
    return {
        "quality": QuantityTest(
            lambda pairing: quality_evidence(pairing, margin, design.pilot),
            margin.margin_of_score_differences(),
            margin.metric.difference_of_scores,
        ),
        "time": QuantityTest(
            time_evidence, terms.log_time_margin(), lambda speed: time_ratio_of_log(-speed), of_training=False
        ),
        "loss": QuantityTest(
            lambda pairing: loss_evidence(pairing, design.pilot),
            terms.log_loss_margin(),
            lambda gain: math.expm1(-gain),
        ),
    }


def decided_rows(
    undecided: Sequence[UndecidedRow], margin: QualityMargin, terms: Terms, design: SequentialDesign
) -> list[ArmSummary]:
    """Return a row with verdicts for each; the tests of all arms in one quantity are a family, with one error rate."""
    decided: list[dict[str, Any]] = [{} for _ in undecided]
    tests = quantity_tests(margin, terms, design)
    evidence = {
        name: {number: line.evidence.get(name, NOTHING) for number, line in enumerate(undecided)}
        for name in tests
    }
    for name, quantity in tests.items():
        for number, verdict in quantity.verdicts(evidence[name], design).items():
            line = undecided[number]
            decided[number][name] = quantity.as_conditional(verdict, line.survivors, line.updates)
            if name == "quality":
                decided[number]["samples"] = line.samples(verdict)
    if margin.metric.name != LOSS:
        for number in arms_in_opposite_directions(evidence["quality"], evidence["loss"], design.error_rate):
            kinds = {decided[number][name].kind for name in ("quality", "loss")}
            decided[number]["loss_contradicts"] = kinds != {"equivalent"}
    return [
        ArmSummary.model_validate({**dict(line.row), **its})
        for line, its in zip(undecided, decided, strict=True)
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


def _environment_of_first_run_here(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return that of the first run that has one: of one here, if there is any, rather than of one in a stack."""
    ran = [record for record in records if record.status != "failed"]
    own = [record for record in ran if record.config.stack is None]
    first = next(iter(own or ran), None)
    return (
        {}
        if first is None
        else {name: value for name, value in first.environment.items() if name != RECORDER_RUN}
    )


def _ineffective_option_lines(by_arm: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """Return a line for each option of an arm that had no effect in one of its runs."""
    found: list[str] = []
    for label, records in by_arm.items():
        for record in records:
            if record.ledger is not None:
                sentences = ineffective_option_sentences(record.config.parsed_arm, record.ledger)
                found += [f"{label}: {text}." for text in sentences]
    return list(dict.fromkeys(found))


def _sentence_on_twin_distance(
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
