"""How training went: whether runs learned anything, and what the records prove of a divergence.

Of runs that learned nothing, equal quality says nothing about the arms. Each rule needs what newer records hold; an
older record is judged by the rest.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ampcompare.results.analysis.pairing.comparability import incomparable_quality_verdict
from ampcompare.results.analysis.pairing.pairs import Pair, Pairing, divergence_verdict
from ampcompare.results.analysis.pairing.scores import is_score, metric_of_runs
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord, nonfinite_statistics_text
from ampcompare.results.records.verdict import Verdict
from ampcompare.settings.script import LOSS

NO_VERDICT = Verdict(kind="no verdict", why="the reference learned nothing")
CHANCE_DEVIATIONS = 3.0  # binomial standard deviations over chance: one model in 700 that guesses is above
MIN_POINTS = 15  # of a loss curve: fewer show no trend
MOST = 0.5  # of the steps: who skips more hardly trains
FALL = 0.1  # of the median loss, from the first third to the last
FELL = 1.645  # normal deviate of a rank test, one-sided at 5 %
FP16_HALF_OF_LEAST = 2.0**-25  # half of fp16's least number above 0: up to this, rounding gives 0
FIRST_STEPS = 3  # an eps of 0 divides by 0 at the first update; the loss shows it one step later
EPS = "docs/examples/divergence.md"
NAN = "docs/troubleshooting.md"


def why_run_learned_nothing(record: RunRecord) -> str:
    """Return why a completed run learned nothing; "" if it did, or if its record cannot tell.

    It learned nothing if all steps were skipped, no parameter changed, its metric is no number or no better than a
    constant guess (for counts: within three binomial standard deviations of it), or the training loss did not fall.
    """
    return _learned_nothing_rule_and_reason(record)[1]


def _learned_nothing_rule_and_reason(record: RunRecord) -> tuple[str, str]:
    """Return which rule shows that a run learned nothing, and why in words; both "" if none does."""
    summary = record.summary
    if summary.num_steps and summary.skipped_steps == summary.num_steps:
        return "skipped", f"all {summary.num_steps} steps skipped"
    if summary.weights_moved is False:
        return "weights", "the weights did not move"
    if _has_metric_without_ratio(record):
        return "", ""  # it may have learned
    if summary.epochs and (why := _why_no_better_than_chance(record.metric, summary.epochs[-1])):
        return "metric", why
    if (
        record.trace is not None
        and len(record.trace.losses) >= MIN_POINTS
        and not all(map(math.isnan, record.trace.losses))  # of a script that shows none
        and not _has_loss_fallen(record.trace.losses)
    ):
        first, later = map(statistics.median, _first_and_last_third(record.trace.losses))
        begin, end = f"{first:.3g}", f"{later:.3g}"
        what = "fell by no more than its noise" if later < first and begin != end else "did not fall"
        return "loss", f"the loss {what}, {begin} to {end}"
    return "", ""


def _has_metric_without_ratio(record: RunRecord) -> bool:
    """Return whether a script reached a finite value, 0 or below, of a metric that is compared by ratios."""
    value = record.summary.metric_final
    is_finite = value is not None and math.isfinite(value)
    return record.config.script is not None and is_finite and not is_score(value, record.metric)


def _why_no_better_than_chance(metric: Metric, last_evaluation: EpochResult) -> str:
    value, chance = last_evaluation.value, last_evaluation.chance
    if not is_score(value, metric):
        return f"{metric.name} {metric.value_text_without_unit(value)}"
    if chance is None:
        return ""
    spread = (
        CHANCE_DEVIATIONS * math.sqrt(chance * (1 - chance) / last_evaluation.samples)
        if metric.is_count
        else 0.0
    )
    if metric.score(value) > metric.score(chance) + spread:
        return ""
    decimals = min(1, metric.decimals) if metric.is_count else None
    return f"{metric.name} {metric.value_text(value, decimals)}, chance {metric.value_text(chance, decimals)}"


def learned_nothing_verdict(records: Sequence[RunRecord]) -> Verdict:
    """Return the verdict on an arm of which no completed run learned anything, with the numbers of the best one."""
    runs = [record for record in records if record.status == "completed"]
    runs.sort(key=_final_score_of_run, reverse=True)
    reasons = [_learned_nothing_rule_and_reason(record) for record in runs]
    if not reasons or not all(rule for rule, _ in reasons):
        return Verdict()
    usual = statistics.mode(rule for rule, _ in reasons)
    return Verdict(kind="learned nothing", why=next(why for rule, why in reasons if rule == usual))


def _final_score_of_run(record: RunRecord) -> float:
    value = record.summary.metric_final
    return record.metric.score(value) if is_score(value, record.metric) else -math.inf


def unjudgeable_quality_verdict(pairing: Pairing, no_effect: Verdict) -> Verdict:
    """Return the verdict of an arm that cannot be judged by what its trainings reached; an empty one if it can."""
    return (
        divergence_verdict(pairing.arm)
        or incomparable_quality_verdict(pairing)
        or no_effect
        or learned_nothing_verdict(pairing.arm)
        or (
            NO_VERDICT
            if learned_nothing_verdict([reference for _, reference in pairing.pairs])
            else Verdict()
        )
    )


def metric_without_ratio_verdict(runs: Iterable[RunRecord]) -> Verdict:
    """Return the verdict where a script's metric has no ratio to others in one of some runs."""
    found = next(filter(_has_metric_without_ratio, runs), None)
    if found is None:
        return Verdict()
    value = found.metric.value_text_without_unit(found.summary.metric_final or 0.0)
    name = "NAME" if found.metric.name == LOSS else found.metric.name
    why = f"{found.metric.name} {value} has no ratio to others: take differences, --metric {name}:points"
    return Verdict(kind="not comparable", why=why)


