"""Rows of a table that repeat those of another seed count once, and ties of a coarse metric do not."""

from __future__ import annotations

import numpy as np
import pytest

from ampcompare.base.errors import RecordError
from ampcompare.runs.analysis.tables.csv_table import read_table
from ampcompare.runs.analysis.tables.external import judge, without_copies

FP32, HALF = ["76.12", "76.30", "76.25"], ["75.80", "75.99", "75.91"]


def table(*arms: list[str], seeds: list[str] | None = None, names: str = "abcdefghi") -> str:
    lines = ["arm,seed,accuracy"]
    for name, values in zip(["fp32", *names], arms, strict=False):
        lines += [f"{name},{seeds[number] if seeds else number},{value}" for number, value in enumerate(values)]
    return "\n".join(lines)


def verdict(text: str) -> str:
    return judge(read_table(text, "t")).arms[1].accuracy_verdict


def test_three_rows_under_twelve_seeds_are_three() -> None:
    """What three runs cannot tell, their copies cannot, and the headline says that rows are not used."""
    thrice, copied = table(FP32, HALF), table(FP32 * 4, HALF * 4)
    assert verdict(copied) == verdict(thrice)
    comparison = judge(read_table(copied, "t"))
    assert comparison.seeds == [0, 1, 2]
    assert "9 rows are copies" in comparison.headline[0]
    assert any("seed 3 is an exact copy of that of seed 0" in line for line in comparison.reading)


def test_copies_of_an_arm_alone_and_of_coarse_rows() -> None:
    """An arm may be copied where the reference is not, an arm may be missing, and a sequence of counts repeats."""
    generator = np.random.default_rng(1)
    real = [f"{value:.2f}" for value in generator.normal(76.2, 0.1, 12)]
    assert len(without_copies(read_table(table(real, HALF * 4), "t").runs)[1]) == 9
    half_missing = table(FP32 * 4, HALF)
    assert len(without_copies(read_table(half_missing, "t").runs)[1]) == 9
    coarse = table(["94", "96", "92"] * 4, ["92", "94", "88"] * 4)
    assert judge(read_table(coarse, "t")).seeds == [0, 1, 2]
    blocks = table([v for v in ("94", "96", "92") for _ in range(4)], [v for v in ("92", "94", "88") for _ in range(4)])
    assert len(judge(read_table(blocks, "t")).seeds) == 3


def test_one_row_under_many_seeds_has_no_scatter() -> None:
    """Arms that differ in it are not worse; arms that are equal may be."""
    assert verdict(table(["94.0"] * 12, ["90.0"] * 12)) == "inconclusive (fewer than 3 seeds)"
    assert without_copies(read_table(table(["94.0"] * 12, ["94.0"] * 12), "t").runs)[1] == []


def test_close_values_are_on_no_coarse_grid_by_chance() -> None:
    """What a share of samples fits by chance does not hide copies."""
    assert len(without_copies(read_table(table(["76.12", "76.31", "76.25"] * 4), "t").runs)[1]) == 9


def test_a_margin_is_not_that_of_a_digit_that_lost_its_zero() -> None:
    """0.9 among 0.94 and 0.92 is 0.90."""
    comparison = judge(read_table(table(["0.9", "0.94", "0.92"], ["0.92", "0.96", "0.94"]), "t"))
    assert comparison.margin <= 1


def test_without_seeds_copies_count_once_too() -> None:
    """Lines of an arm that repeat more often than chance would are not runs."""
    lines = "\n".join([*(f"fp32,{v}" for v in FP32 * 4), *(f"half,{v}" for v in HALF * 4)])
    assert len(judge(read_table(f"arm,accuracy\n{lines}", "t")).excluded) == 18


@pytest.mark.parametrize("spread", [0.3, 0.6, 1.0, 3.0])
def test_ties_of_a_coarse_metric_are_runs(spread: float) -> None:
    """Counts of fifty images tie in most tables, and are taken for copies in about one of a hundred at most."""
    generator = np.random.default_rng([round(10 * spread)])
    taken = 0
    for _ in range(200):
        arms = np.round(generator.normal(30, spread, (3, 5))) * 2
        taken += bool(without_copies(read_table(table(*[[f"{v:g}" for v in arm] for arm in arms]), "t").runs)[1])
    assert taken <= 6


def test_a_seed_is_a_number() -> None:
    """0, 00 and 0.0 are one seed; so they pair between arms, and may stand once in each."""
    with pytest.raises(RecordError, match="appears twice"):
        read_table(table(FP32, seeds=["0", "00", "000"]), "t")
    with pytest.raises(RecordError, match="appears twice"):
        read_table(table(FP32, seeds=["1", "1.0", "2"]), "t")
    text = table(FP32, seeds=["0", "1", "2"]) + "\n" + table(["x"], HALF, seeds=["00", "01", "2.0"]).split("\n", 2)[2]
    assert judge(read_table(text, "t")).arms[1].pairs == 3


def test_copies_with_noise_are_copies_and_close_values_among_scattered_ones_are_not() -> None:
    """Noise far below the scatter, as of a seed that is ignored; values of ten seeds that lie as close as they may."""
    noisy = [[f"{float(value) + 1e-8 * number:.9f}" for number, value in enumerate(arm * 4)] for arm in (FP32, HALF)]
    assert len(judge(read_table(table(*noisy), "t")).seeds) == 3
    real = [f"{value:.6f}" for value in np.random.default_rng(3).normal(76.2, 0.1, 40)]
    assert without_copies(read_table(table(real), "t").runs)[1] == []
