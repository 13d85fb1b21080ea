"""Install amp's methods on an optimizer, and its master weights.

Everything is set on the instance, so `copy.deepcopy(optimizer)` loses it, as with Apex.

FusedSGD's kernel divides by `most_recent_scale` itself; its masters never get gradients.

Source: Apex 25.05, `apex/amp/_process_optimizer.py`, with its FusedSGD paths.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampcompare.apex.amp.scaler import LossScaler

from ._amp_state import _amp_state
from ._engine import backward, device_skip
from ._engine.backward import GradientsOff
from ._engine.errors import AmpPreparationError, AmpScalingError, ParameterTypeError
from ._engine.optimizer_state import (
    AmpOptimizerState,
    cast_state_to_parameter_types,
    load_state_keeping_precision,
    reload_own_state_dict,
)

if TYPE_CHECKING:
    from ._engine.properties import Properties

_INSTALLED = (
    *("_lazy_init_maybe_master_weights", "_master_params_to_model_params", "_prepare_amp_backward"),
    *("_post_amp_backward", "_amp_lazy_init"),
)


def refuse_prepared_optimizer(optimizer: Any) -> None:
    """Raise `AmpPreparationError` for an optimizer that `initialize` has already prepared."""
    if hasattr(optimizer, "_amp_stash"):
        raise AmpPreparationError(
            f"{type(optimizer).__name__} went through amp.initialize before.  Hand each optimizer to amp.initialize "
            "once; build a new one, or keep the one that came back."
        )
    for name in _INSTALLED:
        if hasattr(optimizer, name):
            raise AmpPreparationError(
                f"{type(optimizer).__name__} has an attribute {name!r}, a name that amp.initialize uses.  Rename it."
            )


def _process_optimizer(optimizer: Any, properties: Properties) -> Any:
    """Install amp's methods on `optimizer`, and return the same object."""
    refuse_prepared_optimizer(optimizer)
    master_weights = bool(properties.master_weights)
    optimizer._amp_stash = AmpOptimizerState(master_weights, properties.half_dtype)
    if properties.loss_scale == "dynamic" and not _amp_state.strict:
        device_skip.make_step_honor_overflow_flags(optimizer)
    if master_weights:
        _bind_method(optimizer, "_lazy_init_maybe_master_weights", lazy_init_with_master_weights)
        _bind_method(optimizer, "_master_params_to_model_params", _master_params_to_model_params)
        # whose gradients are never created
        if _is_fused_sgd(optimizer) and not optimizer.materialize_master_grads:
            _bind_method(optimizer, "_prepare_amp_backward", backward.prepare_backward_no_master_weights)
            _bind_method(optimizer, "_post_amp_backward", _add_stashed_at_one_scale)
        else:
            _bind_method(optimizer, "_prepare_amp_backward", backward.prepare_backward_with_master_weights)
            _bind_method(optimizer, "_post_amp_backward", backward.post_backward_with_master_weights)
        _replace_step(optimizer)
        _replace_zero_grad(optimizer)
        if not _amp_state.strict:
            _replace_load_state_dict(optimizer)
    else:
        _bind_method(optimizer, "_lazy_init_maybe_master_weights", lazy_init_no_master_weights)
        _bind_method(optimizer, "_prepare_amp_backward", backward.prepare_backward_no_master_weights)
        _bind_method(optimizer, "_post_amp_backward", backward.post_backward_no_master_weights)
    _bind_method(optimizer, "_amp_lazy_init", _amp_lazy_init)
    _replace_add_param_group(optimizer)
    return optimizer


