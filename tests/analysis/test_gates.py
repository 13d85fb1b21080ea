"""Limits for CI: how they are read, what they look at, and how they come out as JUnit XML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from ampcompare.analysis.gates import check_gates, parse_gate
from ampcompare.analysis.summary import summarize
from ampcompare.errors import ConfigError
from ampcompare.records.comparison import Comparison
from ampcompare.records.run import RunRecord
from ampcompare.report.junit import Check, JUnit

MakeRecord = Callable[..., RunRecord]


def _comparison(make_record: MakeRecord, half: dict[str, Any], seeds: int = 3) -> Comparison:
    records = [
        *(make_record("fp32", seed, top1=0.5, peak_bytes=1000) for seed in range(seeds)),
        *(make_record("half", seed, **{"top1": 0.5, "peak_bytes": 1000, **half}) for seed in range(seeds)),
    ]
    return summarize(records, arms=["fp32", "half"], reference="fp32")


def _failed(checks: list[Check]) -> list[tuple[str, str]]:
    return [(check.arm, check.failure) for check in checks if check.failure]


@pytest.mark.parametrize(
    ("text", "measure", "above", "limit"),
    [
        ("accuracy<-0.5", "accuracy", False, -0.5),
        (" time > 1.10x ", "time", True, 1.1),
        ("memory>5%", "memory", True, 1.05),
        ("diverged>0", "diverged", True, 0),
    ],
)
def test_gates_are_read(text: str, measure: str, above: bool, limit: float) -> None:
    """A limit names a measure, a side and a number with its unit."""
    gate = parse_gate(text)
    assert (gate.measure, gate.above, gate.limit) == (measure, above, pytest.approx(limit))


@pytest.mark.parametrize("text", ["", "speed>1", "accuracy<-0.5x", "time>1.1", "time=1.1x", "accuracy<", "diverged>1%"])
def test_bad_gates_are_refused(text: str) -> None:
    """What cannot be read is answered with examples."""
    with pytest.raises(ConfigError, match=r"accuracy<-0\.5"):
        parse_gate(text)


@pytest.mark.parametrize(
    ("gate", "half", "words"),
    [
        ("accuracy<-0.5", {"top1": 0.49}, "accuracy -1.00 points, and accuracy<-0.5 fails"),
        ("time>1.10x", {"seconds": 0.012}, "time 1.200x, and time>1.10x fails"),
        ("memory>5%", {"peak_bytes": 1100}, "memory 1.100x, and memory>5% fails"),
        ("diverged>0", {"status": "diverged"}, "diverged 3, and diverged>0 fails"),
        ("failed>0", {"status": "failed"}, "failed 3, and failed>0 fails"),
        ("accuracy<-0.5", {"status": "diverged"}, "accuracy is unknown: no run of the arm was completed"),
    ],
)
def test_a_limit_is_not_kept(make_record: MakeRecord, gate: str, half: dict[str, Any], words: str) -> None:
    """An arm past a limit fails with what was seen, and an arm within it does not."""
    assert _failed(check_gates([parse_gate(gate)], _comparison(make_record, half))) == [("half", words)]
    assert _failed(check_gates([parse_gate(gate)], _comparison(make_record, {}))) == []


def test_against_a_baseline_every_arm_is_checked(make_record: MakeRecord) -> None:
    """With a baseline each arm, the reference too, is held against itself, over the seeds that both have."""
    old = _comparison(make_record, {"top1": 0.6}, seeds=2)
    new = _comparison(make_record, {"top1": 0.55}, seeds=3)
    assert _failed(check_gates([parse_gate("accuracy<-0.5")], new)) == []
    assert _failed(check_gates([parse_gate("accuracy<-0.5")], new, old)) == [
        ("half", "accuracy -5.00 points, and accuracy<-0.5 fails")
    ]


def test_a_baseline_of_other_arms_is_no_baseline(make_record: MakeRecord) -> None:
    """An arm that the baseline lacks is left out with a note; a baseline with none of the arms is an error."""
    new = _comparison(make_record, {})
    old = summarize([make_record("fp32", 0)], arms=["fp32"], reference="fp32")
    checks = check_gates([parse_gate("accuracy<-0.5")], new, old)
    assert [check.skipped for check in checks] == ["", "the baseline has no such arm"]
    other = summarize([make_record("apex:O1", 0)], arms=["apex:O1"], reference="apex:O1")
    with pytest.raises(ConfigError, match="none of these arms"):
        check_gates([parse_gate("accuracy<-0.5")], new, other)


def test_an_invalid_time_fails_no_gate(make_record: MakeRecord) -> None:
    """A time that means nothing is left out with its reason, for invalid is not slower."""
    comparison = _comparison(make_record, {"seconds": 9.0, "warmup_steps": 95})
    (check,) = check_gates([parse_gate("time>1.10x")], comparison)
    assert (check.failure, check.skipped) == ("", "invalid measurement (5 timed steps, 30 needed)")


def test_another_recipe_is_no_baseline(make_record: MakeRecord) -> None:
    """An accuracy that was reached by another recipe fails its gate rather than passing by luck."""
    old, new = _comparison(make_record, {}), _comparison(make_record, {})
    records = []
    for record in old.records:
        recipe = record.config.recipe.model_copy(update={"epochs": 99})
        records.append(record.model_copy(update={"config": record.config.model_copy(update={"recipe": recipe})}))
    checks = check_gates([parse_gate("accuracy<-9")], new, old.model_copy(update={"records": records}))
    assert all("not comparable (epochs 5, not 99)" in check.failure for check in checks)


def test_junit_has_a_case_per_arm_and_gate(make_record: MakeRecord) -> None:
    """The XML counts arms and gates, failures and what was left out, and hostile texts stay texts."""
    comparison = _comparison(make_record, {"status": "failed", "error": "no\x00 <b>&"})
    checks = [Check("half", "time>1x", failure="too slow \x1b"), Check("half", "memory>1x", skipped="why")]
    suite = ElementTree.fromstring(JUnit(checks).render(comparison))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    cases = [(case.get("classname"), case.get("name"), [part.tag for part in case]) for case in suite]
    assert cases == [
        ("ampcompare.fp32", "trains", []),
        ("ampcompare.half", "trains", ["failure"]),
        ("ampcompare.half", "time>1x", ["failure"]),
        ("ampcompare.half", "memory>1x", ["skipped"]),
    ]
    assert suite[1][0].get("message") == "failed: no  <b>&"
