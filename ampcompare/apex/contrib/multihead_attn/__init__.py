"""Multi-head attention, with the names of `apex.contrib.multihead_attn`."""

from .self_multihead_attn import SelfMultiheadAttn, fast_mask_softmax_dropout_func

__all__ = ["SelfMultiheadAttn", "fast_mask_softmax_dropout_func"]
