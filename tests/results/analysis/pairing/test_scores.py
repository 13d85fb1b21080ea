"""Verdicts, margins, limits and signs of learning for metrics that are no counts of images."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ampcompare.base.errors import ConfigError
from ampcompare.results.analysis.gates import gate_outcomes, parse_gate
from ampcompare.results.analysis.inference.effect import Effect
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.pairing.scores import effect_in_spacings, largest_common_spacing
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.evaluation import EpochResult, pack_sample_values
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord
from ampcompare.testing import make_comparison, make_record

BITS = Metric(
    name="bits per byte", better="lower", decimals=4, difference="log ratio", margin=0.01, over_samples="mean"
)
ERROR = Metric(name="RMSE", better="lower", decimals=3)
IOU = Metric(name="mean IoU", unit="%", factor=100.0, margin=0.5, highest=1.0)
FP32 = [2.100, 2.110, 2.095, 2.104, 2.099]
NOISE = [0.0011, -0.0017, 0.0006, 0.0013, -0.0012]


@pytest.fixture
def compared() -> Callable[..., Comparison]:
    """Compare half with fp32, by their final values, seed by seed."""

    def compare(
        metric: Metric, arm: Sequence[float], reference: Sequence[float] = FP32, *, terms: Terms | None = None,
        **values: Any,
    ) -> Comparison:  # fmt: skip
        records = [
            measured(make_record(name, seed), metric, value, **values)
            for name, side in (("fp32", reference), ("half", arm))
            for seed, value in enumerate(side)
        ]
        return summarize(records, arms=["fp32", "half"], reference="fp32", terms=terms)

    return compare


def measured(record: RunRecord, metric: Metric, value: float, **values: Any) -> RunRecord:
    """A run that reached this value of a metric."""
    epoch = EpochResult(
        **{
            "epoch": 0, "samples": 100, "values": {metric.name: value}, "train_seconds": 1.0, "eval_seconds": 0.1,
            **values,
        }
    )  # fmt: skip
    update = {"metric_final": value, "metric_best": value, "epochs": [epoch]}
    return record.model_copy(
        update={"metrics": [metric], "unit": "tokens", "summary": record.summary.model_copy(update=update)}
    )


def half(comparison: Comparison) -> ArmSummary:
    return comparison.arms[1]


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, "equivalent (±1 %)"), (0.98, "better"), (1.03, "worse"), (0.9995, "equivalent (±1 %)")],
)
def test_lower_is_better(compared: Any, factor: float, verdict: str) -> None:
    """Fewer bits are better, and the difference that is stored and shown keeps its own sign."""
    arm = [factor * value * (1 + noise) for value, noise in zip(FP32, NOISE, strict=True)]
    comparison = compared(BITS, arm)
    row = half(comparison)
    assert str(row.quality) == verdict
    logs = [math.log(one / other) for one, other in zip(arm, FP32, strict=True)]
    assert row.quality.effect == pytest.approx(float(np.mean(logs)))
    assert row.quality.low is not None
    assert row.quality.high is not None
    assert row.quality.low < row.quality.effect < row.quality.high
    assert row.metric_best == min(arm)
    assert comparison.margin == 1


def test_the_test_is_students_on_the_logarithms(compared: Any) -> None:
    """The interval of a ratio is that of scipy for the logarithms, without the floor of counts."""
    arm = [1.03 * value * (1 + noise) for value, noise in zip(FP32, NOISE, strict=True)]
    row = half(compared(BITS.model_copy(update={"difference": "ratio"}), arm))
    logs = np.log(np.array(arm) / np.array(FP32))
    bounds = stats.ttest_1samp(logs, 0).confidence_interval(row.quality.confidence)
    assert (row.quality.low, row.quality.high) == pytest.approx(tuple(np.expm1(bounds)))
    assert row.quality.effect == pytest.approx(math.expm1(float(logs.mean())))


def test_the_usual_margin_or_one_by_the_spread(compared: Any) -> None:
    """Auto takes the margin of the metric; without one two deviations over seeds, by their lower limit."""
    assert compared(IOU, [0.7, 0.71, 0.72], [0.7, 0.71, 0.72]).margin == 0.5
    by_spread = compared(ERROR, FP32, FP32)
    assert by_spread.margin_reason.startswith("2 sd over seeds of ")
    assert 0 < by_spread.margin < 2 * float(np.std(FP32, ddof=1))
    assert compared(ERROR, FP32[:2], FP32[:2]).margin == 0.021  # shown only: nothing is tested at two pairs


def test_a_share_of_errors_needs_errors(compared: Any) -> None:
    """10% is refused where nothing is right or wrong; where ratios are compared it is a percentage of the value."""
    with pytest.raises(
        ConfigError, match="share of the reference's errors, and mean IoU counts none; give a number"
    ):
        compared(IOU, [0.7] * 3, [0.7] * 3, terms=Terms(margin="10%"))
    assert compared(BITS, FP32, terms=Terms(margin="3%")).margin == 3
    assert compared(BITS, FP32, terms=Terms(margin=3)).margin == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_what_is_no_number_is_no_result(compared: Any, value: float) -> None:
    """A run that ends with NaN makes its arm one that learned nothing, or the reference none to compare with."""
    broken = half(compared(BITS, [value, *FP32[1:]]))
    assert str(broken.quality) == f"learned nothing in 1 of 5 pairs (bits per byte {value:.4f})"
    other = half(compared(BITS, FP32, [value, *FP32[1:]]))
    assert str(other.quality) == f"no verdict (the reference has bits per byte {value:.4f} in 1 of 5 pairs)"
    assert str(half(compared(BITS, [value] * 5)).quality) == f"learned nothing (bits per byte {value:.4f})"


def test_no_better_than_a_constant_guess(compared: Any) -> None:
    """A float is held against the chance itself, in its direction."""
    assert str(half(compared(BITS, [8.0] * 5, chance=8.0)).quality) == (
        "learned nothing (bits per byte 8.0000, chance 8.0000)"
    )
    assert str(half(compared(BITS, [7.9] * 5, chance=8.0)).quality) == "worse"
    assert str(half(compared(IOU, [0.05] * 3, [0.7] * 3, chance=0.05)).quality).startswith("learned nothing")
    wide = compared(BITS, FP32, chance=2.2, terms=Terms(margin=10))
    assert wide.headline[0].startswith(
        "No verdict counts at a margin of ±10 %: fp32 is only 4.5 % better than guessing"
    )


def test_results_of_single_samples(compared: Any) -> None:
    """A number for each sample gives the interval for new samples: wider where the samples differ."""
    draws = np.random.default_rng(0)

    def kept(means: Sequence[float], of_samples: float) -> list[Any]:
        apart = draws.normal(0, of_samples, 100)
        values = [mean + apart - apart.mean() for mean in means]
        return [pack_sample_values(value, np.arange(100)) for value in values]

    arm = [value * (1 + noise) for value, noise in zip(FP32, NOISE, strict=True)]
    found = {}
    for spread in (0.0, 0.3):
        comparison = compared(BITS, arm)
        packed = [*kept(FP32, 0.0), *kept(arm, spread)]
        records = [
            run.model_copy(update={"summary": run.summary.model_copy(update={"epochs": [
                run.summary.epochs[0].model_copy(update={"per_sample": its})]})})
            for run, its in zip(comparison.records, packed, strict=True)
        ]  # fmt: skip
        row = half(make_comparison(records, arms=["fp32", "half"]))
        assert row.samples is not None
        assert row.samples.models == []
        assert (row.samples.low, row.quality.low) != (None, None)
        found[spread] = (row.samples.high or 0) - (row.samples.low or 0)
        assert row.samples.holds is (spread == 0.0)
    assert found[0.3] > 5 * found[0.0]


def test_another_metric_is_another_experiment(compared: Any) -> None:
    """Runs of two tasks are refused in one table and as a baseline."""
    bits, iou = compared(BITS, FP32), compared(IOU, [0.7] * 3, [0.71] * 3)
    with pytest.raises(ConfigError, match="measured by mean IoU, not bits per byte: runs of another task"):
        make_comparison([*bits.records, *iou.records], arms=["fp32", "half"])
    with pytest.raises(
        ConfigError, match="the baseline is measured by mean IoU, and this comparison by bits per byte"
    ):
        gate_outcomes([parse_gate("metric>1", [BITS])], bits, iou)


@pytest.mark.parametrize(
    ("gate", "failure"),
    [
        ("metric>1", "bits per byte +3.00 %, and metric>1 fails"),
        ("bits per byte>1", "bits per byte +3.00 %, and bits per byte>1 fails"),
        ("bits_per_byte<-1", ""),
        ("metric:worse", "metric worse, and metric:worse fails"),
        ("bits per byte:better", "bits per byte worse, and bits per byte:better fails"),
    ],
)
def test_limits_on_a_metric(compared: Any, gate: str, failure: str) -> None:
    """A limit is in the unit of differences, by the metric's name or by the word metric."""
    comparison = compared(BITS, [1.03 * value for value in FP32])
    (check,) = gate_outcomes([parse_gate(gate, None)], comparison)
    assert check.failure == failure


