"""Verdicts on tables of others: the published example, pairs and samples, settings, and references."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest
from scipy import stats

from ampcompare.base.errors import ConfigError
from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.tables.csv_table import TableOptions, read_table
from ampcompare.runs.analysis.tables.external import EXAMPLE_SD, example_table, judge
from ampcompare.runs.records.comparison import ArmSummary, Comparison, JudgedTable
from ampcompare.runs.records.metric import Metric
from ampcompare.runs.report.comparison import _paired

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
    assert _row(comparison, "apex:O1").metric_difference == pytest.approx(-0.0013)
    why = "fewer than 3 seeds" if sd is None else "≤"
    assert _row(comparison, "apex:O1").accuracy_verdict.startswith(f"inconclusive ({why}")
    assert _row(comparison, "apex:O2").accuracy_verdict.startswith(f"inconclusive ({why}")
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
    """Runs with seeds in common give the interval of the paired t test, to which the rounding of digits adds little."""
    row = _row(judge(read_table(_table(ARM, REFERENCE), "t")), "half")
    low, high = stats.ttest_rel(ARM, REFERENCE).confidence_interval(0.95)
    assert (row.accuracy_verdict, row.pairs) == ("worse", 4)
    assert (100 * (row.metric_difference_low or 0), 100 * (row.metric_difference_high or 0)) == pytest.approx(
        (low, high), rel=3e-3
    )


def test_word_and_interval_agree() -> None:
    """`equivalent` stands with an interval inside the margin, and arms of other settings do not widen it."""
    lines = ["arm,seed,accuracy,gpus"]
    for seed, (here, there) in enumerate([(76.2, 76.3), (76.5, 76.3), (76.1, 76.35), (76.4, 76.2)]):
        lines += [f"fp32,{seed},{there},1", f"half,{seed},{here},1", f"other,{seed},{here - 3 * seed},8"]
    comparison = judge(read_table("\n".join(lines), "t"))
    row = _row(comparison, "half")
    assert row.accuracy_verdict == "equivalent (±0.5)"
    assert row.metric_difference_confidence == pytest.approx(0.9)
    assert -0.005 < (row.metric_difference_low or -1) < (row.metric_difference_high or 1) < 0.005
    other = _row(comparison, "other")
    assert other.accuracy_verdict == "not comparable (gpus 8, not 1)"
    assert other.metric_difference_low is None


def test_runs_without_seeds_are_two_samples() -> None:
    """Without seeds the interval is Welch's, for samples of any size."""
    row = _row(judge(read_table(_table(ARM[:3], REFERENCE, seeds=False), "t")), "half")
    low, high = stats.ttest_ind(ARM[:3], REFERENCE, equal_var=False).confidence_interval(0.95)
    assert row.accuracy_verdict == "worse"
    assert (100 * (row.metric_difference_low or 0), 100 * (row.metric_difference_high or 0)) == pytest.approx(
        (low, high), rel=3e-3
    )


def test_one_run_per_arm_names_no_winner() -> None:
    """A single run each tells nothing without a spread, however far apart they are."""
    row = _row(judge(read_table("arm,accuracy,time\nfp32,75,100\nhalf,25,50\n", "t")), "half")
    assert (row.accuracy_verdict, row.time_verdict) == ("inconclusive (fewer than 3 seeds)",) * 2
    assert row.time_ratio == pytest.approx(0.5)


def test_times_and_memory() -> None:
    """Times are compared by their ratio over pairs, memory by its exact difference."""
    lines = ["arm,seed,accuracy,time,memory"]
    for seed in range(4):
        lines += [f"fp32,{seed},75.{seed},{100 + seed},2000", f"half,{seed},75.{seed},{60 + seed / 2},1500"]
    row = _row(judge(read_table("\n".join(lines), "t")), "half")
    assert (row.accuracy_verdict, row.time_verdict) == ("equivalent (±0.5)", "better")
    assert row.memory_difference == -500 * 2**20
    assert judge(read_table("\n".join(lines), "t")).headline[0].startswith("Use half: ")


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
    assert _row(judge(table, terms=Criteria(margin=0.1)), "half").accuracy_verdict.startswith("inconclusive")


def _runs(arm: str, values: list[float | str]) -> str:
    return "".join(f"{arm},{value}\n" for value in values)


def test_a_percent_sign_is_no_digit() -> None:
    """Three runs of 76.1% have the interval of three runs of 76.1, at least the rounding error of both means."""
    plain, signed = (
        _row(judge(read_table("arm,accuracy\n" + _runs("fp32", [text] * 3) + _runs("amp", [text] * 3), "t")), "amp")
        for text in ("76.1", "76.1%")
    )
    assert signed == plain
    assert (signed.metric_difference_high or 0) * 100 > 0.1 / 6**0.5


@pytest.mark.parametrize("count", [3, 10, 100])
def test_whole_points_are_no_proof_of_equality(count: int) -> None:
    """Equal whole points leave a point of room, however many they are and whatever else stands in the table."""
    text = "arm,accuracy\n" + _runs("fp32", [76] * count) + _runs("amp", [76] * count)
    for more in ("", "other,70.1234\n"):
        row = _row(judge(read_table(text + more, "t")), "amp")
        assert row.accuracy_verdict == "inconclusive (the figures are rounded)"
        assert (row.metric_difference_high or 0) > 0.005


