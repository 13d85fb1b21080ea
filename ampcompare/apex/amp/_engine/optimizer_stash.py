"""amp's state of one optimizer: the namespace `optimizer._amp_stash`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ampcompare.apex.amp.scaler import LossScaler

__all__ = ["AmpOptimizerState", "Flag"]

Flag = tuple[Tensor, "LossScaler", int]
"""An overflow flag on the device, its loss scaler, and the `loss_id` of that scaler."""

# Devices whose allocator returns released memory without cost.
_CACHED_DEVICES = frozenset({"cuda"})


class AmpOptimizerState:
    """Flags and parameter lists of one optimizer.

    The lists appear at lazy initialization, and those with `fp32_from` in their names under master weights only:
    `FusedSGD.step` and scripts test for them with `hasattr`.
    """

    any_masters: ClassVar[bool] = False  # whether this process ever made an optimizer with master weights

    half_dtype: torch.dtype  # of the parameters that are not fp32
    lazy_init_called: bool
    already_patched: bool
    params_have_scaled_gradients: bool
    master_weights: bool
    uniform_device: bool
    stashed: bool
    # without host reads: whether `step` takes flags, those of the backward passes since the last step, amp's own
    # `step`, and the optimizer state whose momentum was made
    takes_flags: bool
    flags: list[Flag]
    own_step: Any
    momentum_state: Any
    momentum_count: int

    all_fp16_params: list[Tensor]
    all_fp16_grad_stash: list[Tensor | None]
    # without master weights
    all_fp32_params: list[Tensor]
    all_fp32_grad_stash: list[Tensor | None]
    # with master weights, per parameter group and flattened
    fp16_groups: list[list[Tensor]]
    fp32_from_fp16_groups: list[list[Tensor]]
    fp32_from_fp32_groups: list[list[Tensor]]
    all_fp32_from_fp16_params: list[Tensor]
    all_fp32_from_fp32_params: list[Tensor]
    all_fp32_from_fp32_grad_stash: list[Tensor | None]
    all_model_params: list[Tensor]
    master_grad_buffers: list[Tensor | None]
    index_of_half: dict[int, int]

    def __init__(self, master_weights: bool = False, half_dtype: torch.dtype = torch.float16) -> None:
        self.half_dtype = half_dtype
        self.lazy_init_called = False
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.master_weights = master_weights
        if master_weights:
            AmpOptimizerState.any_masters = True
        self.uniform_device = True
        self.stashed = False
        self.takes_flags = False
        self.flags = []
        self.own_step = self.momentum_state = None
        self.momentum_count = 0

    def release_buffers(self) -> None:
        """Release the memory of master gradients for the activations, on devices with a caching allocator."""
        if self.master_weights and self.all_fp16_params and self.all_fp16_params[0].device.type in _CACHED_DEVICES:
            self.master_grad_buffers = [None] * len(self.master_grad_buffers)

    def note_devices(self, params: Sequence[Tensor]) -> None:
        """Record whether all parameters share one device, so that one kernel can serve all gradients."""
        self.uniform_device = len({param.device for param in params}) <= 1
