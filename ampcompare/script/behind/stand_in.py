"""Put an arm behind the names that a script trains by: those of `apex.amp`, and those of `torch.amp`."""

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import dataloader

from ampcompare.backends.arm import Arm
from ampcompare.backends.script_arms import require_in_script
from ampcompare.backends.spec import InScript
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.patches import Layer, PatchPoints, Subscriptions
from ampcompare.script.behind.apex_amp import ScriptAmp
from ampcompare.script.behind.formats import ScriptLinearFormats
from ampcompare.script.behind.fp16_optimizers import disable_fp16_optimizers
from ampcompare.script.behind.side import ScriptProcessContext
from ampcompare.script.behind.type_errors import find_refusal_under_arm
from ampcompare.script.imports.adapter_imports import call_with_each_adapter, put_amp_functions_in_adapter
from ampcompare.script.recording.recorder import RecordedSteps, number_or_detached_tensor
from ampcompare.script.remarks.averages import StuckAverageWatch
from ampcompare.script.remarks.cancelled_numbers import CancelledNumbersWatch
from ampcompare.script.remarks.first_gradients import MissingFirstGradientsWatch
from ampcompare.script.remarks.lost_decay import LostDecayWatch
from ampcompare.script.remarks.rounded_weights import RoundedWeightsWatch
from ampcompare.script.remarks.running_sums import LossySumWatch
from ampcompare.script.remarks.sampled_calls import SampledCallsWatch
from ampcompare.script.remarks.standing_statistics import StuckVarianceWatch
from ampcompare.script.remarks.tied_comparisons import TiedComparisonWatch
from ampcompare.script.torch_amp.keep_fp32 import KeptFp32AtFirstCall
from ampcompare.script.torch_amp.lifted_weights import HalfWeightLifter
from ampcompare.script.torch_amp.parallel_wrappers import ParallelWrappers
from ampcompare.script.torch_amp.plain_script import PlainScriptFollower
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn
from ampcompare.script.trainers import follow_trainers
from ampcompare.script.trainers.arm import TrainerContext
from ampcompare.script.watch.cell_facts import CellFactsRecorder
from ampcompare.training.precision.base import half_dtype_of

StandBehind = Callable[[Arm, ScriptProcessContext], TorchAmpStandIn]


