"""Runs that learned nothing: how they are told from others, and what is not said of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ampcompare.results.analysis.pairing.learning import why_run_learned_nothing
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord, RunTrace
from ampcompare.testing import make_comparison, make_record

CHANCE = {"top1": 0.0528, "majority": 103}


def _with_losses(record: RunRecord, losses: Sequence[float]) -> RunRecord:
    return record.model_copy(update={"trace": RunTrace(steps=list(range(len(losses))), losses=list(losses))})


def _compare(arms: dict[str, dict[str, Any]], seeds: int = 3) -> Comparison:
    records = [make_record(arm, seed, **values) for arm, values in arms.items() for seed in range(seeds)]
    return make_comparison(records, arms=list(arms))


def test_a_comparison_at_chance_has_no_verdict() -> None:
    """Where the reference learned nothing, that is the headline, and neither verdict nor recommendation follows."""
    comparison = _compare({"fp32": CHANCE, "half": {**CHANCE, "seconds": 0.001}, "apex:O1": {"top1": 0.9}})
    reference, half, other = comparison.arms
    assert str(reference.quality) == str(half.quality) == "learned nothing (top-1 5.3 %, chance 10.3 %)"
    assert str(other.quality) == "no verdict (the reference learned nothing)"
    assert half.quality.low is None
    assert comparison.headline[0] == "Nothing to compare: fp32 learned nothing (top-1 5.3 %, chance 10.3 %)."
    assert comparison.headline[1].startswith("Step time relative to fp32")
    assert "recommended" not in "\n".join(comparison.reading).lower()


@pytest.mark.parametrize(
    ("values", "why"),
    [
        # 3 sd of 1000 guesses are 2.9 points
        ({"top1": 0.131, "majority": 103}, "top-1 13.1 %, chance 10.3 %"),
        ({"top1": 0.134, "majority": 103}, ""),
        ({"top1": 0.02, "majority": 5}, ""),
        ({"top1": 0.02}, ""),  # an older record: the number of classes is not known
        ({"skipped_steps": 100}, "all 100 steps skipped"),
        ({"skipped_steps": 99}, ""),
        ({"weights_moved": False}, "the weights did not move"),
        ({"weights_moved": True}, ""),
    ],
)
def test_why_a_run_learned_nothing(values: dict[str, Any], why: str) -> None:
    """Accuracy within three binomial deviations of the majority class, skipped steps, weights that stay."""
    assert why_run_learned_nothing(make_record(**values)) == why


def test_losses_that_do_not_fall() -> None:
    """Of 100 flat noisy curves most are seen, and of 100 that fall late, early or slowly none is taken for flat."""
    chance = np.random.default_rng(0)
    steps = np.arange(60)
    flat = 2.3 + 0.1 * chance.standard_normal((100, 60))
    late = flat - np.where(steps > 35, 0.3, 0.0)
    early = flat + np.where(steps < 3, 0.6, 0.0)
    slow = flat - steps / 200
    spikes = slow + 1e6 * (steps == 50)
    idle = {
        name: sum(
            bool(why_run_learned_nothing(_with_losses(make_record(), curve.tolist()))) for curve in curves
        )
        for name, curves in {
            "flat": flat,
            "late": late,
            "early": early,
            "slow": slow,
            "spikes": spikes,
        }.items()
    }
    assert idle["flat"] > 83
    assert {name: idle[name] for name in ("late", "early", "slow", "spikes")} == dict.fromkeys(
        ("late", "early", "slow", "spikes"), 0
    )


def test_a_rising_loss_and_a_short_one() -> None:
    """A loss that rises did not fall, with both ends as the reason; a short curve shows no trend."""
    rising = [2.3 + step / 100 for step in range(30)]
    assert (
        why_run_learned_nothing(_with_losses(make_record(), rising)) == "the loss did not fall, 2.34 to 2.54"
    )
    assert why_run_learned_nothing(_with_losses(make_record(), [*rising[:-1], float("nan")])).startswith(
        "the loss did not fall"
    )
    assert why_run_learned_nothing(_with_losses(make_record(), rising[:14])) == ""


def test_a_loss_that_is_lower_by_chance_is_called_so() -> None:
    """Its ends are in the reason, so that this does not say that the lower one is higher."""
    noise = [5.0, 6.5, 5.5, 6.0, 5.8] * 6
    losses = [one - step / 1000 for step, one in enumerate(noise)]
    why = why_run_learned_nothing(_with_losses(make_record(), losses))
    assert why == "the loss fell by no more than its noise, 5.79 to 5.77"


def test_a_loss_that_is_lower_at_the_end_fell() -> None:
    """Though so few and uneven losses show no trend; without the difference they show that there is none."""
    early, late = [6.0, 10.0] * 5, [4.5, 7.5] * 5
    assert why_run_learned_nothing(_with_losses(make_record(), [*early, *late])) == ""
    assert why_run_learned_nothing(_with_losses(make_record(), early * 2)).startswith("the loss did not fall")


def test_some_runs_at_chance_are_counted() -> None:
    """An arm of which one run learned something is judged, and its other runs are named."""
    records = [make_record("fp32", seed, top1=0.9, majority=103) for seed in range(3)]
    records += [make_record("half", seed, top1=0.9 if seed else 0.1, majority=103) for seed in range(3)]
    comparison = make_comparison(records, arms=["fp32", "half"])
    assert str(comparison.arms[1].quality).startswith("inconclusive")
    assert comparison.headline[0] == "Some runs learned nothing and count in the means: half in 1 of 3."
