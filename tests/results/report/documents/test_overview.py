"""Notes below the table of a comparison."""

import re
from typing import Any

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


@pytest.mark.parametrize(
    ("steps", "status", "note"),
    [
        ((28, 25, 24), "completed", "77 steps in 3 runs"),  # it leaves out batches
        ((11, 11, 11), "diverged", "768 steps where no run diverged, "),
        ((768, 768, 768), "completed", ""),
    ],
)
def test_steps_that_an_arm_did_not_make_are_not_those_of_all(
    steps: tuple[int, ...], status: Any, note: str
) -> None:
    records = [make_record("fp32", seed, num_steps=768) for seed in range(3)]
    records += [make_record("half", seed, status=status, num_steps=count) for seed, count in enumerate(steps)]
    text = " ".join(Terminal(200).render(make_comparison(records, arms=["fp32", "half"])).split())
    (shared,) = re.findall(r"All arms: .*? skipped", text)
    assert ("768 steps" in shared) == (status == "diverged" or not note)
    assert text.count("768 steps") == 1
    assert note in text
