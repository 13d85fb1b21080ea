"""Stands for `apex.normalization`: the names that ampcompare drives."""

FusedLayerNorm = None
