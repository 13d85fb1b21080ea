"""Whose gradients are scaled, true or stepped, in a script whose losses are scaled on its behalf.

A scaled loss makes the gradients of all optimizers `SCALED`, those that were true too. From there:

| the script | gradients of an optimizer become |
|---|---|
| reads one of them | `UNSCALED` |
| steps | `STEPPED`, or `SKIPPED` after an overflow; before that the scaler unscales them |
| computes with the graph of a backward pass | `PLAIN`: that loss has no scale |
| steps `PLAIN` ones | `SCALED`, and so on |

Where a script reads gradients and clears them without a step, as for Fisher information, nothing can skip what it does
with them. Those that overflow by the scale are computed again without it, as long as a graph can run twice; where it
cannot, a loss whose gradients were never stepped has no scale.

A step that evaluates losses by itself, in a closure or a method, runs as it is written: each of its backward passes is
scaled, and unscaled where the step reads gradients. One that overflows ends the step, which has then changed nothing.

The scale moves right after the step of an only optimizer, and else with the next scaled loss, so that several share an
update; gradients that wait for their step follow it.
"""

import contextlib
import enum
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from ampcompare.backends.arm import Arm
from ampcompare.base.environment.ranks import rank_in_process_group
from ampcompare.base.errors import ScalingError
from ampcompare.base.location import call_site_key, message_with_script_line
from ampcompare.base.patches import GRADIENT_READS, Subscriptions
from ampcompare.base.tensors.lists import copy_tensors_by_dtype
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn
from ampcompare.script.torch_amp.undoable_step import StepSnapshot
from ampcompare.training.precision.base import owned_params

NORMS = {"clip_grad_norm_": 3, "get_total_norm": 2}  # and the place of their argument error_if_nonfinite


class ScriptOptimizers:
    """The optimizers of a script."""

    def __init__(self, stand_in: TorchAmpStandIn) -> None:
        self._stand_in = stand_in
        self._made: list[weakref.ref[Any]] = []
        self._owners: dict[int, weakref.ref[Any]] = {}  # by the id of a parameter

    def add(self, optimizer: Any) -> None:
        """Know another one."""
        self._made.append(weakref.ref(optimizer))

    def living_optimizers(self) -> list[Any]:
        """Return those that the script still has."""
        return [one for reference in self._made if (one := reference()) is not None]

    def masters_and_weights_of(self, optimizer: Any) -> list[Tensor]:
        """Return what an optimizer steps, and the 16-bit weights of the model where those are masters."""
        return [*owned_params(optimizer), *(half for half, _ in self._stand_in.masters(optimizer))]

    def find_owner_of(self, param: Tensor) -> Any:
        """Return the optimizer that has a parameter; None if there is none."""
        if not self._owners:
            for optimizer in self.living_optimizers():
                self._owners.update(
                    {id(one): weakref.ref(optimizer) for one in self.masters_and_weights_of(optimizer)}
                )
        reference = self._owners.get(id(param))
        return None if reference is None else reference()

    def optimizers_inside_of(self, optimizer: Any) -> list[Any]:
        """Return the other optimizers all of whose weights this one has, such as one that it calls."""
        own = {id(param) for param in owned_params(optimizer)}
        others = [one for one in self.living_optimizers() if one is not optimizer]
        return [one for one in others if own.issuperset(map(id, owned_params(one)))]

    def forget_owners_of_weights(self) -> None:
        """Look for them again: an optimizer has got other weights."""
        self._owners.clear()


class _GradientStage(enum.Enum):
    """Of the gradients of an optimizer."""

    FOREIGN = "of no pass that was followed"
    SCALED = "of scaled losses"
    UNSCALED = "true, by the scaler"
    PLAIN = "true, of a loss that was not scaled"
    STEPPED = "true, and stepped"
    SKIPPED = "not stepped, since one overflowed"


class OverflowInStep(BaseException):  # no `except Exception` of a script or an optimizer is to take it
    """Ends a step that evaluates losses by itself, one of whose gradients has overflowed."""


