"""Give optimizer state the dtype of its parameters, without the detours that lose precision."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ampcompare.apex.amp.scaler import LossScaler

HALF_TYPES = (torch.float16, torch.bfloat16)
# Devices whose allocator returns released memory without cost.
_CACHED_DEVICES = frozenset({"cuda"})


def reload_own_state_dict(optimizer: Any) -> None:
    """Let the optimizer load its own state dict: state takes the parameters' dtypes, group dicts are replaced."""
    optimizer.load_state_dict(optimizer.state_dict())


def cast_state_to_parameter_types(optimizer: Any, *, keep_half_params_full: bool = False) -> None:
    """Cast existing per-parameter state to the dtype of its parameter, instead of reloading the state dict.

    The group dicts stay the same objects. With `keep_half_params_full` the state of half parameters is left alone;
    their masters take it over in fp32.
    """
    for param in list(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        if param not in optimizer.state or (keep_half_params_full and param.dtype in HALF_TYPES):
            continue
        state = optimizer.state[param]
        for key, value in state.items() if isinstance(state, dict) else ():
            state[key] = _cast_state_entry(value, key, param)


def _cast_state_entry(value: Any, key: Any, param: Tensor) -> Any:
    if isinstance(value, Tensor):
        # torch.optim counts steps in fp32 tensors whatever the parameter is.
        if key == "step" or not param.is_floating_point():
            return value
        return value.to(dtype=param.dtype, device=param.device)
    if isinstance(value, dict):
        return {inner: _cast_state_entry(entry, inner, param) for inner, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cast_state_entry(entry, key, param) for entry in value)
    return value


def load_state_keeping_precision(
    optimizer: Any, load: Callable[[Mapping[str, Any]], None], state_dict: Mapping[str, Any]
) -> None:
    """Load a state dict so that fp32 state of half parameters stays fp32 until their masters exist.

    `Optimizer.load_state_dict` rounds state to the dtype of the parameter; before lazy initialization that is half, and
    Adam's second moments below 6e-8 become 0.
    """
    load(state_dict)
    if optimizer._amp_stash.lazy_init_called:
        return
    saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for saved_id, param in zip(saved_ids, params, strict=True):
        saved = state_dict["state"].get(saved_id)
        if param.dtype not in HALF_TYPES or not isinstance(saved, dict):
            continue
        loaded = optimizer.state[param]
        for key, value in saved.items():
            if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                loaded[key] = value.detach().to(device=param.device, dtype=torch.float32, copy=True)


Flag = tuple[Tensor, "LossScaler", int]
"""An overflow flag on the device, its loss scaler, and the `loss_id` of that scaler."""


class AmpOptimizerState:
    """Flags and parameter lists of one optimizer.

    The lists appear at lazy initialization, and those with `fp32_from` in their names under master weights only:
    `FusedSGD.step` and scripts test for them with `hasattr`.
    """

    any_masters: ClassVar[bool] = False  # whether this process ever made an optimizer with master weights

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
        self.half_dtype = half_dtype  # of the parameters that are not fp32
        self.lazy_init_called = False
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.master_weights = master_weights
        if master_weights:
            AmpOptimizerState.any_masters = True
        self.uniform_device = True
        self.stashed = False
        # Without host reads: whether `step` takes flags, those of the backward passes since the last step, amp's own
        # `step`, and the optimizer state whose momentum was made.
        self.takes_flags = False
        self.flags: list[Flag] = []
        self.own_step: Any = None
        self.momentum_state: Any = None
        self.momentum_count = 0

    def params_and_stashes(self) -> tuple[tuple[list[Tensor], list[Tensor | None]], ...]:
        """Return the half and the fp32 parameters of the model, each with the gradients that are stashed for them."""
        half = self.all_fp16_params, self.all_fp16_grad_stash
        if self.master_weights:
            return half, (self.all_fp32_from_fp32_params, self.all_fp32_from_fp32_grad_stash)
        return half, (self.all_fp32_params, self.all_fp32_grad_stash)

    def release_buffers(self) -> None:
        """Release the memory of master gradients for the activations, on devices with a caching allocator."""
        if (
            self.master_weights
            and self.all_fp16_params
            and self.all_fp16_params[0].device.type in _CACHED_DEVICES
        ):
            self.master_grad_buffers = [None] * len(self.master_grad_buffers)

    def note_if_one_device(self, params: Sequence[Tensor]) -> None:
        """Record whether all parameters share one device, so that one kernel can serve all gradients."""
        self.uniform_device = len({param.device for param in params}) <= 1
