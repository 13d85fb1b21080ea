"""What the tasks that ship measure, known before torch is imported; verdicts are about the first of each task."""

from __future__ import annotations

import math

from ampcompare.records.metric import TOP1, TOP5, Metric

__all__ = [
    "AP50",
    "AP75",
    "BITS_PER_BYTE",
    "CLASSIFICATION",
    "DETECTION",
    "DISTANCE",
    "GAN",
    "LANGUAGE_MODELING",
    "MEAN_IOU",
    "PERPLEXITY",
    "PIXEL_ACCURACY",
    "REGRESSION",
    "RMSE",
    "SEGMENTATION",
]

CLASSIFICATION = (TOP1, TOP5)

MEAN_IOU = Metric(name="mean IoU", unit="%", factor=100.0, margin=1.0)
PIXEL_ACCURACY = Metric(name="pixel accuracy", unit="%", factor=100.0, margin=0.5, over_samples="mean")
SEGMENTATION = (MEAN_IOU, PIXEL_ACCURACY)

AP50 = Metric(name="AP50", unit="%", factor=100.0, margin=2.0)
AP75 = Metric(name="AP75", unit="%", factor=100.0, margin=2.0)
DETECTION = (AP50, AP75)

DISTANCE = Metric(name="total variation", better="lower", unit="%", factor=100.0, margin=5.0)
GAN = (DISTANCE,)

BITS_PER_BYTE = Metric(name="bits per byte", better="lower", decimals=3, margin=0.02, over_samples="mean")
# A difference of 0.02 bits is this log ratio of perplexities.
PERPLEXITY = Metric(name="perplexity", better="lower", decimals=3, difference="log ratio", margin=0.02 * math.log(2))
LANGUAGE_MODELING = (BITS_PER_BYTE, PERPLEXITY)

RMSE = Metric(name="RMSE", better="lower", decimals=3, difference="ratio", margin=0.02)
REGRESSION = (RMSE,)
