"""The learning rates of one optimizer: those of its first steps, and from its schedulers those still to come."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, PolynomialLR, ReduceLROnPlateau

from ampcompare.base.live_objects import live_objects_of
from ampcompare.training.precision.base import learning_rate_of


@dataclass(frozen=True)
class RateForecast:
    """The learning rates of one optimizer from a step on."""

    basis: str  # where they come from; "" for rates that stay, as nothing has moved them
    known: bool  # whether the rest of the training has these rates
    total: int | None = None  # optimizer steps of the training
    first: int = 0  # the step of the first row
    rows: Sequence[Sequence[float]] = ()  # by step, by group; empty for rates that stay

    @property
    def are_all_falling(self) -> bool:
        """Whether each rate ends below where it is."""
        return bool(self.rows) and all(
            last < now for now, last in zip(self.rows[0], self.rows[-1], strict=True)
        )

    def rate_at(self, group: int, step: int, share: float) -> float | None:
        """Return the rate of a group at a share of the way from a step to the end; None if it stays."""
        if not self.rows:
            return None
        begun, last = step - self.first, len(self.rows) - 1
        return self.rows[min(max(round(begun + share * (last - begun)), 0), last)][group]


class RateFollower:
    """Follows one optimizer and its schedulers from its first step on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._schedulers = _own_schedulers_of(optimizer)
        self._rows: list[list[float]] = []  # learning rates by step, by group
        self._moves: list[list[int]] = []  # before each step, by scheduler

    def note_rates_of_next_step(self) -> None:
        """Note the rates of the step that follows."""
        self._rows.append([learning_rate_of(group) for group in self._optimizer.param_groups])
        self._moves.append([*map(_num_moves_of, self._schedulers)])

    def forecast_rates(self, total: int | None = None, loops: Sequence[float] = ()) -> RateForecast:
        """Return the rates from the step on that was noted last: a copy of each scheduler steps a dummy optimizer.

        Args:
            total: optimizer steps of the training; None where its scheduler or the loops say.
            loops: how often each loop of the script around a step runs, innermost first.
        """
        now = len(self._rows) - 1
        of_loops = math.ceil(math.prod(loops)) if loops else None
        schedulers = self._schedulers
        if any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
            return RateForecast("a plateau of a metric decides them", False, total or of_loops)
        if not schedulers:
            varies = any(row != self._rows[0] for row in self._rows)
            return RateForecast(
                "the script sets them itself" if varies else "", not varies, total or of_loops
            )
        has_moved = any(row != self._moves[0] for row in self._moves)
        epoch = round(math.prod(loops[:-1])) if len(loops) > 1 and not has_moved else None
        paces = [
            pace
            for number in range(len(schedulers))
            if (pace := self._find_moves_of_scheduler(number, epoch)) is not None
        ]
        if len(paces) < len(schedulers):
            return RateForecast("its scheduler made no step so far", False, total or of_loops)
        if total is None:
            ends = [
                pace.step_of_move(end)
                for each, pace in zip(schedulers, paces, strict=True)
                if (end := _find_num_moves_to_end(each))
            ]
            total = max(ends, default=of_loops)
        if total is None or total <= now:
            return RateForecast("its scheduler does not say when it ends: give --steps", False, total)
        try:
            rows = self._rates_by_step(paces, now, total)
        except Exception as error:  # a scheduler of the user's own
            return RateForecast(
                f"its scheduler cannot be stepped ahead ({type(error).__name__}: {error})", False, total
            )
        guess = f", if it moves every {epoch} steps" if any(pace.is_guess for pace in paces) else ""
        return RateForecast(f"its scheduler, to step {total}{guess}", True, total, now, rows)

    def departs_from_forecast(self, rates: RateForecast) -> bool:
        """Return whether the steps that have followed had other rates than a forecast says."""
        return any(
            not math.isclose(seen, said, rel_tol=1e-6, abs_tol=1e-12)
            for row, ahead in zip(self._rows[rates.first :], rates.rows, strict=False)
            for seen, said in zip(row, ahead, strict=False)
        )

    def _find_moves_of_scheduler(self, number: int, epoch: int | None) -> _SchedulerMoves | None:
        """Return how a scheduler moves; where it made no move, once an epoch, or None."""
        moves = [row[number] for row in self._moves]
        changes = [step for step in range(1, len(moves)) if moves[step] != moves[step - 1]]
        if not changes:
            return None if epoch is None else _SchedulerMoves(moves[-1], 1, epoch, epoch, is_guess=True)
        last = changes[-1]
        period = last - changes[-2] if len(changes) > 1 else last
        return _SchedulerMoves(moves[-1], moves[last] - moves[last - 1], period, last + period)

    def _rates_by_step(self, paces: Sequence[_SchedulerMoves], now: int, total: int) -> list[list[float]]:
        """Return the rates of each step from `now` on."""
        dummy = _dummy_optimizer_like(self._optimizer)
        rows = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the order of steps, which a copy cannot know
            copies = [copy.deepcopy(each, {id(self._optimizer): dummy}) for each in self._schedulers]
            for step in range(now, total):
                for each, pace in zip(copies, paces, strict=True):
                    if step >= pace.due and (step - pace.due) % pace.period == 0:
                        for _ in range(pace.moves):
                            each.step()
                rows.append([learning_rate_of(group) for group in dummy.param_groups])
        return rows


