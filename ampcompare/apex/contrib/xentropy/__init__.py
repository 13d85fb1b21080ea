"""Cross entropy with label smoothing, with the name of `apex.contrib.xentropy`."""

from __future__ import annotations

from ampcompare.apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
