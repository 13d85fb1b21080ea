"""The measures of quality that tables are headed with: which direction is better, their unit, and a usual margin."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["ACCURACY", "Better", "Metric", "is_measurement", "known_metric"]

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A measure of quality.

    Attributes:
        name: as tables are headed.
        better: which direction is.
        percent: whether it is a percentage, written as one or as a share of 1.
        highest: the largest value that it can have, in percent if it is a percentage.
        margin: the usual difference that does not matter, in points if it is a percentage; None if there is none.
        shares: whether the table at hand writes shares of 1 and is shown so. Accuracies are shown in percent.
    """

    name: str
    better: Better = "higher"
    percent: bool = True
    highest: float | None = 100.0
    margin: float | None = None
    shares: bool = False

    @property
    def shown(self) -> str:
        """The head of a column of it, with its unit."""
        return f"{self.name} %" if self.name == "top-1" else self.name

    @property
    def unit(self) -> str:
        """What its differences are counted in, after a number."""
        return "points" if self.percent and not self.shares else ""

    @property
    def usual_margin(self) -> float | None:
        """The usual margin in the unit that is shown."""
        return self.margin / 100 if self.margin is not None and self.shares else self.margin

    def in_shares(self) -> Metric:
        """Return the metric as a table that writes shares of 1 shows it."""
        return self if self == ACCURACY else replace(self, shares=True)


ACCURACY = Metric("top-1", margin=0.5)
# Margins of others: what reports in their field call equal. WER and BLEU move by 0.1 to 0.2 points between seeds (GNMT
# v2 in NVIDIA's DeepLearningExamples: sd 0.16 over 50 seeds); for AUC of click rates 0.001 is a result.
METRICS = {
    ("accuracy", "acc", "top1", "top-1", "top 1", "top1 acc", "top-1 acc", "top-1 accuracy", "top1 accuracy"): ACCURACY,
    ("bleu", "sacrebleu"): Metric("BLEU", margin=0.5),
    ("auc", "roc auc", "auroc", "accuracy (auc)"): Metric("AUC", margin=0.1),
    ("f1", "f1 score"): Metric("F1", margin=0.5),
    ("em", "exact match"): Metric("EM", margin=0.5),
    ("map", "box ap", "bbox map"): Metric("mAP", margin=0.5),
    ("mask ap", "segm map"): Metric("mask AP", margin=0.5),
    ("miou", "iou"): Metric("mIoU", margin=0.5),
    ("dice",): Metric("Dice", margin=0.5),
    ("rouge", "rouge-l"): Metric("ROUGE", margin=0.5),
    ("wer",): Metric("WER", "lower", highest=None, margin=0.5),
    ("cer",): Metric("CER", "lower", highest=None, margin=0.5),
    ("error", "error rate", "top1 error", "top-1 error", "top1 err", "top-1 err"): Metric("error", "lower", margin=0.5),
    ("loss", "val loss", "validation loss", "test loss", "train loss", "training loss"): Metric(
        "loss", "lower", percent=False, highest=None
    ),
    ("perplexity", "ppl"): Metric("perplexity", "lower", percent=False, highest=None),
    ("rmse",): Metric("RMSE", "lower", percent=False, highest=None),
    ("mae",): Metric("MAE", "lower", percent=False, highest=None),
    ("mse",): Metric("MSE", "lower", percent=False, highest=None),
    ("fid",): Metric("FID", "lower", percent=False, highest=None),
    ("psnr",): Metric("PSNR", percent=False, highest=None),
}
OTHERS = ("top5", "top-5", "top 5", "top5 acc", "top-5 acc", "speedup", "params", "flops", "macs")


def known_metric(name: str) -> Metric | None:
    """Return the metric of a column, by its name in lower case; None if it is none that is known."""
    name = re.sub(r"[\s_]+", " ", name)
    return next((metric for names, metric in METRICS.items() if name in names), None)


def is_measurement(name: str) -> bool:
    """Return whether a column certainly holds results, and can be no setting."""
    return known_metric(name) is not None or name in OTHERS
