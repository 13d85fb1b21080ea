"""The order of the cells of a run directory: the one that its plan records, and the one in which they really ran."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ampcompare.base.files.read import FileFault, read_json
from ampcompare.experiment.plan import Plan

__all__ = ["order_as_run", "with_recorded_order"]


class _RecordedOrder(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    order: list[str]
    order_seed: int | None = None  # missing in plans of earlier versions


def with_recorded_order(plan: Plan, folder: Path) -> Plan:
    """Return a plan in the order recorded in the run directory, extended by missing cells; else the plan unchanged."""
    path = folder / "plan.json"
    if not os.path.lexists(path):
        return plan
    try:
        recorded = _RecordedOrder.model_validate(read_json(path))
    except (FileFault, ValidationError):  # the run writes it again; other readers refuse it
        return plan
    seed = plan.order_seed if recorded.order_seed is None else recorded.order_seed
    return plan.in_order(recorded.order, seed)


def order_as_run(plan: Plan, starts: Sequence[str | None]) -> list[str]:
    """Return the cells as LABEL@SEED: those that ran by their start, then the others as they are planned.

    Args:
        starts: of each cell of the plan in ISO 8601, UTC; None where it did not run yet, "" where its record is of an
            earlier version, which kept no start.
    """
    order = plan.order
    ran = [(start, index) for index, start in enumerate(starts) if start is not None]
    waiting = [index for index, start in enumerate(starts) if start is None]
    return [order[index] for index in [*(index for _, index in sorted(ran)), *waiting]]
