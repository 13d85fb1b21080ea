"""fp16 on a CPU without fp16 instructions: compute in fp32 and round each result once to half, as tensor cores do.

ATen's own half convolutions and products are 15 to 100 times slower than fp32 on such a CPU. The dispatch mode
below runs under autograd, autocast and DDP: models, dtypes and overflow to infinity do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["EmulatedHalf", "cpu_half", "has_fp16_instructions"]

aten = torch.ops.aten
EMULATED = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
        aten.convolution_backward.default,
    }
)


class EmulatedHalf(TorchDispatchMode):
    """Run half matrix products and convolutions in fp32, rounding every result once to half."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in EMULATED or any(arg.dtype is not torch.float16 for arg in args if isinstance(arg, Tensor)):
            return func(*args, **kwargs)  # mixed dtypes too: they must raise as they do without the mode
        result = func(*[arg.float() if isinstance(arg, Tensor) else arg for arg in args], **kwargs)
        return tuple(_rounded(part) for part in result) if isinstance(result, tuple) else _rounded(result)


def _rounded(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.dtype is torch.float32 else value


def has_fp16_instructions() -> bool:
    """Return whether this CPU multiplies fp16 in hardware (AVX512_FP16 or AMX_FP16, as oneDNN sees it)."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported())


def cpu_half(
    choice: str, half_dtype: torch.dtype | None, device: torch.device
) -> tuple[str | None, AbstractContextManager[Any]]:
    """Return how 16-bit arithmetic is computed, and the context to train in.

    Args:
        choice: "emulated", "native", or "auto": emulated on a CPU without fp16 instructions.
        half_dtype: the 16-bit type of the arm; None if it has none.

    Returns:
        "fp16 emulated", "fp16 native" or "bf16 native" (None for an arm in fp32), and a context, empty unless emulated.
    """
    if half_dtype is None:
        return None, nullcontext()
    if half_dtype is not torch.float16:
        return "bf16 native", nullcontext()
    if device.type != "cpu":
        return "fp16 native", nullcontext()
    if choice == "emulated" or (choice == "auto" and not has_fp16_instructions()):
        return "fp16 emulated", EmulatedHalf()  # type: ignore[no-untyped-call]
    return "fp16 native", nullcontext()
