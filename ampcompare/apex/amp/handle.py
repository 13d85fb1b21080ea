"""Scale a loss around its backward pass, switch O1's casts off, and hold what O1 patched.

Source: Apex 25.05, `apex/amp/handle.py`; the overflow line is an interface that scripts parse.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from . import _syncfree
from ._amp_state import _amp_state, maybe_print, overflow_message
from ._backward import abandon_backward
from ._errors import AmpNotInitialized, AmpScalingError, UnknownLossId, UnknownOptimizer
from .scaler import LossScaler

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Any]:
    """Yield the scaled loss; on exit unscale the gradients, check them and move the loss scale.

    Args:
        loss: any tensor; it is taken to fp32 before it is multiplied.
        optimizers: one optimizer or several, all whose parameters receive gradients in this backward pass.
        loss_id: which loss scaler, from 0 to `num_losses - 1`.
        model: ignored, as in Apex.
        delay_unscale: leave gradients scaled, because more backward passes are to add to them before the step.
        delay_overflow_check: unscale, but neither look for overflow nor move the scale.

    Raises:
        AmpNotInitialized: before `initialize` (a RuntimeError).
        UnknownLossId: no such scaler (an IndexError).
        UnknownOptimizer: an optimizer that `initialize` never saw (an AttributeError).

    After an overflow the next `step` of each of these optimizers does nothing but say so.
    """
    return _ScaledLoss(loss, optimizers, loss_id, delay_unscale, delay_overflow_check)


class _ScaledLoss(AbstractContextManager[Any]):
    __slots__ = (
        "_delay_check",
        "_delay_unscale",
        "_given",
        "_loss",
        "_loss_id",
        "_on_device",
        "_optimizers",
        "_scaler",
    )

    def __init__(self, loss: Any, optimizers: Any, loss_id: int, delay_unscale: bool, delay_check: bool) -> None:
        self._loss = loss
        self._optimizers = self._given = optimizers
        self._loss_id = loss_id
        self._delay_unscale = delay_unscale
        self._delay_check = delay_check
        self._scaler: LossScaler | None = None
        self._on_device = False

    def __enter__(self) -> Any:
        scale = self.prepare()
        if scale is None:
            return self._loss
        return self._loss.float() if self._scaler is None else self._loss.float() * scale

    def prepare(self) -> float | Tensor | None:
        """Make ready for the backward pass, and return the scale of the loss; None where amp is off."""
        state = _amp_state.__dict__
        properties = state.get("opt_properties")
        if properties is None:
            raise AmpNotInitialized("amp.scale_loss was called before amp.initialize.  Call amp.initialize first.")
        options = properties.options
        if not options["enabled"]:
            return None
        scaler = self._find_scaler(state)
        if state["deferred"] is not None:
            state["deferred"].flush()
        if not scaler.dynamic and scaler.loss_scale() == 1.0:
            if not options["master_weights"] and not self._has_old_masters():
                return 1.0
        optimizers = self._list_optimizers()
        self._scaler = scaler
        if scaler.dynamic:
            device = _syncfree.common_device(self._loss, optimizers)
            self._on_device = device is not None and scaler.goes_on_device(device)
        if not self._delay_unscale:
            # Strict mode: Apex prepares the members of a list only.
            for optimizer in () if _amp_state.strict and isinstance(self._given, tuple) else optimizers:
                if not optimizer._amp_stash.params_have_scaled_gradients:
                    optimizer._prepare_amp_backward()
        elif not _amp_state.strict:
            # Masters made as late as after the backward pass would wipe what it accumulated.
            for optimizer in optimizers:
                optimizer._amp_lazy_init()
        return scaler.device_scale() if self._on_device else scaler.loss_scale()

    def seed(self, scale: float | Tensor, device: torch.device) -> Tensor | None:
        """Return what `prepare` returned as the gradient to start from; None stands for 1."""
        if self._scaler is None or isinstance(scale, Tensor):
            return scale if isinstance(scale, Tensor) else None
        return self._scaler.seed_on(device)

    def _find_scaler(self, state: dict[str, Any]) -> LossScaler:
        scalers: list[LossScaler] = state.get("loss_scalers", [])
        try:
            return scalers[self._loss_id]
        except IndexError:
            raise UnknownLossId(
                f"loss_id {self._loss_id} names no loss scaler: amp.initialize made {len(scalers)}.  Pass "
                f"num_losses={self._loss_id + 1} or more to amp.initialize."
            ) from None

    def _list_optimizers(self) -> Any:
        optimizers = self._optimizers
        if isinstance(optimizers, torch.optim.Optimizer) or hasattr(optimizers, "param_groups"):
            self._optimizers = optimizers = [optimizers]
        elif not isinstance(optimizers, list):
            self._optimizers = optimizers = list(optimizers)
        for optimizer in optimizers:
            if not hasattr(optimizer, "_amp_stash"):
                raise UnknownOptimizer(
                    f"{type(optimizer).__name__} has no _amp_stash: it did not go through amp.initialize.  Pass every "
                    "optimizer to amp.initialize together with its model, and not a copy of it to amp.scale_loss."
                )
        return optimizers

    def _has_old_masters(self) -> bool:
        """Tell whether an optimizer of an earlier `initialize` has masters although the last one asked for none."""
        if _amp_state.strict:
            return False
        optimizers = self._optimizers if isinstance(self._optimizers, (list, tuple)) else (self._optimizers,)
        stashes = [optimizer._amp_stash for optimizer in optimizers if hasattr(optimizer, "_amp_stash")]
        return any(stash.master_weights for stash in stashes)

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        scaler = self._scaler
        if exc_type is not None:
            self._abandon()
            return
        if scaler is not None:
            if self._delay_unscale:
                for optimizer in self._optimizers:
                    optimizer._amp_stash.params_have_scaled_gradients = True
            elif self._on_device:
                self._leave_on_device(scaler)
            else:
                scaler.clear_overflow_state()
                for optimizer in self._optimizers:
                    optimizer._post_amp_backward(scaler)
                    optimizer._amp_stash.params_have_scaled_gradients = False
                if not self._delay_check and scaler.update_scale():
                    for optimizer in self._optimizers:
                        _skip_next_step(optimizer, scaler, self._loss_id)
        _clear_cast_cache()

    def _leave_on_device(self, scaler: LossScaler) -> None:
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
                _syncfree.note_pass(optimizer, flag, scaler, self._loss_id)

    def _abandon(self) -> None:
        """Give back what `__enter__` moved aside, as the backward pass failed."""
        if _amp_state.strict:
            return
        if self._scaler is not None and not self._delay_unscale:
            for optimizer in self._optimizers:
                if not optimizer._amp_stash.params_have_scaled_gradients:
                    abandon_backward(optimizer)
        _clear_cast_cache()


def _clear_cast_cache() -> None:
    state = _amp_state.__dict__
    handle = state.get("handle")
    if handle is None:
        return
    # Apex looks at the last session only, and so trains an O0 model that follows an O1 model on frozen casts.
    if not _amp_state.strict or state["opt_properties"].options["patch_torch_functions"]:
        handle._clear_cache()


def _skip_next_step(optimizer: Any, scaler: LossScaler, loss_id: int) -> None:
    """Make the next `optimizer.step()` a skip.

    The replacement is a bound method, so that LR schedulers can be built over it; one that wrapped it keeps its
    wrapper, and later steps pass through to the original.
    """
    stash = optimizer._amp_stash
    if stash.already_patched:
        return
    inner: Callable[..., Any] = optimizer.step
    own = "step" in optimizer.__dict__
    spent = False

    def skip_step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        nonlocal spent
        if spent:
            return inner(**kwargs) if closure is None else inner(closure, **kwargs)
        if closure is not None:
            raise AmpScalingError("optimizer.step(closure) does not work with amp: call step() without a closure.")
        maybe_print(overflow_message(loss_id, scaler.loss_scale()))
        stash.flags = []
        for master in getattr(stash, "all_fp32_from_fp16_params", ()):
            master.grad = None
        if hasattr(self, "most_recent_scale"):
            self.most_recent_scale = 1.0
            self.scale_set_by_backward = False
        spent = True
        stash.already_patched = False
        if getattr(self.__dict__.get("step"), "__func__", None) is skip_step:
            if own:
                self.step = inner
            else:
                del self.step
        if not _amp_state.strict:
            # The user did call step: keeps torch's schedulers from warning about the order of calls.
            self._opt_called = True
        return None

    optimizer.step = types.MethodType(skip_step, optimizer)
    stash.already_patched = True


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run a block without O1's casts; blocks nest, and an exception turns casts on again.

    Without an O1 session it does nothing.

    Source: Apex 25.05, `amp.disable_casts`; strict mode has its defects.
    """
    handle = _amp_state.__dict__.get("handle")
    if handle is None and not _amp_state.strict:
        yield
        return
    with _amp_state.handle._disable_casts():
        yield


