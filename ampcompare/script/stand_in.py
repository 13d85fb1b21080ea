"""Put an arm behind the names that a script trains by: those of `apex.amp`, and those of `torch.amp`."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from ampcompare.backends.apex_levels import LEVELS
from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import SCRIPT_BACKENDS
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.patches import Layer, Points, Subscriptions
from ampcompare.script.apex_amp import ScriptAmp, refuse_init
from ampcompare.script.formats import ScriptFormats
from ampcompare.script.fp16_optimizers import follow_fp16_optimizers, fp16_optimizer_classes
from ampcompare.script.keep_fp32 import KeptAtFirstCall
from ampcompare.script.legacy.prepare import override_opt_level
from ampcompare.script.lifted_weights import LiftedWeights
from ampcompare.script.recording.recorder import Rows, value_of
from ampcompare.script.torch_amp.autocast_and_scaler import TorchAmp, TorchAmpStandIn
from ampcompare.script.torch_amp.half_weights import HalfWeights
from ampcompare.script.torch_amp.o1 import O1BehindTorch
from ampcompare.script.torch_amp.parallel_wrappers import ParallelWrappers, reduce_wrappers_in
from ampcompare.script.torch_amp.plain_script import PlainScript
from ampcompare.script.trainers import follow_trainers
from ampcompare.script.trainers.arm import TrainerContext
from ampcompare.script.type_errors import explain_types
from ampcompare.script.watch import Watch
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.keep_fp32 import kept_in_fp32, without_autocast, without_casts

HALF = {"": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def check_arm(arm: Arm) -> None:
    """Refuse an arm that hands training to another library, or compresses what a model keeps."""
    if arm.backend not in SCRIPT_BACKENDS:
        raise UnsupportedCombination(
            f"arm {arm} cannot replace amp in a script: it replaces the training loop or parts of the "
            f"model; arms for scripts are those of {', '.join(SCRIPT_BACKENDS)}"
        )


def half_dtype(arm: Arm) -> torch.dtype | None:
    """Return the 16-bit type that an arm computes in; None if it has none."""
    return None if arm.roles is None else HALF[arm.roles.half]


class StandIn:
    """An arm in the place of `apex.amp` and `torch.amp` of this process; with `for_cuda` the CPU is in that of CUDA."""

    def __init__(
        self, arm: Arm, rows: Rows | None, *, engine: str = "compat", watch: Watch | None = None, for_cuda: bool = False
    ) -> None:
        check_arm(arm)
        formats = ScriptFormats(arm, rows) if arm.roles is not None and arm.roles.formats else None
        if formats is not None:
            assert arm.inner is not None
            arm = arm.inner  # which does all else
        self.arm = arm
        self._for_cuda = for_cuda
        self.torch_amp: TorchAmp | O1BehindTorch | _AsWritten
        self._watch = watch
        if arm.options.get("tf32"):
            make_precision(arm, device="cpu" if for_cuda or not torch.cuda.is_available() else "cuda").prepare([], [])
        self._events = Subscriptions(Layer.STAND_IN)
        self._wrappers = ParallelWrappers()
        self._wrappers.install(self._events)
        self._lifted = LiftedWeights(self._wrappers, rows, self._events)
        self._keep = str(arm.options.get("keep_fp32", ""))
        if arm.backend == "script":
            frontend = importlib.import_module("apex.amp.frontend")
            self._events.wrap(frontend, "_initialize", self._initialize)
            self.torch_amp = _AsWritten(self._has_initialized, rows)
        elif arm.backend == "apex":
            self._stand_behind_levels(engine, rows)
        else:
            is_half = arm.backend == "half" or arm.options.get("weights") == "bfloat16"
            self.torch_amp = HalfWeights(arm, rows, wrappers=self._wrappers) if is_half else TorchAmp(arm, rows)
        if (reduce := arm.options.get("reduce")) is not None:
            reduce_wrappers_in(getattr(torch, reduce), str(arm), self._events)
        self.torch_amp.install(self._events)
        if formats is not None:
            formats.install(self._events)  # before what makes a block of autocast, so inside of it
        plain = PlainScript(arm, self.torch_amp, self._lifted, for_cuda=for_cuda, rows=rows, given=self._record_weights)
        plain.install(self._events)
        self._casting = plain.casting
        if arm.backend != "script":
            follow_fp16_optimizers(rows, self._events)
        if arm.backend not in ("apex", "script"):
            self._stand_behind_amp(ScriptAmp(arm, plain, rows))
        elif rows is not None:
            self._events.wrap(*Points.BACKWARD, functools.partial(_record_plain_backward, rows))
        if self._keep and not isinstance(self.torch_amp, HalfWeights):
            context = without_autocast("cuda" if torch.cuda.is_available() else "cpu")
            if arm.backend == "apex":
                context = without_casts(importlib.import_module("ampcompare.apex.amp"))
            names = self.torch_amp
            KeptAtFirstCall(self._keep, context, lambda: names.used).install(self._events)
        half = half_dtype(arm) if arm.backend == "native" else None
        follow_trainers(TrainerContext(arm, half, rows, plain.through), self._events)

    def _stand_behind_levels(self, engine: str, rows: Rows | None) -> None:
        options = dict(self.arm.options)
        options.pop("engine", None)
        options.pop("keep_fp32", None)
        level = options.pop("opt_level")
        if "cast_model_outputs" in options:
            options["cast_model_outputs"] = getattr(torch, options["cast_model_outputs"])
        frontend: Any = importlib.import_module("apex.amp.frontend")
        self._events.wrap(frontend, "_initialize", self._initialize)
        self._events.put(sys.modules["apex.amp"], "init", functools.partial(refuse_init, self.arm))
        override_opt_level(level, self._events, quiet=True, options=options)
        if LEVELS[level].patch_torch_functions and engine == "compat":
            self.torch_amp = O1BehindTorch(self.arm, self._has_initialized)
        elif LEVELS[level].is_half and engine == "compat":
            self.torch_amp = HalfWeights(self.arm, rows, self._has_initialized, wrappers=self._wrappers)
        else:
            self.torch_amp = TorchAmp(self.arm, rows, self._has_initialized)

    def _stand_behind_amp(self, amp: ScriptAmp) -> None:
        functions = amp.functions()
        for name in ("", ".frontend", ".handle", ".amp", "._amp_state"):
            module: Any = importlib.import_module(f"ampcompare.apex.amp{name}")
            # The package has the session's state under the name of the module.
            module = sys.modules[f"ampcompare.apex.amp{name}"]
            for function in functions:
                if function in vars(module):
                    self._events.put(module, function, functions[function])
        self._events.wrap(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        if hasattr(os, "register_at_fork"):  # where processes can be forked
            os.register_at_fork(after_in_child=self._casting.end)

    def _initialize(self, original: Any, models: Any, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
        """Call Apex's own, once the first weights are recorded."""
        self._record_weights(_as_list(models), _as_list(optimizers))
        if not self._keep:
            return original(models, optimizers, *args, **kwargs)
        patches = LEVELS[self.arm.options["opt_level"]].patch_torch_functions
        with kept_in_fp32(
            _as_list(models),
            self._keep,
            None if patches else half_dtype(self.arm),
            without_casts(sys.modules["apex.amp"]) if patches else None,
        ):
            return original(models, optimizers, *args, **kwargs)

    def _record_weights(self, models: list[Any], optimizers: list[Any]) -> None:
        if self._watch is not None:
            self._watch.weights(models, optimizers)

    def _next_batch(self, original: Any, iterator: Any) -> Any:
        with self._casting.off():  # a loader without workers runs the script's transforms here
            return original(iterator)

    def has_acted(self) -> bool:
        """Return whether the script has reached the arm."""
        return self._has_initialized() or self.torch_amp.used

    @property
    def lifted_types(self) -> list[str]:
        """The 16-bit types of weights that were lifted to fp32, such as "bfloat16"."""
        return self._lifted.types

    def explain(self, error: BaseException) -> UnsupportedCombination | None:
        """Return that the types of this arm do not fit what the script computes, if that is what torch has raised."""
        casts = half_dtype(self.arm) is not None and self.has_acted()
        return explain_types(error, self.arm, self.torch_amp, casts=casts, lifted=self._lifted.types)

    def _has_initialized(self) -> bool:
        """Return whether the script has called the `amp.initialize` of an Apex, which the arm does not stand behind."""
        names = ("ampcompare.apex.amp._amp_state", "apex.amp._amp_state")
        states: list[Any] = [sys.modules.get(name) for name in names]
        marks = {"opt_properties", "handle"} if self.arm.backend == "script" else {"opt_properties"}  # O1 has a handle
        return any(marks & vars(one._amp_state).keys() for one in states if hasattr(one, "_amp_state"))

    def end(self) -> None:
        """Restore all names; for tests, since the process belongs to the script."""
        self._events.end()
        self._casting.end()
        torch.clear_autocast_cache()


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _record_plain_backward(rows: Rows, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a loss that nothing scales, next to those of `scale_loss`."""
    if rows.is_outside_of_blocks:
        rows.add_plain_backward(value_of(tensors if isinstance(tensors, Tensor) else tensors[0]))
    return original(tensors, *args, **kwargs)


class _AsWritten(TorchAmpStandIn):
    """Follows `torch.autocast` and `GradScaler` of a script; a scaler that is off leaves it one without a scaler."""

    def __init__(self, initialized: Callable[[], bool], rows: Rows | None) -> None:
        super().__init__(initialized)
        self._rows = rows
        self._by_optimizer = False

    def install(self, events: Subscriptions) -> None:
        """Note uses from now on."""
        events.wrap(*Points.MAKE_AUTOCAST, self._make_autocast)
        events.wrap(*Points.MAKE_SCALER, self._make_scaler)
        events.wrap(torch.amp.GradScaler, "scale", self._scale)
        for kind in fp16_optimizer_classes():
            events.wrap(kind, "__init__", self._make_optimizer)
        events.at_end(register_optimizer_step_pre_hook(lambda *_: self.use()).remove)

    def _make_autocast(self, original: Any, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        self.has_autocast = self.has_autocast or block._enabled

    def _make_scaler(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if not scaler.is_enabled() and self._rows is not None:
            self._rows.ignored.add(scaler)  # its steps are those of the optimizer

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self.has_scaler = self.has_scaler or scaler.is_enabled()
        return original(scaler, outputs)

    def _make_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._by_optimizer = True
        original(optimizer, *args, **kwargs)

    def is_by_apex(self) -> bool:
        """Return whether the script trains through Apex, which is recorded there."""
        return self._initialized() or self._by_optimizer
