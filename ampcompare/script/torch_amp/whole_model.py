"""An arm with 16-bit weights behind `torch.autocast` and `GradScaler`: Apex's O2, O3 and O5, and `half`.

The models are those that `FoundModels` finds; they are prepared before their first call. From then on the weights have
the arm's types everywhere, as after `amp.initialize`, and autocast blocks do nothing. Steps go through the scaler:

| the script calls | the arm does |
|---|---|
| `scaler.scale` | its loss scale, if it has one |
| `scaler.unscale_` | gradients are unscaled, into master weights where it has them; `param.grad` shows those |
| `scaler.step` | a step, or a skip after an overflow; the model gets the weights |
| `scaler.update` | the loss scale moves |
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError, PreparationError, ScalingError, UnsupportedCombination
from ampcompare.guards.events import GRADIENT_READS, Points, Subscriptions
from ampcompare.precision.base import owned_params
from ampcompare.script.apex_amp.session import here
from ampcompare.script.keep_fp32 import bare_model
from ampcompare.script.recorded.pairing import HashedWeights
from ampcompare.script.torch_amp.autocast_and_scaler import (
    TorchAmp,
    not_scaled,
    refuse_closure,
    scaler_settings,
    unscaled,
    without_autocast,
)
from ampcompare.script.torch_amp.found_models import FoundModels
from ampcompare.script.torch_amp.loss_scaling import LossScaling, Scale, make_loss_scaling
from ampcompare.script.torch_amp.master_gradients import MasterGradients

__all__ = ["WholeModel"]

HALF = (torch.float16, torch.bfloat16)
METHODS = ("scale", "unscale_", "step", "update", "get_scale", "state_dict", "load_state_dict")


@dataclasses.dataclass
class _Window:
    """What one GradScaler does until its next update.

    Attributes:
        scale: its own; it lasts.
        scaled: whether it has scaled a loss.
        overflows: of the optimizers whose gradients are unscaled, by id.
        stepped: the ids of those that have stepped or skipped.
    """

    scale: Scale
    scaled: bool = False
    overflows: dict[int, bool] = dataclasses.field(default_factory=dict)
    stepped: set[int] = dataclasses.field(default_factory=set)


class _InFp32:
    """The tensors of a model, 16-bit ones as fp32."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[Tensor]:
        """Yield the weights."""
        return map(_widened, self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers."""
        return map(_widened, self._model.buffers())


def _widened(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.dtype in HALF else tensor


class WholeModel(TorchAmp):
    """The names of `torch.amp` under an arm that casts the weights of models.

    Args: as for `TorchAmp`; the arm is of the backend half, or of apex at a level that casts weights.
    """

    def __init__(self, arm: Arm, *args: Any, **kwargs: Any) -> None:
        super().__init__(arm, *args, **kwargs)
        self._casts = False
        self._found = FoundModels(str(arm), self._prepare, self.is_by_apex)
        self._scaling: LossScaling = make_loss_scaling(arm, "cuda" if torch.cuda.is_available() else "cpu")
        self._gradients = MasterGradients()
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._first: dict[int, HashedWeights] = {}  # the weights of each optimizer before they are cast
        self._windows: weakref.WeakKeyDictionary[Any, _Window] = weakref.WeakKeyDictionary()
        self._stepping: Any = None
        self._is_prepared = False

    def install(self, events: Subscriptions) -> None:
        """Replace what both classes do."""
        events.wrap(*Points.MAKE_AUTOCAST, self._make_autocast)
        events.wrap(*Points.MAKE_SCALER, self._make_scaler)
        for name in METHODS:
            events.wrap(torch.amp.GradScaler, name, functools.partial(self._call, f"_{name.rstrip('_')}"))
        events.wrap(*Points.BACKWARD, self._backward)
        events.wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        events.wrap(swa_utils.AveragedModel, "update_parameters", self._average)
        self._found.install(events)
        events.at_end(self._gradients.end)
        self._watch_steps(events)

    def is_by_apex(self) -> bool:
        """Return whether the script has prepared its models by `apex.amp`."""
        return not self._is_prepared and self._initialized()

    @property
    def needs_scaler(self) -> bool:
        return self._scaling.needs_scaler

    @property
    def widens(self) -> torch.dtype | None:
        return None

    def casts_now(self) -> bool:
        """Return whether the weights are cast."""
        return self._is_prepared or self._initialized()

    def use(self) -> None:
        self.used = True

    def forget_unscaled(self, scaler: Any, optimizer: Any) -> None:
        raise ScalingError(
            here(
                f"gradients were read (clipped, say) between two backward passes of one step, which {self._arm} cannot "
                "unscale twice; read them once, right before the step"
            )
        )

    def _average(self, original: Any, average: Any, model: nn.Module) -> None:
        """Average in the type of the average, which was copied before the weights were cast."""
        original(average, _InFp32(model) if self._is_prepared else model)

    def _make_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        settings = scaler_settings(args, kwargs)
        self._note(settings["enabled"], scaler)
        original(scaler, **{**settings, "enabled": True})  # a script in bf16 has one that is off

    def _prepare(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        self._refuse_shared(optimizers)
        if self._given is not None:
            self._first = {id(one): HashedWeights(one) for one in optimizers}
        try:
            self._scaling.prepare(models, optimizers)
        except AmpCompareError as error:
            raise PreparationError(here(str(error))) from None
        self._is_prepared = True
        self._models, self._optimizers = models, optimizers
        for optimizer in optimizers:
            optimizer.zero_grad = types.MethodType(
                functools.wraps(optimizer.zero_grad)(functools.partial(_zero_grad, self)), optimizer
            )

    def _refuse_shared(self, optimizers: list[Any]) -> None:
        """Refuse weights that two optimizers hold, as that of SAM and the one inside of it: each would have masters."""
        seen: set[int] = set()
        for optimizer in optimizers if self._scaling.needs_scaler else ():
            own = set(map(id, owned_params(optimizer)))
            if own & seen:
                raise PreparationError(
                    here(
                        f"two optimizers hold the same weights, and {self._arm} gives each its own master weights; "
                        "compare native:bf16 or apex:O1"
                    )
                )
            seen |= own

    def _report_weights(self, optimizer: Any) -> None:
        """Report the first weights, those of the optimizer that steps first."""
        if self._given is not None:
            self._given([], [self._first[id(optimizer)]])
            self._given = None
            self._first.clear()

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the 16-bit weights of an optimizer with their masters."""
        return self._scaling.masters(optimizer) if any(optimizer is one for one in self._optimizers) else []

    def input_type(self, module: nn.Module) -> torch.dtype | None:
        """Return the type of the inputs of a part of a model that the script calls by itself; None for others.

        A model is prepared when the script first calls it.
        """
        self._found.look_at(module)
        if not self._is_prepared or any(bare_model(module) is model for model in self._models):
            return None
        held = next((param.dtype for param in module.parameters() if param.dtype in HALF), None)
        return held if any(module is part for model in self._models for part in model.modules()) else None

    def _call(self, name: str, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_by_apex() or not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        window = self._windows.get(scaler)
        if window is None:
            window = self._windows[scaler] = _Window(self._scaling.new_scale())
        return getattr(self, f"{name}_by")(window, *args, **kwargs)

    def _scale_by(self, window: _Window, outputs: Any) -> Any:
        self._scales = True
        if not isinstance(outputs, Tensor):
            return type(outputs)(self._scale_by(window, output) for output in outputs)
        if not self._is_prepared:
            raise PreparationError(
                here(
                    f"scaler.scale before the script has called a model whose weights an optimizer has, so {self._arm} "
                    "has none to cast; make the optimizer before the forward pass"
                )
            )
        if window.overflows.keys() - window.stepped:
            raise ScalingError(
                here(f"a loss is scaled between scaler.unscale_ and scaler.step; {self._arm} needs all losses before")
            )
        window.scaled = True
        self._scaling.before_backward(self._optimizers)
        return outputs.float() * window.scale.value

    def _unscale_by(self, window: _Window, optimizer: Any) -> None:
        if not self._casts and not self.is_driven:
            raise self._lacks_autocast()
        if not window.scaled:
            raise not_scaled(self._arm)
        if id(optimizer) in window.overflows:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if all(optimizer is not one for one in self._optimizers):
            raise PreparationError(
                here(f"this optimizer was made after the first forward pass, so {self._arm} has not prepared it")
            )
        pairs = self.masters(optimizer)
        if self._gradients.are_shown(pairs):
            raise ScalingError(
                here("the gradients of the last step were not cleared, and new ones were added; call zero_grad first")
            )
        self._gradients.hide(pairs)
        window.overflows[id(optimizer)] = self._scaling.unscale(optimizer, window.scale)
        self._gradients.show(self.masters(optimizer))

    def _step_by(self, window: _Window, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._scaling.needs_scaler and (args or kwargs):
            return optimizer.step(*args, **kwargs)  # nothing is scaled or skipped, so a closure may run
        refuse_closure(self._arm, args, kwargs)
        if id(optimizer) not in window.overflows:
            self._unscale_by(window, optimizer)
        if id(optimizer) in window.stepped:
            raise RuntimeError("step() has already been called since the last update().")
        window.stepped.add(id(optimizer))
        self._refuse_written(optimizer)
        if window.overflows[id(optimizer)]:
            self._skip(optimizer)
            return None
        self._stepping = optimizer
        try:
            return self._scaling.step(optimizer)
        finally:
            self._stepping = None
            self._drop_gradients(optimizer)

    def _skip(self, optimizer: Any) -> None:
        self._scaling.skip(optimizer)
        self._drop_gradients(optimizer)

    def _drop_gradients(self, optimizer: Any) -> None:
        """Drop the gradients of masters; those that the model shows stay until they are cleared."""
        for _, master in self.masters(optimizer):
            master.grad = None

    def _refuse_written(self, optimizer: Any) -> None:
        """Refuse weights that the script has written into the model: the masters would overwrite them."""
        for param, master in self.masters(optimizer):
            if not torch.equal(param.detach().view(torch.int16), master.detach().to(param.dtype).view(torch.int16)):
                raise ScalingError(
                    here(
                        f"the script has written weights of the model since the last step, and {self._arm} steps fp32 "
                        "master weights, which would overwrite them; compare an arm without master weights"
                    )
                )

    def _update_by(self, window: _Window, new_scale: Any = None) -> None:
        for optimizer in self._optimizers:
            if id(optimizer) in window.overflows.keys() - window.stepped:
                self._skip(optimizer)
        if new_scale is not None:
            window.scale.load(float(new_scale), window.scale.good_steps)
        elif window.overflows:
            window.scale.move(overflow=any(window.overflows.values()))
        window.overflows.clear()
        window.stepped.clear()
        window.scaled = False

    def _get_scale_by(self, window: _Window) -> float:
        return window.scale.value

    def _state_dict_by(self, window: _Window) -> dict[str, Any]:
        settings = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": window.scale.growth_interval}
        return {"scale": window.scale.value, **settings, "_growth_tracker": window.scale.good_steps}

    def _load_state_dict_by(self, window: _Window, state: dict[str, Any]) -> None:
        window.scale.load(float(state["scale"]), int(state["_growth_tracker"]))

    def cleared(self, optimizer: Any, *, set_to_none: bool) -> None:
        """Clear the gradients of an optimizer, those of the model and of master weights."""
        with GRADIENT_READS.paused():
            self._clear(optimizer, set_to_none=set_to_none)

    def _zero_grad(self, original: Any, optimizer: Any, set_to_none: bool = True) -> None:
        """Clear by the optimizer itself what a copy clears, as Fabric makes one, which has the same groups."""
        for one in self._optimizers:
            if one is not optimizer and one.param_groups is optimizer.param_groups:
                self.cleared(one, set_to_none=set_to_none)
        original(optimizer, set_to_none)

    def _clear(self, optimizer: Any, *, set_to_none: bool) -> None:
        pairs = self.masters(optimizer)
        weights = [param for group in optimizer.param_groups for param in group["params"]]
        weights += [half for half, _ in pairs]
        lacking = {id(param) for param in weights if param.grad is None}  # read while those of masters are shown
        self._gradients.hide(pairs)
        for param in weights:
            if set_to_none or id(param) in lacking:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param)
        for _, master in pairs:
            master.grad = None

    def _lacks_autocast(self) -> AmpCompareError:
        return without_autocast(self._arm) if self._off is None else UnsupportedCombination(self._off)

    def _before_step(self, optimizer: Any, *_arguments: Any) -> None:
        if optimizer is self._stepping:
            if self._given is not None:
                self._report_weights(optimizer)
            return
        if self.is_by_apex() or not self._is_prepared:
            if self._off is not None and not self.used and not self._initialized():
                raise UnsupportedCombination(self._off)
            return
        if all(optimizer is not one for one in self._optimizers):
            return
        if not self.is_driven and not self._casts:
            raise self._lacks_autocast()
        if not self.is_driven and self._scaling.needs_scaler:
            raise unscaled(self._arm)
        if self._given is not None:
            self._report_weights(optimizer)


def _zero_grad(names: WholeModel, optimizer: Any, set_to_none: bool = True) -> None:
    names.cleared(optimizer, set_to_none=set_to_none)
