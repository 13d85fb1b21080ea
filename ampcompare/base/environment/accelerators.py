"""The accelerators that torch has besides CUDA and ROCm: what each is, and what of a run it cannot do.

They train what needs nothing but torch: one process, in fp32, under `torch.autocast` or in 16-bit weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ampcompare.base.environment.cuda import torch_build

__all__ = ["ACCELERATORS", "Accelerator", "accelerator_of", "why_no_accelerator"]


@dataclass(frozen=True)
class Accelerator:
    """A type of device.

    Attributes:
        title: what it is, for messages.
        numbered: whether there may be several, as `xpu:1`.
        counts_peak: whether torch counts the peak of its memory.
        remedy: what to do where torch has none.
    """

    title: str
    numbered: bool
    counts_peak: bool
    remedy: str


ACCELERATORS = {
    "mps": Accelerator("an Apple GPU", False, False, "torch supports it on macOS 14 and later"),
    "xpu": Accelerator("an Intel GPU", True, True, "install torch for XPU and Intel's driver"),
}
"""By the name of torch's device type. No arm was ever run on one by ampcompare's own tests, which have none."""


def accelerator_of(device: str) -> str:
    """Return the type of a device that is one of `ACCELERATORS`; "" for a CPU or a GPU of CUDA."""
    kind = device.partition(":")[0]
    return kind if kind in ACCELERATORS else ""


def why_no_accelerator(kind: str, *, here: bool = True, platform: str = sys.platform) -> str:
    """Return why torch certainly has no accelerator of this type; "" where it may.

    Args:
        here: whether it would be on this machine, and not on one that a queue chooses.
    """
    if not here:
        return ""
    if kind == "mps":
        return "" if platform == "darwin" else "this is not a Mac"
    build = torch_build()
    return "" if build is None or build.get("xpu") is not None else "this torch is built without XPU"
