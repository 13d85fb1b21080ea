"""From records to rows and a reading: what is said, and what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scipy import stats

from ampcompare.compare.summary import summarize
from ampcompare.record import ArmSummary, Comparison, RunRecord

MakeRecord = Callable[..., RunRecord]
FP32 = [0.50, 0.52, 0.49, 0.51, 0.50]
HALF = [0.40, 0.44, 0.41, 0.40, 0.43]
SECONDS = [1.0, 1.1, 0.9, 1.0, 1.05]


def _row(comparison: Comparison, arm: str) -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == arm)


def _reading(comparison: Comparison) -> str:
    return "\n".join(comparison.reading)


def _matrix(make_record: MakeRecord, seeds: int = 5) -> list[RunRecord]:
    return [
        *(make_record("fp32", seed, top1=FP32[seed], seconds=SECONDS[seed]) for seed in range(seeds)),
        *(make_record("half", seed, top1=HALF[seed], seconds=SECONDS[-1 - seed] / 2) for seed in range(seeds)),
    ]


def test_rows_hold_mean_spread_and_pairs(make_record: MakeRecord) -> None:
    """A row has mean and standard deviation over seeds, and its paired difference and ratio to the reference."""
    comparison = summarize(_matrix(make_record), arms=["fp32", "half"], reference="fp32")
    row = _row(comparison, "half")
    assert row.top1_mean == pytest.approx(sum(HALF) / 5)
    assert row.top1_sd == pytest.approx(stats.tstd(HALF))
    assert row.top1_difference == pytest.approx(sum(HALF) / 5 - sum(FP32) / 5)
    low, high = stats.ttest_rel(HALF, FP32).confidence_interval(0.95)
    assert (row.top1_difference_low, row.top1_difference_high) == pytest.approx((low, high))
    assert row.time_ratio == pytest.approx(0.5)
    assert (row.seeds, row.completed, row.status) == ([0, 1, 2, 3, 4], 5, "ok")
    assert (row.skipped_steps, row.num_steps) == (0, 500)


def test_the_reference_is_one_itself(make_record: MakeRecord) -> None:
    """The reference differs from itself by nothing and takes once its own time."""
    row = _row(summarize(_matrix(make_record), arms=["fp32", "half"], reference="fp32"), "fp32")
    assert (row.top1_difference, row.time_ratio) == (0, 1)


def test_a_clear_difference_is_read_out(make_record: MakeRecord) -> None:
    """With five seeds and an interval off zero the arm is said to be apart, with its interval in points."""
    text = _reading(summarize(_matrix(make_record), arms=["fp32", "half"], reference="fp32"))
    assert "Top-1 in points, apart from fp32" in text
    assert "half -8.80 (-" in text
    assert "Step time, apart from fp32" in text
    assert "half 0.50x (0." in text


def test_equal_accuracy_is_said_plainly(make_record: MakeRecord) -> None:
    """Arms with the same accuracy in every seed are named as such, without an interval of no width."""
    records = [make_record(arm, seed, top1=FP32[seed]) for arm in ("fp32", "half") for seed in range(3)]
    text = _reading(summarize(records, arms=["fp32", "half"], reference="fp32"))
    assert "Top-1 equal to fp32's in every seed: half." in text
    assert "+0.00 to +0.00" not in text


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_name_no_winner(make_record: MakeRecord, seeds: int) -> None:
    """One or two seeds give no verdict, whatever the figures, and the reading says why and what to do."""
    comparison = summarize(_matrix(make_record, seeds), arms=["fp32", "half"], reference="fp32")
    text = _reading(comparison)
    assert f"{seeds} seed{'s' if seeds > 1 else ''} cannot tell arms from the luck of the draw" in text
    assert "--seeds 0-4" in text
    assert "apart" not in text
    row = _row(comparison, "half")
    assert (row.top1_difference_low, row.top1_difference_high, row.time_ratio_low) == (None, None, None)


def test_an_interval_that_holds_zero_cannot_tell(make_record: MakeRecord) -> None:
    """A difference within its own uncertainty is said to be unclear, not to be none."""
    records = [
        *(make_record("fp32", seed, top1=value) for seed, value in enumerate([0.50, 0.52, 0.49])),
        *(make_record("half", seed, top1=value) for seed, value in enumerate([0.51, 0.51, 0.50])),
    ]
    text = _reading(summarize(records, arms=["fp32", "half"], reference="fp32"))
    assert "Top-1 in points, against fp32: cannot tell half +0.33 (-" in text
    assert "Top-1 in points, apart" not in text


def test_every_arm_widens_the_intervals(make_record: MakeRecord) -> None:
    """With four arms beside the reference each interval is at 98.75 %, so that all hold together at 95 %."""
    arms = ["fp32", "half", "native:fp16", "native:bf16", "half:bn_fp32"]
    records = _matrix(make_record) + [make_record(arm, seed, top1=0.5) for arm in arms[2:] for seed in range(5)]
    row = _row(summarize(records, arms=arms, reference="fp32"), "half")
    low, high = stats.ttest_rel(HALF, FP32).confidence_interval(1 - 0.05 / 4)
    assert (row.top1_difference_low, row.top1_difference_high) == pytest.approx((low, high))


def test_pairs_are_made_by_seed(make_record: MakeRecord) -> None:
    """Runs are compared with the run of the same seed; what has no partner, or diverged, is no pair."""
    records = [
        *(make_record("fp32", seed, top1=0.1 * seed) for seed in (3, 1, 2)),
        *(make_record("half", seed, top1=0.1 * seed + 0.01 * (seed == 2)) for seed in (2, 3, 1, 9)),
        make_record("fp32", 9, status="diverged"),
    ]
    row = _row(summarize(records, arms=["fp32", "half"], reference="fp32"), "half")
    assert row.top1_difference == pytest.approx(0.01 / 3)
    assert row.top1_difference_low is not None


def test_divergence_is_a_result(make_record: MakeRecord) -> None:
    """A diverged run counts as such, is left out of the mean, and is read out."""
    records = [
        make_record("fp32", 0),
        make_record("fp32", 1),
        make_record("half", 0, top1=0.25),
        make_record("half", 1, status="diverged"),
    ]
    comparison = summarize(records, arms=["fp32", "half"], reference="fp32")
    row = _row(comparison, "half")
    assert (row.completed, row.diverged, row.failed, row.top1_mean) == (1, 1, 0, 0.25)
    assert row.status == "ok 1/2; diverged 1/2 at step 7"
    assert "Diverged: half (1 of 2)." in comparison.reading


def test_a_failure_is_a_row(make_record: MakeRecord) -> None:
    """An arm that failed has its error in its row and nothing else."""
    records = [make_record("fp32", 0), make_record("half", 0, status="failed", error="RuntimeError: no")]
    comparison = summarize(records, arms=["fp32", "half"], reference="fp32")
    row = _row(comparison, "half")
    assert (row.completed, row.failed, row.top1_mean, row.num_steps) == (0, 1, None, None)
    assert row.status == "failed: RuntimeError: no"
    assert any(line.startswith("Failed or interrupted: half;") for line in comparison.reading)


def test_nothing_to_compare(make_record: MakeRecord) -> None:
    """Where no run was completed the reading says only that."""
    records = [make_record(arm, 0, status="diverged") for arm in ("fp32", "half")]
    reading = summarize(records, arms=["fp32", "half"], reference="fp32").reading
    assert reading[-1] == "No run was completed, so there is nothing to compare."


def test_an_arm_that_has_not_run_yet(make_record: MakeRecord) -> None:
    """A report on the way has a row for each arm of the plan."""
    comparison = summarize([make_record("fp32", 0)], arms=["fp32", "half"], reference="fp32")
    assert _row(comparison, "half").status == "not run"


def test_equal_bits_are_named(make_record: MakeRecord) -> None:
    """An arm whose losses and counts equal the reference's in every seed is named as equal to the last bit."""
    records = [
        *(make_record("fp32", seed, losses=f"hash {seed}") for seed in (0, 1)),
        *(make_record("apex:O0", seed, losses=f"hash {seed}") for seed in (0, 1)),
        *(make_record("half", seed, losses=f"hash {min(seed, 0)}") for seed in (0, 1)),
    ]
    text = _reading(summarize(records, arms=["fp32", "apex:O0", "half"], reference="fp32"))
    assert "Equal to fp32 to the last bit of every loss, training and validation: apex:O0." in text


