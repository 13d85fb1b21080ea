"""`SoftmaxCrossEntropyLoss`: softmax and cross entropy with label smoothing, which keeps little for backward."""

from typing import Any

import torch
from torch import Tensor


class SoftmaxCrossEntropyLoss(torch.autograd.Function):
    """Cross entropy of each row of `logits`, called by `apply`.

    Arithmetic is fp32 (fp64 for fp64). With smoothing s over k classes the target is 1 - s + s/k for the label and s/k
    for each other class. Rows whose label is `padding_idx`, 0 by default, have loss and gradient 0.

    Source: Apex 25.05, `apex.contrib.xentropy.SoftmaxCrossEntropyLoss`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Return the losses, shape (n,), for logits of shape (n, classes): in their dtype, or fp32 if `half_to_float`.

        Raises:
            RuntimeError: `half_to_float` for logits that are not fp16.
        """
        if half_to_float and logits.dtype is not torch.float16:
            raise RuntimeError(f"half_to_float=True takes float16 logits, got {logits.dtype}; leave it out")
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_sum = wide.logsumexp(-1)
        of_label = wide.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        losses = log_sum - (1.0 - smoothing) * of_label
        if smoothing:
            losses = losses - smoothing * wide.mean(-1)
        padded = labels == padding_idx
        ctx.save_for_backward(logits, log_sum, labels, padded)
        ctx.smoothing = smoothing
        return losses.masked_fill(padded, 0.0).to(torch.float32 if half_to_float else logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        """Return the gradient of `logits`, in their dtype."""
        logits, log_sum, labels, padded = ctx.saved_tensors
        grad = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp_()
        grad -= ctx.smoothing / logits.size(-1)
        grad.scatter_add_(
            -1, labels.unsqueeze(-1), torch.full_like(log_sum, ctx.smoothing - 1.0).unsqueeze(-1)
        )
        grad *= grad_loss.to(grad.dtype).masked_fill(padded, 0.0).unsqueeze(-1)
        return grad.to(logits.dtype), None, None, None, None
