"""Three small networks that fit any image size: convolutions, fully connected layers, self-attention."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ampcompare.base.errors import ConfigError

DETECTIONS = 10  # of an image
RARE = -2.2  # logit of a probability of 0.1, with which every pixel begins
NEAR = 1.5  # pixels from the center, within which the ways to the sides are trained
SPREAD = 1 / 6  # of the map around a center, as a share of the box


class ConvNet(nn.Module):
    """Stages of two 3x3 convolutions, each with batch norm and ReLU, then the mean over pixels and a linear layer.

    Each later stage doubles the channels and halves the image. Defaults give 65,834 parameters on gray images and 10
    classes.
    """

    def __init__(
        self, num_classes: int, sample_shape: Sequence[int], *, width: int = 32, depth: int = 2
    ) -> None:
        super().__init__()
        require_positive_sizes(width=width, depth=depth)
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
    """Linear layers with ReLU over the flattened sample."""

    def __init__(
        self, num_classes: int, sample_shape: Sequence[int], *, width: int = 128, depth: int = 2
    ) -> None:
        super().__init__()
        require_positive_sizes(width=width, depth=depth)
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
    By default the longer side of an image has 8 patches or fewer, of at least 2 pixels.
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
        require_positive_sizes(width=width, depth=depth, heads=heads)
        if width % heads:
            raise ConfigError(
                f"transformer has width {width} and {heads} heads; the width must be a multiple of the heads"
            )
        if len(sample_shape) == 3:
            channels, height, width_pixels = sample_shape
            self.patch_size = (
                max(2, math.ceil(max(height, width_pixels) / 8)) if patch_size is None else patch_size
            )
            require_positive_sizes(patch_size=self.patch_size)
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
        tokens = self._cut_into_patches(samples) if self.patch_size else samples
        hidden = self.blocks(self.embed(tokens) + self.positions)
        return self.head(self.norm(hidden).mean(1))  # type: ignore[no-any-return]

    def _cut_into_patches(self, images: Tensor) -> Tensor:
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
        """Return how much each token looks at each other one, before the softmax: (batch, heads, tokens, tokens)."""
        # The query is scaled before the product, which keeps half precision farther from overflow.
        return torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1))

    def _attention(self, hidden: Tensor) -> Tensor:
        count, tokens, width = hidden.shape
        split = self.qkv(hidden).reshape(count, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.matmul(F.softmax(self.scores(query, key), dim=-1), value)
        return self.project(mixed.transpose(1, 2).reshape(count, tokens, width))  # type: ignore[no-any-return]


def require_positive_sizes(**sizes: int) -> None:
    """Check that sizes of a network are whole numbers from 1 on."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 on")


