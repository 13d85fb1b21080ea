"""Language models by name: a small causal transformer, and those of Transformers, without weights or downloads."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.errors import BackendUnavailable, ConfigError, did_you_mean
from ampcompare.tasks.models import check_arguments, user_model
from ampcompare.tasks.networks import AttentionBlock, require_positive
from ampcompare.tasks.packages import needs_package
from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = ["Gpt", "build_language_model", "causal_model", "repeated_blocks"]


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


def causal_model(name: str, *, vocabulary: int, sequence_length: int, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a model of Transformers that gives logits, with weights from torch's global generator.

    Attention is Transformers' "eager" one, written in matrix products and softmax, so that each arm's casts reach it.

    Args:
        name: type of model as Transformers has it, such as gpt2.
        vocabulary: number of tokens.
        sequence_length: the longest sequence.
        arguments: of the configuration, such as n_layer of gpt2; they override those above.

    Raises:
        ConfigError: unknown name, or arguments that its configuration does not take.
        BackendUnavailable: Transformers is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when Transformers is imported
    with contextlib.suppress(BackendUnavailable):
        load_torchvision()  # transformers imports it, and could not where its operators do not fit torch
    with needs_package(f"--arch hf:{name} needs", "transformers"):
        import transformers
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name not in known:
        raise ConfigError(f"Transformers has no causal language model {name!r}; {did_you_mean(name, known)}")
    options = {
        "vocab_size": vocabulary,
        "max_position_embeddings": sequence_length,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
        "use_cache": False,
    }
    try:
        config = transformers.AutoConfig.for_model(name, **options)
        _check_arguments(name, config, arguments)
        config = transformers.AutoConfig.for_model(name, **{**options, **arguments})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except ConfigError:
        raise
    except Exception as error:  # each architecture checks its arguments in its own way
        text = " ".join(str(error).split())
        raise ConfigError(
            f"hf:{name} cannot be built ({type(error).__name__}: {text}); change its --model-arg, or choose another"
        ) from error
    return _Logits(model)


def _check_arguments(name: str, config: Any, arguments: Mapping[str, Any]) -> None:
    """Check that a configuration has these arguments: Transformers keeps unknown ones silently."""
    known = [*config.to_dict(), *config.attribute_map]
    for argument in arguments:
        if argument not in known:
            raise ConfigError(f"hf:{name} has no argument {argument!r}; {did_you_mean(argument, known)}")


class _Logits(nn.Module):
    """Maps tokens (batch, length), int64, to logits (batch, length, vocabulary) by a model of Transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits  # type: ignore[no-any-return]


def build_language_model(
    arch: str, *, vocabulary: int, sequence_length: int, model_args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the causal model called `arch`, in fp32 on the CPU, with weights from torch's global generator.

    Args:
        arch: `gpt`, `hf:NAME` for a causal model of Transformers, or `package.module:factory`. A user's factory is
            called with those of `vocabulary` and `sequence_length` that it names as parameters.
        vocabulary: number of tokens.
        sequence_length: the longest sequence.
        model_args: further keyword arguments; they override those above.

    Raises:
        ConfigError: unknown name, or unknown arguments.
        BackendUnavailable: Transformers is not installed.
    """
    arguments = dict(model_args or {})
    if arch == "gpt":
        check_arguments(arch, Gpt, arguments)
        return Gpt(vocabulary, sequence_length, **arguments)
    library, _, name = arch.partition(":")
    if library == "hf":
        return causal_model(name, vocabulary=vocabulary, sequence_length=sequence_length, arguments=arguments)
    if ":" in arch:
        return user_model(arch, {"vocabulary": vocabulary, "sequence_length": sequence_length}, arguments)
    raise ConfigError(
        f"there is no language model {arch!r}; {did_you_mean(arch, ['gpt', 'hf:gpt2'])}; your own is module:factory"
    )


def repeated_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """Return the members of the longest list of modules of one class in a model; none if it has no list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    alike = [blocks for blocks in lists if blocks and len({type(block) for block in blocks}) == 1]
    return max(alike, key=len, default=[])
