"""An arm with 16-bit weights behind `torch.autocast` and `GradScaler`: Apex's O2, O3 and O5, and `half`.

The models are those that `_SearchForTrainedModels` finds; they are prepared before their first call, and models and
optimizers that the script makes later, as for another fold or phase, before theirs. From then on the weights have the
arm's types everywhere, as after `amp.initialize`, and autocast blocks do nothing. Steps go through the scaler:

| the script calls | the arm does |
|---|---|
| `scaler.scale` | its loss scale, if it has one |
| `scaler.unscale_` | gradients are unscaled, into master weights where it has them; `param.grad` shows those |
| `scaler.step` | a step, or a skip after an overflow; the model gets the weights |
| `scaler.update` | the loss scale moves |

What the script writes into weights between two steps, the next step writes into their masters. What it writes into
masters, by the groups or the methods of an optimizer, the model has at its next use: a call, or a read of its
parameters or state.

From `scaler.unscale_` on `param.grad` of a 16-bit weight is the gradient of its master: clipping it, reading it and
replacing it act on what is stepped. Until then that of a master is the scaled gradient of its weight.

A wrapper for several processes records the types of weights when it is made, so it is made again, in place and with
the arguments of the script.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.backends.apex_levels import level_with_overrides
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError, PreparationError, ScalingError, UnsupportedCombination
from ampcompare.base.location import message_with_script_line
from ampcompare.base.patches import GRADIENT_READS, PatchPoints, Subscriptions, without_subscribers
from ampcompare.base.tensors.bits import bit_sum
from ampcompare.base.tensors.data_access import DataAccessFollower
from ampcompare.base.tensors.lists import copy_tensors_by_dtype
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.base.tensors.tree import tensors_in_value, widen_halves
from ampcompare.script.torch_amp.autocast_and_scaler import (
    TorchAmpByAutocast,
    missing_autocast_error,
    missing_scale_error,
    scaled_step_error,
)
from ampcompare.script.torch_amp.cast_types import WeightTypeRestorer
from ampcompare.script.torch_amp.gradient_mirror import GradientMirror, Pairs
from ampcompare.script.torch_amp.keep_fp32 import WRAPPERS, model_inside_wrappers
from ampcompare.script.torch_amp.lifted_weights import all_modules_of_process, allow_averages_across_types
from ampcompare.script.torch_amp.parallel_wrappers import ParallelWrappers
from ampcompare.script.torch_amp.protocol import losses_inside_step_refusal
from ampcompare.script.torch_amp.script_scaler import ScriptScaler
from ampcompare.script.torch_amp.widening_modules import WideningModulesWatch
from ampcompare.training.precision.base import make_precision, owned_params
from ampcompare.training.precision.half import Half

TENSORS = ("parameters", "buffers")
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they hold models, and are never called


class ApexLevelStepping:
    """O2, O3 or O5 of ampcompare's engine.

    Attributes:
        steps_copies: optimizers step other tensors than the weights of models.
        keeps_masters: these tensors are there between steps.
        needs_scaler: steps go through a GradScaler.
        takes_closure: the step that an optimizer has once it is prepared takes a closure.
        steps_again: that of `TorchAmpStandIn`.
    """

    takes_closure = False
    steps_again = True

    def __init__(self, arm: Arm, device: str) -> None:
        self._level = level_with_overrides(arm.options)
        self._precision = make_precision(
            Arm.make("apex", **{**arm.options, "engine": "compat"}), device=device
        )
        self.steps_copies = self.keeps_masters = bool(self._level.master_weights)
        self.needs_scaler = self.steps_copies or self._level.loss_scale != 1.0

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Cast models, and prepare optimizers, in place."""
        if self._level.master_weights:
            for optimizer in optimizers:
                if not getattr(optimizer, "materialize_master_grads", True):
                    raise PreparationError(
                        "FusedSGD with materialize_master_grads=False has no fp32 gradients that a script for "
                        "torch.amp could clip; leave that argument out"
                    )
        frontend = importlib.import_module("ampcompare.apex.amp.frontend")
        with without_subscribers(frontend, "_initialize"):  # which see the calls of the script
            self._precision.prepare(models, optimizers)

    def prepare_for_backward(self, optimizers: Sequence[Any]) -> None:
        """Prepare for the next backward pass."""
        for optimizer in optimizers:  # masters that are made after a backward pass would drop its gradients
            if optimizer._amp_stash.lazy_init_called:
                continue
            # A GAN freezes one network while it trains the other: those weights need masters too.
            frozen = [param for param in owned_params(optimizer) if not param.requires_grad]
            for param in frozen:
                param.requires_grad = True
            optimizer._amp_lazy_init()
            for param in frozen:
                param.requires_grad = False

    def unscale_and_find_overflow(self, optimizer: Any, scaler: LossScaler) -> bool:
        """Give what the optimizer steps true gradients, and return whether one overflowed."""
        scaler.clear_overflow_state()
        optimizer._post_amp_backward(scaler)
        return scaler.dynamic and scaler._read_overflow_flags()

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        """Return each weight of the model in whose place the optimizer has another tensor at present, with that."""
        stash = optimizer._amp_stash
        if not self._level.master_weights or not stash.lazy_init_called:
            return []
        return list(zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True))

    def step_or_skip_unscaled(self, optimizer: Any, *, are_gradients_finite: bool) -> Any:
        """Step, and give the model the weights, or end an update without a step."""
        if not are_gradients_finite and self._level.master_weights:
            optimizer._amp_stash.release_buffers()
        return optimizer.step() if are_gradients_finite else None


