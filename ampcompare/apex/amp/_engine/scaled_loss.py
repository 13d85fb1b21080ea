"""Scale a loss around its backward pass, then unscale and check the gradients.

Source: Apex 25.05, `apex/amp/handle.py`; scripts parse the overflow line.
"""

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex.amp._amp_state import _amp_state, maybe_print, overflow_message
from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.base.tensors.backward import run_backward

from . import device_skip
from .backward import restore_stashed_gradients
from .errors import AmpNotInitialized, AmpScalingError, UnknownLossId, UnknownOptimizer
from .optimizer_state import AmpOptimizerState

_FLOAT32 = torch.float32
_state = _amp_state.__dict__  # stays valid: `close` clears it in place

# Never O1's wrapper, since there is nothing to cast.
_multiply = torch._C.TensorBase.mul


def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Any]:
    """Yield the scaled loss; on exit unscale the gradients, check them and move the loss scale.

    The loss is cast to fp32 before it is scaled, by the scaler `loss_id`. `optimizers` is one or several: all whose
    parameters receive gradients in this pass. `delay_unscale` leaves gradients scaled, as more passes accumulate into
    them before the step; `delay_overflow_check` unscales, but neither checks nor moves the scale. `model` is ignored.

    Raises:
        AmpNotInitialized: before `initialize` (a RuntimeError).
        UnknownLossId: no such scaler (an IndexError).
        UnknownOptimizer: an optimizer that `initialize` did not prepare (an AttributeError).

    After an overflow the next `step` of each of these optimizers only prints a message.
    """
    if _needs_no_scaling(loss_id):
        return UnscaledLoss((loss,))
    return ScaledLoss(loss, optimizers, loss_id, delay_unscale, delay_overflow_check)


def _needs_no_scaling(loss_id: int) -> bool:
    """Return whether a pass has nothing to scale and nothing to unscale: O0 and O3 with their defaults."""
    scalers = _state.get("loss_scalers")
    if not scalers or loss_id != 0 or "handle" in _state or _state["deferred"] is not None:
        return False
    # `_host_scale` is enough: a static scale is never on the device.
    scaler, options = scalers[0], _state["opt_properties"].options
    if scaler.dynamic or scaler._host_scale != 1.0 or not options["enabled"] or options["master_weights"]:
        return False
    return not AmpOptimizerState.any_masters


class UnscaledLoss(tuple[Any]):
    """The block of `scale_loss` if `ScaledLoss` has nothing to do.

    A tuple of the loss: unlike an object with `__init__`, creating it calls no Python code.
    """

    __slots__ = ()

    def __enter__(self) -> Any:
        loss = self[0]
        return loss if loss.__class__ is Tensor and loss.dtype is _FLOAT32 else loss.float()

    def __exit__(self, *_exc: object) -> None:
        return


