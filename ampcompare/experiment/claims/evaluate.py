"""Judge a claim by the runs of its small experiment: holds, does not hold, inconclusive, or not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.experiment.claims.definition import Accuracy, Below, Claim, Diverges, Memory, Test, Time, Trains
from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.inference.effect import wilson
from ampcompare.runs.analysis.runs.pairs import IDENTICAL
from ampcompare.runs.analysis.runs.scores import metric_of
from ampcompare.runs.analysis.summary import summarize
from ampcompare.runs.records.comparison import ArmSummary
from ampcompare.runs.records.metric import Metric
from ampcompare.runs.records.run import RunRecord

__all__ = ["FAILS", "HOLDS", "NOT_RUN", "UNKNOWN", "ClaimResult", "judge_claim"]

HOLDS, FAILS, UNKNOWN, NOT_RUN = "holds", "does not hold", "inconclusive", "not run"
MOST = 0.5  # a rate is high or low where its 95 % interval lies on one side of this


@dataclass(frozen=True)
class ClaimResult:
    """A claim and what was measured.

    Attributes:
        word: one of the four fixed words.
        reason: why there is no verdict, or "".
    """

    claim: Claim
    measured: str
    word: str
    reason: str = ""

    @property
    def verdict(self) -> str:
        """The word, with its reason, if any."""
        return f"{self.word} ({self.reason})" if self.reason else self.word


@dataclass(frozen=True)
class _Answer:
    """The result of one test of a claim: what was seen, and whether it supports the claim; None if it is open."""

    seen: str
    speaks_for: bool | None
    reason: str = ""


def judge_claim(claim: Claim, records: Sequence[RunRecord], *, not_run: str = "", ended: str = "") -> ClaimResult:
    """Judge a claim by the runs of its shape.

    A claim holds if all its tests hold, and does not hold if one fails.

    Args:
        records: of its shape, labeled by rows.
        not_run: why the shape was not run.
        ended: why it was not run to its end.
    """
    if not_run:
        return ClaimResult(claim, "-", NOT_RUN, not_run)
    by_row: dict[str, list[RunRecord]] = {}
    for record in records:
        by_row.setdefault(record.arm, []).append(record)
    answers = [_answer(test, by_row, claim.margin) for test in claim.tests]
    seen = "; ".join(answer.seen for answer in answers)
    if any(answer.speaks_for is False for answer in answers):
        return ClaimResult(claim, seen, FAILS)
    if all(answer.speaks_for for answer in answers):
        return ClaimResult(claim, seen, HOLDS)
    reasons = dict.fromkeys(answer.reason for answer in answers if answer.reason)
    return ClaimResult(claim, seen, UNKNOWN, "; ".join([*reasons, *([ended] if ended else [])]))


def _answer(test: Test, by_row: Mapping[str, list[RunRecord]], margin: float) -> _Answer:
    answer: Callable[..., _Answer] = ANSWERS[type(test)]
    return answer(test, by_row, margin)


def _ran(test: Any, by_row: Mapping[str, list[RunRecord]]) -> list[RunRecord]:
    return [record for record in by_row.get(test.row, []) if record.status in ("completed", "diverged")]


def _rate(test: Any, count: int, runs: Sequence[RunRecord], words: str, best: str = "") -> _Answer:
    """Answer by the interval of a rate; too few runs leave it open."""
    if not runs:
        return _Answer(f"{test.row}: no run ended", None, "no run ended")
    low, high = wilson(count, len(runs))
    seen = f"{test.row}: {words} {count}/{len(runs)}{best}"
    if low > MOST:
        return _Answer(seen, True)
    if high < MOST:
        return _Answer(seen, False)
    return _Answer(seen, None, f"95 % interval of the rate {100 * low:.0f} to {100 * high:.0f} %")


def _diverges(test: Diverges, by_row: Mapping[str, list[RunRecord]], margin: float) -> _Answer:
    runs = _ran(test, by_row)
    return _rate(test, sum(record.status == "diverged" for record in runs), runs, "diverged")


def _trains(test: Trains, by_row: Mapping[str, list[RunRecord]], margin: float) -> _Answer:
    runs = _ran(test, by_row)
    finals = [record.summary.metric_final for record in runs if record.status == "completed"]
    metric = metric_of(runs)
    known = [metric.factor * final for final in finals if final is not None]
    unit = f" {metric.unit}" if metric.unit else ""
    spread = f" ({min(known):.1f} to {max(known):.1f}{unit})" if known else ""
    reached = sum(not metric.is_better(test.reaches, final) for final in known)
    return _rate(test, reached, runs, f"{test.reaches:g}{unit} reached", spread)


def _pair(test: Any, by_row: Mapping[str, list[RunRecord]], margin: float) -> tuple[ArmSummary, Metric]:
    """Return the row of one arm compared with one other arm, and the metric of both."""
    records = [*by_row.get(test.against, []), *by_row.get(test.row, [])]
    comparison = summarize(
        records, arms=[test.against, test.row], reference=test.against, terms=Criteria(margin=margin)
    )
    return comparison.arms[1], comparison.metric


def _difference(row: ArmSummary, metric: Metric) -> str:
    if row.metric_difference is None:
        return "no pair was completed"
    unit = metric.difference_unit.replace("pp", "points")
    shown = f"{metric.signed(row.metric_difference)} {unit}".rstrip()
    if row.metric_difference_low is None or row.metric_difference_high is None:
        return shown
    return f"{shown} ({metric.signed(row.metric_difference_low)} to {metric.signed(row.metric_difference_high)})"


def _accuracy(test: Accuracy, by_row: Mapping[str, list[RunRecord]], margin: float) -> _Answer:
    row, metric = _pair(test, by_row, margin)
    word = row.accuracy_verdict or "no verdict"
    seen = f"{test.row} against {test.against}: {_difference(row, metric)}, {word}"
    if word == IDENTICAL:
        word = "equivalent"
    if word.startswith(tuple(test.verdicts)):
        return _Answer(seen, True)
    if word.startswith(("better", "equivalent", "non-inferior", "worse")):
        return _Answer(seen, False)
    return _Answer(seen, None, word.removeprefix("inconclusive (").removesuffix(")"))


def _below(test: Below, by_row: Mapping[str, list[RunRecord]], margin: float) -> _Answer:
    row, metric = _pair(test, by_row, margin)
    seen = f"{test.row} against {test.against}: {_difference(row, metric)}"
    low, high = row.metric_difference_low, row.metric_difference_high
    if row.accuracy_verdict == IDENTICAL:
        return _Answer(seen, False)
    if low is None or high is None:
        return _Answer(seen, None, row.accuracy_verdict or "no pair was completed")
    worst, best = sorted(map(metric.scores_of, (low, high)))
    if best < 0:
        return _Answer(seen, True)
    if worst > -metric.score_margin(test.points):
        return _Answer(seen, False)
    return _Answer(seen, None, f"the interval holds both 0 and {-test.points:g} points")


def _time(test: Time, by_row: Mapping[str, list[RunRecord]], margin: float) -> _Answer:
    row, _ = _pair(test, by_row, margin)
    low, high = row.time_ratio_low, row.time_ratio_high
    if row.time_ratio is None or low is None or high is None:
        return _Answer(f"{test.row} against {test.against}: no valid times", None, row.time_verdict or "no valid times")
    seen = f"{test.row}: {row.time_ratio:.2f}x the step time of {test.against} ({low:.2f} to {high:.2f})"
    if high <= test.at_most:
        return _Answer(seen, True)
    return _Answer(seen, False if low > test.at_most else None, f"{test.at_most:g}x lies inside the interval")


def _memory(test: Memory, by_row: Mapping[str, list[RunRecord]], margin: float) -> _Answer:
    row, _ = _pair(test, by_row, margin)
    if row.peak_bytes is None or row.memory_difference is None or row.peak_bytes <= row.memory_difference:
        return _Answer(f"{test.row} against {test.against}: memory was not measured", None, "memory was not measured")
    ratio = row.peak_bytes / (row.peak_bytes - row.memory_difference)
    return _Answer(f"{test.row}: {ratio:.2f}x the peak memory of {test.against}", ratio <= test.at_most)


ANSWERS: dict[type, Callable[..., _Answer]] = {
    Diverges: _diverges,
    Trains: _trains,
    Accuracy: _accuracy,
    Below: _below,
    Time: _time,
    Memory: _memory,
}
