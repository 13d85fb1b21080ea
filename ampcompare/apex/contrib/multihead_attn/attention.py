"""Attention over sequences of shape (time, batch, channel), and the layer norm and residual around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex.normalization import FusedLayerNorm
from ampcompare.apex.normalization.fused_layer_norm import fused_layer_norm_affine

__all__ = ["Attention", "attend", "check_masks", "fast_mask_softmax_dropout_func"]


def fast_mask_softmax_dropout_func(
    is_training: bool, heads: int, inputs: Tensor, pad_mask: Tensor | None, mask_additive: bool, dropout_prob: float
) -> Tensor:
    """Return the dropout of the softmax of scores, shape (batch * heads, queries, keys), masked for each batch.

    Args:
        pad_mask: shape (batch, keys): true hides a key, or with `mask_additive` numbers to add; None for no mask.
    """
    if pad_mask is not None:
        scores = inputs.view(-1, heads, *inputs.shape[1:])
        mask = pad_mask[:, None, None, :]
        scores = scores + mask if mask_additive else scores.masked_fill(mask.to(torch.bool), float("-inf"))
        inputs = scores.view_as(inputs)
    return F.dropout(F.softmax(inputs, -1), dropout_prob, is_training)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    mask_additive: bool,
    dropout: float,
    is_training: bool,
) -> Tensor:
    """Return the attended values, shape (time, batch, heads * head_dim).

    Args:
        queries, keys, values: shape (time, batch, heads, head_dim); keys and values may have another time.
        key_padding_mask: shape (batch, keys), as `fast_mask_softmax_dropout_func` takes it.
        attn_mask: shape (queries, keys); true hides a key from a query.
    """
    length, batch, heads, head_dim = queries.shape
    q, k, v = (part.reshape(part.size(0), batch * heads, head_dim).transpose(0, 1) for part in (queries, keys, values))
    scores = torch.bmm(q, k.transpose(1, 2)) * scaling
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask.to(torch.bool), float("-inf"))
    probs = fast_mask_softmax_dropout_func(is_training, heads, scores, key_padding_mask, mask_additive, dropout)
    return torch.bmm(probs, v).transpose(0, 1).reshape(length, batch, heads * head_dim)


class Attention(nn.Module):
    """What lies around attention: checks, the norm before, and the residual after.

    `impl` chooses the names of the norm's parameters, as in Apex; the arithmetic is the same.
    """

    out_proj_bias: nn.Parameter | None
    lyr_nrm_gamma_weights: nn.Parameter | None
    lyr_nrm_beta_weights: nn.Parameter | None

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float, bias: bool, include_norm_add: bool, impl: str
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise AssertionError(f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}")
        if impl not in ("fast", "default"):
            raise AssertionError(f"impl is {impl!r}; it must be 'fast' or 'default'")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.bias = bias
        self.include_norm_add = include_norm_add
        self.impl = impl
        self.scaling = self.head_dim**-0.5
        self.lyr_nrm: Any = None

    def add_norm(self) -> None:
        """Make the parameters of the norm, after those of the projections."""
        if not self.include_norm_add:
            return
        if self.impl == "fast":
            self.lyr_nrm_gamma_weights = nn.Parameter(torch.ones(self.embed_dim))
            self.lyr_nrm_beta_weights = nn.Parameter(torch.zeros(self.embed_dim))
        else:
            self.register_parameter("lyr_nrm_gamma_weights", None)
            self.register_parameter("lyr_nrm_beta_weights", None)
            del self.lyr_nrm
            self.lyr_nrm = FusedLayerNorm(self.embed_dim)

    def reset_norm(self) -> None:
        """Set the norm's weight to ones and its bias to zeros."""
        if not self.include_norm_add:
            return
        if self.lyr_nrm is not None:
            self.lyr_nrm.reset_parameters()
        else:
            nn.init.ones_(self.lyr_nrm_gamma_weights)  # type: ignore[arg-type]
            nn.init.zeros_(self.lyr_nrm_beta_weights)  # type: ignore[arg-type]

    def normed(self, query: Tensor) -> Tensor:
        """Return the query, normalized if the module includes that."""
        if not self.include_norm_add:
            return query
        if self.lyr_nrm is not None:
            result: Tensor = self.lyr_nrm(query)
            return result
        assert self.lyr_nrm_gamma_weights is not None
        assert self.lyr_nrm_beta_weights is not None
        return fused_layer_norm_affine(
            query, self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights, (self.embed_dim,), 1e-5
        )

    def added(self, output: Tensor, query: Tensor, is_training: bool) -> Tensor:
        """Return the output, with dropout and the residual if the module includes that."""
        return query + F.dropout(output, self.dropout, is_training) if self.include_norm_add else output


def check_masks(key_padding_mask: Tensor | None, attn_mask: Tensor | None, mask_additive: bool) -> None:
    """Raise `AssertionError` for both masks at once, or an additive mask over time."""
    if attn_mask is not None and key_padding_mask is not None:
        raise AssertionError("got attn_mask and key_padding_mask; give one of them")
    if attn_mask is not None and mask_additive:
        raise AssertionError("got attn_mask with mask_additive=True; an additive mask is for keys only")
