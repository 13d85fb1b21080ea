"""Arms that computed the same: what is called identical, and what only has equal losses."""

from typing import Any

import pytest

from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import ProcessFacts, RunRecord
from ampcompare.results.report.columns import verdict_tone
from ampcompare.testing import make_record

TOP1 = [0.50, 0.52, 0.49, 0.51, 0.50]


def _runs(arm: str, seeds: int = 3, weights: str | None = "w", **values: Any) -> list[RunRecord]:
    """Runs with the losses, counts and weights of every other arm that is made here."""
    return [
        make_record(
            arm,
            seed,
            **{"top1": TOP1[seed], "losses": f"hash {seed}", **values},
            weights_sha256=None if weights is None else f"{weights} {seed}",
        )
        for seed in range(seeds)
    ]


def _compare(*runs: list[RunRecord]) -> Comparison:
    records = [record for arm in runs for record in arm]
    return summarize(records, arms=list(dict.fromkeys(record.arm for record in records)), reference="fp32")


def _words(comparison: Comparison) -> list[str]:
    return [str(row.quality) for row in comparison.arms[1:]]


def test_nine_equal_arms_are_identical() -> None:
    """Eight arms with the losses and weights of the reference are identical at three seeds: no test, no interval."""
    arms = ["half", "native:fp16", *(f"apex:O{level}" for level in range(4)), "native:bf16", "half:bn_fp32"]
    comparison = _compare(*(_runs(arm) for arm in ("fp32", *arms)))
    assert _words(comparison) == ["identical"] * 8
    assert {row.quality.low for row in comparison.arms[1:]} == {None}
    assert (
        comparison.headline[0]
        == "All eight arms are identical to fp32, every loss and all weights to the last bit."
    )


def test_identical_arms_take_no_share_of_the_error_rate() -> None:
    tested = [
        make_record("half", seed, top1=share + 0.004)
        for seed, share in enumerate([0.50, 0.53, 0.48, 0.51, 0.5])
    ]
    reference = _runs("fp32", 5)
    alone = _compare(reference, tested).arms[1]
    beside = _compare(reference, tested, *(_runs(f"apex:O{level}", 5) for level in range(4))).arms[1]
    assert (str(alone.quality), alone.quality.low) == (
        str(beside.quality),
        beside.quality.low,
    )
    assert alone.quality.low is not None


def test_identical_keeps_the_accuracy() -> None:
    """A faster identical arm is recommended, and colored as good."""
    fast = _runs("apex:O0", 5, seconds=0.005)
    comparison = _compare(_runs("fp32", 5), fast)
    assert (
        comparison.headline[0]
        == "Use apex:O0: identical to fp32, 0.50x (0.50 to 0.50) its step time on this CPU."
    )
    assert verdict_tone(comparison.arms[1].quality) == "good"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (None, "are not known to be equal"),  # an older record
        ("other", "differ"),
    ],
)
def test_equal_losses_are_not_identical(weights: str | None, words: str) -> None:
    """Without equal hashes of the weights the arm is tested, and only its losses are called equal."""
    comparison = _compare(_runs("fp32"), _runs("half", weights=weights))
    assert _words(comparison) == ["equivalent (±0.5)"]
    assert (
        f"Equal to fp32 to the last bit of every loss, training and validation: half; their final weights {words}."
        in comparison.reading
    )


@pytest.mark.parametrize(
    "values", [{"skipped_steps": 15}, {"top1": 0.4}, {"losses": "others"}, {"losses_sha256": None}]
)
def test_what_is_not_called_equal(values: dict[str, Any]) -> None:
    """An arm with skipped steps, other counts, other losses or none recorded is not said to be equal at all."""
    comparison = _compare(_runs("fp32"), _runs("half", **values))
    assert not [line for line in comparison.reading if line.startswith(("Equal to", "Identical to"))]
    assert _words(comparison) != ["identical"]


def test_older_records_of_several_processes_have_a_hash_of_weights() -> None:
    facts = ProcessFacts(
        world_size=2,
        nodes=1,
        global_batch_size=64,
        backend="gloo",
        wrapper="DDP",
        launcher="spawn",
        weights="abc",
    )
    arms = [
        [record.model_copy(update={"processes": facts}) for record in _runs(arm, weights=None)]
        for arm in ("fp32", "apex:O0")
    ]
    assert _words(_compare(*arms)) == ["identical"]


def test_one_run_that_differs_is_enough() -> None:
    """Identical in two seeds of three is not identical."""
    other = [*_runs("half", 2), make_record("half", 2, top1=TOP1[2], losses="x", weights_sha256="y")]
    assert _words(_compare(_runs("fp32"), other)) == ["equivalent (±0.5)"]
