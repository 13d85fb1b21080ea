"""Accuracy over a whole validation set, from exact counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.precision.base import Precision
from ampcompare.records.evaluation import ImageResults
from ampcompare.records.images import pack_images

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Counts of correct predictions, and the mean cross entropy in fp32.

    Attributes:
        majority_correct: samples of the most frequent class; None where the number of classes was not given.
        images: which samples were classified correctly; None where their indices are not known.
    """

    samples: int
    top1_correct: int
    top5_correct: int
    loss: float
    majority_correct: int | None = None
    images: ImageResults | None = None


def evaluate(
    models: Sequence[nn.Module],
    precision: Precision,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    total: Callable[[Tensor], Tensor] | None = None,
    views: Sequence[Callable[[Tensor], Tensor]] = (),
    num_classes: int | None = None,
    indices: range | None = None,
) -> Evaluation:
    """Run `models[0]` in evaluation mode over `batches`; what is counted stays on the device until the end.

    Args:
        total: sums a float64 tensor over all ranks, each of which evaluates a part; counts below 2^53 stay exact.
        views: further views of each batch for test-time augmentation; the logits of all views are averaged.
        num_classes: labels are counted by class if it is given.
        indices: of the samples of `batches` in the validation set, in order: `range(rank, num_val, world_size)`. If
            any rank gets another number of samples, such as padded batches, there are no per-image results.
    """
    model = models[0]
    was_training = model.training
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    classes = torch.arange(num_classes or 0, device=device)
    frequencies = torch.zeros_like(classes)
    marks: list[Tensor] = []  # per sample: twice its label, plus 1 if it was classified correctly
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
            if indices is not None:
                marks.append(2 * labels + hits[:, 0])
            frequencies += (labels[:, None] == classes).sum(0)
            samples += len(labels)
    model.train(was_training)
    evaluated = counts.new_tensor([samples])
    parts = [counts, loss[None], evaluated, frequencies, _by_index(marks, indices, like=loss)]
    sums = torch.cat([part.double() for part in parts])
    top1, top5, loss_sum, count, *rest = (sums if total is None else total(sums)).tolist()
    by_class, by_index = rest[: len(classes)], rest[len(classes) :]
    majority = int(max(by_class)) if by_class else None
    return Evaluation(int(count), int(top1), int(top5), loss_sum / max(1.0, count), majority, _images(by_index))


def _by_index(marks: Sequence[Tensor], indices: range | None, like: Tensor) -> Tensor:
    """Return the marks at the indices of their samples, after a flag: whether there are more or fewer samples.

    The indices of other ranks hold zeros, so that the sum over ranks has all marks and counts the flags.

    Returns:
        (1 + validation samples,), float64; empty without indices.
    """
    if indices is None:
        return like.new_zeros(0)
    by_index = like.new_zeros(1 + indices.stop)
    if sum(map(len, marks)) != len(indices):
        by_index[0] = 1
    elif marks:
        by_index[1:][indices.start :: indices.step] = torch.cat(list(marks)).double()
    return by_index


def _images(by_index: Sequence[float]) -> ImageResults | None:
    if not by_index or by_index[0]:
        return None
    marks = np.array(by_index[1:], dtype=np.int64)
    return pack_images(marks % 2 == 1, marks // 2)
