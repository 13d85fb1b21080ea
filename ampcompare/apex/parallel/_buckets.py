"""Reduce gradients of one dtype and device as one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._errors import GradientReductionError

__all__ = ["Bucket", "Reduction"]


@dataclass(frozen=True)
class Reduction:
    """How a bucket is summed: the factors before and after, the dtype on the wire, and whether it is kept."""

    before: float = 1.0
    after: float = 1.0
    always_fp32: bool = False
    retain: bool = False

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` are summed; never narrower than theirs."""
        return torch.promote_types(dtype, torch.float32) if self.always_fp32 else dtype


def _pieces(flat: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return views into `flat`, one per parameter, with its shape and where possible its memory format."""
    views, offset = [], 0
    for param in params:
        piece = flat[offset : offset + param.numel()]
        offset += param.numel()
        # foreach kernels are fast only where source and destination have equal strides.
        if not param.is_contiguous() and (
            (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
            or (param.dim() == 5 and param.is_contiguous(memory_format=torch.channels_last_3d))
        ):
            views.append(piece.as_strided(param.size(), param.stride()))
        else:
            views.append(piece.view(param.shape))
    return views


class Bucket:
    """Parameters whose gradients travel together, and the flat buffer in which they do.

    The buffer ends in one number per parameter: how many ranks had a gradient for it. So ranks may use different
    parameters: a rank without one sends zeros, and receives the reduced gradient if any rank had one, else none.

    Call in this order: `reserve`, `fill`, sum `flat` over the ranks, `scatter`, `adopt`.
    """

    def __init__(self, params: Sequence[nn.Parameter], reduction: Reduction) -> None:
        self.params = list(params)
        self.size = sum(param.numel() for param in params)
        self.dtype = self.params[0].dtype
        self.pending = len(self.params)
        self.flat: Tensor | None = None
        self._reduction = reduction
        self._wire_views: list[Tensor] = []
        self._grads: list[Tensor | None] = []
        self.reduced: Tensor | None = None

    def reserve(self) -> Tensor:
        """Return the buffer, allocated on the stream that will use the gradients later."""
        if self.flat is not None and not self._reduction.retain:
            return self.flat
        wire = self._reduction.wire_dtype(self.dtype)
        # Gradients become views of a retained buffer, so that each pass needs its own.
        self.flat = torch.empty(self.size + len(self.params), dtype=wire, device=self.params[0].device)
        self._wire_views = _pieces(self.flat, self.params)
        if self._reduction.retain:
            body = self.flat[: self.size]
            self.reduced = body if wire is self.dtype else torch.empty_like(body, dtype=self.dtype)
        return self.flat

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the current gradients into the buffer, and apply the factor before the sum."""
        assert self.flat is not None
        self._grads = grads = [param.grad for param in self.params]
        present = [grad for grad in grads if grad is not None]
        if any(grad.layout is not torch.strided for grad in present):
            raise GradientReductionError(
                f"A gradient has the layout {next(g.layout for g in present if g.layout is not torch.strided)}; Apex's "
                "DistributedDataParallel reduces dense gradients only. Build the embedding with sparse=False, or use "
                "torch.nn.parallel.DistributedDataParallel."
            )
        if len(present) == len(grads):
            torch._foreach_copy_(self._wire_views, present)
            self.flat[self.size :].fill_(1)
        else:
            used = torch.tensor([grad is not None for grad in grads])
            self.flat.zero_()
            self.flat[self.size :].copy_(used)
            if present:
                torch._foreach_copy_(
                    [view for view, grad in zip(self._wire_views, grads, strict=True) if grad is not None], present
                )
        if self._reduction.before != 1:
            self.flat[: self.size].mul_(self._reduction.before)

    @torch.no_grad()
    def scatter(self) -> None:
        """Apply the factor after the sum and give each gradient its reduced values."""
        assert self.flat is not None
        body = self.flat[: self.size]
        if self._reduction.after != 1:
            body.mul_(self._reduction.after)
        if self.reduced is None:
            pairs = [(g, v) for g, v in zip(self._grads, self._wire_views, strict=True) if g is not None]
            if pairs:
                torch._foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])
        elif self.reduced.dtype is not body.dtype:
            self.reduced.copy_(body)

    @torch.no_grad()
    def adopt(self) -> None:
        """Set what `scatter` could not copy into: retained views, and gradients that only other ranks had."""
        assert self.flat is not None
        absent = any(grad is None for grad in self._grads)
        # Read from the device only where this rank lacks something.
        users = self.flat[self.size :].tolist() if absent else []
        if self.reduced is not None:
            for i, view in enumerate(_pieces(self.reduced, self.params)):
                if self._grads[i] is not None or users[i] > 0:
                    self.params[i].grad = view
        elif absent:
            for i, view in enumerate(self._wire_views):
                if self._grads[i] is None and users[i] > 0:
                    self.params[i].grad = view.to(self.dtype, copy=True)
        self._grads = []
