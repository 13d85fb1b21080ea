"""Language modelling: the next byte of a text, cross entropy, bits per byte and perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.language_models import build_language_model, repeated_blocks
from ampcompare.tasks.metrics import BITS_PER_BYTE, LANGUAGE_MODELING, PERPLEXITY
from ampcompare.tasks.task import Sums, Task, require_no_views
from ampcompare.tasks.tensor_data import TensorData
from ampcompare.tasks.text import BYTES, text_data

__all__ = ["LanguageModeling", "lm"]

WITH_FLOAT64 = ("cpu", "cuda")  # types of devices that all compute in it

SEQUENCE_LENGTH = 64
IGNORED = -100
HASH_MULTIPLIER, HASH_MODULUS = 2_654_435_761, 2**31


def lm(recipe: Recipe) -> LanguageModeling:
    """Return the task of a recipe, with its data.

    Raises:
        ConfigError: data or options that the task does not have.
    """
    require_no_views(recipe, "lm")
    if recipe.data.image_size is not None:
        raise ConfigError("the task lm has no images; leave out --image-size, and give --sequence-length")
    length = recipe.data.sequence_length or SEQUENCE_LENGTH
    data = text_data(
        recipe.data.name,
        seed=recipe.seed,
        sequence_length=length,
        train_size=recipe.data.train_size,
        val_size=recipe.data.val_size,
    )
    return LanguageModeling(data, recipe.model, sequence_length=length, label_smoothing=recipe.label_smoothing)


class LanguageModeling(Task):
    """One causal model that gives logits (batch, length, 256) for int64 bytes (batch, length).

    What fills up a sample comes after its text, where a causal model does not see it, and has no part in loss and
    metrics. Every byte has the same weight in an epoch: the loss is summed over the bytes of a batch and divided by
    their average number in so many samples, so that the mean over micro-batches, or ranks, is that of the whole batch.

    Args:
        data: batches as `text_data` describes them.
        model: which one is built for them.
        sequence_length: the longest sequence.
        label_smoothing: part of the target spread over all bytes, in [0, 1).
    """

    metrics = LANGUAGE_MODELING
    unit = "tokens"

    def __init__(
        self,
        data: TensorData,
        model: ModelConfig | None = None,
        *,
        sequence_length: int = SEQUENCE_LENGTH,
        label_smoothing: float = 0.0,
    ) -> None:
        self.data = data
        self._model = model or ModelConfig(arch="gpt")
        self._sequence_length = sequence_length
        self._label_smoothing = label_smoothing
        self._train_length, self._val_length = map(_mean_length, (data.train, data.val))
        self.units_per_sample = round(self._train_length)

    def make_models(self) -> Sequence[nn.Module]:
        return [
            build_language_model(
                self._model.arch,
                vocabulary=BYTES,
                sequence_length=self._sequence_length,
                model_args=self._model.args,
            )
        ]

    def loss(self, models: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.predict(models, batch)
        targets = _targets(batch)
        smoothing = self._label_smoothing
        # Looked up on the module at each call: O1 replaces the function there.
        mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
        if "mask" not in batch:
            return mean
        wide = torch.float64 if mean.device.type in WITH_FLOAT64 else torch.float32
        share = batch["mask"].sum(dtype=wide) / (len(targets) * self._train_length)
        return mean * share.to(mean.dtype)

    def predict(self, models: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> Tensor:
        logits = models[0](batch["tokens"][:, :-1].long())
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            shape = f" of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
            raise ConfigError(
                f"the model returned a {type(logits).__name__}{shape}; lm needs one tensor (batch, length, {BYTES})"
            )
        return logits

    def measure(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        targets = _targets(batch)
        nats = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        # Over the average length, so that the mean over samples is the mean over bytes.
        loss = nats.sum(1, dtype=torch.float64) / self._val_length
        read = targets != IGNORED
        counts = torch.zeros(len(targets), BYTES, device=targets.device)
        return {
            "loss": loss,
            BITS_PER_BYTE.name: loss / math.log(2),
            "bytes": counts.scatter_add_(1, targets.where(read, 0), read.float()),
        }

    def answers(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return outputs.argmax(-1).masked_fill(_targets(batch) == IGNORED, IGNORED)

    def values(self, sums: Sums, samples: int) -> dict[str, float]:
        bits = float(sums[BITS_PER_BYTE.name]) / samples
        with np.errstate(over="ignore"):  # of a model that diverged
            return {BITS_PER_BYTE.name: bits, PERPLEXITY.name: float(np.exp2(bits))}

    def chance(self, sums: Sums, samples: int) -> float:
        """Return the entropy of single bytes, in bits."""
        counts = sums["bytes"][sums["bytes"] > 0]
        shares = counts / counts.sum()
        return float(-(shares * np.log2(shares)).sum())

    def labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a hash of each sample's bytes, so that another text, or another version of it, is seen."""
        tokens = batch["tokens"].long()
        factors = (torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * HASH_MULTIPLIER) % HASH_MODULUS
        return (tokens * factors).sum(1) % HASH_MODULUS

    def checkpointed_modules(self, models: Sequence[nn.Module]) -> Sequence[nn.Module]:
        return repeated_blocks(models[0])


def _targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes to predict, int64 (batch, length), where filling is `IGNORED`."""
    targets = batch["tokens"][:, 1:].long()
    return targets.masked_fill(~batch["mask"], IGNORED) if "mask" in batch else targets


def _mean_length(samples: Mapping[str, Tensor]) -> float:
    """Return the average number of bytes of a sample that are predicted."""
    tokens = samples["tokens"]
    counted = int(samples["mask"].sum()) if "mask" in samples else len(tokens) * (tokens.shape[1] - 1)
    return counted / len(tokens)
