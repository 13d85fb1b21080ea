"""Known metrics of result tables: which direction is better, their unit, and a usual margin."""

from __future__ import annotations

import re
from typing import Literal

from ampcompare.records.metric import TOP1, Metric

__all__ = ["ACCURACY", "Better", "in_shares", "is_measurement", "is_percentage", "known_metric"]

Better = Literal["higher", "lower"]
ACCURACY = TOP1


def _percentage(name: str, better: Better = "higher", *, margin: float, highest: float | None = 1.0) -> Metric:
    return Metric(name=name, better=better, factor=100.0, margin=margin, highest=highest)


def _number(name: str, better: Better = "lower") -> Metric:
    return Metric(name=name, better=better)


# Margins of others: what reports in their field call equal. WER and BLEU move by 0.1 to 0.2 points between seeds (GNMT
# v2 in NVIDIA's DeepLearningExamples: sd 0.16 over 50 seeds); for AUC of click rates 0.001 is a result.
METRICS = {
    ("accuracy", "acc", "top1", "top-1", "top 1", "top1 acc", "top-1 acc", "top-1 accuracy", "top1 accuracy"): ACCURACY,
    ("bleu", "sacrebleu"): _percentage("BLEU", margin=0.5),
    ("auc", "roc auc", "auroc", "accuracy (auc)"): _percentage("AUC", margin=0.1),
    ("f1", "f1 score"): _percentage("F1", margin=0.5),
    ("em", "exact match"): _percentage("EM", margin=0.5),
    ("map", "box ap", "bbox map"): _percentage("mAP", margin=0.5),
    ("mask ap", "segm map"): _percentage("mask AP", margin=0.5),
    ("miou", "iou"): _percentage("mIoU", margin=0.5),
    ("dice",): _percentage("Dice", margin=0.5),
    ("rouge", "rouge-l"): _percentage("ROUGE", margin=0.5),
    ("wer",): _percentage("WER", "lower", margin=0.5, highest=None),
    ("cer",): _percentage("CER", "lower", margin=0.5, highest=None),
    ("error", "error rate", "top1 error", "top-1 error", "top1 err", "top-1 err"): _percentage(
        "error", "lower", margin=0.5
    ),
    ("loss", "val loss", "validation loss", "test loss", "train loss", "training loss"): _number("loss"),
    ("perplexity", "ppl"): _number("perplexity"),
    ("rmse",): _number("RMSE"),
    ("mae",): _number("MAE"),
    ("mse",): _number("MSE"),
    ("fid",): _number("FID"),
    ("psnr",): _number("PSNR", "higher"),
}
OTHERS = ("top5", "top-5", "top 5", "top5 acc", "top-5 acc", "speedup", "params", "flops", "macs")


def known_metric(name: str) -> Metric | None:
    """Return the metric of a column, by its name in lower case; None if it is none that is known."""
    name = re.sub(r"[\s_]+", " ", name)
    return next((metric for names, metric in METRICS.items() if name in names), None)


def is_percentage(metric: Metric) -> bool:
    """Return whether tables write a metric as a percentage, or as a share of 1."""
    return metric.factor == 100


def in_shares(metric: Metric) -> Metric:
    """Return a percentage as a table that writes shares of 1 shows it. Accuracies are shown in percent."""
    if metric == ACCURACY or metric.margin is None:
        return metric
    return metric.model_copy(update={"factor": 1.0, "margin": metric.margin / 100})


def is_measurement(name: str) -> bool:
    """Return whether a column certainly holds results, and can be no setting."""
    return known_metric(name) is not None or name in OTHERS
