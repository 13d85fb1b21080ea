"""Put an arm behind the names that a script trains by: those of `apex.amp`, and those of `torch.amp`."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
import types
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
from ampcompare.guards.location import raised_at
from ampcompare.script.apex_amp import ScriptAmp
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
from ampcompare.script.trainers.arm import Told
from ampcompare.script.watch import Watch
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.keep_fp32 import kept_in_fp32, without_autocast, without_casts

__all__ = ["StandIn", "check_arm", "half_dtype"]

BANNED = re.compile(r"nn\.BCELoss (need float32|are unsafe)")
TYPES = re.compile(
    rf"{BANNED.pattern}|dtype|scalar type|[^a-z](Half|BFloat16)\b|should be the same|unscale.*Complex", re.IGNORECASE
)
# Of an operation that wants fp32, not of one whose operands differ.
FP32_WANTED = re.compile(
    r"(?:expect|must|only|requir|support|need)(?!.*\b(?:same|equal|match|got \w+ and)\b)"
    r".*?\b(?:float|float32|fp32)\b",
    re.IGNORECASE,
)
NO_KERNEL = re.compile(r"not implemented for|Unsupported dtype")
# Of products, whose operands all arms that cast functions cast; Apex's lists lack that of attention.
PRODUCT = re.compile(r"\bmat[12]\b|\bm1 and m2\b|\bbatch[12]\b|^Input type .* type|Input and parameter tensors")
ATTENTION = re.compile("query, key")
DENSE = re.compile(r"does not support dense gradients")
NUMPY_LACKS = re.compile(r"unsupported ScalarType BFloat16")
HALF = {"": None, "fp16": torch.float16, "bf16": torch.bfloat16}
TORCHSCRIPT = "The following operation failed in the TorchScript interpreter"


def check_arm(arm: Arm) -> None:
    """Check that an arm can stand behind a script's calls.

    Raises:
        UnsupportedCombination: it hands training to another library, or compresses what a model keeps.
    """
    if arm.backend not in SCRIPT_BACKENDS:
        raise UnsupportedCombination(
            f"arm {arm} cannot replace amp in a script: it replaces the training loop or parts of the "
            f"model; arms for scripts are those of {', '.join(SCRIPT_BACKENDS)}"
        )


def half_dtype(arm: Arm) -> torch.dtype | None:
    """Return the 16-bit type that an arm computes in; None if it has none."""
    return None if arm.roles is None else HALF[arm.roles.half]


class StandIn:
    """An arm in the place of `apex.amp` and `torch.amp` of this process.

    Args:
        arm: of a backend in `SCRIPT_BACKENDS`.
        rows: records losses and steps; None records nothing.
        watch: records the first weights.
        engine: what `apex` means, "compat" or "nvidia"; only arms of Apex run on the latter.
        for_cuda: what the script does on CUDA happens on the CPU.
    """

    def __init__(
        self, arm: Arm, rows: Rows | None, *, engine: str = "compat", watch: Watch | None = None, for_cuda: bool = False
    ) -> None:
        check_arm(arm)
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
            self.torch_amp = _AsWritten(self._has_initialized)
        elif arm.backend == "apex":
            self._stand_behind_levels(engine, rows)
        else:
            is_half = arm.backend == "half" or arm.options.get("weights") == "bfloat16"
            self.torch_amp = HalfWeights(arm, rows, wrappers=self._wrappers) if is_half else TorchAmp(arm, rows)
        if (reduce := arm.options.get("reduce")) is not None:
            reduce_wrappers_in(getattr(torch, reduce), str(arm), self._events)
        self.torch_amp.install(self._events)
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
        follow_trainers(Told(arm, half, rows, plain.through), self._events)

    def _stand_behind_levels(self, engine: str, rows: Rows | None) -> None:
        options = dict(self.arm.options)
        options.pop("engine", None)
        options.pop("keep_fp32", None)
        level = options.pop("opt_level")
        if "cast_model_outputs" in options:
            options["cast_model_outputs"] = getattr(torch, options["cast_model_outputs"])
        frontend: Any = importlib.import_module("apex.amp.frontend")
        self._events.wrap(frontend, "_initialize", self._initialize)
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
        """Return that the types of this arm do not fit what the script computes, if that is what torch has raised.

        A library may have raised it again with words of its own, also `from None`.
        """
        chain = [error]
        while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
            chain.append(before)
        return next((found for one in chain if (found := self._explain(one)) is not None), None)

    def _explain(self, error: BaseException) -> UnsupportedCombination | None:
        casts = half_dtype(self.arm) is not None and self.has_acted()
        line = raised_at(error) or "the script"
        if casts and isinstance(error, TypeError) and NUMPY_LACKS.search(str(error)):
            return UnsupportedCombination(
                f"{line}: under {self.arm} the script passes a bfloat16 tensor to NumPy, which has no such type "
                f"({error}); write .float() before .numpy() there, or compare an arm of fp16"
            )
        if casts and isinstance(error, RuntimeError) and DENSE.search(str(error)):
            return UnsupportedCombination(
                f"{line}: the masters of {self.arm} get dense gradients, as those of Apex, "
                f"and the optimizer takes sparse ones alone ({error}); compare native:fp16 or half:masters=fp32"
            )
        fits = not casts and not self._lifted.types
        if fits or not isinstance(error, RuntimeError) or not TYPES.search(said := _reason_in(error)):
            return None
        if "without overflow" in said:  # a number of the script, whatever the types
            return None
        is_whole, is_o1 = (isinstance(self.torch_amp, kind) for kind in (HalfWeights, O1BehindTorch))
        # Only arms that can compute what has failed here.
        others = "" if is_whole or is_o1 else "compare fp32, or "
        if ATTENTION.search(said) and (is_whole or is_o1):
            others = "compare native:bf16 or native:fp16, or "
        elif PRODUCT.search(said) and is_whole:
            others = "compare native:bf16, native:fp16 or apex:O1, or "
        advice = f"{others}give it tensors of one type there, for example with .to(other.dtype)"
        if is_whole:
            why = "the script makes or keeps fp32 tensors of its own, which do not fit the 16-bit weights"
        elif is_o1:
            why = "an operation gets tensors of both types, and Apex's lists of functions to cast lack it"
        else:
            why = "an operation gets tensors of both types, and torch.autocast does not cast it"
        if self._lifted.types and any(name in said for name in ("BFloat16", "bfloat16", "Half", "half", "float16")):
            types = " and ".join(self._lifted.types)
            if not casts or not is_whole:
                why = f"the script casts tensors to {types} itself, and its weights, which were that, are fp32"
                advice = "compare script, or cast to the type of the weight there"
        if str(error).startswith(TORCHSCRIPT) and is_o1:
            why = "an operation gets tensors of both types, since Apex's casts do not reach into TorchScript"
        if BANNED.search(said):
            why = f"{'Apex' if is_o1 else 'torch.autocast'} refuses BCELoss, as rounding makes it infinite"
            said = "binary_cross_entropy after sigmoid"
            advice = "let the model return logits and use BCEWithLogitsLoss"
            if not _is_in_model(error.__traceback__):
                advice = f"compare {'native:fp16' if is_o1 else 'fp32'} or apex:O2, or {advice}"
        elif "Complex" in said:
            why, advice = "torch cannot unscale the gradients of complex weights", "compare native:bf16"
        elif FP32_WANTED.search(said) and _are_all_16_bit(error.__traceback__):
            why = "an operation takes fp32 alone, and gets 16-bit tensors"
            advice = "compare fp32, or cast its inputs to fp32 and its result back there"
        elif NO_KERNEL.search(said):
            why = "torch cannot compute this in 16 bits on this device"
            advice = "compare fp32, or cast its inputs to fp32 there"
        return UnsupportedCombination(f"{line}: under {self.arm} {why} ({said}); {advice}")

    def _has_initialized(self) -> bool:
        """Return whether the script has called the `amp.initialize` of an Apex, which the arm does not stand behind."""
        names = ("ampcompare.apex.amp._amp_state", "apex.amp._amp_state")
        states: list[Any] = [sys.modules.get(name) for name in names]
        return any("opt_properties" in vars(one._amp_state) for one in states if hasattr(one, "_amp_state"))

    def end(self) -> None:
        """Restore all names; for tests, since the process belongs to the script."""
        self._events.end()
        self._casting.end()
        torch.clear_autocast_cache()


def _reason_in(error: RuntimeError) -> str:
    """Return the line of an error of torch that has the reason; TorchScript puts it last, or loses it."""
    first, *others = str(error).splitlines() or [""]
    if not first.startswith(TORCHSCRIPT):
        return first
    last = next((line for line in reversed(others) if line.strip()), "")
    return last.partition("RuntimeError: ")[2].strip() or "TorchScript does not say why, as for tensors of unlike dtype"


def _is_in_model(trace: types.TracebackType | None) -> bool:
    """Return whether an error was raised inside of a module with weights."""
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and next(module.parameters(), None) is not None:
            return True
        trace = trace.tb_next
    return False


def _are_all_16_bit(trace: types.TracebackType | None) -> bool:
    """Return whether the function that has raised holds 16-bit tensors and none of fp32, of its modules neither."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    held: list[Any] = list(trace.tb_frame.f_locals.values())
    held += [trace.tb_frame.f_globals.get(name) for name in trace.tb_frame.f_code.co_names]
    for value in list(held):
        if isinstance(value, torch.nn.Module):
            held += [*value.parameters(recurse=False), *value.buffers(recurse=False)]
        if isinstance(value, list | tuple):
            held += value
    found = {one.dtype for one in held if isinstance(one, Tensor) and one.is_floating_point()}
    return bool(found) and found <= {torch.float16, torch.bfloat16}


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
    """Follows `torch.autocast` and `GradScaler` of a script."""

    def __init__(self, initialized: Callable[[], bool]) -> None:
        super().__init__(initialized)
        self._by_optimizer = False

    def install(self, events: Subscriptions) -> None:
        """Note uses from now on."""
        events.wrap(*Points.MAKE_AUTOCAST, self._make_autocast)
        events.wrap(torch.amp.GradScaler, "scale", self._scale)
        for kind in fp16_optimizer_classes():
            events.wrap(kind, "__init__", self._make_optimizer)
        events.at_end(register_optimizer_step_pre_hook(lambda *_: self.use()).remove)

    def _make_autocast(self, original: Any, block: Any, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        self.has_autocast = self.has_autocast or block._enabled

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        self.has_scaler = True
        return original(scaler, outputs)

    def _make_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._by_optimizer = True
        original(optimizer, *args, **kwargs)

    def is_by_apex(self) -> bool:
        """Return whether the script trains through Apex, which is recorded there."""
        return self._initialized() or self._by_optimizer