class ArmStandIn:
    """An arm in the place of `apex.amp` and `torch.amp` of this process; with `for_cuda` the CPU is in that of CUDA.

    Attributes:
        arm: which does all but the formats of products, where it declares some.
        torch_amp: stands behind `torch.amp`.
        keeps_apex: the calls of `apex.amp` stay Apex's own.
    """

    def __init__(
        self,
        arm: Arm,
        rows: RecordedSteps | None,
        *,
        engine: str = "compat",
        watch: CellFactsRecorder | None = None,
        for_cuda: bool = False,
    ) -> None:
        in_script = require_in_script(arm)
        formats = (
            ScriptLinearFormats(arm, rows) if arm.roles is not None and arm.roles.linear_formats else None
        )
        if formats is not None:
            assert arm.inner is not None
            arm = arm.inner  # which does all else
            in_script = require_in_script(arm)
        self.arm = arm
        self._for_cuda = for_cuda
        self._rows = rows
        self._watch = watch
        self._events = Subscriptions(Layer.RECORD if arm.is_as_written else Layer.STAND_IN)
        self._wrappers = ParallelWrappers()
        self._wrappers.install(self._events)
        self._lifted = HalfWeightLifter(self._wrappers, rows, self._events)
        self.torch_amp = self._make_torch_amp(in_script, engine)
        self.torch_amp.install(self._events)
        if formats is not None:
            formats.install(self._events)  # before what makes a block of autocast, so inside of it
        plain = PlainScriptFollower(
            arm, self.torch_amp, self._lifted, for_cuda=for_cuda, rows=rows, given=self._record_weights
        )
        plain.install(self._events)
        self._casting = plain.casting
        self._whole_numbers = plain.whole_numbers
        if not in_script.is_as_written:
            disable_fp16_optimizers(rows, self._events)
        self.keeps_apex = in_script.keeps_apex
        self._answer_calls_of_apex(plain)
        self._keep_modules_in_fp32()
        if rows is not None:
            self._watch_steps(rows)
        has_autocast = arm.roles is not None and arm.roles.lists == "autocast"
        half = half_dtype_of(arm) if has_autocast else None
        follow_trainers(TrainerContext(arm, half, rows, plain.outer_calls_counted_as_inner), self._events)

    def _make_torch_amp(self, in_script: InScript, engine: str) -> TorchAmpStandIn:
        """Return what stands behind `torch.amp`, as the backend of the arm names it."""
        side = ScriptProcessContext(
            self._events,
            self._rows,
            self._wrappers,
            engine,
            "cpu" if self._for_cuda or not torch.cuda.is_available() else "cuda",
            self._record_weights,
            self._has_initialized_apex,
        )
        make: StandBehind = pkgutil.resolve_name(in_script.behind)
        return make(self.arm, side)

    def _answer_calls_of_apex(self, plain: PlainScriptFollower) -> None:
        """Put the arm behind `apex.amp` and the adapter that `migrate` writes, unless Apex's calls stay its own."""
        if not self.keeps_apex:
            self._put_in_place_of_amp(ScriptAmp(self.arm, plain, self._rows))
        elif self._rows is not None:
            self._events.wrap(*PatchPoints.BACKWARD, functools.partial(_record_unscaled_backward, self._rows))
        if not self.arm.is_as_written:
            answer = functools.partial(put_amp_functions_in_adapter, importlib.import_module("apex.amp"))
            call_with_each_adapter(answer, self._events)

    def _keep_modules_in_fp32(self) -> None:
        """Keep those that the arm names without casts, where it casts by calls."""
        context = self.torch_amp.find_casts_off_factory() if self.arm.keep_fp32 else None
        if context is not None:
            script = self.torch_amp.script
            KeptFp32AtFirstCall(self.arm.keep_fp32, context, lambda: script.acts).install(self._events)

    def _watch_steps(self, rows: RecordedSteps) -> None:
        """Remark what first gradients and rounding show."""
        steps = OptimizerStepEvents(self._events)
        MissingFirstGradientsWatch(rows).follow(steps)
        if not self.torch_amp.casts_loss:  # O1 has functions of its own in their place
            self._watch_roundings(rows, steps)

    def _watch_roundings(self, rows: RecordedSteps, steps: OptimizerStepEvents) -> None:
        """Remark what rounding takes from the script by its own lines."""
        calls = SampledCallsWatch(steps, self._events)
        StuckAverageWatch(rows).follow(
            steps, calls, lambda: self.torch_amp.casts_weights or bool(self._lifted.types)
        )
        LossySumWatch(rows).follow(calls)
        LostDecayWatch(rows).follow(steps, calls, optimizers=self.arm.is_as_written)
        StuckVarianceWatch(rows).follow(steps)
        TiedComparisonWatch(rows, half_dtype_of(self.arm)).follow(steps, self._events)
        CancelledNumbersWatch(rows).follow(steps, self._events)
        if not self.torch_amp.casts_weights:
            RoundedWeightsWatch(rows).follow(steps, self._events)

    def _put_in_place_of_amp(self, amp: ScriptAmp) -> None:
        functions = amp.functions_by_name()
        for name in ("", ".frontend", ".handle", ".amp", "._amp_state"):
            module: Any = importlib.import_module(f"ampcompare.apex.amp{name}")
            # The package has the session's state under the name of the module.
            module = sys.modules[f"ampcompare.apex.amp{name}"]
            for function in functions:
                if function in vars(module):
                    self._events.put_innermost(module, function, functions[function])
        self._events.wrap(dataloader._BaseDataLoaderIter, "__next__", self._next_batch_without_casts)
        if hasattr(os, "register_at_fork"):  # where processes can be forked
            os.register_at_fork(after_in_child=self._casting.switch_casts_off)

    def _record_weights(self, models: list[Any], optimizers: list[Any]) -> None:
        if self._watch is not None:
            self._watch.record_first_weights(models, optimizers)

    def _next_batch_without_casts(self, original: Any, iterator: Any) -> Any:
        """Get the next batch of a loader, without the arm's casts meanwhile."""
        # a loader without workers runs the script's transforms here
        with self._casting.block_without_casts():
            return original(iterator)

    def has_acted(self) -> bool:
        """Return whether the script has reached the arm; a step that its own GradScaler skips reaches no optimizer."""
        has_stepped = self._rows is not None and self._rows.num_steps > 0
        return (
            self._has_initialized_apex()
            or self.torch_amp.script.acts
            or (self.arm.is_as_written and has_stepped)
        )

    @property
    def lifted_types(self) -> list[str]:
        """The 16-bit types of weights that were lifted to fp32, such as "bfloat16"."""
        return self._lifted.types

    def find_refusal_of_error(self, error: BaseException) -> UnsupportedCombination | None:
        """Return that the types of this arm do not fit what the script computes, if that is what torch has raised."""
        casts = bool(self.arm.half) and self.has_acted()
        return find_refusal_under_arm(
            error,
            self.arm,
            self.torch_amp,
            arm_has_cast=casts,
            lifted_types=self._lifted.types,
            rounded_numbers_text=self._whole_numbers.seen,
        )

    def _has_initialized_apex(self) -> bool:
        """Return whether the script has called the `amp.initialize` of an Apex, which the arm does not stand behind."""
        names = ("ampcompare.apex.amp._amp_state", "apex.amp._amp_state")
        states: list[Any] = [sys.modules.get(name) for name in names]
        # O1 has a handle
        marks = {"opt_properties", "handle"} if self.arm.is_as_written else {"opt_properties"}
        return any(marks & vars(one._amp_state).keys() for one in states if hasattr(one, "_amp_state"))

    def end(self) -> None:
        """Restore all names; for tests, since the process belongs to the script."""
        self._events.end()
        self._casting.switch_casts_off()
        torch.clear_autocast_cache()


def _record_unscaled_backward(
    rows: RecordedSteps, original: Any, tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    """Record a loss that nothing scales, next to those of `scale_loss`."""
    if rows.is_outside_scale_loss_blocks:
        rows.add_unscaled_backward(
            number_or_detached_tensor(tensors if isinstance(tensors, Tensor) else tensors[0])
        )
    return original(tensors, *args, **kwargs)