@pytest.mark.parametrize(
    ("values", "printed", "step"),
    [
        ([94.0, 96.0, 92.0, 96.0], 0.01, 2.0),  # of 50 images, in percent
        ([0.94, 0.96, 0.92, 0.98], 1e-4, 0.02),
        ([94.17, 94.44, 93.89, 95.0], 0.01, 100 / 360),  # which no decimal step divides
        ([3.1, 3.2, 3.0], 0.1, 0.1),
        ([3.1, 3.1, 3.1], 0.1, 0.1),
        ([47.0, 48.0, 50.0], 1.0, 1.0),
        ([2 / 7, 3 / 7, 5 / 7], 1e-16, 1 / 7),  # logged as it is
        ([float(np.float32(k / 360)) for k in (339, 340, 338)], 1e-16, 1 / 360),
        ([], 0.1, 0.1),
    ],
)
def test_the_step_of_values(values: list[float], printed: float, step: float) -> None:
    """It is that of the digits, of a decimal grid, or of a share of samples."""
    assert largest_common_spacing(values, printed) == pytest.approx(step)


def test_values_that_scatter_have_no_coarse_step() -> None:
    """A step found by chance is small against the spread, so that it costs a test nothing."""
    generator = np.random.default_rng(0)
    for printed, digits in ((1e-4, 4), (1e-16, 17)):
        for _ in range(50):
            values = np.round(generator.normal(0.94, 0.01, 6), digits).tolist()
            assert largest_common_spacing(values, printed) < 0.002


def test_steps_count_where_they_are_coarse() -> None:
    assert effect_in_spacings(Effect(0.0, 1.0, 0.5, 2, 3), 0.5).step == 0.5
    assert effect_in_spacings(Effect(0.0, 1.0, 0.5, 2, 3), 0.1).step is None
