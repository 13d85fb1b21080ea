"""Test-time augmentation: the other views of an image whose logits are averaged with those of the image itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ampcompare.base.errors import UnsupportedCombination

__all__ = ["View", "make_views"]

View = Callable[[Tensor], Tensor]


def make_views(name: str, sample_shape: tuple[int, ...]) -> Sequence[View]:
    """Return the further views of a batch of images (N, C, H, W); none for "none".

    Args:
        name: "none", "flips" (mirrored left to right) or "shifts" (one pixel up, down, left and right; the edge is
            repeated).
        sample_shape: of one sample.

    Raises:
        UnsupportedCombination: the samples are not images.
    """
    if name == "none":
        return ()
    if len(sample_shape) != 3:
        raise UnsupportedCombination(
            f"--tta {name} moves images (channels, height, width), and a sample has shape {tuple(sample_shape)}; "
            "use --tta none"
        )
    if name == "flips":
        return (_flip,)
    return tuple(_Shift(rows, columns) for rows, columns in ((1, 0), (-1, 0), (0, 1), (0, -1)))


def _flip(images: Tensor) -> Tensor:
    return images.flip(-1)


class _Shift:
    """Moves images by whole pixels, down and to the right."""

    def __init__(self, rows: int, columns: int) -> None:
        self._moves = {-2: rows, -1: columns}

    def __call__(self, images: Tensor) -> Tensor:
        for dim, move in self._moves.items():
            size = images.shape[dim]
            indices = (torch.arange(size, device=images.device) - move).clamp(0, size - 1)
            images = images.index_select(dim, indices)
        return images
