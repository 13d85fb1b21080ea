"""Limits for CI: how they are read, what they look at, and how they come out as JUnit XML."""

from typing import Any
from xml.etree import ElementTree

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import printable_line
from ampcompare.results.analysis.gates import VerdictGate, gate_outcomes, parse_gate
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.verdict import Verdict, verdict_fields_from_words
from ampcompare.results.report.junit import GateOutcome, junit_xml
from ampcompare.testing import make_comparison, make_record


def _comparison(half: dict[str, Any], seeds: int = 3) -> Comparison:
    records = [
        *(make_record("fp32", seed, top1=0.5, peak_bytes=1000) for seed in range(seeds)),
        *(make_record("half", seed, **{"top1": 0.5, "peak_bytes": 1000, **half}) for seed in range(seeds)),
    ]
    return make_comparison(records, arms=["fp32", "half"])


def _failed(checks: list[GateOutcome]) -> list[tuple[str, str]]:
    return [(check.arm, check.failure) for check in checks if check.failure]


@pytest.mark.parametrize(
    "text",
    [
        *("", "speed>1", "accuracy<-0.5x", "time>1.1", "time=1.1x", "accuracy<", "diverged>1%"),
        *("memory:better", "accuracy:good", "accuracy:not-worse", "time:identical"),
    ],
)
def test_bad_gates_are_refused(text: str) -> None:
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
def test_a_limit_is_not_kept(gate: str, half: dict[str, Any], words: str) -> None:
    """An arm past a limit fails with what was seen, and an arm within it does not."""
    assert _failed(gate_outcomes([parse_gate(gate)], _comparison(half))) == [("half", words)]
    assert _failed(gate_outcomes([parse_gate(gate)], _comparison({}))) == []


def test_against_a_baseline_every_arm_is_checked() -> None:
    """With a baseline each arm, the reference too, is held against itself, over the seeds that both have."""
    old = _comparison({"top1": 0.6}, seeds=2)
    new = _comparison({"top1": 0.55}, seeds=3)
    assert _failed(gate_outcomes([parse_gate("accuracy<-0.5")], new)) == []
    assert _failed(gate_outcomes([parse_gate("accuracy<-0.5")], new, old)) == [
        ("half", "accuracy -5.00 points, and accuracy<-0.5 fails")
    ]


def test_a_baseline_of_other_arms_is_no_baseline() -> None:
    """An arm that the baseline lacks is left out with a note; a baseline with none of the arms is an error."""
    new = _comparison({})
    old = make_comparison([make_record("fp32", 0)], arms=["fp32"])
    checks = gate_outcomes([parse_gate("accuracy<-0.5")], new, old)
    assert [check.skipped for check in checks] == ["", "the baseline has no such arm"]
    other = summarize([make_record("apex:O1", 0)], arms=["apex:O1"], reference="apex:O1")
    with pytest.raises(ConfigError, match="none of these arms"):
        gate_outcomes([parse_gate("accuracy<-0.5")], new, other)


def test_an_invalid_time_fails_no_gate() -> None:
    """A time that means nothing is left out with its reason, for invalid is not slower."""
    comparison = _comparison({"seconds": 9.0, "warmup_steps": 95})
    (check,) = gate_outcomes([parse_gate("time>1.10x")], comparison)
    assert (check.failure, check.skipped) == ("", "invalid measurement (5 timed steps, 30 needed)")


def test_junit_has_a_case_per_arm_and_gate() -> None:
    """The XML counts arms and gates, failures and what was left out, and hostile texts stay texts."""
    comparison = _comparison({"status": "failed", "error": "no\x00 <b>&"})
    checks = [
        GateOutcome("half", "time>1x", failure="too slow \x1b"),
        GateOutcome("half", "memory>1x", skipped="why"),
    ]
    suite = ElementTree.fromstring(junit_xml(comparison, checks))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    cases = [
        (case.get("classname"), case.get("name"), [part.tag for part in case])
        for case in suite.iter("testcase")
    ]
    assert cases == [
        ("ampcompare.fp32", "trains", []),
        ("ampcompare.half", "trains", ["failure"]),
        ("ampcompare.half", "time>1x", ["failure"]),
        ("ampcompare.half", "memory>1x", ["skipped"]),
    ]
    assert suite[1][0].get("message") == "failed: no  <b>&"
    assert suite.findtext("system-out") == "\n".join(map(printable_line, comparison.headline))


VERDICTS = [
    # verdict, gates that it fails
    ("identical", {"better"}),
    ("equivalent (±0.5)", {"better"}),
    ("non-inferior (margin 0.5)", {"better", "equivalent"}),
    ("better", {"equivalent"}),
    ("worse", {"better", "equivalent", "non-inferior", "worse"}),
    ("inconclusive (≤3 more seeds)", {"better", "equivalent", "non-inferior"}),
    ("learned nothing (all 60 steps were skipped)", {"better", "equivalent", "non-inferior", "worse"}),
    ("no verdict (the reference learned nothing)", {"better", "equivalent", "non-inferior"}),
    ("diverged 1/3", {"better", "equivalent", "non-inferior", "worse"}),
    ("not comparable (lr 1, not 2)", {"better", "equivalent", "non-inferior"}),
    ("invalid measurement (5 timed steps, 30 needed)", {"better", "equivalent", "non-inferior"}),
    ("conditional on 3 of 8 seeds (better)", {"better", "equivalent", "non-inferior"}),
    ("", {"better", "equivalent", "non-inferior"}),
]


