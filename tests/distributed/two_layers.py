"""A model of which each rank may use another part, and the gradients that all ranks should have."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Net(nn.Module):
    """Two linear layers, of which each can be left out of a forward pass."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, dtype=dtype)
        self.second = nn.Linear(4, 3, dtype=dtype)

    def forward(self, x: Tensor, use: str = "both") -> Tensor:
        out = x.new_zeros(x.size(0), 3)
        if use in ("both", "first"):
            out = out + self.first(x)
        if use in ("both", "second"):
            out = out + self.second(x)
        return out


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(2, 4, generator=generator, dtype=torch.float64).to(dtype)


def local_grads(module: nn.Module, x: Tensor, **arguments: Any) -> list[Tensor | None]:
    twin = copy.deepcopy(module)
    twin.zero_grad()
    twin(x, **arguments).square().sum().backward()
    return [param.grad for param in twin.parameters()]


def assert_grads(module: nn.Module, expected: list[Any], rtol: float = 1e-6) -> None:
    for param, grad in zip(module.parameters(), expected, strict=True):
        if grad is None:
            assert param.grad is None
        else:
            assert param.grad is not None
            torch.testing.assert_close(param.grad, grad.to(param.dtype), rtol=rtol, atol=rtol)


def mean_over_ranks(module: nn.Module, step: int, uses: list[str] | None = None) -> list[Tensor | None]:
    """Return the average of all ranks' own gradients, those that a rank lacks counting as zero."""
    world = dist.get_world_size()
    per_rank = [
        local_grads(
            module, batch(step, rank, next(module.parameters()).dtype), use=uses[rank] if uses else "both"
        )
        for rank in range(world)
    ]
    result: list[Tensor | None] = []
    for column in zip(*per_rank, strict=True):
        there = [grad.double() for grad in column if grad is not None]
        result.append(sum(there) / world if there else None)  # type: ignore[arg-type]
    return result
