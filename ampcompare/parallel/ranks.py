"""What the processes of one run tell each other beside gradients: sums, agreements, whether they are still equal."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.errors import AmpCompareError, RanksDiffer

__all__ = ["Alone", "Group", "Ranks", "model_facts", "require_equal", "weights_digest"]

Value = TypeVar("Value")


class Ranks(abc.ABC):
    """All processes of a run, as one of them sees them. Every method but `is_first` is called by all of them together.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
    """

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @abc.abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""

    @abc.abstractmethod
    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a tensor over all ranks."""

    @abc.abstractmethod
    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks, in order."""

    @abc.abstractmethod
    def from_first(self, make: Callable[[], Value]) -> Value:
        """Return on every rank what `make` returns on the first, or raise the error that it raises there."""

    @abc.abstractmethod
    def equalize_buffers(self, models: Sequence[nn.Module]) -> None:
        """Give every rank the buffers of the first, such as the running statistics of batch norm."""


class Alone(Ranks):
    """One process."""

    rank = 0
    size = 1

    def total(self, values: Tensor) -> Tensor:
        return values

    def mean(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def from_first(self, make: Callable[[], Value]) -> Value:
        return make()

    def equalize_buffers(self, models: Sequence[nn.Module]) -> None:
        pass


class Group(Ranks):
    """The default process group of torch.

    Args:
        device: of this process; messages lie there, where the backend asks for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    def total(self, values: Tensor) -> Tensor:
        message = values.detach().to(self._device, torch.float64, copy=True)
        dist.all_reduce(message)
        return message

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.size

    def any(self, flag: bool) -> bool:
        return bool(self.total(torch.tensor(float(flag))) > 0)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, make: Callable[[], Value]) -> Value:
        message: list[Any] = [None, None]
        if self.is_first:
            try:
                message[0] = make()
            except AmpCompareError as error:
                message[1] = error
        dist.broadcast_object_list(message, src=0)
        if message[1] is not None:
            raise message[1]
        value: Value = message[0]
        return value

    def equalize_buffers(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            for buffer in model.buffers():
                dist.broadcast(buffer.detach(), src=0)


def require_equal(ranks: Ranks, what: str, value: Any, remedy: str) -> None:
    """See that all ranks hold the same value, or the same items of a mapping.

    Raises:
        RanksDiffer: on every rank, naming those that differ from rank 0 and in what.
    """
    values = ranks.gather(value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if not different:
        return
    other = values[different[0]]
    names = f"{'rank' if len(different) == 1 else 'ranks'} {', '.join(map(str, different))}"
    if isinstance(value, Mapping):
        apart = [name for name in {**values[0], **other} if values[0].get(name) != other.get(name)]
        detail = "; ".join(
            f"{name} is {other.get(name)} there and {values[0].get(name)} on rank 0" for name in apart[:3]
        )
    else:
        detail = f"{other} there and {values[0]} on rank 0"
    raise RanksDiffer(f"{names} of {ranks.size} hold another {what} than rank 0: {detail}; {remedy}")


def model_facts(models: Sequence[nn.Module]) -> dict[str, str]:
    """Return name, shape, dtype and trainability of each parameter."""
    return {
        f"{index}.{name}" if len(models) > 1 else name: f"{list(param.shape)} {param.dtype}"
        + ("" if param.requires_grad else " without gradient")
        for index, model in enumerate(models)
        for name, param in model.named_parameters()
    }


def weights_digest(models: Sequence[nn.Module]) -> str:
    """Return 16 hexadecimal digits that change with any bit of a parameter or buffer."""
    found = hashlib.sha256()
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]
