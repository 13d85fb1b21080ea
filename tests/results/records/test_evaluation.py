"""Results of single samples; evaluations of older records, which knew top-1 and top-5 alone, are those of any task."""

import math
from typing import Any

import numpy as np
import pytest

from ampcompare.base.errors import RecordError
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.evaluation import EpochResult, pack_right_samples, unpack_samples
from ampcompare.results.records.run import RunSummary

TIMES = {"train_seconds": 1.0, "eval_seconds": 0.1}
BITS = {"bits": "8A==", "sha256": "0", "labels_sha256": "1"}


def test_counts_become_values() -> None:
    """Each count is kept, and its share is the value; the largest class is the chance."""
    old = {"epoch": 1, "samples": 8, "top1_correct": 4, "top5_correct": 6, "ema_top1_correct": 5, "ema_top5_correct": 7,
           "majority_correct": 2, "loss": "nan", "images": BITS, **TIMES}  # fmt: skip
    result = EpochResult.model_validate(old)
    assert (result.values, result.counts) == ({"top-1": 0.5, "top-5": 0.75}, {"top-1": 4, "top-5": 6})
    assert (result.value, result.ema_value, result.chance) == (0.5, 0.625, 0.25)
    assert result.per_sample is not None
    assert (result.per_sample.bits, result.per_sample.values) == ("8A==", None)
    assert EpochResult.model_validate_json(result.model_dump_json()).values == result.values


def test_a_summary_of_top1_is_one_of_the_metric() -> None:
    """The first metric is top-1, and top-5 is another one."""
    summary = RunSummary.model_validate(
        {"top1_final": 0.5, "top1_best": 0.6, "top5_final": 0.9, "ema_top1_final": 0.4}
    )
    assert (summary.metric_final, summary.metric_best, summary.ema_metric_final) == (0.5, 0.6, 0.4)
    assert summary.others_final == {"top-5": 0.9}


def test_rows_of_older_reports() -> None:
    """Fields of top-1 are those of the metric, and images are samples."""
    row = {"arm": "half", "engine": None, "half": None, "lr": 0.1, "seeds": [0], "completed": 1, "diverged": 0,
           "failed": 0, "top1_mean": 0.5, "top1_difference": -0.01, "top1_correlation": 0.9,
           "images": {"images": 360, "low": -0.1, "high": 0.1}}  # fmt: skip
    summary = ArmSummary.model_validate(row)
    assert (summary.metric_mean, summary.quality.effect, summary.metric_correlation) == (0.5, -0.01, 0.9)
    assert summary.samples is not None
    assert (summary.samples.samples, summary.samples.low) == (360, -0.1)


def test_a_judged_table_of_an_older_report() -> None:
    """What said of itself how its figures are shown is a metric of the comparison."""
    table = {
        "metric": "WER",
        "better": "lower",
        "unit": "points",
        "factor": 100.0,
        "decimals": 1,
        "references": ["a"],
    }
    base = {"command": "", "reference": "a", "seeds": [], "arms": [], "reading": [], "records": []}
    metric = Comparison.model_validate({**base, "judged": table}).metric
    assert (metric.name, metric.better, metric.column_head, metric.difference_unit) == (
        "WER",
        "lower",
        "WER",
        "pp",
    )
    accuracy = Comparison.model_validate({**base, "judged": {**table, "metric": "top-1 %"}}).metric
    assert (accuracy.column_head, accuracy.difference_column_head) == ("top-1 %", "Δ top-1 (pp)")


def result(correct: Any, **changes: Any) -> EpochResult:
    """An evaluation of ten classes with these images correct."""
    images = pack_right_samples(correct, np.arange(len(correct)) % 10).model_copy(update=changes)
    return EpochResult(
        epoch=0, samples=len(correct), top1_correct=int(correct.sum()), top5_correct=len(correct), loss=1.0,
        train_seconds=1.0, eval_seconds=1.0, per_sample=images,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 7, 8, 9, 360])
def test_bits_come_back(count: int) -> None:
    """Any number of images survives packing and JSON, one bit each."""
    correct = np.random.default_rng(count).random(count) < 0.7
    stored = EpochResult.model_validate_json(result(correct).model_dump_json())
    unpacked = unpack_samples(stored)
    assert unpacked is not None
    assert unpacked.tolist() == correct.tolist()
    assert stored.per_sample is not None
    assert len(stored.per_sample.bits) == 4 * math.ceil(math.ceil(count / 8) / 3)


def test_the_hash_of_labels_knows_their_order() -> None:
    """Equal labels have equal hashes in any integer type; another order has another."""
    correct = np.ones(6, dtype=bool)
    labels = np.array([3, 1, 2, 2, 0, 1], dtype=np.int32)
    there = pack_right_samples(correct, labels).labels_sha256
    assert there == pack_right_samples(correct, labels.astype(np.int64)).labels_sha256
    assert there != pack_right_samples(correct, labels[::-1]).labels_sha256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": "AAA*"}, "they are not base64"),
        ({"bits": "é"}, "they are not base64"),
        ({"bits": "AAAA"}, "their hash is another than the recorded one"),
        ({"sha256": "0" * 64}, "their hash is another than the recorded one"),
    ],
)
def test_damaged_bits_are_refused(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        unpack_samples(result(np.arange(10) < 6, **changes))
