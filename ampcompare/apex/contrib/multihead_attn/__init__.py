"""Multi-head attention, with the names of `apex.contrib.multihead_attn`."""

from __future__ import annotations

from ampcompare.apex.contrib.multihead_attn.attention import fast_mask_softmax_dropout_func
from ampcompare.apex.contrib.multihead_attn.self_multihead_attn import SelfMultiheadAttn

__all__ = ["SelfMultiheadAttn", "fast_mask_softmax_dropout_func"]
