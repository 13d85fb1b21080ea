"""Three small networks that fit any image size: convolutions, fully connected layers, self-attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError

__all__ = ["ConvNet", "Mlp", "Transformer", "require_positive"]


class ConvNet(nn.Module):
    """Stages of two 3x3 convolutions, each with batch norm and ReLU, then the mean over pixels and a linear layer.

    Args:
        num_classes: width of the output.
        sample_shape: (channels, height, width).
        width: channels of the first stage; each later stage doubles them and halves the image.
        depth: number of stages. Defaults give 65,834 parameters on gray images and 10 classes.
    """

    def __init__(self, num_classes: int, sample_shape: Sequence[int], *, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        require_positive(width=width, depth=depth)
        if len(sample_shape) != 3:
            raise ConfigError(
                f"convnet takes images (channels, height, width), and a sample has shape {tuple(sample_shape)}; use mlp"
            )
        layers: list[nn.Module] = []
        channels = sample_shape[0]
        for stage in range(depth):
            features = width * 2**stage
            for stride in (1 if stage == 0 else 2, 1):
                convolution = nn.Conv2d(channels, features, 3, stride=stride, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(features), nn.ReLU()]
                channels = features
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Linear layers with ReLU over the flattened sample.

    Args:
        num_classes: width of the output.
        sample_shape: any.
        width: of the hidden layers.
        depth: number of hidden layers.
    """

    def __init__(self, num_classes: int, sample_shape: Sequence[int], *, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        require_positive(width=width, depth=depth)
        layers: list[nn.Module] = []
        features = math.prod(sample_shape)
        for _ in range(depth):
            layers += [nn.Linear(features, width), nn.ReLU()]
            features = width
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(features, num_classes)

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(self.hidden(samples.flatten(1)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Pre-norm self-attention over tokens: patches of an image, or the rows of a matrix.

    Attention is written with `matmul` and `softmax`, so that each arm's casts reach it; a fused kernel would hide them.

    Args:
        num_classes: width of the output.
        sample_shape: (channels, height, width), or (rows, features).
        width: of a token; a multiple of `heads`.
        depth: number of blocks.
        heads: attention heads.
        patch_size: pixels on a side; by default such that the longer side has 8 patches or fewer, and at least 2.
    """

    def __init__(
        self,
        num_classes: int,
        sample_shape: Sequence[int],
        *,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        patch_size: int | None = None,
    ) -> None:
        super().__init__()
        require_positive(width=width, depth=depth, heads=heads)
        if width % heads:
            raise ConfigError(
                f"transformer has width {width} and {heads} heads; the width must be a multiple of the heads"
            )
        if len(sample_shape) == 3:
            channels, height, width_pixels = sample_shape
            self.patch_size = max(2, math.ceil(max(height, width_pixels) / 8)) if patch_size is None else patch_size
            require_positive(patch_size=self.patch_size)
            tokens = math.ceil(height / self.patch_size) * math.ceil(width_pixels / self.patch_size)
            features = channels * self.patch_size**2
        elif len(sample_shape) == 2:
            self.patch_size = 0
            tokens, features = sample_shape
        else:
            raise ConfigError(
                f"transformer takes images or matrices, and a sample has shape {tuple(sample_shape)}; use mlp"
            )
        self.embed = nn.Linear(features, width)
        self.positions = nn.Parameter(torch.empty(tokens, width))
        # The mean over tokens hides positions unless their embedding is large: 0.02 takes twice the epochs on digits.
        nn.init.normal_(self.positions, std=0.5)
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, samples: Tensor) -> Tensor:
        tokens = self._patches(samples) if self.patch_size else samples
        hidden = self.blocks(self.embed(tokens) + self.positions)
        return self.head(self.norm(hidden).mean(1))  # type: ignore[no-any-return]

    def _patches(self, images: Tensor) -> Tensor:
        """Cut images (N, C, H, W) to (N, tokens, C * patch * patch), filling up the last patches with zeros."""
        size = self.patch_size
        height, width = images.shape[2:]
        images = F.pad(images, (0, -width % size, 0, -height % size))
        count, channels, height, width = images.shape
        grid = images.reshape(count, channels, height // size, size, width // size, size)
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * size * size)


class AttentionBlock(nn.Module):
    """Pre-norm self-attention and two fully connected layers, each added to what goes in: (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.attention_norm(hidden))
        return hidden + self.narrow(F.gelu(self.widen(self.mlp_norm(hidden))))  # type: ignore[no-any-return]

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return how much each token looks at each other one, before the softmax.

        Args:
            query, key: (batch, heads, tokens, features).

        Returns:
            (batch, heads, tokens, tokens).
        """
        # The query is scaled before the product, which keeps half precision farther from overflow.
        return torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1))

    def _attention(self, hidden: Tensor) -> Tensor:
        count, tokens, width = hidden.shape
        split = self.qkv(hidden).reshape(count, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.matmul(F.softmax(self.scores(query, key), dim=-1), value)
        return self.project(mixed.transpose(1, 2).reshape(count, tokens, width))  # type: ignore[no-any-return]


def require_positive(**sizes: int) -> None:
    """Check that sizes of a network are whole numbers from 1 on.

    Raises:
        ConfigError: names the one that is not.
    """
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 on")
