"""Let `torch.autocast("cuda")` act on CPU tensors, with the dtype that the script asks for.

The autocast state for CUDA remains what the script sets and reads; the state for the CPU follows it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp import autocast_mode

from ampcompare.script.legacy.cpu.casts import cast_as_for_cuda

__all__ = ["autocast_on_cpu"]


_LIBRARIES: list[torch.library.Library] = []  # torch forgets the casts of one that is gone


def autocast_on_cpu() -> None:
    """Let autocast for CUDA act on CPU tensors, by whichever call it is enabled, for the life of this process."""
    _LIBRARIES.append(cast_as_for_cuda())
    _follow_setters()
    _keep_cpu_state()
    _cast_inputs_on_cpu()


def _follow_setters() -> None:
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    @functools.wraps(set_enabled)
    def set_autocast_enabled(*args: Any) -> None:
        set_enabled(*args)
        if len(args) == 1 or args[0] == "cuda":  # without a device, torch means CUDA
            set_enabled("cpu", args[-1])

    @functools.wraps(set_dtype)
    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, dtype)
        if device_type == "cuda":
            set_dtype("cpu", dtype)

    torch.set_autocast_enabled = set_autocast_enabled  # type: ignore[assignment]  # torch has two overloads
    torch.set_autocast_dtype = set_autocast_dtype
    torch.set_autocast_gpu_dtype = functools.partial(set_autocast_dtype, "cuda")


def _keep_cpu_state() -> None:
    """Restore the CPU's own state at the end of a block for CUDA: its default dtype is bfloat16, not float16."""
    autocast = autocast_mode.autocast
    enter, leave = autocast.__enter__, autocast.__exit__

    @functools.wraps(enter)
    def enter_keeping(self: Any) -> Any:
        if self.device == "cuda":
            self._ampcompare_cpu = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return enter(self)  # type: ignore[no-untyped-call]

    @functools.wraps(leave)
    def leave_restoring(self: Any, *exception: Any) -> Any:
        result = leave(self, *exception)
        if self.device == "cuda":
            enabled, dtype = self._ampcompare_cpu
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
        return result

    autocast.__enter__ = enter_keeping  # type: ignore[method-assign]
    autocast.__exit__ = leave_restoring  # type: ignore[method-assign]


def _cast_inputs_on_cpu() -> None:
    """Let `custom_fwd(cast_inputs=...)` of functions for CUDA cast inputs on the CPU."""
    cast = autocast_mode._cast

    @functools.wraps(cast)
    def cast_on_cpu(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    autocast_mode._cast = cast_on_cpu
