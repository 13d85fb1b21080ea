"""All steps of one run, added up by place: what a diagnosis reports, and what its cures are judged by."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ampcompare.base.tensors.products import dtype_name
from ampcompare.diagnosis.operation_watch import Key, OperationResult, WatchedStep
from ampcompare.diagnosis.ranges import (
    magnitude_range_of_counts,
    total_nonfinite_and_lost_of,
    total_with_range_counts_added,
)
from ampcompare.results.records.diagnosis import LostUpdates, ModuleResultsAtStep, OperationPlace, PlaceReport

MAX_BROKEN_LOSSES = 3  # in a row


@dataclass
class StepFacts:
    """One watched step."""

    index: int
    applied: bool  # whether the weights were updated
    scale: float  # of the loss
    step: WatchedStep
    updates: list[LostUpdates]
    is_unfinished: bool = False  # the script ended in it, by an error or an exit code of its own


@dataclass
class _PlaceTotal:
    """A place over all steps so far."""

    row: Any = None
    calls: int = 0
    dtypes: set[str] = field(default_factory=set)
    error: float | None = None
    made: float | None = None

    def add_event(self, event: OperationResult) -> None:
        self.row = total_with_range_counts_added(self.row, event.row)
        self.calls += 1
        self.dtypes.add(dtype_name(event.dtype))
        if event.errors is not None:
            self.error = _larger_of_known(self.error, error_of_event(event))
            self.made = _larger_of_known(self.made, own_error_of_event(event))


class RunObservation:
    """Receives steps from `StepOperationsWatch`, and keeps the last ones."""

    def __init__(self, keep: int = 64) -> None:
        self.facts: list[StepFacts] = []
        self.steps = self.skipped = 0
        # A weight is not finite, or no loss of the last steps was: further ones show nothing new.
        self.is_broken = False
        self.modules: list[str] = []
        self.failures: set[str] = set()  # operations that have no wide run
        self.functions: set[str] = set()  # that ran in fp32 because of their line
        self.device_type = "cpu"
        # numbers that rounding changed, by place and line of the read
        self.reads: dict[tuple[str, str], str] = {}
        self.updates: dict[str, LostUpdates] = {}
        self._keep = keep
        self._broken_losses = 0
        self._totals: dict[Key, _PlaceTotal] = defaultdict(_PlaceTotal)
        self._map: dict[tuple[str, int], Any] = {}

    def count_unwatched_step(self, applied: bool) -> None:
        """Count a step that was not watched."""
        self.steps += 1
        self.skipped += not applied

    def add_step(self, facts: StepFacts) -> None:
        self.count_unwatched_step(facts.applied)
        self.add_unfinished_step(facts)

    def add_unfinished_step(self, facts: StepFacts) -> None:
        """Add what a step has shown that the script did not finish, without counting it."""
        self.facts = [*self.facts, facts][-self._keep :]
        loss = facts.step.index_of_loss
        is_finite = loss is None or not total_nonfinite_and_lost_of(facts.step.events[loss].row)[1]
        self._broken_losses = 0 if is_finite else self._broken_losses + 1
        self.is_broken |= self._broken_losses >= MAX_BROKEN_LOSSES
        for read in facts.step.reads:
            event = facts.step.events[read.at]
            name = operation_place_of(event.key).name
            text = f"{read.seen} for {read.exact} in fp32" if read.exact else f"{read.seen} others in fp32"
            self.reads.setdefault(
                (name, read.where),
                f"{name} rounds whole numbers to {dtype_name(event.dtype)}, and {read.where} reads them: {text}",
            )
        for event in facts.step.events:
            self._totals[event.key].add_event(event)
            module, _, _, phase = event.key
            if phase == "forward" and not event.constant:
                place = (module, facts.index)
                self._map[place] = total_with_range_counts_added(self._map.get(place), event.row)
        for update in facts.updates:
            known = self.updates.get(update.parameter)
            self.updates[update.parameter] = update if known is None else _with_lost_update(known, update)
            self.is_broken |= update.nonfinite > 0

    def place_reports(self, *phases: str) -> Iterator[PlaceReport]:
        """Yield the places of some phases, in the order in which they were first seen."""
        for key, total in self._totals.items():
            if key[3] in phases:
                yield PlaceReport(
                    place=operation_place_of(key),
                    calls=total.calls,
                    dtypes=sorted(total.dtypes),
                    range=magnitude_range_of_counts(total.row),
                    error=total.error,
                    made=total.made,
                )

    def results_by_module_and_step(self) -> list[ModuleResultsAtStep]:
        """Return the cells of the map of modules and steps."""
        return [
            ModuleResultsAtStep(module=name, step=step, range=magnitude_range_of_counts(row))
            for (name, step), row in self._map.items()
        ]


def name_of_parameter(key: Key) -> str:
    """Return the dotted name of the parameter whose weight or gradient an event is about."""
    module, parameter = key[:2]
    return f"{module}{'' if not module or module.endswith(':') else '.'}{parameter}"


def operation_place_of(key: Key) -> OperationPlace:
    return OperationPlace(module=key[0], operation=key[1], where=key[2], phase=key[3])


def error_of_event(event: OperationResult) -> float:
    """Return the relative error of a result against the wide run; infinite where it is not finite and that is."""
    return 0.0 if event.errors is None else relative_error(event.errors[0], event.errors[1])


def own_error_of_event(event: OperationResult) -> float:
    """Return the part of the relative error that the operation itself has made."""
    return 0.0 if event.errors is None else relative_error(event.errors[2], event.errors[1])


def relative_error(difference: float, size: float) -> float:
    """Return a difference relative to a size; infinite where it is not finite, or is relative to zero."""
    if not math.isfinite(size):
        return 0.0  # the wide run is not finite either
    if not math.isfinite(difference):
        return math.inf
    if size:
        return float(difference / size)
    return math.inf if difference else 0.0


def _larger_of_known(known: float | None, value: float) -> float:
    return value if known is None else max(known, value)


def _with_lost_update(known: LostUpdates, update: LostUpdates) -> LostUpdates:
    return known.model_copy(
        update={
            "moved": known.moved + update.moved,
            "lost": known.lost + update.lost,
            "nonfinite": max(known.nonfinite, update.nonfinite),
        }
    )
