"""The classification task: data, and the loss of a model on a batch of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.errors import ConfigError
from ampcompare.tasks.data import Data

__all__ = ["Task", "classification_loss"]


def classification_loss(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy.

    Args:
        logits: (batch, classes), in the dtype of the model; nothing is cast, so that the arm's own rules apply.
        labels: (batch,), int64.
        label_smoothing: part of the target spread over all classes, in [0, 1).
    """
    # Looked up on the module at each call: O1 replaces the function there.
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)


@dataclass(frozen=True)
class Task:
    """What an arm is trained on."""

    data: Data
    label_smoothing: float = 0.0

    def loss(self, models: Sequence[nn.Module], batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of the first model on samples and labels of `data`; call it inside the arm's autocast.

        Raises:
            ConfigError: the model returns something other than a tensor.
        """
        samples, labels = batch
        logits = models[0](samples)
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"the model returned a {type(logits).__name__}; classification needs one tensor (batch, classes)"
            )
        return classification_loss(logits, labels, label_smoothing=self.label_smoothing)
