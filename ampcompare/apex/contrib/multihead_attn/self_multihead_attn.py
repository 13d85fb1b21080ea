"""`SelfMultiheadAttn`: attention of a sequence to itself."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex.contrib.multihead_attn.attention import Attention, attend, check_masks

__all__ = ["SelfMultiheadAttn"]


class SelfMultiheadAttn(Attention):
    """Multi-head self-attention, with parameters of Apex's names and layout.

    The rows of `in_proj_weight` (3 * embed_dim, embed_dim) are, for each head, those of its query, key and value.

    Args:
        include_norm_add: normalize the query before, and add it to the output after.
        separate_qkv_params: own `q_weight`, `k_weight` and `v_weight` instead.
        mask_additive: the key padding mask contains numbers to add to the scores.

    Raises:
        AssertionError: arguments that do not go together.

    Source: Apex 25.05, `apex.contrib.multihead_attn.SelfMultiheadAttn`.
    """

    in_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    q_weight: nn.Parameter
    k_weight: nn.Parameter
    v_weight: nn.Parameter
    q_bias: nn.Parameter | None
    k_bias: nn.Parameter | None
    v_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
        separate_qkv_params: bool = False,
        mask_additive: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        self.separate_qkv_params = separate_qkv_params
        self.mask_additive = mask_additive
        if mask_additive and (include_norm_add or (impl == "fast" and not bias)):
            raise AssertionError("mask_additive=True goes with include_norm_add=False, and for impl='fast' with a bias")
        names = ("q", "k", "v") if separate_qkv_params else ("in_proj",)
        size = embed_dim if separate_qkv_params else 3 * embed_dim
        for name in names:
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(size, embed_dim)))
        self.out_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim))
        for name in names:
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(size)) if bias else None)
        self.register_parameter("out_proj_bias", nn.Parameter(torch.empty(embed_dim)) if bias else None)
        self.add_norm()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from Xavier's uniform distribution, and set biases to zeros."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("_weight"):
                # Three matrices in one: the distribution is that of each by itself.
                nn.init.xavier_uniform_(parameter, math.sqrt(2) if name == "in_proj_weight" else 1.0)
        self.reset_norm()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, None]:
        """Return the output, shape (time, batch, embed_dim), and None instead of attention weights.

        Args:
            query: shape (time, batch, embed_dim); `key` and `value` are ignored, as in Apex.
            key_padding_mask: shape (batch, time); true hides a key.
            attn_mask: shape (time, time); true hides a key from a query.
        """
        check_masks(key_padding_mask, attn_mask, self.mask_additive)
        weight, bias = self._stacked("weight"), self._stacked("bias") if self.bias else None
        assert weight is not None
        parts = F.linear(self.normed(query), weight, bias).view(*query.shape[:2], self.num_heads, 3, self.head_dim)
        output = attend(
            parts[..., 0, :],
            parts[..., 1, :],
            parts[..., 2, :],
            scaling=self.scaling,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            mask_additive=self.mask_additive,
            dropout=self.dropout,
            is_training=is_training,
        )
        return self.added(F.linear(output, self.out_proj_weight, self.out_proj_bias), query, is_training), None

    def _stacked(self, kind: str) -> Tensor:
        if not self.separate_qkv_params:
            whole: Tensor = getattr(self, f"in_proj_{kind}")
            return whole
        parts: list[Tensor] = [getattr(self, f"{name}_{kind}") for name in ("q", "k", "v")]
        by_head = [part.view(self.num_heads, 1, self.head_dim, *part.shape[1:]) for part in parts]
        return torch.cat(by_head, 1).reshape(3 * self.embed_dim, *parts[0].shape[1:])