class ScaledLoss(AbstractContextManager[Any]):
    """The block of `scale_loss`; `prepare` and `__exit__` also serve a pass that needs no scaled loss."""

    _initial_grad: Tensor
    _version: int

    def __init__(
        self, loss: Any, optimizers: Any, loss_id: int, delay_unscale: bool, delay_check: bool
    ) -> None:
        self._loss = loss
        self._optimizers = self._given = optimizers
        self._loss_id = loss_id
        self._delay_unscale = delay_unscale
        self._delay_check = delay_check
        self._scaler: LossScaler | None = None
        self._scaled: Tensor | None = None
        self._on_device = False

    def __enter__(self) -> Any:
        scale = self.prepare_scale_of_pass()
        if scale is None:
            return self._loss
        loss = self._loss.float()
        scaler = self._scaler
        if scaler is None:
            return loss
        initial_grad = self.initial_grad(scale, loss.device) if loss.__class__ is Tensor else None
        if initial_grad is None:
            return loss * scale
        scaled = _multiply(loss, initial_grad)
        if scaled.requires_grad and scaled.dim() == 0:
            self._loss, self._version = loss, loss._version
            self._initial_grad = initial_grad
            self._scaled = scaled
            scaled.backward = self._backward  # type: ignore[method-assign]
        return scaled

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        """Replace `backward` of the scaled loss inside the block: start below the product if that is unobservable."""
        scaled, loss = self._scaled, self._loss
        assert scaled is not None, "the block has set it"
        is_observed = scaled._backward_hooks is not None or scaled.retains_grad
        if args or kwargs or is_observed or scaled._version or loss._version != self._version:
            Tensor.backward(scaled, *args, **kwargs)  # type: ignore[no-untyped-call]
        else:
            run_backward(loss, self._initial_grad)

    def prepare_scale_of_pass(self) -> float | Tensor | None:
        """Prepare for the backward pass, and return the scale of the loss; None if amp is off."""
        state = _amp_state.__dict__
        properties = state.get("opt_properties")
        if properties is None:
            raise AmpNotInitialized(
                "amp.scale_loss was called before amp.initialize.  Call amp.initialize first."
            )
        options = properties.options
        if not options["enabled"]:
            return None
        try:
            scaler: LossScaler = state["loss_scalers"][self._loss_id]
        except LookupError:
            raise UnknownLossId(
                f"loss_id {self._loss_id} names no loss scaler: amp.initialize made "
                f"{len(state.get('loss_scalers', []))}.  Pass num_losses={self._loss_id + 1} or more to amp.initialize."
            ) from None
        if state["deferred"] is not None:
            state["deferred"].flush()
        if not scaler.dynamic and scaler.loss_scale() == 1.0:
            if not options["master_weights"] and not self._has_old_masters():
                return 1.0
        optimizers = self._list_optimizers()
        self._scaler = scaler
        if scaler.dynamic:
            device = device_skip.find_flag_device(self._loss, optimizers)
            self._on_device = device is not None and scaler.prepare_scale_on_device(device)
        if not self._delay_unscale:
            # Strict mode: Apex prepares optimizers in a list only, not in a tuple.
            for optimizer in () if state["strict"] and isinstance(self._given, tuple) else optimizers:
                if not optimizer._amp_stash.params_have_scaled_gradients:
                    optimizer._prepare_amp_backward()
        elif not state["strict"]:
            # Masters created after the backward pass would discard the accumulated gradients.
            for optimizer in optimizers:
                optimizer._amp_lazy_init()
        return scaler.device_initial_grad() if self._on_device else scaler.loss_scale()

    def initial_grad(self, scale: float | Tensor, device: torch.device) -> Tensor | None:
        """Return the result of `prepare` as the initial gradient; None for 1, or if fp32 cannot hold it."""
        if isinstance(scale, Tensor):
            return scale
        return None if self._scaler is None else self._scaler.initial_grad_from_host(device)

    def _list_optimizers(self) -> Any:
        optimizers = self._optimizers
        if not isinstance(optimizers, list):
            is_one = isinstance(optimizers, torch.optim.Optimizer) or hasattr(optimizers, "param_groups")
            self._optimizers = optimizers = [optimizers] if is_one else list(optimizers)
        for optimizer in optimizers:
            if not hasattr(optimizer, "_amp_stash"):
                raise UnknownOptimizer(
                    f"{type(optimizer).__name__} has no _amp_stash: it did not go through amp.initialize.  Pass every "
                    "optimizer to amp.initialize together with its model, and not a copy of it to amp.scale_loss."
                )
        return optimizers

    def _has_old_masters(self) -> bool:
        """Return whether an optimizer of an earlier `initialize` has masters although the last one created none."""
        optimizers = self._optimizers
        if _amp_state.strict:
            return False
        for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,):
            stash = getattr(optimizer, "_amp_stash", None)
            if stash is not None and stash.master_weights:
                return True
        return False

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        if self._scaled is not None:
            # Break the reference cycle, so that the graph is freed without the cyclic collector.
            self._scaled.__dict__.pop("backward", None)
        if exc_type is not None:
            self._restore_stashed_gradients()
            return
        scaler = self._scaler
        if scaler is not None:
            if self._delay_unscale:
                for optimizer in self._optimizers:
                    optimizer._amp_stash.params_have_scaled_gradients = True
            elif self._on_device:
                self._finish_pass_on_device(scaler)
            else:
                scaler.clear_overflow_state()
                for optimizer in self._optimizers:
                    optimizer._post_amp_backward(scaler)
                    optimizer._amp_stash.params_have_scaled_gradients = False
                if not self._delay_check and scaler.update_scale():
                    for optimizer in self._optimizers:
                        _skip_next_step(optimizer, scaler, self._loss_id)
        handle = _amp_state.__dict__.get("handle")
        if handle is not None:
            _clear_cast_cache(handle)

    def _finish_pass_on_device(self, scaler: LossScaler) -> None:
        flag = scaler.begin_device_pass()
        update = False
        try:
            for optimizer in self._optimizers:
                optimizer._post_amp_backward(scaler)
                optimizer._amp_stash.params_have_scaled_gradients = False
            update = not self._delay_check
        finally:
            scaler.end_device_pass(update=update)
        if update:
            for optimizer in self._optimizers:
                device_skip.skip_next_step_if_flag(optimizer, flag, scaler, self._loss_id)

    def _restore_stashed_gradients(self) -> None:
        """Restore the gradients that `__enter__` stashed: the backward pass failed."""
        if _amp_state.strict:
            return
        if self._scaler is not None and not self._delay_unscale:
            for optimizer in self._optimizers:
                if not optimizer._amp_stash.params_have_scaled_gradients:
                    restore_stashed_gradients(optimizer)
        handle = _amp_state.__dict__.get("handle")
        if handle is not None:
            _clear_cast_cache(handle)