class HalfArmStepping:
    """An arm with `Half`; attributes and methods are those of `ApexLevelStepping`."""

    takes_closure = True
    steps_again = False  # only a step of the scaler moves masters on

    def __init__(self, arm: Arm, device: str) -> None:
        self._precision = cast(Half, make_precision(arm, device=device))
        self.steps_copies, self.keeps_masters = self._precision.steps_copies, self._precision.master_weights
        self.needs_scaler = self.steps_copies or bool(self._precision.loss_scales())
        self.prepare, self.prepare_for_backward = self._precision.prepare, self._precision.add_up_gradients
        self.masters = self._precision.masters
        self.step_or_skip_unscaled = self._precision.step_or_skip_unscaled

    def unscale_and_find_overflow(self, optimizer: Any, scaler: LossScaler) -> bool:
        if self._precision.loss_scales():
            self._precision.load_state_dict({"loss_scale": scaler.loss_scale()})
        self._precision.unscale(optimizer)
        return bool(self._precision.has_overflow(optimizer))


def _objects_still_referenced(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [one for reference in references if (one := reference()) is not None]


def _as_fp32_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.dtype in HALF_DTYPES else tensor


class TorchAmpByHalfWeights(TorchAmpByAutocast):
    """The names of `torch.amp` under an arm that casts the weights of models: `half`, or a level of `apex`."""

    casts_weights = True

    def __init__(
        self, arm: Arm, scaling: ApexLevelStepping | HalfArmStepping, *args: Any, wrappers: ParallelWrappers
    ) -> None:
        super().__init__(arm, *args)
        self._casts = False
        self.widening = WideningModulesWatch()
        self._found = _SearchForTrainedModels(
            str(arm),
            self._prepare_found_models,
            lambda: self.script.is_initialized or self.trains_through_apex(),
            wrappers,
        )
        self._scaling = scaling
        self.needs_scaler, self.steps_copies = scaling.needs_scaler, scaling.steps_copies
        self.steps_again = scaling.steps_again
        self._keeps_masters = scaling.keeps_masters
        self.copies_in_steps = self.steps_copies and not self._keeps_masters
        self._scaler = ScriptScaler(arm, self, runs_closures=not scaling.needs_scaler)
        self._gradients = GradientMirror()
        self._types = WeightTypeRestorer()
        self._stepping: Any = None
        self._is_prepared = False
        self._has_followed = False  # writes of weights
        # by steps: bit sums
        self._given_weights: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        # of masters, then
        self._versions: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._data = DataAccessFollower()  # to masters

    def install(self, events: Subscriptions) -> None:
        """Replace what both classes do."""
        events.wrap(*PatchPoints.MAKE_AUTOCAST, self._make_autocast_of_arm)
        self._scaler.install(events)
        events.wrap(*PatchPoints.BACKWARD, self._backward)
        events.wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        events.wrap(swa_utils.AveragedModel, "update_parameters", self._average_in_type_of_average)
        allow_averages_across_types(events)
        self._found.install(events)
        self._types.install(events)
        self.widening.follow(events)
        for name in ("state_dict", "named_parameters"):
            events.wrap(nn.Module, name, self._call_with_written_masters)
        events.call_at_end(self._gradients.end)
        events.call_at_end(self._data.end)
        self._follow_optimizer_steps(events)

    def find_casts_off_factory(self) -> None:
        """Return None: `_prepare` leaves the weights of such modules in fp32, and casts what goes in and out."""
        return

    @property
    def _living_optimizers(self) -> list[Any]:
        return _objects_still_referenced(self._found.optimizers)

    def trains_through_apex(self) -> bool:
        """Return whether the script has prepared its models by `apex.amp`."""
        return not self._is_prepared and self.script.calls_apex()

    def casts_now(self) -> bool:
        """Return whether the weights are cast."""
        return self._is_prepared or self.script.calls_apex()

    def note_arm_acts(self) -> None:
        self.script.acts = True

    def initialize(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        super().initialize(models, optimizers)
        self._found.add_found_models(models, optimizers)

    def restore_model_gradients(self, optimizer: Any) -> None:
        with GRADIENT_READS.pause_notices_of_reads():
            self._gradients.make_shown_gradients_own(self._weights_and_masters_of(optimizer))

    def forget_unscaled_gradients(self, scaler: Any, optimizer: Any) -> None:
        self._scaling.step_or_skip_unscaled(optimizer, are_gradients_finite=False)
        super().forget_unscaled_gradients(scaler, optimizer)

    def _average_in_type_of_average(self, original: Any, average: Any, model: nn.Module) -> None:
        """Average in the type of the average, which was copied before the weights were cast."""
        if self._is_prepared:
            tensors = {
                name: functools.partial(map, _as_fp32_tensor, getattr(model, name)()) for name in TENSORS
            }
            model = types.SimpleNamespace(**tensors)  # type: ignore[assignment]
        original(average, model)

    def _prepare_found_models(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        self._refuse_shared_weights(optimizers)
        # 16 bits are those of the script, as of frozen weights, or of a copy of what the arm has cast.
        for tensor in (one for model in models for one in (*model.parameters(), *model.buffers())):
            tensor.data = _as_fp32_tensor(tensor)
        try:
            with GRADIENT_READS.pause_notices_of_reads():  # those of earlier steps
                self._scaling.prepare(models, optimizers)
        except AmpCompareError as error:
            raise PreparationError(message_with_script_line(str(error))) from None
        self._is_prepared = True
        self._types.note_types_of_models(models)
        for optimizer in optimizers:
            optimizer.zero_grad = types.MethodType(
                functools.wraps(optimizer.zero_grad)(
                    functools.partial(TorchAmpByHalfWeights._clear_gradients, self)
                ),
                optimizer,
            )
            self._note_current_weights(optimizer, self._scaling.masters(optimizer))

    def _refuse_shared_weights(self, optimizers: list[Any]) -> None:
        """Refuse weights that two optimizers hold, as that of SAM and the one inside of it: each would have its own."""
        seen: set[int] = set()
        for optimizer in optimizers if self._scaling.needs_scaler else ():
            own = set(map(id, owned_params(optimizer)))
            if own & seen:
                raise PreparationError.with_advice(
                    message_with_script_line(
                        f"two optimizers hold the same weights, and {self._arm} "
                        f"{self._text_on_what_arm_adds_per_optimizer}"
                    ),
                    "native:bf16",
                    remedy="take another arm that keeps the script's weights",
                )
            seen |= own

    @property
    def _text_on_what_arm_adds_per_optimizer(self) -> str:
        """What the arm does for each optimizer by itself."""
        if self._keeps_masters:
            return "gives each its own master weights"
        if self.steps_copies:
            return "lets each step fp32 copies of its own"
        return "unscales the gradients of each"

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        return (
            self._scaling.masters(optimizer)
            if any(optimizer is one for one in self._living_optimizers)
            else []
        )

    def find_input_type(self, module: nn.Module) -> torch.dtype | None:
        """Return the type of the inputs of parts of a model that the script calls without it; None for others.

        A model is prepared when the script first calls it.
        """
        self._found.find_and_add_model_of(module)
        self._copy_written_masters_to_weights()
        # of bf16 weights, where autocast fits what a part gets
        if not self._is_prepared or self._dtype is not None:
            return None
        models = _objects_still_referenced(self._found.models)
        if any(part is model for part in module.modules() for model in models):
            return None
        return next(
            (
                param.dtype
                for param in module.parameters()
                if param.dtype in HALF_DTYPES and self._found.is_of_found_model(param)
            ),
            None,
        )

    def fitting_arguments_of_weightless_module(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Widen 16-bit tensors next to fp32 ones: the script passes weights of a model to a distance, say."""
        types = {tensor.dtype for tensor in tensors_in_value((args, kwargs))} if self._is_prepared else set()
        is_mixed = torch.float32 in types and not types.isdisjoint(HALF_DTYPES)
        if is_mixed:
            args, kwargs = widen_halves((args, kwargs))
        return args, kwargs

    # What the scalers do.

    def note_scaler_made(self, scaler: Any, enabled: bool) -> None:
        self._note_made_by_script(enabled, scaler)

    def leaves_scaler_alone(self) -> bool:
        return self.trains_through_apex()

    def prepare_scaled_pass(self, *, unscaled: bool) -> None:
        self._scales = True
        if not self._is_prepared:
            raise PreparationError(
                message_with_script_line(
                    f"scaler.scale before the script has called a model whose weights an optimizer has, so {self._arm} "
                    "has none to cast; make the optimizer before the forward pass"
                )
            )
        if unscaled:
            raise ScalingError(
                message_with_script_line(
                    f"a loss is scaled between scaler.unscale_ and scaler.step; {self._arm} needs all losses before"
                )
            )
        for optimizer in self._living_optimizers:
            self._gradients.show_own_gradients(master for _, master in self.masters(optimizer))
        self._scaling.prepare_for_backward(self._living_optimizers)
        for optimizer in self._living_optimizers:
            self._gradients.let_masters_show_weight_gradients(self.masters(optimizer))
            if optimizer not in self._given_weights:  # Apex makes masters here
                self._note_current_weights(optimizer, self.masters(optimizer))

    def check_can_unscale(self, optimizer: Any) -> None:
        if not self._casts and not self.script.steps_on_behalf:
            raise self._missing_autocast_error()
        if all(optimizer is not one for one in self._living_optimizers):
            raise PreparationError(
                message_with_script_line(
                    f"the script has called no model with weights of this optimizer since it made it, so {self._arm} "
                    "has not prepared it"
                )
            )
        if self._gradients.does_any_show_master_gradient(self._weights_and_masters_of(optimizer)):
            raise ScalingError(
                message_with_script_line(
                    "the gradients of the last step were not cleared, and new ones were added; call zero_grad first"
                )
            )

    def unscale_and_find_overflow(self, optimizer: Any, scaler: LossScaler) -> bool:
        self._gradients.show_own_gradients(self._weights_and_masters_of(optimizer))
        overflow = self._scaling.unscale_and_find_overflow(optimizer, scaler)
        pairs = self.masters(optimizer)
        self._gradients.let_weights_show_master_gradients(pairs)
        if optimizer not in self._given_weights:
            self._note_current_weights(optimizer, pairs)
        return overflow

    def _weights_and_masters_of(self, optimizer: Any) -> list[Tensor]:
        """Return the weights that an optimizer steps, and those of the model that it steps others in the place of."""
        return [*owned_params(optimizer), *(half for half, _ in self.masters(optimizer))]

    def step_with_true_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._stepping = optimizer
        try:
            if optimizer is self.script.in_step:
                return self._step_with_own_losses(optimizer)
            with self._masters_with_own_gradients(optimizer):
                return self._scaling.step_or_skip_unscaled(optimizer, are_gradients_finite=True)
        finally:
            self._stepping = None
            self._note_current_weights(optimizer, self.masters(optimizer))

    def _step_with_own_losses(self, optimizer: Any) -> Any:
        """Step an optimizer that evaluates losses by itself, and give the model what it has written into masters."""
        try:
            return optimizer.step()
        finally:
            self._copy_written_masters_to_weights()
            with self._masters_with_own_gradients(optimizer):
                self._scaling.step_or_skip_unscaled(optimizer, are_gradients_finite=False)

    def find_step_without_arm(self, optimizer: Any, step: Any) -> Any:
        if self.copies_in_steps:
            raise losses_inside_step_refusal(optimizer, self._arm)
        # Before the weights are kept, so that nothing that the arm makes is undone.
        self._found.find_and_add_all_models()
        if any(optimizer is one for one in self._living_optimizers):
            self._scaling.prepare_for_backward([optimizer])
        self._copy_written_masters_to_weights()
        if not self._scaling.takes_closure:
            return types.MethodType(type(optimizer).step, optimizer)
        return step

    def _note_current_weights(self, optimizer: Any, pairs: Pairs) -> None:
        """Note what weights and masters are now, when the model has those of the masters."""
        self._given_weights.pop(optimizer, None)
        self._versions.pop(optimizer, None)
        if pairs:
            masters = [master for _, master in pairs]
            self._given_weights[optimizer] = _bit_sums_of_weights(pairs)
            if self._keeps_masters:
                self._versions[optimizer] = [master._version for master in masters]
                self._data.follow_tensors(masters)
                self._data.was_accessed_since_last_call(masters)

    def _call_with_written_masters(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._copy_written_masters_to_weights()
        return original(module, *args, **kwargs)

    def _copy_written_masters_to_weights(self) -> None:
        """Give the model what was written into masters since it last had their weights, outside of a step or inside."""
        for optimizer in self._living_optimizers:
            versions = self._versions.get(optimizer)
            is_inside = optimizer is self.script.in_step
            if versions is None or (self._stepping is optimizer and not is_inside):
                continue
            pairs = self.masters(optimizer)
            masters = [master for _, master in pairs]
            # A step may write in ways that leave no trace, as by operations on lists where fp16 is emulated.
            if (
                self._data.was_accessed_since_last_call(masters)
                or is_inside
                or versions != [master._version for master in masters]
            ):
                self._copy_written_weights_to_masters(optimizer)
                # A graph that the script has kept for another pass of the step ends where its weights are written.
                changed = _pairs_with_differing_values(pairs) if is_inside else pairs
                with torch.no_grad():
                    copy_tensors_by_dtype(*([one[at] for one in changed] for at in (0, 1)))
                self._note_current_weights(optimizer, pairs)

    def end_update_without_step(self, optimizer: Any) -> None:
        with self._masters_with_own_gradients(optimizer):
            self._scaling.step_or_skip_unscaled(optimizer, are_gradients_finite=False)
        optimizer._opt_called = True  # the script called step: schedulers warn otherwise

    @contextlib.contextmanager
    def _masters_with_own_gradients(self, optimizer: Any) -> Iterator[None]:
        """Let masters have gradients of their own in a block, then none; the model shows those until it is cleared."""
        self._gradients.show_own_gradients(master for _, master in self.masters(optimizer))
        try:
            yield
        finally:
            for _, master in self.masters(optimizer):
                master.grad = None
            self._gradients.let_masters_show_weight_gradients(self.masters(optimizer))

    @torch.no_grad()
    def _copy_written_weights_to_masters(self, optimizer: Any) -> None:
        """Give masters what the script has written into weights since the last step, as by clamping or loading them.

        What it has left alone keeps the bits that 16-bit weights lack; what it has written into masters stays.
        """
        pairs = self.masters(optimizer)
        given = self._given_weights.get(optimizer)
        if pairs and given is not None and len(given) == len(pairs):
            is_written = (_bit_sums_of_weights(pairs) != given).tolist()
            pairs = [pair for pair, written in zip(pairs, is_written, strict=True) if written]
        for param, master in pairs:
            written = param.view(torch.int16) != master.to(param.dtype).view(torch.int16)
            if not written.any():
                continue
            master.copy_(torch.where(written, param.float(), master))
            if self._rows is not None and not self._has_followed:
                self._rows.add_arm_departure_note(
                    f"the script writes weights between steps, and the master weights of {self._arm} take what it "
                    "writes, rounded to 16 bits"
                )
            self._has_followed = True

    def _zero_grad(self, original: Any, optimizer: Any, set_to_none: bool = True) -> None:
        """Clear by a method that the script bound before, or that of a copy with the same groups, as Fabric's."""
        for one in self._living_optimizers:
            if one.param_groups is optimizer.param_groups:
                self._clear_gradients(one, set_to_none)
        original(optimizer, set_to_none)

    @GRADIENT_READS.pause_notices_of_reads()
    def _clear_gradients(self, optimizer: Any, set_to_none: bool = True) -> None:
        """Clear the gradients of an optimizer, those of the model and of master weights."""
        weights = self._weights_and_masters_of(optimizer)
        # read while those of masters are shown
        lacking = {id(param) for param in weights if param.grad is None}
        self._gradients.show_own_gradients(weights)
        for param in weights:
            param.grad = None if set_to_none or id(param) in lacking else torch.zeros_like(param)
        self._gradients.let_masters_show_weight_gradients(self.masters(optimizer))

    def _missing_autocast_error(self) -> AmpCompareError:
        if self.script.why_off is not None:
            return UnsupportedCombination(self.script.why_off)
        return missing_autocast_error(self._arm)

    def _before_step(self, optimizer: Any, *_arguments: Any) -> None:
        self._types.restore_types()
        if optimizer is self._stepping:
            self._copy_written_weights_to_masters(optimizer)
            return
        if self.trains_through_apex() or not self._is_prepared:
            self.script.refuse_step_switched_off()
            return
        if all(optimizer is not one for one in self._living_optimizers):
            return
        if not self.script.steps_on_behalf and not self._casts:
            raise self._missing_autocast_error()
        if not self.script.steps_on_behalf and self._scaling.needs_scaler:
            raise scaled_step_error(self._arm) if self._scaler.scales else missing_scale_error(self._arm)
        self._copy_written_weights_to_masters(optimizer)
        self._gradients.show_own_gradients(
            master for _, master in self.masters(optimizer)
        )  # a second step has none, as in Apex

    def _after_step(self, optimizer: Any, *_arguments: Any) -> None:
        super()._after_step(optimizer)
        if optimizer is not self._stepping:
            self._gradients.let_masters_show_weight_gradients(self.masters(optimizer))


class _SearchForTrainedModels:
    """Finds models and optimizers when the script first calls a module whose weights a new optimizer holds.

    That module is a model, or the whole is that it is a part of, where one optimizer has weights of both. Weights of
    optimizers that it lacks belong to others, which the script may call later: to the largest modules that lack it.

    Args:
        found: gets models and optimizers before the module runs; no models for an optimizer of earlier ones.
        is_over: returns whether the script has named its models by itself.
    """

    def __init__(
        self,
        name: str,
        found: Callable[[list[nn.Module], list[Any]], None],
        is_over: Callable[[], bool],
        wrappers: ParallelWrappers,
    ) -> None:
        self._name = name
        self._found = found
        self._is_over = is_over
        self.models: list[weakref.ref[nn.Module]] = []
        self.optimizers: list[weakref.ref[Any]] = []
        self._waiting: list[weakref.ref[Any]] = []  # optimizers that were not found yet
        self._cast_weights: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by id
        self._is_done = False
        self._wrappers = wrappers

    def install(self, events: Subscriptions) -> None:
        """Follow the optimizers from now on."""
        events.wrap(*PatchPoints.MAKE_OPTIMIZER, self._note_optimizer_made)

    def _note_optimizer_made(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._waiting.append(weakref.ref(optimizer))
        self._is_done = False

    def is_of_found_model(self, param: Tensor) -> bool:
        """Return whether a parameter belongs to a model that was found."""
        return self._cast_weights.get(id(param)) is param

    def find_and_add_model_of(self, module: nn.Module) -> None:
        """Look at a module that the script calls, before it is called."""
        if self._is_done:
            return
        if self._is_over():
            self._is_done = True
            return
        held = {
            id(param)
            for optimizer in _objects_still_referenced(self._waiting)
            for param in owned_params(optimizer)
        }
        if not held or not (torch.is_grad_enabled() or self._wrappers.is_only_rank()):
            return  # a wrapper is made again by all ranks, and an evaluation may run on one
        model = model_inside_wrappers(module)
        if not held.isdisjoint(map(id, model.parameters())):
            self._add_models_and_optimizers(model, held)

    def find_and_add_all_models(self) -> None:
        """Look for the models of new optimizers, before the step of one calls them."""
        held = {
            id(param)
            for optimizer in _objects_still_referenced(self._waiting)
            for param in owned_params(optimizer)
        }
        if held and not self._is_done and not self._is_over():
            self._add_models_and_optimizers(None, held)

    def _add_models_and_optimizers(self, model: nn.Module | None, held: set[int]) -> None:
        self._is_done = True
        gc.collect()  # those that the script has replaced by others
        optimizers = _objects_still_referenced(self._waiting)
        models = self._uncast_models_of(model, held, optimizers)
        self._wrappers.refuse_communication_hooks(models, self._name)
        self.add_found_models(models, optimizers)
        self._waiting.clear()
        self._wrappers.make_wrappers_again(models)

    def add_found_models(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        """Call `found`, and know these models from now on."""
        self._found(models, optimizers)
        self.models += map(weakref.ref, models)
        self.optimizers += map(weakref.ref, optimizers)
        self._cast_weights.update({id(param): param for model in models for param in model.parameters()})

    def _uncast_models_of(
        self, model: nn.Module | None, held: set[int], optimizers: list[Any]
    ) -> list[nn.Module]:
        """Return the models that are not cast yet and have weights of `held`, given as ids; first the one called."""
        # a model may have got other weights since, such as those of LoRA
        cast = set(self._cast_weights.keys())
        if held <= cast:
            return []
        tree = _ModuleGraph()
        models: list[nn.Module] = []
        if model is not None and not (held - cast).isdisjoint(map(id, model.parameters())):
            models.append(_outermost_enclosing_model_sharing_optimizer(model, optimizers, tree))
        models += tree.largest_modules_with_rest_of(models, held - cast)
        for one in models:
            if tree.is_sharded(one):
                raise PreparationError(
                    message_with_script_line(
                        f"the weights of {type(one).__name__} are sharded, so {self._name} cannot cast them; use an "
                        "arm that keeps fp32 weights"
                    )
                )
            parts = {id(part) for part in one.modules() if part is not one}
            # which would give it outputs in fp32
            if not parts.isdisjoint(map(id, _objects_still_referenced(self.models))):
                raise PreparationError(
                    message_with_script_line(
                        f"an optimizer that was made after the first forward pass has weights of {type(one).__name__} "
                        f"outside of a part of it that {self._name} has cast before; make it before that pass"
                    )
                )
        return models


def _outermost_enclosing_model_sharing_optimizer(
    model: nn.Module, optimizers: Sequence[Any], tree: _ModuleGraph
) -> nn.Module:
    """Return the module that a model is a part of, as long as an optimizer has weights of both; else the model."""
    parent = tree.find_parent_of(model)
    if parent is None:
        return model
    own = set(map(id, model.parameters()))
    around = set(map(id, parent.parameters())) - own
    for optimizer in optimizers:
        held = set(map(id, owned_params(optimizer)))
        if held & own and held & around:
            return _outermost_enclosing_model_sharing_optimizer(parent, optimizers, tree)
    return model


class _ModuleGraph:
    """All modules of this process, and which holds which."""

    def __init__(self) -> None:
        self._modules = all_modules_of_process()
        self._parents: dict[int, list[nn.Module]] = {}
        for module in self._modules:
            for child in module._modules.values():
                if child is not None:
                    self._parents.setdefault(id(child), []).append(module)

    def largest_modules_with_rest_of(
        self, models: Sequence[nn.Module], held_ids: Iterable[int]
    ) -> list[nn.Module]:
        """Return the largest modules without any of `models` that have further tensors of `held_ids`, given as ids."""
        missing = set(held_ids) - {id(param) for model in models for param in model.parameters()}
        found: list[nn.Module] = []
        if not missing:
            return found
        sizes = {id(one): [id(part) for part in one.modules()] for one in self._modules}
        for one in sorted(self._modules, key=lambda each: -len(sizes[id(each)])):
            if _is_container_or_wrapper(one) or any(id(model) in sizes[id(one)] for model in models):
                continue
            own = set(map(id, one.parameters()))
            if own & missing:
                found.append(one)
                missing -= own
        return found

    def is_sharded(self, model: nn.Module) -> bool:
        """Return whether FSDP has sharded the weights of a model, in either of its forms."""
        around = [*self._parents.get(id(model), []), *model.modules()]
        is_wrapped = any(type(one).__name__ == "FullyShardedDataParallel" for one in around)
        return is_wrapped or any(type(param).__name__ == "DTensor" for param in model.parameters())

    def find_parent_of(self, model: nn.Module) -> nn.Module | None:
        """Return a module that holds a model as its part, wrappers and containers left out; None if there is none."""
        for one in self._parents.get(id(model), []):
            if not _is_container_or_wrapper(one):
                return one
            if (above := self.find_parent_of(one)) is not None:
                return above
        return None


def _is_container_or_wrapper(module: nn.Module) -> bool:
    """Return whether a module only holds or wraps models."""
    return type(module).__name__ in WRAPPERS or isinstance(module, CONTAINERS)


@torch.no_grad()
def _pairs_with_differing_values(pairs: Pairs) -> Pairs:
    """Return the pairs whose master has another value than the weight, rounded to its type."""
    if not pairs:
        return pairs
    apart = [
        (param.view(torch.int16) != master.to(param.dtype).view(torch.int16)).any() for param, master in pairs
    ]
    return [pair for pair, is_apart in zip(pairs, torch.stack(apart).tolist(), strict=True) if is_apart]


def _bit_sums_of_weights(pairs: Pairs) -> Tensor:
    """Return the sum of the bits of each 16-bit weight, as whole numbers."""
    return torch.stack([bit_sum(param).to(pairs[0][0].device) for param, _ in pairs])
