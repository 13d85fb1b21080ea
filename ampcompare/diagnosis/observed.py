"""A precision around the arm's own that shows each step of any loop to a watch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.diagnosis.kept import lines_in_fp32
from ampcompare.diagnosis.observation import Observation, StepFacts
from ampcompare.diagnosis.shadow import Shadows
from ampcompare.diagnosis.sites import Sites
from ampcompare.diagnosis.updates import UpdateCounter
from ampcompare.diagnosis.watch import Watch
from ampcompare.precision.base import Precision, StepOutcome, owned_params
from ampcompare.precision.wrapper import PrecisionWrapper

__all__ = ["Enough", "Observed"]

MAX_SKIPPED = 20  # a dynamic scale that begins too high is halved at each


class Enough(Exception):
    """All steps that were asked for are made; it ends the loop."""


class Observed(PrecisionWrapper):
    """Begins to watch at `prepare`, closes a step at `step`, and raises `Enough` after the last one.

    Args:
        inner: the arm.
        observation: gets the numbers of each step.
        steps: updates to make; up to 20 that are skipped come on top.
        at: steps to watch; None for all.
        reference: type of the wide run; None for ranges alone.
        kept_lines: file:line of calls that run in fp32.
    """

    def __init__(
        self,
        inner: Precision,
        observation: Observation,
        *,
        steps: int,
        at: Sequence[int] | None = None,
        reference: torch.dtype | None = torch.float32,
        kept_lines: Sequence[str] = (),
    ) -> None:
        super().__init__(inner)
        self.observation = observation
        self.steps = steps
        self.at = at
        self._kept_lines = kept_lines
        self._sites = Sites()
        self._shadows = None if reference is None else Shadows(reference)
        self._watch = Watch(self._sites, self._shadows)
        self._stack = ExitStack()
        self._models: list[nn.Module] = []
        self._updates: UpdateCounter | None = None
        self._step = self._applied = 0
        self._scale = 1.0

    def __enter__(self) -> Observed:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self.observation.modules = list(self._sites.order)
        self.observation.failures |= set() if self._shadows is None else self._shadows.failures

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        prepared, stepped = self.inner.prepare(models, optimizers)
        self._models = prepared
        self._sites.follow(prepared)
        self._stack.callback(self._sites.close)
        self._stack.enter_context(lines_in_fp32(self._kept_lines, self.observation.functions))
        self._updates = self._stack.enter_context(UpdateCounter(prepared, stepped))
        self._stack.enter_context(self._watch)
        self._begin()
        return prepared, stepped

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        self._watch.mark_loss(loss)
        scales = self.loss_scales()
        self._scale = scales[min(loss_id, len(scales) - 1)] if scales else 1.0
        inner = self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)
        with self._unseen(inner) as scaled:
            yield scaled
            if not delay_unscale:
                self._add_parameters("gradient")

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        with self.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale) as scaled:
            scaled.backward()

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        with self._watch.paused():
            return self.inner.unscale(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        with self._watch.paused():
            outcome = self.inner.step(*optimizers)
            applied = all(outcome.applied)
            self._end(applied)
            if self._shadows is not None:  # weights have changed: the next step begins from those of the arm
                self._shadows.forget(param for model in self._models for param in model.parameters())
                self._shadows.forget(param for optimizer in optimizers for param in owned_params(optimizer))
        self._step += 1
        self._applied += applied
        if self._applied >= self.steps or self._step >= self.steps + MAX_SKIPPED or self.observation.is_broken:
            raise Enough
        self._begin()
        return outcome

    def _begin(self) -> None:
        self._watch.is_paused = self.at is not None and self._step not in self.at
        if not self._watch.is_paused:
            self._add_parameters("weight")

    def _end(self, applied: bool) -> None:
        """Hand over what the step has shown, if it was watched."""
        self._sites.forget()
        step = self._watch.drain()
        updates = self._updates.take() if self._updates is not None else []
        if step.events and (self.at is None or self._step in self.at):
            self.observation.add(StepFacts(self._step, applied, self._scale, step, updates))
        else:
            self.observation.skip(applied)

    def _add_parameters(self, phase: str) -> None:
        """Count weights, or gradients; a gradient that came from 16-bit tensors has a wide one alongside."""
        if self._watch.is_paused:
            return
        with self._watch.paused():
            for module_name, module in _modules(self._models):
                for name, param in module.named_parameters(recurse=False):
                    tensor = param if phase == "weight" else param.grad
                    if tensor is not None and tensor.is_floating_point() and not tensor.is_sparse:
                        self._watch.add((module_name, name, "", "weight" if phase == "weight" else "gradient"), tensor)

    @contextmanager
    def _unseen(self, context: AbstractContextManager[Tensor]) -> Iterator[Tensor]:
        """Enter and leave a context unseen; what happens inside is seen."""
        with self._watch.paused():
            value = context.__enter__()
        try:
            yield value
        except BaseException:
            with self._watch.paused():
                if not context.__exit__(*sys.exc_info()):
                    raise
        else:
            with self._watch.paused():
                context.__exit__(None, None, None)


def _modules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, by the name that `Sites` gives it."""
    for place, model in enumerate(models):
        prefix = f"model{place}." if len(models) > 1 else ""
        for name, module in model.named_modules():
            yield (prefix + name).rstrip("."), module
