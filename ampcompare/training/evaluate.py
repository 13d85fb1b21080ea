"""The metrics of a task over a whole validation set, from exact sums."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ampcompare.base.tensors.tree import map_tree
from ampcompare.results.records.evaluation import SampleResults, pack_right, pack_values
from ampcompare.tasks.data import in_fp32
from ampcompare.tasks.task import Task
from ampcompare.training.device import has_float64
from ampcompare.training.precision.base import Precision

Extra = Callable[[Any, Mapping[str, Tensor], Any], Mapping[str, Tensor]]
EXTRA = "extra: "  # before the names of further numbers, apart from those of the task


@dataclass(frozen=True)
class Evaluation:
    """What was measured over all ranks."""

    samples: int
    values: dict[str, float]  # of each metric of the task, by name
    counts: dict[str, int]  # samples that are right, of each metric that is a share of them
    loss: float | None = None  # mean over samples; None for a task without a validation loss
    chance: float | None = None  # of the first metric, by a constant guess; None where it is not known
    per_sample: SampleResults | None = None  # first metric; None where it is no mean over samples
    extras: Mapping[str, float] = field(default_factory=dict)  # sums over samples


def evaluate(
    task: Task,
    models: Sequence[nn.Module],
    precision: Precision,
    batches: Iterable[Any],
    device: torch.device,
    total: Callable[[Tensor], Tensor] | None = None,
    indices: range | None = None,
    any_batch: Callable[[], Any] | None = None,
    extra: Extra | None = None,
    any_rank: Callable[[bool], bool] | None = None,
) -> Evaluation:
    """Measure `models` in evaluation mode on `batches`; what is summed stays on the device until the end.

    `total` sums a float64 tensor over all ranks, each of which evaluates a part; counts below 2^53 stay exact.
    `indices` are those of the samples of `batches`; if any rank gets another number of samples, there are no results by
    sample. A rank without samples learns the shapes of the sums from `any_batch`. `extra` returns further numbers of
    each sample, (samples,). With `any_rank` forward passes wait for other ranks: one that has run out of batches
    repeats `any_batch`, which is not counted, until all have.
    """
    first = task.metrics[0]
    on_host = not has_float64(device)  # what is summed in float64 is measured where there is one
    device = torch.device("cpu") if on_host else device
    measure = functools.partial(_measure, task, models, precision, extra=extra, on_host=on_host)
    by_sample = indices is not None and first.over_samples != "no"
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    sums: dict[str, Tensor] = {}
    outcomes: list[Tensor] = []  # of a batch: the value of each sample, then its label
    samples = 0
    with torch.no_grad():
        for batch in batches:
            if any_rank is not None:
                any_rank(True)
            measured = measure(batch)
            for name, value in measured.items():
                part = value.sum(0, dtype=torch.float64)
                sums[name] = sums[name] + part if name in sums else part
            samples += len(next(iter(measured.values())))
            if by_sample:
                value, labels = measured[first.name].double(), task.labels(batch)
                # A new tensor: data may write the next batch into the same memory.
                labels = torch.zeros_like(value) if labels is None else labels.to(device).double()
                outcomes.append(torch.stack([value, labels]))
        while any_rank is not None and any_batch is not None and any_rank(False):
            measure(any_batch())
        if not sums and any_batch is not None:
            shapes = measure(any_batch())
            sums = {name: value.new_zeros(value.shape[1:], dtype=torch.float64) for name, value in shapes.items()}
    for model, training in zip(models, modes, strict=True):
        model.train(training)
    counted = torch.tensor([samples], dtype=torch.float64, device=device)
    kept = _by_index(outcomes, indices if by_sample else None, device)
    flat = torch.cat([*(part.reshape(-1) for part in sums.values()), counted, kept])
    whole = np.array((flat if total is None else total(flat)).tolist())  # the one read from the device
    ends = np.cumsum([part.numel() for part in sums.values()])
    *parts, rest = np.split(whole, ends)
    shaped = {name: part.reshape(sums[name].shape) for name, part in zip(sums, parts, strict=True)}
    values = {name.removeprefix(EXTRA): float(part) for name, part in shaped.items() if name.startswith(EXTRA)}
    samples = int(rest[0])
    return Evaluation(
        samples=samples,
        values=task.values(shaped, samples),
        counts={metric.name: int(shaped[metric.name]) for metric in task.metrics if metric.over_samples == "share"},
        loss=float(shaped["loss"]) / samples if "loss" in shaped else None,
        chance=task.chance(shaped, samples),
        per_sample=_pack(rest[1:], is_share=first.over_samples == "share"),
        extras=values,
    )


def _pack(kept: np.ndarray, *, is_share: bool) -> SampleResults | None:
    """Return the results by sample that `_by_index` has made a row of numbers of; None if ranks had other samples.

    Args:
        kept: how many ranks had others, then all values and all labels; empty where samples are not kept.
        is_share: the metric is the share of samples that are right.
    """
    if not len(kept) or kept[0]:
        return None
    values, labels = kept[1:].reshape(2, -1)
    return pack_right(values > 0, labels) if is_share else pack_values(values, labels)


def _measure(
    task: Task, models: Sequence[nn.Module], precision: Precision, batch: Any, *, extra: Extra | None, on_host: bool
) -> Mapping[str, Tensor]:
    with precision.autocast():
        outputs = in_fp32(task.predict(models, batch))
    if on_host:
        outputs, batch = map_tree(outputs, Tensor.cpu), map_tree(batch, Tensor.cpu)
    measured = task.measure(outputs, batch)
    if extra is None:
        return measured
    return {**measured, **{EXTRA + name: value for name, value in extra(outputs, measured, batch).items()}}


def _by_index(outcomes: Sequence[Tensor], indices: range | None, device: torch.device) -> Tensor:
    """Return values and labels at the indices of their samples, after a flag: whether there are more or fewer samples.

    The indices of other ranks hold zeros, so that the sum over ranks has all of them and counts the flags. Its shape is
    (1 + 2 * validation samples,), in float64; it is empty without indices.
    """
    if indices is None:
        return torch.zeros(0, dtype=torch.float64, device=device)
    by_index = torch.zeros(1 + 2 * indices.stop, dtype=torch.float64, device=device)
    if sum(part.shape[1] for part in outcomes) != len(indices):
        by_index[0] = 1
    elif outcomes:
        by_index[1:].view(2, -1)[:, indices.start :: indices.step] = torch.cat(list(outcomes), 1)
    return by_index
