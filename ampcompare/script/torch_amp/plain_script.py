"""Drive an arm through a script that lacks mixed precision, or has autocast without a GradScaler.

What stands behind `torch.amp` is called where a script with mixed precision would call it, at points of torch through
which every training passes:

| the script | the arm, by the names of `torch.amp` |
|---|---|
| calls a module outside of any other, if an optimizer has its weights or its input | an autocast block around it |
| runs a backward pass | of the scaled loss |
| reads a gradient, steps | `unscale_`, `step` and `update`, by its `ScriptLossScaling` |

A script that has made a GradScaler is left alone. One whose scalers and autocast blocks are all switched off has no
mixed precision; one that has called `amp.initialize` has autocast.
"""

import contextlib
import enum
import functools
import inspect
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import dataloader

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import PreparationError, UnsupportedCombination
from ampcompare.base.location import is_installed_file, is_users_or_installed_file, message_with_script_line
from ampcompare.base.patches import GRADIENT_READS, PatchPoints, Subscriptions, follow_modules_with_own_call
from ampcompare.base.tensors.bits import bit_sum
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.base.tensors.transforms import outside_of_transforms, tensor_inside_wrappers
from ampcompare.base.tensors.tree import cast_floating_tensors, map_tensors_in_tree, widen_halves
from ampcompare.script.recording.recorder import RecordedSteps, number_or_detached_tensor
from ampcompare.script.remarks.whole_numbers import RoundedWholeNumberWatch
from ampcompare.script.torch_amp.autocast_and_scaler import OpenAutocastBlock
from ampcompare.script.torch_amp.gradient_stages import ScriptLossScaling, ScriptOptimizers
from ampcompare.script.torch_amp.lifted_weights import HalfWeightLifter
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn, losses_inside_step_refusal
from ampcompare.training.precision.base import half_dtype_of, owned_params, refuse_wrapped

# modules of steps that compute with gradients, and of what
GRADIENTS_ONLY = ("torch.", "ampcompare.", "apex.")
# puts itself around them
TRAINERS = ("accelerate.", "lightning.", "pytorch_lightning.", "transformers.", "mmengine.")
BACKWARD = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
MIXED_PRECISION = re.compile(r"\b(autocast|GradScaler|apex|amp)\b")
HOOKS = [
    (Tensor, "register_hook"),
    *((nn.Module, f"register_{name}_hook") for name in ("full_backward", "full_backward_pre")),
]


class _WhatScriptLacks(enum.Enum):
    """What a script needs."""

    UNKNOWN = "it has not trained yet"
    PLAIN = "casts and a scaled loss"
    AUTOCAST = "a scaled loss: it has autocast"
    OWN = "nothing: it has a GradScaler or apex.amp"


class _ThreadState(threading.local):
    """Where a thread is, since a script may train or evaluate in several at a time.

    Attributes:
        inside: of a module that is trained.
        has_cast: in this pass.
        shells: modules whose call is that of a method with the parts of its own.
    """

    inside = False
    has_cast = False
    shells: tuple[nn.Module, ...] = ()


