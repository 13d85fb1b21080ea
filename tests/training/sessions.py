"""Sessions of one process on the CPU, and what comes of them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble_run
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.session import TrainingSession

CPU = torch.device("cpu")


def make_session(settings: RunConfig, state: Any = None) -> TrainingSession:
    """Return the session that a worker would make."""
    precision = make_precision(settings.arm)
    assembly = assemble_run(settings.recipe, make_task(settings.recipe), precision, CPU, state=state)
    return TrainingSession(settings, assembly)


def events_of(session: TrainingSession) -> Iterator[list[StepRecord] | EpochResult]:
    """Yield the events of a session as a worker sees them."""
    _, context = choose_cpu_half_mode_and_context(
        session.config.cpu_half, session.precision.half_dtype, CPU, session.config.autocast_lists
    )
    with context:
        yield from session.train_and_yield_events()


def split(events: Iterable[list[StepRecord] | EpochResult]) -> tuple[list[StepRecord], list[EpochResult]]:
    """Return the steps and the epochs of events."""
    events = list(events)
    steps = [step for event in events if not isinstance(event, EpochResult) for step in event]
    return steps, [event for event in events if isinstance(event, EpochResult)]


def play(settings: RunConfig) -> tuple[list[StepRecord], list[EpochResult], TrainingSession]:
    """Train to the end; return steps, epochs and the session."""
    session = make_session(settings)
    return *split(events_of(session)), session
