"""Step times over timing rounds, and what tables show of a time that is invalid."""

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from ampcompare.results.analysis.effects.step_time import step_time_evidence, time_ratio_of_log
from ampcompare.results.analysis.inference.verdict import Evidence
from ampcompare.results.analysis.pairing.pairs import Pair, Pairing
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.run import RunRecord, SystemReadings, TimingRound
from ampcompare.results.report.base import FORMATS
from ampcompare.results.report.columns import columns_with_values, table_of_columns
from ampcompare.results.report.terminal import Terminal
from ampcompare.testing import make_comparison, make_record

GOOD = {"timed_steps": 60, "outlier_share": 0.01, "cpu_share": 0.99, "load_average": 1.0, "cores": 2}


def _timed(
    record: RunRecord, seconds: Sequence[float], numbers: Sequence[int] | None = None, **bad: Any
) -> RunRecord:
    """Return a record with timing rounds of these median step times; `bad` readings are those of the last."""
    rounds = [
        TimingRound(number=number, step_seconds_median=value, readings=SystemReadings(**GOOD))
        for number, value in zip(numbers or range(1, len(seconds) + 1), seconds, strict=True)
    ]
    rounds[-1] = rounds[-1].model_copy(update={"readings": SystemReadings.model_validate({**GOOD, **bad})})
    return record.model_copy(update={"timing_rounds": rounds})


def _with_load(record: RunRecord, load: float) -> RunRecord:
    return record.model_copy(
        update={"readings": SystemReadings.model_validate({**GOOD, "load_average": load})}
    )


def _evidence(*pairs: Pair) -> Evidence:
    arms, references = zip(*pairs, strict=True)
    return step_time_evidence(Pairing(arms, references, pairs))


def _ratio(times: Evidence) -> float:
    assert times.mean is not None
    return time_ratio_of_log(-times.mean)


def test_rounds_are_paired_by_their_number() -> None:
    """A round that one cell lacks is no pair, and with no round in common the runs themselves are compared."""
    fp32 = _timed(make_record(seconds=0.01), [0.010, 0.020], [1, 2])
    half = _timed(make_record("half", seconds=0.03), [0.010, 0.005], [2, 3])
    times = _evidence((half, fp32))
    assert times.effect is not None
    assert (times.effect.pairs, _ratio(times)) == (1, pytest.approx(0.5))
    without_a_time = _timed(half, [0.010, 0.0], [2, 3])
    assert _ratio(_evidence((without_a_time, fp32))) == pytest.approx(0.5)
    alone = _evidence((_timed(half, [0.1], [4]), fp32))
    assert _ratio(alone) == pytest.approx(3)


def test_an_invalid_round_is_left_out() -> None:
    fp32 = _timed(make_record(), [0.01] * 4)
    half = _timed(make_record("half"), [0.01, 0.01, 0.01, 0.09], load_average=9.0)
    times = _evidence((half, fp32))
    assert times.effect is not None
    assert (times.effect.pairs, _ratio(times)) == (1, pytest.approx(1))
    broken = _timed(make_record("half"), [0.09], load_average=9.0)
    assert (
        str(_evidence((broken, _timed(make_record(), [0.01]))).untested)
        == "invalid measurement (load 9.0 on 2 cores)"
    )


@pytest.fixture
def unpaired() -> Comparison:
    """Two arms with three valid times each, of which two are those of unlike seeds, so that one pair is left."""
    records = []
    for seed in range(5):
        for arm, loads, seconds in (("fp32", (9, 9, 1, 1, 1), 0.0101), ("half", (1, 1, 1, 9, 9), 0.0205)):
            record = make_record(arm, seed, seconds=seconds, samples_per_second=3210.0, epoch_seconds=7.89)
            records.append(_with_load(record, loads[seed]))
    return make_comparison(records, arms=["fp32", "half"])


@pytest.mark.parametrize("name", ["table", "md", "latex", "html"])
def test_no_format_shows_an_invalid_time(name: str, unpaired: Comparison) -> None:
    """An arm whose pairs are invalid shows a word in place of its step time, throughput and time of an epoch."""
    assert str(unpaired.arms[1].time).startswith("invalid measurement")
    shown = dict(
        zip(
            columns_with_values(unpaired),
            table_of_columns(columns_with_values(unpaired), unpaired).texts[1],
            strict=True,
        )
    )
    assert (shown["step (ms)"], shown["epoch (s)"], shown["samples/s"]) == ("invalid", "invalid", "-")
    reporter = Terminal(details=True) if name == "table" else FORMATS[name].make_reporter()
    text = reporter.render(unpaired)
    rows = text.partition('id="runs"')[0]  # a run whose own time is valid shows it there
    assert "10.1" in rows
    assert not re.search(r"\b20\.5(?![\d%])", rows)


def test_a_run_with_an_invalid_time_has_none_in_the_csv(unpaired: Comparison) -> None:
    """Its line says why instead; the JSON keeps the number and the reason."""
    lines = list(csv.DictReader(io.StringIO(FORMATS["csv"].make_reporter().render(unpaired))))
    slow = [line for line in lines if line["invalid_time"]]
    assert {(line["arm"], line["seed"]) for line in slow} == {
        ("fp32", "0"),
        ("fp32", "1"),
        ("half", "3"),
        ("half", "4"),
    }
    assert {
        line[name] for line in slow for name in ("step_seconds_median", "samples_per_second", "epoch_seconds")
    } == {""}
    assert {line["step_seconds_median"] for line in lines if not line["invalid_time"]} == {"0.0101", "0.0205"}
    half = json.loads(FORMATS["json"].make_reporter().render(unpaired))["arms"][1]
    assert (half["step_seconds_median"], half["invalid_time"]) == (
        pytest.approx(0.0205),
        "load 9.0 on 2 cores",
    )


def test_older_reports_agree_on_invalid_times(unpaired: Comparison) -> None:
    """A row of a report that calls only the pairs invalid is read as one whose time is invalid."""
    row = unpaired.arms[1].model_dump() | {"invalid_time": ""}
    assert ArmSummary.model_validate(row).invalid_time == "load 9.0 on 2 cores"


def test_means_of_times_leave_invalid_runs_out() -> None:
    """An arm whose times count has the mean over the runs whose times do."""
    records = [
        _with_load(make_record(seed=seed, seconds=seconds), load)
        for seed, (load, seconds) in enumerate([(1, 0.01), (1, 0.01), (1, 0.01), (9, 0.05)])
    ]
    row = make_comparison(records, arms=["fp32"]).arms[0]
    assert (row.invalid_time, row.step_seconds_median) == ("", pytest.approx(0.01))
