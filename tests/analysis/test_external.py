"""Verdicts on tables of others: the published example, pairs and samples, settings, and references."""

from __future__ import annotations

import pytest
from scipy import stats

from ampcompare.analysis.criteria import Criteria
from ampcompare.analysis.csv_table import read_table
from ampcompare.analysis.external import EXAMPLE_SD, example_table, judge
from ampcompare.errors import ConfigError
from ampcompare.records.comparison import ArmSummary, Comparison

ARM, REFERENCE = [70.1, 70.5, 69.8, 70.9], [74.9, 75.2, 75.3, 74.6]


def _row(comparison: Comparison, arm: str) -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == arm)


def _table(arm: list[float], reference: list[float], seeds: bool = True) -> str:
    lines = ["arm,seed,accuracy"]
    for name, values in (("fp32", reference), ("half", arm)):
        lines += [f"{name},{number if seeds else ''},{value}" for number, value in enumerate(values)]
    return "\n".join(lines)


@pytest.mark.parametrize("sd", [None, EXAMPLE_SD, 0.16])
def test_the_published_table(sd: float | None) -> None:
    """75.79 against 75.92 cannot be told apart, given the published spread or none; the NaN rows are divergence."""
    comparison = judge(example_table(), sd=sd)
    assert comparison.reference == "native:fp16"
    assert _row(comparison, "apex:O1").top1_difference == pytest.approx(-0.0013)
    why = "fewer than 3 pairs" if sd is None else "at most "
    assert _row(comparison, "apex:O1").accuracy_verdict.startswith(f"cannot tell ({why}")
    assert _row(comparison, "apex:O2").accuracy_verdict.startswith(f"cannot tell ({why}")
    assert _row(comparison, "apex:O3").accuracy_verdict == "diverged 1/1"
    diverged = [row.arm for row in comparison.arms if row.accuracy_verdict == "diverged 1/1"]
    assert diverged == ["apex:O3", "half:bn_fp32 batch=2048 lr=0.8", "half:bn_fp32 batch=4096 lr=1.6"]
    other = _row(comparison, "half:bn_fp32 batch=256 lr=0.1")
    assert other.accuracy_verdict == "not comparable (batch 256, not 4096; lr 0.1, not 1.6)"
    assert not any("better" in row.accuracy_verdict + row.time_verdict for row in comparison.arms)


def test_a_small_spread_tells_more() -> None:
    """At the smallest published spread the same difference is known to lie within half a point."""
    assert _row(judge(example_table(), sd=0.04), "apex:O1").accuracy_verdict == "equivalent (±0.5)"


def test_equal_seeds_are_paired() -> None:
    """Runs with seeds in common give the interval of the paired t test."""
    row = _row(judge(read_table(_table(ARM, REFERENCE), "t")), "half")
    low, high = stats.ttest_rel(ARM, REFERENCE).confidence_interval(0.95)
    assert (row.accuracy_verdict, row.pairs) == ("inferior", 4)
    assert (100 * (row.top1_difference_low or 0), 100 * (row.top1_difference_high or 0)) == pytest.approx((low, high))


def test_word_and_interval_agree() -> None:
    """`equivalent` stands with an interval inside the margin, and arms of other settings do not widen it."""
    lines = ["arm,seed,accuracy,gpus"]
    for seed, (here, there) in enumerate([(76.2, 76.3), (76.5, 76.3), (76.1, 76.35), (76.4, 76.2)]):
        lines += [f"fp32,{seed},{there},1", f"half,{seed},{here},1", f"other,{seed},{here - 3 * seed},8"]
    comparison = judge(read_table("\n".join(lines), "t"))
    row = _row(comparison, "half")
    assert row.accuracy_verdict == "equivalent (±0.5)"
    assert row.top1_difference_confidence == pytest.approx(0.9)
    assert -0.005 < (row.top1_difference_low or -1) < (row.top1_difference_high or 1) < 0.005
    other = _row(comparison, "other")
    assert other.accuracy_verdict == "not comparable (gpus 8, not 1)"
    assert other.top1_difference_low is None


def test_runs_without_seeds_are_two_samples() -> None:
    """Without seeds the interval is Welch's, for samples of any size."""
    row = _row(judge(read_table(_table(ARM[:3], REFERENCE, seeds=False), "t")), "half")
    low, high = stats.ttest_ind(ARM[:3], REFERENCE, equal_var=False).confidence_interval(0.95)
    assert row.accuracy_verdict == "inferior"
    assert (100 * (row.top1_difference_low or 0), 100 * (row.top1_difference_high or 0)) == pytest.approx((low, high))


def test_one_run_per_arm_names_no_winner() -> None:
    """A single run each tells nothing without a spread, however far apart they are."""
    row = _row(judge(read_table("arm,accuracy,time\nfp32,75,100\nhalf,25,50\n", "t")), "half")
    assert (row.accuracy_verdict, row.time_verdict) == ("cannot tell (fewer than 3 pairs)",) * 2
    assert row.time_ratio == pytest.approx(0.5)


def test_times_and_memory() -> None:
    """Times are compared by their ratio over pairs, memory by its exact difference."""
    lines = ["arm,seed,accuracy,time,memory"]
    for seed in range(4):
        lines += [f"fp32,{seed},75.{seed},{100 + seed},2000", f"half,{seed},75.{seed},{60 + seed / 2},1500"]
    row = _row(judge(read_table("\n".join(lines), "t")), "half")
    assert (row.accuracy_verdict, row.time_verdict) == ("equivalent (±0.5)", "better")
    assert row.memory_difference == -500 * 2**20
    assert judge(read_table("\n".join(lines), "t")).reading[0].startswith("Recommended for time: half")


def test_the_reference_can_be_chosen() -> None:
    """Any arm can be the reference, by name or, with its settings, by label."""
    comparison = judge(example_table(), reference="half:bn_fp32 batch=512 lr=0.2")
    assert _row(comparison, "half:bn_fp32 batch=512 lr=0.2").accuracy_verdict == ""
    with pytest.raises(ConfigError, match="several arms are 'half:bn_fp32'; choose one of 'half:bn_fp32 batch=256"):
        judge(example_table(), reference="half:bn_fp32")
    with pytest.raises(ConfigError, match="there is no arm 'fp64'"):
        judge(example_table(), reference="fp64")


@pytest.mark.parametrize("sd", [0.0, -1.0, float("nan")])
def test_a_spread_is_a_positive_number(sd: float) -> None:
    """A spread of nothing would make every difference certain."""
    with pytest.raises(ConfigError, match="spread"):
        judge(example_table(), sd=sd)


def test_the_margin_counts() -> None:
    """The same pairs are equivalent by a wide margin and unclear by a narrow one."""
    table = read_table(_table([75.1, 74.9, 75.0], [75.0, 75.0, 74.9]), "t")
    assert _row(judge(table, terms=Criteria(margin=1)), "half").accuracy_verdict == "equivalent (±1)"
    assert _row(judge(table, terms=Criteria(margin=0.1)), "half").accuracy_verdict.startswith("cannot tell")
