"""One run of a loop under an arm, watched operation by operation."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

from torch import Tensor
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.loops import Loop, LoopConditions, arm_precision_isolated
from ampcompare.diagnosis.observation import RunObservation
from ampcompare.diagnosis.step_watch import StepOperationsWatch
from ampcompare.diagnosis.watched_precision import StepsDone, WatchedPrecision
from ampcompare.training.precision.base import Precision, StepOutcome


def observe_loop(
    loop: Loop, arm: Arm, conditions: LoopConditions, lines: Sequence[str] = ()
) -> RunObservation:
    """Run `loop` under `arm`, with `lines` in fp32, from its beginning and return what was seen."""
    observation = RunObservation()
    watch = StepOperationsWatch(
        observation, steps=conditions.steps, reference=conditions.reference, kept_lines=lines
    )
    with arm_precision_isolated(arm, conditions) as precision, closing(watch), suppress(StepsDone):
        loop(ObservedPrecision(precision, watch))
    return observation


class ObservedPrecision(WatchedPrecision):
    """Shows the operations of a step too, without those of the arm itself, such as its unscaling."""

    def __init__(self, inner: Precision, watch: StepOperationsWatch) -> None:
        super().__init__(inner, watch)
        self._watch = watch
        self._operations = watch.operations
        watch.updates.masters = inner.masters

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        self._operations.note_operation_of_loss(loss)
        scales = self.loss_scales()
        self._watch.scale = scales[min(loss_id, len(scales) - 1)] if scales else 1.0
        inner = self.inner.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)
        with ExitStack() as stack:  # its two ends are not seen, what happens between them is
            end = stack.enter_context(ExitStack())
            with self._operations.pause():
                scaled = stack.enter_context(inner)
            stack.callback(lambda: end.enter_context(self._operations.pause()))
            yield scaled
            if not delay_unscale and not self._operations.is_paused:
                self._watch.count_gradients()

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        with self.scale_loss(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale) as scaled:
            scaled.backward()

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        with self._operations.pause():
            return self.inner.unscale(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        with self._operations.pause():
            outcome = super().step(*optimizers)
        self._watch.begin_step()
        return outcome
