"""Print values that a CUDA device computes later, without waiting for them."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["DeferredMessages"]

Render = Callable[[list[float]], str | None]


class DeferredMessages:
    """Messages that wait for values from the device, in order.

    Values are copied to pinned memory behind an event. They are printed by the next `scale_loss`, when the device has
    the next forward pass to work on, or when the loss scale is read or saved, or the session or the process ends.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.cuda.Event, Tensor, Render]] = []
        atexit.register(self.flush)

    def add(self, values: Sequence[Tensor], render: Render) -> None:
        """Call `render` later with the current values of these scalars, and print its result unless it is None."""
        host = torch.empty(len(values), dtype=torch.float32, pin_memory=True)
        host.copy_(torch.stack(list(values)), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(values[0].device))
        self._waiting.append((event, host, render))

    def flush(self) -> None:
        """Print all messages, waiting for their values."""
        while self._waiting:
            event, host, render = self._waiting.pop(0)
            event.synchronize()
            message = render(host.tolist())
            if message is not None:
                print(message)
