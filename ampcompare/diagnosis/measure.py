"""One run of a loop under an arm, watched."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.loops import Conditions, Enough, Loop, trained_under
from ampcompare.diagnosis.observation import Observation
from ampcompare.diagnosis.step_watch import StepWatch
from ampcompare.training.precision.base import Precision, PrecisionWrapper, StepOutcome

__all__ = ["Observed", "measure"]


def measure(loop: Loop, arm: Arm, conditions: Conditions, lines: Sequence[str] = ()) -> Observation:
    """Run `loop` under `arm` from its beginning and return what was seen.

    Args:
        lines: file:line of calls that run in fp32.
    """
    observation = Observation()
    watch = StepWatch(
        observation, steps=conditions.steps, at=conditions.at, reference=conditions.reference, kept_lines=lines
    )
    with trained_under(arm, conditions) as precision:
        with Observed(precision, watch) as observed, suppress(Enough):
            loop(observed)
    return observation


class Observed(PrecisionWrapper):
    """Begins to watch at `prepare`, closes a step at `step`, and raises `Enough` after the last one.

    Args:
        inner: the arm.
        watch: sees the operations; it ends with the block of this object.
    """

    def __init__(self, inner: Precision, watch: StepWatch) -> None:
        super().__init__(inner)
        self._watch = watch
        self._operations = watch.operations
        self._stack = ExitStack()

    def __enter__(self) -> Observed:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._watch.close()

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        prepared, stepped = self.inner.prepare(models, optimizers)
        # What a library has wrapped: names are those of the model, and steps are those of the optimizer inside.
        self._watch.sites.follow([getattr(model, "_forward_module", model) for model in prepared])
        for wrapper in stepped:
            optimizer = wrapper if hasattr(wrapper, "_optimizer_step_pre_hooks") else getattr(wrapper, "optimizer")  # noqa: B009
            self._stack.callback(optimizer.register_step_pre_hook(self._watch.updates.before_step).remove)
            self._stack.callback(optimizer.register_step_post_hook(self._watch.updates.after_step).remove)
        self._watch.open()
        self._begin()
        return prepared, stepped

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        self._operations.mark_loss(loss)
        scales = self.loss_scales()
        self._watch.scale = scales[min(loss_id, len(scales) - 1)] if scales else 1.0
        inner = self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)
        with self._unseen(inner) as scaled:
            yield scaled
            if not delay_unscale and not self._operations.is_paused:
                self._watch.add_gradients()

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        with self.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale) as scaled:
            scaled.backward()

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        with self._operations.paused():
            return self.inner.unscale(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        with self._operations.paused():
            outcome = self.inner.step(*optimizers)
            self._watch.end_step(all(outcome.applied), optimizers)
        if self._watch.is_over or self._watch.observation.is_broken:
            raise Enough
        self._begin()
        return outcome

    def _begin(self) -> None:
        self._operations.is_paused = not self._watch.is_watched
        if self._watch.is_watched:
            self._watch.add_weights()

    @contextmanager
    def _unseen(self, context: AbstractContextManager[Tensor]) -> Iterator[Tensor]:
        """Enter and leave a context unseen; what happens inside is seen."""
        with self._operations.paused():
            value = context.__enter__()
        try:
            yield value
        except BaseException:
            with self._operations.paused():
                if not context.__exit__(*sys.exc_info()):
                    raise
        else:
            with self._operations.paused():
                context.__exit__(None, None, None)
