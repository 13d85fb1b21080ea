"""The recommendation: what qualifies an arm, and when there is none."""

from typing import Any

import pytest

from ampcompare.results.analysis.conclusions.headline import recommendation_sentence
from ampcompare.results.analysis.conclusions.recommendation import (
    none_recommended_sentences,
    recommended_arms,
)
from ampcompare.results.analysis.inference.terms import Preference
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.metric import TOP1
from ampcompare.testing import make_comparison, make_record


def _row(arm: str, accuracy: str = "", time: str = "", **values: Any) -> ArmSummary:
    base = {"engine": None, "half": None, "lr": 0.1, "seeds": [0], "completed": 5, "diverged": 0, "failed": 0}
    return ArmSummary(**{**base, "arm": arm, "accuracy_verdict": accuracy, "time_verdict": time, **values})


REFERENCE = _row("fp32", peak_bytes=1000)
EQUAL = "equivalent (±0.5)"


def _use(*rows: ArmSummary, prefer: Preference = "time") -> str:
    """Return what is said of the first of the recommended arms; "" if there is none."""
    comparison = Comparison(
        command="",
        reference="fp32",
        seeds=[0],
        arms=[REFERENCE, *rows],
        reading=[],
        records=[],
        prefer=prefer,
    )
    fit = recommended_arms(rows, prefer, TOP1)
    return recommendation_sentence(fit[0], comparison) if fit else ""


def test_the_fastest_that_keeps_the_accuracy() -> None:
    """Of two faster arms the faster is recommended, with its reason."""
    rows = [_row("a", EQUAL, "better", time_ratio=0.7), _row("b", EQUAL, "better", time_ratio=0.6)]
    assert [row.arm for row in recommended_arms(rows, "time", TOP1)] == ["b", "a"]
    assert _use(*rows) == "Use b: accuracy of fp32 kept (Δ +0.00 pp, within ±0.5), 0.60x its step time."


@pytest.mark.parametrize(
    "accuracy", ["worse", "diverged 1/5", "inconclusive (≤3 more seeds)", "not comparable (x)"]
)
def test_speed_without_accuracy_recommends_nothing(accuracy: str) -> None:
    """An arm that is not known to keep the accuracy is never recommended for its speed."""
    row = _row("a", accuracy, "better", time_ratio=0.1)
    assert recommended_arms([row], "time", TOP1) == []
    assert list(none_recommended_sentences([row], "fp32", "time", TOP1)) == [
        "No arm is recommended for time: none was shown to be non-inferior in accuracy to fp32."
    ]


def test_accuracy_needs_a_better_arm() -> None:
    better = _row(
        "a", "better", metric_difference=0.02, metric_difference_low=0.01, metric_difference_high=0.03
    )
    assert _use(better, prefer="accuracy") == "Use a: better accuracy than fp32 (Δ +2.00 pp, +1.00 to +3.00)."
    assert recommended_arms([_row("a", EQUAL)], "accuracy", TOP1) == []
    assert list(none_recommended_sentences([_row("a", EQUAL)], "fp32", "accuracy", TOP1)) == [
        "No arm is recommended for accuracy: no arm is better than fp32."
    ]


def test_the_averaged_weights_have_a_line_where_there_are_any() -> None:
    """Means over the completed runs of each arm that kept an average; no line where none did."""
    records = [make_record(seed=seed, ema_metric_final=share) for seed, share in ((0, 0.9), (1, 0.95))]
    records.append(make_record("half", seed=0))
    records.append(make_record("half", seed=1, status="diverged"))
    said = make_comparison(records, arms=["fp32", "half"]).reading
    assert "Top-1 of the averaged weights (EMA) after the last epoch: fp32 92.50 %." in said
    plain = summarize(records[2:], arms=["half"], reference="half").reading
    assert not [line for line in plain if "averaged" in line]
