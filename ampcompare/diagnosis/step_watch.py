"""Watches the operations of one step after the other; another object says where a step begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.diagnosis.kept import lines_in_fp32
from ampcompare.diagnosis.observation import Observation, StepFacts
from ampcompare.diagnosis.shadow import Shadows
from ampcompare.diagnosis.sites import Sites
from ampcompare.diagnosis.updates import UpdateCounter
from ampcompare.diagnosis.watch import Key, Watch
from ampcompare.precision.base import owned_params
from ampcompare.records.diagnosis import Phase

__all__ = ["StepWatch"]

MAX_SKIPPED = 20  # a dynamic scale that begins too high is halved at each


class StepWatch:
    """The modes and counters of one run.

    Args:
        observation: gets the numbers of each step.
        steps: updates to make; up to 20 skipped ones are added.
        at: steps to watch; None for all.
        reference: type of the wide run; None for ranges alone.
        kept_lines: file:line of calls that run in fp32.

    Attributes:
        scale: loss scale of the present step.
        operations: the mode that sees them.
    """

    def __init__(
        self,
        observation: Observation,
        *,
        steps: int,
        at: Sequence[int] | None = None,
        reference: torch.dtype | None = torch.float32,
        kept_lines: Sequence[str] = (),
    ) -> None:
        self.observation = observation
        self.steps = steps
        self.at = at
        self.scale = 1.0
        self.sites = Sites()
        self.updates = UpdateCounter(self.sites.parameters)
        self._shadows = None if reference is None else Shadows(reference)
        self.operations = Watch(self.sites, self._shadows)
        self._kept_lines = kept_lines
        self._stack = ExitStack()
        self._step = self._applied = 0

    def open(self) -> None:
        """Enter the modes."""
        self._stack.callback(self.sites.close)
        self._stack.enter_context(lines_in_fp32(self._kept_lines, self.observation.functions))
        self._stack.enter_context(self.operations)

    def close(self) -> None:
        """Leave the modes, and hand over what holds for the whole run."""
        self._stack.close()
        self.observation.modules = list(self.sites.order)
        self.observation.failures |= set() if self._shadows is None else self._shadows.failures

    @property
    def is_watched(self) -> bool:
        """Whether the present step is one to watch."""
        return self.at is None or self._step in self.at

    @property
    def is_over(self) -> bool:
        """Whether all steps are made."""
        return self._applied >= self.steps or self._step >= self.steps + MAX_SKIPPED

    def end_step(self, applied: bool, optimizers: Sequence[Optimizer]) -> None:
        """Hand over what the step has shown, if it was watched.

        Args:
            optimizers: which have changed weights.
        """
        self.sites.forget()
        step = self.operations.drain()
        updates = self.updates.take()
        stepped = {update.parameter for update in updates}
        for event in step.events:
            if stepped and event.key[3] == "gradient":  # of another optimizer, whose step it was not
                event.constant |= _name(event.key[0], event.key[1]) not in stepped
        if step.events and self.is_watched:
            self.observation.add(StepFacts(self._step, applied, self.scale, step, updates))
        else:
            self.observation.skip(applied)
        if self._shadows is not None:  # weights have changed: the next step begins from those of the arm
            self._shadows.forget(param for _, param in self.sites.parameters())
            self._shadows.forget(param for optimizer in optimizers for param in owned_params(optimizer))
        self._step += 1
        self._applied += applied

    def add_weights(self, model: nn.Module | None = None) -> None:
        """Count the weights of all models, or of one."""
        self._add("weight", model)

    def add_gradients(self) -> None:
        """Count the gradients that a backward pass has left; one from 16-bit tensors has a wide one alongside."""
        self._add("gradient")

    def _add(self, phase: Phase, model: nn.Module | None = None) -> None:
        named: list[tuple[Key, Tensor]] = []
        stepped = self.updates.stepped
        unused: set[Key] = set()
        for name, param in self.sites.parameters(model):
            tensor = param if phase == "weight" else param.grad
            self.observation.device_type = param.device.type
            if tensor is not None and tensor.is_floating_point() and not tensor.is_sparse:
                key: Key = (*_split(name), "", phase)
                named.append((key, tensor))
                if phase == "gradient" and name in stepped:  # what comes behind its step is not used by it
                    unused.add(key)
        with self.operations.paused():
            self.operations.add(named, unused)


def _split(name: str) -> tuple[str, str]:
    """Return the module of a parameter, and the parameter's own name."""
    place = max(name.rfind("."), name.rfind(":"))
    is_model = place >= 0 and name[place] == ":"
    return name[: place + is_model] if place >= 0 else "", name[place + 1 :]


def _name(module: str, parameter: str) -> str:
    return f"{module}{'' if not module or module.endswith(':') else '.'}{parameter}"
