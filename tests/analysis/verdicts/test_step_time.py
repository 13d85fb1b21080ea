"""Step times over timing rounds, and what tables show of a time that is invalid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ampcompare.analysis.inference.criteria import Criteria
from ampcompare.analysis.inference.looks import Design
from ampcompare.analysis.summary import summarize
from ampcompare.analysis.verdicts.step_time import rounds_sentence, step_times, time_verdicts
from ampcompare.records.readings import SystemReadings, TimingRound
from ampcompare.records.run import RunRecord
from ampcompare.report.columns import columns, verdict_columns

MakeRecord = Callable[..., RunRecord]
GOOD = {"timed_steps": 60, "outlier_share": 0.01, "cpu_share": 0.99, "load_average": 1.0, "cores": 2}


def _timed(record: RunRecord, seconds: Sequence[float], numbers: Sequence[int] | None = None, **bad: Any) -> RunRecord:
    """Return a record with timing rounds of these median step times; `bad` readings are those of the last."""
    rounds = [
        TimingRound(number=number, step_seconds_median=value, readings=SystemReadings(**GOOD))
        for number, value in zip(numbers or range(1, len(seconds) + 1), seconds, strict=True)
    ]
    rounds[-1] = rounds[-1].model_copy(update={"readings": SystemReadings.model_validate({**GOOD, **bad})})
    return record.model_copy(update={"timing_rounds": rounds})


def _with_load(record: RunRecord, load: float) -> RunRecord:
    return record.model_copy(update={"readings": SystemReadings.model_validate({**GOOD, "load_average": load})})


def test_rounds_replace_the_times_of_runs(make_record: MakeRecord) -> None:
    """Where both cells have rounds, their ratio counts over the rounds; those of a seed are one pair."""
    fp32 = _timed(make_record(seconds=0.01), [0.010, 0.020, 0.040])
    half = _timed(make_record("half", seconds=0.03), [0.005, 0.010, 0.080])
    times = step_times([(half, fp32)])
    assert times.ratio == pytest.approx(2 ** (-1 / 3))
    assert times.effect is not None
    assert times.effect.pairs == 1


def test_rounds_are_no_seeds(make_record: MakeRecord) -> None:
    """What a seed does to an arm is in all of its rounds: of seeds that scatter by 2 %, few comparisons are decided."""
    generator = np.random.default_rng(0)
    winners = 0
    for _ in range(100):
        pairs = []
        for seed in range(3):
            own = 0.02 * generator.normal(size=2)
            times = 0.01 * np.exp(own[:, None] + 0.002 * generator.normal(size=(2, 5)))
            half, fp32 = make_record("half", seed=seed), make_record(seed=seed)
            pairs.append((_timed(half, times[0].tolist()), _timed(fp32, times[1].tolist())))
        times_of_arm = step_times(pairs)
        assert times_of_arm.effect is not None
        assert (times_of_arm.effect.pairs, times_of_arm.effect.freedom) == (3, 2)
        records = [arm for arm, _ in pairs]
        verdict = time_verdicts({"half": (records, times_of_arm)}, Criteria(), Design())["half"]
        winners += verdict.word in ("better", "worse")
    assert winners <= 10


def test_one_seed_gives_no_winner_in_time(make_record: MakeRecord) -> None:
    """However many rounds it has."""
    fp32, half = _timed(make_record(), [0.010] * 9), _timed(make_record("half"), [0.005] * 9)
    verdict = time_verdicts({"half": ([half], step_times([(half, fp32)]))}, Criteria(), Design())["half"]
    assert verdict.word == "inconclusive (fewer than 3 seeds)"


def test_rounds_are_paired_by_their_number(make_record: MakeRecord) -> None:
    """A round that one cell lacks is no pair, and with no round in common the runs themselves are compared."""
    fp32 = _timed(make_record(seconds=0.01), [0.010, 0.020], [1, 2])
    half = _timed(make_record("half", seconds=0.03), [0.010, 0.005], [2, 3])
    times = step_times([(half, fp32)])
    assert times.effect is not None
    assert (times.effect.pairs, times.ratio) == (1, pytest.approx(0.5))
    without_a_time = _timed(half, [0.010, 0.0], [2, 3])
    assert step_times([(without_a_time, fp32)]).ratio == pytest.approx(0.5)
    alone = step_times([(_timed(half, [0.1], [4]), fp32)])
    assert alone.ratio == pytest.approx(3)


def test_an_invalid_round_is_left_out(make_record: MakeRecord) -> None:
    """Each round is judged by its own readings."""
    fp32 = _timed(make_record(), [0.01] * 4)
    half = _timed(make_record("half"), [0.01, 0.01, 0.01, 0.09], load_average=9.0)
    times = step_times([(half, fp32)])
    assert times.effect is not None
    assert (times.effect.pairs, times.ratio) == (1, pytest.approx(1))
    broken = _timed(make_record("half"), [0.09], load_average=9.0)
    assert step_times([(broken, _timed(make_record(), [0.01]))]).why_not == "invalid measurement (load 9.0 on 2 cores)"


def test_the_report_says_what_was_compared(make_record: MakeRecord) -> None:
    """The reading says that times are from rounds, and of how many; without any it says nothing."""
    records = [_timed(make_record(), [0.01] * 2), _timed(make_record("half"), [0.01] * 3)]
    assert rounds_sentence([make_record()]) == ""
    assert rounds_sentence(records) == (
        "Step times are compared over timing rounds (2 to 3 of each cell), in which arms take turns, not over runs; "
        "the rounds of a seed count as one pair."
    )
    assert rounds_sentence(records) in summarize(records, arms=["fp32", "half"], reference="fp32").reading


def test_an_invalid_time_is_not_shown_as_a_result(make_record: MakeRecord) -> None:
    """No table and no line prints the ratio or the throughput of an invalid measurement; the record keeps them."""
    records = [make_record(seed=seed, samples_per_second=6400.0) for seed in range(3)]
    records += [
        _with_load(make_record("half", seed, seconds=0.05, samples_per_second=1280.0), 9.0) for seed in range(3)
    ]
    comparison = summarize(records, arms=["fp32", "half"], reference="fp32")
    fp32, half = comparison.arms
    assert half.time_verdict == "invalid measurement (load 9.0 on 2 cores)"
    assert [columns(comparison)[name](half) for name in ("samples/s", "rel. time")] == ["-", "-"]
    assert [columns(comparison)[name](fp32) for name in ("samples/s", "rel. time")] == ["6,400", "1.00"]
    assert verdict_columns(comparison)["rel. time"](half) == "-"
    assert "its step time" not in str(comparison)
    assert (half.invalid_time, half.time_ratio) == ("load 9.0 on 2 cores", pytest.approx(5))
    valid = summarize([*records[:3], *(make_record("half", seed, seconds=0.05) for seed in range(3))],
                      arms=["fp32", "half"], reference="fp32")  # fmt: skip
    assert columns(comparison)["rel. time"](valid.arms[1]) == "5.00"
    assert "5.00x its step time" in str(valid)


def test_three_valid_runs_keep_the_throughput(make_record: MakeRecord) -> None:
    """An arm with one invalid run among four keeps its throughput, as its verdict is from the three others."""
    records = [_with_load(make_record(seed=seed), load) for seed, load in enumerate([0.5, 0.5, 0.5, 9.0])]
    row = summarize(records, arms=["fp32"], reference="fp32").arms[0]
    assert row.invalid_time == ""