class UNet(nn.Module):
    """Stages of two 3x3 convolutions with batch norm; each halves the image on the way down and doubles it back.

    Source: Ronneberger, Fischer and Brox, MICCAI 2015; padded convolutions, so that sizes stay.
    """

    def __init__(
        self, num_classes: int, sample_shape: Sequence[int], *, width: int = 8, depth: int = 3
    ) -> None:
        super().__init__()
        if len(sample_shape) != 3:
            raise ConfigError(
                f"unet takes images (channels, height, width), and a sample has shape {tuple(sample_shape)}"
            )
        require_positive_sizes(width=width, depth=depth)
        widths = [width * 2**stage for stage in range(depth)]
        self.down = nn.ModuleList(
            _make_stage(before, after)
            for before, after in zip([sample_shape[0], *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            _make_stage(deep + level, level)
            for deep, level in zip(widths[:0:-1], widths[-2::-1], strict=True)
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


def _make_stage(channels_in: int, channels_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [
            nn.Conv2d(channels, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


class CenterNet(nn.Module):
    """Objects as points on a U-Net's output, with the interface of torchvision's detectors; class 0 is the background.

    Source: Zhou, Wang and Krähenbühl, arXiv 1904.07850; at the resolution of the image, and with the distances to four
    sides instead of size and offset.
    """

    def __init__(
        self, num_classes: int, sample_shape: Sequence[int], *, width: int = 8, depth: int = 3
    ) -> None:
        super().__init__()
        self.num_kinds = num_classes - 1
        self.unit = max(sample_shape[1:]) / 8  # pixels
        self.net = UNet(self.num_kinds + 4, sample_shape, width=width, depth=depth)
        assert self.net.head.bias is not None
        nn.init.constant_(self.net.head.bias[: self.num_kinds], RARE)

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return two losses in training mode, else the detections of each image by falling score.

        Args:
            images: each (channels, height, width).
            targets: of each image, `boxes` (objects, 4) and `labels` (objects,); needed in training mode.

        Returns:
            `center` and `box`, or for each image `boxes` (10, 4), `labels` (10,) and `scores` (10,), in float32.
        """
        maps = self.net(torch.stack(list(images))).float()
        centers, sides = maps[:, : self.num_kinds], F.softplus(maps[:, self.num_kinds :]) * self.unit
        if not self.training:
            return _detections_from_peaks(centers.sigmoid(), sides)
        if targets is None:
            raise ValueError("a detector needs targets in training mode")
        boxes = pad_sequence([target["boxes"].float() for target in targets], batch_first=True)
        labels = pad_sequence([target["labels"] for target in targets], batch_first=True)
        return self._detection_losses(centers, sides, boxes, labels)

    def _detection_losses(
        self, centers: Tensor, sides: Tensor, boxes: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Compare maps (batch, ..., height, width) with boxes (batch, objects, 4) of labels (batch, objects)."""
        down, right = _rows_and_columns_of_pixels(centers)
        middle = (boxes[..., :2] + boxes[..., 2:])[..., None, None] / 2
        size = (boxes[..., 2:] - boxes[..., :2]).clamp(min=1)[..., None, None]
        there = (labels > 0)[..., None, None]
        across, along = right - middle[:, :, 0], down - middle[:, :, 1]  # (batch, objects, height, width)
        hill = torch.exp(
            -((across / size[:, :, 0]).square() + (along / size[:, :, 1]).square()) / (2 * SPREAD**2)
        )
        top = (across.abs() <= 0.5) & (along.abs() <= 0.5)
        hill = torch.where(top, 1.0, hill) * there
        kinds = torch.arange(1, self.num_kinds + 1, device=labels.device)
        is_kind = (labels[..., None] == kinds)[..., None, None]  # (batch, objects, kinds, 1, 1)
        hills = hill[:, :, None] * is_kind
        truth = hills.amax(1) if hills.shape[1] else torch.zeros_like(centers)
        objects = there.sum().clamp(min=1)

        near = ((across.abs() <= NEAR) & (along.abs() <= NEAR) & there).float()
        left, above, rest, below = boxes[..., None, None].unbind(2)
        # (batch, objects, 4, h, w)
        ways = torch.stack([right - left, down - above, rest - right, below - down], 2)
        misses = (sides[:, None] - ways).abs().mean(2) / self.unit
        return {
            "center": _focal_loss(centers, truth).sum() / objects,
            "box": (misses * near).sum() / near.sum().clamp(min=1),
        }


def _focal_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Return the focal loss of each pixel, less the nearer to a center; source as above, with its exponents 2 and 4."""
    probability = logits.sigmoid()
    hit = (1 - probability).square() * F.logsigmoid(logits)
    miss = (1 - truth) ** 4 * probability.square() * F.logsigmoid(-logits)
    return -torch.where(truth == 1, hit, miss)


def _detections_from_peaks(centers: Tensor, sides: Tensor) -> list[dict[str, Tensor]]:
    """Return the highest peaks of the probabilities (batch, kinds, height, width), with their boxes."""
    height, width = centers.shape[2:]
    peaks = centers * (centers == F.max_pool2d(centers, 3, stride=1, padding=1))
    scores, places = peaks.flatten(1).topk(DETECTIONS)
    pixels = places % (height * width)
    ways = sides.flatten(2).gather(2, pixels[:, None].expand(-1, 4, -1))
    down, right = pixels // width + 0.5, pixels % width + 0.5
    boxes = torch.stack([right - ways[:, 0], down - ways[:, 1], right + ways[:, 2], down + ways[:, 3]], 2)
    labels = places // (height * width) + 1
    names = ("boxes", "labels", "scores")
    return [dict(zip(names, image, strict=True)) for image in zip(boxes, labels, scores, strict=True)]


def _rows_and_columns_of_pixels(maps: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (torch.arange(size, device=maps.device) + 0.5 for size in maps.shape[2:])
    down, right = torch.meshgrid(rows, columns, indexing="ij")
    return down, right
