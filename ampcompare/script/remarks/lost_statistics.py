"""Layers whose running statistics an overflow has destroyed: a skipped step keeps what its forward pass wrote."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn

STATISTICS = ("running_mean", "running_var")


@torch.no_grad()
def layers_with_lost_statistics() -> list[str]:
    """Return the layers of the script that have running statistics which are not finite, and finite weights."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(part) for module in modules for part in module.children()}
    found: dict[int, str] = {}
    for module in modules:
        if id(module) in inner:
            continue
        for name, part in module.named_modules():
            if _has_lost_statistics(part):
                kind = type(part).__name__
                found[id(part)] = f"{name} ({kind})" if name else kind
    return sorted(found.values())


def _has_lost_statistics(module: nn.Module) -> bool:
    statistics = list(_running_statistics_of(module))
    return (
        bool(statistics)
        and not _are_all_finite(statistics)
        and _are_all_finite(module.parameters(recurse=False))
    )


def _running_statistics_of(module: nn.Module) -> Iterator[Tensor]:
    for name in STATISTICS:
        tensor = module._buffers.get(name)
        if tensor is not None and not tensor.is_meta:
            yield tensor


def _are_all_finite(tensors: Iterator[Tensor] | list[Tensor]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in tensors)
