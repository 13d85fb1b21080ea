"""State that the guards share: the progress of the training, and its optimizers, scalers and models."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ampcompare.guards.location import Location

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass
class Block:
    """One `with amp.scale_loss(...)`.

    Attributes:
        optimizers: those listed.
        scaled: whether the loss that it yields differs from the one it got.
        backwards: passes made inside so far.
    """

    optimizers: list[Any]
    scaled: bool
    backwards: int = 0


@dataclass
class EnteredAutocast:
    """One entry of `with torch.autocast(...)` that asks for casts.

    Attributes:
        device: the type of device that the script names.
        dtype: what autocast casts to.
        is_dtype_given: whether the script names it.
        location: of the `with`.
        on_for: the types of device for which autocast was on inside.
    """

    device: str
    dtype: Any
    is_dtype_given: bool
    location: Location
    on_for: set[str] = field(default_factory=set)


@dataclass
class ScriptState:
    """The state of the script.

    Attributes:
        backwards: backward passes so far; one inside another does not count.
        attempts: steps requested so far, skipped ones included.
        stepping: optimizers whose step is running, outermost first.
        scaler_stepping: one entry for each GradScaler step that is running: the optimizers that it has stepped.
        blocks: open `scale_loss` blocks.
        scalers: GradScalers that have scaled a loss.
        scaled: losses that a scaler or a block has scaled, by id.
        scale_calls: losses scaled by GradScalers since the last `update`; like the next three.
        window_backwards: backward passes.
        scale_read: `get_scale` was called after the first of them.
        unscaled: optimizers whose gradients are unscaled.
        amp: the watched module `apex.amp`; None before it is imported.
        prepared: optimizers that went through `amp.initialize`, and the number of the call.
        initialized: modules that did.
        autocasts: entered since the last backward pass, the latest ones.
        scalers_off: device and line of GradScalers that torch has switched off, not yet reported.
        accelerators_off: the same of Accelerators that are asked for fp16 and have none.
    """

    backwards: int = 0
    attempts: int = 0
    stepping: list[Any] = field(default_factory=list)
    scaler_stepping: list[list[Any]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    scalers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    scaled: weakref.WeakValueDictionary[int, Tensor] = field(default_factory=weakref.WeakValueDictionary)
    scale_calls: int = 0
    window_backwards: int = 0
    scale_read: bool = False
    unscaled: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    amp: Any = None
    prepared: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    initialized: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    autocasts: list[EnteredAutocast] = field(default_factory=list)
    scalers_off: list[tuple[str, Location]] = field(default_factory=list)
    accelerators_off: list[tuple[str, Location]] = field(default_factory=list)

    def end_window(self) -> None:
        """Clear what is counted between two updates of a scaler."""
        self.scale_calls = self.window_backwards = 0
        self.scale_read = False
        self.unscaled.clear()

    def is_scaled(self, loss: Any) -> bool:
        """Return whether a scaler or a block made this very tensor."""
        return self.scaled.get(id(loss)) is loss

    def scales_dynamically(self) -> bool:
        """Return whether a loss scale is dynamic, so that a checkpoint must contain it."""
        if any(scaler.is_enabled() for scaler in self.scalers):
            return True
        return any(scaler.dynamic for scaler in self.apex_scalers())

    def apex_scalers(self) -> Iterable[Any]:
        """Return the loss scalers of Apex; none before `amp.initialize`."""
        state = getattr(self.amp, "_amp_state", None)
        scalers: Iterable[Any] = getattr(state, "loss_scalers", ())
        return scalers


def first_with_gradient(parameters: Iterable[Tensor]) -> Tensor | None:
    """Return the first parameter that has a gradient."""
    return next((parameter for parameter in parameters if parameter.grad is not None), None)


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield what an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def contains(parameters: Iterable[Tensor], parameter: Tensor) -> bool:
    """Return whether `parameter` itself is among `parameters`."""
    return any(other is parameter for other in parameters)


def will_skip(optimizer: Any) -> bool:
    """Return whether Apex has turned the next `optimizer.step()` into a skip, as far as the host knows."""
    return bool(getattr(getattr(optimizer, "_amp_stash", None), "already_patched", False))
