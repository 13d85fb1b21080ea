"""Published figures to compare with measured ones."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Published", "PublishedRow"]


class PublishedRow(BaseModel):
    """One line of a published table. Shares are 0 to 1, times in seconds, sizes in bytes; None was not published."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str = Field(description="the arm and what is varied, as published")
    row: str | None = Field(None, description="the measured row that belongs to it, if any")
    top1: float | None = Field(None, description="of the last epoch")
    top1_best: float | None = None
    seconds: float | None = Field(None, description="of the whole run")
    epoch_seconds: float | None = None
    peak_bytes: int | None = None
    diverged: bool = False
    remark: str = ""


class Published(BaseModel):
    """A published table, and how far the measurements here are comparable with it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str
    machine: str = ""
    recipe: str
    scale: str | None = Field(None, description="smaller shape that was measured; None is the recipe as published")
    differs: list[str] = Field([], description="settings in which what was measured departs from the recipe")
    rows: list[PublishedRow]