def nan_metric_verdict(pairs: Sequence[Pair]) -> Verdict:
    """Return the verdict where the metric of a run in these pairs is there and not a number."""
    arm, reference = ([run for pair in pairs if _has_nan_metric(run := pair[side])] for side in (0, 1))
    for runs in filter(None, (arm, reference)):
        metric, value = runs[0].metric, runs[0].summary.metric_final or 0.0
        shown = f"{metric.name} {metric.value_text_without_unit(value)}"
        if runs is arm:
            return Verdict(kind="learned nothing", share=(len(runs), len(pairs)), why=shown)
        return Verdict(
            kind="no verdict", why=f"the reference has {shown} in {len(runs)} of {len(pairs)} pairs"
        )
    return Verdict()


def _has_nan_metric(record: RunRecord) -> bool:
    value = record.summary.metric_final
    return value is not None and not is_score(value, record.metric)


def pairs_learned_nothing_verdict(pairs: Sequence[Pair]) -> Verdict:
    """Return the verdict where in some pairs neither run learned anything: such pairs agree whatever the arm does."""
    both = [(why_run_learned_nothing(arm), why_run_learned_nothing(other)) for arm, other in pairs]
    reasons = [reason for reason, of_other in both if reason and of_other]
    if not reasons:
        return Verdict()
    return Verdict(kind="learned nothing", share=(len(reasons), len(pairs)), why=statistics.mode(reasons))


def why_margin_too_wide(runs: Sequence[RunRecord], reference: str, margin: float) -> str:
    """Return that an arm which only guesses would be equivalent, so that no verdict by the margin means anything."""
    metric = metric_of_runs(runs)
    last = [run.summary.epochs[-1] for run in runs if run.status == "completed" and run.summary.epochs]
    chances = [0.0 if one.chance is None and metric.has_errors else one.chance for one in last]
    finals = [run.summary.metric_final for run in runs if run.status == "completed" and run.summary.epochs]
    gains = [
        metric.score(value) - metric.score(chance)
        for value, chance in zip(finals, chances, strict=True)
        if is_score(value, metric) and is_score(chance, metric)
    ]
    if not gains or learned_nothing_verdict(runs) or metric.score_margin(margin) < statistics.fmean(gains):
        return ""
    mean = statistics.fmean(gains)
    unit = metric.difference_suffix
    decimals = 1 if metric.difference_unit in ("pp", "%") else metric.difference_decimals
    shown = f"{abs(metric.difference_in_shown_unit(metric.difference_from_score_difference(mean))):.{decimals}f}{unit}"
    gain = f"only {shown} better than" if mean > 0 else "on average no better than"
    return (
        f"No verdict counts at a margin of ±{margin:g}{unit}: {reference} is {gain} guessing, so an arm that learned "
        "nothing would be equivalent."
    )


