"""Attacks by what runs did: nothing learned, steps skipped, equal losses, and margins that exclude nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from ampcompare.results.analysis.gates import gate_outcomes, parse_gate
from ampcompare.results.analysis.inference.verdict import SequentialDesign
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.run import RunRecord, TimingRound
from ampcompare.testing import make_comparison, make_record

CORRECT = {"fp32": [500, 520, 490, 510, 505], "half": [501, 519, 491, 509, 506]}  # of 1,000, by seed
SECONDS = {"fp32": 0.01, "half": 0.005}
PEAK = {"fp32": 1000, "half": 500}


def _records(arms: Sequence[str] = ("fp32", "half"), **half: Any) -> list[RunRecord]:
    """Return five seeds of fp32 and of half, which is twice as fast, half as large and equivalent."""
    return [
        make_record(
            arm,
            seed,
            top1=CORRECT[arm][seed] / 1000,
            seconds=SECONDS[arm] * (1 + 0.002 * (seed % 3)),
            peak_bytes=PEAK[arm],
            **(half if arm in arms else {}),
        )
        for seed in range(5)
        for arm in CORRECT
    ]


def _compared(records: Sequence[RunRecord], **terms: Any) -> Comparison:
    return make_comparison(records, arms=["fp32", "half"], **terms)


def _half(comparison: Comparison) -> ArmSummary:
    return comparison.arms[1]


def _with(record: RunRecord, **summary: Any) -> RunRecord:
    return record.model_copy(update={"summary": record.summary.model_copy(update=summary)})


def test_pairs_in_which_nobody_learned_show_nothing() -> None:
    records = [_with(record, weights_moved=record.config.recipe.seed == 0) for record in _records()]
    comparison = _compared(records)
    assert str(_half(comparison).quality) == "learned nothing in 4 of 5 pairs (the weights did not move)"
    assert any(line.startswith("No arm is recommended") for line in comparison.reading)
    (check,) = gate_outcomes([parse_gate("accuracy:non-inferior")], comparison)
    assert check.failure


def test_a_seed_that_only_one_side_learned_counts() -> None:
    records = [
        _with(record, weights_moved=record.arm == "fp32" or record.config.recipe.seed > 0)
        for record in _records()
    ]
    assert not str(_half(_compared(records)).quality).startswith("learned nothing")


@pytest.mark.parametrize(
    ("skipped", "verdict"), [(25, "better"), (26, "not comparable (26 of 100 steps skipped)")]
)
def test_an_arm_that_skips_is_not_faster(skipped: int, verdict: str) -> None:
    """Skipped steps do less work; where they are more than a quarter the median may be one of them."""
    comparison = _compared(_records(arms=["half"], skipped_steps=skipped))
    assert str(_half(comparison).time) == verdict
    assert comparison.headline[0].startswith(
        "Use half: " if verdict == "better" else "half keeps fp32's accuracy"
    )


@pytest.mark.parametrize(
    ("gain", "skipped", "verdict", "headline"),
    [
        (
            0.05,
            {"half": 13},
            "non-inferior (margin 0.5; 87 updates, not 100)",
            "half after 87 updates, not 100)",
        ),
        (
            -0.05,
            {"half": 13},
            "worse (87 updates, not 100)",
            "; 87 updates, not 100) is less accurate than fp32",
        ),
        (0.05, {"fp32": 13}, "better (100 updates, not 87)", "; 100 updates, not 87)"),
        (-0.05, {"fp32": 13}, "not comparable (100 updates, not 87)", "fp32: half (100 updates, not 87)"),
        (0.05, {"half": 1}, "better", "better accuracy than fp32"),
        (0.05, {"half": 13, "fp32": 13}, "better", "better accuracy than fp32"),
        (0.0, {"half": 13}, "equivalent (±0.5)", ""),
    ],
)
def test_fewer_updates_are_no_merit_of_a_precision(
    gain: float, skipped: dict[str, int], verdict: str, headline: str
) -> None:
    """A difference that the number of updates may explain says how many there were; no arm is better after fewer."""
    records = [
        make_record(
            arm,
            seed,
            top1=CORRECT["fp32"][seed] / 1000 + (gain + 0.001 * (seed % 2)) * (arm == "half"),
            skipped_steps=skipped.get(arm, 0),
            loss_tail=1.0 - (gain + 0.001 * (seed % 2)) * (arm == "half"),
        )
        for seed in range(5)
        for arm in CORRECT
    ]
    comparison = _compared(records, prefer="accuracy")
    row = _half(comparison)
    assert str(row.quality) == verdict
    assert row.loss.kind == row.quality.kind
    assert any(headline in line for line in comparison.headline), comparison.headline
    assert any(line.startswith("Use half") for line in comparison.headline) is verdict.startswith("better")
    (check,) = gate_outcomes([parse_gate("accuracy:worse")], comparison)
    assert bool(check.failure) is verdict.startswith("worse")
    (check,) = gate_outcomes([parse_gate("accuracy:non-inferior")], comparison)
    assert bool(check.failure) is verdict.startswith(("worse", "not comparable"))


def test_one_identical_seed_recommends_nothing() -> None:
    """That one of five seeds is identical is seen, and is too little to recommend half of the memory."""
    records = [
        _with(
            make_record(arm, seed, top1=0.5, losses=f"{seed}", peak_bytes=PEAK[arm]), weights_sha256=f"{seed}"
        )
        for seed in range(5)
        for arm in CORRECT
        if arm == "fp32" or seed == 0
    ]
    comparison = _compared(records, prefer="memory")
    assert (str(_half(comparison).quality), _half(comparison).pairs) == ("identical", 1)
    assert comparison.reading[0].startswith("No arm is recommended for memory")


@pytest.mark.parametrize(("margin", "majority"), [(60.0, None), (41.0, 100), ("100%", None)])
def test_a_margin_that_guessing_is_within(margin: float | str, majority: int | None) -> None:
    """By a margin of all that the reference has over guessing any arm is equivalent: nothing is recommended."""
    comparison = _compared(_records(arms=CORRECT, majority=majority), margin=margin)
    words = [line for line in comparison.headline if "better than guessing" in line]
    assert bool(words) == (margin != "100%")  # all errors of a reference at 50.5 % are 49.5 points
    assert any(line.startswith("Use half") for line in comparison.headline) != bool(words)


def test_validation_sets_of_other_classes() -> None:
    """Where the largest class differs the labels do, also without per-image results."""
    records = [
        make_record(arm, seed, top1=CORRECT[arm][seed] / 1000, majority=100 if arm == "half" else 200)
        for seed in range(5)
        for arm in CORRECT
    ]
    assert str(_half(_compared(records)).quality) == "not comparable (validated on samples with other labels)"


@pytest.mark.parametrize(("elsewhere", "verdict"), [(1, "better"), (4, "not comparable (on host b, not a)")])
def test_one_shared_host_hides_no_other(elsewhere: int, verdict: str) -> None:
    """Four of five pairs over two hosts are not made comparable by one pair on a single host."""
    records = [
        record.model_copy(
            update={"host": "b" if record.arm == "half" and record.config.recipe.seed < elsewhere else "a"}
        )
        for record in _records()
    ]
    assert str(_half(_compared(records)).time) == verdict


def _lost(arm: str, status: Any) -> list[RunRecord]:
    """Return five seeds of which an arm did not complete the last two."""
    return [
        make_record(arm, record.config.recipe.seed, status=status)
        if record.arm == arm and record.config.recipe.seed > 2
        else record
        for record in _records()
    ]


@pytest.mark.parametrize("prefer", ["time", "memory"])
@pytest.mark.parametrize(("arm", "status"), [("fp32", "diverged"), ("half", "failed"), ("fp32", "failed")])
def test_survivors_give_no_recommendation(arm: str, status: str, prefer: str) -> None:
    """Where a side lost seeds the verdict says so with the rate, no arm is recommended, and no gate is passed."""
    comparison = _compared(_lost(arm, status), prefer=prefer)
    assert str(_half(comparison).quality) == "conditional on 3 of 5 seeds (equivalent (±0.5))"
    assert any(line.startswith(f"No arm is recommended for {prefer}") for line in comparison.reading)
    for check in gate_outcomes([parse_gate("accuracy<-5"), parse_gate("accuracy:non-inferior")], comparison):
        assert "conditional on" in check.failure
        assert "3 of 5" in check.failure


def test_an_interruption_selects_no_seeds() -> None:
    """A run that the user stopped was not lost by what it computed."""
    assert str(_half(_compared(_lost("half", "interrupted"))).quality) == "equivalent (±0.5)"


def test_a_limit_is_not_passed_by_the_survivors_of_the_reference() -> None:
    """Where the reference, or the baseline, lost seeds by divergence the difference of all seeds is not known."""
    records, lost = _records(), _lost("fp32", "diverged")
    gates = [parse_gate("accuracy<-0.5")]
    (check,) = gate_outcomes(gates, _compared(lost))
    assert "conditional on 3 of 5 seeds" in check.failure
    checks = {check.arm: check for check in gate_outcomes(gates, _compared(records), _compared(lost))}
    assert "conditional on 3 of 5 seeds" in checks["fp32"].failure
    assert not checks["half"].failure


def _started(record: RunRecord, day: int) -> RunRecord:
    return _with(record, wall_seconds=5.0).model_copy(update={"started": f"2026-11-{day}T08:00:00+00:00"})


def test_a_baseline_of_the_same_runs_shows_nothing() -> None:
    """A comparison that reused the runs of its baseline is not called unchanged."""
    gates = [parse_gate("accuracy:worse"), parse_gate("time>1.1x"), parse_gate("diverged>0")]
    now, before = ([_started(record, day) for record in _records()] for day in (21, 22))
    same = gate_outcomes(gates, _compared(now), _compared(now))
    assert ["these same runs" in check.failure for check in same] == [True, True, False] * 2
    assert not any(check.failure for check in gate_outcomes(gates, _compared(now), _compared(before)))


def test_a_baseline_is_no_second_chance() -> None:
    """A look that may spend nothing gives no verdict against a baseline either."""
    spent = _compared(_records()).model_copy(update={"error_rate": 0.0})
    checks = gate_outcomes([parse_gate("accuracy:non-inferior")], spent, _compared(_records()))
    assert all("inconclusive (not tested)" in check.failure for check in checks)


def _rounds(record: RunRecord, count: int, seconds: float) -> RunRecord:
    rounds = [
        TimingRound(number=1 + each, step_seconds_median=seconds * (1 + 0.001 * each))
        for each in range(count)
    ]
    return record.model_copy(update={"timing_rounds": rounds})


@pytest.mark.parametrize(("others", "verdict"), [(0, "equivalent (±2 %)"), (2, "inconclusive")])
def test_rounds_of_one_seed_stand_for_no_other(others: int, verdict: str) -> None:
    """Twenty rounds of one seed, in which the arm was twice as fast, outvote no seeds in which it was not."""
    records = []
    for record in _records():
        is_fast = record.arm == "half" and record.config.recipe.seed == 0
        rounds = 20 if record.config.recipe.seed == 0 else others
        records.append(_rounds(_with(record, step_seconds_median=0.01), rounds, 0.005 if is_fast else 0.01))
    comparison = _compared(records)
    assert str(_half(comparison).time).startswith(verdict)
    assert any("8 of 10 cells lack them" in line for line in comparison.reading) == (others == 0)


def test_nothing_tested_is_not_called_not_shown() -> None:
    """Where nothing was tested the headline says so, and no arm is said not to be shown as good."""
    comparison = summarize(
        _records(), arms=["fp32", "half"], reference="fp32", design=SequentialDesign(error_rate=0.0)
    )
    assert comparison.headline[0] == "No verdicts: nothing was tested; the details have the reason."
    assert not any("recommended" in line for line in comparison.reading)
