"""Apex opt levels, on any object with the surface of `apex.amp`: the real module, or `ampcompare.apex.amp`."""

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.apex_levels import LEVELS, select_engine
from ampcompare.base.errors import BackendUnavailable
from ampcompare.results.records.run import EngineInfo
from ampcompare.training.precision.base import (
    NO_CONTEXT,
    FixedOutcome,
    LateStepOutcomes,
    Precision,
    Prepared,
    StepOutcome,
    applied_outcome,
)
from ampcompare.training.precision.keep_fp32 import kept_in_fp32, make_o1_casts_off_factory


class Apex(Precision):
    """One opt level of `apex.amp`: when `scale_loss` exits, overflow is known and `step` replaced.

    `amp` has the functions of `apex.amp`; O4 and O5 need one that has them. `keep_fp32` is not an option of Apex, and
    the same with any implementation; `overrides` are keyword arguments of `amp.initialize`.
    """

    key = "amp"

    def __init__(
        self,
        amp: Any,
        opt_level: str = "O1",
        *,
        num_losses: int = 1,
        engine: EngineInfo | None = None,
        keep_fp32: str = "",
        **overrides: Any,
    ) -> None:
        self.amp = amp
        self.keep_fp32 = keep_fp32
        self.opt_level = opt_level
        self.num_losses = num_losses
        self.engine = engine
        self.overrides = overrides
        self.half_dtype = None if opt_level == "O0" else getattr(torch, LEVELS[opt_level].half_dtype)
        self._patches = LEVELS[opt_level].patch_torch_functions
        self._scalers: Sequence[Any] = ()

    def expect_losses(self, count: int) -> None:
        self.num_losses = max(self.num_losses, count)

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        kept = kept_in_fp32(
            models,
            self.keep_fp32,
            None if self._patches else self.half_dtype,
            make_o1_casts_off_factory(self.amp) if self._patches else None,
        )
        with kept as self.kept_fp32, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Apex announces its own deprecation at every call
            prepared_models, prepared_optimizers = self.amp.initialize(
                list(models),
                list(optimizers),
                opt_level=self.opt_level,
                num_losses=self.num_losses,
                verbosity=0,
                **self.overrides,
            )
        self._scalers = self.amp._amp_state.loss_scalers
        return prepared_models, prepared_optimizers

    def without_patches(self) -> AbstractContextManager[None]:
        casts_off: AbstractContextManager[None] = (
            make_o1_casts_off_factory(self.amp)() if self._patches else NO_CONTEXT
        )
        return casts_off

    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> AbstractContextManager[Tensor]:
        scaled: AbstractContextManager[Tensor] = self.amp.scale_loss(
            loss, list(optimizers), loss_id=loss_id, delay_unscale=delay_unscale
        )
        return scaled

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        return list(self.amp.master_params(optimizer))

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        applied = tuple([not optimizer._amp_stash.already_patched for optimizer in optimizers])  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()
        scales = self.loss_scales()
        return applied_outcome(len(applied), scales) if all(applied) else FixedOutcome(applied, scales)

    def why_no_cuda_graph(self, optimizers: Sequence[Optimizer]) -> str | None:
        return "the real Apex reads its overflow flag on the host"

    def weights_replaced(self) -> None:
        if self._patches:  # the real Apex would keep using the casts that an evaluation has cached
            self.amp._amp_state.handle._clear_cache()

    def loss_scales(self) -> tuple[float, ...]:
        return tuple([scaler.loss_scale() for scaler in self._scalers])

    def state_dict(self) -> dict[str, Any]:
        return dict(self.amp.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.amp.load_state_dict(dict(state))


class CompatApex(Apex):
    """The same on `ampcompare.apex.amp`: flags and scales may stay on the device until the outcome is read."""

    def __init__(self, amp: Any, *args: Any, **options: Any) -> None:
        super().__init__(amp, *args, **options)
        self._backward = importlib.import_module("ampcompare.apex.amp._engine.scaled_loss").backward
        self._device_skip = importlib.import_module("ampcompare.apex.amp._engine.device_skip")
        self._may_be_late = False
        self._is_capturing = False
        self._captured: tuple[list[bool | Tensor], list[float | Tensor]] = [], []
        self._outcomes = LateStepOutcomes()

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        prepared = super()._prepare(models, optimizers)
        devices = {param.device.type for model in prepared[0] for param in model.parameters()}
        self._may_be_late = not devices.isdisjoint(self._device_skip._DEVICE_TYPES)
        return prepared

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        self._backward(loss, list(optimizers), loss_id, delay_unscale)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        if not (self._may_be_late or self._is_capturing):
            return super().step(*optimizers)
        skips: list[bool | Tensor] = []
        for optimizer in optimizers:
            stash: Any = optimizer._amp_stash  # type: ignore[attr-defined]
            flags = stash.flags
            skips.append(
                self._device_skip.union_of_flags(flags)
                if flags and not stash.already_patched
                else stash.already_patched
            )
            optimizer.step()
        scales = [scaler.scale_for_product() for scaler in self._scalers]
        if self._is_capturing:
            self._captured = skips, scales
            return FixedOutcome((), ())
        return self._outcome_from_flags(skips, scales)

    def _outcome_from_flags(self, skips: list[bool | Tensor], scales: list[float | Tensor]) -> StepOutcome:
        entries = [*skips, *scales]
        on_device = [entry for entry in entries if isinstance(entry, Tensor)]

        def resolve(values: list[float]) -> tuple[tuple[bool, ...], tuple[float, ...]]:
            from_device = iter(values)
            on_host = [next(from_device) if isinstance(entry, Tensor) else float(entry) for entry in entries]
            return tuple([skip == 0 for skip in on_host[: len(skips)]]), tuple(on_host[len(skips) :])

        return self._outcomes.outcome_of_step(on_device, resolve) if on_device else FixedOutcome(*resolve([]))

    def why_no_cuda_graph(self, optimizers: Sequence[Optimizer]) -> str | None:
        if any(scaler.dynamic for scaler in self._scalers):
            if not all(self._device_skip.can_skip_without_host(optimizer) for optimizer in optimizers):
                return "a step hook, or an option of the optimizer, makes this arm read its overflow flag on the host"
            for scaler in self._scalers:
                scaler.prepare_graph_capture()
        return None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def replayed_outcome(self) -> StepOutcome:
        for scaler in self._scalers:
            scaler.note_repeated_pass()
        skips, scales = self._captured
        return self._outcome_from_flags(
            [_clone_if_tensor(skip) for skip in skips], [_clone_if_tensor(scale) for scale in scales]
        )


def _clone_if_tensor(entry: Any) -> Any:
    return entry.clone() if isinstance(entry, Tensor) else entry


def choose_apex_module_and_engine_info(engine: str, opt_level: str, device: str) -> tuple[Any, EngineInfo]:
    """Import the implementation of `apex.amp` to use, and return the reason; "auto" takes one that works."""
    choice = select_engine(engine, opt_level, device, torch_version=torch.__version__)
    if choice.caution:
        warnings.warn(choice.caution, stacklevel=2)
    if choice.name == "nvidia":
        try:
            amp = importlib.import_module("apex.amp")
        except Exception as error:
            raise BackendUnavailable(
                f"{choice.reason}, and importing apex.amp failed: {type(error).__name__}: {error}"
            ) from error
        return amp, EngineInfo(name="nvidia", version=choice.version, reason=choice.reason)
    package = importlib.import_module("ampcompare.apex")
    amp = importlib.import_module("ampcompare.apex.amp")
    return amp, EngineInfo(name="compat", version=package.__version__, reason=choice.reason)


def make_apex(
    *, device: str = "cpu", opt_level: str = "O1", engine: str = "auto", num_losses: int = 1, **overrides: Any
) -> Apex:
    """Build the backend of an `apex` arm: choose the engine, read dtypes by name."""
    amp, info = choose_apex_module_and_engine_info(engine, opt_level, device)
    if "cast_model_outputs" in overrides:
        overrides["cast_model_outputs"] = getattr(torch, overrides["cast_model_outputs"])
    kind = CompatApex if info.name == "compat" else Apex
    return kind(amp, opt_level, num_losses=num_losses, engine=info, **overrides)
