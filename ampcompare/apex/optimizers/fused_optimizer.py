"""What all fused optimizers share: clearing gradients, choosing parameters, restoring state, and the strict switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.apex import is_strict_by_environment


class GradientScaling:
    """The scale that gradients carry into a step, and whether they overflowed; both stay on the device."""

    def __init__(self, scale: Tensor | None, found_inf: Tensor | None) -> None:
        self.scale = scale
        self.found_inf = found_inf

    @classmethod
    def of_step(cls, optimizer: Optimizer, grad_scaler: Any, device: torch.device) -> GradientScaling:
        """Read it from a `GradScaler` handed to `step`, or from what `GradScaler.step` leaves on the optimizer."""
        if grad_scaler is not None:
            scale = grad_scaler._get_scale_async()
            found_inf = grad_scaler._check_inf_per_device(optimizer)[device]
        else:
            scale = getattr(optimizer, "grad_scale", None)
            found_inf = getattr(optimizer, "found_inf", None)
        if scale is not None:
            scale = scale.to(device=device, dtype=torch.float32).reshape(())
        if found_inf is not None:
            # Summed over devices it may exceed 1, and the kernels compare with 1.
            found_inf = (found_inf != 0).to(device=device, dtype=torch.float32).reshape(())
        return cls(scale, found_inf)


class FusedOptimizer(Optimizer):
    """Base of the fused optimizers.

    Attributes:
        supported: dtypes of parameters that `step` accepts.
        exact_state: per-parameter state that `load_state_dict` restores in its own dtype instead of the parameter's.
    """

    supported: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.float32)
    exact_state: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Any, defaults: dict[str, Any], *, set_grad_none: bool) -> None:
        self.set_grad_none = set_grad_none
        self._strict = is_strict_by_environment()
        self._settings = tuple(vars(self))  # with those of the class, which it sets before it calls this
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return all that a copy or a pickle needs: torch's three entries and the settings kept as attributes."""
        settings = {name: getattr(self, name) for name in ("_settings", *self._settings)}
        return {**super().__getstate__(), **settings}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; to None unless `set_to_none` is False.

        Apex's method takes no argument. Its `set_grad_none=False` calls torch's method, which has set None as well
        since torch 2, so gradients are kept as zeros only on `set_to_none=False`.
        """
        super().zero_grad(set_to_none=True if set_to_none is None else set_to_none)

    @cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """Int32 flag of one element for operations of `amp_C` that scripts call themselves; no step reads it."""
        devices = (param.device for group in self.param_groups for param in group["params"])
        return torch.zeros(1, dtype=torch.int32, device=next(devices, torch.device("cpu")))

    @staticmethod
    def _call_closure(closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _params_with_gradient(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that have a gradient.

        Raises:
            RuntimeError: a sparse gradient, a dtype outside `supported`, or parameters on several devices.
        """
        chosen = [param for param in params if param.grad is not None]
        name = type(self).__name__
        for param in chosen:
            if param.grad is not None and param.grad.is_sparse:
                raise RuntimeError(
                    f"{name} got a sparse gradient; use dense gradients, or torch.optim.SparseAdam"
                )
            if param.dtype not in self.supported:
                names = ", ".join(str(dtype) for dtype in self.supported)
                raise RuntimeError(f"{name} got a parameter of {param.dtype}; it steps {names} only")
        devices = {param.device for param in chosen}
        if len(devices) > 1:
            device_names = ", ".join(sorted(str(device) for device in devices))
            raise RuntimeError(
                f"{name} got a group with parameters on {device_names}; give each device its own group"
            )
        return chosen

    @staticmethod
    def _gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
        return [param.grad.data for param in params if param.grad is not None]

    @staticmethod
    def _data_of(params: Iterable[Tensor]) -> list[Tensor]:
        # `.data` leaves autograd's version counters alone, as Apex's kernels do: scripts that back-propagate through a
        # graph after a step run there, and must run here.
        return [param.data for param in params]

    def _state_tensors(
        self, params: Iterable[Tensor], name: str, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return the state tensor of each parameter; a missing one is made of zeros, of `dtype` or the parameter's."""
        tensors = []
        for param in params:
            state = self.state[param]
            if name not in state:
                state[name] = torch.zeros_like(param.data, dtype=dtype)
            tensors.append(state[name])
        return tensors

    @staticmethod
    def _count_group_step(group: dict[str, Any]) -> int:
        step: int = group.get("step", 0) + 1
        group["step"] = step
        return step

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state; tensors in `exact_state` keep their saved dtype (strict switch: the dtype that Apex gives)."""
        super().load_state_dict(dict(state_dict))
        for group in self.param_groups:
            self._move_group_to_parameter_device(group)
        if self._strict or not self.exact_state:
            return
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id, {})
            for name in self.exact_state:
                if name in saved:
                    self.state[param][name] = saved[name].to(device=param.device)

    @staticmethod
    def _move_group_to_parameter_device(group: dict[str, Any]) -> None:
        """Move rate and step count, where they are tensors, to the device of the parameters."""
        for name in ("lr", "step") if group["params"] else ():
            if isinstance(group.get(name), Tensor):
                group[name] = group[name].to(device=group["params"][0].device)
