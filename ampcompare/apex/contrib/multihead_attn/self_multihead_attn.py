"""`SelfMultiheadAttn`: attention of a sequence of shape (time, batch, channel) to itself."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex.normalization import FusedLayerNorm
from ampcompare.apex.normalization.fused_layer_norm import fused_layer_norm_affine


def fast_mask_softmax_dropout_func(
    is_training: bool,
    heads: int,
    inputs: Tensor,
    pad_mask: Tensor | None,
    mask_additive: bool,
    dropout_prob: float,
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


class SelfMultiheadAttn(nn.Module):
    """Multi-head self-attention, with parameters of Apex's names and layout.

    The rows of `in_proj_weight` (3 * embed_dim, embed_dim) are, for each head, those of its query, key and value.

    `include_norm_add` normalizes the query before, and adds it to the output after. `impl`, "fast" or "default", only
    names the norm's parameters. Under `mask_additive` the key padding mask contains numbers to add to the scores.

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
    out_proj_bias: nn.Parameter | None
    lyr_nrm_gamma_weights: nn.Parameter | None
    lyr_nrm_beta_weights: nn.Parameter | None

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
        super().__init__()
        if embed_dim % num_heads:
            raise AssertionError(f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}")
        if impl not in ("fast", "default"):
            raise AssertionError(f"impl is {impl!r}; it must be 'fast' or 'default'")
        if mask_additive and (include_norm_add or (impl == "fast" and not bias)):
            raise AssertionError(
                "mask_additive=True goes with include_norm_add=False, and for impl='fast' with a bias"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.bias = bias
        self.include_norm_add = include_norm_add
        self.impl = impl
        self.scaling = self.head_dim**-0.5
        self.separate_qkv_params = separate_qkv_params
        self.mask_additive = mask_additive
        names = ("q", "k", "v") if separate_qkv_params else ("in_proj",)
        size = embed_dim if separate_qkv_params else 3 * embed_dim
        for name in names:
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(size, embed_dim)))
        self.out_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim))
        for name in names:
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(size)) if bias else None)
        self.register_parameter("out_proj_bias", nn.Parameter(torch.empty(embed_dim)) if bias else None)
        self.lyr_nrm: Any = None
        if include_norm_add:
            own = impl == "fast"
            for name in ("lyr_nrm_gamma_weights", "lyr_nrm_beta_weights"):
                self.register_parameter(name, nn.Parameter(torch.empty(embed_dim)) if own else None)
            if not own:
                del self.lyr_nrm
                self.lyr_nrm = FusedLayerNorm(embed_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from Xavier's uniform distribution; set biases to zeros, and the norm's weight to ones."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_bias") or name == "lyr_nrm_beta_weights":
                nn.init.zeros_(parameter)
            elif name == "lyr_nrm_gamma_weights":
                nn.init.ones_(parameter)
            else:
                # Three matrices in one: the distribution is that of each by itself.
                nn.init.xavier_uniform_(parameter, math.sqrt(2) if name == "in_proj_weight" else 1.0)
        if self.lyr_nrm is not None:
            self.lyr_nrm.reset_parameters()

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
        """Return the output, of the query's shape (time, batch, embed_dim), and None instead of attention weights.

        `key` and `value` are ignored, as in Apex. A true entry of `key_padding_mask`, shape (batch, time), or of
        `attn_mask`, shape (time, time), hides a key.
        """
        if attn_mask is not None and key_padding_mask is not None:
            raise AssertionError("got attn_mask and key_padding_mask; give one of them")
        if attn_mask is not None and self.mask_additive:
            raise AssertionError("got attn_mask with mask_additive=True; an additive mask is for keys only")
        length, batch, _ = query.shape
        heads = batch * self.num_heads
        weight = self._stack_qkv_projections("weight")
        bias = self._stack_qkv_projections("bias") if self.bias else None
        parts = F.linear(self._normalize_query(query), weight, bias).view(length, heads, 3, self.head_dim)
        queries, keys, values = (parts[..., part, :].transpose(0, 1) for part in range(3))
        scores = torch.bmm(queries, keys.transpose(1, 2)) * self.scaling
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask.to(torch.bool), float("-inf"))
        probs = fast_mask_softmax_dropout_func(
            is_training, self.num_heads, scores, key_padding_mask, self.mask_additive, self.dropout
        )
        attended = torch.bmm(probs, values).transpose(0, 1).reshape(length, batch, self.embed_dim)
        output = F.linear(attended, self.out_proj_weight, self.out_proj_bias)
        if self.include_norm_add:
            output = query + F.dropout(output, self.dropout, is_training)
        return output, None

    def _stack_qkv_projections(self, kind: str) -> Tensor:
        if not self.separate_qkv_params:
            whole: Tensor = getattr(self, f"in_proj_{kind}")
            return whole
        parts: list[Tensor] = [getattr(self, f"{name}_{kind}") for name in ("q", "k", "v")]
        by_head = [part.view(self.num_heads, 1, self.head_dim, *part.shape[1:]) for part in parts]
        return torch.cat(by_head, 1).reshape(3 * self.embed_dim, *parts[0].shape[1:])

    def _normalize_query(self, query: Tensor) -> Tensor:
        if not self.include_norm_add:
            return query
        if self.lyr_nrm is not None:
            result: Tensor = self.lyr_nrm(query)
            return result
        gamma, beta = self.get_parameter("lyr_nrm_gamma_weights"), self.get_parameter("lyr_nrm_beta_weights")
        return fused_layer_norm_affine(query, gamma, beta, (self.embed_dim,), 1e-5)
