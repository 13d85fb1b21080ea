"""What state an optimizer keeps of a parameter, learned from a copy of the optimizer that makes one step on zeros."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.training.state.flattened import class_name, flattened, is_flattened, is_wrapped

__all__ = ["StateProbe"]

# Their state depends on a parameter's shape in one way: some tensors have it. A step on two zeros shows which.
LIKE_ANY_SHAPE = ("SGD", "Adam", "AdamW", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD", "FusedAdagrad")
PACKAGES = ("torch", "apex", "ampcompare")
SMALL = torch.Size([2])
SETTINGS = (bool, int, float, str)


class StateProbe:
    """The state that an optimizer keeps of each of its parameters. Make it before `Precision.prepare`.

    Args:
        optimizer: as `make_optimizer` returned it; other libraries may put it into one of their own later.

    Attributes:
        kinds: classes of tensors among the state that has been asked for, by the names that a checkpoint gives them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind: Any = type(optimizer)
        groups = optimizer.param_groups
        self._groups = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        # An optimizer may keep settings outside its groups, such as the size of the blocks that share a scale.
        self._settings = {name: value for name, value in vars(optimizer).items() if type(value) in SETTINGS}
        self._group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
        known = self._kind.__module__.partition(".")[0] in PACKAGES and self._kind.__name__ in LIKE_ANY_SHAPE
        self._probe_shape = SMALL if known else None
        # One of another package may have kernels for the device of its parameters alone.
        self._device = torch.device("cpu") if known else groups[0]["params"][0].device
        self._seen: dict[tuple[int, torch.Size, torch.dtype], dict[str, Any]] = {}
        self.kinds: dict[str, type] = {}

    def state_of(self, at: int, shape: torch.Size, dtype: torch.dtype) -> Mapping[str, Any]:
        """Return the state by name after a step on a parameter.

        Args:
            at: the place of the parameter among all.
            shape, dtype: those of the tensor that the optimizer holds.

        Returns:
            A meta tensor for each tensor; for a tensor subclass what `flattened` makes of it, with meta tensors; None
            for a plain number; a dictionary of these where the state dict of the optimizer has one.
        """
        probed = shape if self._probe_shape is None else self._probe_shape
        key = (self._group_of[at], probed, dtype)
        if key not in self._seen:
            self._seen[key] = self._step(*key)
        return {
            name: torch.empty(shape, dtype=kept.dtype, device="meta")
            if isinstance(kept, Tensor) and kept.shape == probed
            else kept
            for name, kept in self._seen[key].items()
        }

    def _step(self, group: int, shape: torch.Size, dtype: torch.dtype) -> dict[str, Any]:
        probe = nn.Parameter(torch.zeros(shape, dtype=dtype, device=self._device))
        probe.grad = torch.zeros_like(probe)
        settings = self._groups[group]
        copy = self._kind([{**settings, "params": [probe]}], lr=settings["lr"])
        vars(copy).update(self._settings)
        with _uncompiled():
            copy.step()
        state = copy.state_dict()["state"][0]
        self.kinds.update((class_name(type(value)), type(value)) for value in state.values() if is_wrapped(value))
        return {name: _on_meta(flattened(value)) for name, value in state.items() if value is not None}


def _on_meta(value: Any) -> Any:
    if is_flattened(value):
        return {**value, "tensors": _on_meta(value["tensors"])}
    if isinstance(value, dict):
        return {name: _on_meta(inner) for name, inner in value.items()}
    return value.to("meta") if isinstance(value, Tensor) else None


def _uncompiled() -> AbstractContextManager[Any]:
    """Let an optimizer that compiles its step make one without waiting for a compiler; torch before 2.6 compiles it."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if set_stance is None else set_stance("force_eager")
