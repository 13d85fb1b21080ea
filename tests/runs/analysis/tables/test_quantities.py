"""Numbers as tables print them."""

from __future__ import annotations

import pytest

from ampcompare.runs.analysis.tables.quantities import Quantity, parse_bytes, parse_number, parse_rate, parse_seconds


@pytest.mark.parametrize(
    ("text", "mean", "sd"),
    [
        ("76.1", 76.1, None),
        ("76.1%", 76.1, None),
        ("76.1 %", 76.1, None),
        ("**76.1**", 76.1, None),
        ("77.01 ± 0.16", 77.01, 0.16),
        ("77.01±0.16%", 77.01, 0.16),
        ("77.01 +/- 0.16", 77.01, 0.16),
        ("77.01(16)", 77.01, 0.16),
        ("77.01 (0.16)", 77.01, 0.16),
        ("7.5e-3", 0.0075, None),
        ("−1.5", -1.5, None),
    ],
)
def test_numbers(text: str, mean: float, sd: float | None) -> None:
    """A number is read with the standard deviation that is printed with it."""
    value = parse_number(text)
    assert value is not None
    assert value.mean == pytest.approx(mean)
    assert value.sd == (None if sd is None else pytest.approx(sd))


@pytest.mark.parametrize(
    ("text", "step"), [("76", 1), ("76.1", 0.1), ("76.1%", 0.1), ("0.7610", 1e-4), ("7.5e-3", 1e-4)]
)
def test_the_step_is_that_of_the_last_digit(text: str, step: float) -> None:
    """A percent sign is no digit of resolution, a trailing zero is one."""
    value = parse_number(text)
    assert value is not None
    assert value.step == pytest.approx(step)


@pytest.mark.parametrize(
    "text", ["", "good", "7 6", "1,5", "1e999", "--1", "77 ±", "± 1", "77 ± -1", "٣", "1_000", "0x1f", "7.5e-320"]
)
def test_no_number(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "seconds", "step"),
    [
        ("12.1h", 43560, 360),
        ("824.4m", 49464, 6),
        ("824.4 minutes", 49464, 6),
        ("~5 hours", 18000, 3600),
        ("214 ms", 0.214, 0.001),
        ("8h26m45s", 30405, 1),
        ("8:26:45", 30405, 1),
        ("2 days", 172800, 86400),
        ("12.5", 12.5, 0.1),
    ],
)
def test_times(text: str, seconds: float, step: float) -> None:
    """Times are in seconds, each with the step of its last digit."""
    assert parse_seconds(text) == Quantity(pytest.approx(seconds), pytest.approx(step))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3.5 GB", 3.5e9),
        ("1.9 GiB", 1.9 * 2**30),
        ("1.9G", 1.9 * 2**30),
        ("2300 MiB", 2300 * 2**20),
        ("824.4m", 824.4 * 2**20),
        ("2300", 2300 * 2**20),
    ],
)
def test_sizes(text: str, size: float) -> None:
    """GB is 10^9 bytes, GiB and G are 2^30, and a plain number is MiB."""
    value = parse_bytes(text)
    assert value is not None
    assert value.mean == pytest.approx(size)


@pytest.mark.parametrize(
    ("text", "rate"), [("2470 img/s", 2470), ("494k", 494_000), ("1.2k samples/sec", 1200), ("60 fps", 60), ("5", 5)]
)
def test_rates(text: str, rate: float) -> None:
    """A throughput is whatever is counted per second."""
    value = parse_rate(text)
    assert value is not None
    assert value.mean == pytest.approx(rate)


@pytest.mark.parametrize("text", ["5 GB", "5 %", "five", "5 apples", "1:2:3:4"])
def test_other_units_are_refused(text: str) -> None:
    """A size is no time and no rate, and unknown units are none."""
    assert parse_seconds(text) is None
    assert parse_rate(text) is None


@pytest.mark.parametrize("text", ["5 h", "5 %", "5 apples", "8h26m45s"])
def test_other_units_are_no_size(text: str) -> None:
    assert parse_bytes(text) is None
