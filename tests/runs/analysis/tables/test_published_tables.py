"""Tables that NVIDIA and OpenMMLab publish, in their own figures, and the words that they allow.

Sources: DeepLearningExamples, `resnet50v1.5/README.md` (top-1), `GNMT/README.md` (DGX-1), `DLRM/README.md` (stability
test, and throughput of ResNet-50); mmclassification, `configs/fp16/README.md` and the model zoo of ResNet-50.
"""

from __future__ import annotations

import pytest
from scipy import stats

from ampcompare.runs.analysis.inference.criteria import Criteria
from ampcompare.runs.analysis.tables.csv_table import TableOptions, read_table
from ampcompare.runs.analysis.tables.external import judge
from ampcompare.runs.records.comparison import ArmSummary, Comparison

RESNET = """arm,machine,epochs,Top1
AMP,DGX-1,90,76.88 ± 0.16
FP32,DGX-1,90,77.01 ± 0.16
AMP,DGX-1,250,78.25 +/- 0.12
FP32,DGX-1,250,78.30 +/- 0.16
AMP,DGX-2,50,75.81 +/- 0.08
FP32,DGX-2,50,76.04 +/- 0.05
AMP,DGX-2,90,77.10(6)
FP32,DGX-2,90,77.23(4)
AMP,DGX-2,250,78.59 (0.13)
FP32,DGX-2,250,78.46 (0.03)
"""
GNMT = """math,gpus,BLEU,training time,throughput
fp16,1,24.59,264.4 minutes,66050
fp32,1,24.71,824.4m,21346
fp16,4,24.30,89.5 minutes,196174
fp32,4,24.45,230.8 minutes,76083
fp16,8,24.45,46.2 minutes,387282
fp32,8,24.48,116.6 minutes,153697
"""
MMCLS = """| Model | Params(M) | Flops(G) | Mem (GB) | Top-1 (%) | Top-5 (%) |
|:-----:|:---------:|:--------:|:--------:|:---------:|:---------:|
| ResNet-50 | 25.56 | 4.12 | 3.5 | 76.55 | 93.06 |
| ResNet-50 (fp16) | 25.56 | 4.12 | 1.9 | **76.30** | 93.07 |
"""
AUC_MIXED = [
    *(0.803696, 0.803617, 0.803672, 0.803699, 0.803659, 0.803578, 0.803609, 0.803585),
    *(0.803553, 0.803644, 0.803656, 0.803589, 0.803567, 0.803548, 0.803532, 0.803625),
]
AUC_SINGLE = [
    *(0.803669, 0.803574, 0.80367, 0.803683, 0.803724, 0.803565, 0.803613, 0.803615),
    *(0.803583, 0.803688, 0.803609, 0.803635, 0.803611, 0.803487, 0.803591, 0.803601),
]
THROUGHPUT = """arm,GPUs,throughput,training time
FP32,1,367 img/s,~92 hours
AMP,1,1200 img/s,~29 hours
FP32,8,2855 img/s,~12 hours
AMP,8,8322 img/s,~5 hours
"""


def _judge(text: str, within: tuple[str, ...] = (), margin: float | str = "auto", **options: object) -> Comparison:
    table = read_table(text, "t", TableOptions(settings=within))
    return judge(table, within=within, terms=Criteria(margin), **options)  # type: ignore[arg-type]


def _row(comparison: Comparison, arm: str) -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == arm)


def test_resnet50_means_and_deviations() -> None:
    """Of means and standard deviations Welch says that AMP is within half a point of FP32 in every block."""
    comparison = _judge(RESNET, ("machine", "epochs"), runs=5)
    inside = [row for row in comparison.arms if row.arm.startswith("AMP ")]
    assert [row.accuracy_verdict for row in inside] == ["equivalent (±0.5)"] * 5
    assert _row(comparison, "AMP").accuracy_verdict == "equivalent (±0.5)"
    assert "Numbers after ± or in brackets are read as the standard deviation over runs." in comparison.reading


def test_resnet50_by_a_narrow_margin() -> None:
    """Alone and by a margin of 0.2 points, 50 epochs on the DGX-2 lose accuracy, as scipy's Welch test says."""
    lines = [line for line in RESNET.splitlines() if line.startswith("arm") or "DGX-2,50," in line]
    row = _row(_judge("\n".join(lines), margin=0.2, runs=3), "AMP")
    expected = stats.ttest_ind_from_stats(75.81, 0.08, 3, 76.04, 0.05, 3, equal_var=False)
    assert expected.pvalue < 0.05
    assert row.accuracy_verdict == "worse"
    freedom = (0.08**2 / 3 + 0.05**2 / 3) ** 2 / ((0.08**2 / 3) ** 2 / 2 + (0.05**2 / 3) ** 2 / 2)
    half = stats.t.ppf(0.975, freedom) * (0.08**2 / 3 + 0.05**2 / 3) ** 0.5
    assert row.metric_difference_low == pytest.approx((-0.23 - half) / 100)
    assert row.metric_difference_high == pytest.approx((-0.23 + half) / 100)


