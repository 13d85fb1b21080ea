"""Tables of others: what is read, and how bad ones are answered."""

from __future__ import annotations

import math

import pytest

from ampcompare.base.errors import RecordError
from ampcompare.runs.analysis.tables.csv_table import read_table


def _value(text: str) -> float:
    value = read_table(text, "t").runs[0].value
    assert value is not None
    return value.mean


def test_all_columns_are_read() -> None:
    """Arm, seed, accuracy, time, memory and divergence have their units, and any other column is a setting."""
    text = "# remark\narm,seed,accuracy,time,memory,diverged,batch,note\nfp32, 3 ,75.92,1:00:30,2300,no,256,hello\n"
    (run,) = read_table(text, "t").runs
    assert run.value is not None
    assert run.seconds is not None
    assert (run.arm, run.seed, run.value.mean, run.seconds.mean) == ("fp32", "3", 75.92, 3630.0)
    assert run.peak_bytes == 2300 * 2**20
    assert (run.settings, run.diverged) == ((("batch", "256"),), False)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators(separator: str) -> None:
    """Commas, semicolons and tabs separate; the header says which."""
    text = "arm,accuracy\nfp32,75.5\n".replace(",", separator)
    assert _value(text) == 75.5


@pytest.mark.parametrize("word", ["NaN", "nan", "inf", "diverged"])
def test_no_number_is_divergence(word: str) -> None:
    run = read_table(f"arm,accuracy\nhalf,{word}\n", "t").runs[0]
    assert (run.diverged, run.value) == (True, None)


def test_not_measured_is_no_divergence() -> None:
    """An empty accuracy was not measured, and a flag of divergence counts whatever the accuracy is."""
    runs = read_table("arm,accuracy,diverged\na,,\nb,10.0,yes\n", "t").runs
    assert [(run.diverged, run.value) for run in runs] == [(False, None), (True, None)]


@pytest.mark.parametrize(
    ("text", "seconds"), [("8h26m45s", 30405), ("13m27s", 807), ("12.5", 12.5), ("7:48", 468), ("90s", 90), ("", None)]
)
def test_times(text: str, seconds: float | None) -> None:
    run = read_table(f"arm,accuracy,time\na,1.5,{text}\n", "t").runs[0]
    assert (run.seconds and run.seconds.mean) == seconds


def test_shares_become_points() -> None:
    """Where no accuracy is above 1 they are shares, and the last digit counts a hundredfold."""
    table = read_table("arm,accuracy\na,0.9553\nb,0.9455\n", "t")
    values = [run.value for run in table.runs if run.value]
    assert [value.mean for value in values] == pytest.approx([95.53, 94.55])
    assert [value.step for value in values] == pytest.approx([0.01, 0.01])


BAD = {
    "": "t is empty",
    "# only a remark\n": "t is empty",
    "arm,accuracy\n": "t has a header and no runs",
    "a,b\n1,2\n": "no column 'arm'",
    "arm,seed\na,1\n": "no column 'accuracy'",
    "arm,accuracy\na,good\n": "line 2: accuracy is 'good'",
    "arm;accuracy\na;75,9\n": "'75,9', which is not a number; write it with a decimal point, .*: 75.9",
    'arm,accuracy,time\na,3,"1,234.5"\n': "time is '1,234.5', .*separators of thousands: 1234.5",
    "arm;accuracy;time\na;3;1.234,5\n": "thousands: 1234.5",
    "arm,accuracy\na,50,7\n": "line 2, has 3 cells where the header has 2",
    "arm,accuracy\n\n# x\na,150\n": "line 4: accuracy is 150",
    "arm,accuracy\na,-3\n": "accuracy is -3",
    "arm,accuracy\n,3\n": "line 2, names no arm",
    "arm,seed,accuracy\na,1,3\na,1,4\n": "line 3: a with seed 1 appears twice",
    "arm,accuracy\na,75.5\nb,0.755\n": "line 3: accuracy is 0.755 and line 2 has 75.5; fractions and percentages are "
    "mixed",
    "arm,acc,top1\na,75,75\n": "two columns of accuracy, 'acc' and 'top1'",
    "arm,accuracy,sd,n\na,75,-1,3\n": "line 2: sd is -1; a standard deviation is 0 or more",
    "arm,accuracy,sd,n\na,75,1,1\n": "line 2 gives a standard deviation, 1, for one run",
    "arm,accuracy,n\na,75,2.5\n": "line 2: n is 2.5; it must be the number of runs",
    "arm,throughput\na,0\n": "line 2: throughput is 0; it is above 0",
    "arm,accuracy,time\na,3,5 GB\n": "line 2: time is '5 GB'",
    "arm,name,accuracy\na,b,3\n": "two columns of arms, 'arm' and 'name'",
    "arm,accuracy,time\na,3,soon\n": "line 2: time is 'soon'",
    "arm,accuracy,memory\na,3,-1\n": "line 2: memory is -1",
    "arm,accuracy,diverged\na,3,perhaps\n": "diverged is 'perhaps'",
    "arm,accuracy,accuracy\na,3,4\n": "two columns 'accuracy'",
    "arm,accuracy,\na,3,4\n": "a column without a name",
    'arm,accuracy\n"a,3\n': "not a CSV",
}


@pytest.mark.parametrize(("text", "words"), BAD.items())
def test_bad_tables_are_answered_in_one_line(text: str, words: str) -> None:
    with pytest.raises(RecordError, match=words) as caught:
        read_table(text, "t")
    assert "\n" not in str(caught.value)


def test_a_table_too_long_is_refused() -> None:
    """A file of another kind is not searched for columns for minutes."""
    with pytest.raises(RecordError, match="characters"):
        read_table("x" * 20_000_001, "t")


def test_numbers_stay_finite() -> None:
    """No reading ends in a time that is infinite or not a number."""
    run = read_table("arm,accuracy,time\na,3,nan\n", "t").runs[0]
    assert run.seconds is None or math.isfinite(run.seconds.mean)


def test_forms_of_one_seed_are_one_and_large_seeds_stay_apart() -> None:
    """Zeros, signs, fractions and hexadecimal digits; a float has no room for 64 bits."""
    for first, second in (("0", "000"), ("16", "0x10"), ("1", "1.0"), ("7", "+7")):
        with pytest.raises(RecordError, match="appears twice"):
            read_table(f"arm,seed,accuracy\nfp32,{first},90.1\nfp32,{second},90.2\n", "t")
    read_table("arm,seed,accuracy\nfp32,9007199254740992,90.1\nfp32,9007199254740993,90.2\n", "t")
