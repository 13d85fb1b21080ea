"""Watches the first steps of a training: what 16-bit weights would lose of each update, now and at the rates ahead.

The optimizer's own update is rounded here: a weight in a 16-bit type, plus the update, rounded to nearest, is the same
weight or another. So no law of rounding is assumed, and momentum, Adam and weight decay need no case of their own. An
update is taken to be proportional to the learning rate, as in the optimizers of torch.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompare.diagnosis.rates import RateFollower, RateForecast
from ampcompare.diagnosis.state_rounding import MAX_STEPS, OptimizerStateWatch
from ampcompare.diagnosis.step_watch import params_and_dense_grads_to_step
from ampcompare.diagnosis.watched_precision import StepObserver
from ampcompare.results.records.outlook import ShareLost, WatchedFirstSteps
from ampcompare.training.ledger import find_second_moment, is_eps_zero_in
from ampcompare.training.precision.base import learning_rate_of, owned_params

PROBES = 8  # steps of the second half that are rounded
POINTS = 12  # of the rest of the schedule, at which each of them is
SAMPLE = 2**20  # elements of one tensor
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PrefixWatch(StepObserver):
    """Looks at each step of every optimizer, until `steps` of one are made.

    Args:
        total: optimizer steps of the whole training; None if only its scheduler knows.
        probes: steps whose updates are rounded; None for some of the second half.
    """

    def __init__(
        self, steps: int, *, total: int | None = None, probes: Collection[int] | None = None
    ) -> None:
        self.steps = steps
        self.total = total
        self.loops: Sequence[float] = ()  # around a step of a script, innermost first
        self.planned: int | None = None  # by a trainer, which has loops of its own
        self.losses: list[float | Tensor] = []
        self._made: dict[int, int] = {}
        self._rates: dict[int, RateForecast] = {}
        self._before: list[tuple[Tensor, Tensor]] = []
        self._lost: list[tuple[int, dict[str, Tensor]]] = []
        self._largest: list[Tensor] = []
        self._no_denominator: list[dict[str, Tensor]] = []
        self._histories: dict[int, RateFollower] = {}
        self._state = OptimizerStateWatch()
        self._schedule: Callable[[int], float] | None = None
        self._is_floor = False
        first = steps // 2
        self._probes = probes or {
            first + round(k * (steps - 1 - first) / (PROBES - 1)) for k in range(PROBES)
        }
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def follow_schedule(self, schedule: Callable[[int], float] | None, total: int) -> None:
        """Take the rates ahead from a factor by step, as ampcompare's own loop does.

        Args:
            schedule: returns the factor of the rate behind so many steps; None for a constant rate.
            total: steps of the whole training.
        """
        self._schedule = schedule or (lambda step: 1.0)
        self.total = total

    @property
    def is_over(self) -> bool:
        return max(self._made.values(), default=0) >= self.steps

    def see_loss(self, loss: Any) -> None:
        """Keep the loss of a backward pass, a number or a tensor of one element."""
        if isinstance(loss, Tensor):
            loss = loss.detach().float().clone() if loss.numel() == 1 else None
        if loss is not None:
            self.losses.append(loss)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def read_prefix(self) -> WatchedFirstSteps:
        """Return what was seen, read from the device."""
        rows = [(step, {name: counts.tolist() for name, counts in lost.items()}) for step, lost in self._lost]
        rates = []
        for optimizer, each in self._rates.items():
            if self._histories[optimizer].departs_from_forecast(each):
                each = replace(each, basis="its scheduler has left its own forecast", known=False)
            rates.append(each)
        largest = (
            torch.stack([each.float().cpu() for each in self._largest]) if self._largest else torch.zeros(0)
        )
        zero = {
            name: max((float(counts[name]) for counts in self._no_denominator), default=0.0) for name in TYPES
        }
        steps = max(self._made.values(), default=0)
        total = max((each.total for each in rates if each.total), default=self.total or self.planned)
        ahead = MAX_STEPS if total is None else total - steps
        errors = dict(zip(TYPES, self._state.largest_step_errors(list(TYPES.values()), ahead), strict=True))
        return WatchedFirstSteps(
            steps=steps,
            total=total,
            total_from=self._source_of_total(total),
            basis=min(rates, key=lambda each: (each.known, not each.basis)).basis if rates else "",
            rates_known=all(each.known for each in rates),
            is_floor=self._is_floor,
            losses=[float(loss) for loss in self.losses],
            largest_gradient=float(largest.max()) if len(largest) else None,
            zero_denominators={name: share for name, share in zero.items() if share},
            state_errors={name: error for name, error in errors.items() if error is not None},
            state_is_known=not self._state.has_unknown,
            shares={
                name: _shares_lost_over_probes([(step, counts[name]) for step, counts in rows])
                for name in TYPES
                if rows
            },
        )

    def _source_of_total(self, total: int | None) -> str:
        """Return who says how many steps the training makes; "" where nobody does."""
        if total is None:
            return ""
        if self._schedule is not None:
            return "the recipe"
        if self.total is not None:
            return "--steps"
        if self.loops and total == math.ceil(math.prod(self.loops)):
            return f"the loops around a step, {' x '.join(f'{each:g}' for each in reversed(self.loops))}"
        return "the trainer" if total == self.planned else "its scheduler"

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        grads = [param.grad for param in owned_params(optimizer) if param.grad is not None]
        dense = [grad for grad in grads if not grad.is_sparse and grad.numel()]
        if dense:
            self._largest.append(torch.stack([grad.detach().abs().amax().float() for grad in dense]).amax())
        made = self._made.get(id(optimizer), 0)
        if id(optimizer) not in self._histories:
            self._histories[id(optimizer)] = RateFollower(optimizer)
        self._histories[id(optimizer)].note_rates_of_next_step()
        self._before = []
        if made in self._probes:
            self._state.sample_state_before_step(optimizer)
            self._before = [
                (one, _vector_sample_of(one.detach()).float().clone())
                for one, _ in params_and_dense_grads_to_step(optimizer)
            ]

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        made = self._made.get(id(optimizer), 0)
        self._made[id(optimizer)] = made + 1
        if made == 0 or self._before:
            self._no_denominator.append(
                {name: share_of_steps_divided_by_zero(optimizer, dtype) for name, dtype in TYPES.items()}
            )
        if not self._before:
            return
        self._state.note_state_moves_after_step(optimizer)
        if id(optimizer) not in self._rates:
            self._rates[id(optimizer)] = self._forecast_rates_ahead(optimizer, made)
        rates = self._rates[id(optimizer)]
        self._is_floor |= not rates.are_all_falling or not any(
            find_second_moment(optimizer, p) is not None for p, _ in self._before
        )
        group_of = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        counts = {name: torch.zeros(1 + POINTS, 2, dtype=torch.float64) for name in TYPES}
        for param, before in self._before:
            update = _vector_sample_of(param.detach()).float() - before
            now = learning_rate_of(optimizer.param_groups[group_of[id(param)]])
            ahead = [
                rates.rate_at(group_of[id(param)], made, point / (POINTS - 1)) for point in range(POINTS)
            ]
            factors = [1.0, *(rate / now if rate is not None else 1.0 for rate in ahead)]
            for name, dtype in TYPES.items():
                counts[name] += lost_update_masses(before, update, dtype, factors).cpu()
        self._before = []
        self._lost.append((made, counts))

    def _forecast_rates_ahead(self, optimizer: Optimizer, made: int) -> RateForecast:
        if self._schedule is not None and self.total is not None:
            now = self._schedule(made) or 1.0
            rows = [
                [learning_rate_of(group) * self._schedule(step) / now for group in optimizer.param_groups]
                for step in range(made, self.total)
            ]
            return RateForecast(f"the recipe's schedule, to step {self.total}", True, self.total, made, rows)
        return self._histories[id(optimizer)].forecast_rates(
            self.total, self.loops or ([self.planned] if self.planned else ())
        )


def lost_update_masses(
    weight: Tensor, update: Tensor, dtype: torch.dtype, factors: Sequence[float]
) -> Tensor:
    """Return for each factor the mass of the fp32 update, and the mass that rounding loses, float64 (factors, 2)."""
    held = weight.to(dtype)
    wide, mass = held.float(), update.abs().double()
    rows = []
    for factor in factors:
        stays = (wide + update * factor).to(dtype) == held
        rows.append(torch.stack([mass.sum(), mass[stays].sum()]) * factor)
    return torch.stack(rows)


def share_of_steps_divided_by_zero(optimizer: Optimizer, dtype: torch.dtype) -> Tensor:
    """Return the share of elements whose step an optimizer would divide by zero with its state in a 16-bit type.

    That is where eps is zero in the type and so is the second moment; a gradient of zero gives 0 / 0.
    """
    counts = []
    for group in optimizer.param_groups:
        if not is_eps_zero_in(group, dtype):
            continue
        for param in group["params"]:
            second = find_second_moment(optimizer, param)
            if second is not None and param.grad is not None and not param.grad.is_sparse:
                zero = second.to(dtype) == 0
                counts.append(torch.stack([zero.sum(), torch.tensor(zero.numel(), device=zero.device)]))
    if not counts:
        return torch.zeros(())
    found, elements = torch.stack(counts).sum(0).tolist()
    return torch.tensor(found / elements)


def _vector_sample_of(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector, of at most SAMPLE elements that lie evenly."""
    flat = tensor.reshape(-1)
    return flat[:: math.ceil(flat.numel() / SAMPLE)] if flat.numel() > SAMPLE else flat


def _shares_lost_over_probes(rows: Iterable[tuple[int, list[list[float]]]]) -> ShareLost:
    """Return the shares of all probes of a type: at each probe, and over the rest as it was seen from each."""
    rows = list(rows)
    shares = [(step, [lost / mass if mass else 0.0 for mass, lost in counts]) for step, counts in rows]
    ahead = [sum(each[1:]) / len(each[1:]) for _, each in shares]
    return ShareLost(
        now=sum(each[0] for _, each in shares) / len(shares),
        rest=sum(ahead) / len(ahead),
        at={step: each[0] for step, each in shares},
        curve=shares[-1][1][1:],
    )
