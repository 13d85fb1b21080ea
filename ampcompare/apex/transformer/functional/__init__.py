"""Scaling, masking and softmax of attention scores, with the name of `apex.transformer.functional`."""

from __future__ import annotations

from ampcompare.apex.transformer.functional.fused_softmax import FusedScaleMaskSoftmax

__all__ = ["FusedScaleMaskSoftmax"]
