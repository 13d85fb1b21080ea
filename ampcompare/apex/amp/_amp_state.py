"""The amp session of this process, and the printer that respects its verbosity.

`ampcompare.apex.amp._amp_state` (the attribute of the package) is the state object; scripts read and write its fields.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from ._engine.async_messages import DeferredMessages
from ._engine.errors import AmpOptionError

__all__ = ["AmpState", "master_params", "maybe_print", "overflow_message", "warn_or_err"]

STRICT_VARIABLE = "AMPCOMPARE_APEX_STRICT"


def strict_from_environment() -> bool:
    """Return whether the environment enables strict mode, with Apex's defects (`AMPCOMPARE_APEX_STRICT=1`)."""
    return os.environ.get(STRICT_VARIABLE, "").strip().lower() in {"1", "true", "yes", "on"}


# What the session needs of the objects that it holds. Their classes import this module, so it cannot import them.
class _Options(Protocol):
    options: dict[str, Any]


class _Scaler(Protocol):
    dynamic: bool

    def loss_scale(self) -> float: ...


class _Handle(Protocol):
    _is_active: bool

    def _deactivate(self) -> None: ...

    def _disable_casts(self) -> AbstractContextManager[None]: ...


class AmpState:
    """The amp session: the user's options, and the objects that `initialize` and `init` created.

    `opt_properties`, `loss_scalers`, `min_loss_scale`, `max_loss_scale` and `handle` are missing until they are set
    as in Apex: scripts check with `hasattr`.
    """

    hard_override: bool
    allow_incoming_model_not_fp32: bool
    verbosity: int
    strict: bool
    opt_properties: _Options
    loss_scalers: list[_Scaler]
    min_loss_scale: float | None
    max_loss_scale: float | None
    handle: _Handle
    master_optimizers: list[weakref.ref[Any]]
    registered: list[tuple[Any, str, str]]
    deferred: DeferredMessages | None
    kernels: ModuleType | None  # for O2's copies; None for torch's
    decorator_handle: _Handle | None  # for decorated functions: the handle of the last `init`, None if disabled

    def __init__(self) -> None:
        self._set_defaults()

    def _set_defaults(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.strict = strict_from_environment()
        self.master_optimizers = []
        self.registered = []
        self.deferred = None
        self.kernels = None
        self.decorator_handle = None

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