def _clear_cast_cache(handle: Any) -> None:
    # Apex checks the last session only, so an O0 model after an O1 model trains on stale casts.
    if not _amp_state.strict or _amp_state.opt_properties.options["patch_torch_functions"]:
        handle._clear_cache()


def backward(loss: Any, optimizers: Any, loss_id: int = 0, delay_unscale: bool = False) -> None:
    """Run `with scale_loss(...) as scaled: scaled.backward()`, for a scalar without the product and its node.

    The derivative of the product is the scale, so every gradient has the same bits.
    """
    if loss.__class__ is Tensor and _needs_no_scaling(loss_id):
        run_backward(loss if loss.dtype is _FLOAT32 else loss.float())
        return
    block = ScaledLoss(loss, optimizers, loss_id, delay_unscale, False)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        with block as scaled_loss:
            scaled_loss.backward()
        return
    scale = block.prepare_scale_of_pass()
    try:
        if scale is None:
            loss.backward()
        else:
            initial_grad = block.initial_grad(scale, loss.device)
            if initial_grad is None and scale != 1.0:
                (loss.float() * scale).backward()
            else:
                run_backward(loss.float(), initial_grad)
    except BaseException:
        block.__exit__(*sys.exc_info())
        raise
    block.__exit__(None, None, None)


def _skip_next_step(optimizer: Any, scaler: LossScaler, loss_id: int) -> None:
    """Make the next `optimizer.step()` a skip.

    The replacement is a bound method, so that LR schedulers can wrap it; such a scheduler keeps its
    wrapper, and later steps pass through to the original.
    """
    stash = optimizer._amp_stash
    if stash.already_patched:
        return
    inner: Callable[..., Any] = optimizer.step
    had_instance_step = "step" in optimizer.__dict__
    spent = False

    def skip_step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        nonlocal spent
        if spent:
            return inner(**kwargs) if closure is None else inner(closure, **kwargs)
        if closure is not None:
            raise AmpScalingError(
                "optimizer.step(closure) does not work with amp: call step() without a closure."
            )
        maybe_print(overflow_message(loss_id, scaler.loss_scale()))
        stash.flags = []
        for master in getattr(stash, "all_fp32_from_fp16_params", ()):
            master.grad = None
        stash.release_buffers()
        if hasattr(self, "most_recent_scale"):
            self.most_recent_scale = 1.0
            self.scale_set_by_backward = False
        spent = True
        stash.already_patched = False
        if getattr(self.__dict__.get("step"), "__func__", None) is skip_step:
            if had_instance_step:
                self.step = inner
            else:
                del self.step
        if not _amp_state.strict:
            # The user called step: prevents a warning of torch's schedulers about the order of calls.
            self._opt_called = True
        return None

    optimizer.step = types.MethodType(skip_step, optimizer)
    stash.already_patched = True
