"""What the ranks of a run exchange besides gradients: sums, flags, values, and checks that they are still equal."""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.base import errors
from ampcompare.base.errors import AmpCompareError, RanksDiffer
from ampcompare.base.tensors.sharded import is_sharded

TRANSFER_BYTES = 64 * 2**20
Value = TypeVar("Value")


class Communicator:
    """All ranks of a run, as seen from one of them; the defaults are those of one process.

    All ranks must call a method together, except `is_first`.
    """

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, of its shape and in float64; of one rank `values` itself."""
        return values

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a tensor over all ranks, of its shape and in float64; of one rank `values` itself."""
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return flag

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order: plain data and tensors."""
        return [value]

    def broadcast_from_rank0(self, make: Callable[[], Value]) -> Value:
        """Call `make` on rank 0; return its plain data and tensors on every rank, or raise its error there."""
        return make()

    def copy_buffers_from_rank0(self, models: Sequence[nn.Module]) -> None:
        """Set the buffers of every rank, such as batch norm statistics, to those of rank 0."""


class ProcessGroup(Communicator):
    """The default process group of torch; messages are on the device of this process under NCCL."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device if dist.get_backend() == "nccl" else torch.device("cpu")

    def sum(self, values: Tensor) -> Tensor:
        message = values.detach().to(self._device, torch.float64, copy=True)
        dist.all_reduce(message)
        return message

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size

    def any(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor(float(flag))) > 0)

    def gather(self, value: Any) -> list[Any]:
        message = self._pack_as_bytes(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(message)], device=self._device))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(message)] = message
        messages = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(messages, padded)
        return [_unpack_from_bytes(each[: int(size)]) for each, size in zip(messages, sizes, strict=True)]

    def broadcast_from_rank0(self, make: Callable[[], Value]) -> Value:
        message = torch.empty(0, dtype=torch.uint8, device=self._device)
        if self.is_first:
            try:
                message = self._pack_as_bytes({"value": make()})
            except AmpCompareError as error:
                message = self._pack_as_bytes({"error": type(error).__name__, "text": str(error)})
        size = torch.tensor([len(message)], device=self._device)
        dist.broadcast(size, src=0)
        if not self.is_first:
            message = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(message, src=0)
        content = _unpack_from_bytes(message)
        if "error" in content:
            raise getattr(errors, content["error"], AmpCompareError)(content["text"])
        value: Value = content["value"]
        return value

    def _pack_as_bytes(self, value: Any) -> Tensor:
        content = io.BytesIO()
        torch.save(value, content)
        return torch.frombuffer(content.getbuffer(), dtype=torch.uint8).to(self._device)

    def copy_buffers_from_rank0(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            for buffer in model.buffers():
                dist.broadcast(buffer.detach(), src=0)


def _unpack_from_bytes(message: Tensor) -> Any:
    """Return plain data and tensors; unlike torch's object collectives, this never executes code from a message."""
    return torch.load(io.BytesIO(message.cpu().numpy().tobytes()), weights_only=True)


def require_equal_on_ranks(ranks: Communicator, what: str, value: Any, remedy: str) -> None:
    """Check that all ranks hold the same value; every rank calls it.

    Args:
        ranks: of the run.
        what: the name of the value, for the error.
        value: of this rank; of a mapping each item is compared.
        remedy: ends the error.

    Raises:
        RanksDiffer: on every rank; it names the ranks and what differs.
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


def signature_by_parameter(models: Sequence[nn.Module]) -> dict[str, str]:
    """Return name, shape, dtype and trainability of each parameter."""
    facts = {}
    for index, model in enumerate(models):
        prefix = f"{index}." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            frozen = "" if param.requires_grad else " without gradient"
            facts[prefix + name] = f"{list(param.shape)} {param.dtype}{frozen}"
    return facts


def digest_of_weights(models: Sequence[nn.Module]) -> str:
    """Return 16 hexadecimal digits that change with any bit of a parameter or buffer that ranks hold in full."""
    digest = hashlib.sha256()
    pending: list[Tensor] = []
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            if is_sharded(tensor):  # each rank has another part of it, and they can only agree
                continue
            pending.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            if sum(part.numel() for part in pending) >= TRANSFER_BYTES:
                digest.update(torch.cat(pending).cpu().numpy().data)
                pending = []
    if pending:
        digest.update(torch.cat(pending).cpu().numpy().data)
    return digest.hexdigest()[:16]