@dataclass(frozen=True)
class _SchedulerMoves:
    """How a scheduler moves: so far `made` times; from the step `due` on, `moves` times every `period` steps."""

    made: int
    moves: int
    period: int
    due: int
    is_guess: bool = False

    def step_of_move(self, move: int) -> int:
        """Return before which step it has made so many moves."""
        return self.due + (move - self.made - self.moves) * self.period // self.moves


def _dummy_optimizer_like(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the settings of each group, and one number to train in each."""
    groups = []
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key != "params"}
        values["lr"] = learning_rate_of(group)
        groups.append({**copy.copy(values), "params": [torch.zeros(1)]})
    return torch.optim.SGD(groups, lr=0.1)


def _own_schedulers_of(optimizer: Optimizer) -> list[Any]:
    """Return the schedulers of an optimizer that no other one steps."""
    # `vars`: objects of libraries may answer `getattr` by code of their own.
    found = [each for each in live_objects_of(LRScheduler) if vars(each).get("optimizer") is optimizer]
    inner = {id(one) for each in found for one in getattr(each, "_schedulers", ())}
    return [each for each in found if id(each) not in inner]


def _num_moves_of(scheduler: Any) -> int:
    """Return how often a scheduler was stepped; one of several at the same time counts by these."""
    own = getattr(scheduler, "last_epoch", None)
    return int(own) if own is not None else max(_num_moves_of(each) for each in scheduler._schedulers)


def _find_num_moves_to_end(scheduler: Any) -> int | None:
    """Return after how many moves a scheduler is at its end; None if it does not say."""
    parts = getattr(scheduler, "_schedulers", None)
    if parts is not None:
        ends = [_find_num_moves_to_end(each) for each in parts]
        milestones = getattr(scheduler, "_milestones", None)
        if milestones:  # one after the other
            return None if ends[-1] is None else int(milestones[-1]) + ends[-1]
        return max((end for end in ends if end is not None), default=None)
    falls = isinstance(scheduler, LinearLR) and scheduler.end_factor < scheduler.start_factor
    names = (
        "total_steps",
        "T_max",
        *(["total_iters"] if falls or isinstance(scheduler, PolynomialLR) else []),
    )
    for name in names:  # the end of a warm-up is none of the training
        if isinstance(value := getattr(scheduler, name, None), int):
            return value
    for function in getattr(scheduler, "lr_lambdas", ()):
        # of the schedules of Transformers
        value = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(value, int):
            return value
    return None
