"""Let the step of a stock optimizer obey an overflow flag on the device, so that the host need not wait for it.

torch's fused kernels take `optimizer.found_inf` and change nothing if it is set. `make_step_skippable` gives `SGD`,
`Adam` and `AdamW` in any other implementation the same behavior, with the bits of a step that is skipped on the host:

1. Weights and moments are copied, on the device.
2. The optimizer's own step runs, as if nothing had overflowed.
3. One kernel for each list of tensors writes the copies back if the flag is set, and returns at once if it is not.

What such a step changes on the host, Adam's step counts and states that it creates, is undone when the host learns
that the flag was set. The flag is copied into pinned memory without waiting, and read before the next step. By then the
device has computed it, unless it is behind by a whole forward and backward pass: then the host waits, and the device
has work meanwhile.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ampcompare.base.tensors.lists import group_tensors_by_type, is_dense

TYPES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
ATTRIBUTE = "_ampcompare_skippable_step"


def make_step_skippable(optimizer: Optimizer) -> None:
    """Make `optimizer.step` leave weights and state as they are if `optimizer.found_inf` is set when it is called.

    The flag is an fp32 scalar on the device of the parameters, 0 or positive; `GradScaler` sets it, and `grad_scale`,
    as it does for fused optimizers. Without a flag `step` is what it was. With step hooks or a closure the flag is read
    on the host, since a skipped step runs neither. After a skipped step `optimizer.state` shows what that step would
    have counted and created until the next `step`, `state_dict`, `load_state_dict` or `undo_skipped_step_on_host`.

    Raises:
        TypeError: an optimizer of another class, or a differentiable one.
    """
    if is_step_skippable(optimizer):
        return
    if type(optimizer) not in TYPES or any(group.get("differentiable") for group in optimizer.param_groups):
        names = ", ".join(kind.__name__ for kind in TYPES)
        name = type(optimizer).__name__
        raise TypeError(f"cannot skip a step of {name} on the device: only {names}, not differentiable")
    skippable = _SkippableStep(optimizer.step)
    setattr(optimizer, ATTRIBUTE, skippable)

    def step_unless_flag(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        return skippable.step(self, closure)

    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        step_unless_flag._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step_unless_flag, optimizer)  # type: ignore[method-assign]
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # GradScaler's word for it
    optimizer.register_state_dict_pre_hook(undo_skipped_step_on_host)
    optimizer.register_load_state_dict_pre_hook(lambda self, _state: undo_skipped_step_on_host(self))


def is_step_skippable(optimizer: Optimizer) -> bool:
    """Return whether `make_step_skippable` has prepared `optimizer`."""
    return hasattr(optimizer, ATTRIBUTE)


def undo_skipped_step_on_host(optimizer: Optimizer) -> None:
    """Undo on the host what a skipped step has changed there; may wait for the device."""
    skippable: _SkippableStep | None = getattr(optimizer, ATTRIBUTE, None)
    if skippable is not None:
        skippable.undo_on_host_if_skipped(optimizer)


class FlagCopyToHost:
    """A device scalar that travels to the host while both go on working."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: Any = None

    def send(self, scalar: Tensor) -> None:
        """Start to copy an fp32 scalar to the host, after the work that the device has been given so far."""
        if scalar.device.type != "cuda":
            self._host = scalar.clone()
            return
        if self._event is None:
            self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._event = torch.cuda.Event()
        assert self._host is not None, "made with the event"
        self._host.copy_(scalar, non_blocking=True)
        self._event.record()

    def receive(self) -> bool:
        """Return whether the scalar sent last is not 0; waits only if the device has not computed it yet."""
        assert self._host is not None, "something was sent"
        if self._event is not None:
            self._event.synchronize()
        return bool(self._host.item())


class _HostChangesOfStep:
    """What a step changes on the host, and how it was: step counts, and the states of parameters that had none."""

    def __init__(self) -> None:
        self.counts: list[Tensor] = []
        self.values: Tensor | None = None
        self.states: list[tuple[Tensor, dict[str, Any] | None]] = []

    def undo(self, optimizer: Optimizer) -> None:
        """Set counts and states as they were before the step."""
        if self.values is not None:
            for count, value in zip(self.counts, self.values, strict=True):
                count.copy_(value)
        for param, state in self.states:
            if state is None:
                optimizer.state.pop(param, None)
            else:
                optimizer.state[param] = state

    def __bool__(self) -> bool:
        return bool(self.counts or self.states)


