"""An exponential moving average of the weights (EMA), kept in fp32 in every arm, and evaluated separately."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ampcompare.base.tensors.lists import copy_tensors_by_dtype, group_tensors_by_type
from ampcompare.training.checkpoint.check_checkpoint import check_weights_fit_model
from ampcompare.training.parallel.ranks import Communicator
from ampcompare.training.precision.base import Precision, owned_params


class ModelEma:
    """The average of `torch.optim.swa_utils` over what the optimizers update: fp32 masters if an arm has them.

    Create it before `Precision.prepare`, while the models are fp32, and let it `follow` what `prepare` returned. If an
    arm keeps 16-bit weights only, they are converted to fp32 for the average: in 16 bits its small updates would round
    to nothing. Floating-point buffers, such as batch norm statistics, are averaged too. `AveragedModel` would wait for
    the device at each update, once for each dtype. The first update copies the weights.
    """

    def __init__(self, models: Sequence[nn.Module], decay: float) -> None:
        self.decay = decay
        self._models = copy.deepcopy(nn.ModuleList(models))
        self._blend = get_ema_multi_avg_fn(decay)
        self._num_updates = 0
        self._replicas: Sequence[nn.Module] = ()
        self._optimizers: Sequence[Optimizer] = ()
        self._owned: list[Tensor] = []
        self._sources: _TensorsWithAverages | None = None

    def follow(
        self, replicas: Sequence[nn.Module], optimizers: Sequence[Optimizer], owned: Sequence[Tensor]
    ) -> None:
        """Average the weights of `replicas` from now on, as `prepare` returned them, unwrapped.

        `owned` are the parameters that the optimizers held before `prepare`, in order; masters replace them at the same
        index, in Apex only after the first backward pass.
        """
        self._replicas = list(replicas)
        self._optimizers = optimizers
        self._owned = list(owned)
        self._sources = None

    @torch.no_grad()
    def update(self) -> None:
        """Average in the current weights, without waiting for the device; call it once after each step."""
        if self._sources is None:
            self._sources = self._lists_of_averaged_tensors()
        for means, sources in self._sources.averages_and_updated_sources():
            if self._num_updates:
                self._blend(means, sources, self._num_updates)
            else:
                torch._foreach_copy_(means, sources)
        self._num_updates += 1

    def _lists_of_averaged_tensors(self) -> _TensorsWithAverages:
        updated = [param for optimizer in self._optimizers for param in owned_params(optimizer)]
        masters = {id(param): master for param, master in zip(self._owned, updated, strict=True)}
        tensors = [masters.get(id(tensor), tensor) for tensor in _parameters_and_buffers(self._replicas)]
        return _TensorsWithAverages(_parameters_and_buffers(self._models), tensors)

    @contextmanager
    def average_in_place(self, precision: Precision) -> Iterator[None]:
        """Write the average into the replicas, cast to their dtypes, and restore their own weights on exit."""
        both = zip(
            _parameters_and_buffers(self._replicas), _parameters_and_buffers(self._models), strict=True
        )
        pairs = [(tensor, mean) for tensor, mean in both if tensor.is_floating_point()]
        targets = [tensor for tensor, _ in pairs]
        weights = [tensor.detach().clone() for tensor in targets]
        _write_weights_and_notify(targets, [mean for _, mean in pairs], precision)
        try:
            yield
        finally:
            _write_weights_and_notify(targets, weights, precision)

    def copy_buffers_from_rank0(self, ranks: Communicator) -> None:
        """Set the averaged buffers of every rank to those of rank 0, as is done with the buffers themselves."""
        ranks.copy_buffers_from_rank0([self._models])

    def state_dict(self) -> dict[str, Any]:
        """Return the decay, the number of updates, and per model the averaged tensors under its own names."""
        for tensor, mean in zip(
            _parameters_and_buffers(self._replicas), _parameters_and_buffers(self._models), strict=False
        ):
            if not mean.is_floating_point():  # a count is copied: it has no average
                mean.copy_(tensor)
        models = [dict(model.state_dict()) for model in self._models]
        return {"decay": self.decay, "num_updates": self._num_updates, "models": models}

    def check_average_state(self, state: Mapping[str, Any]) -> None:
        """Check that what `state_dict` returned is of these models."""
        for model, saved in zip(self._models, state["models"], strict=True):
            check_weights_fit_model(model, saved, same_types=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the decay stays that of this run."""
        self.check_average_state(state)
        for model, saved in zip(self._models, state["models"], strict=True):
            model.load_state_dict(saved)
        self._num_updates = int(state["num_updates"])


class _TensorsWithAverages:
    """What is averaged: lists of tensors of one dtype, each with the list of their averages; counts are ignored.

    A source of another dtype than its average is read through a copy in the average's.
    """

    def __init__(self, means: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self._narrow: list[Tensor] = []
        self._wide: list[Tensor] = []
        pairs: dict[int, Tensor] = {}
        for mean, tensor in zip(means, tensors, strict=True):
            pairs[id(mean)] = tensor
            if mean.is_floating_point() and tensor.dtype is not mean.dtype:
                self._narrow.append(tensor)
                self._wide.append(torch.empty_like(mean))
                pairs[id(mean)] = self._wide[-1]
        groups = group_tensors_by_type(mean for mean in means if mean.is_floating_point())
        self._groups = [(alike, [pairs[id(mean)] for mean in alike]) for alike in groups]

    def averages_and_updated_sources(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return averages and sources, with updated copies."""
        copy_tensors_by_dtype(self._wide, self._narrow)
        return self._groups


def _parameters_and_buffers(models: Iterable[nn.Module]) -> list[Tensor]:
    """Return all parameters, then all buffers."""
    params: list[Tensor] = [param for model in models for param in model.parameters()]
    return params + [buffer for model in models for buffer in model.buffers()]


@torch.no_grad()
def _write_weights_and_notify(targets: list[Tensor], values: list[Tensor], precision: Precision) -> None:
    copy_tensors_by_dtype(targets, values)
    precision.weights_replaced()
