"""Accuracy over a whole validation set, in exact counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.precision.base import Precision

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Counts of right answers, and the mean cross entropy in fp32."""

    samples: int
    top1_correct: int
    top5_correct: int
    loss: float


def evaluate(
    models: Sequence[nn.Module], precision: Precision, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> Evaluation:
    """Run `models[0]` in evaluation mode over `batches`; counts stay on the device until the end."""
    model = models[0]
    was_training = model.training
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    samples = 0
    with torch.no_grad():
        for inputs, labels in batches:
            with precision.autocast():
                logits = model(inputs)
            logits = logits.float()
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            hits = best == labels[:, None]
            counts += torch.stack([hits[:, 0].sum(), hits.sum()])
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            samples += len(labels)
    model.train(was_training)
    top1, top5 = counts.tolist()
    return Evaluation(samples, top1, top5, loss.item() / max(1, samples))
