"""Whose gradients are scaled, true or stepped, in a script whose losses are scaled on its behalf.

A scaled loss makes the gradients of all optimizers `SCALED`, those that were true too. From there:

| the script | gradients of an optimizer become |
|---|---|
| reads one of them | `UNSCALED` |
| steps | `STEPPED`, or `SKIPPED` after an overflow; before that the scaler unscales them |
| runs a backward pass where it has read gradients before and never stepped | `PLAIN`: by hand that loss has no scale |
| steps `PLAIN` ones | `SCALED`, and so on |

The scale moves right after the step of an only optimizer, and else with the next scaled loss, so that several share an
update; gradients that wait for their step follow it.
"""

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ampcompare.backends.apex_levels import apex_level
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ScalingError
from ampcompare.base.patches import GRADIENT_READS, Subscriptions
from ampcompare.base.tensors.lists import copy_by_dtype
from ampcompare.guards.location import call_site, here
from ampcompare.script.torch_amp.autocast_and_scaler import TorchAmpStandIn
from ampcompare.training.precision.base import owned_params

NORMS = {"clip_grad_norm_": 3, "get_total_norm": 2}  # and the place of their argument error_if_nonfinite


class ScriptOptimizers:
    """The optimizers of a script."""

    def __init__(self, names: TorchAmpStandIn) -> None:
        self._names = names
        self._made: list[weakref.ref[Any]] = []
        self._owners: dict[int, weakref.ref[Any]] = {}  # by the id of a parameter

    def add(self, optimizer: Any) -> None:
        """Know another one."""
        self._made.append(weakref.ref(optimizer))

    def live(self) -> list[Any]:
        """Return those that the script still has."""
        return [one for reference in self._made if (one := reference()) is not None]

    def weights(self, optimizer: Any) -> list[Tensor]:
        """Return what an optimizer steps, and the 16-bit weights of the model where those are masters."""
        return [*owned_params(optimizer), *(half for half, _ in self._names.masters(optimizer))]

    def owner(self, param: Tensor) -> Any:
        """Return the optimizer that has a parameter; None if there is none."""
        if not self._owners:
            for optimizer in self.live():
                self._owners.update({id(one): weakref.ref(optimizer) for one in self.weights(optimizer)})
        reference = self._owners.get(id(param))
        return None if reference is None else reference()

    def forget_owners(self) -> None:
        """Look for them again: an optimizer has got other weights."""
        self._owners.clear()


class _Stage(enum.Enum):
    """Of the gradients of an optimizer."""

    FOREIGN = "of no pass that was followed"
    SCALED = "of scaled losses"
    UNSCALED = "true, by the scaler"
    PLAIN = "true, of a loss that was not scaled"
    STEPPED = "true, and stepped"
    SKIPPED = "not stepped, since one overflowed"


