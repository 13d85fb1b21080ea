"""What state an optimizer keeps of a parameter, learned from a copy of the optimizer that makes one step on zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["StateProbe"]

# Their state depends on a parameter's shape in one way: some tensors have it. A step on two zeros shows which.
LIKE_ANY_SHAPE = ("SGD", "Adam", "AdamW", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD", "FusedAdagrad")
PACKAGES = ("torch", "apex", "ampcompare")
SMALL = torch.Size([2])
_Shapes = dict[str, tuple[torch.Size | None, torch.dtype | None]]


class StateProbe:
    """The state that an optimizer keeps of each of its parameters. Make it before `Precision.prepare`.

    Args:
        optimizer: as `make_optimizer` returned it; other libraries may put it into one of their own later.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind: Any = type(optimizer)
        groups = optimizer.param_groups
        self._groups = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self._group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
        known = self._kind.__module__.partition(".")[0] in PACKAGES and self._kind.__name__ in LIKE_ANY_SHAPE
        self._probe_shape = SMALL if known else None
        self._seen: dict[tuple[int, torch.Size, torch.dtype], _Shapes] = {}

    def state_of(self, at: int, shape: torch.Size, dtype: torch.dtype) -> Mapping[str, Tensor | None]:
        """Return the state by name after a step on a parameter.

        Args:
            at: the place of the parameter among all.
            shape, dtype: those of the tensor that the optimizer holds.

        Returns:
            A meta tensor for each tensor; None for a plain number.
        """
        probed = shape if self._probe_shape is None else self._probe_shape
        key = (self._group_of[at], probed, dtype)
        if key not in self._seen:
            self._seen[key] = self._step(*key)
        return {
            name: None if kept is None else torch.empty(shape if kept == probed else kept, dtype=kind, device="meta")
            for name, (kept, kind) in self._seen[key].items()
        }

    def _step(self, group: int, shape: torch.Size, dtype: torch.dtype) -> _Shapes:
        probe = nn.Parameter(torch.zeros(shape, dtype=dtype))
        probe.grad = torch.zeros(shape, dtype=dtype)
        settings = self._groups[group]
        copy = self._kind([{**settings, "params": [probe]}], lr=settings["lr"])
        copy.step()
        return {
            name: (value.shape, value.dtype) if isinstance(value, Tensor) else (None, None)
            for name, value in copy.state[probe].items()
            if value is not None
        }
