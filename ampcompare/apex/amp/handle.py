"""The handle of O1: its patches, its cache of cast weights, and the switch that turns casts off.

Source: Apex 25.05, `apex/amp/handle.py`.

O1 casts a weight on first use. Later iterations cast weights ahead in that order, in groups of eight; a group is
small enough for gradients to arrive while the backward pass runs, as gradient reduction needs it.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ._amp_state import _amp_state, master_params, maybe_print, overflow_message
from ._engine.errors import AmpScalingError
from ._engine.scaled_loss import scale_loss as scale_loss
from .scaler import LossScaler

_MAX_GROUP = 8
_SMALLEST = 4


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run a block without O1's casts; blocks nest, and an exception turns casts on again (strict: as Apex)."""
    handle = _amp_state.__dict__.get("handle")
    if handle is None and not _amp_state.strict:
        yield
        return
    with _amp_state.handle._disable_casts():
        yield


class AmpHandle:
    """An active O1 session: whether casts are on, the cache of cast weights, and the patches to undo.

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
        half_dtype: torch.dtype = torch.float16,
    ) -> None:
        self.strict = strict
        self.half_dtype = half_dtype  # what functions are cast to: bfloat16 at O4
        self.cuda_only = cuda_only  # in a CUDA run, amp leaves CPU tensors alone
        self.has_cache = self._enable_caching = enable_caching
        self.verbose = self._verbose = verbose
        self.groups = WeightCastGroups()
        # Casts of weights by the id of the weight: `(weight, cast, version, address)`.
        self.cache: dict[int, tuple[Tensor, Tensor, int, int]] = {}
        self._cache = self.cache
        self._default_scaler = LossScaler(loss_scale)
        self._is_active = True
        self._disabled_depth = 0
        self._active_before = True
        self._saved: list[tuple[Any, str, Any, bool]] = []
        self._registered: list[tuple[Any, str, str]] = []

    def is_active(self) -> bool:
        """Return whether casts are on now."""
        return self._is_active

    def _disable_casts(self) -> AbstractContextManager[None]:
        return _disable_casts_as_apex_does(self) if _amp_state.strict else _CastsDisabled(self)

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Return the wrapper of Apex's API before `initialize`."""
        from .opt import OptimWrapper

        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Any, optimizer: Any) -> AbstractContextManager[Any]:
        """Scale a loss as `OptimWrapper.scale_loss` does, by the handle's own scaler."""
        return self._scale_block(loss, optimizer, self._default_scaler)

    @contextmanager
    def _scale_block(self, loss: Any, optimizer: Any, scaler: LossScaler) -> Iterator[Any]:
        """Scale a loss of the API before `initialize`; gradients of earlier passes are moved aside meanwhile."""
        if _amp_state.strict:
            raise AmpScalingError(
                "The old amp API (handle.scale_loss) is gone.  Call `model, optimizer = amp.initialize(model, "
                "optimizer, opt_level=...)` once, then `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`."
            )
        if not self._is_active:
            yield loss
            return
        params = list(master_params(optimizer))
        earlier = [param.grad for param in params]
        for param in params:
            param.grad = None
        scaler.clear_overflow_state()
        yield loss.float() * scaler.loss_scale()
        scaler.unscale_([param.grad for param in params if param.grad is not None])
        for param, grad in zip(params, earlier, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else grad.add_(param.grad)
        self._clear_cache()
        if scaler.update_scale():
            _skip_next_step(optimizer, scaler.loss_scale())

    def _clear_cache(self) -> None:
        if self._cache:
            self._cache.clear()
            self.groups.learn_groups()

    def _save_func(self, module: Any, name: str, function: Any, inherited: bool = False) -> None:
        self._saved.append((module, name, function, inherited))

    def _deactivate(self) -> None:
        """Undo the patches of this handle, the last patch of a function first."""
        order = self._saved if _amp_state.strict else reversed(self._saved)
        for module, name, function, inherited in order:
            if inherited:
                delattr(module, name)
            else:
                setattr(module, name, function)
        self._saved = []
        self._cache.clear()

    def remove_cache(self, param: Tensor) -> None:
        """Remove the cast of one weight."""
        self._cache.pop(id(param), None)


def _skip_next_step(optimizer: Any, scale: float) -> None:
    """Replace the next step of an optimizer by the line about an overflow."""
    if "_skips_next" in vars(optimizer):  # another loss of this step has overflowed too
        return
    own = vars(optimizer).get("step")

    def skip(*_args: Any, **_kwargs: Any) -> None:
        maybe_print(overflow_message(0, scale))
        del optimizer._skips_next, optimizer.step
        if own is not None:
            optimizer.step = own

    optimizer._skips_next = True
    optimizer.step = skip


class _CastsDisabled(AbstractContextManager[None]):
    """Casts are off while any such block is open, in any thread."""

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


@contextmanager
def _disable_casts_as_apex_does(handle: AmpHandle) -> Iterator[None]:
    """Turn casts off as Apex does: leaving an inner block turns them on, an exception leaves them off."""
    handle._is_active = False
    yield
    handle._is_active = True


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

    def _scale_block(self, loss: Any, optimizer: Any, scaler: LossScaler) -> AbstractContextManager[Any]:
        return self.scale_loss(loss, optimizer)

    def _clear_cache(self) -> None:
        return

    def _deactivate(self) -> None:
        return


class WeightCastGroups:
    """Which weights are cast together, learned from the order in which they were met."""

    def __init__(self) -> None:
        self._groups: dict[int, list[weakref.ref[Tensor]]] = {}
        self._met: list[weakref.ref[Tensor]] = []

    def cast(self, leader: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return `(weight, half cast)` for the group that `leader` begins; empty where it is to be cast by itself.

        The first pair is that of `leader`. Casts carry gradients to their weights, rounded as those of `Tensor.half`.
        """
        # a launch costs a CPU less than the Python around it
        if not leader.is_cuda or not leader.requires_grad:
            return []
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return []  # they see into a cast, and not into a group
        if torch._C._are_functorch_transforms_active():
            return []
        references = self._groups.get(id(leader))
        if references is None or references[0]() is not leader:
            self._met.append(weakref.ref(leader))
            return []
        weights = [
            weight
            for reference in references
            if (weight := reference()) is not None and _can_cast_weight_with_leader(weight, leader)
        ]
        casts: tuple[Tensor, ...] = _CastWeightsToHalf.apply(*weights)  # type: ignore[no-untyped-call]
        return list(zip(weights, casts, strict=True))

    def learn_groups(self) -> None:
        """Group what was met one by one since the last call."""
        met, self._met = self._met, []
        for first in range(0, len(met), _MAX_GROUP):
            group = met[first : first + _MAX_GROUP]
            leader = group[0]()
            if len(group) >= _SMALLEST and leader is not None:
                self._groups[id(leader)] = group


def _can_cast_weight_with_leader(weight: Tensor, leader: Tensor) -> bool:
    return (
        weight.requires_grad
        and weight.dtype is torch.float32
        and weight.device == leader.device
        and weight.layout is torch.strided
    )


class _CastWeightsToHalf(torch.autograd.Function):
    """Casts to half whose gradients come back in fp32; several weights share a kernel."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        casts = [torch.empty_like(weight, dtype=torch.float16) for weight in weights]
        torch._foreach_copy_(casts, weights)
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [grad for grad in grads if grad is not None]
        if torch.is_grad_enabled() or any(grad.layout is not torch.strided for grad in present):
            return tuple([None if grad is None else grad.float() for grad in grads])
        full = [torch.empty_like(grad, dtype=torch.float32) for grad in present]
        if full:
            torch._foreach_copy_(full, present)
        remaining = iter(full)
        return tuple([None if grad is None else next(remaining) for grad in grads])
