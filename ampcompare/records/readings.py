"""State of the machine while steps were timed, and further timings of a cell after its run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ampcompare.records.fields import Finite, FrozenRecord

__all__ = ["SystemReadings", "TimingRound"]


class SystemReadings(FrozenRecord):
    """What the machine did while steps were timed; None where it cannot be read. Shares are 0 to 1."""

    timed_steps: int
    outlier_share: float | None = Field(
        None, description="timed steps more than 3 scaled MADs, and more than 1 %, from the median"
    )
    first_half_seconds: float | None = Field(None, description="median of the first half of the timed steps")
    second_half_seconds: float | None = None
    halves_error: float | None = Field(None, description="standard error of the logarithm of the ratio of the two")
    cpu_share: float | None = Field(None, description="CPU: processor time of the process over wall time")
    waiting_share: float | None = Field(
        None, description="time for which the training thread was ready but had no core, over wall time"
    )
    load_average: float | None = Field(None, description="highest one-minute load average")
    cores: int | None = None
    clock_low_mhz: float | None = None
    clock_high_mhz: float | None = None
    throttled: list[str] = Field([], description="reasons for which the GPU lowered its clock")
    joules_per_unit: float | None = Field(
        None, description="energy of the GPU over timed steps for each image, token, ..., by NVML's counter; of rank 0"
    )
    other_processes: int | None = Field(None, description="largest number of other compute processes on the GPU")


class TimingRound(FrozenRecord):
    """One more timing of a cell: a median over some steps of a separate process, in turn with the other arms."""

    number: Annotated[int, Field(ge=1)]
    started: str | None = Field(None, description="ISO 8601, UTC")
    step_seconds_median: Finite | None = None
    data_seconds_median: Finite | None = None
    readings: SystemReadings | None = None
