"""From the name of a language model to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ampcompare.base.errors import ConfigError, did_you_mean
from ampcompare.tasks.gpt import Gpt
from ampcompare.tasks.models import check_arguments, user_model

__all__ = ["build_language_model", "repeated_blocks"]


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
        from ampcompare.tasks.transformers_models import causal_model

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
