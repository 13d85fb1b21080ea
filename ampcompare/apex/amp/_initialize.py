"""Prepare models and optimizers for an opt level, once its options are resolved.

Source: Apex 25.05, `apex/amp/_initialize.py`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ampcompare.apex.fp16_utils.fp16util import convert_network

from ._amp_state import _amp_state, warn_or_err
from ._engine import device_skip
from ._engine.errors import AmpPreparationError, AmpPreparationTypeError
from ._engine.forward import CastForward
from ._engine.forward import applier as applier  # scripts import it from here
from ._engine.forward import to_type as to_type
from ._engine.optimizer_state import cast_state_to_parameter_types, reload_own_state_dict
from ._process_optimizer import _keep_scheduler_mark, _process_optimizer, refuse_prepared_optimizer
from .amp import init as amp_init
from .scaler import LossScaler

if TYPE_CHECKING:
    from ._engine.properties import Properties


def check_models(models: list[nn.Module]) -> None:
    """Raise `AmpPreparationError` for models inside a parallel wrapper."""
    for model in models:
        wrapped = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        if not wrapped and not _amp_state.strict:
            wrapped = any(cls.__name__ == "DistributedDataParallel" for cls in type(model).__mro__)
        if wrapped:
            raise AmpPreparationError(
                f"Incoming model is an instance of {type(model).__module__}.{type(model).__name__}. Parallel wrappers "
                "should only be applied AFTER the model(s) have been returned from amp.initialize."
            )


def check_params_fp32(models: list[nn.Module]) -> None:
    """Reject half parameters and buffers, unless `hard_override` is set: amp casts them itself."""
    for model in models:
        for kind, entries in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in entries:
                if tensor.dtype is torch.float16:
                    warn_or_err(
                        f"Found {kind} {name} with dtype {tensor.dtype}, expected torch.float32.  Do not call .half() "
                        "on a model before amp.initialize: it casts what the opt level wants cast."
                    )


def check_optimizers(optimizers: list[Any]) -> None:
    """Raise `AmpPreparationError` for FP16_Optimizer, which scales losses itself."""
    for optimizer in optimizers:
        for cls in type(optimizer).__mro__:
            if cls.__name__ == "FP16_Optimizer":
                raise AmpPreparationError(
                    f"An incoming optimizer is an instance of {cls.__module__}.FP16_Optimizer, which scales losses "
                    "itself.  Pass the optimizer that it wraps to amp.initialize."
                )


def cast_half_entries_to_float(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Replace half entries of a state dict by fp32 copies; a state-dict hook of every submodule."""
    for key, value in state_dict.items():
        if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            state_dict[key] = value.to(torch.float32)


def _optimizers_as_list(optimizers: Any) -> list[Any]:
    if optimizers is None:
        return []
    # Apex's LARC is no torch optimizer.
    if isinstance(optimizers, torch.optim.Optimizer) or any(
        c.__name__ == "LARC" for c in type(optimizers).__mro__
    ):
        return [optimizers]
    if isinstance(optimizers, list):
        check_optimizers(optimizers)
        return optimizers
    check_optimizers([optimizers])
    raise AmpPreparationTypeError(
        f"optimizers must be an optimizer or a list of optimizers, got {type(optimizers).__name__}."
    )


def _models_as_list(models: Any) -> list[nn.Module]:
    if isinstance(models, nn.Module):
        return [models]
    if isinstance(models, list):
        return models
    raise AmpPreparationTypeError(
        f"models must be a torch.nn.Module or a list of them, got {type(models).__name__}."
    )