class GradientStages:
    """Scales losses, unscales gradients at their first reader, and steps, by a GradScaler of its own.

    Attributes:
        is_open: gradients of a scaled loss have not been stepped.
        is_applied: the scaler has called the step of an optimizer, which the caller of `step` notes here.
    """

    def __init__(self, arm: Arm, names: TorchAmpStandIn, optimizers: ScriptOptimizers) -> None:
        self._arm = arm
        self._names = names
        self._optimizers = optimizers
        self._scaler: Any = None
        self._stages: weakref.WeakKeyDictionary[Any, _Stage] = weakref.WeakKeyDictionary()
        self.is_open = self.is_applied = False
        self._is_update_due = False  # an optimizer has stepped since the scale moved
        self._has_step: dict[tuple[int, ...], bool] = {}  # after a backward pass, by the place of its call
        self._new_places: list[tuple[int, ...]] = []  # of passes since the last step
        self._first_loss: Tensor | None = None  # at its place, to gradients that were clear; its graph can run again
        self._has_overflow = False  # in gradients that were read and cleared since the last step
        self._divided: dict[int, tuple[Any, int]] = {}  # gradients of other tensors that are true, by id

    def install(self, events: Subscriptions) -> None:
        """Follow readers of gradients."""
        if skips_overflows(self._arm):
            for owner in (nn.utils, nn.utils.clip_grad):
                for name in NORMS.keys() & vars(owner).keys():
                    events.wrap(owner, name, functools.partial(self._take_norm, NORMS[name]))
        events.at_end(self.close)

    def close(self) -> None:
        """Leave the gradients that there are to the script."""
        self.is_open = False
        GRADIENT_READS.want(self._read, False)

    def _stage(self, optimizer: Any) -> _Stage:
        return self._stages.get(optimizer, _Stage.SCALED if self.is_open else _Stage.FOREIGN)

    def _in_stage(self, stage: _Stage) -> list[Any]:
        return [one for one in self._optimizers.live() if self._stage(one) is stage]

    # The scaler.

    def _make_scaler(self) -> None:
        if self._scaler is None:
            params = [param for optimizer in self._optimizers.live() for param in owned_params(optimizer)]
            with self._names.on_behalf():
                self._scaler = torch.amp.GradScaler(params[0].device.type if params else "cpu")

    def scale(self) -> float:
        """Return the present loss scale."""
        return float(self._scaler.get_scale())

    @property
    def needs_scaler(self) -> bool:
        """Whether the losses of the script are scaled on its behalf."""
        return self._names.needs_scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler; empty under an arm that needs none."""
        if not self.needs_scaler:
            return {}
        self._make_scaler()
        if self._is_update_due:
            with GRADIENT_READS.pause():
                self._update()
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.needs_scaler:
            self._make_scaler()
            self._scaler.load_state_dict(dict(state))

    # Backward passes.

    def scale_pass(self, tensors: Any, loss: Tensor, options: dict[str, Any]) -> Any:
        """Return what a backward pass begins with, scaled; None if its gradients have no scale.

        Args:
            loss: of `tensors`, the first of several, or one whose gradient is that of `tensors` and `grad_tensors`.
            options: of the pass, which may change. Gradients with a graph are not scaled: the script computes with it.
        """
        has_graph = bool(options.get("create_graph"))
        place = call_site()
        self._first_loss = None
        begin = loss if isinstance(tensors, Tensor) else list(tensors)
        if has_graph or self._new_places or not self._has_step.get(place, False):
            is_clear = not self._have_numbers(self._optimizers.live())
            self._add_place(place, is_clear)
            if is_clear and (has_graph or not self._has_step.get(place, True)):
                self._leave_plain()
                return None
            if is_clear and place not in self._has_step and begin is loss and _can_run_twice(loss):
                self._first_loss, options["retain_graph"] = loss, True
        if begin is loss and loss is not tensors:
            options.pop("grad_tensors")
        return self._scale(begin)

    def _add_place(self, place: tuple[int, ...], is_clear: bool) -> None:
        """Add the place of a pass. Gradients that were cleared before it mean that none of the others was stepped."""
        if is_clear:
            unscaled = self._in_stage(_Stage.UNSCALED)
            if self._new_places and unscaled:
                self._scaler.update(self._scaler.get_scale())  # which ends the update, and leaves the scale
                self._stages.update(dict.fromkeys(unscaled, _Stage.PLAIN))
            self._has_step |= {one: False for one in self._new_places if one not in self._has_step}
            self._new_places.clear()
        self._new_places.append(place)

    def _leave_plain(self) -> None:
        """Let the next pass make true gradients."""
        with GRADIENT_READS.pause():
            if self._is_update_due or self._in_stage(_Stage.UNSCALED):
                self._update()
        for optimizer in self._optimizers.live():
            self._names.take_back(optimizer)
            self._stages[optimizer] = _Stage.PLAIN
        self.close()

    def _scale(self, losses: Any) -> Any:
        """Return scaled losses; the gradients that are there become scaled ones."""
        self._make_scaler()
        with GRADIENT_READS.pause():
            unscaled = self._in_stage(_Stage.UNSCALED)
            if self._is_update_due:
                self._update()
            elif unscaled and not self._have_numbers(unscaled):
                before = self.scale()
                self._update()
                self._has_overflow |= self.scale() < before
            for optimizer in self._optimizers.live():
                self._scale_again(optimizer)
                self._stages[optimizer] = _Stage.SCALED
            result = self._scaler.scale(losses)
        self.is_open = True
        self._optimizers.forget_owners()  # master weights may have been made
        self._divided.clear()
        GRADIENT_READS.want(self._read, True)
        return result

    def _scale_again(self, optimizer: Any) -> None:
        """Scale true gradients, to which those of a scaled loss are about to be added."""
        stage = self._stage(optimizer)
        if stage in (_Stage.FOREIGN, _Stage.SCALED):
            return
        self._names.take_back(optimizer)
        if stage is _Stage.UNSCALED:
            self._names.forget_unscaled(self._scaler, optimizer)
        if self.has_gradients(optimizer):
            self._multiply(optimizer, self.scale())

    def _update(self) -> None:
        """Move the loss scale; gradients that wait for a step follow it."""
        waiting = [one for one in self._in_stage(_Stage.SCALED) if self.has_gradients(one)]
        before = self.scale() if waiting else 1.0
        self._scaler.update()
        ratio = self.scale() / before if waiting else 1.0
        if ratio != 1.0:
            for optimizer in waiting:
                self._multiply(optimizer, ratio)
        self._is_update_due = False
        self._stages.update(dict.fromkeys(self._in_stage(_Stage.UNSCALED), _Stage.PLAIN))

    def _multiply(self, optimizer: Any, factor: float) -> None:
        # A weight and its master may show the same one.
        weights = self._optimizers.weights(optimizer)
        held = {id(grad): (param, grad) for param in weights if (grad := param.grad) is not None}
        grads = [grad.detach() for _, grad in held.values()]
        scaled = torch._foreach_mul([grad.float() for grad in grads], factor)  # fp16 has no 65536
        for number, (param, grad) in enumerate(held.values()):
            if grad.requires_grad:  # the script computes with it
                param.grad = grads[number] = torch.empty_like(grads[number])
        copy_by_dtype(grads, scaled)

    def _grads(self, optimizer: Any) -> list[Tensor]:
        with GRADIENT_READS.pause():
            return [grad for param in self._optimizers.weights(optimizer) if (grad := param.grad) is not None]

    def has_gradients(self, optimizer: Any) -> bool:
        """Return whether an optimizer has gradients, which may be zeros."""
        return bool(self._grads(optimizer))

    def _have_numbers(self, optimizers: Iterable[Any]) -> bool:
        """Return whether any gradient of optimizers is not all zeros."""
        return _any(grad.any() for optimizer in optimizers for grad in self._grads(optimizer))

    # Readers of gradients.

    def _read(self, tensor: Tensor) -> None:
        if not self.is_open:
            return
        optimizer = self._optimizers.owner(tensor)
        if optimizer is None:
            self._divide(tensor)
        elif self._stage(optimizer) is _Stage.SCALED and self.has_gradients(optimizer):
            with GRADIENT_READS.pause():
                self._scaler.unscale_(optimizer)
                self._compute_again(self._optimizers.weights(optimizer))
            self._stages[optimizer] = _Stage.UNSCALED

    def _divide(self, tensor: Tensor) -> None:
        """Divide the gradient of a tensor that no optimizer has, such as an input or a feature map, once."""
        with GRADIENT_READS.pause():
            grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
            if grad is None:
                return
            known = self._divided.get(id(tensor))
            if known is None or known[0] is not grad or known[1] != grad._version:
                with torch.no_grad():
                    grad.mul_(1.0 / self.scale())
                self._divided[id(tensor)] = grad, grad._version

    def _compute_again(self, tensors: list[Tensor]) -> None:
        """Compute gradients that overflowed by the scale without it: nothing may skip what is done with them."""
        if self._first_loss is None or not _any(
            ~grad.isfinite().all() for one in tensors if (grad := one.grad) is not None
        ):
            return
        with contextlib.suppress(RuntimeError):  # of reentrant checkpoints
            true = torch.autograd.grad(self._first_loss, tensors, retain_graph=True, allow_unused=True)
            for tensor, grad in zip(tensors, true, strict=True):
                if grad is not None and tensor.grad is not None:
                    tensor.grad.copy_(grad)

    def _take_norm(self, place: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a norm that may be infinite where an overflow is about to skip the step."""
        if not self.is_open:
            return original(*args, **kwargs)
        if len(args) > place:
            return original(*args[:place], False, *args[place + 1 :], **kwargs)
        return original(*args, **{**kwargs, "error_if_nonfinite": False})

    # The step.

    def step(self, optimizer: Any, options: Mapping[str, Any]) -> bool:
        """Let the scaler step an optimizer or skip that; False if its gradients are for a step as it is written."""
        self._has_step |= dict.fromkeys(self._new_places, True)
        self._new_places.clear()
        self._first_loss = None
        if not self.has_gradients(optimizer):
            return False
        if self._stage(optimizer) is _Stage.PLAIN:
            self._scale(torch.zeros(()))
        stage = self._stage(optimizer)
        if stage in (_Stage.FOREIGN, _Stage.STEPPED):
            # Again by the same gradients: under `half` only a step of the scaler moves masters on.
            if self._names.steps_copies and (stage is _Stage.FOREIGN or self._arm.backend == "half"):
                raise ScalingError(
                    here(
                        f"the script sets gradients itself, as with torch.autograd.grad, and {self._arm} steps fp32 "
                        "copies of the weights, which lack them; compare native:bf16 or apex:O1"
                    )
                )
            return False
        if stage is not _Stage.SKIPPED:
            self.is_applied = False
            with GRADIENT_READS.pause():
                if self._has_overflow:
                    self._mark_overflow(optimizer)
                self._scaler.step(optimizer, **options)
            self._stages[optimizer] = _Stage.STEPPED if self.is_applied else _Stage.SKIPPED
            self._is_update_due = True
            if len(self._optimizers.live()) == 1:
                self.close()
                with GRADIENT_READS.pause():
                    self._update()
        optimizer._opt_called = True  # a skipped step was called too: schedulers warn otherwise
        return True

    def _mark_overflow(self, optimizer: Any) -> None:
        """Let a step be skipped if the script has made its gradients of ones that overflowed, and cleared those."""
        self._has_overflow = False
        if _any(~grad.isfinite().all() for grad in self._grads(optimizer)):
            for flag in self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.fill_(1.0)


def skips_overflows(arm: Arm) -> bool:
    """Return whether an overflow may skip a step."""
    scale = apex_level(arm.options).loss_scale if arm.backend == "apex" else arm.options.get("loss_scale")
    return arm.backend == "native" or scale == "dynamic"


def _any(flags: Iterable[Tensor]) -> bool:
    """Return whether one of these scalars is true; waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        by_device.setdefault(flag.device, []).append(flag)
    return any(bool(torch.stack(some).any()) for some in by_device.values())


def _can_run_twice(loss: Tensor) -> bool:
    """Return whether the graph of a loss can be kept for a second pass: compiled ones give up their buffers."""
    if distributed.is_available() and distributed.is_initialized():  # whose gradients hooks reduce
        return False
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return not any(type(node).__name__.startswith("CompiledFunction") for node in seen)
