"""`FusedScaleMaskSoftmax` and its functions: scale, mask, and softmax over the last dimension.

Where Apex would run a kernel, arithmetic is fp32 and the result has the input's dtype; a masked score counts as -10000,
a future one as minus infinity, and a row that is masked throughout gives zeros, as in the kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ampcompare.apex._autocast_utils import _cast_if_autocast_enabled
from ampcompare.apex.transformer.enums import AttnMaskType

__all__ = [
    "FusedScaleMaskSoftmax",
    "GenericFusedScaleMaskSoftmax",
    "generic_scaled_masked_softmax",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
]


def scaled_upper_triang_masked_softmax(inputs: Tensor, _: Tensor | None, scale: float) -> Tensor:
    """Return the softmax of `inputs * scale` over the present and past keys.

    Args:
        inputs: scores of shape (batch, heads, queries, keys), with as many queries as keys.

    Raises:
        AssertionError: other numbers of queries than of keys.
    """
    if inputs.size(-2) != inputs.size(-1):
        raise AssertionError(
            f"a causal mask is for self-attention; got {inputs.size(-2)} queries and {inputs.size(-1)} keys"
        )
    (inputs,) = _cast_if_autocast_enabled(inputs)
    future = torch.ones(inputs.shape[-2:], dtype=torch.bool, device=inputs.device).triu(1)
    with torch.autocast(inputs.device.type, enabled=False):
        return _softmax(inputs.float() * scale, future, float("-inf"), inputs.dtype)


def scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the softmax of `inputs * scale`, where the scores at true (or nonzero) places of `mask` are hidden.

    Args:
        inputs: scores of shape (batch, heads, queries, keys).
        mask: shape (batch or 1, 1, queries, keys); None hides nothing.
    """
    (inputs,) = _cast_if_autocast_enabled(inputs)
    with torch.autocast(inputs.device.type, enabled=False):
        hidden = None if mask is None else mask.to(torch.bool)
        probs = _softmax(inputs.float() * scale, hidden, -10000.0, inputs.dtype)
        return probs if hidden is None else probs.masked_fill(hidden.all(-1, keepdim=True), 0.0)


generic_scaled_masked_softmax = scaled_masked_softmax


def _softmax(scores: Tensor, hidden: Tensor | None, value: float, result: torch.dtype) -> Tensor:
    if hidden is not None:
        scores = scores.masked_fill(hidden, value)
    return torch.softmax(scores, -1).to(result)


class FusedScaleMaskSoftmax(nn.Module):
    """Softmax of scaled and masked attention scores.

    Args:
        input_in_fp16: scores come in fp16; `input_in_bf16`: in bf16.
        attn_mask_type: `AttnMaskType.padding` or `AttnMaskType.causal`.
        scaled_masked_softmax_fusion: mask as Apex's kernels do wherever they would run, instead of `mask_func`.
        mask_func: called with scores and mask where no kernel would run.
        softmax_in_fp32: widen the scores before the softmax; needed with a `scale`.
        scale: factor of the scores, or None.

    Raises:
        RuntimeError: both dtypes at once; a scale without `softmax_in_fp32`.
        ValueError: another `attn_mask_type`, with fusion.

    Source: Apex 25.05, `apex.transformer.functional.FusedScaleMaskSoftmax`.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError("FusedScaleMaskSoftmax got input_in_fp16 and input_in_bf16; give one of them")
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError(f"FusedScaleMaskSoftmax got scale={scale} without softmax_in_fp32; give both")
        if scaled_masked_softmax_fusion and attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding):
            raise ValueError(f"FusedScaleMaskSoftmax got attn_mask_type={attn_mask_type!r}; give padding or causal")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return probabilities of the shape (batch, heads, queries, keys) and dtype of `input`.

        Raises:
            AssertionError: scores of other than four dimensions.
        """
        if input.dim() != 4:
            raise AssertionError(f"scores have shape {tuple(input.shape)}; it must be (batch, heads, queries, keys)")
        if self.is_kernel_available(mask, *input.size()):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return whether Apex would run a kernel for these sizes, and so masks as its kernels do."""
        fits = 16 < sk <= 16384 and sq % 4 == 0 and sk % 4 == 0 and b * np % 4 == 0
        if not (self.scaled_masked_softmax_fusion and self.input_in_float16 and fits):
            return False
        batches = self.get_batch_per_block(sq, sk, b, np)
        return (b * np if self.attn_mask_type is AttnMaskType.causal else sq) % batches == 0

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities with the masks of the kernels."""
        scale = 1.0 if self.scale is None else self.scale
        if self.attn_mask_type is AttnMaskType.causal:
            return scaled_upper_triang_masked_softmax(input, mask, scale)
        return scaled_masked_softmax(input, mask, scale)

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities with `mask_func`."""
        widen = self.input_in_float16 and self.softmax_in_fp32
        scores = input.float() if widen else input
        if self.scale is not None:
            scores = scores * self.scale
        probs = torch.softmax(scores if mask is None else self.mask_func(scores, mask), -1)
        return probs.to(torch.float16 if self.input_in_fp16 else torch.bfloat16) if widen else probs

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Return how many rows a block of four warps of Apex's kernel takes."""
        power = 1 << max(sk - 1, 0).bit_length()
        warp = min(power, 32)
        return 128 // warp * (2 if power <= 128 else 1)


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """`FusedScaleMaskSoftmax` with a padding mask and without limits of size."""

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            input_in_fp16,
            input_in_bf16,
            AttnMaskType.padding,
            scaled_masked_softmax_fusion,
            mask_func,
            softmax_in_fp32,
            scale,
        )

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return whether fusion is enabled."""
        return self.scaled_masked_softmax_fusion and sk > 0