def _bind_method(optimizer: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(optimizer, name, types.MethodType(function, optimizer))


def _amp_lazy_init(optimizer: Any) -> None:
    """Create masters and parameter lists, at the first call."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if not stash.lazy_init_called:
        optimizer._lazy_init_maybe_master_weights()
        stash.lazy_init_called = True


def _parameter_type_error(param: Tensor) -> ParameterTypeError:
    return ParameterTypeError(
        f"Optimizer parameters must be float16 or float32, got {param.dtype}.  Cast the model before building the "
        "optimizer, or leave this parameter out of amp."
    )


def lazy_init_with_master_weights(optimizer: Any) -> None:
    """Replace each half parameter of the groups by an fp32 master, at the same index, with its optimizer state."""
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.fp16_groups = []
    stash.fp32_from_fp16_groups = []
    stash.fp32_from_fp32_groups = []
    for group in optimizer.param_groups:
        _make_masters_of_group(optimizer, stash, group["params"])
    _build_flat_lists(stash)
    for param in (*stash.all_fp32_from_fp16_params, *stash.all_fp32_from_fp32_params):
        param.grad = None
    # The state that moved from half parameters to masters becomes fp32.
    if _amp_state.strict:
        reload_own_state_dict(optimizer)
    else:
        cast_state_to_parameter_types(optimizer)


def _make_masters_of_group(optimizer: Any, stash: AmpOptimizerState, params: list[Tensor]) -> None:
    half: list[Tensor] = []
    masters: list[Tensor] = []
    full: list[Tensor] = []
    for index, param in enumerate(params):
        if not param.requires_grad:
            continue
        if param.dtype is stash.half_dtype:
            master = param.detach().clone().float()
            master.requires_grad = True
            params[index] = master
            half.append(param)
            masters.append(master)
            if param in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(param)
        elif param.dtype is torch.float32:
            full.append(param)
        else:
            raise _parameter_type_error(param)
    stash.fp16_groups.append(half)
    stash.fp32_from_fp16_groups.append(masters)
    stash.fp32_from_fp32_groups.append(full)


def _build_flat_lists(stash: AmpOptimizerState) -> None:
    """Build the flat lists from the groups; stashed gradients of existing parameters keep their indices."""

    def extend(kept: list[Any], length: int) -> list[Any]:
        return kept + [None] * (length - len(kept))

    stash.all_fp16_params = [param for group in stash.fp16_groups for param in group]
    stash.all_fp32_from_fp16_params = [param for group in stash.fp32_from_fp16_groups for param in group]
    stash.all_fp32_from_fp32_params = [param for group in stash.fp32_from_fp32_groups for param in group]
    stash.all_model_params = [*stash.all_fp16_params, *stash.all_fp32_from_fp32_params]
    halves, fulls = len(stash.all_fp16_params), len(stash.all_fp32_from_fp32_params)
    stash.all_fp16_grad_stash = extend(getattr(stash, "all_fp16_grad_stash", []), halves)
    stash.master_grad_buffers = extend(getattr(stash, "master_grad_buffers", []), halves)
    stash.all_fp32_from_fp32_grad_stash = extend(getattr(stash, "all_fp32_from_fp32_grad_stash", []), fulls)
    stash.index_of_half = {id(param): index for index, param in enumerate(stash.all_fp16_params)}
    stash.note_if_one_device(stash.all_model_params)


def lazy_init_no_master_weights(optimizer: Any) -> None:
    """Sort all parameters, frozen ones too, by dtype."""
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.all_fp16_params, stash.all_fp32_params = [], []
    stash.all_fp16_grad_stash, stash.all_fp32_grad_stash = [], []
    for group in optimizer.param_groups:
        _sort_params_by_dtype(stash, group["params"])


def _sort_params_by_dtype(stash: AmpOptimizerState, params: Iterable[Tensor]) -> None:
    for param in params:
        if param.dtype is stash.half_dtype:
            stash.all_fp16_params.append(param)
            stash.all_fp16_grad_stash.append(None)
        elif param.dtype is torch.float32:
            stash.all_fp32_params.append(param)
            stash.all_fp32_grad_stash.append(None)
        else:
            raise _parameter_type_error(param)
    stash.note_if_one_device([*stash.all_fp16_params, *stash.all_fp32_params])


def _master_params_to_model_params(optimizer: Any) -> None:
    """Round the masters into the half parameters of the model."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if not stash.all_fp16_params:
        return
    with GradientsOff():
        torch._foreach_copy_(stash.all_fp16_params, stash.all_fp32_from_fp16_params)


def _replace_step(optimizer: Any) -> None:
    inner = optimizer.step
    writes_model = _is_fused_sgd(optimizer)

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise AmpScalingError(
                "optimizer.step(closure) does not work with amp's master weights: the closure would compute gradients "
                "of the half parameters only.  Compute the loss outside, and call step() without a closure."
            )
        stash: AmpOptimizerState = self._amp_stash
        if not stash.lazy_init_called:
            self._amp_lazy_init()
        result = inner()
        if not writes_model:
            self._master_params_to_model_params()
        for master in stash.all_fp32_from_fp16_params:
            master.grad = None
        stash.release_buffers()
        return result

    _keep_scheduler_mark(step, inner)
    _bind_method(optimizer, "step", step)


def _keep_scheduler_mark(function: Any, inner: Any) -> None:
    """Keep the mark of a scheduler that wrapped `step` earlier; without it the scheduler warns about a lost wrapper."""
    if hasattr(inner, "_wrapped_by_lr_sched"):
        function._wrapped_by_lr_sched = True


def _replace_zero_grad(optimizer: Any) -> None:
    def zero_grad(self: Any, set_to_none: bool = False) -> None:
        stash: AmpOptimizerState = self._amp_stash
        if not stash.lazy_init_called:
            self._amp_lazy_init()
        if set_to_none:
            for param in stash.all_model_params:
                param.grad = None
        else:
            # Separate calls: CUDA launches one kernel for a list of one dtype, and one for each tensor of a mixed list.
            _zero_grads(stash.all_fp16_params)
            if stash.all_fp32_from_fp32_params:
                _zero_grads(stash.all_fp32_from_fp32_params)
        for master in stash.all_fp32_from_fp16_params:
            master.grad = None

    _bind_method(optimizer, "zero_grad", zero_grad)


def _zero_grads(params: list[Tensor]) -> None:
    grads = [grad for param in params if (grad := param.grad) is not None]
    for grad in grads:
        if grad.requires_grad:
            grad.detach_()
    try:
        if grads:
            torch._foreach_zero_(grads)
    except NotImplementedError:  # sparse gradients, where torch has no kernel for lists of them
        for grad in grads:
            grad.zero_()


def _replace_load_state_dict(optimizer: Any) -> None:
    inner = optimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        load_state_keeping_precision(self, inner, state_dict)

    _bind_method(optimizer, "load_state_dict", load_state_dict)


def _replace_add_param_group(optimizer: Any) -> None:
    inner = optimizer.add_param_group

    def add_param_group(self: Any, new_group: dict[str, Any]) -> None:
        self._amp_lazy_init()
        assert isinstance(new_group, dict), (
            f"a parameter group must be a dict, got {type(new_group).__name__}"
        )
        group = new_group if _amp_state.strict else dict(new_group)
        params = group["params"]
        if isinstance(params, Tensor):
            params = [params]
        elif isinstance(params, set):
            raise ParameterTypeError(
                "The parameters of a group need an order, which a set has not.  Pass a list."
            )
        group["params"] = params = list(params)
        stash: AmpOptimizerState = self._amp_stash
        if stash.master_weights:
            _make_masters_of_group(self, stash, params)
            _build_flat_lists(stash)
        else:
            _sort_params_by_dtype(stash, params)
        stash.momentum_state = None
        inner(group)

    _bind_method(optimizer, "add_param_group", add_param_group)


def _is_fused_sgd(optimizer: Any) -> bool:
    """Return whether this is Apex's FusedSGD (by name), which writes the model's half parameters itself."""
    return any(cls.__name__ == "FusedSGD" for cls in type(optimizer).__mro__)


def _add_stashed_at_one_scale(optimizer: Any, scaler: LossScaler) -> None:
    """Bring new and stashed gradients to one scale, the smaller of theirs, and add them."""
    optimizer._amp_lazy_init()
    stash: AmpOptimizerState = optimizer._amp_stash
    grad_scale = scaler.loss_scale()
    stash_scale = optimizer.most_recent_scale
    out_scale = grad_scale
    if optimizer.scale_set_by_backward:
        out_scale = min(grad_scale, stash_scale)
    scales = (grad_scale, stash_scale, out_scale)
    with torch.no_grad():
        for params, kept in stash.params_and_stashes():
            _add_stashed_gradients(params, kept, scaler, scales)
    stash.stashed = False
    optimizer.most_recent_scale = out_scale
    optimizer.scale_set_by_backward = True


def _add_stashed_gradients(
    params: Sequence[Tensor],
    kept: list[Tensor | None],
    scaler: LossScaler,
    scales: tuple[float, float, float],
) -> None:
    grad_scale, stash_scale, out_scale = scales
    fresh: list[Tensor] = []
    both: list[Tensor] = []
    stashed: list[Tensor] = []
    for index, param in enumerate(params):
        grad, old = param.grad, kept[index]
        kept[index] = None
        if grad is None:
            param.grad = old
            if old is not None and out_scale != stash_scale and not _amp_state.strict:
                old.mul_(out_scale / stash_scale)
        elif old is None:
            fresh.append(grad)
        else:
            both.append(grad)
            stashed.append(old)
    if fresh:
        scaler.unscale(
            fresh, fresh, grad_scale, models_are_masters=True, scale_override=grad_scale / out_scale
        )
    if both:
        scaler.unscale_with_stashed(both, stashed, both, scale_override=scales)
