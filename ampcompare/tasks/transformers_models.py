"""Causal language models of Transformers, from a configuration alone: no weights and no downloads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ampcompare.base.errors import BackendUnavailable, ConfigError, did_you_mean
from ampcompare.tasks.packages import needs_package
from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = ["causal_model"]


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
