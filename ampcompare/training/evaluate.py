"""Accuracy over a whole validation set, from exact counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.precision.base import Precision

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Counts of correct predictions, and the mean cross entropy in fp32.

    Attributes:
        majority_correct: samples of the most frequent class; None where the number of classes was not given.
    """

    samples: int
    top1_correct: int
    top5_correct: int
    loss: float
    majority_correct: int | None = None


def evaluate(
    models: Sequence[nn.Module],
    precision: Precision,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    total: Callable[[Tensor], Tensor] | None = None,
    views: Sequence[Callable[[Tensor], Tensor]] = (),
    num_classes: int | None = None,
) -> Evaluation:
    """Run `models[0]` in evaluation mode over `batches`; counts stay on the device until the end.

    Args:
        total: sums a float64 tensor over all ranks, each of which evaluates a part; counts below 2^53 stay exact.
        views: further views of each batch for test-time augmentation; the logits of all views are averaged.
        num_classes: labels are counted by class if it is given.
    """
    model = models[0]
    was_training = model.training
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    classes = torch.arange(num_classes or 0, device=device)
    frequencies = torch.zeros_like(classes)
    samples = 0
    with torch.no_grad():
        for inputs, labels in batches:
            with precision.autocast():
                outputs = [model(inputs), *(model(view(inputs)) for view in views)]
            first = outputs[0].float()
            logits = first if len(outputs) == 1 else torch.stack([output.float() for output in outputs]).mean(0)
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            hits = best == labels[:, None]
            counts += torch.stack([hits[:, 0].sum(), hits.sum()])
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            frequencies += (labels[:, None] == classes).sum(0)
            samples += len(labels)
    model.train(was_training)
    sums = torch.cat([counts.double(), loss[None], counts.new_tensor([samples]).double(), frequencies.double()])
    top1, top5, loss_sum, count, *by_class = (sums if total is None else total(sums)).tolist()
    majority = int(max(by_class)) if by_class else None
    return Evaluation(int(count), int(top1), int(top5), loss_sum / max(1.0, count), majority)
