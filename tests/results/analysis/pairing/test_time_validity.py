"""When step times mean nothing: each reading at its threshold, and what old records lack."""

from typing import Any

import pytest

from ampcompare.results.analysis.effects.step_time import invalid_reason
from ampcompare.results.records.run import RunRecord, SystemReadings
from ampcompare.testing import make_record


def _read(record: RunRecord, **readings: Any) -> RunRecord:
    good = {"timed_steps": 100, "outlier_share": 0.01, "cpu_share": 0.99, "load_average": 1.0, "cores": 2}
    return record.model_copy(update={"readings": SystemReadings(**{**good, **readings})})


@pytest.mark.parametrize(
    ("readings", "why"),
    [
        ({"timed_steps": 29}, "29 timed steps, 30 needed"),
        ({"load_average": 2.1}, "load 2.1 on 2 cores"),
        ({"cpu_share": 0.7}, "had 70 % of a core"),
        ({"outlier_share": 0.26}, "26 % of steps are outliers"),
        ({"first_half_seconds": 1.0, "second_half_seconds": 1.3, "halves_error": 0.02}, "second half 30 % slower"),
        ({"first_half_seconds": 1.0, "second_half_seconds": 0.9, "halves_error": 0.02}, "second half 10 % faster"),
        ({"clock_low_mhz": 2000, "clock_high_mhz": 3000}, "clock 2000 to 3000 MHz"),
        ({"throttled": ["power limit", "temperature"]}, "GPU slowed by temperature"),
        ({"other_processes": 2}, "2 other on the GPU"),
    ],
)
def test_each_reading_can_spoil_a_time(readings: dict[str, Any], why: str) -> None:
    """A reading past its threshold is named with its value."""
    assert invalid_reason(_read(make_record(), **readings)) == why


def test_cells_that_slow_each_other_on_the_host() -> None:
    """A thread that waits for a core next to other cells has no valid time; alone, other readings say so."""
    waits = _read(make_record(), waiting_share=0.08)
    assert invalid_reason(waits) == ""
    pooled = waits.model_copy(update={"jobs": 4})
    assert invalid_reason(pooled) == "waits 8 % of the time for a core, next to other cells"
    assert invalid_reason(_read(pooled, waiting_share=0.04)) == ""


def test_a_gpu_next_to_others_whose_clock_is_unknown() -> None:
    """An arm that heats its neighbors would go unseen: only a clock that was read makes a time of a pool valid."""
    alone = _read(make_record().model_copy(update={"environment": {"device": "cuda:0"}}))
    assert invalid_reason(alone) == ""
    pooled = alone.model_copy(update={"jobs": 2})
    assert invalid_reason(pooled) == "the clock of a GPU next to other cells was not read (extra gpu)"
    assert invalid_reason(_read(pooled, clock_low_mhz=1900, clock_high_mhz=1950)) == ""


@pytest.mark.parametrize(
    "readings",
    [
        {"outlier_share": 0.24},
        {"first_half_seconds": 1.0, "second_half_seconds": 1.04, "halves_error": 0.0},
        {"first_half_seconds": 1.0, "second_half_seconds": 1.3, "halves_error": 0.1},
    ],
)
def test_what_a_median_passes_over(readings: dict[str, Any]) -> None:
    """A few outliers, a small change between the halves, and one within their noise spoil nothing."""
    assert invalid_reason(_read(make_record(), **readings)) == ""


def test_a_power_limit_is_judged_by_the_clock() -> None:
    """A GPU at its power limit is in its normal state under load, as long as its clock holds."""
    capped = {"throttled": ["power limit"], "cpu_share": None}
    steady = _read(make_record(device="cuda:0"), **capped, clock_low_mhz=1600, clock_high_mhz=1650)
    moving = _read(make_record(device="cuda:0"), **capped, clock_low_mhz=1400, clock_high_mhz=1650)
    assert (invalid_reason(steady), invalid_reason(moving)) == ("", "clock 1400 to 1650 MHz")


def test_waiting_for_data_is_no_step_time() -> None:
    """A run that waits for its loader more than a tenth of its step compares loaders."""
    assert invalid_reason(make_record(seconds=0.01, data_seconds_median=0.0009)) == ""
    assert invalid_reason(make_record(seconds=0.01, data_seconds_median=0.004)) == (
        "data-bound: waits 40 % of a step for data"
    )


def test_workers_may_take_turns() -> None:
    """With loader processes or more threads the share of one core says nothing."""
    record = _read(make_record(), cpu_share=0.5)
    config = record.config.model_copy(update={"workers": 2})
    assert invalid_reason(record) != ""
    assert invalid_reason(record.model_copy(update={"config": config})) == ""


def test_old_records_are_judged_by_what_they_have() -> None:
    """A record without readings is valid if it has enough steps after its warm-up."""
    assert invalid_reason(make_record()) == ""
    assert invalid_reason(make_record(num_steps=35, warmup_steps=10)) == "25 timed steps, 30 needed"
