"""Verdicts that rest on the seeds that survived are conditional, and nothing is recommended on them alone."""

from typing import Any

import pytest

from ampcompare.results.analysis.gates import check_gates, parse_gate
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.run import RunRecord
from ampcompare.testing import make_comparison, make_record

REFERENCE = [0.5, 0.52, 0.49, 0.51, 0.505, 0.5, 0.515, 0.495]
ARM = [0.501, 0.519, 0.491, 0.509, 0.506, 0.501, 0.514, 0.496]


def _comparison(lost: dict[str, tuple[str, int]], gain: float = 0.0, **terms: Any) -> Comparison:
    """Compare half, twice as fast and half as large, with fp32 over eight seeds, of which an arm loses the last."""

    def cell(arm: str, seed: int) -> RunRecord:
        status, count = lost.get(arm, ("completed", 0))
        top1, seconds, peak = {
            "fp32": (REFERENCE[seed], 0.01, 1000), "half": (ARM[seed] + gain, 0.005, 500)
        }[arm]  # fmt: skip
        error = "out of memory" if status == "failed" else None
        return make_record(
            arm, seed, top1=top1, seconds=seconds * (1 + 0.001 * (seed % 3)), peak_bytes=peak, error=error,
            status=status if seed >= 8 - count else "completed",
        )  # fmt: skip

    records = [cell(arm, seed) for seed in range(8) for arm in ("fp32", "half")]
    return make_comparison(records, arms=["fp32", "half"], **terms)


def _half(comparison: Comparison) -> ArmSummary:
    return comparison.arms[1]


@pytest.mark.parametrize("prefer", ["accuracy", "time", "memory"])
@pytest.mark.parametrize("lost", [{"fp32": ("diverged", 5)}, {"half": ("failed", 5)}, {"fp32": ("failed", 5)}])
def test_survivors_give_no_recommendation(lost: dict[str, tuple[str, int]], prefer: str) -> None:
    """Where a side lost five of eight seeds the verdict says so with the rate, and no arm is recommended."""
    comparison = _comparison(lost, gain=0.1 if prefer == "accuracy" else 0.0, prefer=prefer)
    word = "better" if prefer == "accuracy" else "equivalent (±0.5)"
    assert str(_half(comparison).quality) == f"conditional on 3 of 8 seeds ({word})"
    assert any(line.startswith(f"No arm is recommended for {prefer}") for line in comparison.reading)


def test_one_lost_seed_is_enough() -> None:
    """A single failure makes the verdict conditional: it may have been the seed that differs."""
    row = _half(_comparison({"half": ("failed", 1)}))
    assert str(row.quality) == "conditional on 7 of 8 seeds (equivalent (±0.5))"


def test_an_interruption_selects_no_seeds() -> None:
    """A run that the user stopped was not lost by what it computed."""
    row = _half(_comparison({"half": ("interrupted", 3)}))
    assert str(row.quality) == "equivalent (±0.5)"


@pytest.mark.parametrize("text", ["accuracy<-5", "accuracy:non-inferior"])
def test_a_gate_is_not_passed_by_survivors(text: str) -> None:
    """A limit or verdict on accuracy fails where the arm lost runs, and passes where all were completed."""
    (check,) = check_gates([parse_gate(text)], _comparison({"half": ("failed", 5)}))
    assert "conditional on" in check.failure
    assert "3 of 8" in check.failure
    (check,) = check_gates([parse_gate(text)], _comparison({}))
    assert (check.failure, check.skipped) == ("", "")
