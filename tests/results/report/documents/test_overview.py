"""Notes below the table of a comparison."""

import pytest

from ampcompare.results.report.terminal import Terminal
from ampcompare.testing import make_comparison, make_record

AVERAGE = "an average in bf16 stands still: 16 steps moved {} % of its elements; keep it in fp32 (train.py:9)"


@pytest.mark.parametrize(
    ("shares", "shown"),
    [
        (["0.59", "1.4", "0.79"], "0.59 to 1.4 %"),
        (["0.79", "0.79", "0.79"], " 0.79 %"),
    ],
)
def test_remarks_of_seeds_that_differ_in_a_share_are_one(shares: list[str], shown: str) -> None:
    records = [make_record("fp32", seed) for seed in range(3)]
    for seed, share in enumerate(shares):
        record = make_record("half", seed)
        texts = [AVERAGE.format(share), "another remark"]
        records.append(record.model_copy(update={"guards": texts}))
    text = " ".join(Terminal(120).render(make_comparison(records, arms=["fp32", "half"])).split())
    assert text.count("an average in bf16") == 1
    assert f"moved {shown.strip()} of its elements" in text
    assert text.count("another remark") == 1
