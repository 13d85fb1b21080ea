"""What the guards share: how far the training has come, and what is known of each optimizer, scaler and model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["Block", "Facts", "first_with_gradient", "holds", "parameters_of"]


@dataclass
class Block:
    """One `with amp.scale_loss(...)`.

    Attributes:
        optimizers: those listed.
        scaled: whether the loss that it yields is another than the one it got.
        backwards: passes made inside so far.
    """

    optimizers: list[Any]
    scaled: bool
    backwards: int = 0


@dataclass
class Facts:
    """The state of the script.

    Attributes:
        backwards: backward passes so far; one inside another does not count.
        attempts: steps asked for so far, skipped ones included.
        stepping: optimizers whose step runs, outermost first.
        scaler_stepping: whether a GradScaler's step runs, and what it has called.
        blocks: open `scale_loss` blocks.
        scalers: GradScalers that have scaled a loss.
        scaled: losses that a scaler or a block has scaled, by id.
        scale_calls: losses scaled by GradScalers since the last `update`; like the next three.
        window_backwards: backward passes.
        scale_read: `get_scale` was called after the first of them.
        unscaled: optimizers whose gradients are unscaled.
        amp: the module `apex.amp` that is watched; None as long as there is none.
        prepared: optimizers that went through `amp.initialize`, and the number of the call.
        initialized: modules that did.
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

    def end_window(self) -> None:
        """Forget what belongs to the time between two updates of a scaler."""
        self.scale_calls = self.window_backwards = 0
        self.scale_read = False
        self.unscaled.clear()

    def is_scaled(self, loss: Any) -> bool:
        """Tell whether a scaler or a block made this very tensor."""
        return self.scaled.get(id(loss)) is loss

    def scales_dynamically(self) -> bool:
        """Tell whether there is a loss scale that moves, and that a checkpoint must hold therefore."""
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


def holds(parameters: Iterable[Tensor], wanted: Tensor) -> bool:
    """Tell whether `wanted` itself is among `parameters`."""
    return any(parameter is wanted for parameter in parameters)
