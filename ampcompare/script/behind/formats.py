"""Formats of products in a script that names no model: linear layers get theirs when the script first calls a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError, UnsupportedCombination
from ampcompare.base.location import message_with_script_line
from ampcompare.base.patches import PatchPoints, Subscriptions
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.torch_amp.keep_fp32 import model_inside_wrappers
from ampcompare.training.precision.gemm import LinearFormatPlan


class ScriptLinearFormats:
    """Gives formats to every model that the script calls; they act where the arm underneath computes in bf16."""

    def __init__(self, arm: Arm, rows: RecordedSteps | None) -> None:
        self._arm = arm
        self._rows = rows
        self._plan = LinearFormatPlan(arm)
        self._inside = self._has_begun = False
        self._noted: set[str] = set()

    def install(self, events: Subscriptions) -> None:
        """Find models from now on."""
        events.wrap(*PatchPoints.FORWARD, self._give_formats_at_call)
        events.call_at_end(register_optimizer_step_post_hook(self._check_formats_after_step).remove)

    def _give_formats_at_call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return original(module, *args, **kwargs)
        model = model_inside_wrappers(module)
        with _errors_with_script_line():
            if not self._has_begun:
                self._has_begun, self._plan.seed = True, torch.initial_seed() % 2**31
            if not self._plan.has_module_of_model(model) and next(model.parameters(), None) is not None:
                self._plan.install(model)
        self._inside = True
        try:
            with _errors_with_script_line():
                self._plan.prepare_call_of_model(model, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self._inside = False

    def _check_formats_after_step(self, *_arguments: Any) -> None:
        """Check what ran; only now, since the forward pass may be in the closure of the step."""
        if not self._plan.has_acted:
            raise UnsupportedCombination.with_advice(
                message_with_script_line(
                    f"no linear layer (nn.Linear) of a model that the script has called has multiplied in bf16, so "
                    f"{self._arm} has no effect"
                ),
                str(self._arm.inner),
                remedy="leave out torch.compile of a function that calls the model",
            )
        with _errors_with_script_line():
            self._plan.check_guess_of_last_layer()
        for note in self._plan.notes if self._rows is not None else ():
            if note not in self._noted and self._rows is not None:
                self._noted.add(note)
                self._rows.add_arm_departure_note(note)


@contextmanager
def _errors_with_script_line() -> Iterator[None]:
    """Let errors name the line of the script."""
    try:
        yield
    except AmpCompareError as error:
        raise type(error)(message_with_script_line(str(error))) from None