def test_resnet50_without_a_number_of_runs() -> None:
    """A standard deviation of nobody knows how many runs gives no verdict, and the output says what is missing."""
    comparison = _judge(RESNET, ("machine", "epochs"))
    assert _row(comparison, "AMP machine=DGX-1 epochs=90").accuracy_verdict == "inconclusive (number of runs unknown)"
    assert any("add a column n, or give --runs" in line for line in comparison.reading)


def test_gnmt_inside_each_number_of_gpus() -> None:
    """One run of each arm at 1, 4 and 8 GPUs: alone they tell nothing, as pairs BLEU is equivalent and AMP faster."""
    comparison = _judge(GNMT, ("gpus",))
    row = _row(comparison, "fp16")
    low, high = stats.ttest_1samp([-0.12, -0.15, -0.03], 0).confidence_interval(0.9)
    assert (row.accuracy_verdict, row.time_verdict, row.pairs) == ("equivalent (±0.5)", "better", 3)
    assert (100 * (row.metric_difference_low or 0), 100 * (row.metric_difference_high or 0)) == pytest.approx(
        (low, high)
    )
    assert row.time_ratio == pytest.approx((264.4 / 824.4 * 89.5 / 230.8 * 46.2 / 116.6) ** (1 / 3))
    assert _row(comparison, "fp16 gpus=4").accuracy_verdict.startswith("inconclusive")
    assert comparison.judged is not None
    assert (comparison.metric.name, comparison.judged.references[0]) == ("BLEU", "fp32")


def test_gnmt_without_blocks() -> None:
    """Without blocks other numbers of GPUs are not comparable, and the output names the option that helps."""
    comparison = _judge(GNMT)
    assert _row(comparison, "fp16 gpus=4").accuracy_verdict == "not comparable (gpus 4, not 1)"
    assert any("--within gpus" in line for line in comparison.reading)


def test_mmcls_top5_and_memory_are_no_settings() -> None:
    """Another top-5 and another memory do not make rows incomparable; sizes are in the unit of the head."""
    comparison = _judge(MMCLS)
    row = _row(comparison, "ResNet-50 (fp16)")
    assert row.accuracy_verdict.startswith("inconclusive")
    assert row.memory_difference == pytest.approx(-1.6e9)
    assert any(line.startswith("Not judged: params, flops, top-5.") for line in comparison.reading)
    assert _row(_judge(MMCLS, margin=1, sd=0.18), "ResNet-50 (fp16)").accuracy_verdict == "equivalent (±1)"


def test_dlrm_auc() -> None:
    """Sixteen seeds of AUC are equivalent by 0.001, what counts there, and unclear by a hundredth of it."""
    lines = ["arm,seed,AUC"]
    for seed, (mixed, single) in enumerate(zip(AUC_MIXED, AUC_SINGLE, strict=True), 8):
        lines += [f"mixed,{seed},{mixed}", f"FP32,{seed},{single}"]
    row = _row(_judge("\n".join(lines)), "mixed")
    expected = stats.ttest_rel(AUC_MIXED, AUC_SINGLE).confidence_interval(0.9)
    assert row.accuracy_verdict == "equivalent (±0.001)"
    assert (row.metric_difference_low, row.metric_difference_high) == pytest.approx(
        (expected.low, expected.high), rel=1e-3
    )
    assert _row(_judge("\n".join(lines), margin=1e-5), "mixed").accuracy_verdict.startswith("inconclusive")
    single = _judge("arm,AUC\nFP32,0.8025\nmixed,0.8026\n")
    assert _row(single, "mixed").accuracy_verdict.startswith("inconclusive")


def test_resnet50_throughput() -> None:
    """A throughput is a time ratio, and a table without any accuracy has verdicts on time."""
    lines = [line.rpartition(",")[0] for line in THROUGHPUT.splitlines()]
    comparison = _judge("\n".join(lines), ("gpus",))
    assert _row(comparison, "AMP gpus=8").time_ratio == pytest.approx(2855 / 8322)
    assert _row(comparison, "AMP gpus=8").accuracy_verdict == ""
    with_times = _judge(THROUGHPUT, ("gpus",))
    assert _row(with_times, "AMP gpus=8").time_ratio == pytest.approx(5 / 12)
    assert any(line.startswith("Not judged: throughput") for line in with_times.reading)
