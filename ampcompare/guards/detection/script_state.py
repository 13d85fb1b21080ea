"""State that the guards share: the progress of the training, and its optimizers, scalers and models."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ampcompare.base.location import Location

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ampcompare.guards.detection.gradient_hooks import GradientHooks


@dataclass
class ScaleLossBlock:
    """One `with amp.scale_loss(...)`."""

    optimizers: list[Any]
    scaled: bool  # whether the loss that it yields differs from the one it got
    backwards: int = 0  # passes made inside so far


@dataclass
class EnteredAutocast:
    """One entry of `with torch.autocast(...)` that asks for casts."""

    device: str  # that the script names
    dtype: Any
    is_dtype_given: bool  # whether the script names it
    location: Location
    on_for: set[str] = field(default_factory=set)  # types of device for which autocast was on inside


@dataclass
class ScriptState:
    """What the detectors know of the script that they watch: its passes, steps, scalers, blocks and autocasts."""

    backwards: int = 0  # passes so far; one inside another does not count
    attempts: int = 0  # steps requested so far, skipped ones included
    stepping: list[Any] = field(default_factory=list)  # optimizers, outermost first
    # what each running step of a GradScaler has stepped
    scaler_stepping: list[list[Any]] = field(default_factory=list)
    blocks: list[ScaleLossBlock] = field(default_factory=list)
    scalers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # that have scaled a loss
    # by the name of a guard, of the library that has scaled the loss
    remedies: Mapping[str, str] = field(default_factory=dict)
    # Losses that a scaler or a block has scaled, by id.
    scaled: weakref.WeakValueDictionary[int, Tensor] = field(default_factory=weakref.WeakValueDictionary)
    hooks: GradientHooks = field(init=False)  # of the script; its module loads torch
    is_in_backward: bool = False  # of the script, not in a pass of `torch.autograd.grad`
    scale_calls: int = 0  # since the last `update`; like the next three
    window_backwards: int = 0
    scale_read: bool = False  # `get_scale` was called after the first of them
    unscaled: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    amp: Any = None
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # built or stepped so far
    # Optimizers that went through `amp.initialize`, and the number of the call.
    prepared: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    initialized: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # modules
    # since the last backward pass, the latest ones
    autocasts: list[EnteredAutocast] = field(default_factory=list)
    scalers_off: list[tuple[str, Location]] = field(default_factory=list)  # by torch, not yet reported
    accelerators_off: list[tuple[str, Location]] = field(default_factory=list)  # asked for fp16

    def clear_counts_since_update(self) -> None:
        """Clear what is counted between two updates of a scaler."""
        self.scale_calls = self.window_backwards = 0
        self.scale_read = False
        self.unscaled.clear()

    def holds_scaled_gradients(self) -> bool:
        """Return whether a scaler has scaled every loss since its last update, and its scale was not read."""
        return 0 < self.window_backwards <= self.scale_calls and not self.scale_read

    def is_inside_scale_loss_block(self) -> bool:
        """Return whether a `scale_loss` block that has scaled its loss runs, behind its backward pass."""
        return any(block.scaled and block.backwards for block in self.blocks)

    def is_scaled_loss(self, loss: Any) -> bool:
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


def first_loss(losses: Any) -> Tensor | None:
    """Return the first loss of a backward pass, if it is a tensor."""
    from torch import Tensor

    loss = losses if isinstance(losses, Tensor) else next(iter(losses), None)
    return loss if isinstance(loss, Tensor) else None


def first_parameter_with_gradient(parameters: Iterable[Tensor]) -> Tensor | None:
    return next((parameter for parameter in parameters if parameter.grad is not None), None)


def parameters_of_optimizer(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def storage_id_of(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor while it lives; `.data` and views share it; -1 for sparse ones."""
    return -1 if tensor.is_sparse else int(tensor.untyped_storage()._cdata)


def contains_parameter(parameters: Iterable[Tensor], parameter: Tensor) -> bool:
    """Return whether `parameter` itself is among `parameters`."""
    return any(other is parameter for other in parameters)


def will_apex_skip_step(optimizer: Any) -> bool:
    """Return whether Apex has turned the next `optimizer.step()` into a skip, as far as the host knows."""
    return bool(getattr(getattr(optimizer, "_amp_stash", None), "already_patched", False))