def test_few_seeds_in_common_throw_no_runs_away() -> None:
    """Ten runs each with one seed in common are compared as two samples, and the output says so."""
    arm, reference = [73 + n % 3 / 10 for n in range(10)], [75 + n % 4 / 10 for n in range(10)]
    text = "arm,seed,accuracy\n" + "".join(f"fp32,{n},{value}\n" for n, value in enumerate(reference))
    text += "".join(f"amp,{n},{value}\n" for n, value in enumerate(arm, 9))
    comparison = judge(read_table(text, "t"))
    low, high = stats.ttest_ind(arm, reference, equal_var=False).confidence_interval(0.95)
    row = _row(comparison, "amp")
    assert (row.accuracy_verdict, row.pairs) == ("worse", 10)
    assert (100 * (row.metric_difference_low or 0), 100 * (row.metric_difference_high or 0)) == pytest.approx(
        (low, high), rel=3e-3
    )
    assert "amp is compared by Welch's test, for only 1 seed is in common." in comparison.reading


def test_most_seeds_in_common_are_paired() -> None:
    """Four seeds of five in common are pairs, and the runs that are left out are counted."""
    text = "arm,seed,accuracy\n" + "".join(
        f"fp32,{n},{75 + n % 3 / 10}\namp,{n + 1},{74 + n % 2 / 10}\n" for n in range(5)
    )
    comparison = judge(read_table(text, "t"))
    assert _row(comparison, "amp").pairs == 4
    assert "amp is paired by seed; runs left out without a partner: 2." in comparison.reading


def test_a_spread_that_the_runs_contradict_is_not_used() -> None:
    """Two runs each that scatter by 0.6 points are not judged by a standard deviation of 0.05, which is said."""
    table = read_table("arm,accuracy\nfp32,75.0\nfp32,75.85\namp,74.0\namp,73.15\n", "t")
    comparison = judge(table, sd=0.05)
    assert _row(comparison, "amp").accuracy_verdict.startswith("inconclusive")
    assert "amp is not compared by --sd 0.05: its runs and those of the reference have 0.601." in comparison.reading
    assert comparison.judged is not None
    assert comparison.judged.sd is None
    assert _row(judge(table, sd=0.6), "amp").accuracy_verdict == "worse"


def test_a_spread_that_is_not_used_is_said() -> None:
    """With three runs each their own spread counts, and the given one is not among the terms."""
    table = read_table("arm,accuracy\n" + _runs("fp32", [75.0, 75.2, 75.4]) + _runs("amp", [75.1, 75.2, 75.4]), "t")
    comparison = judge(table, sd=5)
    assert comparison.judged is not None
    assert comparison.judged.sd is None
    assert any(line.startswith("--sd 5 is not used") for line in comparison.reading)
    assert judge(table).arms == comparison.arms


@pytest.mark.parametrize("name", ["FP32", "Fp32", "float32", "single precision"])
def test_names_in_any_case(name: str) -> None:
    """Full precision is the reference in any case, and arms are the same in any case."""
    text = f"arm,accuracy\nAMP,75.1\n{name},75.3\namp,75.2\n"
    assert judge(read_table(text, "t")).reference == name
    assert [row.completed for row in judge(read_table(text, "t"), reference="amp").arms] == [2, 1]


def test_lower_is_better() -> None:
    """Of an error rate less is better: the difference keeps its sign, the verdict does not follow it."""
    text = "arm,wer,sd,n\nfp32,4.25,0.06,6\namp,4.05,0.06,6\n"
    row = _row(judge(read_table(text, "t"), terms=Criteria(margin=0.1)), "amp")
    assert row.accuracy_verdict == "better"
    assert row.metric_difference == pytest.approx(-0.002)
    assert (row.metric_difference_low or 0) < (row.metric_difference_high or 0) < 0
    upward = read_table(text, "t", TableOptions(better="higher"))
    assert _row(judge(upward, terms=Criteria(margin=0.1)), "amp").accuracy_verdict == "worse"


def test_a_metric_without_a_usual_margin_needs_one() -> None:
    """Nobody knows which difference of an unknown metric does not matter."""
    table = read_table("arm,elo\na,1500\nb,1510\n", "t", TableOptions(metric="elo"))
    with pytest.raises(ConfigError, match="elo has no usual margin; give --margin"):
        judge(table)
    comparison = judge(table, terms=Criteria(margin=5))
    assert comparison.judged == JudgedTable(references=["a"], independent=["b"])
    assert comparison.metric == Metric(name="elo", decimals=0)


