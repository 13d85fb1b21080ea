"""Any tensors that fit into memory as a data set: a batch is one gather of each, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.data import Data, Part, map_tensors, tensors_of

__all__ = ["TensorData"]


@dataclass(frozen=True, eq=False)
class TensorData(Data):
    """Samples as tensors in tuples and dicts, whose first dimension counts the samples; batches have their structure.

    `workers` and `pin_memory` are ignored: the tensors are on the device.

    Args:
        train, val: structures of tensors, each with the samples of its part as the first dimension.
    """

    on_device = True
    train: Any = field(repr=False)
    val: Any = field(repr=False)
    _moved: dict[torch.device, tuple[Any, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, name: str, train: Any, val: Any, *, seed: int) -> TensorData:
        """Return a data set of these tensors.

        Raises:
            ConfigError: the tensors of a part do not have the same number of samples, or none.
        """
        counts = [_count(name, part, value) for part, value in (("training", train), ("validation", val))]
        return cls(name, num_train=counts[0], num_val=counts[1], seed=seed, train=train, val=val)

    def _read(
        self,
        part: Part,
        epoch: int,
        batches: Sequence[Tensor],
        device: torch.device,
        workers: int,
        pin_memory: bool | None,
    ) -> Iterator[Any]:
        return _gather(self._training(epoch, device) if part == "train" else self._on(device)[1], batches)

    def _training(self, epoch: int, device: torch.device) -> Any:
        """Return the training samples of an epoch, on a device."""
        return self._on(device)[0]

    def _on(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._moved:
            parts = [map_tensors(lambda tensor: tensor.to(device), part) for part in (self.train, self.val)]
            self._moved[device] = parts[0], parts[1]
        return self._moved[device]


def _count(name: str, part: str, samples: Any) -> int:
    counts = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(samples)}
    if len(counts) != 1 or 0 in counts:
        raise ConfigError(
            f"the {part} part of {name} has tensors of {', '.join(map(str, sorted(counts))) or 'no'} samples; "
            "each tensor needs the same number of them, at least 1"
        )
    return counts.pop()


def _gather(samples: Any, batches: Sequence[Tensor]) -> Iterator[Any]:
    for batch in batches:
        yield map_tensors(lambda tensor, batch=batch: tensor.index_select(0, batch), samples)  # type: ignore[misc]
