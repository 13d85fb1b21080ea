"""Where a training step is: its phase and module, marked through hooks of torch, for any loop.

The loop has no branch for it: `torch.autograd.backward` is replaced while a profile runs, and torch calls the hooks of
optimizers and modules.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import _tensor_str, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.diagnosis.profiling.trace import MODULE, PHASE, STEP
from ampcompare.diagnosis.sites import RunningModulesTracker
from ampcompare.results.records.profile import Phase

WRAPPER = r"^module(\.|$)"  # in names of what DistributedDataParallel has wrapped


class PhaseFollower(RunningModulesTracker):
    """Follows the phases of steps and the modules that run; a step ends where `end_step_and_take_seconds` is called."""

    def __init__(self, on_phase: Callable[[Phase, Phase], None] = lambda old, new: None) -> None:
        super().__init__()
        self.phase: Phase = "other"
        self.seconds: dict[Phase, float] = defaultdict(float)
        self.ranges = False  # of phases and modules in a trace
        self.learns_models = False  # models are those whose forward pass a loop calls
        self.on_print: Callable[[], None] | None = None  # called where a tensor becomes text
        self.on_phase = on_phase
        self.optimizers: list[Any] = []
        self._since = time.perf_counter()
        self._subscriptions = Subscriptions(Layer.WATCH)
        self._handles: list[Any] = []
        self._open: list[AbstractContextManager[Any]] = []  # ranges: the step, then the phase
        self._modules: list[AbstractContextManager[Any]] = []  # ranges of those that run, the innermost last
        self._depth = 0
        self._is_over = False

    def install(self) -> None:
        """Begin to follow the loops of this process."""
        self._subscriptions.wrap(torch.autograd, "backward", self._backward)
        self._subscriptions.wrap(_BaseDataLoaderIter, "__next__", self._time_next_batch)
        self._subscriptions.wrap(_tensor_str, "_str", self._note_tensor_print)
        self._handles = [
            register_module_forward_pre_hook(self._note_module_entered),
            register_module_forward_hook(self._note_module_left, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def restore_torch(self) -> None:
        """Leave torch as it was."""
        self._is_over = True
        self.end_profiler_ranges()
        self._subscriptions.end()
        for handle in self._handles:
            handle.remove()

    def name_modules_of_new_models(self, models: Iterable[nn.Module]) -> None:
        """Name the modules of some models; with several, names begin with the class of the model."""
        given = list(models)
        for model in given:
            known = self.models
            if all(model is not other for other in known):
                prefix = f"{type(model).__name__}:" if len(given) > 1 or known else ""
                self.name_modules(model, prefix, wrapper=WRAPPER)

    def begin_phase(self, phase: Phase) -> None:
        if phase == self.phase or self._is_over:
            return
        now = time.perf_counter()
        self.seconds[self.phase] += now - self._since
        self._since = now
        old, self.phase = self.phase, phase
        if self.ranges and len(self._open) > 1:
            self._open.pop().__exit__(None, None, None)
            self._open_profiler_range(f"{PHASE}{phase}")
        self.on_phase(old, phase)

    def stop_following(self) -> None:
        """Follow nothing more, such as in a process that was forked."""
        self._is_over = True
        self._open.clear()
        self.ranges = False

    def end_step_and_take_seconds(self) -> dict[Phase, float]:
        """End the step, begin the next, and return the seconds of the phases."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self._since
        self._since = now
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def restart_step(self) -> None:
        """Begin the step from here: what happened since `end_step_and_take_seconds` is not part of it."""
        self._since = time.perf_counter()
        self.seconds = defaultdict(float)

    def begin_profiler_ranges(self) -> None:
        self.ranges = True
        self._open_profiler_range(STEP)
        self._open_profiler_range(f"{PHASE}{self.phase}")

    def end_profiler_ranges(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)
        self.ranges = False

    def time_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, with the time that each takes as the phase "data"."""
        iterator = iter(batches)
        while True:
            self.begin_phase("data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.begin_phase("forward")
            yield batch

    def _open_profiler_range(self, name: str) -> None:
        block = record_function(name)
        block.__enter__()
        self._open.append(block)

    def _time_next_batch(self, original: Any, *args: Any) -> Any:
        before = self.phase
        self.begin_phase("data")
        try:
            return original(*args)
        finally:
            self.begin_phase("forward" if before in ("data", "other") else before)

    def _note_tensor_print(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Note that a tensor is printed: torch hides what it does for that from dispatch modes."""
        if self.on_print is not None:
            self.on_print()
        return original(*args, **kwargs)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._depth:  # a reentrant checkpoint runs one inside
            return original(*args, **kwargs)
        self._depth += 1
        self.begin_phase("backward")
        try:
            return original(*args, **kwargs)
        finally:
            self._depth -= 1
            self.begin_phase("unscale")

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self.begin_phase("optimizer")

    def _after_step(self, *_: Any) -> None:
        self.begin_phase("unscale")

    def _note_module_entered(self, module: nn.Module, _arguments: Any) -> None:
        if self._depth:  # a checkpoint computes it again in the backward pass
            return
        if not self.is_inside_module and torch.is_grad_enabled():
            self.begin_phase("forward")
            if self.learns_models and not self.has_module(module) and any(True for _ in module.parameters()):
                self.name_modules_of_new_models([module])
        outer = self.running_module
        self.note_module_entered(module)
        is_range = self.ranges and self.running_module != outer
        block = record_function(f"{MODULE}{self.running_module}") if is_range else nullcontext()
        block.__enter__()
        self._modules.append(block)

    def _note_module_left(self, *_: Any) -> None:
        if not self._depth and self._modules:
            self.note_module_left()
            self._modules.pop().__exit__(None, None, None)
