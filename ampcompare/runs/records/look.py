"""A look: one test of a comparison on certain runs, as recorded in the journal of a run directory."""

from __future__ import annotations

from pydantic import Field

from ampcompare.runs.records.fields import FrozenRecord

__all__ = ["LOSS_MARGIN", "Look"]

LOSS_MARGIN = 0.01


class Look(FrozenRecord):
    """What was tested, on which runs, under which terms, and at which error rate."""

    number: int = Field(ge=0, description="among the looks that tested something; 0 for one that could not")
    error_rate: float = Field(ge=0, lt=1, description="that it spent, of each claim over all arms")
    written: str = Field("", description="date and time")
    reference: str
    arms: list[str]
    seeds: list[int]
    pairs: dict[str, int] = Field({}, description="of each arm with the reference")
    cells: dict[str, str] = Field(description="a hash of each record, under LABEL@SEED")
    lost: list[str] = Field([], description="cells that failed, as LABEL@SEED")
    margin: float | str = Field(description="of the metric, as it was asked for: a number, or a rule")
    margin_unit: str = Field("pp", description="of a margin that is a number")
    time_margin: float
    loss_margin: float = LOSS_MARGIN
    planned: int | None = Field(None, description="number of looks that was planned; None if it was left open")
    pilot: list[int] = Field([], description="seeds whose spread has set the number of seeds; empty if it was given")
    changes: list[str] = Field([], description="in what it differs from earlier looks, apart from more runs")
    accuracy: dict[str, str] = Field({}, description="the verdict on each arm")
    time: dict[str, str] = Field({}, description="the verdict on each arm")
    loss: dict[str, str] = Field({}, description="the verdict on each arm's training loss at the end")