def some_runs_learned_nothing_sentences(by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterator[str]:
    """Yield which arms learned nothing in some of their runs, though not in all."""
    idle = {
        arm: [bool(why_run_learned_nothing(record)) for record in records if record.status == "completed"]
        for arm, records in by_arm.items()
    }
    some = [f"{arm} in {sum(runs)} of {len(runs)}" for arm, runs in idle.items() if 0 < sum(runs) < len(runs)]
    if some:
        yield f"Some runs learned nothing and count in the means: {', '.join(some)}."


def arms_that_skip_most_steps(by_arm: Mapping[str, Sequence[RunRecord]]) -> dict[str, RunRecord]:
    """Return the arms that skipped more than half of their steps in a run to its end, each with the worst such run."""
    found: dict[str, RunRecord] = {}
    for arm, records in by_arm.items():
        runs = [one for one in records if one.status == "completed" and one.summary.num_steps]
        worst = max(runs, key=_share_of_skipped_steps, default=None)
        if worst is not None and MOST < _share_of_skipped_steps(worst) < 1:  # else it is idle
            found[arm] = worst
    return found


def _share_of_skipped_steps(record: RunRecord) -> float:
    return record.summary.skipped_steps / record.summary.num_steps


def skipped_steps_sentences(by_arm: Mapping[str, Sequence[RunRecord]]) -> Iterator[str]:
    """Yield which arms skipped most of their steps, with the loss scale that was left: they hardly trained."""
    for arm, record in arms_that_skip_most_steps(by_arm).items():
        counts = f"{record.summary.skipped_steps} of {record.summary.num_steps} steps"
        scale = record.summary.final_loss_scale
        left = "" if scale is None else f", down to a loss scale of {scale:.3g}"
        yield f"{arm} skipped {counts}{left}: it hardly trained."


def _has_loss_fallen(losses: Sequence[float]) -> bool:
    """Return whether a loss curve shows a fall: over its length, or in its first steps before a plateau.

    Where the last third is lower by a tenth, few and uneven losses may not show a fall, but they show no lack of one.
    """
    first, later = _first_and_last_third(losses)
    if 0 < statistics.median(later) < (1 - FALL) * statistics.median(first):
        return True
    half = losses[len(losses) // 2 :]
    return (
        _z_score_of_rank_test(first, later) > FELL
        or _z_score_of_rank_test(losses[:3], half) > FELL
        or _loss_with_nan_as_largest(losses[0]) > max(map(_loss_with_nan_as_largest, half))
    )


def _first_and_last_third(losses: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Return the first and the last third of a curve."""
    third = len(losses) // 3
    return losses[:third], losses[-third:]


def _loss_with_nan_as_largest(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _z_score_of_rank_test(early_losses: Sequence[float], late_losses: Sequence[float]) -> float:
    """Return the normal deviate of Mann and Whitney's U, large where early losses are above late ones.

    Ranks, because one spike of a loss would hide a fall from a test of means.
    """
    ranked = sorted(map(_loss_with_nan_as_largest, late_losses))
    above = sum(
        (bisect_left(ranked, one) + bisect_right(ranked, one)) / 2
        for one in map(_loss_with_nan_as_largest, early_losses)
    )
    product = len(early_losses) * len(late_losses)
    return (above - product / 2) / math.sqrt(product * (len(early_losses) + len(late_losses) + 1) / 12)


def first_divergence_phrase(records: Sequence[RunRecord]) -> str:
    """Return the end of a sentence on the step at which diverged runs went bad, the first of several; "" if unknown."""
    known = [record.summary.diverged_step for record in records if record.status == "diverged"]
    steps = sorted(step for step in known if step is not None)
    if not steps:
        return ""
    return f"{'' if steps[0] == steps[-1] else ', first'} at step {steps[0]}"


def proven_divergence_cause(records: Sequence[RunRecord]) -> str:
    """Return the proven cause of all diverged runs of an arm, with the page that explains it; "" if not proven."""
    causes = {_proven_divergence_cause_of_run(record) for record in records if record.status == "diverged"}
    return causes.pop() if len(causes) == 1 else ""


def _proven_divergence_cause_of_run(record: RunRecord) -> str:
    summary = record.summary
    optimizer = record.config.recipe.optimizer
    lost = [] if record.script is None else record.script.lost_statistics
    if lost and summary.diverged_step:  # its losses were finite up to there
        return f"{nonfinite_statistics_text(lost)} ({NAN})"
    if (cause := _zero_eps_of_script_text(record)) and summary.first_nonfinite_loss_step != 0:
        return cause
    if summary.first_nonfinite_loss_step == 0:
        return f"the loss is not finite before the first update ({NAN})"
    if (
        optimizer.name in ("adam", "adamw")
        and optimizer.implementation != "fused"  # it computes in fp32
        and optimizer.eps <= FP16_HALF_OF_LEAST
        and _trains_fp16_weights_without_masters(record)
        and summary.diverged_step is not None
        and summary.diverged_step <= FIRST_STEPS
    ):
        name = "AdamW" if optimizer.name == "adamw" else "Adam"
        return f"{name}'s eps of {optimizer.eps:.0e} is 0 in fp16 ({EPS})"
    if lost:
        return f"{nonfinite_statistics_text(lost)} ({NAN})"
    if record.script is not None and summary.first_nonfinite_loss_step is None and summary.divergence:
        return f"{summary.divergence}, though all losses are finite"
    scale = summary.final_loss_scale
    if scale is not None and math.isfinite(scale) and scale < 1 and summary.skipped_steps:
        return f"gradients overflow at any loss scale, down to {scale:.3g} ({NAN})"
    return ""


def _zero_eps_of_script_text(record: RunRecord) -> str:
    """Return that the optimizer of a script was seen to divide by zero, as its eps is zero; "" if it was not."""
    ledger = record.ledger
    if record.script is None or ledger is None or not ledger.zero_denominators:
        return ""
    group = next((one for one in ledger.groups if one.zero_eps and one.eps), None)
    if group is None:
        return ""
    types = " and ".join(group.state)
    return f"{group.name.rpartition(' ')[0]}'s eps of {group.eps:.0e} is 0 in {types} ({EPS})"


def _trains_fp16_weights_without_masters(record: RunRecord) -> bool:
    """Return whether the optimizer of a run steps fp16 weights, without an fp32 copy."""
    roles = record.config.parsed_arm.roles
    return roles is not None and roles.weights == "fp16" and not roles.masters
