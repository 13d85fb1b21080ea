"""How far an optimizer's steps drift when the state that divides them is rounded after each step.

A running mean of squares with beta2 = 0.999 falls by at most 0.1 % a step, which is less than half a unit in the last
place of bf16 (0.2 to 0.4 %): rounded to nearest, it never falls, and the steps stay as small as the largest gradients
once made them. How the state moves is not taken from the optimizer's name: it is recognized from its values before and
after a step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.diagnosis.step_watch import params_and_dense_grads_to_step
from ampcompare.results.records.outlook import RoundedStateDrift

POINTS = 64  # of the steps ahead, over which the error is averaged
FALL = 100.0  # times by which squared gradients may still fall: tenfold smaller ones are common at the end
ELEMENTS = 256  # of one parameter
MAX_ELEMENTS = 2048  # of all together
MAX_STEPS = 10_000  # that are simulated: a mean with a decay of 0.999 forgets in fewer
RELATIVE = 1e-5  # difference of a state from what a rule says, which rounds otherwise than the optimizer

Kind = Literal["mean", "maximum", "sum"]


@dataclass(frozen=True)
class OptimizerStateRule:
    """How an optimizer moves the state by which it divides its steps.

    Attributes:
        kind: a running mean of squared gradients (Adam, RMSprop), a decaying maximum (Adamax), or a sum (Adagrad).
        decay: what is left of the state after a step without gradients; 1 for a sum.
    """

    kind: Kind
    decay: float

    def state_after_step(self, state: Tensor, gradient: Tensor) -> Tensor:
        """Return the state after a step, fp32 (elements,); the step divides by it, or by its root."""
        if self.kind == "mean":
            return self.decay * state + (1 - self.decay) * gradient.square()
        if self.kind == "maximum":
            return torch.maximum(self.decay * state, gradient.abs())
        return state + gradient.square()

    @property
    def power_dividing_step(self) -> float:
        """The power of the state that the step is divided by."""
        return 1.0 if self.kind == "maximum" else 0.5


def find_optimizer_state_rule(
    state_before: Tensor, gradient: Tensor, state_after: Tensor, group: Mapping[str, Any]
) -> OptimizerStateRule | None:
    """Return the rule that has moved a state by a gradient; None for one that is not known.

    Args:
        state_before: fp32 (elements,), the state before the step; `gradient` and `state_after` alike.
        group: of the optimizer, among whose numbers the decay is.
    """
    eps = group.get("eps")
    added = eps if isinstance(eps, float) else 0.0  # by Adamax to the gradient
    rules = [OptimizerStateRule("sum", 1.0)]
    for decay in _possible_decays(group):
        rules += [OptimizerStateRule("mean", decay), OptimizerStateRule("maximum", decay)]
    moved = []
    for rule in rules:
        tolerance = added if rule.kind == "maximum" else 0.0
        if torch.allclose(rule.state_after_step(state_before, gradient), state_after, RELATIVE, tolerance):
            moved.append(rule)
    return moved[0] if len(moved) == 1 else None


def _possible_decays(group: Mapping[str, Any]) -> Iterator[float]:
    """Yield each number of a group that may be a decay, once."""
    found: list[float] = []
    for name, value in group.items():
        for number in value if isinstance(value, tuple) and name != "params" else (value,):
            if isinstance(number, float) and 0.5 < number < 1 and number not in found:
                found.append(number)
                yield number


def mean_step_errors(
    rule: OptimizerStateRule,
    state: Tensor,
    gradients: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    steps: int,
) -> list[tuple[float, float]]:
    """Return the mean errors of the step's size over the steps ahead, where the state is rounded to a type after each.

    Each is the mean magnitude of the logarithm of the rounded step over that of fp32: 0.1 is a tenth of the step.

    Args:
        state: fp32 (elements,), after the last step that was seen.
        gradients: of some steps, fp32 (elements,) each.
        dtypes: the types; the path without rounding is computed once for all of them.
        steps: how many are still to come.

    Returns:
        For each type the error where gradients stay as they were, and where they vanish as the loss falls, until a
        squared gradient is a hundredth of what it was.
    """
    live = (state > 0) & torch.isfinite(state)
    if steps < 1 or not bool(live.any()):
        return [(0.0, 0.0)] * len(dtypes)
    state = state[live]
    drawn = [gradient[live] for gradient in gradients]
    order = torch.randint(len(drawn), (MAX_STEPS,), generator=torch.Generator().manual_seed(0)).tolist()
    stay = _mean_errors_by_type(rule, state, dtypes, steps, lambda step: drawn[order[step]])
    if rule.kind == "sum":  # which never falls in fp32 either
        return [(each, 0.0) for each in stay]
    least = (state if rule.kind == "maximum" else state.sqrt()) / math.sqrt(FALL)
    return list(zip(stay, _mean_errors_by_type(rule, state, dtypes, steps, lambda step: least), strict=True))


def _mean_errors_by_type(
    rule: OptimizerStateRule,
    state: Tensor,
    dtypes: Sequence[torch.dtype],
    steps: int,
    gradient_of: Callable[[int], Tensor],
) -> list[float]:
    """Return the mean error of the step's size over simulated steps; the last one stands for those behind it."""
    exact, held = state.clone(), [state.to(dtype).float() for dtype in dtypes]
    last = min(steps, MAX_STEPS)
    every = max(1, last // POINTS)
    errors: list[list[float]] = [[] for _ in dtypes]
    for step in range(last):
        gradient = gradient_of(step)
        exact = rule.state_after_step(exact, gradient)
        held = [
            rule.state_after_step(each, gradient).to(dtype).float()
            for each, dtype in zip(held, dtypes, strict=True)
        ]
        if step % every == 0 or step == last - 1:
            for each, found in zip(held, errors, strict=True):
                ratio = (each.clamp(min=1e-38) / exact.clamp(min=1e-38)).log() * rule.power_dividing_step
                found.append(float(ratio.abs().mean()))
    return [(sum(found) / len(found) * last + found[-1] * (steps - last)) / steps for found in errors]


@dataclass
class _ProbedState:
    """A state of one parameter: what it was after the last probe, and the gradients of all probes."""

    rule: OptimizerStateRule
    state: Tensor
    gradients: list[Tensor]


class OptimizerStateWatch:
    """Follows the state of optimizers over some of their steps, a sample of the elements of each parameter."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[Tensor, Tensor, Tensor]] = {}
        self._seen: dict[tuple[int, str], _ProbedState] = {}
        self.has_unknown = False

    def sample_state_before_step(self, optimizer: Optimizer) -> None:
        """Keep what a step starts from."""
        self._before = {}
        for param, gradient in params_and_dense_grads_to_step(optimizer):
            for name, state in state_tensors_of(optimizer, param):
                self._before[id(param), name] = (
                    evenly_sampled_elements(state),
                    evenly_sampled_elements(gradient),
                    evenly_sampled_elements(param),
                )

    def note_state_moves_after_step(self, optimizer: Optimizer) -> None:
        """Recognize how each state has moved; one that is nowhere negative and moves in no known way is noted."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                for name, state in state_tensors_of(optimizer, param):
                    if (id(param), name) in self._before:
                        self._note_state_move((id(param), name), evenly_sampled_elements(state), group)
        self._before = {}

    def _note_state_move(self, key: tuple[int, str], after: Tensor, group: Mapping[str, Any]) -> None:
        before, gradient, weight = self._before[key]
        if not bool((after >= 0).all()) or not bool((before > 0).any()):
            return
        decay = group.get("weight_decay", 0)
        for given in (
            (gradient, gradient + decay * weight) if isinstance(decay, float) and decay else (gradient,)
        ):
            rule = find_optimizer_state_rule(before, given, after, group)
            if rule is not None:
                seen = self._seen.setdefault(key, _ProbedState(rule, after, []))
                seen.state = after
                seen.gradients.append(given)
                return
        self.has_unknown |= key not in self._seen

    def largest_step_errors(
        self, dtypes: Sequence[torch.dtype], steps: int
    ) -> list[RoundedStateDrift | None]:
        """Return the largest error of a step's size that rounding to each type makes; None where no state is known."""
        worst: list[RoundedStateDrift | None] = [None] * len(dtypes)
        for rule in dict.fromkeys(seen.rule for seen in self._seen.values()):
            alike = [seen for seen in self._seen.values() if seen.rule == rule]
            probes = min(len(seen.gradients) for seen in alike)
            state = torch.cat([seen.state for seen in alike])
            chosen = torch.linspace(0, len(state) - 1, min(len(state), MAX_ELEMENTS)).long()
            gradients = [torch.cat([seen.gradients[at] for seen in alike])[chosen] for at in range(probes)]
            for at, (stay, fall) in enumerate(
                mean_step_errors(rule, state[chosen], gradients, dtypes, steps)
            ):
                found = RoundedStateDrift(steps=steps, decay=rule.decay, steady=stay, falling=fall)
                known = worst[at]
                if known is None or found.largest_error > known.largest_error:
                    worst[at] = found
        return worst


def state_tensors_of(optimizer: Optimizer, param: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of a parameter's shape that an optimizer keeps for it."""
    for name, value in optimizer.state.get(param, {}).items():
        if isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point():
            yield name, value


def evenly_sampled_elements(tensor: Tensor) -> Tensor:
    """Return some elements that lie evenly, fp32 on the host."""
    flat = tensor.detach().reshape(-1)
    return flat[:: math.ceil(flat.numel() / ELEMENTS) or 1].float().cpu().clone()
