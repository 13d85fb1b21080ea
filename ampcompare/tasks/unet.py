"""A small U-Net: an encoder and a decoder of convolutions, joined at each size of the image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError

__all__ = ["UNet"]


class UNet(nn.Module):
    """Stages of two 3x3 convolutions with batch norm; each halves the image on the way down and doubles it back.

    Source: Ronneberger, Fischer and Brox, MICCAI 2015; padded convolutions, so that sizes stay.

    Args:
        num_classes: channels of the output.
        sample_shape: (channels, height, width).
        width: channels of the first stage; each later stage doubles them.
        depth: number of stages on the way down.
    """

    def __init__(self, num_classes: int, sample_shape: Sequence[int], *, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        if len(sample_shape) != 3:
            raise ConfigError(
                f"unet takes images (channels, height, width), and a sample has shape {tuple(sample_shape)}"
            )
        if width < 1 or depth < 1:
            raise ConfigError(f"unet has width {width} and depth {depth}; both must be at least 1")
        widths = [width * 2**stage for stage in range(depth)]
        self.down = nn.ModuleList(
            _stage(before, after) for before, after in zip([sample_shape[0], *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            _stage(deep + level, level) for deep, level in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept: list[Tensor] = []
        hidden = images
        for stage in self.down:
            hidden = stage(hidden if not kept else F.max_pool2d(hidden, 2, ceil_mode=True))
            kept.append(hidden)
        for stage, level in zip(self.up, kept[-2::-1], strict=True):
            wide = F.interpolate(hidden, size=level.shape[2:], mode="nearest")
            hidden = stage(torch.cat([level, wide], 1))
        return self.head(hidden)  # type: ignore[no-any-return]


def _stage(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)
