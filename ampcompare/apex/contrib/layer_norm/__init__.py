"""`FastLayerNorm`, with the name of `apex.contrib.layer_norm`."""

from ampcompare.apex.contrib.layer_norm.layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