class _SkippableStep:
    """The step of one optimizer, and the flag of its last step as long as the host has not read it."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner
        self._flag = FlagCopyToHost()
        self._unsettled: _HostChangesOfStep | None = None

    def undo_on_host_if_skipped(self, optimizer: Optimizer) -> None:
        """Undo the changes of the last step on the host, if its flag was set."""
        changes, self._unsettled = self._unsettled, None
        if changes is not None and self._flag.receive():
            changes.undo(optimizer)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """Step, unless the flag of the optimizer is set."""
        self.undo_on_host_if_skipped(optimizer)
        flag: Tensor | None = getattr(optimizer, "found_inf", None)
        if flag is None:
            return self._inner() if closure is None else self._inner(closure)
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if (
            closure is not None
            or hooks
            or has_changing_global_step_hooks()
            or _is_fused_with_dampening(optimizer)
        ):
            return self._step_by_host(optimizer, flag, closure)
        if all(group["fused"] for group in optimizer.param_groups):
            _create_momentum(optimizer)  # the kernel obeys the flag
            return self._inner()
        given_scale = getattr(optimizer, "grad_scale", None)
        if given_scale is not None:
            _unscale_gradients(optimizer, given_scale)
        # The kernels of other implementations refuse these attributes, and the caller deletes them afterwards.
        optimizer.found_inf = optimizer.grad_scale = None
        try:
            with torch.no_grad():
                self._step_and_undo_if_flagged(optimizer, flag)
        finally:
            optimizer.found_inf, optimizer.grad_scale = flag, given_scale
        return None

    def _step_and_undo_if_flagged(self, optimizer: Any, flag: Tensor) -> None:
        changes, tensors = _host_changes_and_device_tensors_of_next_step(optimizer)
        changes.values = torch.stack(changes.counts) if changes.counts else None
        copies = _copy_tensors(tensors)
        if changes:
            self._flag.send(flag)  # before the step, so that it arrives as early as it can
        self._inner()
        _restore_copies_if_flagged(copies, flag)
        changes.states = [entry for entry in changes.states if _has_tensors(optimizer.state.get(entry[0]))]
        self._unsettled = changes if changes else None

    def _step_by_host(self, optimizer: Any, flag: Tensor, closure: Callable[[], Any] | None) -> Any:
        scale = getattr(optimizer, "grad_scale", None)
        if flag.item():
            return None
        if scale is not None:
            _unscale_gradients(optimizer, scale)
        del optimizer.found_inf
        optimizer.grad_scale = None
        try:
            return self._inner() if closure is None else self._inner(closure)
        finally:
            optimizer.found_inf, optimizer.grad_scale = flag, scale


def has_changing_global_step_hooks() -> bool:
    """Return whether anything is called around the steps of every optimizer, unless it has `only_looks`."""
    hooks = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    return not all(getattr(hook, "only_looks", False) for hook in hooks)


def _is_fused_with_dampening(optimizer: Any) -> bool:
    """Return whether `_create_momentum` would not give the first step of SGD its bits."""
    return any(
        group["fused"] and group.get("momentum") and group["dampening"] for group in optimizer.param_groups
    )


def _has_tensors(state: Mapping[str, Any] | None) -> bool:
    return bool(state) and any(isinstance(value, Tensor) for value in state.values())  # type: ignore[union-attr]


def _host_changes_and_device_tensors_of_next_step(optimizer: Any) -> tuple[_HostChangesOfStep, list[Tensor]]:
    """Return what the next step changes: on the host, and the tensors that exist on the device."""
    changes, tensors = _HostChangesOfStep(), []
    for group in optimizer.param_groups:
        counts_on_host = not group.get("capturable")
        creates_states = group.get("momentum") != 0  # SGD without momentum has none
        for param in group["params"]:
            if param.grad is None:
                continue
            tensors.append(param)
            state = optimizer.state.get(param)
            if not _has_tensors(state):
                if creates_states:
                    changes.states.append((param, None if state is None else dict(state)))
                continue
            for name, value in state.items():
                if name == "step" and counts_on_host and value.device.type == "cpu":
                    changes.counts.append(value)
                elif isinstance(value, Tensor):
                    tensors.append(value)
    return changes, tensors


Copies = list[tuple[list[Tensor], list[Tensor]]]
"""Lists of copies with the tensors that they were made from; those of one list share dtype and device."""


def _copy_tensors(tensors: Sequence[Tensor]) -> Copies:
    copies = []
    for alike in group_tensors_by_type(tensor.detach() for tensor in tensors):
        made = [torch.empty_like(tensor) for tensor in alike]
        torch._foreach_copy_(made, alike)
        copies.append((made, alike))
    return copies


def _restore_copies_if_flagged(copies: Copies, flag: Tensor) -> None:
    """Write the copies into their tensors where `flag` is set; the copies may be lost."""
    for made, tensors in copies:
        local = flag.to(tensors[0].device, non_blocking=True)
        keep = torch.eq(local, 0, out=torch.empty_like(local, dtype=torch.float32))
        listed = [
            index for index, tensor in enumerate(tensors) if tensor.is_floating_point() and is_dense(tensor)
        ]
        if listed:
            old, new = [made[index] for index in listed], [tensors[index] for index in listed]
            # SGD's fused kernel, on its first step, sets the momentum to the gradient, unless the flag that it takes is
            # set. The copies serve as weights too: with a rate of 0 it writes them where it has just read them.
            torch._fused_sgd_(
                old,
                old,
                new,
                weight_decay=0.0,
                momentum=1.0,
                lr=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=True,
                found_inf=keep,
            )
        for index in set(range(len(tensors))).difference(listed):
            tensors[index].copy_(torch.where(local != 0, made[index], tensors[index]))


def _create_momentum(optimizer: Any) -> None:
    """Create the momentum buffers that SGD's first fused step would leave unset where it is skipped.

    `-0.0` times anything plus the gradient is the gradient, down to the sign of a zero.
    """
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for param in group["params"]:
            if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                optimizer.state[param]["momentum_buffer"] = torch.full_like(
                    param, -0.0, memory_format=torch.preserve_format, requires_grad=False
                )


def _unscale_gradients(optimizer: Any, scale: Tensor) -> None:
    """Divide the gradients by a loss scale, with the roundings of `GradScaler.unscale_`."""
    inverse = scale.double().reciprocal().float()
    params = (param for group in optimizer.param_groups for param in group["params"])
    every = [param.grad for param in params if param.grad is not None]
    with torch.no_grad():
        for grads in group_tensors_by_type(grad._values() if grad.is_sparse else grad for grad in every):
            local = inverse.to(grads[0].device, non_blocking=True)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros_like(local), local)
