"""One answer on results against earlier ones: no worse, worse, or cannot tell. For programs that try changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ampcompare.backends.arm import find_text_naming_same_arm
from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.base.formatting import format_few_names
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.pairing.scores import common_metric, spacing_of_final_values
from ampcompare.results.analysis.results_table import PrintedNumber, ResultsTable, RunOrMeanOfRuns, judge_arms
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.verdict import KEPT, LOST, Verdict

Answer = Literal["no worse", "worse", "cannot tell"]
EXIT_CODES: dict[Answer, int] = {"no worse": 0, "worse": 1, "cannot tell": 2}
NEW, OLD = "new", "old"
FINEST = 1e-12  # step of a value that is not rounded


@dataclass(frozen=True)
class AgainstResult:
    """Whether new results are worse than old ones.

    Attributes:
        answer: "no worse", "worse" or "cannot tell".
        verdict: in the words of `judge`, such as "non-inferior" or "inconclusive (≤4 more seeds)".
        metric: what was compared, and `better` which values of it are.
        effect: new minus old, in the unit that is shown (points of accuracy); `low` and `high` are its interval.
        margin: the difference that does not matter, in the same unit.
        pairs: seeds that both have, 0 where the runs are independent samples.
        seeds_needed: more seeds that settle it, at most; 0 where it is settled, None where that is not known.
        new_arm, old_arm, new_runs, old_runs: what was compared, and how many runs there were.
    """

    answer: Answer
    verdict: str
    metric: str
    better: str
    effect: float | None
    low: float | None
    high: float | None
    margin: float | None
    pairs: int
    seeds_needed: int | None
    new_arm: str
    old_arm: str
    new_runs: int
    old_runs: int

    @property
    def exit_code(self) -> int:
        """That of `ampcompare judge NEW --against OLD`: 0, 1 or 2."""
        return EXIT_CODES[self.answer]

    def data(self) -> dict[str, Any]:
        """Return the one line of JSON, as a dictionary."""
        return asdict(self)


def table_of_records(records: Sequence[RunRecord], name: str) -> ResultsTable:
    """Return runs as a table: those that ended, with their final metric.

    Args:
        records: of any arms and seeds; failed ones are left out.
        name: of their folder, for messages.

    Raises:
        RecordError: none ended, or two are of one arm and seed.
        ConfigError: they are measured by different metrics.
    """
    ended = [record for record in records if record.has_result]
    if not ended:
        raise RecordError(f"{name} holds no run that was completed or diverged")
    metric = common_metric(ended).model_copy(update={"difference": "points"})
    step = spacing_of_final_values(ended) or FINEST
    runs: list[RunOrMeanOfRuns] = []
    for record in ended:
        seed, value = str(record.config.recipe.seed), record.summary.metric_final
        if any((run.arm, run.seed) == (record.arm, seed) for run in runs):
            raise RecordError(
                f"{name} holds two runs of {record.arm} with seed {seed}; name a folder with one of each"
            )
        has_diverged = record.status == "diverged" or value is None or not math.isfinite(value)
        quantity = None if has_diverged or value is None else PrintedNumber(value, step)
        runs.append(RunOrMeanOfRuns(record.arm, seed, quantity, None, has_diverged, 1))
    return ResultsTable(runs, metric, [])


def judge_new_results(
    new: ResultsTable, old: ResultsTable, *, arm: str | None = None, sd: float | None = None, terms: Terms
) -> AgainstResult:
    """Compare the runs of an arm with those of the same, or the only, arm of older results.

    Args:
        new: results of the code as it is now.
        old: results that it is compared with.
        arm: in both; None where each has one arm.
        sd: standard deviation over seeds in the unit of the metric, for fewer than three runs; None if it is not known.
        terms: margin and error rate; times are not compared.

    Returns:
        The answer, with effect, interval and margin in the unit of the metric that is shown.

    Raises:
        ConfigError: there are several arms and none was named, or the metrics differ.
    """
    if (new.metric.name, new.metric.better) != (old.metric.name, old.metric.better):
        raise ConfigError(
            f"the new results are {new.metric.name} ({new.metric.better} is better), the old ones {old.metric.name} "
            f"({old.metric.better} is better); name one metric of both with --metric"
        )
    ours, theirs = _runs_of_arm(new, arm, "new"), _runs_of_arm(old, arm, "old")
    names = ours[0].arm, theirs[0].arm
    runs = [replace(run, arm=OLD) for run in theirs] + [replace(run, arm=NEW) for run in ours]
    comparison = judge_arms(ResultsTable(runs, old.metric, []), reference=OLD, sd=sd, terms=terms)
    row = next(row for row in comparison.arms if row.arm == NEW)
    verdict, factor = row.quality, old.metric.factor
    answer = _answer_of_verdict(verdict, _diverged_share_of_runs(ours), _diverged_share_of_runs(theirs))
    low, high = (_value_in_shown_unit(end, factor) for end in (verdict.low, verdict.high))
    effect = _value_in_shown_unit(verdict.effect, factor)
    return AgainstResult(
        answer=answer,
        verdict=str(verdict) or "no verdict",
        metric=old.metric.name,
        better=old.metric.better,
        effect=effect,
        low=low,
        high=high,
        margin=comparison.margin,
        pairs=row.pairs,
        seeds_needed=0 if answer != "cannot tell" else verdict.more_seeds,
        new_arm=names[0],
        old_arm=names[1],
        new_runs=sum(run.runs or 1 for run in ours),
        old_runs=sum(run.runs or 1 for run in theirs),
    )


def _answer_of_verdict(verdict: Verdict, new_share: float, old_share: float) -> Answer:
    """Return the answer that a verdict comes to: no worse, worse, or cannot tell."""
    if verdict.kind in KEPT:
        return "no worse"
    if verdict.kind == "diverged" and old_share >= new_share:  # the old runs are no better in that
        return "cannot tell"
    return "worse" if verdict.kind in LOST else "cannot tell"


def _diverged_share_of_runs(runs: Sequence[RunOrMeanOfRuns]) -> float:
    return sum(run.runs or 1 for run in runs if run.diverged) / sum(run.runs or 1 for run in runs)


def _runs_of_arm(table: ResultsTable, arm: str | None, old_or_new: str) -> list[RunOrMeanOfRuns]:
    """Return the runs of an arm; where there is one arm only, that one."""
    names = list(dict.fromkeys(run.arm for run in table.runs))
    if len({name.casefold() for name in names}) > 1:
        wanted = find_text_naming_same_arm(arm, names) if arm is not None else None
        if arm is None:
            raise ConfigError(
                f"the {old_or_new} results have several arms; name one with --arm: {format_few_names(names)}"
            )
        found = [run for run in table.runs if run.arm.casefold() == (wanted or arm).casefold()]
        if not found:
            raise ConfigError(
                f"the {old_or_new} results have no arm {arm!r}; they have {format_few_names(names)}"
            )
        return found
    return list(table.runs)


def _value_in_shown_unit(value: float | None, factor: float) -> float | None:
    return None if value is None or not math.isfinite(value) else value * factor
