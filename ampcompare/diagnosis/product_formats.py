"""Which linear layer a format hurts most: the gradient of one batch, with one product of one layer rounded.

The loop trains in bf16 to the last step. There it is repeated with each product of each layer in its format, all else
in bf16, and the whole gradient is compared. A layer that stands out is kept in bf16, and trained, for proof.
"""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.backends.arm import Arm
from ampcompare.backends.gemm import LAST
from ampcompare.base.errors import ConfigError
from ampcompare.diagnosis.loops import Loop, LoopConditions, arm_precision_isolated
from ampcompare.diagnosis.remedies import diagnosis_sentence
from ampcompare.diagnosis.watched_precision import StepObserver, StepsDone, WatchedPrecision
from ampcompare.results.records.diagnosis import (
    CandidateTrial,
    Cure,
    Diagnosis,
    Fault,
    FormatError,
    OperationPlace,
)
from ampcompare.training.precision.base import PrecisionWrapper, Prepared, StepOutcome, applied_outcome
from ampcompare.training.precision.gemm import FormatForward, Gemm
from ampcompare.training.twin import perturb_weights

OUTSTANDING = 5.0  # times the error of the next layer
CURED = 0.5  # of the gap to bf16 that is gone
TAIL = 5  # of the losses, the last of so many parts count
MAX_LAYERS = 64


