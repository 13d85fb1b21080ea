"""The peaks of a device: from the table of data sheets by its name, or else measured."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

__all__ = ["Peak", "known_peak", "measured_peak", "peak_of"]

SIZE = 512  # of the matrices on a CPU
GPU_SIZE = 8192
COPY_BYTES = 64 * 2**20
REPEATS = 5
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Peak:
    """FLOPs and bytes per second of a device for a type; None where unknown."""

    flops: float | None
    bytes: float | None
    source: str


@cache
def _rows() -> list[dict[str, str]]:
    text = (files("ampcompare.profiling") / "data" / "peaks.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def known_peak(device_name: str, dtype: str) -> Peak | None:
    """Return the peak of the data sheet; the first row whose name is in that of the device counts.

    A name stands alone: "L4" is not in "NVIDIA L40S". A row without figures is a device that is none of those below it.
    """
    for row in _rows():
        if not re.search(rf"(?<![A-Za-z0-9]){re.escape(row['name'])}(?![A-Za-z0-9])", device_name):
            continue
        if not row["dtype"]:
            return None
        if row["dtype"] == dtype:
            return Peak(1e12 * float(row["tflops"]), 1e9 * float(row["gigabytes_per_second"]), row["source"])
    return None


def peak_of(device: torch.device, dtype: str, *, emulated: bool = False) -> Peak:
    """Return the peak of a device for a type such as "bf16" or "tf32"; it is measured where no data sheet is known.

    Args:
        emulated: products of the type are computed in fp32, which then is the type that is measured.
    """
    if device.type == "cuda":
        known = known_peak(torch.cuda.get_device_name(device), dtype)
        if known is not None:
            return known
    return measured_peak(device, "fp32" if emulated else dtype)


@cache
def measured_peak(device: torch.device, dtype: str) -> Peak:
    """Measure the fastest of some square products, and of some copies."""
    kind = TYPES.get(dtype)
    if kind is None:
        return Peak(None, None, "")
    if device.type == "cpu" and kind is not torch.float32:
        kind_name = f"{dtype} products of {SIZE // 2}"
        size = SIZE // 2
    else:
        size = SIZE if device.type == "cpu" else GPU_SIZE
        kind_name = f"{dtype} products of {size}"
    left = torch.ones(size, size, dtype=kind, device=device)
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    products = _fastest(lambda: torch.mm(left, left), device)
    copies = _fastest(lambda: target.copy_(source), device)
    return Peak(2 * size**3 / products, 2 * COPY_BYTES / copies, f"measured here: {kind_name}, copies")


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    with torch.no_grad():
        for _ in range(REPEATS):
            _synchronize(device)
            begin = time.perf_counter()
            call()
            _synchronize(device)
            best = min(best, time.perf_counter() - begin)
    return max(best, 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
