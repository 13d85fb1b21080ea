"""`DistributedDataParallel` of a script whose model an arm casts after it was wrapped.

The wrapper records the types of weights when it is made, so it is made again, in place and with the arguments of the
script.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import distributed, nn

from ampcompare.base.errors import PreparationError
from ampcompare.guards.events import Subscriptions
from ampcompare.script.apex_amp.session import here

__all__ = ["ParallelWrappers"]

KEPT = ("training", "require_backward_grad_sync")  # what a script may have set since


class ParallelWrappers:
    """The wrappers that a script has made, in their order, which is that of all ranks."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Any], tuple[Any, ...], dict[str, Any]]] = []

    def install(self, events: Subscriptions) -> None:
        """Follow them from now on."""
        events.wrap(nn.parallel.DistributedDataParallel, "__init__", self._make)

    def _make(self, original: Any, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, module, *args, **kwargs)
        self._made.append((weakref.ref(wrapper), args, kwargs))

    def is_alone(self) -> bool:
        """Return whether there is no other rank."""
        return not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1

    def _around(self, models: Sequence[nn.Module]) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        for reference, args, kwargs in list(self._made):
            wrapper = reference()
            if wrapper is not None and any(wrapper.module is model for model in models):
                yield wrapper, args, kwargs

    def check(self, models: Sequence[nn.Module], name: str) -> None:
        """Check that the wrappers of models can be made again.

        Args:
            name: of the arm.

        Raises:
            PreparationError: one has a communication hook, which would be lost.
        """
        for wrapper, _, _ in self._around(models):
            if getattr(wrapper, "_comm_hooks", None):
                raise PreparationError(
                    here(
                        f"DistributedDataParallel has a communication hook, which {name} would lose by casting the "
                        "weights; leave the hook out, or use an arm that keeps the weights"
                    )
                )

    def make_again(self, models: Sequence[nn.Module]) -> None:
        """Make the wrappers of models, whose weights were cast, again; a collective call of all ranks."""
        for wrapper, args, kwargs in self._around(models):
            kept = {name: getattr(wrapper, name) for name in KEPT}
            module = wrapper.module
            modes = {id(part): part.training for part in module.modules()}
            nn.parallel.DistributedDataParallel.__init__(wrapper, module, *args, **kwargs)
            for part in module.modules():
                part.training = modes[id(part)]
            for name, value in kept.items():
                setattr(wrapper, name, value)