class AmpHandle:
    """O1 in force: whether casts are on, the cache of cast weights, and how to take the patches back.

    `_is_active` is what every patched function reads.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        *,
        strict: bool = False,
        cuda_only: bool = False,
    ) -> None:
        self.strict = strict
        # On a CUDA run, tensors on the CPU are no business of amp.
        self.cuda_only = cuda_only
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache: dict[int, tuple[Tensor, Tensor, int, int]] = {}
        self._default_scaler = LossScaler(loss_scale)
        self._is_active = True
        self._disabled_depth = 0
        self._active_before = True
        self._saved: list[tuple[Any, str, Any, bool]] = []
        self._registered: list[tuple[Any, str, str]] = []

    def is_active(self) -> bool:
        """Tell whether casts are on at this moment."""
        return self._is_active

    def _disable_casts(self) -> AbstractContextManager[None]:
        return _LegacyDisabled(self) if _amp_state.strict else _Disabled(self)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Return the wrapper of Apex's API before `initialize`; its `scale_loss` never worked in 25.05."""
        from .opt import OptimWrapper

        self._default_scaler = None  # type: ignore[assignment]
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Any, optimizer: Any) -> Any:
        """Raise: this form of the API is gone.

        Raises:
            AmpScalingError: always (a RuntimeError).
        """
        raise AmpScalingError(
            "The old amp API (handle.scale_loss) is gone.  Call `model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=...)` once, then `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`."
        )

    def _clear_cache(self) -> None:
        if self._cache:
            self._cache.clear()

    def _save_func(self, module: Any, name: str, function: Any, inherited: bool = False) -> None:
        self._saved.append((module, name, function, inherited))

    def _deactivate(self) -> None:
        """Take back the patches of this handle; the last patch of a function goes first."""
        order = self._saved if _amp_state.strict else reversed(self._saved)
        for module, name, function, inherited in order:
            if inherited:
                delattr(module, name)
            else:
                setattr(module, name, function)
        self._saved = []
        self._cache.clear()

    @property
    def has_cache(self) -> bool:
        """Whether casts of weights are kept."""
        return self._enable_caching

    @property
    def cache(self) -> dict[int, tuple[Tensor, Tensor, int, int]]:
        """Casts of weights by the id of the weight: `(weight, cast, version, address)`."""
        return self._cache

    def remove_cache(self, param: Tensor) -> None:
        """Forget the cast of one weight."""
        self._cache.pop(id(param), None)

    @property
    def verbose(self) -> bool:
        """Whether each cast is printed."""
        return self._verbose


