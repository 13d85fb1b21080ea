"""Layers whose running statistics an overflow has destroyed: a skipped step keeps what its forward pass wrote.

Or a batch norm in fp16 has a variance above 65504: it trains by that of each batch, and evaluates by infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.formatting import format_few_names
from ampcompare.base.live_objects import live_objects_of
from ampcompare.base.patches import PatchPoints, Subscriptions

STATISTICS = ("running_mean", "running_var")
MAX_OPTIMIZERS = 16  # at which layers are looked for; a script may make one for each task


class LostStatisticsWatch:
    """Knows layers with running statistics, also those of a model that its function has left."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[str, nn.Module]] = {}  # by identity: kept, so that they live to the end
        self._num_optimizers = 0

    def follow(self, events: Subscriptions) -> None:
        """Begin to keep the layers that are there when an optimizer is made."""
        events.wrap(*PatchPoints.MAKE_OPTIMIZER, self._keep_layers_at_new_optimizer)

    def _keep_layers_at_new_optimizer(self, inner: Any, made: Any, *args: Any, **options: Any) -> Any:
        result = inner(made, *args, **options)
        self._num_optimizers += 1
        if self._num_optimizers <= MAX_OPTIMIZERS:
            self._layers = _layers_with_running_statistics_by_id() | self._layers
        return result

    @torch.no_grad()
    def find_layers_with_lost_statistics(self) -> list[str]:
        """Return the layers whose running statistics are not finite, though their weights are.

        Without those of `find_layers_beyond_fp16`.
        """
        return sorted(
            name
            for name, layer in self._named_layers()
            if _has_lost_statistics(layer) and not _is_variance_beyond_fp16(layer)
        )

    @torch.no_grad()
    def find_layers_beyond_fp16(self) -> list[str]:
        """Return the layers that keep a variance in fp16 which fp16 cannot hold."""
        return sorted(name for name, layer in self._named_layers() if _is_variance_beyond_fp16(layer))

    def _named_layers(self) -> Iterable[tuple[str, nn.Module]]:
        return (_layers_with_running_statistics_by_id() | self._layers).values()  # names of the first look


def variance_beyond_fp16_text(layers: Sequence[str]) -> str:
    """Return what it means that layers keep a variance which fp16 cannot hold, in words."""
    return (
        f"the running variance of {format_few_names(layers)} is inf, since fp16 holds no number above 65504: "
        "evaluation returns the bias of such a layer alone, which no training loss shows; keep it in fp32"
    )


def _layers_with_running_statistics_by_id() -> dict[int, tuple[str, nn.Module]]:
    """Return the layers of the process that have running statistics, with their names, by identity."""
    modules = live_objects_of(nn.Module)
    inner = {id(part) for module in modules for part in module.children()}
    found: dict[int, tuple[str, nn.Module]] = {}
    for module in modules:
        if id(module) in inner:
            continue
        for name, part in module.named_modules():
            if next(_running_statistics_of(part), None) is not None:
                kind = type(part).__name__
                found[id(part)] = (f"{name} ({kind})" if name else kind), part
    return found


def _has_lost_statistics(module: nn.Module) -> bool:
    statistics = list(_running_statistics_of(module))
    return (
        bool(statistics)
        and not _are_all_finite(statistics)
        and _are_all_finite(module.parameters(recurse=False))
    )


def _is_variance_beyond_fp16(module: nn.Module) -> bool:
    """Return whether a running variance is inf, and all else of a layer finite, as where no input has overflowed."""
    variance = module._buffers.get("running_var")
    if variance is None or variance.is_meta or variance.dtype is not torch.float16:
        return False
    others = [*_running_statistics_of(module), *module.parameters(recurse=False)]
    return (
        bool(torch.isposinf(variance).any())
        and not bool(torch.isnan(variance).any())
        and _are_all_finite([one for one in others if one is not variance])
    )


def _running_statistics_of(module: nn.Module) -> Iterator[Tensor]:
    for name in STATISTICS:
        tensor = module._buffers.get(name)
        if tensor is not None and not tensor.is_meta:
            yield tensor


def _are_all_finite(tensors: Iterator[Tensor] | list[Tensor]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in tensors)