class ScriptLossScaling:
    """Scales losses, unscales gradients at their first reader, and steps, by a GradScaler of its own.

    Attributes:
        is_open: gradients of a scaled loss have not been stepped.
        is_applied: the scaler has called the step of an optimizer, which the caller of `step` notes here.
    """

    def __init__(self, arm: Arm, stand_in: TorchAmpStandIn, optimizers: ScriptOptimizers) -> None:
        self._arm = arm
        self._skips_overflows = arm.skips_overflows
        self._stand_in = stand_in
        self._optimizers = optimizers
        self._scaler: Any = None
        self._stages: weakref.WeakKeyDictionary[Any, _GradientStage] = weakref.WeakKeyDictionary()
        self.is_open = self.is_applied = False
        self._is_update_due = False  # an optimizer has stepped since the scale moved
        self._has_step: dict[tuple[int, ...], bool] = {}  # after a backward pass, by the place of its call
        self._new_places: list[tuple[int, ...]] = []  # of passes since the last step
        # at its place, to gradients that were clear; its graph can run again
        self._first_loss: Tensor | None = None
        self._has_overflow = False  # in gradients that were read and cleared since the last step
        self._in_step: Any = None  # the optimizer whose step evaluates losses by itself at present
        self._run_inside: Callable[[], None] | None = None
        self._divided: dict[int, tuple[Any, int]] = {}  # gradients of other tensors that are true, by id

    def install(self, events: Subscriptions) -> None:
        """Let functions of torch that clip a norm take one of an overflow, where the step is about to be skipped."""
        if self._skips_overflows:
            for owner in (nn.utils, nn.utils.clip_grad):
                for name in NORMS.keys() & vars(owner).keys():
                    events.wrap(
                        owner, name, functools.partial(self._let_norm_of_overflow_be_infinite, NORMS[name])
                    )
        events.call_at_end(self.close)

    def close(self) -> None:
        """Leave the gradients that there are to the script."""
        self.is_open = False
        GRADIENT_READS.call_before_reads(self._prepare_gradient_for_reader, False)

    def _stage_of_optimizer(self, optimizer: Any) -> _GradientStage:
        return self._stages.get(optimizer, _GradientStage.SCALED if self.is_open else _GradientStage.FOREIGN)

    def _optimizers_in_stage(self, stage: _GradientStage) -> list[Any]:
        return [one for one in self._optimizers.living_optimizers() if self._stage_of_optimizer(one) is stage]

    # The scaler.

    def _make_own_scaler(self) -> None:
        if self._scaler is None:
            params = [
                param
                for optimizer in self._optimizers.living_optimizers()
                for param in owned_params(optimizer)
            ]
            with self._stand_in.script.making_amp_objects_for_script():
                self._scaler = torch.amp.GradScaler(params[0].device.type if params else "cpu")

    def current_scale(self) -> float:
        """Return the present loss scale."""
        return float(self._scaler.get_scale())

    @property
    def needs_scaler(self) -> bool:
        """Whether the losses of the script are scaled on its behalf."""
        return self._stand_in.needs_scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler; empty under an arm that needs none."""
        if not self.needs_scaler:
            return {}
        self._make_own_scaler()
        if self._is_update_due:
            with GRADIENT_READS.pause_notices_of_reads():
                self._update_loss_scale()
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.needs_scaler:
            self._make_own_scaler()
            self._scaler.load_state_dict(dict(state))

    # Backward passes.

    def scale_losses_of_pass(self, tensors: Any, loss: Tensor, options: dict[str, Any]) -> Any:
        """Return what a backward pass begins with, scaled; None if its gradients have no scale.

        Args:
            loss: of `tensors`, the first of several, or one whose gradient is that of `tensors` and `grad_tensors`.
            options: of the pass, which may change. Gradients with a graph are not scaled: the script computes with it.
        """
        has_graph = bool(options.get("create_graph"))
        self._stand_in.script.has_gradient_graph |= has_graph
        place = call_site_key()
        self._first_loss = None
        begin = loss if isinstance(tensors, Tensor) else list(tensors)
        if self._in_step is not None:
            if has_graph and not self._has_nonzero_gradient(self._optimizers.living_optimizers()):
                self._leave_next_pass_unscaled()
                return None
        elif has_graph or self._new_places or not self._has_step.get(place, False):
            is_clear = not self._has_nonzero_gradient(self._optimizers.living_optimizers())
            self._note_backward_location(place, is_clear)
            can_repeat = is_clear and not has_graph and not self._has_step.get(place, False)
            can_repeat = can_repeat and begin is loss and _can_run_backward_twice(loss)
            if is_clear and not can_repeat and (has_graph or not self._has_step.get(place, True)):
                self._leave_next_pass_unscaled()
                return None
            if can_repeat:
                self._first_loss, options["retain_graph"] = loss, True
        if begin is loss and loss is not tensors:
            options.pop("grad_tensors")
        return self._scale_losses(begin)

    def _note_backward_location(self, place: tuple[int, ...], is_clear: bool) -> None:
        """Add the place of a pass. Gradients that were cleared before it mean that none of the others was stepped."""
        if is_clear:
            unscaled = self._optimizers_in_stage(_GradientStage.UNSCALED)
            if self._new_places and unscaled:
                self._scaler.update(self._scaler.get_scale())  # which ends the update, and leaves the scale
                self._stages.update(dict.fromkeys(unscaled, _GradientStage.PLAIN))
            self._has_step |= {one: False for one in self._new_places if one not in self._has_step}
            self._new_places.clear()
        self._new_places.append(place)

    def _leave_next_pass_unscaled(self) -> None:
        """Let the next pass make true gradients."""
        with GRADIENT_READS.pause_notices_of_reads():
            if self._in_step is None and (
                self._is_update_due or self._optimizers_in_stage(_GradientStage.UNSCALED)
            ):
                self._update_loss_scale()
        for optimizer in self._optimizers.living_optimizers():
            self._stand_in.restore_model_gradients(optimizer)
            if self._in_step is not None and self._stage_of_optimizer(optimizer) is _GradientStage.UNSCALED:
                self._stand_in.forget_unscaled_gradients(self._scaler, optimizer)
            self._stages[optimizer] = _GradientStage.PLAIN
        self.close()

    def _scale_losses(self, losses: Any) -> Any:
        """Return scaled losses; the gradients that are there become scaled ones."""
        self._make_own_scaler()
        with GRADIENT_READS.pause_notices_of_reads():
            unscaled = self._optimizers_in_stage(_GradientStage.UNSCALED)
            if self._in_step is not None:
                pass  # the scale moves once, after the step
            elif self._is_update_due:
                self._update_loss_scale()
            elif unscaled and not self._has_nonzero_gradient(unscaled):
                before = self.current_scale()
                self._update_loss_scale()
                self._has_overflow |= self.current_scale() < before
            scaled: set[int] = set()
            for optimizer in self._optimizers.living_optimizers():
                self._scale_true_gradients_again(optimizer, scaled)
            self._stages.update(dict.fromkeys(self._optimizers.living_optimizers(), _GradientStage.SCALED))
            result = self._scaler.scale(losses)
        self.is_open = True
        self._optimizers.forget_owners_of_weights()  # master weights may have been made
        self._divided.clear()
        GRADIENT_READS.call_before_reads(self._prepare_gradient_for_reader, True)
        return result

    def _scale_true_gradients_again(self, optimizer: Any, done: set[int]) -> None:
        """Scale true gradients, to which those of a scaled loss are about to be added.

        Args:
            done: ids of those of other optimizers with the same weights; gets these.
        """
        stage = self._stage_of_optimizer(optimizer)
        if stage in (_GradientStage.FOREIGN, _GradientStage.SCALED):
            return
        self._stand_in.restore_model_gradients(optimizer)
        if stage is _GradientStage.UNSCALED:
            self._stand_in.forget_unscaled_gradients(self._scaler, optimizer)
        if self.has_gradients(optimizer):
            self._multiply_gradients(optimizer, self.current_scale(), but=done)
            done |= set(map(id, self._gradients_of(optimizer)))

    def _ids_of_already_true_gradients(self, optimizer: Any) -> set[int]:
        """Return the ids of gradients that are true since another optimizer with the same weights was asked for them.

        A fused step that unscales by itself leaves them as they are.
        """
        true = (_GradientStage.UNSCALED, _GradientStage.PLAIN, _GradientStage.STEPPED, _GradientStage.SKIPPED)
        found: set[int] = set()
        for other in self._optimizers.living_optimizers():
            stage = self._stage_of_optimizer(other)
            unscales_itself = stage is _GradientStage.STEPPED and getattr(
                other, "_step_supports_amp_scaling", False
            )
            if other is not optimizer and stage in true and not unscales_itself:
                found.update(map(id, self._gradients_of(other)))
        return found

    def _unscale_gradients(self, optimizer: Any) -> None:
        """Divide the gradients of an optimizer by the scale, those that are true already too, which it multiplies."""
        if (true := self._ids_of_already_true_gradients(optimizer)) and not true.isdisjoint(
            map(id, self._gradients_of(optimizer))
        ):
            self._multiply_gradients(optimizer, self.current_scale(), only=true)
        self._scaler.unscale_(optimizer)

    def _update_loss_scale(self) -> None:
        """Move the loss scale; gradients that wait for a step follow it."""
        waiting = [one for one in self._optimizers_in_stage(_GradientStage.SCALED) if self.has_gradients(one)]
        before = self.current_scale() if waiting else 1.0
        self._scaler.update()
        ratio = self.current_scale() / before if waiting else 1.0
        if ratio != 1.0:
            done: set[int] = set()
            for optimizer in waiting:
                self._multiply_gradients(
                    optimizer, ratio, but=done | self._ids_of_already_true_gradients(optimizer)
                )
                done |= set(map(id, self._gradients_of(optimizer)))
        self._is_update_due = False
        self._stages.update(
            dict.fromkeys(self._optimizers_in_stage(_GradientStage.UNSCALED), _GradientStage.PLAIN)
        )

    def _multiply_gradients(
        self, optimizer: Any, factor: float, *, but: Collection[int] = (), only: Collection[int] | None = None
    ) -> None:
        """Multiply the gradients of an optimizer; `but` those with these ids, or `only` those."""
        # A weight and its master may show the same one.
        weights = self._optimizers.masters_and_weights_of(optimizer)
        held: dict[int, tuple[Any, Tensor]] = {}
        for param in weights:
            grad = param.grad
            if grad is not None and id(grad) not in but and (only is None or id(grad) in only):
                held[id(grad)] = (param, grad)
        if not held:
            return
        grads = [grad.detach() for _, grad in held.values()]
        scaled = torch._foreach_mul([grad.float() for grad in grads], factor)  # fp16 has no 65536
        for number, (param, grad) in enumerate(held.values()):
            if grad.requires_grad:  # the script computes with it
                param.grad = grads[number] = torch.empty_like(grads[number])
        copy_tensors_by_dtype(grads, scaled)

    def _gradients_of(self, optimizer: Any) -> list[Tensor]:
        with GRADIENT_READS.pause_notices_of_reads():
            return [
                grad
                for param in self._optimizers.masters_and_weights_of(optimizer)
                if (grad := param.grad) is not None
            ]

    def has_gradients(self, optimizer: Any) -> bool:
        """Return whether an optimizer has gradients, which may be zeros."""
        return bool(self._gradients_of(optimizer))

    def _has_nonzero_gradient(self, optimizers: Iterable[Any]) -> bool:
        """Return whether any gradient of optimizers is not all zeros."""
        return _is_any_true(grad.any() for optimizer in optimizers for grad in self._gradients_of(optimizer))

    # Readers of gradients.

    def _prepare_gradient_for_reader(self, tensor: Tensor) -> None:
        if not self.is_open:
            return
        optimizer = self._optimizers.find_owner_of(tensor)
        if self._in_step is not None and any(
            tensor is one for one in self._optimizers.masters_and_weights_of(self._in_step)
        ):
            optimizer = self._in_step
        if optimizer is None:
            self._divide_gradient_once(tensor)
        elif self._stage_of_optimizer(optimizer) is _GradientStage.SCALED and self.has_gradients(optimizer):
            with GRADIENT_READS.pause_notices_of_reads():
                self._unscale_gradients(optimizer)
                self._recompute_overflowed_gradients(self._optimizers.masters_and_weights_of(optimizer))
            self._stages[optimizer] = _GradientStage.UNSCALED
            if self._in_step is not None and self._skips_overflows and self._has_found_overflow(optimizer):
                raise OverflowInStep

    def _divide_gradient_once(self, tensor: Tensor) -> None:
        """Divide the gradient of a tensor that no optimizer has, such as an input or a feature map, once."""
        with GRADIENT_READS.pause_notices_of_reads():
            grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
            if grad is None:
                return
            known = self._divided.get(id(tensor))
            if known is None or known[0] is not grad or known[1] != grad._version:
                with torch.no_grad():
                    grad.mul_(1.0 / self.current_scale())
                self._divided[id(tensor)] = grad, grad._version

    def _recompute_overflowed_gradients(self, tensors: list[Tensor]) -> None:
        """Compute gradients that overflowed by the scale without it: nothing may skip what is done with them."""
        if self._first_loss is None or not _is_any_true(
            ~grad.isfinite().all() for one in tensors if (grad := one.grad) is not None
        ):
            return
        with contextlib.suppress(RuntimeError):  # of reentrant checkpoints
            true = torch.autograd.grad(self._first_loss, tensors, retain_graph=True, allow_unused=True)
            for tensor, grad in zip(tensors, true, strict=True):
                if grad is not None and tensor.grad is not None:
                    tensor.grad.copy_(grad)

    def _let_norm_of_overflow_be_infinite(self, place: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a norm that may be infinite where an overflow is about to skip the step."""
        if not self.is_open:
            return original(*args, **kwargs)
        if len(args) > place:
            return original(*args[:place], False, *args[place + 1 :], **kwargs)
        return original(*args, **{**kwargs, "error_if_nonfinite": False})

    # The step.

    def step_or_skip_if_followed(self, optimizer: Any, options: Mapping[str, Any]) -> bool:
        """Let the scaler step an optimizer or skip that; False if its gradients are for a step as it is written."""
        self._has_step |= dict.fromkeys(self._new_places, True)
        self._new_places.clear()
        self._first_loss = None
        if not self.has_gradients(optimizer):
            return False
        if self._stage_of_optimizer(optimizer) is _GradientStage.PLAIN:
            self._scale_losses(torch.zeros(()))
        stage = self._stage_of_optimizer(optimizer)
        if stage in (_GradientStage.FOREIGN, _GradientStage.STEPPED):
            if self._stand_in.steps_copies and (
                stage is _GradientStage.FOREIGN or not self._stand_in.steps_again
            ):
                raise ScalingError.with_advice(
                    message_with_script_line(
                        f"the script sets gradients itself, as with torch.autograd.grad, and {self._arm} steps fp32 "
                        "copies of the weights, which lack them"
                    ),
                    "native:bf16",
                    remedy="take another arm without master weights",
                )
            return False
        if stage is not _GradientStage.SKIPPED:
            self.is_applied = False
            with GRADIENT_READS.pause_notices_of_reads():
                if self._has_overflow:
                    self._note_overflow_used_by_script(optimizer)
                if stage is _GradientStage.SCALED and (
                    true := self._ids_of_already_true_gradients(optimizer)
                ):
                    self._multiply_gradients(optimizer, self.current_scale(), only=true)
                self._scaler.step(optimizer, **options)
            self._end_step_of(optimizer)
        optimizer._opt_called = True  # a skipped step was called too: schedulers warn otherwise
        return True

    def _end_step_of(self, optimizer: Any) -> None:
        stage = _GradientStage.STEPPED if self.is_applied else _GradientStage.SKIPPED
        self._stages.update(
            dict.fromkeys([optimizer, *self._optimizers.optimizers_inside_of(optimizer)], stage)
        )
        self._is_update_due = True
        if len(self._optimizers.living_optimizers()) == 1:
            self.close()
            with GRADIENT_READS.pause_notices_of_reads():
                self._update_loss_scale()

    def step_evaluating_losses_itself(self, optimizer: Any, call_step: Callable[[], Any]) -> Any:
        """Let the scaler call the step of an optimizer, which evaluates losses by itself; return what that returns.

        After an overflow weights, state and settings of the optimizer are what they were before the step.

        Args:
            call_step: calls the step as it is written; the scaler calls `optimizer.step`, which has to call
                `function_that_step_has_to_call`.
        """
        self._has_step |= dict.fromkeys(self._new_places, True)
        self._new_places.clear()
        self._first_loss, self._has_overflow = None, False
        self._make_own_scaler()
        if self._scaler._scale is None:  # torch makes it with the first loss
            device = next((param.device for param in owned_params(optimizer)), torch.device("cpu"))
            self._scaler._lazy_init_scale_growth_tracker(device)
        with GRADIENT_READS.pause_notices_of_reads():
            if self._is_update_due and self._stage_of_optimizer(optimizer) is not _GradientStage.UNSCALED:
                self._update_loss_scale()
            states = self._scaler._per_optimizer_states
            is_unscaled = self._stage_of_optimizer(optimizer) is _GradientStage.UNSCALED
            if not is_unscaled:
                states[id(optimizer)] = _scaler_state_without_overflow(optimizer)
        result: list[Any] = []

        def run_inside() -> None:
            if not is_unscaled:
                states.pop(id(optimizer), None)
            with contextlib.suppress(OverflowInStep):
                result.append(self._run_step_undone_at_overflow(optimizer, call_step))

        self._run_inside, self.is_applied = run_inside, False
        self._stand_in.script.in_step = self._in_step = optimizer
        try:
            self._scaler.step(optimizer)
        finally:
            self._stand_in.script.in_step = self._in_step = self._run_inside = None
        if id(optimizer) not in states:
            states[id(optimizer)] = _scaler_state_without_overflow(optimizer)
        states[id(optimizer)]["stage"] = OptState.STEPPED
        self._end_step_of(optimizer)
        optimizer._opt_called = True
        return result[0] if result else None

    def set_losses_left_unrecorded(self, rows: RecordedSteps | None, ignored: bool) -> None:
        """Let losses of a step be recorded no longer, or again."""
        if rows is not None and self._scaler is not None:
            (rows.ignored.add if ignored else rows.ignored.discard)(self._scaler)

    @property
    def function_that_step_has_to_call(self) -> Callable[[], None] | None:
        """What the step of an optimizer has to call that the scaler calls; None if it is a step of gradients only."""
        return self._run_inside

    def _run_step_undone_at_overflow(self, optimizer: Any, run: Callable[[], Any]) -> Any:
        before = None
        if self._skips_overflows:
            before = StepSnapshot([optimizer, *self._optimizers.optimizers_inside_of(optimizer)])
        self._run_inside = None
        try:
            result = run()
        except OverflowInStep:
            assert before is not None, "raised where a step may be skipped"
            before.restore_weights_and_state()
            raise
        self.is_applied = True
        return result

    def _has_found_overflow(self, optimizer: Any) -> bool:
        """Return whether the gradients of an optimizer that were unscaled last are not finite; waits for the device."""
        return any(
            map(bool, self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        )

    def _note_overflow_used_by_script(self, optimizer: Any) -> None:
        """Let a step be skipped if the script has made its gradients of ones that overflowed, and cleared those."""
        self._has_overflow = False
        if _is_any_true(~grad.isfinite().all() for grad in self._gradients_of(optimizer)):
            for flag in self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.fill_(1.0)


def _scaler_state_without_overflow(optimizer: Any) -> dict[str, Any]:
    """Return what a GradScaler notes of an optimizer whose gradients it has found to be finite."""
    device = next((param.device for param in owned_params(optimizer)), torch.device("cpu"))
    return {"stage": OptState.UNSCALED, "found_inf_per_device": {device: torch.zeros((), device=device)}}


def _is_any_true(flags: Iterable[Tensor]) -> bool:
    """Return whether one of these scalars is true; waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        by_device.setdefault(flag.device, []).append(flag)
    return any(bool(torch.stack(some).any()) for some in by_device.values())


def _can_run_backward_twice(loss: Tensor) -> bool:
    """Return whether the graph of a loss can be kept for a second pass: compiled ones give up their buffers."""
    if rank_in_process_group() is not None:  # whose gradients hooks reduce
        return False
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return not any(type(node).__name__.startswith("CompiledFunction") for node in seen)
