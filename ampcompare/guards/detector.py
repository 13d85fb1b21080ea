"""What happens in a training script, as the guards are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from ampcompare.guards.facts import Facts
from ampcompare.guards.place import Place
from ampcompare.guards.reporting import Reporter

__all__ = ["EVENTS", "Detector"]


class Detector:
    """Looks for one mistake: overrides the events that it needs, and reports.

    The base class says what the events are; each comes before the thing happens unless its name says otherwise.
    """

    name: ClassVar[str]

    def __init__(self, facts: Facts, reporter: Reporter) -> None:
        self.facts = facts
        self._reporter = reporter

    def report(self, what: str, place: Place | None = None) -> None:
        """Report the mistake, by default at the line that is running."""
        self._reporter.report(self.name, what, place)

    def backward(self, losses: Any, seeds: Any) -> None:
        """A backward pass, from `losses` and the gradients `seeds` (None stands for ones)."""

    def after_backward(self, losses: Any) -> None:
        """The pass has ended."""

    def block(self, optimizers: Sequence[Any]) -> None:
        """`amp.scale_loss` is entered."""

    def after_block(self, optimizers: Sequence[Any]) -> None:
        """`amp.scale_loss` was left without an exception."""

    def attempt(self, optimizer: Any, scaler: Any) -> None:
        """A step is asked for, by `scaler.step(optimizer)` or, with None, by `optimizer.step()`."""

    def after_attempt(self, optimizer: Any, scaler: Any, applied: bool) -> None:
        """The step has ended; `applied` is False where the scaler skipped it."""

    def zero_grad(self) -> None:
        """Gradients of a module or an optimizer are cleared."""

    def clip(self, parameters: Sequence[Tensor]) -> None:
        """Gradients are clipped."""

    def schedule(self, scheduler: Any) -> None:
        """The user calls `scheduler.step()`."""

    def save(self, value: Any) -> None:
        """`torch.save` writes `value`."""

    def state_read(self) -> None:
        """The state dict of amp or of a scaler is taken."""

    def initialize(self, models: Sequence[nn.Module], optimizers: Sequence[Any], properties: Any) -> None:
        """`amp.initialize` gets these."""

    def wrap(self, module: nn.Module) -> None:
        """A parallel wrapper is built around `module`."""

    def half(self, module: nn.Module) -> None:
        """A module is cast to a half type."""

    def cuda(self, module: nn.Module) -> None:
        """A module goes to a GPU."""


EVENTS = tuple(name for name, value in vars(Detector).items() if callable(value) and name not in ("__init__", "report"))