def test_equal_losses_with_other_counts_are_not_equal(make_record: MakeRecord) -> None:
    """The same training losses and another validation result is another result."""
    records = [make_record("fp32", 0, losses="x"), make_record("apex:O0", 0, losses="x", top1=0.4)]
    assert "last bit" not in _reading(summarize(records, arms=["fp32", "apex:O0"], reference="fp32"))


@pytest.mark.parametrize(
    ("half", "device", "said"),
    [
        ("fp16 emulated", "cpu", "was computed in fp32 and rounded (emulated) on this CPU"),
        ("fp16 native", "cpu", "ran natively on this CPU"),
        ("fp16 native", "cuda:0", None),
        ("bf16 native", "cpu", None),
        (None, "cpu", None),
    ],
)
def test_fp16_on_a_cpu_is_remarked(make_record: MakeRecord, half: str | None, device: str, said: str | None) -> None:
    """Where fp16 ran on a CPU the reading warns that its times say nothing about a GPU, and nowhere else."""
    records = [make_record("fp32", 0, device=device), make_record("half", 0, half=half, device=device)]
    text = _reading(summarize(records, arms=["fp32", "half"], reference="fp32"))
    assert ("fp16 times here say nothing about a GPU" in text) == (said is not None)
    assert said is None or said in text
