"""When step times mean nothing: each reading at its threshold, and what old records lack."""

from typing import Any

import pytest

from ampcompare.results.analysis.effects.step_time import invalid_time_reason
from ampcompare.results.records.run import RunRecord, SystemReadings
from ampcompare.testing import make_record

CAPPED = {"throttled": ["power limit"], "cpu_share": None, "device": "cuda:0"}
HALVES = {"first_half_seconds": 1.0, "halves_error": 0.02}


def _read(record: RunRecord, **readings: Any) -> RunRecord:
    good = {"timed_steps": 100, "outlier_share": 0.01, "cpu_share": 0.99, "load_average": 1.0, "cores": 2}
    return record.model_copy(update={"readings": SystemReadings(**{**good, **readings})})


@pytest.mark.parametrize(
    ("readings", "why"),
    [
        ({"timed_steps": 29}, "29 timed steps, 30 needed"),
        ({"load_average": 2.1}, "load 2.1 on 2 cores"),
        ({"cpu_share": 0.7}, "had 70 % of a core"),
        ({"outlier_share": 0.24}, ""),
        ({"outlier_share": 0.26}, "26 % of steps are outliers"),
        ({**HALVES, "second_half_seconds": 1.3}, "second half 30 % slower"),
        ({**HALVES, "second_half_seconds": 0.9}, "second half 10 % faster"),
        ({**HALVES, "second_half_seconds": 1.04, "halves_error": 0.0}, ""),
        ({**HALVES, "second_half_seconds": 1.3, "halves_error": 0.1}, ""),  # within the noise
        ({"clock_low_mhz": 3000, "clock_high_mhz": 3300}, ""),
        ({"clock_low_mhz": 2000, "clock_high_mhz": 3000}, "clock 2000 to 3000 MHz"),
        ({**CAPPED, "clock_low_mhz": 1600, "clock_high_mhz": 1650}, ""),  # the normal state of a GPU
        # narrower than a CPU's
        ({**CAPPED, "clock_low_mhz": 1400, "clock_high_mhz": 1540}, "clock 1400 to 1540 MHz"),
        ({"throttled": ["power limit", "temperature"]}, "GPU slowed by temperature"),
        ({"other_processes": 2}, "2 other on the GPU"),
        ({"waiting_share": 0.08}, ""),
        ({"waiting_share": 0.04, "jobs": 4}, ""),
        ({"waiting_share": 0.08, "jobs": 4}, "waits 8 % of the time for a core, next to other cells"),
        ({"device": "cuda:0"}, ""),
        ({"device": "cuda:0", "jobs": 2}, "the clock of a GPU next to other cells was not read (extra gpu)"),
        ({"device": "cuda:0", "jobs": 2, "clock_low_mhz": 1900, "clock_high_mhz": 1950}, ""),
    ],
)
def test_each_reading_can_spoil_a_time(readings: dict[str, Any], why: str) -> None:
    """A reading past its threshold is named with its value; a median passes over a few outliers and small changes."""
    record = make_record(device=readings.get("device", "cpu")).model_copy(
        update={"jobs": readings.get("jobs", 1)}
    )
    readings = {name: value for name, value in readings.items() if name not in ("device", "jobs")}
    assert invalid_time_reason(_read(record, **readings)) == why


def test_waiting_for_data_is_no_step_time() -> None:
    """A run that waits for its loader more than a tenth of its step compares loaders."""
    assert invalid_time_reason(make_record(seconds=0.01, data_seconds_median=0.0009)) == ""
    assert invalid_time_reason(make_record(seconds=0.01, data_seconds_median=0.004)) == (
        "data-bound: waits 40 % of a step for data"
    )


def test_workers_may_take_turns() -> None:
    """With loader processes or more threads the share of one core says nothing."""
    record = _read(make_record(), cpu_share=0.5)
    assert (
        invalid_time_reason(
            record.model_copy(update={"config": record.config.model_copy(update={"workers": 2})})
        )
        == ""
    )


def test_old_records_are_judged_by_what_they_have() -> None:
    """A record without readings is valid if it has enough steps after its warm-up."""
    assert invalid_time_reason(make_record()) == ""
    assert invalid_time_reason(make_record(num_steps=35, warmup_steps=10)) == "25 timed steps, 30 needed"
