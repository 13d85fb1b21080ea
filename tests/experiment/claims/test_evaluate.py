"""What runs say about claims: rates by their intervals, differences by the verdicts, and what is left open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.claims.definition import Claim, load_study
from ampcompare.experiment.claims.evaluate import ClaimResult, judge_claim
from ampcompare.experiment.plan import make_plan, parse_seeds
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.layers import Layer, resolve_settings

MakeRecord = Callable[..., RunRecord]


def claim(*tests: dict[str, Any], **options: Any) -> Claim:
    """A claim with some tests."""
    words = {"name": "it", "says": "it is so", "published": "75 %", "shape": "large", **options}
    return Claim.model_validate({**words, "tests": list(tests)})


def runs(make: MakeRecord, arm: str, count: int, *, diverged: int = 0, top1: float = 0.9) -> list[RunRecord]:
    """Runs of an arm, the first of which diverged."""
    return [
        make(arm, seed, top1=top1 + 0.001 * (seed % 2), status="diverged" if seed < diverged else "completed")
        for seed in range(count)
    ]


DIVERGES = {"kind": "diverges", "row": "half"}
TRAINS = {"kind": "trains", "row": "half", "reaches": 85}


@pytest.mark.parametrize(
    ("test", "count", "diverged", "word", "reason"),
    [
        (DIVERGES, 5, 5, "holds", ""),
        (DIVERGES, 5, 0, "does not hold", ""),
        (DIVERGES, 5, 3, "inconclusive", "95 % interval of the rate 23 to 88 %"),
        (DIVERGES, 3, 3, "inconclusive", "95 % interval of the rate 44 to 100 %"),
        (TRAINS, 5, 0, "holds", ""),
        (TRAINS, 5, 5, "does not hold", ""),
        (DIVERGES, 0, 0, "inconclusive", "no run ended"),
    ],
)
def test_rates_are_judged_by_their_interval(
    make_record: MakeRecord, test: dict[str, Any], count: int, diverged: int, word: str, reason: str
) -> None:
    """A claim on most runs needs an interval of the rate on one side of a half: three runs are never enough."""
    finding = judge_claim(claim(test), runs(make_record, "half", count, diverged=diverged))
    assert (finding.word, finding.reason) == (word, reason)


def test_an_accuracy_that_is_too_low_is_no_training(make_record: MakeRecord) -> None:
    """A run that ends with finite weights and chance accuracy has not trained."""
    finding = judge_claim(claim(TRAINS), runs(make_record, "half", 5, top1=0.1))
    assert finding.word == "does not hold"
    assert "85 % reached 0/5 (10.0 to 10.1 %)" in finding.measured


def test_all_tests_must_speak_for_a_claim(make_record: MakeRecord) -> None:
    """One test against it refutes a claim, one that inconclusive leaves it open."""
    both = claim(DIVERGES, {**TRAINS, "row": "fp32"})
    half = runs(make_record, "half", 5, diverged=5)
    assert judge_claim(both, [*half, *runs(make_record, "fp32", 5)]).word == "holds"
    assert judge_claim(both, [*half, *runs(make_record, "fp32", 5, top1=0.1)]).word == "does not hold"
    assert judge_claim(both, half).word == "inconclusive"


def _against(make: MakeRecord, test: dict[str, Any], **numbers: list[float]) -> ClaimResult:
    """Judge one test on two arms with so much top-1, seconds or bytes by seed."""
    names = {"top1": "top1", "seconds": "seconds", "bytes": "peak_bytes"}
    records = [
        make(
            arm,
            seed,
            **{names[name]: values[seed + (5 if arm == "native:bf16" else 0)] for name, values in numbers.items()},
        )
        for arm in ("fp32", "native:bf16")
        for seed in range(5)
    ]
    return judge_claim(claim({"row": "native:bf16", "against": "fp32", **test}), records)


SAME = [0.9, 0.901, 0.9, 0.901, 0.9]
KEEPS = {"kind": "accuracy", "verdicts": ["better", "equivalent", "non-inferior"]}


@pytest.mark.parametrize(
    ("top1", "word"),
    [
        (SAME, "holds"),
        ([0.8, 0.801, 0.8, 0.801, 0.8], "does not hold"),
        ([0.95, 0.85, 0.96, 0.84, 0.9], "inconclusive"),
    ],
)
def test_accuracy_goes_by_the_verdicts(make_record: MakeRecord, top1: list[float], word: str) -> None:
    """The fixed words of the verdicts decide, and `inconclusive` stays open with the number of pairs that lack."""
    finding = _against(make_record, KEEPS, top1=[*SAME, *top1])
    assert finding.word == word
    assert ("more seed" in finding.reason) == (word == "inconclusive")
    assert "points" in finding.measured


@pytest.mark.parametrize(
    ("top1", "word"),
    [
        ([0.89, 0.891, 0.89, 0.891, 0.891], "holds"),
        (SAME, "does not hold"),
        ([0.91, 0.90, 0.89, 0.90, 0.89], "inconclusive"),
    ],
)
def test_a_small_deficit_needs_an_interval_that_is_smaller(
    make_record: MakeRecord, top1: list[float], word: str
) -> None:
    """A row is below another where the interval is below 0, not so where it leaves out the published deficit."""
    assert _against(make_record, {"kind": "below", "points": 0.2}, top1=[*SAME, *top1]).word == word


def test_times_and_memory(make_record: MakeRecord) -> None:
    """A ratio of times is judged by its interval, one of memory as it is; an invalid time tells nothing."""
    quick = [0.010, 0.0101, 0.010, 0.0101, 0.01]
    faster = {"kind": "time", "at_most": 0.65}
    assert _against(make_record, faster, seconds=[*quick, *(0.6 * value for value in quick)]).word == "holds"
    assert _against(make_record, faster, seconds=[*quick, *quick]).word == "does not hold"
    memory = {"kind": "memory", "at_most": 0.55}
    assert _against(make_record, memory, bytes=[*[200] * 5, *[100] * 5]).word == "holds"
    assert _against(make_record, memory, bytes=[*[200] * 5, *[150] * 5]).word == "does not hold"
    busy = [make_record(arm, seed, num_steps=12) for arm in ("fp32", "native:bf16") for seed in range(5)]
    open_ = judge_claim(claim({"row": "native:bf16", "against": "fp32", **faster}), busy)
    assert (open_.word, "invalid measurement" in open_.reason) == ("inconclusive", True)


def test_what_was_not_run_says_so(make_record: MakeRecord) -> None:
    """A claim that needs a GPU is not run without one, and a budget that ended the runs is a reason too."""
    assert judge_claim(claim(DIVERGES), [], not_run="needs a GPU").verdict == "not run (needs a GPU)"
    few = judge_claim(claim(DIVERGES), runs(make_record, "half", 1, diverged=1), ended="the budget ended it")
    assert few.word == "inconclusive"
    assert few.reason.endswith("; the budget ended it")


def test_the_study_of_the_seeds_is_whole() -> None:
    """Every claim has a shape that has its rows, and every shape that trains can be planned; names are there once."""
    study = load_study("articles")
    names = [claim.name for claim in study.claims]
    assert len(set(names)) == len(names) >= 13
    for claim_ in study.claims:
        shape = study.shapes[claim_.shape]
        rows = shape.arms or ["step once", "step twice"]
        named = {
            value for test in claim_.tests for key, value in test.model_dump().items() if key in ("row", "against")
        }
        assert named <= set(rows)
        assert len(parse_seeds(shape.seeds)) >= 5
    for shape in study.shapes.values():
        if shape.arms:
            make_plan(resolve_settings([Layer("shape", shape.settings)]).config, shape.arms, [0])
    assert [claim_.name for claim_ in study.claims if claim_.needs_gpu] == [
        *("fp16-saves-time", "native-faster", "half-halves-memory")
    ]


def test_an_unknown_study_is_refused() -> None:
    with pytest.raises(ConfigError, match="known are articles"):
        load_study("seed")
