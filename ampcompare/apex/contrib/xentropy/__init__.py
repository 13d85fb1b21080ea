"""Cross entropy with label smoothing, with the name of `apex.contrib.xentropy`."""

from ampcompare.apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
