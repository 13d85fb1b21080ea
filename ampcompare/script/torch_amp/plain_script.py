"""Drive an arm through a script that lacks mixed precision, or has autocast without a GradScaler.

What stands behind `torch.amp` is called where a script with mixed precision would call it, at points of torch through
which every training passes:

| the script | the arm, by the names of `torch.amp` |
|---|---|
| calls a module outside of any other, if an optimizer has its weights or its input | an autocast block around it |
| runs a backward pass | of the scaled loss |
| reads a gradient for the first time, or steps | `unscale_` |
| steps | `step`, which an overflow skips |
| runs the next backward pass | `update`, after a step; right after it where there is one optimizer |
| runs a backward pass where it has read gradients before and never stepped | nothing: by hand its loss has no scale |

A script that has made a GradScaler or called `amp.initialize` is left alone. One whose scalers and autocast blocks are
all switched off has no mixed precision.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from ampcompare.backends.apex_levels import apex_level
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ScalingError, UnsupportedCombination
from ampcompare.guards.events import GRADIENT_READS, Points, Subscriptions, follow_own_calls
from ampcompare.guards.location import call_site, here
from ampcompare.script.apex_amp import Given, nodes_of
from ampcompare.script.legacy.record.recorder import Rows, value_of
from ampcompare.script.lifted_weights import HALF, LiftedWeights
from ampcompare.script.torch_amp.autocast_and_scaler import TorchNames
from ampcompare.training.precision.base import owned_params

__all__ = ["PlainScript"]

MAX_WATCHED = 4096
BACKWARD = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
HOOKS = [
    (Tensor, "register_hook"),
    *((nn.Module, f"register_{name}_hook") for name in ("full_backward", "full_backward_pre")),
]
NORMS = {"clip_grad_norm_": 3, "get_total_norm": 2}  # and the place of their argument error_if_nonfinite


class _Mode(enum.Enum):
    """What a script needs."""

    UNKNOWN = "it has not trained yet"
    PLAIN = "casts and a scaled loss"
    AUTOCAST = "a scaled loss: it has autocast"
    OWN = "nothing: it has a GradScaler or apex.amp"


class PlainScript:
    """Follows modules, backward passes and optimizers of this process.

    Args:
        names: stands behind `torch.amp` for the arm; installed before this.
        for_cuda: what the script does on CUDA happens on the CPU, with the casts of CUDA.
        rows: records what nothing scales; a GradScaler records itself.
        given: called with the optimizers that there are before the first pass, unless `amp.initialize` has done it.
        lifted: lifts 16-bit weights, unless the arm is `script`.
    """

    def __init__(
        self,
        arm: Arm,
        names: TorchNames,
        *,
        for_cuda: bool = False,
        rows: Rows | None = None,
        given: Given | None = None,
        lifted: LiftedWeights | None = None,
    ) -> None:
        self._arm = arm
        self._names = names
        self._given = given
        self._lifted = lifted or LiftedWeights(rows)
        self._for_cuda = for_cuda
        self._rows = rows
        self._loss: Any = None  # of torch.autograd.grad, since the last step
        self._has_loss = False  # recorded since the last step
        self._mode = _Mode.UNKNOWN
        self._casts = arm.backend not in ("fp32", "script") and arm.options.get("opt_level") != "O0"
        self._optimizers: list[weakref.ref[Any]] = []
        self._owners: dict[int, weakref.ref[Any]] = {}  # optimizers by the id of a parameter
        self._trained: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}  # by the id of a module
        self._inside = False  # of a module that is trained
        self._shells: tuple[nn.Module, ...] = ()  # modules whose call is that of a method with the parts of its own
        self._outermost: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that were called so
        self._has_cast = False  # in this forward pass, or any earlier one of `_casting`
        self._casting = 0  # forward passes with casts
        self._backwards = 0
        self._scale_of_pass = 1.0  # of its loss, while it runs
        self._block: Any = None  # of O1, from a forward pass to the backward pass
        self._scaler: Any = None
        self._is_open = False  # gradients of a scaled loss were not stepped
        self._unscaled: list[Any] = []  # optimizers with true gradients, whose step has not come
        self._true: list[Any] = []  # optimizers whose gradients are true
        self._stepped: list[Any] = []  # since the loss scale moved
        self._stepping = self._applied = self._repeats = False
        self._same: list[Any] = []  # optimizers that have stepped and not skipped since the last scaled loss
        self._has_step: dict[tuple[int, ...], bool] = {}  # after a backward pass, by the place of its call
        self._new_places: list[tuple[int, ...]] = []  # of passes since the last step
        self._is_first_pass = False  # at its place, and to gradients that were clear
        self._first_loss: Tensor | None = None  # of that; its graph can be used again
        self._has_true_pass = False  # of a loss that was not scaled, since the last one that was
        self._has_overflow = False  # in gradients that were read and cleared since the last step
        self._by_hand = _UpdatesByHand()
        self._divided: dict[int, tuple[Any, int]] = {}  # gradients of other tensors that are true, by id

    def install(self, events: Subscriptions) -> None:
        """Follow the script from now on."""
        events.wrap(*Points.MAKE_OPTIMIZER, self._made)
        events.wrap(*Points.ADD_PARAM_GROUP, self._grown)
        events.wrap(*Points.FORWARD, self._called)
        events.wrap(*Points.FUNCTIONAL_CALL, self._called_with)
        events.wrap(*Points.BACKWARD, self._backward)
        events.wrap(*Points.GRAD, self._differentiated)
        for kind, name in HOOKS:
            events.wrap(kind, name, self._hook)
        if _skips_overflows(self._arm):
            for owner in (nn.utils, nn.utils.clip_grad):
                for name in NORMS.keys() & vars(owner).keys():
                    events.wrap(owner, name, functools.partial(self._take_norm, NORMS[name]))
        events.at_end(lambda: GRADIENT_READS.want(self._before_read, False))

    # Which optimizers and modules there are.

    def _made(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        follow_own_calls()  # of the classes that there are by now
        self._lift(optimizer)
        self._optimizers.append(weakref.ref(optimizer))
        self._take_over(optimizer)
        if self._mode is not _Mode.OWN and not self._names.is_by_apex():
            self._names.optimizer_made()

    def _grown(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if any(optimizer is one for one in self._live()):  # else it is being made
            self._lift(optimizer)
        self._owners.clear()
        self._trained.clear()

    def _lift(self, optimizer: Any) -> None:
        has_cast = self._names.casts_weights and self._names.casts_now()  # then 16 bits may be those of the arm
        if self._arm.backend != "script" and not has_cast:
            self._lifted.lift(optimizer)

    def _live(self) -> list[Any]:
        return [one for reference in self._optimizers if (one := reference()) is not None]

    def _weights(self, optimizer: Any) -> list[Tensor]:
        """Return what an optimizer steps, and the 16-bit weights of the model where those are masters."""
        return [*owned_params(optimizer), *(half for half, _ in self._names.masters(optimizer))]

    def _owner(self, param: Tensor) -> Any:
        """Return the optimizer that has a parameter; None if there is none."""
        if not self._owners:
            for optimizer in self._live():
                self._owners.update({id(one): weakref.ref(optimizer) for one in self._weights(optimizer)})
        reference = self._owners.get(id(param))
        return None if reference is None else reference()

    def _is_trained(self, module: nn.Module) -> bool:
        """Return whether an optimizer has a weight of a module."""
        known = self._trained.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        trained = any(self._owner(param) is not None for param in module.parameters())
        if not trained and self._arm.backend != "script" and torch.is_grad_enabled():
            self._refuse_own_masters(module)
        self._trained[id(module)] = weakref.ref(module), trained
        return trained

    def _is_for_training(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Return whether a frozen module gets a tensor that an optimizer has, such as an image or a prompt."""
        if self._names.casts_weights or not self._live() or next(module.parameters(), None) is None:
            return False
        return self._has_owned(pytree.tree_leaves((args, kwargs)))

    def _has_owned(self, values: list[Any]) -> bool:
        """Return whether an optimizer has one of these, or what functions of `torch.func` have made of one."""
        functorch = torch._C._functorch
        for value in values:
            while isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
                value = functorch.get_unwrapped(value)
            if isinstance(value, Tensor) and self._owner(value) is not None:
                return True
        return False

    def _decide(self) -> _Mode:
        """Return what the script needs, which a block or scaler of its own may still change."""
        if self._given is not None:
            given, self._given = self._given, None
            for optimizer in self._live():  # whose weights the script may have cast since it made it
                self._lift(optimizer)
            if not self._names.is_by_apex():
                given([], self._live())
        if self._mode is _Mode.OWN:
            return self._mode
        names = self._names
        follows = self._mode is _Mode.UNKNOWN and bool(names.off_scalers) and (names.has_autocast or not self._casts)
        if names.is_by_apex() or names.has_scaler or follows:
            if self._mode is _Mode.PLAIN:
                names.used = names.has_scaler or names.has_autocast
            self._mode = _Mode.OWN
            GRADIENT_READS.want(self._before_read, False)
            self._names.is_driven = False
        elif self._names.has_autocast:
            self._mode = _Mode.AUTOCAST
            self._names.is_driven = True
        elif self._mode is _Mode.UNKNOWN:
            self._mode = _Mode.PLAIN
            self._names.is_driven = True
            self._refuse_types()
            if not self._casts:
                self._names.use()
        if self._mode is not _Mode.OWN and names.off_scalers:
            self._leave_off()
        return self._mode

    def _leave_off(self) -> None:
        """Let the scalers that the script has switched off do nothing, since losses are scaled on its behalf."""
        for scaler in self._names.off_scalers:
            scaler._enabled = False  # the arm has made it one that is on
            if self._rows is not None:
                self._rows.ignored.add(scaler)
        self._names.off_scalers.clear()

    def _refuse_types(self) -> None:
        """Refuse float64 weights of the script under arms that cast."""
        types = {param.dtype for optimizer in self._live() for param in owned_params(optimizer)}
        if self._casts and types == {torch.float64}:
            raise UnsupportedCombination(
                here(
                    f"the script holds its weights in float64, which {self._arm} is not made for: autocast leaves them "
                    "alone, and Apex refuses them. Compare script or fp32, which train as written, or let the script "
                    "keep fp32 weights"
                )
            )

    def _refuse_own_masters(self, module: nn.Module) -> None:
        """Refuse a 16-bit model whose fp32 copies an optimizer has: the script moves gradients by itself."""
        if self._names.is_by_apex():  # the arm's copies
            return
        halves = [param.detach().flatten() for param in module.parameters() if param.dtype in HALF]
        for optimizer in self._live() if halves else ():
            copies = [param.detach().flatten() for param in owned_params(optimizer)]
            if sum(map(len, copies)) == sum(map(len, halves)) and torch.equal(
                torch.cat(copies), torch.cat(halves).float()
            ):
                raise UnsupportedCombination(
                    here(
                        f"the script holds the weights of {type(module).__name__} in 16 bits and steps fp32 masters of "
                        f"its own, which {self._arm} cannot replace; compare script only, or let the script train fp32 "
                        "weights"
                    )
                )

    # The forward pass.

    def _called(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._lifted.types:
            return self._call(original, module, args, kwargs)
        given, (args, kwargs) = (args, kwargs), self._fitting(module, args, kwargs)
        result = self._call(original, module, args, kwargs)
        return result if self._casts else self._lifted.fit_result(result, given, (args, kwargs))

    def _call(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._inside:
            if not self._has_cast and self._casts:
                self._has_cast = self._names.casts_now()  # a block of the script may begin inside of its model
            return original(module, *args, **kwargs)
        if any(module is shell for shell in self._shells):
            return original(module, *args, **kwargs)
        if not self._is_trained(module) and not self._is_for_training(module, args, kwargs):
            if not self._optimizers and not self._backwards and self._by_hand.has_updated(module):
                self._step_by_hand(module)
            if next(module.parameters(), None) is None:
                args, kwargs = self._names.alike(args, kwargs)
            elif self._lifted.types and not self._names.casts_now():  # no block of the arm casts what it gets
                args, kwargs = self._lifted.fit(module, (args, kwargs), narrows=True, widens=True)
            return original(module, *args, **kwargs)
        mode = self._decide()
        if self._lifted.types:  # by now
            args, kwargs = self._fitting(module, args, kwargs)
        if self._backwards:  # a checkpoint computes again what it did in the forward pass
            part = self._names.input_type(module)
            is_cast = part is None and self._names.casts_now()
            if is_cast or (module not in self._outermost and (part is None or not _has_fp32((args, kwargs)))):
                return original(module, *args, **kwargs)
        self._outermost.add(module)
        self._inside = True
        try:
            return self._forward(mode, original, module, args, kwargs)
        finally:
            self._inside = False
            self._casting += self._has_cast

    def _fitting(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a module in the type of its weights, as far as the arm does not cast them itself."""
        if not self._inside:
            self._lifted.lift_thawed()
        inside_of_cast = self._inside and self._names.casts_weights
        narrows = not self._casts or (self._names.casts_weights and not self._inside)
        return self._lifted.fit(module, (args, kwargs), narrows=narrows, widens=not inside_of_cast)

    @contextlib.contextmanager
    def through(self, *modules: nn.Module) -> Iterator[None]:
        """Let calls of modules in a block count as calls of what they call: a library runs a method of one by them.

        Args:
            modules: the outermost first, such as `DistributedDataParallel`.
        """
        if self._is_trained(modules[0]) and self._decide() is not _Mode.OWN:
            self._names.input_type(modules[0])  # prepares a model before the library sets another `forward`
        before, self._shells = self._shells, modules
        try:
            yield
        finally:
            self._shells = before

    def _called_with(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Know and prepare a module before `functional_call` puts other weights in the place of its own.

        It is trained too where an optimizer has those, such as the stacked weights of an ensemble.
        """
        if self._live() and not self._names.casts_weights and not self._is_trained(module) and args:
            with temporarily_clear_interpreter_stack():
                self._trained[id(module)] = weakref.ref(module), self._has_owned(pytree.tree_leaves(args[0]))
        if not self._inside and not self._backwards and self._is_trained(module) and self._decide() is not _Mode.OWN:
            with temporarily_clear_interpreter_stack():  # of vmap and torch.func.grad
                self._names.input_type(module)
        return original(module, *args, **kwargs)

    def _step_by_hand(self, module: nn.Module) -> None:
        """Record an update that the script has made without an optimizer, if the arm lets it."""
        if self._casts:
            raise UnsupportedCombination(
                here(
                    f"the script updates weights of {type(module).__name__} itself, without an optimizer of torch, so "
                    f"{self._arm} has no step to act on; let it use torch.optim, or compare script or fp32"
                )
            )
        self._names.use()
        self._names.used = True
        if self._rows is not None and not self._rows.has_amp:
            self._rows.add_step(self._rows.number(module)[0], True)

    def _forward(self, mode: _Mode, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        half = self._names.input_type(module)
        if mode is not _Mode.OWN and self._names.needs_scaler:
            for optimizer in self._live():  # an arm that has prepared it has replaced its step
                self._take_over(optimizer)
        if mode is _Mode.PLAIN and self._casts:
            self._names.use()
        self._has_cast = self._casts and (mode is _Mode.PLAIN or self._names.casts_now())
        if self._has_cast and self._names.casts_loss and isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedCombination(
                here(
                    f"{self._arm} casts what functions of torch get in Python, and TorchScript calls them past Python, "
                    f"so it has no effect on {module.original_name}; compare native:fp16 or apex:O2, or leave out "
                    "torch.jit"
                )
            )
        if half is not None:
            args, kwargs = pytree.tree_map(functools.partial(_to, half), (args, kwargs))
            return pytree.tree_map(functools.partial(_to, torch.float32), original(module, *args, **kwargs))
        if mode is not _Mode.PLAIN or not self._casts:
            return original(module, *args, **kwargs)
        if self._names.casts_loss and not self._backwards:
            if not torch.is_grad_enabled():  # an evaluation, before which the script may have changed weights
                self._close_casts()
            self._open_casts(module)
            return original(module, *args, **kwargs)
        with self._made_block(module):
            output = original(module, *args, **kwargs)
        half = self._names.widens
        return output if half is None else pytree.tree_map(functools.partial(_wide, half), output)

    def _made_block(self, module: nn.Module) -> Any:
        device = "cuda" if self._for_cuda else next(module.parameters()).device.type
        with self._on_behalf():
            return torch.autocast(device)

    @contextlib.contextmanager
    def _on_behalf(self) -> Iterator[None]:
        self._names.driven = True
        try:
            yield
        finally:
            self._names.driven = False

    def _open_casts(self, module: nn.Module) -> None:
        if self._block is None:
            self._block = self._made_block(module)
            self._block.__enter__()

    def _close_casts(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    # The backward pass.

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._backwards or self._decide() is _Mode.OWN:
            return original(tensors, *args, **kwargs)
        if not self._optimizers:
            self._by_hand.note_backward()
        self._backwards += 1
        try:
            is_scaled = self._names.needs_scaler and (self._casting or self._mode is _Mode.AUTOCAST)
            kwargs.update(zip(BACKWARD, args, strict=False))
            given = kwargs.get("grad_tensors")
            loss = tensors if isinstance(tensors, Tensor) else tensors[0]
            if isinstance(tensors, Tensor) and tensors.numel() != 1 and isinstance(given, Tensor):
                with contextlib.nullcontext() if is_scaled else torch.no_grad():
                    loss = (tensors * given).sum()  # that a gradient of its own stands for
            if not is_scaled or not self._live() or not self._is_before_step(bool(kwargs.get("create_graph"))):
                self._record(loss)
                return original(tensors, **kwargs)
            if loss is not tensors and isinstance(tensors, Tensor):
                tensors = loss
                kwargs.pop("grad_tensors")
            if self._is_first_pass and loss is tensors and _can_run_twice(loss):
                self._first_loss, kwargs["retain_graph"] = loss, True
            tensors = self._scaled(tensors)
            self._scale_of_pass = self._scaler.get_scale()
            return original(tensors, **kwargs)
        finally:
            self._backwards -= 1
            self._scale_of_pass = 1.0
            self._close_casts()

    def _hook(self, original: Any, owner: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """Let a hook of the script get true gradients, and scale those that it returns."""

        @functools.wraps(hook)
        def hook_of_true(*values: Any) -> Any:
            scale = self._scale_of_pass
            types = [one.dtype for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]
            if scale == 1.0 or not types:
                return hook(*values)
            # In fp32: fp16 may lack the true ones.
            result = hook(*pytree.tree_map(lambda one: one.float() / scale if isinstance(one, Tensor) else one, values))
            return pytree.tree_map(lambda one: (one * scale).to(types[0]) if isinstance(one, Tensor) else one, result)

        return original(owner, hook_of_true, *args, **kwargs)

    def _differentiated(self, original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the loss of a script that sets gradients itself; they are true ones.

        Under vmap a loss is that of each sample.
        """
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        if not self._backwards and first.numel() == 1:
            functorch = torch._C._functorch
            while functorch.is_functorch_wrapped_tensor(first):
                first = functorch.get_unwrapped(first)
            self._loss = first
        return original(outputs, *args, **kwargs)

    def _record(self, loss: Tensor) -> None:
        """Record a loss that nothing scales; a closure that runs again for the same step has recorded its own."""
        if self._rows is not None and not self._rows.has_amp and not self._repeats:
            self._rows.add_backward(value_of(loss), 0, (None, None), None, [], [])
            self._has_loss = True

    def _is_before_step(self, has_graph: bool) -> bool:
        """Return whether the gradients of this pass may be stepped, as those of earlier ones at its place were.

        Those of a new place may; until they are, gradients that were cleared mean that none were.

        Args:
            has_graph: the gradients have a graph, by which the script computes with them.
        """
        place = call_site()
        self._first_loss, self._is_first_pass = None, False
        if not has_graph and not self._new_places and self._has_step.get(place, False):
            return True
        if is_clear := not any(self._has_gradients(one, but_zeros=True) for one in self._live()):
            if self._new_places and self._unscaled:
                self._scaler.update(self._scaler.get_scale())  # which ends the update, and leaves the scale
                self._unscaled.clear()
            self._has_step |= {one: False for one in self._new_places if one not in self._has_step}
            self._new_places.clear()
        self._new_places.append(place)
        if not is_clear or (not has_graph and self._has_step.get(place, True)):
            self._is_first_pass = is_clear and place not in self._has_step
            return True
        with GRADIENT_READS.paused():
            if self._stepped or self._unscaled:
                self._update()
        for optimizer in self._live():
            self._names.take_back(optimizer)
        self._is_open, self._true, self._has_true_pass = False, self._live(), True
        GRADIENT_READS.want(self._before_read, False)
        return False

    def _scaled(self, tensors: Any) -> Any:
        """Return scaled losses; the gradients that are there become scaled ones."""
        for optimizer in self._live():
            self._take_over(optimizer)
        if self._scaler is None:
            loss = tensors if isinstance(tensors, Tensor) else tensors[0]
            with self._on_behalf():
                self._scaler = torch.amp.GradScaler(loss.device.type)
        with GRADIENT_READS.paused():
            waits = any(self._has_gradients(one, but_zeros=True) for one in self._unscaled)
            if self._stepped:
                self._update()
            elif self._unscaled and not waits:
                before = self._scaler.get_scale()
                self._update()
                self._has_overflow |= self._scaler.get_scale() < before
            self._scale_again()
            result = self._scaler.scale(tensors if isinstance(tensors, Tensor) else list(tensors))
        self._is_open = True
        self._same.clear()
        self._owners.clear()  # master weights may have been made
        self._divided.clear()
        GRADIENT_READS.want(self._before_read, True)
        return result

    def _update(self) -> None:
        """Move the loss scale; gradients that wait for a step follow it."""
        waiting = [
            one
            for one in self._live()
            if not any(one is other for other in (*self._stepped, *self._true)) and self._has_gradients(one)
        ]
        before = self._scaler.get_scale() if waiting else 1.0
        self._scaler.update()
        ratio = self._scaler.get_scale() / before if waiting else 1.0
        if ratio != 1.0:
            for optimizer in waiting:
                self._multiply(optimizer, ratio)
        self._stepped.clear()
        self._unscaled.clear()

    def _scale_again(self) -> None:
        """Scale true gradients, to which those of a scaled loss are about to be added."""
        for optimizer in self._true:
            self._names.take_back(optimizer)
            if any(optimizer is one for one in self._unscaled):
                self._names.forget_unscaled(self._scaler, optimizer)
            if self._has_gradients(optimizer):
                self._multiply(optimizer, self._scaler.get_scale())
        self._true.clear()
        self._unscaled.clear()
        self._has_true_pass = False

    def _has_gradients(self, optimizer: Any, *, but_zeros: bool = False) -> bool:
        with GRADIENT_READS.paused():
            grads = [grad for param in self._weights(optimizer) if (grad := param.grad) is not None]
            return any(bool(grad.any()) for grad in grads) if but_zeros else bool(grads)

    def _multiply(self, optimizer: Any, factor: float) -> None:
        # A weight and its master may show the same one.
        grads = {id(grad): (param, grad) for param in self._weights(optimizer) if (grad := param.grad) is not None}
        for param, grad in grads.values():
            scaled = grad.detach().float() * factor  # fp16 has no 65536
            if grad.requires_grad:  # the script computes with it
                param.grad = scaled.to(grad.dtype)
            else:
                grad.copy_(scaled)

    # Readers of gradients, and the step.

    def _before_read(self, tensor: Tensor) -> None:
        if not self._is_open or self._backwards or self._stepping:
            return
        optimizer = self._owner(tensor)
        if optimizer is None:
            self._divide(tensor)
        else:
            self._unscale(optimizer)

    def _take_norm(self, place: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a norm that may be infinite where an overflow is about to skip the step."""
        if not self._is_open or self._mode is _Mode.OWN:
            return original(*args, **kwargs)
        if len(args) > place:
            return original(*args[:place], False, *args[place + 1 :], **kwargs)
        return original(*args, **{**kwargs, "error_if_nonfinite": False})

    def _divide(self, tensor: Tensor) -> None:
        """Divide the gradient of a tensor that no optimizer has, such as an input or a feature map, once."""
        with GRADIENT_READS.paused():
            grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
            if grad is None:
                return
            known = self._divided.get(id(tensor))
            if known is None or known[0] is not grad or known[1] != grad._version:
                with torch.no_grad():
                    grad.mul_(1.0 / self._scaler.get_scale())
                self._divided[id(tensor)] = grad, grad._version

    def _unscale(self, optimizer: Any) -> None:
        if any(optimizer is one for one in self._true) or not self._has_gradients(optimizer):
            return
        with GRADIENT_READS.paused():
            self._scaler.unscale_(optimizer)
            self._compute_again(self._weights(optimizer))
        self._unscaled.append(optimizer)
        self._true.append(optimizer)

    def _compute_again(self, tensors: list[Tensor]) -> None:
        """Compute gradients that overflowed by the scale without it: nothing may skip what is done with them."""
        grads = [(one, one.grad) for one in tensors if self._first_loss is not None and one.grad is not None]
        if self._first_loss is None or all(bool(grad.isfinite().all()) for _, grad in grads):
            return
        with contextlib.suppress(RuntimeError):  # of reentrant checkpoints
            true = torch.autograd.grad(self._first_loss, tensors, retain_graph=True, allow_unused=True)
            for tensor, grad in zip(tensors, true, strict=True):
                if grad is not None and tensor.grad is not None:
                    tensor.grad.copy_(grad)

    def _take_over(self, optimizer: Any) -> None:
        """Let steps of an optimizer come here, also if others have replaced its `step` since."""
        step = optimizer.step
        if getattr(step, "_ampcompare_driver", None) is self:
            return
        function = getattr(step, "__func__", step)

        @functools.wraps(function)
        def stepped(_self: Any, closure: Any = None, **kwargs: Any) -> Any:
            return self._step(optimizer, step, closure, kwargs)

        stepped._ampcompare_driver = self  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(stepped, optimizer)

    def _step(self, optimizer: Any, step: Any, closure: Any, kwargs: dict[str, Any]) -> Any:
        if self._stepping or self._decide() is _Mode.OWN:
            self._applied = True
            return step(**kwargs) if closure is None else step(closure, **kwargs)
        if closure is None:
            self._refuse_without_effect()
        if not self._names.needs_scaler:
            return self._step_as_written(optimizer, step, closure, kwargs)
        loss = None
        if closure is not None:
            if type(optimizer).__name__ == "LBFGS":
                raise UnsupportedCombination(here(_several_closures(self._arm)))
            with torch.enable_grad():
                loss = closure()
            self._refuse_without_effect()
        self._close_casts()
        self._has_step |= dict.fromkeys(self._new_places, True)
        self._new_places.clear()
        self._first_loss = None
        if self._has_true_pass and self._has_gradients(optimizer):
            self._scaled(torch.zeros(()))
        is_again = any(optimizer is one for one in self._same)  # by gradients that have been stepped before
        if is_again or not self._is_open or not self._has_gradients(optimizer):
            if not is_again or self._arm.backend == "half":  # where only a step of the scaler moves masters on
                self._refuse_foreign(optimizer)
            self._step_as_written(optimizer, step, None, kwargs)
            return loss
        self._stepping, self._applied = True, False
        try:
            with GRADIENT_READS.paused():
                if self._has_overflow:
                    self._mark_overflow(optimizer)
                self._scaler.step(optimizer, **kwargs)
        finally:
            self._stepping = False
        if self._applied:
            self._same.append(optimizer)
        optimizer._opt_called = True  # a skipped step was called too: schedulers warn otherwise
        self._stepped.append(optimizer)
        if not any(optimizer is one for one in self._true):
            self._true.append(optimizer)
        if len(self._live()) == 1:
            self._is_open = False
            GRADIENT_READS.want(self._before_read, False)
            with GRADIENT_READS.paused():
                self._update()
        return loss

    def _mark_overflow(self, optimizer: Any) -> None:
        """Let a step be skipped if the script has made its gradients of ones that overflowed, and cleared those."""
        self._has_overflow = False
        grads = [grad for param in self._weights(optimizer) if (grad := param.grad) is not None]
        if not all(bool(grad.isfinite().all()) for grad in grads):
            for flag in self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.fill_(1.0)

    def _refuse_without_effect(self) -> None:
        """Refuse a step after no forward pass that the arm casts: it would have no effect."""
        if self._mode is _Mode.PLAIN and self._casts and not self._casting:
            raise UnsupportedCombination(
                here(
                    f"the first step comes before any forward pass that {self._arm} could cast: no nn.Module was "
                    "called whose weights an optimizer has, and no autocast block was entered. Put the computation "
                    "into the forward of a module, or compare fp32"
                )
            )

    def _refuse_foreign(self, optimizer: Any) -> None:
        """Refuse gradients that no backward pass has made, where the optimizer steps copies of the weights."""
        if self._names.steps_copies and self._has_gradients(optimizer):
            raise ScalingError(
                here(
                    f"the script sets gradients itself, as with torch.autograd.grad, and {self._arm} steps fp32 copies "
                    "of the weights, which lack them; compare native:bf16 or apex:O1"
                )
            )

    def _step_as_written(self, optimizer: Any, step: Any, closure: Any, kwargs: dict[str, Any]) -> Any:
        def run() -> Any:
            with torch.enable_grad():
                result = closure()
            self._refuse_without_effect()
            self._repeats = True
            return result

        self._stepping = True  # a step that an arm has replaced, or one around another, comes here again
        try:
            result = step(**kwargs) if closure is None else step(run, **kwargs)
        finally:
            self._stepping = self._repeats = False
        if self._rows is not None and not self._rows.has_amp:
            if not self._has_loss and self._loss is not None:
                self._record(self._loss.detach().mean())
            self._has_loss, self._loss = False, None
            self._rows.add_step(self._rows.number(optimizer)[0], True)
        return result


def _skips_overflows(arm: Arm) -> bool:
    scale = apex_level(arm.options).loss_scale if arm.backend == "apex" else arm.options.get("loss_scale")
    return arm.backend == "native" or scale == "dynamic"


def _wide(half: torch.dtype, value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is half else value


def _has_fp32(values: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype is torch.float32 for one in pytree.tree_leaves(values))


def _to(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _several_closures(arm: Arm) -> str:
    why = "scales the loss, which may skip a step" if _skips_overflows(arm) else "gives the model weights after a step"
    return f"LBFGS runs its closure several times in one step, and {arm} {why}; compare fp32 or native:bf16"


def _can_run_twice(loss: Tensor) -> bool:
    """Return whether the graph of a loss can be kept for a second pass: compiled ones give up their buffers."""
    if distributed.is_available() and distributed.is_initialized():  # whose gradients hooks reduce
        return False
    return not any(type(node).__name__.startswith("CompiledFunction") for node in nodes_of([loss]))


class _UpdatesByHand:
    """Compares a weight before and after the passes of a script that has made no optimizer.

    `param.data.add_(...)` leaves no trace but the value.
    """

    def __init__(self) -> None:
        self._held: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._has_pass = False

    def note_backward(self) -> None:
        """Note a backward pass."""
        self._has_pass = True

    def has_updated(self, module: nn.Module) -> bool:
        """Return whether a module that is called has other weights than at its last call, with a pass in between.

        The weight watched is its last one, of which every batch changes all or most; the first may be an embedding.
        """
        params = [param for param in module.parameters() if param.requires_grad] if torch.is_grad_enabled() else []
        if not params:
            return False
        now = params[-1].detach().flatten()[:MAX_WATCHED]
        is_known = self._held is not None and self._held[0]() is params[-1]
        if is_known and not self._has_pass:
            return False
        changed = is_known and self._held is not None and not torch.equal(self._held[1], now)
        self._held, self._has_pass = (weakref.ref(params[-1]), now.clone()), False
        return changed
