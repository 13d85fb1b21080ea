"""The way of all verdicts: `summarize` goes it, from records over pairs, evidence and tests to rows and sentences."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.base.environment.extras import require_statistics_packages
from ampcompare.results.analysis.conclusions.details import detail_sentences, interim_look_sentences
from ampcompare.results.analysis.conclusions.headline import headline
from ampcompare.results.analysis.conclusions.next_step import next_steps
from ampcompare.results.analysis.effects.loss_tail import tail_loss_evidence_of_arm
from ampcompare.results.analysis.effects.quality import (
    evaluation_precision_rows,
    quality_effect,
    quality_evidence,
    quality_evidence_of_reference,
    quality_margin,
)
from ampcompare.results.analysis.effects.samples import compare_samples, sample_sentences, samples_noun
from ampcompare.results.analysis.effects.step_time import (
    step_time_evidence,
    time_ratio_of_log,
    timing_rounds_sentence,
)
from ampcompare.results.analysis.inference.terms import QualityMargin, Terms
from ampcompare.results.analysis.inference.verdict import (
    Evidence,
    Margin,
    SequentialDesign,
    arms_in_opposite_directions,
    verdicts_on,
)
from ampcompare.results.analysis.pairing.comparability import (
    lines_on_unlike_run_conditions,
    script_pairing_and_departure_sentences,
)
from ampcompare.results.analysis.pairing.declared import ineffective_option_sentences, not_as_declared_verdict
from ampcompare.results.analysis.pairing.pairs import Pairing
from ampcompare.results.analysis.pairing.record_checks import unique_and_duplicate_runs
from ampcompare.results.analysis.pairing.scores import common_metric
from ampcompare.results.analysis.untested_row import memory_verdict, untested_row
from ampcompare.results.records.comparison import ArmSummary, Comparison, Published, Quantity
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
    records, copies = unique_and_duplicate_runs(records)
    runs = _runs_by_arm(records, arms)
    base = runs.get(reference, [])
    margin = quality_margin(base, reference, terms, metric)
    tests = quantity_tests(margin, terms, design)

    # The path of a verdict, a line for each stage.
    pairings = {arm: Pairing.by_seed(runs[arm], base) for arm in arms}
    evidence = _evidence_of_pairings(pairings, tests)
    verdicts = {name: verdicts_on(evidence[name], test.margin, design) for name, test in tests.items()}
    opposite = _arms_whose_loss_contradicts(metric, evidence, design)
    untested = [_row_of_pairing(arm, pairings[arm], verdicts["quality"][arm], margin) for arm in arms]
    rows = rows_with_verdicts(untested, verdicts, tests, opposite)
    facts = {
        "command": command,
        "reference": reference,
        "seeds": sorted({record.config.recipe.seed for record in records}),
        "order": list(order),
        "environment": _environment_of_first_run_here(records),
        "excluded": [*excluded, *(copy.text for copy in copies)],
        "only_copies": bool(copies) and not excluded and all(copy.by_script for copy in copies),
        "precisions": evaluation_precision_rows({arm: runs[arm] for arm in arms}, metric),
        "reading": [],
        "records": list(records),
        "published": published,
    }
    comparison = comparison_of_rows(rows, metric, margin, terms, design, facts)
    comparison = comparison.model_copy(update={"headline": headline(comparison)})
    return comparison.model_copy(
        update={
            "next_steps": next_steps(comparison, design.next_error_rate),
            "reading": [
                *(f"Not used: {text}." for text in comparison.excluded),
                *detail_sentences(comparison),
                *sample_sentences(rows, margin.points, metric, samples_noun(records)),
                *_ineffective_option_lines(runs),
                *script_pairing_and_departure_sentences(records, reference),
                *lines_on_unlike_run_conditions(records, reference),
                *filter(None, [timing_rounds_sentence(records)]),
                *interim_look_sentences(comparison, design.next_error_rate),
                *design.notes,
            ],
        }
    )


@dataclass(frozen=True)
class QuantityTest:
    """What an arm is compared with the reference in, and tested.

    Attributes:
        evidence: what paired runs say of it.
        evidence_of_reference: what the runs of the reference, paired with themselves, say of it.
        margin: in the unit of effects, in which more is better.
        on_rows: an effect in the unit of rows.
    """

    evidence: Callable[[Pairing], Evidence]
    evidence_of_reference: Callable[[Pairing], Evidence]
    margin: Margin
    on_rows: Callable[[float], float]

    def verdict_in_row_unit(self, verdict: Verdict) -> Verdict:
        """Return a verdict with its effect and interval in the unit of rows."""
        effect = None if verdict.effect is None else self.on_rows(verdict.effect)
        bounds = sorted(self.on_rows(bound) for bound in (verdict.low, verdict.high) if bound is not None)
        low, high = bounds if bounds else (None, None)
        return verdict.model_copy(update={"effect": effect, "low": low, "high": high})


def quantity_tests(
    margin: QualityMargin, terms: Terms, design: SequentialDesign
) -> dict[Quantity, QuantityTest]:
    """Return what is tested, under the terms of a comparison."""
    return {
        "quality": QuantityTest(
            lambda pairing: quality_evidence(pairing, margin, design.pilot),
            quality_evidence_of_reference,
            margin.margin_of_score_differences(),
            margin.metric.difference_from_score_difference,
        ),
        "time": QuantityTest(
            step_time_evidence,
            lambda itself: Evidence(mean=step_time_evidence(itself).mean),
            terms.log_time_margin(),
            lambda speed: time_ratio_of_log(-speed),
        ),
        "loss": QuantityTest(
            lambda pairing: tail_loss_evidence_of_arm(pairing, design.pilot),
            lambda _: Evidence(),
            terms.log_loss_margin(),
            lambda gain: math.expm1(-gain),
        ),
    }


def rows_with_verdicts(
    rows: Sequence[ArmSummary],
    verdicts: Mapping[Quantity, Mapping[str, Verdict]],
    tests: Mapping[Quantity, QuantityTest],
    opposite: Collection[str] = (),
) -> list[ArmSummary]:
    """Return rows with the verdicts on their arms, in the unit of rows.

    Args:
        rows: with what no test gives.
        verdicts: by quantity and arm, in the unit of effects; an arm may lack one.
        tests: that have decided.
        opposite: arms whose training loss is shown to differ in the other direction than their quality.
    """
    found = []
    for row in rows:
        its: dict[str, Verdict] = {
            name: tests[name].verdict_in_row_unit(on[row.arm])
            for name, on in verdicts.items()
            if row.arm in on
        }
        decided: dict[str, Any] = {**dict(row), **its}
        if row.arm in opposite:
            decided["loss_contradicts"] = {its["quality"].kind, its["loss"].kind} != {"equivalent"}
        found.append(ArmSummary.model_validate(decided))
    return found


def comparison_of_rows(
    rows: Sequence[ArmSummary],
    metric: Metric,
    margin: QualityMargin,
    terms: Terms,
    design: SequentialDesign,
    other_fields: Mapping[str, Any],
) -> Comparison:
    """Return the comparison of rows, with the terms that they were decided by, before there are sentences.

    Args:
        other_fields: other fields of the comparison.
    """
    return Comparison(
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
        **other_fields,
    )


def _runs_by_arm(records: Sequence[RunRecord], arms: Sequence[str]) -> dict[str, list[RunRecord]]:
    found: dict[str, list[RunRecord]] = {arm: [] for arm in arms}
    for record in records:
        found.setdefault(record.arm, []).append(record)
    return found


def _evidence_of_pairings(
    pairings: Mapping[str, Pairing], tests: Mapping[Quantity, QuantityTest]
) -> dict[Quantity, dict[str, Evidence]]:
    """Return what paired runs show; of an arm whose runs are not as it declares, that alone."""
    found: dict[Quantity, dict[str, Evidence]] = {name: {} for name in tests}
    for arm, pairing in pairings.items():
        undeclared = not_as_declared_verdict(pairing.arm)
        for name, test in tests.items():
            if pairing.is_of_reference:
                found[name][arm] = test.evidence_of_reference(pairing)
            elif undeclared:
                found[name][arm] = Evidence(untested=undeclared)
            else:
                found[name][arm] = test.evidence(pairing)
    return found


def _arms_whose_loss_contradicts(
    metric: Metric, evidence: Mapping[Quantity, Mapping[str, Evidence]], design: SequentialDesign
) -> list[str]:
    """Return the arms whose training loss is shown to differ in the other direction than the metric; [] if it is it."""
    if metric.name == LOSS:
        return []
    return arms_in_opposite_directions(evidence["quality"], evidence["loss"], design.error_rate)


def _row_of_pairing(arm: str, pairing: Pairing, quality: Verdict, margin: QualityMargin) -> ArmSummary:
    """Return a row with what needs no test: figures, memory, and for which samples the verdict on quality holds."""
    row = untested_row(arm, pairing)
    if pairing.is_of_reference or quality.kind == "not as declared":
        return row
    samples = compare_samples(
        pairing.pairs, quality_effect(pairing.pairs), quality, margin.margin_of_score_differences()
    )
    return row.model_copy(update={"memory": memory_verdict(pairing), "samples": samples})


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
