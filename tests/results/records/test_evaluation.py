"""Evaluations of older records, which knew top-1 and top-5 alone, are read as those of any task."""

from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.evaluation import EpochResult
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
    summary = RunSummary.model_validate({"top1_final": 0.5, "top1_best": 0.6, "top5_final": 0.9, "ema_top1_final": 0.4})
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
    table = {"metric": "WER", "better": "lower", "unit": "points", "factor": 100.0, "decimals": 1, "references": ["a"]}
    base = {"command": "", "reference": "a", "seeds": [], "arms": [], "reading": [], "records": []}
    metric = Comparison.model_validate({**base, "judged": table}).metric
    assert (metric.name, metric.better, metric.head, metric.difference_unit) == ("WER", "lower", "WER", "pp")
    accuracy = Comparison.model_validate({**base, "judged": {**table, "metric": "top-1 %"}}).metric
    assert (accuracy.head, accuracy.difference_head) == ("top-1 %", "Δ top-1 (pp)")
