"""What padding would gain: products whose sizes miss tensor cores run alone, as they are and padded, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ampcompare.diagnosis.profiling.watch import ProductShape, Seen, missed_sizes
from ampcompare.runs.records.profile import Product
from ampcompare.training.device import synchronize

__all__ = ["padded", "time_product", "with_padding"]

MULTIPLE = 8
MAX_TIMED = 6  # products
ROUNDS = 3
CALLS = 10
IMAGE_CHANNELS = 4  # up to which kernels pad the input of a network themselves
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def with_padding(products: Sequence[Product], seen: Seen, time_one: Callable[[ProductShape], float]) -> list[Product]:
    """Return products with the seconds of one, as it is and padded; those of most FLOPs are run.

    The padded one counts as faster only where each of its rounds is faster than each of the other's.

    Args:
        seen: the step that they are of.
        time_one: returns the seconds of a product.
    """
    return [
        _timed(product, seen, time_one) if number < MAX_TIMED else product for number, product in enumerate(products)
    ]


def _timed(product: Product, seen: Seen, time_one: Callable[[ProductShape], float]) -> Product:
    key = (product.module, product.operation, product.dtype, product.sizes)
    shapes = [
        shape for shape in seen.products if (shape.module, shape.operation, shape.dtype, missed_sizes(shape)) == key
    ]
    shape = max(shapes, key=lambda one: seen.products[one])
    wide = padded(shape)
    if wide is None:
        return product
    before, after = [], []
    try:
        for _ in range(ROUNDS):
            before.append(time_one(shape))
            after.append(time_one(wide))
    except RuntimeError:  # no room for it next to the training
        return product
    best = min(after) if max(after) < min(before) else max(min(after), min(before))
    return product.model_copy(update={"seconds": min(before), "padded_seconds": best})


def padded(shape: ProductShape) -> ProductShape | None:
    """Return a product with all sizes but the rows padded; None for one of groups, which have no such form."""
    left, right = list(shape.left), list(shape.right)
    if shape.operation == "convolution":
        *_, is_transposed, _, groups = shape.options
        if groups != 1:
            return None
        into, out = (0, 1) if is_transposed else (1, 0)
        if left[1] > IMAGE_CHANNELS:
            left[1] = right[into] = _up(left[1])
        right[out] = _up(right[out])
    else:
        left[-1] = right[-2] = _up(left[-1])
        right[-1] = _up(right[-1])
    return replace(shape, left=tuple(left), right=tuple(right))


def _up(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def time_product(shape: ProductShape, device: torch.device) -> float:
    """Return the seconds of a product on a device, one of several in a row."""
    dtype = TYPES[shape.dtype]
    left, right = (torch.ones(sizes, dtype=dtype, device=device) for sizes in (shape.left, shape.right))

    def product() -> Tensor:
        if shape.operation == "convolution":
            return torch.convolution(left, right, None, *shape.options)
        return left @ right

    with torch.no_grad():
        product()
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            product()
        synchronize(device)
        return (time.perf_counter() - begin) / CALLS