class _OneRoundedProductPrecision(PrecisionWrapper):
    """Trains in bf16, and ends in the last step with the gradient of all weights, one product of one layer rounded.

    Attributes:
        gradient: of all that the optimizers of the last step update.
        weights: of the models before the last step.
        layers: the linear layers by name.
    """

    inner: Gemm

    def __init__(
        self, inner: Gemm, steps: int, rounded: tuple[str, str] | None, weights: list[Tensor] | None
    ) -> None:
        super().__init__(inner)
        self._left = steps
        self._rounded = rounded
        self.weights = weights
        self._skips = weights is not None
        self.gradient = torch.zeros(0)
        self.layers: dict[str, FormatForward] = {}
        self._models: list[nn.Module] = []

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        prepared, stepped = super()._prepare(models, optimizers)
        self._models = prepared
        modules = [module for model in prepared for module in model.modules()]
        self.layers = {
            one.name: one for module in modules if isinstance(one := module.forward, FormatForward)
        }
        for layer in self.layers.values():
            layer.rounded_alone = ()
        self._round_product_in_last_step()
        return prepared, stepped

    def _round_product_in_last_step(self) -> None:
        """Before the last step, take the weights of the training or keep them, and round one product."""
        if self._left > 1:
            return
        held = [tensor for model in self._models for tensor in (*model.parameters(), *model.buffers())]
        if self.weights is None:
            self.weights = [tensor.detach().clone() for tensor in held]
        else:
            with torch.no_grad():
                for tensor, value in zip(held, self.weights, strict=True):
                    tensor.copy_(value)
        if self._rounded is not None:
            name, role = self._rounded
            self.layers[name].rounded_alone = (role,)

    def backward(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> None:
        if self._left == 1 or not self._skips:
            super().backward(loss, optimizers, loss_id=loss_id, delay_unscale=delay_unscale)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        if self._left == 1:
            params = [param for optimizer in optimizers for param in self.inner.unscale(optimizer)]
            self.gradient = torch.cat(
                [param.grad.double().flatten() for param in params if param.grad is not None]
            )
            raise StepsDone
        outcome = applied_outcome(len(optimizers)) if self._skips else super().step(*optimizers)
        self._left -= 1
        self._round_product_in_last_step()
        return outcome


class _LossObserver(StepObserver):
    """The losses of some steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._losses: list[Tensor] = []

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def see_loss(self, loss: Tensor) -> None:
        self._losses.append(loss.detach().float())

    def see_update(self, outcome: StepOutcome, optimizers: Sequence[Optimizer]) -> None:
        self._left -= 1

    def mean_loss_of_last_fifth(self) -> float:
        """Return the mean of the last fifth."""
        losses = torch.stack([loss.flatten().mean() for loss in self._losses]).tolist()
        return float(statistics.mean(losses[-max(1, len(losses) // TAIL) :]))


class _PerturbedTwinPrecision(WatchedPrecision):
    """Trains from weights that are changed by one part in 512, before an arm makes masters of them."""

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        perturb_weights(param for model in models for param in model.parameters())
        return super()._prepare(models, optimizers)


def diagnose_formats(
    loop: Loop, arm: Arm, conditions: LoopConditions, *, subject: str, cures: bool
) -> Diagnosis:
    """Find the layer that stands out by the error of its products, and prove by training what keeping it changes.

    Raises:
        ConfigError: the loop made too few steps, or the model has too many layers to try each.
    """
    exact = _train_to_gradient_with_rounded_product(loop, arm, conditions, None, None)
    layers = [name for name, layer in exact.layers.items() if layer.has_acted and not layer.is_kept]
    kept = [name for name, layer in exact.layers.items() if layer.is_kept]
    if len(layers) > MAX_LAYERS:
        raise ConfigError(
            f"diagnose runs the loop once for each product of each layer, and this model has {len(layers)} linear "
            f"layers, more than {MAX_LAYERS}; diagnose a smaller model of the same kind, or keep parts by keep=PATTERNS"
        )
    assert arm.roles is not None
    roles = [role for role, form in arm.roles.linear_formats.items() if form.format != "bf16"]
    norm = exact.gradient.norm()
    errors = []
    for role in roles:
        for name in layers:
            gradient = _train_to_gradient_with_rounded_product(
                loop, arm, conditions, (name, role), exact.weights
            ).gradient
            error = float((gradient - exact.gradient).norm() / norm) if norm else 0.0
            errors.append(
                FormatError(layer=name, role=role, error=error if math.isfinite(error) else math.inf)
            )
    found = Diagnosis(
        arm=str(arm),
        subject=subject,
        verdict="",
        steps=conditions.steps,
        observed=[conditions.steps - 1],
        modules=list(exact.layers),
        formats=errors,
        faults=_fault_of_outstanding_layer(errors, conditions.steps - 1),
        notes=[f"kept in bf16 by the arm: {', '.join(kept)}"] if kept else [],
    )
    if found.faults and cures:
        found = _train_and_add_proof(found, loop, arm, conditions, kept)
    return found.model_copy(update={"verdict": diagnosis_sentence(arm, found)})


def _train_to_gradient_with_rounded_product(
    loop: Loop,
    arm: Arm,
    conditions: LoopConditions,
    layer_and_product: tuple[str, str] | None,
    weights: list[Tensor] | None,
) -> _OneRoundedProductPrecision:
    with arm_precision_isolated(arm, conditions) as precision:
        measured = _OneRoundedProductPrecision(
            cast(Gemm, precision), conditions.steps, layer_and_product, weights
        )
        with suppress(StepsDone):
            loop(measured)
    if not len(measured.gradient):
        raise ConfigError(
            f"the loop made fewer than {conditions.steps} steps, or one without gradients; give fewer"
        )
    return measured


def _fault_of_outstanding_layer(errors: Sequence[FormatError], step: int) -> list[Fault]:
    """Return the layer whose largest error is so many times that of the next layer; none if there is none."""
    worst: dict[str, FormatError] = {}
    for one in errors:
        if one.layer not in worst or one.error > worst[one.layer].error:
            worst[one.layer] = one
    ordered = sorted(worst.values(), key=lambda one: -one.error)
    if len(ordered) < 2 or not ordered[0].error >= OUTSTANDING * ordered[1].error > 0:
        return []
    one, ratio = ordered[0], ordered[0].error / ordered[1].error
    times = f"{ratio:.0f} times as much as" if math.isfinite(ratio) else "far more than"
    text = (
        f"{one.layer} changes the gradient by {100 * one.error:.2g} % in {one.role}, {times} the next layer"
    )
    return [
        Fault(kind="format", place=OperationPlace(module=one.layer, operation=one.role), step=step, text=text)
    ]


def _train_and_add_proof(
    diagnosis: Diagnosis, loop: Loop, arm: Arm, conditions: LoopConditions, kept_layers: Sequence[str]
) -> Diagnosis:
    """Return a diagnosis with what training with the layer in bf16 showed, next to the arm, bf16 and its twin."""
    name = diagnosis.faults[0].place.module
    own = str(arm.options.get("keep", LAST))
    patterns = [] if own == "none" else own.split("|")
    if own == LAST:
        patterns = list(kept_layers)
    cured = arm.with_options(keep="|".join(dict.fromkeys([*patterns, name])))
    plain = Arm.make(arm.backend, format="bf16", over=arm.options.get("over"), keep="none")
    base = _train_and_average_last_losses(loop, plain, conditions)
    floor = abs(_train_and_average_last_losses(loop, plain, conditions, is_twin=True) - base)
    gap, rest = (_train_and_average_last_losses(loop, other, conditions) - base for other in (arm, cured))
    left = ""
    if not gap > floor:
        left = f"the loss is {gap:+.3g} from that of bf16, and a twin's {floor:.3g}: more steps may show more"
    elif not rest <= (1 - CURED) * gap:
        left = f"the loss is {rest:+.3g} from that of bf16, and was {gap:+.3g}"
    trial = CandidateTrial(name=f"keep={cured.options['keep']}", cures=not left, left=left)
    notes = [*diagnosis.notes]
    cure = None
    if not left:
        notes.append(
            f"loss over the last fifth of {conditions.steps} steps: {gap:+.3g} from bf16, {rest:+.3g} with the cure, "
            f"{floor:.3g} a twin"
        )
        cure = Cure(keeps=[name], arm=str(cured), code=f"# as an arm: {cured}")
    return diagnosis.model_copy(update={"trials": [trial], "cure": cure, "notes": notes})


def _train_and_average_last_losses(
    loop: Loop, arm: Arm, conditions: LoopConditions, *, is_twin: bool = False
) -> float:
    """Return the mean loss of the last fifth of a training."""
    losses = _LossObserver(conditions.steps)
    with arm_precision_isolated(arm, conditions) as precision, suppress(StepsDone):
        loop((_PerturbedTwinPrecision if is_twin else WatchedPrecision)(precision, losses))
    return losses.mean_loss_of_last_fifth()
