"""The base class of all guards: the text of a guard, and the events of a training script that it can handle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ampcompare.base.location import Location
from ampcompare.guards.detection.reporting import ViolationSink
from ampcompare.guards.detection.script_state import ScriptState
from ampcompare.source.lint.catalog import BY_NAME

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class Guard:
    """One guard in words: the mistake that it watches for, why that matters, and what to write instead."""

    name: str  # in messages and in the documentation
    mistake: str  # what the script does
    matters: str  # what that does to the training
    remedy: str  # what to write instead


def guard_of_name(name: str) -> Guard:
    """Return the guard of a mistake in the catalog, which has its texts."""
    mistake = BY_NAME[name]
    return Guard(name, mistake.mistake, mistake.matters, mistake.remedy)


class Detector:
    """Detects one mistake: overrides the events that it needs, and reports.

    Each event comes before the thing happens, unless its name starts with `after_`.
    """

    guard: ClassVar[Guard]
    defined: ClassVar[list[type[Detector]]] = []

    def __init_subclass__(cls) -> None:
        Detector.defined.append(cls)

    def __init__(self, facts: ScriptState, sink: ViolationSink) -> None:
        self.facts = facts
        self._sink = sink

    def report(self, what: str, location: Location | None = None, *, remedy: str | None = None) -> None:
        """Report the mistake, by default at the line that runs, with the remedy of the library that scales or of the
        guard."""
        name = self.guard.name
        self._sink.report(name, what, remedy or self.facts.remedies.get(name, self.guard.remedy), location)

    def at_backward(self, losses: Any, grad_outputs: Any) -> None:
        """A backward pass starts, from `losses` and their gradients `grad_outputs` (None stands for ones)."""

    def at_scale_loss_block(self, optimizers: Sequence[Any]) -> None:
        """`amp.scale_loss` is entered."""

    def after_scale_loss_block(self, optimizers: Sequence[Any]) -> None:
        """`amp.scale_loss` was left without an exception."""

    def at_step_attempt(self, optimizer: Any, scaler: Any) -> None:
        """A step is requested, by `scaler.step(optimizer)` or, with None, by `optimizer.step()`."""

    def after_step_attempt(self, optimizer: Any, scaler: Any, applied: bool) -> None:
        """The step has ended; `applied` is False if the scaler skipped it."""

    def at_clipping(self, parameters: Sequence[Tensor]) -> None:
        """Gradients are clipped."""

    def after_clamp(self, tensor: Tensor, result: Tensor) -> None:
        """The values of `tensor` were limited, in place where `result` is the same tensor."""

    def at_torch_save(self, value: Any) -> None:
        """`torch.save` writes `value`."""

    def at_amp_state_read(self) -> None:
        """The state dict of amp or of a scaler is taken."""

    def at_initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        """`amp.initialize` gets these."""

    def after_masters_made(self, optimizer: Any) -> None:
        """Apex has made the master weights of an optimizer that `amp.initialize` has prepared."""

    def after_masters_copied(self, optimizer: Any) -> None:
        """The step of such an optimizer has given the model its master weights."""

    def at_parallel_wrapping(self, module: nn.Module) -> None:
        """A parallel wrapper is built around `module`."""

    def at_half_cast(self, module: nn.Module) -> None:
        """A module is cast to a half type."""

    def at_weight_cast_by_autocast(self, weight: Tensor, dtype: torch.dtype) -> None:
        """A layer is called whose fp32 weight autocast casts to `dtype`, which it keeps to the end of the block."""

    def after_autocast_cache_cleared(self) -> None:
        """The casts that autocast keeps are dropped, at the end of the outermost block or by the script."""

    def at_move_to_gpu(self, module: nn.Module) -> None:
        """A module is moved to a GPU."""

    def at_guard_removal(self) -> None:
        """The guards are removed."""


_METHODS = [name for name, value in vars(Detector).items() if callable(value) and not name.startswith("_")]
EVENTS = tuple(name for name in _METHODS if name != "report")