def test_lines_of_means_are_pooled() -> None:
    """Means of three and of five runs with their deviations are one sample of eight runs."""
    arm = [70.1, 70.5, 69.8, 70.9, 70.3, 70.2, 70.6, 70.4]
    parts = [arm[:3], arm[3:]]
    lines = [f"amp,{fmean(part):.9f},{stdev(part):.9f},{len(part)}\n" for part in parts]
    text = "arm,mean,sd,n\n" + "".join(lines) + "fp32,75,0.3,4\n"
    row = _row(judge(read_table(text, "t")), "amp")
    assert row.completed == 8
    assert (100 * (row.metric_mean or 0), 100 * (row.metric_sd or 0)) == pytest.approx((fmean(arm), stdev(arm)))
    p = stats.ttest_ind_from_stats(fmean(arm), stdev(arm), 8, 75, 0.3, 4, equal_var=False)
    assert p.pvalue < 0.05
    assert row.accuracy_verdict == "worse"


def test_settings_are_named_or_known() -> None:
    """Unknown numbers are not judged and no settings, unless the caller says so; text is a setting."""
    text = "arm,accuracy,hidden,augmentation\nfp32,75,128,mixup\namp,75,256,mixup\n"
    assert _row(judge(read_table(text, "t")), "amp").accuracy_verdict.startswith("inconclusive")
    named = read_table(text, "t", TableOptions(settings=("Hidden",)))
    assert _row(judge(named), "amp").accuracy_verdict == "not comparable (hidden 256, not 128)"
    other = read_table(text.replace("256,mixup", "256,none"), "t")
    assert _row(judge(other), "amp").accuracy_verdict == "not comparable (augmentation none, not mixup)"
    with pytest.raises(ConfigError, match="no column 'depth' for --setting"):
        read_table(text, "t", TableOptions(settings=("depth",)))


def test_equal_settings_in_other_digits() -> None:
    """A learning rate of 1.0 is one of 1, and names of settings have any case."""
    text = "arm,accuracy,lr,machine\nfp32,75,1.0,DGX\namp,75,1,dgx\n"
    assert _row(judge(read_table(text, "t")), "amp").accuracy_verdict.startswith("inconclusive")


def test_blocks_that_can_be_tested_alone() -> None:
    """The mean over blocks of several runs each has the error of its parts, not that of the blocks' difference."""
    text = "arm,gpus,accuracy\n"
    for gpus, shift in ((1, 0.0), (8, 3.0)):
        for n in range(5):
            text += f"fp32,{gpus},{75 + n / 10}\namp,{gpus},{75 + shift + n / 10}\n"
    comparison = judge(read_table(text, "t"), within=("gpus",))
    row = _row(comparison, "amp")
    assert row.metric_difference == pytest.approx(0.015)
    assert (row.accuracy_verdict, row.pairs) == ("better", 10)
    assert _row(comparison, "amp gpus=1").accuracy_verdict == "equivalent (±0.5)"


def test_the_memory_over_blocks_is_that_of_the_same_blocks() -> None:
    """The largest peak of an arm over all blocks is compared with the reference's largest, not with its first."""
    text = "arm,gpus,accuracy,memory\n" + "".join(
        f"fp32,{gpus},75.1,{gpus * 1000}\namp,{gpus},75.1,{gpus * 800}\n" for gpus in (1, 2, 4)
    )
    row = _row(judge(read_table(text, "t"), within=("gpus",)), "amp")
    assert (row.peak_bytes, row.memory_difference) == (3200 * 2**20, -800 * 2**20)


def test_a_block_without_the_reference() -> None:
    """Arms of a block that has no reference are not comparable, and are left out of the mean over blocks."""
    text = "arm,gpus,accuracy\n" + "".join(f"fp32,{g},75.{g}\namp,{g},75.{g}\n" for g in (1, 2, 4)) + "amp,8,90\n"
    comparison = judge(read_table(text, "t"), within=("gpus",))
    assert _row(comparison, "amp gpus=8").accuracy_verdict == "not comparable (no fp32 with it)"
    assert _row(comparison, "amp").metric_difference == 0
    with pytest.raises(ConfigError, match="no setting 'nodes' to compare within; its settings are gpus"):
        judge(read_table(text, "t"), within=("nodes",))


def test_what_is_not_paired_is_not_called_paired() -> None:
    """Seeds without a partner, and means of runs, are independent samples; others are pairs."""
    apart = [f"fp32,{seed},{76 + seed / 10}\nO2,{seed + 10},{76.1 + seed / 10}" for seed in range(4)]
    for text, expected in (
        ("arm,seed,top1\n" + "\n".join(apart), ["O2"]),
        ("arm,top1,sd,n\nfp32,76.1,0.3,5\nO2,76.0,0.3,5", ["O2"]),
        ("arm,seed,top1\n" + "\n".join(apart).replace(",1", ","), []),
    ):
        comparison = judge(read_table(text, "table", TableOptions()))
        assert comparison.judged is not None
        assert comparison.judged.independent == expected
        assert ("as independent samples" in _paired(comparison)) == bool(expected)


def test_invisible_characters_do_not_make_another_arm() -> None:
    """A zero-width space, as copied from a page, makes two arms of the same look."""
    rows = "\n".join(
        f"fp32,{seed},{76 + seed / 10}\nO2{chr(0x200B) * (seed % 2)},{seed},76.{seed}" for seed in range(4)
    )
    assert {run.arm for run in read_table(f"arm,seed,top1\n{rows}", "table", TableOptions()).runs} == {"fp32", "O2"}