@pytest.mark.parametrize("measure", ["accuracy", "time"])
@pytest.mark.parametrize(("words", "failing"), VERDICTS)
def test_a_verdict_can_be_asked_for(measure: str, words: str, failing: set[str]) -> None:
    """`worse` fails what is shown to be worse and is skipped where nothing is known; other words fail the rest."""
    comparison = _comparison({})
    verdict = Verdict(**verdict_fields_from_words(words))
    row = comparison.arms[1].model_copy(update={"time" if measure == "time" else "quality": verdict})
    comparison = comparison.model_copy(update={"arms": [comparison.arms[0], row]})
    gates = [parse_gate(f"{measure}:{word}") for word in ("better", "equivalent", "non-inferior", "worse")]
    checks = gate_outcomes(gates, comparison)
    assert {check.gate.partition(":")[2] for check in checks if check.failure} == failing
    assert all(check.arm == "half" for check in checks)
    unknown = verdict.kind in ("", "not comparable", "no verdict", "invalid")
    assert [check.gate.partition(":")[2] for check in checks if check.skipped] == ["worse"] * unknown


@pytest.mark.parametrize(("old", "new"), [("not-inferior", "non-inferior"), ("inferior", "worse")])
def test_earlier_words_of_verdicts_are_accepted(old: str, new: str) -> None:
    """Files of earlier versions keep working: the earlier word asks for the same verdict."""
    given, meant = parse_gate(f"accuracy:{old}"), parse_gate(f"accuracy:{new}")
    assert isinstance(given, VerdictGate)
    assert isinstance(meant, VerdictGate)
    assert given.word == meant.word == new


def test_verdicts_against_a_baseline() -> None:
    """With a baseline a verdict is reached for every arm, the reference too, against its own runs of that time."""
    old, new = _comparison({}), _comparison({"top1": 0.4, "seconds": 0.005})
    gates = [parse_gate(text) for text in ("accuracy:non-inferior", "accuracy:worse", "time:better")]
    checks = {(check.arm, check.gate): check.failure for check in gate_outcomes(gates, new, old)}
    assert checks["fp32", "accuracy:non-inferior"] == checks["fp32", "accuracy:worse"] == ""
    assert checks["half", "accuracy:non-inferior"].startswith("accuracy worse")
    assert checks["half", "accuracy:worse"].startswith("accuracy worse")
    assert checks["half", "time:better"] == ""
    assert checks["fp32", "time:better"].startswith("time equivalent")


def test_the_margin_of_a_baseline_is_that_of_its_reference() -> None:
    """The rule `auto` takes the errors of the reference: of an arm with more of them it would allow a larger loss."""
    sides = [
        summarize(
            [
                make_record(arm, seed, top1=top1)
                for arm, top1 in (("fp32", 0.99), ("half", half))
                for seed in range(3)
            ],
            arms=["fp32", "half"],
            reference="fp32",
        )
        for half in (0.5, 0.497)
    ]
    failed = dict(_failed(gate_outcomes([parse_gate("accuracy:non-inferior")], sides[1], sides[0])))
    assert failed["half"].startswith("accuracy worse")


def _changed(comparison: Comparison, seeds: set[int], **updates: Any) -> Comparison:
    records = [
        record.model_copy(update=updates) if record.config.recipe.seed in seeds else record
        for record in comparison.records
    ]
    return comparison.model_copy(update={"records": records})


def test_one_seed_of_another_recipe_is_seen() -> None:
    """One of four seeds with more epochs is enough for an accuracy gate not to pass, whichever seed it is."""
    old, new = _comparison({}, seeds=4), _comparison({}, seeds=4)
    for seed in range(4):
        config = new.records[seed].config
        longer = config.model_copy(update={"recipe": config.recipe.model_copy(update={"epochs": 50})})
        for check in gate_outcomes([parse_gate("accuracy<-9")], _changed(new, {seed}, config=longer), old):
            assert "not comparable (epochs" in check.failure


def test_one_seed_of_another_gpu_is_seen() -> None:
    """A V100 among H100s in one mean of times is not compared, whichever seed it is."""
    h100, v100 = ({"device": "cuda:0", "device_name": name} for name in ("H100", "V100"))
    new = _changed(_comparison({}, seeds=4), set(range(4)), environment=h100)
    for seed in range(4):
        mixed = _changed(new, {seed}, environment=v100)
        for check in gate_outcomes([parse_gate("time>1.01x"), parse_gate("memory>5%")], mixed, new):
            assert check.skipped == "not comparable (device name V100, not H100)"
            assert check.failure == ""


def test_a_baseline_may_be_of_another_torch() -> None:
    """To see what a new version changes is what a baseline is for; inside one comparison it is not comparable."""
    old = _changed(_comparison({}), {0, 1, 2}, environment={"device": "cpu", "torch": "2.12"})
    new = _changed(_comparison({"top1": 0.4}), {0, 1, 2}, environment={"device": "cpu", "torch": "2.13"})
    gates = [parse_gate(text) for text in ("accuracy<-0.5", "accuracy:worse", "time>1.1x", "memory>5%")]
    failed = _failed(gate_outcomes(gates, new, old))
    assert [arm for arm, _ in failed] == ["half", "half"]
    assert failed[0][1] == "accuracy -10.00 points, and accuracy<-0.5 fails"
