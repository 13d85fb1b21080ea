"""A causal transformer over tokens, small enough for a CPU: pre-norm blocks with rotary or learned positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ampcompare.base.errors import ConfigError, did_you_mean
from ampcompare.tasks.networks import AttentionBlock, require_positive

__all__ = ["Gpt"]

POSITIONS = ("rotary", "learned")
INIT_STD = 0.02
ROTARY_BASE = 10_000.0


class Gpt(nn.Module):
    """Maps tokens (batch, length), whole numbers, to logits (batch, length, vocabulary) of the token after each.

    Attention is written with `matmul` and `softmax`, so that each arm's casts reach it; a fused kernel would hide them.
    Weights begin as those of GPT-2 (Radford et al., 2019): normal of standard deviation 0.02, divided by
    sqrt(2 * depth) where a branch ends. Rotary positions: Su et al., arXiv 2104.09864.

    Args:
        vocabulary: number of tokens.
        sequence_length: the longest sequence, for learned positions.
        width: of a token; a multiple of `heads`, and with rotary positions of twice the heads.
        depth: number of blocks.
        heads: attention heads.
        positions: rotary or learned.
    """

    def __init__(
        self,
        vocabulary: int,
        sequence_length: int,
        *,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        positions: str = "rotary",
    ) -> None:
        super().__init__()
        require_positive(width=width, depth=depth, heads=heads)
        if positions not in POSITIONS:
            raise ConfigError(f"gpt has no positions {positions!r}; {did_you_mean(str(positions), POSITIONS)}")
        parts = 2 * heads if positions == "rotary" else heads
        if width % parts:
            raise ConfigError(
                f"gpt has width {width}, {heads} heads and {positions} positions; the width must be a multiple of "
                f"{parts}"
            )
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(sequence_length, width)) if positions == "learned" else None
        self.blocks = nn.ModuleList(_CausalBlock(width, heads, rotary=positions == "rotary") for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialize(depth)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]

    def _initialize(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=INIT_STD / (math.sqrt(2 * depth) if ends_branch else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class _CausalBlock(AttentionBlock):
    def __init__(self, width: int, heads: int, *, rotary: bool) -> None:
        super().__init__(width, heads)
        self.rotary = rotary

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        if self.rotary:
            query, key = _rotated(query, key)
        length = query.shape[-2]
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        return super().scores(query, key).masked_fill(later, -math.inf)


def _rotated(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair of features (i, i + features / 2) by an angle that grows with the position.

    Args:
        query, key: (batch, heads, length, features). Angles are computed in float32 whatever their dtype: fp16 could
            not tell late positions apart.
    """
    length, features = query.shape[-2:]
    steps = torch.arange(0, features, 2, device=query.device, dtype=torch.float32) / features
    angles = torch.arange(length, device=query.device, dtype=torch.float32)[:, None] * ROTARY_BASE**-steps
    cosine, sine = angles.cos().to(query.dtype), angles.sin().to(query.dtype)

    def rotate(part: Tensor) -> Tensor:
        first, second = part.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)

    return rotate(query), rotate(key)
