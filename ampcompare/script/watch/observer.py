"""Shows the steps of a user's own script to a watch, from its calls of modules, its backward passes and its record.

What lies between a backward pass and the next forward pass, such as unscaling, clipping and the step itself, is not
watched, and neither are modules that run without gradients.
"""

import os
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompare.base.patches import Layer, PatchPoints, Subscriptions, calling_frame
from ampcompare.diagnosis.step_watch import StepOperationsWatch
from ampcompare.script.recording.recorder import Recorder
from ampcompare.script.torch_amp.keep_fp32 import model_inside_wrappers
from ampcompare.script.watch.cell_facts import StepsReached


class ScriptObserver:
    """Follows a script from its first forward pass on, and ends it after the last step."""

    def __init__(self, watch: StepOperationsWatch) -> None:
        self.compiles = False
        self._watch = watch
        self._events = Subscriptions(Layer.WATCH)
        self._optimizers: list[Any] = []
        self._kinds: Counter[str] = Counter()
        self._begun = self._is_elsewhere = False
        self._after_backward = self._without_gradients = False
        self._depth = self._backwards = 0
        self._is_whole = False  # the last update, as far as its rows are known

    def install(self, recorder: Recorder) -> None:
        """Begin before the script does: its modes must lie below those of the script."""
        recorder.call_after_each_row(self._end_watched_step_at_row)
        for name in ("apex.amp", "apex.amp.frontend"):
            self._events.wrap(sys.modules[name], "initialize", self._note_initialized_models)
        self._events.wrap(*PatchPoints.BACKWARD, self._backward)
        self._events.wrap(*PatchPoints.ENTER_AUTOCAST, self._see_autocast_entered)
        self._events.wrap(torch, "compile", self._note_compile)
        for handle in (
            register_module_forward_pre_hook(self._see_module_entered),
            register_module_forward_hook(self._see_module_left, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer_step),
            register_optimizer_step_post_hook(self._watch.updates.count_lost_updates_after_step),
        ):
            self._events.call_at_end(handle.remove)
        self._watch.open()
        self._watch.operations.follows_unseen = self._watch.is_watched
        self._pause_or_resume_watch()
        if hasattr(os, "register_at_fork"):  # where processes can be forked
            os.register_at_fork(after_in_child=self._stop_observing_in_fork)

    def end(self) -> None:
        """Remove everything."""
        self._events.end()
        self._watch.close()

    def _stop_observing_in_fork(self) -> None:
        """See nothing in a process that the script has forked, such as a worker of a loader."""
        self._is_elsewhere = True
        self._watch.operations.follows_unseen = False
        self._pause_or_resume_watch()

    def _pause_or_resume_watch(self) -> None:
        self._watch.operations.is_paused = (
            not self._begun
            or self._is_elsewhere
            or self._after_backward
            or self._without_gradients
            or not self._watch.is_watched
        )

    def _begin_watch(self) -> None:
        if not self._begun:
            self._begun = True
            self._watch.operations.follows_unseen = False
            self._resume_watch()

    def _resume_watch(self) -> None:
        """Watch operations again behind a backward pass, and count the weights that the step begins with."""
        self._after_backward = False
        self._pause_or_resume_watch()
        if not self._watch.operations.is_paused:
            self._watch.count_weights()

    def _note_initialized_models(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Know the models of `amp.initialize` by the names that patterns of an arm are for."""
        models = args[0] if args else kwargs.get("models")
        given = list(models) if isinstance(models, list | tuple) else [models]
        result = original(*args, **kwargs)
        for model in given:
            if isinstance(model, nn.Module) and not self._watch.sites.has_module(
                model_inside_wrappers(model)
            ):
                self._name_modules(model, alone=len(given) == 1)
        self._begin_watch()
        return result

    def _name_modules(self, model: nn.Module, *, alone: bool) -> None:
        """Name the modules of a model and count its weights; the names of a second model begin with its class."""
        inner = model_inside_wrappers(model)
        sites = self._watch.sites
        has_weights = next(inner.parameters(), None) is not None
        is_first = has_weights and next(sites.named_parameters_of_step(), None) is None
        kind = type(inner).__name__
        self._kinds[kind] += 1
        prefix = f"{kind}{self._kinds[kind] if self._kinds[kind] > 1 else ''}:"
        sites.name_modules(inner, "" if is_first and alone else prefix)
        if not self._watch.operations.is_paused:
            self._watch.count_weights(inner)

    def _see_module_entered(self, module: nn.Module, _arguments: Any) -> None:
        sites = self._watch.sites
        if not sites.is_inside_module:
            self._without_gradients = not torch.is_grad_enabled()
            if not self._without_gradients:
                self._note_training_call(module)
            self._pause_or_resume_watch()
        sites.note_module_entered(module)

    def _note_training_call(self, module: nn.Module) -> None:
        """Note that the script calls a module to train it."""
        has_weights = next(module.parameters(), None) is not None
        is_new = not self._watch.sites.has_module(model_inside_wrappers(module))
        if is_new and (has_weights or self._begun):
            self._name_modules(module, alone=True)
        if has_weights:
            self._after_backward = False
            self._begin_watch()

    def _see_module_left(self, *_arguments: Any) -> None:
        sites = self._watch.sites
        sites.note_module_left()
        if not sites.is_inside_module:
            self._without_gradients = False
            self._pause_or_resume_watch()

    def _see_autocast_entered(self, original: Any, block: Any) -> Any:
        """Begin, or begin again after a backward pass, where code without modules may follow."""
        caller = calling_frame().f_globals.get("__name__", "")
        if (
            block._enabled
            and torch.is_grad_enabled()
            and not caller.startswith(("ampcompare.", "contextlib"))
        ):
            self._after_backward = False
            self._begin_watch()
            self._pause_or_resume_watch()
        return original(block)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._begun or self._depth or self._is_elsewhere:  # a reentrant checkpoint runs one inside
            return original(tensors, *args, **kwargs)
        self._after_backward = False
        self._pause_or_resume_watch()
        for loss in [tensors] if isinstance(tensors, Tensor) else tensors:
            self._watch.operations.note_operation_of_loss(loss)
        if not self._watch.operations.is_paused:
            self._watch.note_gradients_before_backward()
        self._depth += 1
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            self._depth -= 1
        self._backwards += 1
        if not self._watch.operations.is_paused:
            self._watch.count_gradients()
        self._after_backward = True
        self._pause_or_resume_watch()
        return result

    def _note_compile(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.compiles = True
        return original(*args, **kwargs)

    def _before_optimizer_step(self, optimizer: Any, *arguments: Any) -> None:
        if all(optimizer is not other for other in self._optimizers):
            self._optimizers.append(optimizer)
        if self._begun and self._watch.is_watched:
            self._watch.updates.keep_weights_before_step(optimizer)

    def _end_watched_step_at_row(self, row: dict[str, Any]) -> None:
        """End the watched step at its row of the record, and the script after the last one."""
        if row["kind"] == "backward" and row["scale_before"] is not None:
            self._watch.scale = float(_value_read_on_host(row["scale_before"]))
        elif row["kind"] == "step" and not self._backwards and not self._is_elsewhere:
            if self._is_whole and not _value_read_on_host(
                row["applied"]
            ):  # of another optimizer, behind the same passes
                self._watch.observation.skipped += 1
                self._is_whole = False
        elif row["kind"] == "step" and not self._is_elsewhere:
            self._backwards = 0
            self._is_whole = bool(_value_read_on_host(row["applied"]))
            self._watch.end_step(self._is_whole, self._optimizers)
            if self._watch.is_over:
                raise StepsReached(0)
            self._resume_watch()


def _value_read_on_host(value: Any) -> Any:
    return value() if callable(value) else value