class _Disabled(AbstractContextManager[None]):
    """Casts are off while any such block is open, whatever thread it is in."""

    __slots__ = ("_handle",)

    def __init__(self, handle: AmpHandle) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        handle = self._handle
        if handle._disabled_depth == 0:
            handle._active_before = handle._is_active
        handle._disabled_depth += 1
        handle._is_active = False

    def __exit__(self, *_exc: object) -> None:
        handle = self._handle
        handle._disabled_depth -= 1
        if handle._disabled_depth == 0:
            handle._is_active = handle._active_before


class _LegacyDisabled(AbstractContextManager[None]):
    """Apex's: leaving an inner block turns casts on, an exception leaves them off."""

    __slots__ = ("_handle",)

    def __init__(self, handle: AmpHandle) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        self._handle._is_active = False

    def __exit__(self, exc_type: object, *_exc: object) -> None:
        if exc_type is None:
            self._handle._is_active = True


class NoOpHandle:
    """What `init(enabled=False)` returns."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Return the wrapper of Apex's API before `initialize`."""
        from .opt import OptimWrapper

        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Any, optimizer: Any) -> Iterator[Any]:
        """Yield the loss as it is."""
        yield loss

    def _clear_cache(self) -> None:
        return

    def _deactivate(self) -> None:
        return