def _initialize(
    models: Any,
    optimizers: Any,
    properties: Properties,
    num_losses: int = 1,
    cast_model_outputs: torch.dtype | None = None,
) -> Any:
    """Apply `properties`, and return models and optimizers in the structure in which they were passed."""
    optimizer_list = _optimizers_as_list(optimizers)
    model_list = _models_as_list(models)
    check_models(model_list)
    if not _amp_state.allow_incoming_model_not_fp32:
        check_params_fp32(model_list)
    for optimizer in optimizer_list:
        refuse_prepared_optimizer(optimizer)

    if properties.cast_model_type:
        _cast_models(model_list, optimizer_list, properties, cast_model_outputs)
    elif cast_model_outputs is not None:
        for model in model_list:
            CastForward.install(model, None, cast_model_outputs, under_casts=True)

    for index, optimizer in enumerate(optimizer_list):
        optimizer_list[index] = _process_optimizer(optimizer, properties)
    if properties.master_weights and not _amp_state.strict:
        _refresh_masters_at_loads(model_list, optimizer_list)

    _amp_state.loss_scalers = [
        LossScaler(
            properties.loss_scale,
            min_loss_scale=_amp_state.min_loss_scale,
            max_loss_scale=_amp_state.max_loss_scale,
        )
        for _ in range(num_losses)
    ]

    if properties.patch_torch_functions:
        on_cuda = any(param.is_cuda for model in model_list for param in model.parameters())
        amp_init(verbose=_amp_state.verbosity == 2, _cuda_only=on_cuda, _half_dtype=properties.half_dtype)
        for optimizer in optimizer_list:
            _wrap_step_without_casts(optimizer)
    for optimizer in optimizer_list:
        device_skip.note_outermost_step(optimizer)

    if optimizers is None:
        return models
    return models, optimizers


def _cast_models(
    models: list[nn.Module],
    optimizers: list[Any],
    properties: Properties,
    cast_model_outputs: torch.dtype | None,
) -> None:
    dtype = properties.cast_model_type
    outputs = torch.float32 if cast_model_outputs is None else cast_model_outputs
    under_casts = bool(properties.patch_torch_functions)
    for model in models:
        if properties.keep_batchnorm_fp32:
            convert_network(model, dtype)
        else:
            model.to(dtype)
        CastForward.install(model, dtype, outputs, under_casts=under_casts)
        for module in model.modules():
            if cast_half_entries_to_float not in module._state_dict_hooks.values():
                # By the class: a module of TorchScript has hooks, but refuses to register one.
                nn.Module._register_state_dict_hook(module, cast_half_entries_to_float)
    for optimizer in optimizers:
        if _amp_state.strict:
            reload_own_state_dict(optimizer)
        else:
            cast_state_to_parameter_types(optimizer, keep_half_params_full=bool(properties.master_weights))


def _wrap_step_without_casts(optimizer: Any) -> None:
    """Run `optimizer.step` with O1's casts off, and drop cached casts of weights that it changed."""
    inner: Callable[..., Any] = optimizer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.__dict__.get("handle")
        if handle is None:
            return inner(*args, **kwargs)
        with handle._disable_casts():
            result = inner(*args, **kwargs)
        if not handle.strict:
            handle._clear_cache()
        return result

    _keep_scheduler_mark(step, inner)
    optimizer.step = types.MethodType(step, optimizer)


def _refresh_masters_at_loads(models: list[nn.Module], optimizers: list[Any]) -> None:
    """Refresh masters whenever one of the models, or a part of one, loads a state dict."""
    _amp_state.master_optimizers += [weakref.ref(optimizer) for optimizer in optimizers]
    for model in models:
        for module in model.modules():
            if _refresh_masters_of_module not in module._load_state_dict_post_hooks.values():
                nn.Module.register_load_state_dict_post_hook(module, _refresh_masters_of_module)


def _refresh_masters_of_module(module: nn.Module, incompatible_keys: Any) -> None:
    """Copy a module's own half parameters into their masters; a load-state-dict post hook."""
    types = (torch.float16, torch.bfloat16)
    half = [param for param in module._parameters.values() if param is not None and param.dtype in types]
    if not half:
        return
    for reference in _amp_state.master_optimizers:
        optimizer = reference()
        if optimizer is None or not optimizer._amp_stash.lazy_init_called:
            continue
        stash = optimizer._amp_stash
        for param in half:
            index = stash.index_of_half.get(id(param))
            if index is not None:
                with torch.no_grad():
                    stash.all_fp32_from_fp16_params[index].copy_(param)
