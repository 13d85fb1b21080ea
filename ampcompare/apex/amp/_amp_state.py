"""The amp session of this process, and its messages, which respect its verbosity.

`ampcompare.apex.amp._amp_state` (the attribute of the package) is the state object; scripts read and write its fields.
"""

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.apex import is_strict_by_environment

from ._engine.errors import AmpOptionError

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


class AmpState:
    """The amp session: the user's options, and the objects that `initialize` and `init` created.

    `opt_properties`, `loss_scalers`, `min_loss_scale`, `max_loss_scale` and `handle` are missing until they are set
    as in Apex: scripts check with `hasattr`.
    """

    opt_properties: Any  # of classes that import this module
    loss_scalers: list[Any]
    min_loss_scale: float | None
    max_loss_scale: float | None
    handle: Any

    def __init__(self) -> None:
        self._set_defaults()

    def _set_defaults(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.strict = is_strict_by_environment()
        self.master_optimizers: list[weakref.ref[Any]] = []
        self.registered: list[tuple[Any, str, str]] = []
        self.deferred: DeferredMessages | None = None
        # for decorated functions: that of the last `init`, None if disabled
        self.decorator_handle: Any = None

    def close(self) -> None:
        """Undo O1's patches and drop every setting, scaler and handle: the next `initialize` starts from scratch.

        Models and optimizers that `initialize` prepared stay as they are.
        """
        handle = self.__dict__.get("handle")
        if handle is not None:
            handle._deactivate()
            handle._is_active = False
        if self.deferred is not None:
            self.deferred.flush()
        self.__dict__.clear()
        self._set_defaults()


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise `AmpOptionError`, or print `msg` as a warning where the user set `hard_override`."""
    if _amp_state.hard_override:
        maybe_print(f"Warning:  {msg}")
    else:
        raise AmpOptionError(f"{msg} (set `amp._amp_state.hard_override = True` to go on at your own risk)")


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print unless the verbosity is 0; with `rank0`, on the first rank of a process group only."""
    if _amp_state.verbosity <= 0:
        return
    if rank0 and torch.distributed.is_available() and torch.distributed.is_initialized():
        if torch.distributed.get_world_size() > 1 and torch.distributed.get_rank() != 0:
            return
    print(msg)


def overflow_message(loss_id: int, scale: float) -> str:
    """Return the line about a skipped step; scripts parse it."""
    return f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scale}"


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors that `optimizer.step` updates: fp32 masters under master weights, else the model's own.

    Source: Apex 25.05, `amp.master_params`; works on anything with `param_groups`.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