class PlainScriptFollower:
    """Follows modules, backward passes and optimizers of this process.

    Attributes:
        casting: what is cast everywhere, once the script has called `amp.initialize`.
        stages: of the gradients, where the arm needs a scaler.
        whole_numbers: in the inputs that the arm casts.

    Args:
        stand_in: stands behind `torch.amp` for the arm; installed before this.
        lifted: lifts 16-bit weights, unless the arm is `script`.
        for_cuda: what the script does on CUDA happens on the CPU, with the casts of CUDA.
        rows: records what nothing scales; a GradScaler records itself.
        given: called with the optimizers that there are before the first pass, or with what `amp.initialize` gets;
            Apex's own calls it by itself.
    """

    def __init__(
        self,
        arm: Arm,
        stand_in: TorchAmpStandIn,
        lifted: HalfWeightLifter,
        *,
        for_cuda: bool = False,
        rows: RecordedSteps | None = None,
        given: Callable[[list[Any], list[Any]], None] = lambda models, optimizers: None,
    ) -> None:
        self._arm = arm
        self._stand_in = stand_in
        self._given = given
        self._has_begun = False
        self.casting = OpenAutocastBlock()
        self._lifted = lifted
        self._for_cuda = for_cuda
        self._rows = rows
        self._loss: Any = None  # of torch.autograd.grad, since the last step
        self._has_loss = False  # recorded since the last step
        self._mode = _WhatScriptLacks.UNKNOWN
        self._casts = bool(arm.half)
        self._arm_half = half_dtype_of(arm)
        self._is_fp32 = not self._casts and not arm.is_as_written
        self._optimizers = ScriptOptimizers(stand_in)
        self.stages = ScriptLossScaling(arm, stand_in, self._optimizers)
        self._trained: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}  # by the id of a module
        self._pass = _ThreadState()
        self._deciding = threading.RLock()
        self._replicating = 0  # calls of nn.DataParallel, whose threads are inside of its forward pass
        self._outermost: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that were called so
        self._casting = 0  # forward passes with casts, which add to it at their end
        self._backwards = 0
        self._is_scaled_pass = False
        self._block: Any = None  # of O1, from the first forward pass on; without it in steps
        self._device_type = "cpu"  # of the last one
        # a forward pass with gradients has cast weights, and no backward pass came since
        self._has_graph = False
        self._stepping = self._repeats = False
        # the optimizer that steps copies of the weights of models, made for this step
        self._copied: Any = None
        self._step_arguments: tuple[Any, Any] | None = None  # of that step, until it begins
        self._passes_in_step = 0
        # losses, in a step without arguments: by the class of an optimizer
        self._evaluates: dict[type, bool] = {}
        self.whole_numbers = RoundedWholeNumberWatch(str(arm), rows)
        self._noted: set[type] = set()  # optimizers whose weights and state are copied for a step

    def install(self, events: Subscriptions) -> None:
        """Follow the script from now on."""
        events.wrap(*PatchPoints.MAKE_OPTIMIZER, self._follow_new_optimizer)
        events.wrap(*PatchPoints.ADD_PARAM_GROUP, self._follow_new_group)
        events.wrap(*PatchPoints.FORWARD, self._call_with_fitting_inputs)
        events.wrap(*PatchPoints.FUNCTIONAL_CALL, self._prepare_functional_call)
        events.wrap(*PatchPoints.BACKWARD, self._backward)
        events.wrap(*PatchPoints.GRAD, self._note_loss_of_autograd_grad)
        for kind, name in HOOKS:
            events.wrap(kind, name, self._give_hook_true_gradients)
        self.stages.install(events)
        if self._stand_in.casts_loss:
            events.wrap(*PatchPoints.ENTER_AUTOCAST, self._note_autocast_entered)
            events.wrap(dataloader._BaseDataLoaderIter, "__next__", self._next_batch_without_casts)
            if hasattr(os, "register_at_fork"):  # where processes can be forked, as workers of loaders are
                close = weakref.WeakMethod(self._close_casts)
                os.register_at_fork(after_in_child=lambda: (found := close()) and found())
            events.call_at_end(self._close_casts)

    # Which optimizers and modules there are.

    def _follow_new_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        follow_modules_with_own_call()  # of the classes that there are by now
        self._lift_weights(optimizer)
        self._optimizers.add(optimizer)
        self._take_over_steps_of(optimizer)
        if self._mode is not _WhatScriptLacks.OWN and not self._stand_in.trains_through_apex():
            self._stand_in.note_optimizer_made()
            if (
                self._stand_in.casts_loss
                and self._mode is _WhatScriptLacks.UNKNOWN
                and not _may_user_code_use_amp()
            ):
                self._open_casts(next(iter(owned_params(optimizer))).device.type)

    def _follow_new_group(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if any(optimizer is one for one in self._optimizers.living_optimizers()):  # else it is being made
            self._lift_weights(optimizer)
        self._optimizers.forget_owners_of_weights()
        self._trained.clear()

    def _lift_weights(self, optimizer: Any) -> None:
        # then 16 bits may be those of the arm
        has_cast = self._stand_in.casts_weights and self._stand_in.casts_now()
        if not self._arm.is_as_written and not has_cast:
            self._lifted.lift_weights_of(optimizer)

    def _has_trained_weight(self, module: nn.Module) -> bool:
        """Return whether an optimizer has a weight of a module."""
        known = self._trained.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        trained = any(self._optimizers.find_owner_of(param) is not None for param in module.parameters())
        if not trained and not self._arm.is_as_written and torch.is_grad_enabled():
            self._refuse_own_masters(module)
        self._trained[id(module)] = weakref.ref(module), trained
        return trained

    def _is_frozen_with_trained_input(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Return whether a frozen module gets a tensor that an optimizer has, such as an image or a prompt."""
        if (
            self._stand_in.casts_weights
            or not self._optimizers.living_optimizers()
            or next(module.parameters(), None) is None
        ):
            return False
        return self._has_optimized_tensor(pytree.tree_leaves((args, kwargs)))

    def _has_optimized_tensor(self, values: list[Any]) -> bool:
        """Return whether an optimizer has one of these, or what functions of `torch.func` have made of one."""
        given = (tensor_inside_wrappers(value) for value in values if isinstance(value, Tensor))
        return any(self._optimizers.find_owner_of(value) is not None for value in given)

    def _prepare_and_find_input_type(self, module: nn.Module) -> torch.dtype | None:
        """Return `find_input_type` of the stand-in, which may cast models: other threads wait, and decide nothing."""
        with self._deciding:
            return self._stand_in.find_input_type(module)

    def _find_what_script_lacks(self) -> _WhatScriptLacks:
        """Return what the script needs, which a block or scaler of its own may still change."""
        with self._deciding:
            return self._find_what_script_lacks_once()

    def _find_what_script_lacks_once(self) -> _WhatScriptLacks:
        if not self._has_begun:
            self._begin_training([], self._optimizers.living_optimizers())
        if self._mode is _WhatScriptLacks.OWN:
            return self._mode
        script = self._stand_in.script
        is_off = self._mode is _WhatScriptLacks.UNKNOWN and bool(script.off_scalers)
        follows = is_off and (script.has_autocast or not self._casts)
        if (
            self._stand_in.trains_through_apex()
            or script.has_scaler
            or (follows and not script.is_initialized)
        ):
            if self._mode is _WhatScriptLacks.PLAIN:
                script.acts = script.has_scaler or script.has_autocast
            self._mode = _WhatScriptLacks.OWN
            self._close_casts()
            self.stages.close()
            script.steps_on_behalf = False
        elif script.has_autocast:
            self._mode = _WhatScriptLacks.AUTOCAST
            script.steps_on_behalf = True
        elif self._mode is _WhatScriptLacks.UNKNOWN:
            self._mode = _WhatScriptLacks.PLAIN
            script.steps_on_behalf = True
            self._refuse_fp64_weights()
            if not self._casts:
                self._stand_in.note_arm_acts()
        if self._mode is not _WhatScriptLacks.OWN and script.off_scalers:
            self._disable_script_scalers()
        return self._mode

    def _begin_training(self, models: list[Any], optimizers: list[Any]) -> None:
        self._has_begun = True
        for (
            optimizer
        ) in self._optimizers.living_optimizers():  # whose weights the script may have cast since it made it
            self._lift_weights(optimizer)
        if not self._stand_in.trains_through_apex():
            self._given(models, optimizers)

    def initialize(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        """Let the arm act on models and optimizers that the script names, outside of their calls too."""
        self._begin_training(models, optimizers)
        try:
            refuse_wrapped(models)
        except PreparationError as error:
            raise PreparationError(message_with_script_line(str(error))) from None
        self._stand_in.initialize(models, optimizers)
        if self._stand_in.widens is not None:
            params = [param for model in models for param in model.parameters()]
            self.casting.switch_casts_on(
                functools.partial(self._make_autocast_block, params[0].device.type if params else "cpu")
            )

    def _disable_script_scalers(self) -> None:
        """Let the scalers that the script has switched off do nothing, since losses are scaled on its behalf."""
        for scaler in self._stand_in.script.off_scalers:
            scaler._enabled = False  # the arm has made it one that is on
            if self._rows is not None:
                self._rows.ignored.add(scaler)
        self._stand_in.script.off_scalers.clear()

    def _refuse_fp64_weights(self) -> None:
        """Refuse float64 weights of the script under arms that cast."""
        types = {
            param.dtype
            for optimizer in self._optimizers.living_optimizers()
            for param in owned_params(optimizer)
        }
        if self._casts and types == {torch.float64}:
            raise UnsupportedCombination.with_advice(
                message_with_script_line(
                    f"the script holds its weights in float64, which {self._arm} is not made for: autocast leaves them "
                    "alone, and Apex refuses them"
                ),
                "script",
                "fp32",
                remedy="let the script keep fp32 weights",
            )

    def _refuse_own_masters(self, module: nn.Module) -> None:
        """Refuse a 16-bit model whose fp32 copies an optimizer has: the script moves gradients by itself."""
        if self._stand_in.trains_through_apex():  # the arm's copies
            return
        halves = [param.detach().flatten() for param in module.parameters() if param.dtype in HALF_DTYPES]
        for optimizer in self._optimizers.living_optimizers() if halves else ():
            copies = [param.detach().flatten() for param in owned_params(optimizer)]
            if sum(map(len, copies)) == sum(map(len, halves)) and torch.equal(
                torch.cat(copies), torch.cat(halves).float()
            ):
                raise UnsupportedCombination.with_advice(
                    message_with_script_line(
                        f"the script holds the weights of {type(module).__name__} in 16 bits and steps fp32 masters of "
                        f"its own, which {self._arm} cannot replace"
                    ),
                    "script",
                    remedy="let the script train fp32 weights",
                )

    # The forward pass.

    def _call_with_fitting_inputs(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._lifted.types and not self._casts_otherwise_than_autocast():
            return self._call_outermost_model(original, module, args, kwargs)
        given, (args, kwargs) = (args, kwargs), self._lift_weights_and_fit_arguments(module, args, kwargs)
        result = self._call_outermost_model(original, module, args, kwargs)
        return (
            result if self._casts else self._lifted.frozen_result_in_input_type(result, given, (args, kwargs))
        )

    def _is_inside_trained_module(self) -> bool:
        """Return whether this thread is inside of a module that is trained."""
        return self._pass.inside or self._replicating > 0

    def _casts_otherwise_than_autocast(self) -> bool:
        """Return whether the arm does not cast where the script's own blocks would, so that inputs may not fit."""
        return self._is_fp32 and self._stand_in.script.has_autocast

    def _call_outermost_model(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_inside_trained_module():
            if not self._pass.has_cast and self._casts:
                # a block of the script may begin inside of its model
                self._pass.has_cast = self._stand_in.casts_now()
            return original(module, *args, **kwargs)
        if any(module is shell for shell in self._pass.shells):
            return original(module, *args, **kwargs)
        is_trained = self._has_trained_weight(module)
        if not is_trained and not self._is_frozen_with_trained_input(module, args, kwargs):
            args, kwargs = self._fit_arguments_of_untrained(module, args, kwargs)
            return original(module, *args, **kwargs)
        mode = self._find_what_script_lacks()
        if self._stepping and self._copied is not None and not self._backwards:
            raise losses_inside_step_refusal(self._copied, self._arm)
        if self._lifted.types:  # by now
            args, kwargs = self._lift_weights_and_fit_arguments(module, args, kwargs)
        if self._backwards and self._is_cast_in_checkpoint(module, args, kwargs):
            result = original(module, *args, **kwargs)
            return self._output_in_asked_type(module, result)
        self._outermost.add(module)
        self._pass.inside = True
        self._replicating += isinstance(module, nn.DataParallel)
        blocks = self._stand_in.num_blocks
        try:
            result = self._forward_under_arm(mode, original, module, args, kwargs)
            is_cast = self._stand_in.casts_now() or self._stand_in.num_blocks > blocks
            return self._output_in_asked_type(module, result) if is_cast else result
        finally:
            self._pass.inside = False
            self._replicating -= isinstance(module, nn.DataParallel)
            self._casting += self._pass.has_cast

    def _fit_arguments_of_untrained(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a module that no optimizer trains, in types that it can compute with."""
        if next(module.parameters(), None) is None:
            return self._stand_in.fitting_arguments_of_weightless_module(args, kwargs)
        if self._lifted.types and not self._stand_in.casts_now():
            # no block of the arm casts what it gets
            return self._lifted.inputs_in_weight_type(module, (args, kwargs), narrows=True, widens=True)
        return args, kwargs

    def _is_cast_in_checkpoint(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Return whether a checkpoint, which computes again in the backward pass, has set up the casts of a module."""
        part = self._prepare_and_find_input_type(module)
        is_cast = part is None and self._stand_in.casts_now()
        fits = part is None or not _has_fp32_tensor((args, kwargs))
        return is_cast or (fits and module not in self._outermost)

    def _output_in_asked_type(self, module: nn.Module, output: Any) -> Any:
        """Return what a module that the script itself calls returns, in the type that an option of the arm asks for."""
        outputs = self._stand_in.outputs
        by_apex = self._stand_in.trains_through_apex()  # which casts it
        is_own = outputs is None or module not in self._outermost or by_apex
        return output if is_own or outputs is None else cast_floating_tensors(output, outputs)

    def _lift_weights_and_fit_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a module in the type of its weights, as far as the arm does not cast them itself."""
        if not self._is_inside_trained_module():
            self._lifted.lift_thawed_weights()
        inside_of_cast = self._is_inside_trained_module() and self._stand_in.casts_weights
        narrows = not self._casts or (self._stand_in.casts_weights and not self._is_inside_trained_module())
        if self._casts_otherwise_than_autocast() and not any(
            one is not None for one in module._parameters.values()
        ):
            types = {one.dtype for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
            is_model = not self._is_inside_trained_module() and next(module.parameters(), None) is not None
            if not types.isdisjoint(HALF_DTYPES) and (is_model or torch.float32 in types):
                return widen_halves((args, kwargs))
        return self._lifted.inputs_in_weight_type(
            module, (args, kwargs), narrows=narrows, widens=not inside_of_cast
        )

    @contextlib.contextmanager
    def outer_calls_counted_as_inner(self, *modules: nn.Module) -> Iterator[None]:
        """Let calls of modules, the outermost first, count as calls of what they call: a library runs a method so."""
        if (
            self._has_trained_weight(modules[0])
            and self._find_what_script_lacks() is not _WhatScriptLacks.OWN
        ):
            self._prepare_and_find_input_type(
                modules[0]
            )  # prepares a model before the library sets another `forward`
        before, self._pass.shells = self._pass.shells, modules
        try:
            yield
        finally:
            self._pass.shells = before

    def _prepare_functional_call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Know and prepare a module before `functional_call` puts other weights in the place of its own.

        It is trained too where an optimizer has those, such as the stacked weights of an ensemble.
        """
        if (
            self._optimizers.living_optimizers()
            and not self._stand_in.casts_weights
            and not self._has_trained_weight(module)
            and args
        ):
            with outside_of_transforms():
                self._trained[id(module)] = (
                    weakref.ref(module),
                    self._has_optimized_tensor(pytree.tree_leaves(args[0])),
                )
        if (
            not self._is_inside_trained_module()
            and not self._backwards
            and self._has_trained_weight(module)
            and self._find_what_script_lacks() is not _WhatScriptLacks.OWN
        ):
            with outside_of_transforms():  # vmap and torch.func.grad
                self._prepare_and_find_input_type(module)
        return original(module, *args, **kwargs)

    def _forward_under_arm(
        self, mode: _WhatScriptLacks, original: Any, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        half = self._prepare_and_find_input_type(module)
        if mode is not _WhatScriptLacks.OWN and self._stand_in.needs_scaler:
            # an arm that has prepared it has replaced its step
            for optimizer in self._optimizers.living_optimizers():
                self._take_over_steps_of(optimizer)
        if mode is _WhatScriptLacks.PLAIN and self._casts:
            self._stand_in.note_arm_acts()
        self._pass.has_cast = self._casts and (mode is _WhatScriptLacks.PLAIN or self._stand_in.casts_now())
        if self._pass.has_cast and self._stand_in.casts_loss and isinstance(module, torch.jit.ScriptModule):
            raise self._torchscript_refusal(module)
        if self._arm_half is not None and self._stand_in.casts_weights:
            self.whole_numbers.note_rounded_inputs(module, args, kwargs, self._arm_half)
        with self.whole_numbers.follow_inputs():
            return self._forward_with_casts(half, mode, original, module, args, kwargs)

    def _forward_with_casts(
        self,
        half: torch.dtype | None,
        mode: _WhatScriptLacks,
        original: Any,
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        if half is not None:
            args, kwargs = cast_floating_tensors((args, kwargs), half)
            return cast_floating_tensors(original(module, *args, **kwargs), torch.float32)
        if mode is not _WhatScriptLacks.PLAIN or not self._casts:
            return original(module, *args, **kwargs)
        if self._stand_in.casts_loss and not self._backwards:
            if torch.is_grad_enabled():
                self._has_graph = True
            elif not self._has_graph:
                # an evaluation, before which the script may have changed weights unseen
                self._stand_in.forget_weight_casts()
            self._open_casts(next(module.parameters()).device.type)
            return original(module, *args, **kwargs)
        with self._make_autocast_block(next(module.parameters()).device.type):
            output = original(module, *args, **kwargs)
        widened = self._stand_in.widens
        if widened is None:
            return output
        return map_tensors_in_tree(output, lambda one: one.float() if one.dtype is widened else one)

    def _torchscript_refusal(self, module: torch.jit.ScriptModule) -> UnsupportedCombination:
        return UnsupportedCombination.with_advice(
            message_with_script_line(
                f"{self._arm} casts what functions of torch get in Python, and TorchScript calls them past Python, "
                f"so it has no effect on {module.original_name}"
            ),
            "native:fp16",
            "apex:O2",
            remedy="leave out torch.jit",
        )

    def _make_autocast_block(self, device_type: str) -> torch.autocast:
        with self._stand_in.script.making_amp_objects_for_script():
            return torch.autocast("cuda" if self._for_cuda else device_type)

    # Casts of O1 stay on, as from `amp.initialize` on, so that what the script computes behind a backward pass from
    # earlier outputs is cast too. They are off in steps and in loaders, whose tensors Apex finds on the CPU and leaves
    # alone, and begin with the first optimizer, or with the first forward pass where code of the user names mixed
    # precision: it may have blocks of its own, outside of which nothing is cast.

    def _open_casts(self, device_type: str) -> None:
        if self._block is None:
            self._device_type = device_type
            self._block = self._make_autocast_block(device_type)
            self._block.__enter__()

    def _close_casts(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)

    @contextlib.contextmanager
    def _without_casts(self) -> Iterator[None]:
        if not self._stand_in.casts_loss:
            yield
            return
        was_open = self._block is not None
        self._close_casts()
        try:
            yield
        finally:
            self._close_casts()
            is_open = was_open or (
                self._mode is _WhatScriptLacks.PLAIN and self._casting > 0 and not self._stepping
            )
            if is_open and self._mode is not _WhatScriptLacks.OWN and not self._stand_in.script.has_autocast:
                self._open_casts(self._device_type)

    def _note_autocast_entered(self, original: Any, block: Any) -> Any:
        # Casts are on in the blocks of the script alone.
        if self._stand_in.script.has_autocast and block is not self._block:
            self._close_casts()
        return original(block)

    def _next_batch_without_casts(self, original: Any, iterator: Any) -> Any:
        """Get the next batch of a loader, without the arm's casts meanwhile."""
        with self._without_casts():  # a loader without workers runs the transforms of the script here
            return original(iterator)

    # The backward pass.

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._backwards or self._find_what_script_lacks() is _WhatScriptLacks.OWN:
            with self.casting.block_without_casts():
                return original(tensors, *args, **kwargs)
        if self._stepping and self._stand_in.needs_scaler:
            self._count_or_refuse_pass_in_step()
        self._backwards += 1
        try:
            is_scaled = self._stand_in.needs_scaler and (
                self._has_arm_cast() or self._mode is _WhatScriptLacks.AUTOCAST
            )
            kwargs.update(zip(BACKWARD, args, strict=False))
            given = kwargs.get("grad_tensors")
            loss = tensors if isinstance(tensors, Tensor) else tensors[0]
            if isinstance(tensors, Tensor) and tensors.numel() != 1 and isinstance(given, Tensor):
                with contextlib.nullcontext() if is_scaled else torch.no_grad():
                    loss = (tensors * given).sum()  # that a gradient of its own stands for
            scaled = None
            if is_scaled and (optimizers := self._optimizers.living_optimizers()):
                for optimizer in optimizers:
                    self._take_over_steps_of(optimizer)
                scaled = self.stages.scale_losses_of_pass(tensors, loss, kwargs)
            if scaled is None:
                self._record_unscaled_loss(loss)
                with self.casting.block_without_casts():
                    return original(tensors, **kwargs)
            self._is_scaled_pass = True
            with GRADIENT_READS.pause_notices_of_reads(), self.casting.block_without_casts():
                return original(scaled, **kwargs)
        finally:
            self._backwards -= 1
            self._is_scaled_pass = self._has_graph = False
            if self._stepping:  # the optimizer computes with what it has got
                self._close_casts()
            else:
                self._stand_in.forget_weight_casts()

    def _count_or_refuse_pass_in_step(self) -> None:
        """Count a pass in a step that was expected to have some, and refuse another one."""
        self._passes_in_step += 1
        if self._stand_in.script.in_step is None:
            raise UnsupportedCombination(
                message_with_script_line(
                    "a backward pass runs inside of the step of an optimizer whose step was taken for one by gradients "
                    f"alone, as its first one was, so that {self._arm} has not prepared for it. Let the first step "
                    "have one too, or pass a closure"
                )
            )

    def _give_hook_true_gradients(
        self, original: Any, owner: Any, hook: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Let a hook of the script get true gradients, and scale those that it returns."""

        @functools.wraps(hook)
        def hook_of_true(*values: Any) -> Any:
            types = [one.dtype for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]
            scale = self.stages.current_scale() if self._is_scaled_pass and types else 1.0
            if scale == 1.0:
                return hook(*values)
            # In fp32: fp16 may lack the true ones.
            result = hook(
                *pytree.tree_map(lambda one: one.float() / scale if isinstance(one, Tensor) else one, values)
            )
            return pytree.tree_map(
                lambda one: (one * scale).to(types[0]) if isinstance(one, Tensor) else one, result
            )

        return original(owner, hook_of_true, *args, **kwargs)

    def _note_loss_of_autograd_grad(self, original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the loss of a script that sets gradients itself; they are true ones.

        Under vmap a loss is that of each sample.
        """
        first = outputs if isinstance(outputs, Tensor) else next(iter(outputs), None)
        if not self._backwards and first is not None and first.numel() == 1:
            self._loss = tensor_inside_wrappers(first)
        return original(outputs, *args, **kwargs)

    def _record_unscaled_loss(self, loss: Tensor) -> None:
        """Record a loss that nothing scales; a closure that runs again for the same step has recorded its own."""
        if self._rows is None or self._repeats:
            return
        if self._rows.is_outside_scale_loss_blocks:
            self._rows.add_unscaled_backward(number_or_detached_tensor(loss))
        else:
            self._rows.add_backward(number_or_detached_tensor(loss), 0, (None, None), None, [], [])
            self._has_loss = True

    # The step.

    def _take_over_steps_of(self, optimizer: Any) -> None:
        """Let steps of an optimizer come here, also if others have replaced its `step` since."""
        step = optimizer.step
        if getattr(step, "_ampcompare_driver", None) is self:
            return
        function = getattr(step, "__func__", step)

        @functools.wraps(function)
        def step_by_arm(_self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._take_step(optimizer, step, args, kwargs)

        step_by_arm._ampcompare_driver = self  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step_by_arm, optimizer)

    def _take_step(self, optimizer: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a step of an optimizer: as it is written, with its passes scaled, or from gradients that the arm has."""
        if (
            run_inside := self.stages.function_that_step_has_to_call
        ) is not None and optimizer is self._stand_in.script.in_step:
            return run_inside()
        if self._stepping or self._find_what_script_lacks() is _WhatScriptLacks.OWN:
            return self._step_inside_of_other(optimizer, step, args, kwargs)
        has_arguments = any(one is not None for one in (*args, *kwargs.values()))
        may_evaluate = not _runs_closure_first(optimizer) and (
            has_arguments or self._may_evaluate_losses_without_closure(optimizer)
        )
        if not has_arguments and not may_evaluate:
            self._refuse_step_without_effect()
        if not self._stand_in.needs_scaler:
            result = self._step_as_written(optimizer, step, args, kwargs)
            self._refuse_step_without_effect()
            return result
        self._refuse_losses_inside_step(optimizer)
        self._copied = optimizer if self._stand_in.copies_in_steps else None
        count, closure = len(_closures_in_arguments(args, kwargs)), _find_closure(args, kwargs)
        if may_evaluate and (self._copied is None or count > 1 or (count and closure is None)):
            return self._step_with_scaled_passes(optimizer, step, args, kwargs)
        return self._run_closure_and_step_by_arm(
            optimizer, step, args, kwargs, keeps_closure=may_evaluate and has_arguments
        )

    def _step_inside_of_other(
        self, optimizer: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the step of an optimizer inside of that by the arm, or of a script that has mixed precision."""
        self.stages.is_applied = True
        if optimizer is self._copied and self._step_arguments is not None:
            (args, kwargs), self._step_arguments = self._step_arguments, None
            _arguments_with_wrapped_closures(_EvaluatedClosure.note_start_of_step, args, kwargs)
        return step(*args, **kwargs)

    def _refuse_losses_inside_step(self, optimizer: Any) -> None:
        """Refuse LBFGS under an arm whose weights or gradients are not those of the script within a step."""
        if isinstance(optimizer, torch.optim.LBFGS):
            kind = type(optimizer)
            name = "LBFGS" if kind is torch.optim.LBFGS else f"{kind.__name__}, a subclass of LBFGS,"
            why = "scales the loss" if self._arm.skips_overflows else "gives the model weights after a step"
            raise UnsupportedCombination.with_advice(
                message_with_script_line(
                    f"{name} runs its closure several times in one step, and {self._arm} {why}"
                ),
                "native:bf16",
                remedy="take another arm that scales no loss and has no master weights",
            )

    def _run_closure_and_step_by_arm(
        self, optimizer: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_closure: bool
    ) -> Any:
        """Run the closure of a step, if it has one, and let the arm step from its gradients; return the loss.

        Args:
            optimizer: that steps.
            step: its own.
            args: of the step.
            kwargs: of the step.
            keeps_closure: the step gets its arguments, with the loss where it calls its closure, as it may compute with
                them; otherwise a step has no closure left.
        """
        closure = _find_closure(args, kwargs)
        loss = evaluated = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._refuse_step_without_effect()
            evaluated = _EvaluatedClosure(optimizer, self._arm, loss)
        if keeps_closure:
            args, kwargs = _arguments_with_wrapped_closures(lambda _: evaluated, args, kwargs)
            self._step_arguments = args, kwargs
        else:
            args = tuple(one for one in args if one is not closure)
            kwargs = {name: one for name, one in kwargs.items() if one is not closure}
        with self._without_casts():
            self._stepping = True
            try:
                with self.casting.block_without_casts():
                    is_over = self.stages.step_or_skip_if_followed(
                        optimizer, kwargs if self._step_arguments is None else {}
                    )
            finally:
                self._stepping = False
                is_taken, self._step_arguments = self._step_arguments is None, None
            if not is_over:
                self._step_as_written(optimizer, step, args, kwargs)
            elif evaluated is not None and keeps_closure and is_taken:
                evaluated.refuse_step_without_call()
        return loss

    def _may_evaluate_losses_without_closure(self, optimizer: Any) -> bool:
        """Return whether a step without arguments may evaluate losses by itself: the first one shows it."""
        return self._evaluates.get(type(optimizer), True)

    def _step_with_scaled_passes(
        self, optimizer: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a step that may evaluate losses by itself as it is written, each of its passes scaled and unscaled."""
        step = self._stand_in.find_step_without_arm(optimizer, step)
        for one in self._optimizers.living_optimizers():  # an arm that has prepared it has replaced its step
            self._take_over_steps_of(one)
        has_arguments = bool(args or kwargs)
        args, kwargs = _arguments_with_wrapped_closures(self._make_closure_ending_casts, args, kwargs)
        passes = self._passes_in_step = 0

        def run() -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self.stages.set_losses_left_unrecorded(self._rows, False)

        with self._without_casts():
            self._stepping = True
            try:
                result = self.stages.step_evaluating_losses_itself(optimizer, run)
            finally:
                self._stepping = self._repeats = False
                passes = self._passes_in_step
        self._refuse_step_without_effect()
        if not has_arguments:
            self._evaluates[type(optimizer)] = bool(passes)
        if passes and self._arm.skips_overflows:
            self._note_that_step_copies_weights(optimizer)
        return result

    def _make_closure_ending_casts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let only the first pass of a closure in a step be recorded, and end its casts."""

        @functools.wraps(function)
        def closure(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                self._repeats = True
                self.stages.set_losses_left_unrecorded(self._rows, True)
                self._close_casts()

        return closure

    def _note_that_step_copies_weights(self, optimizer: Any) -> None:
        if self._rows is not None and type(optimizer) not in self._noted:
            self._rows.add_arm_departure_note(
                f"the step of {type(optimizer).__name__} evaluates losses by itself, so that {self._arm} copies "
                "weights and state before each step, to undo one that overflows; memory and time include that"
            )
        self._noted.add(type(optimizer))

    def _has_arm_cast(self) -> bool:
        """Return whether the arm has cast a forward pass, or casts all that the script computes at present."""
        return self._casting > 0 or self._block is not None

    def _refuse_step_without_effect(self) -> None:
        """Refuse a step after no forward pass that the arm casts: it would have no effect."""
        if self._mode is _WhatScriptLacks.PLAIN and self._casts and not self._has_arm_cast():
            raise UnsupportedCombination.with_advice(
                message_with_script_line(
                    f"the first step comes before any forward pass that {self._arm} could cast: no nn.Module was "
                    "called whose weights an optimizer has, and no autocast block was entered"
                ),
                "fp32",
                remedy="put the computation into the forward of a module",
            )

    def _step_as_written(
        self, optimizer: Any, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def follow(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def run(*given: Any, **named: Any) -> Any:
                result = function(*given, **named)
                self._refuse_step_without_effect()
                self._repeats = True
                return result

            return run

        self._stepping = True  # a step that an arm has replaced, or one around another, comes here again
        before = 0 if self._rows is None else self._rows.num_steps
        try:
            if _find_closure(args, kwargs) is None:
                with self.casting.block_without_casts():
                    result = step(*args, **kwargs)
            else:
                args, kwargs = _arguments_with_wrapped_closures(follow, args, kwargs)
                result = step(*args, **kwargs)
        finally:
            self._stepping = self._repeats = False
        if self._rows is not None:
            if not self._has_loss and self._loss is not None:
                self._record_unscaled_loss(self._loss.detach().mean())
            self._has_loss, self._loss = False, None
            if self._rows.num_steps == before:  # else noted with a scaled loss that reaches no weight
                self._rows.add_step(self._rows.optimizer_number_and_is_new(optimizer)[0], True)
        return result


def _find_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the closure that a step gets; None if it gets none."""
    return next((one for one in (*args, *kwargs.values()) if callable(one)), None)


def _closures_in_arguments(args: Any, kwargs: Any) -> list[Any]:
    """Return the closures among the arguments of a step, those in a dict of options too."""
    found: list[Any] = []
    _arguments_with_wrapped_closures(found.append, args, kwargs)
    return found


class _EvaluatedClosure:
    """The closure of a step on copies of the weights, which has run before: the step gets its loss.

    That is the same where the step calls it once, before it has moved a weight or touched a gradient.
    """

    def __init__(self, optimizer: Any, arm: Arm, loss: Any) -> None:
        self._optimizer = optimizer
        self._arm = arm
        self._loss = loss
        self._is_called = False
        self._at_start: tuple[Any, Any] = (None, None)

    def note_start_of_step(self) -> None:
        """Note what the step starts from."""
        self._at_start = self._weight_and_gradient_bit_sums()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights, gradients = self._weight_and_gradient_bit_sums()
        if self._is_called or args or kwargs or weights != self._at_start[0]:
            raise losses_inside_step_refusal(self._optimizer, self._arm)
        if gradients != self._at_start[1]:
            raise self._refusal_error("changes gradients before it calls its closure")
        self._is_called = True
        return self._loss

    def refuse_step_without_call(self) -> None:
        """Refuse a step that has not called it, where it would have computed nothing."""
        if not self._is_called:
            raise self._refusal_error("does not call its closure")

    def _refusal_error(self, what: str) -> UnsupportedCombination:
        return UnsupportedCombination(
            message_with_script_line(
                f"the step of {type(self._optimizer).__name__} {what}, and {self._arm}, which steps fp32 copies of the "
                "weights, runs that before the step"
            )
        )

    def _weight_and_gradient_bit_sums(self) -> tuple[list[int], list[int | None]]:
        params = owned_params(self._optimizer)
        grads = [param.grad for param in params]
        dense = [None if grad is None or grad.is_sparse else int(bit_sum(grad)) for grad in grads]
        return [int(bit_sum(param)) for param in params], dense


def _arguments_with_wrapped_closures(follow: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    """Return the arguments of a step with its closures followed, those in a dict of options too."""
    kinds = (Tensor, nn.Module, torch.optim.Optimizer, type)
    return pytree.tree_map(
        lambda one: follow(one) if callable(one) and not isinstance(one, kinds) else one, (args, kwargs)
    )


def _runs_closure_first(optimizer: Any) -> bool:
    """Return whether a step runs its closure before anything else, as those of torch and Apex do, except LBFGS's."""
    of_class = inspect.unwrap(type(optimizer).step)
    of_object = inspect.unwrap(getattr(optimizer.step, "__func__", optimizer.step))
    return str(of_class.__module__).startswith(GRADIENTS_ONLY) and str(of_object.__module__).startswith(
        (*GRADIENTS_ONLY, *TRAINERS)
    )


def _may_user_code_use_amp() -> bool:
    """Return whether a module of the user names it by now, or the script itself cannot be read."""
    modules = [one for one in tuple(sys.modules.values()) if isinstance(one, types.ModuleType)]
    files = {str(vars(module).get("__file__")) for module in modules}
    main = str(vars(sys.modules["__main__"]).get("__file__"))
    for file in {
        main,
        *(
            file
            for file in files
            if file.endswith(".py") and is_users_or_installed_file(file) and not is_installed_file(file)
        ),
    }:
        try:
            text = Path(file).read_text("utf-8", "replace")
        except OSError:  # of a module that is no file, such as torch.classes
            text = "amp" if file == main else ""
        if MIXED_PRECISION.search(text):
            return True
    return False


def _has_fp32_tensor(values: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype is torch.float32 for one in pytree.tree_leaves(values))
