"""What an arm answers behind the names of `torch.amp`; these answers change nothing, and arms override theirs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.guards.events import Subscriptions

__all__ = ["TorchNames"]


class TorchNames:
    """What stands behind `torch.amp`.

    Attributes:
        used: the script, or what drives it, has entered an autocast block or made a GradScaler.
        has_autocast: the script itself has made an enabled autocast block.
        has_scaler: the script itself has made a GradScaler that is on.
        off_scalers: GradScalers that the script itself has made and switched off.
        driven: objects of `torch.amp` are made on behalf of the script at present.
        is_driven: the steps of the script are made and recorded on its behalf; what they lack is no fault of it.

    Args:
        initialized: returns whether the script trains through `apex.amp`.
    """

    def __init__(self, initialized: Callable[[], bool]) -> None:
        self._initialized = initialized
        self.used = self.has_autocast = self.has_scaler = self.driven = self.is_driven = False
        self.off_scalers: weakref.WeakSet[Any] = weakref.WeakSet()

    def note_scaler(self, scaler: Any, enabled: bool) -> None:
        """Note that a GradScaler is made, by the script or on its behalf."""
        if not self.driven:
            self.has_scaler = self.has_scaler or enabled
            if not enabled:
                self.off_scalers.add(scaler)

    def install(self, events: Subscriptions) -> None:
        """Begin."""

    @property
    def needs_scaler(self) -> bool:
        """Whether the arm scales the loss, or moves gradients to master weights."""
        return False

    @property
    def casts_loss(self) -> bool:
        """Whether casts last from the forward pass to the backward pass, as O1's do."""
        return False

    @property
    def casts_weights(self) -> bool:
        """Whether the arm acts by casting the weights of models, so not on modules whose weights no optimizer has."""
        return False

    @property
    def widens(self) -> torch.dtype | None:
        """The type of the outputs of modules that become fp32; None where the arm does that itself, or not at all."""
        return None

    def is_by_apex(self) -> bool:
        """Return whether the script trains through `apex.amp`."""
        return self._initialized()

    def optimizer_made(self) -> None:
        """Note that the script has made an optimizer."""

    def casts_now(self) -> bool:
        """Return whether operations are cast at present."""
        return False

    def use(self) -> None:
        """Note that the arm acts on the script."""
        self.used = True

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the 16-bit weights of an optimizer with their masters."""
        return []

    def input_type(self, module: nn.Module) -> torch.dtype | None:
        """Return the type of the inputs of a part of a model that the script calls by itself; None for others."""
        return None

    def alike(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a module without weights that the script calls, in types that fit one another."""
        return args, kwargs

    def forget_unscaled(self, scaler: Any, optimizer: Any) -> None:
        """Let gradients be unscaled once more before the step."""
