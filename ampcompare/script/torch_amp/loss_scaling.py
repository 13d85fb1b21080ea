"""The loss scale and the steps of an arm with 16-bit weights, cut where the methods of `GradScaler` are."""

from __future__ import annotations

import abc
import importlib
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ampcompare.apex.amp.scaler import LossScaler
from ampcompare.backends.apex_levels import apex_level
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import PreparationError
from ampcompare.guards.events import without_subscribers
from ampcompare.precision.base import owned_params
from ampcompare.precision.factory import make_precision
from ampcompare.precision.half_optimizer import HalfOptimizer
from ampcompare.script.apex_amp.session import here

__all__ = ["LossScaling", "Scale", "make_loss_scaling"]


class Scale(abc.ABC):
    """Of one GradScaler."""

    @property
    @abc.abstractmethod
    def value(self) -> float:
        """The present loss scale; 1 if nothing is scaled."""

    @property
    @abc.abstractmethod
    def good_steps(self) -> int:
        """Updates without an overflow since it moved last."""

    growth_interval: int = 2000

    @abc.abstractmethod
    def move(self, *, overflow: bool) -> None:
        """Move after an update."""

    @abc.abstractmethod
    def load(self, value: float, good_steps: int) -> None:
        """Continue from an earlier state."""


class LossScaling(abc.ABC):
    """What an arm does to models and optimizers, and to gradients.

    Attributes:
        needs_scaler: whether steps go through a GradScaler: the loss is scaled, or gradients move to master weights.
    """

    needs_scaler: bool

    @abc.abstractmethod
    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Cast models, and prepare optimizers, in place."""

    @abc.abstractmethod
    def new_scale(self) -> Scale:
        """Return a loss scale; that of the arm itself if it has one for all."""

    @abc.abstractmethod
    def before_backward(self, optimizers: Sequence[Any]) -> None:
        """Prepare for the next backward pass."""

    @abc.abstractmethod
    def unscale(self, optimizer: Any, scale: Scale) -> bool:
        """Give what the optimizer steps true gradients, and return whether one overflowed."""

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        """Return each 16-bit weight of the model that the optimizer steps a master of, with that master."""
        return []

    @abc.abstractmethod
    def step(self, optimizer: Any) -> Any:
        """Step, and give the model the weights."""

    @abc.abstractmethod
    def skip(self, optimizer: Any) -> None:
        """End an update without a step."""


class _ApexScale(Scale):
    def __init__(self, loss_scale: float | str, floor: float | None, ceiling: float) -> None:
        self.scaler = LossScaler(loss_scale, min_loss_scale=floor, max_loss_scale=ceiling)
        self.growth_interval = self.scaler._scale_seq_len

    @property
    def value(self) -> float:
        return self.scaler.loss_scale()

    @property
    def good_steps(self) -> int:
        return self.scaler._unskipped

    def move(self, *, overflow: bool) -> None:
        self.scaler._has_overflow = overflow
        self.scaler.update_scale()

    def load(self, value: float, good_steps: int) -> None:
        self.scaler._loss_scale, self.scaler._unskipped = value, good_steps


class _ApexScaling(LossScaling):
    """O2, O3 or O5 of ampcompare's engine."""

    def __init__(self, arm: Arm, device: str) -> None:
        self._level = apex_level(arm.options)
        self._precision = make_precision(Arm.make("apex", **{**arm.options, "engine": "compat"}), device=device)
        self.needs_scaler = bool(self._level.master_weights) or self._level.loss_scale != 1.0

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
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

    def new_scale(self) -> Scale:
        return _ApexScale(self._level.loss_scale, self._level.min_loss_scale, self._level.max_loss_scale)

    def before_backward(self, optimizers: Sequence[Any]) -> None:
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

    def unscale(self, optimizer: Any, scale: Scale) -> bool:
        assert isinstance(scale, _ApexScale)
        scaler = scale.scaler
        scaler.clear_overflow_state()
        optimizer._post_amp_backward(scaler)
        return scaler.dynamic and scaler._read_flags()

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        stash = optimizer._amp_stash
        if not self._level.master_weights or not stash.lazy_init_called:
            return []
        return list(zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True))

    def step(self, optimizer: Any) -> Any:
        return optimizer.step()

    def skip(self, optimizer: Any) -> None:
        if self._level.master_weights:
            optimizer._amp_stash.release_buffers()
        optimizer._opt_called = True  # the script called step: schedulers warn otherwise


class _HalfScale(Scale):
    def __init__(self, precision: Any) -> None:
        self._precision = precision

    @property
    def value(self) -> float:
        return next(iter(self._precision.loss_scales()), 1.0)

    @property
    def growth_interval(self) -> int:  # type: ignore[override]
        return int(getattr(self._precision, "growth_interval", 2000))

    @property
    def good_steps(self) -> int:
        return int(self._precision.state_dict().get("good_steps", 0))

    def move(self, *, overflow: bool) -> None:
        if isinstance(self._precision, HalfOptimizer):
            self._precision.move_scale(overflow=overflow)

    def load(self, value: float, good_steps: int) -> None:
        if self._precision.loss_scales():
            self._precision.load_state_dict({"loss_scale": value, "good_steps": good_steps})


class _HalfScaling(LossScaling):
    """A `half` arm."""

    def __init__(self, arm: Arm, device: str) -> None:
        self._precision: Any = make_precision(arm, device=device)
        self.needs_scaler = bool(arm.options.get("master_weights")) or bool(self._precision.loss_scales())
        self._scale: weakref.ref[_HalfScale] | None = None
        self._first = next(iter(self._precision.loss_scales()), 1.0)

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        self._precision.prepare(models, optimizers)

    def new_scale(self) -> Scale:
        if self._scale is not None and self._scale() is not None and self._precision.loss_scales():
            raise PreparationError(
                here("the script has a second GradScaler, and a half arm has one loss scale for all")
            )
        scale = _HalfScale(self._precision)
        scale.load(self._first, 0)
        self._scale = weakref.ref(scale)
        return scale

    def before_backward(self, optimizers: Sequence[Any]) -> None:
        if isinstance(self._precision, HalfOptimizer):
            self._precision.collect(optimizers)

    def unscale(self, optimizer: Any, scale: Scale) -> bool:
        self._precision.unscale(optimizer)
        return isinstance(self._precision, HalfOptimizer) and self._precision.overflows(optimizer)

    def masters(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        return self._precision.masters(optimizer) if isinstance(self._precision, HalfOptimizer) else []

    def step(self, optimizer: Any) -> Any:
        return self._precision.end_update(optimizer, good=True)

    def skip(self, optimizer: Any) -> None:
        self._precision.end_update(optimizer, good=False)
        optimizer._opt_called = True


def make_loss_scaling(arm: Arm, device: str) -> LossScaling:
    """Return that of an arm of `half`, or of `apex` at a level that casts weights."""
    return _ApexScaling(arm, device) if arm.backend == "apex" else _HalfScaling(arm, device)
