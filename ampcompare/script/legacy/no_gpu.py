"""Recognize the exceptions that end a CUDA script on a machine without a GPU."""

from __future__ import annotations

import linecache
import re
import sys
from typing import Any

__all__ = ["lacks_gpu"]

# Messages of torch: of the CPU build, and of a CUDA build without a driver or a device; also in tracebacks of children.
MESSAGES = re.compile(
    "not compiled with CUDA|compiled without CUDA|requires CUDA support|without ATen_cuda"
    "|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device|CUDA driver initialization failed"
    r"|no attribute '_(cuda|nccl)|dummy base class (Event|Stream|CUDAGraph)|dummy base class _Cuda"
    "|NVTX functions not installed|doesn't have NCCL built in|only supported with GPUs"
    r"|accelerator device when none is available|torch\.cuda\.is_available\(\) is False|CUDA is not available"
)
# Lines of a script whose error does not mention CUDA: a bare `assert`, and `None.split`.
ASKS: dict[type[Exception], re.Pattern[str]] = {
    AssertionError: re.compile(r"cuda\s*\.\s*(is_available|device_count)\s*\("),
    AttributeError: re.compile(r"version\s*\.\s*cuda\b"),
    TypeError: re.compile(r"version\s*\.\s*cuda\b|cudnn\s*\.\s*version\s*\("),
}


def lacks_gpu(error: BaseException) -> bool:
    """Return whether an exception comes from the lack of a GPU in this process.

    A bare `assert torch.cuda.is_available()` of the script counts, though it has no message. What the script raises on
    top of such an error is its own.
    """
    if not isinstance(error, Exception) or _sees_gpu():
        return False
    return MESSAGES.search(str(error)) is not None or _asks_for_gpu(error)


def _sees_gpu() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def _asks_for_gpu(error: Exception) -> bool:
    traceback, pattern = error.__traceback__, ASKS.get(type(error))
    if traceback is None or pattern is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return pattern.search(linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)) is not None
