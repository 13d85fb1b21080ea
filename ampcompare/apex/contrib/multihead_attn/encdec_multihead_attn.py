"""`EncdecMultiheadAttn`: attention of one sequence to another."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex.contrib.multihead_attn.attention import Attention, attend, check_masks

__all__ = ["EncdecMultiheadAttn"]


class EncdecMultiheadAttn(Attention):
    """Multi-head attention of a decoder to an encoder, with parameters of Apex's names and layout.

    The rows of `in_proj_weight_kv` (2 * embed_dim, embed_dim) are, for each head, those of its key and value.

    Args:
        include_norm_add: normalize the query before, and add it to the output after.

    Raises:
        AssertionError: arguments that do not go together; a bias with `impl="fast"`, as in Apex.

    Source: Apex 25.05, `apex.contrib.multihead_attn.EncdecMultiheadAttn`.
    """

    in_proj_bias_q: nn.Parameter | None
    in_proj_bias_kv: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        if bias and impl == "fast":
            raise AssertionError("EncdecMultiheadAttn got bias=True with impl='fast'; use impl='default'")
        self.in_proj_weight_q = nn.Parameter(torch.empty(embed_dim, embed_dim))
        self.in_proj_weight_kv = nn.Parameter(torch.empty(2 * embed_dim, embed_dim))
        self.out_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim))
        sizes = {"in_proj_bias_q": embed_dim, "in_proj_bias_kv": 2 * embed_dim, "out_proj_bias": embed_dim}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)) if bias else None)
        self.add_norm()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from Xavier's uniform distribution, and set biases to zeros."""
        for name, parameter in self.named_parameters(recurse=False):
            if "_bias" in name:
                nn.init.zeros_(parameter)
            elif "proj_weight" in name:
                # Two matrices in one: the distribution is that of each by itself.
                nn.init.xavier_uniform_(parameter, math.sqrt(1.5) if name == "in_proj_weight_kv" else 1.0)
        self.reset_norm()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, None]:
        """Return the output, shape (time, batch, embed_dim), and None instead of attention weights.

        Args:
            query: shape (time, batch, embed_dim).
            key: shape (keys, batch, embed_dim), for keys and values; `value` is ignored, as in Apex.
            key_padding_mask: shape (batch, keys); true hides a key.
            attn_mask: shape (time, keys); true hides a key from a query.
        """
        check_masks(key_padding_mask, attn_mask, False)
        queries = F.linear(self.normed(query), self.in_proj_weight_q, self.in_proj_bias_q)
        both = F.linear(key, self.in_proj_weight_kv, self.in_proj_bias_kv)
        both = both.view(*key.shape[:2], self.num_heads, 2, self.head_dim)
        output = attend(
            queries.view(*query.shape[:2], self.num_heads, self.head_dim),
            both[..., 0, :],
            both[..., 1, :],
            scaling=self.scaling,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            mask_additive=False,
            dropout=self.dropout,
            is_training=is_training,
        )
        return self.added(F.linear(output, self.out_proj_weight, self.out_proj_bias), query, is_training), None
