"""Decide which gradients travel together: buckets from the order in which gradients arrive, as rank 0 saw it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ._errors import GradientReductionError

__all__ = ["Plan", "agree", "plan_by_arrival", "plan_by_type"]

_TYPE_ORDER = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Plan:
    """Buckets as indices into the module's parameters, in the order in which they are reduced.

    `delayed`: no bucket may be reduced before the end of a backward pass.
    """

    buckets: tuple[tuple[int, ...], ...]
    delayed: bool = False


def _kind(param: nn.Parameter) -> tuple[int, str, str]:
    """Order dtypes as Apex does: half, float, double, then those that Apex does not support."""
    rank = _TYPE_ORDER.index(param.dtype) if param.dtype in _TYPE_ORDER else len(_TYPE_ORDER)
    return rank, str(param.dtype), str(param.device)


def plan_by_type(params: Sequence[nn.Parameter], active: Iterable[int]) -> Plan:
    """Return one bucket for each dtype and device."""
    kinds: dict[tuple[int, str, str], list[int]] = {}
    for index in active:
        kinds.setdefault(_kind(params[index]), []).append(index)
    return Plan(tuple(tuple(kinds[kind]) for kind in sorted(kinds)), delayed=True)


def plan_by_arrival(
    params: Sequence[nn.Parameter],
    active: Sequence[int],
    arrivals: Sequence[int],
    *,
    message_size: int,
    triggers: frozenset[int],
    complete: bool,
) -> Plan:
    """Return the buckets that close as gradients arrive.

    Args:
        params: all parameters of the module.
        active: indices of those that take gradients.
        arrivals: indices in the order in which gradients came; an index that came twice (a weight used in two
            reentrant checkpoints) makes the plan delayed, since its first gradient is not its last.
        message_size: number of elements from which on a bucket is closed.
        triggers: indices that close a bucket; with any, `message_size` is ignored.
        complete: put those that never came into buckets of their own at the end.
    """
    if len(set(arrivals)) < len(arrivals):
        return plan_by_type(params, active)
    closed: list[tuple[int, ...]] = []
    running: dict[tuple[int, str, str], list[int]] = {}
    sizes: dict[tuple[int, str, str], int] = {}
    for index in arrivals:
        kind = _kind(params[index])
        running.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + params[index].numel()
        if index in triggers or (not triggers and sizes[kind] >= message_size):
            closed.append(tuple(running.pop(kind)))
            sizes.pop(kind)
    closed += [tuple(running[kind]) for kind in sorted(running)]
    if complete:
        came = set(arrivals)
        closed += plan_by_type(params, [index for index in active if index not in came]).buckets
    return Plan(tuple(closed))


def agree(
    plan: Plan,
    active: Sequence[int],
    total: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    complete: bool,
) -> Plan:
    """Return rank 0's plan on every rank of `group`; a collective call.

    Args:
        total: number of parameters of the module, which is equal on all ranks.
        device: the device of tensors for the backend of `group`.

    Raises:
        GradientReductionError: with `complete`, where rank 0 reduces other parameters than this rank can.
    """
    numbers = [int(plan.delayed)]
    for bucket_index, bucket in enumerate(plan.buckets):
        for index in bucket:
            numbers += [index, bucket_index]
    numbers += [-1] * (2 * total + 1 - len(numbers))
    message = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.broadcast(message, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    delayed, *rest = message.tolist()
    buckets: dict[int, list[int]] = {}
    for index, bucket_index in zip(rest[::2], rest[1::2], strict=True):
        if index >= 0:
            buckets.setdefault(bucket_index, []).append(index)
    agreed = Plan(tuple(tuple(buckets[bucket_index]) for bucket_index in sorted(buckets)), bool(delayed))
    different = set(active).symmetric_difference(index for bucket in agreed.buckets for index in bucket)
    if complete and different:
        raise GradientReductionError(
            f"Rank {dist.get_rank(group)} and rank 0 train different parameters (numbers {sorted(different)[:10]} of "
            f"{total}). Set requires_grad alike on all ranks before the forward pass."
        )
    return agreed
