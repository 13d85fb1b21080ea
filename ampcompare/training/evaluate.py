"""The metrics of a task over a whole validation set, from exact sums."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ampcompare.base.tensors.tree import map_tensors_in_tree, widen_halves
from ampcompare.results.records.evaluation import SampleResults, pack_right_samples, pack_sample_values
from ampcompare.tasks.task import Task
from ampcompare.training.precision.base import Precision
from ampcompare.training.process.device import has_float64

Extra = Callable[[Any, Mapping[str, Tensor], Any], Mapping[str, Tensor]]
EXTRA = "extra: "  # before the names of further numbers, apart from those of the task


@dataclass(frozen=True)
class EvaluationResult:
    """What was measured over all ranks."""

    samples: int
    values: dict[str, float]  # of each metric of the task, by name
    counts: dict[str, int]  # samples that are right, of each metric that is a share of them
    loss: float | None = None  # mean over samples; None for a task without a validation loss
    chance: float | None = None  # of the first metric, by a constant guess; None where it is not known
    per_sample: SampleResults | None = None  # first metric; None where it is no mean over samples
    extras: Mapping[str, float] = field(default_factory=dict)  # sums over samples


def evaluate_models(
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
) -> EvaluationResult:
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
    measure = functools.partial(_measure_batch, task, models, precision, extra=extra, on_host=on_host)
    keeps_samples = indices is not None and first.over_samples != "no"
    sums = _RankSums()
    with _models_in_evaluation(models), torch.no_grad():
        for batch in batches:
            if any_rank is not None:
                any_rank(True)
            measured = measure(batch)
            sums.add_batch(measured)
            if keeps_samples:
                sums.keep_sample_values(measured[first.name], task.labels(batch))
        while any_rank is not None and any_batch is not None and any_rank(False):
            measure(any_batch())
        if not sums.by_name and any_batch is not None:
            sums.reset_to_zeros_like(measure(any_batch()))
    by_index = _flag_values_and_labels_by_index(sums.outcomes, indices if keeps_samples else None, device)
    whole, samples, by_sample = _sums_sample_count_and_values_over_ranks(sums, by_index, total)
    extras = {name.removeprefix(EXTRA): float(part) for name, part in whole.items() if name.startswith(EXTRA)}
    return EvaluationResult(
        samples=samples,
        values=task.values(whole, samples),
        counts={
            metric.name: int(whole[metric.name]) for metric in task.metrics if metric.over_samples == "share"
        },
        loss=float(whole["loss"]) / samples if "loss" in whole else None,
        chance=task.chance(whole, samples),
        per_sample=_sample_results_if_equal_on_ranks(by_sample, is_share=first.over_samples == "share"),
        extras=extras,
    )


@dataclass
class _RankSums:
    """What the batches of one rank add up to, on the device.

    Attributes:
        by_name: the float64 sum over samples of each measured number, of its shape without the samples.
        samples: how many there are.
        outcomes: of each batch, the value of each sample, then its label: (2, samples), in float64.
    """

    by_name: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 0
    outcomes: list[Tensor] = field(default_factory=list)

    def add_batch(self, values_by_name: Mapping[str, Tensor]) -> None:
        """Add what was measured of a batch."""
        for name, value in values_by_name.items():
            part = value.sum(0, dtype=torch.float64)
            self.by_name[name] = self.by_name[name] + part if name in self.by_name else part
        self.samples += len(next(iter(values_by_name.values())))

    def keep_sample_values(self, values: Tensor, labels: Tensor | None) -> None:
        """Keep the value of each sample of a batch; a sample without a label gets 0."""
        values = values.double()
        # A new tensor: data may write the next batch into the same memory.
        labels = torch.zeros_like(values) if labels is None else labels.to(values.device).double()
        self.outcomes.append(torch.stack([values, labels]))

    def reset_to_zeros_like(self, values_by_name: Mapping[str, Tensor]) -> None:
        """Set all sums to 0, in the shapes of a batch that is not counted."""
        self.by_name = {
            name: value.new_zeros(value.shape[1:], dtype=torch.float64)
            for name, value in values_by_name.items()
        }


@contextlib.contextmanager
def _models_in_evaluation(models: Sequence[nn.Module]) -> Iterator[None]:
    """Switch models to evaluation, and then each to the mode that it had."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    yield
    for model, training in zip(models, modes, strict=True):
        model.train(training)


def _sums_sample_count_and_values_over_ranks(
    sums: _RankSums, by_index: Tensor, total: Callable[[Tensor], Tensor] | None
) -> tuple[dict[str, np.ndarray], int, np.ndarray]:
    """Return sums by name, the number of samples, and flag, values and labels by index, summed by `total`.

    All of it goes to other ranks, and to the host, as one tensor.
    """
    counted = torch.tensor([sums.samples], dtype=torch.float64, device=by_index.device)
    flat = torch.cat([*(part.reshape(-1) for part in sums.by_name.values()), counted, by_index])
    whole = np.array((flat if total is None else total(flat)).tolist())  # the one read from the device
    ends = np.cumsum([part.numel() for part in sums.by_name.values()])
    *parts, rest = np.split(whole, ends)
    by_name = {
        name: part.reshape(sums.by_name[name].shape) for name, part in zip(sums.by_name, parts, strict=True)
    }
    return by_name, int(rest[0]), rest[1:]


def _sample_results_if_equal_on_ranks(values_by_index: np.ndarray, *, is_share: bool) -> SampleResults | None:
    """Return the results by sample of which numbers were made by index; None if ranks had other samples.

    Args:
        values_by_index: how many ranks had others, then all values and all labels; empty where samples are not kept.
        is_share: the metric is the share of samples that are right.
    """
    if not len(values_by_index) or values_by_index[0]:
        return None
    values, labels = values_by_index[1:].reshape(2, -1)
    return pack_right_samples(values > 0, labels) if is_share else pack_sample_values(values, labels)


def _measure_batch(
    task: Task,
    models: Sequence[nn.Module],
    precision: Precision,
    batch: Any,
    *,
    extra: Extra | None,
    on_host: bool,
) -> Mapping[str, Tensor]:
    with precision.autocast():
        outputs = widen_halves(task.predict(models, batch))
    if on_host:
        outputs, batch = map_tensors_in_tree(outputs, Tensor.cpu), map_tensors_in_tree(batch, Tensor.cpu)
    measured = task.measure(outputs, batch)
    if extra is None:
        return measured
    return {**measured, **{EXTRA + name: value for name, value in extra(outputs, measured, batch).items()}}


def _flag_values_and_labels_by_index(
    outcomes: Sequence[Tensor], indices: range | None, device: torch.device
) -> Tensor:
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
