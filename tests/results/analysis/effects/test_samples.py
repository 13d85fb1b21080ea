"""Per-image results in a comparison: intervals for new images, pairs of single models, and what cannot be used."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from ampcompare.results.analysis.inference.sample_size import round_to_two_digits
from ampcompare.results.records.comparison import ArmSummary, Comparison
from ampcompare.results.records.evaluation import pack_right_samples
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.html.page import Html
from ampcompare.results.report.json import Json
from ampcompare.results.report.markdown import Markdown
from ampcompare.results.report.terminal import Terminal
from ampcompare.testing import make_comparison, make_record

IMAGES = 1000


@pytest.fixture
def run() -> Callable[..., RunRecord]:
    """A run with these images correct; `labels` are those of the validation set."""

    def make(arm: str, seed: int, correct: Any, labels: Any = None, **changes: Any) -> RunRecord:
        record = make_record(arm, seed, top1=float(np.mean(correct)))
        images = pack_right_samples(correct, np.arange(IMAGES) % 10 if labels is None else labels)
        epoch = record.summary.epochs[0].model_copy(update={"per_sample": images.model_copy(update=changes)})
        return record.model_copy(update={"summary": record.summary.model_copy(update={"epochs": [epoch]})})

    return make


def both(wrong: Sequence[Sequence[int]]) -> list[Any]:
    """Correctness of an arm by seed: all images but these."""
    rows = np.ones((len(wrong), IMAGES), dtype=bool)
    for row, images in zip(rows, wrong, strict=True):
        row[list(images)] = False
    return list(rows)


def compared(runs: Callable[..., RunRecord], arm: Sequence[Any], reference: Sequence[Any]) -> Comparison:
    records = [runs("half", seed, correct) for seed, correct in enumerate(arm)]
    records += [runs("fp32", seed, correct) for seed, correct in enumerate(reference)]
    return make_comparison(records, arms=["fp32", "half"], margin=0.5)


def row_of(comparison: Comparison) -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == "half")


def test_equal_differences_on_few_images_hold_for_these_only(run: Any) -> None:
    """Two images that every seed of one arm gets wrong are a sure difference here, and less is known of new ones."""
    comparison = compared(run, both([[3, 7, 20 + s] for s in range(5)]), both([[20 + s] for s in range(5)]))
    row = row_of(comparison)
    assert str(row.quality) == "equivalent (±0.5)"
    assert row.samples is not None
    assert row.quality.low is not None
    assert row.samples.low is not None
    assert row.samples.high is not None
    assert row.samples.low < -0.004 < row.quality.low < -0.001
    assert row.samples.high > 0
    assert row.samples.holds is True
    assert [(pair.arm_only, pair.reference_only) for pair in row.samples.models] == [(0, 2)] * 5


def test_a_verdict_that_new_images_may_not_confirm_is_said(run: Any) -> None:
    """Ten images for each arm are equivalent on these thousand, not on new ones: one sentence and a table say so."""
    arm, reference = both([range(10)] * 3), both([range(10, 20)] * 3)
    comparison = compared(run, arm, reference)
    row = row_of(comparison)
    assert str(row.quality) == "equivalent (±0.5)"
    assert row.samples is not None
    assert row.samples.holds is False
    assert row.samples.needed is not None
    assert row.samples.needed > IMAGES
    said = [line for line in comparison.reading if "not for new ones" in line]
    assert len(said) == 1
    assert "half (equivalent here, -0." in said[0]
    assert (
        "half keeps fp32's accuracy on these 1,000 images, not shown for new ones (Δ "
        in comparison.headline[0]
    )
    assert f"about {round_to_two_digits(row.samples.needed):,} images would settle ±0.5" in said[0]
    assert "on new images" not in Terminal().render(comparison)
    for reporter in (Markdown(), Html(), Terminal(details=True)):
        text = reporter.render(comparison)
        assert "Verdicts on accuracy are about these 1,000 validation images." in " ".join(text.split())
        assert "on new images" in text
    again = Comparison.model_validate_json(Json().render(comparison))
    assert again.arms == comparison.arms
    assert Markdown().render(again) == Markdown().render(comparison)


def test_new_images_are_never_known_better_than_these(run: Any) -> None:
    """The interval for new images contains that for these, whatever the mean squares are."""
    draws = np.random.default_rng(0)
    for _ in range(12):
        shared = range(5), range(5, 10)
        wrong = [[[*np.flatnonzero(draws.random(IMAGES) < 0.03), *each] for _ in range(3)] for each in shared]
        row = row_of(compared(run, both(wrong[0]), both(wrong[1])))
        assert row.samples is not None
        assert row.quality.low is not None
        assert row.quality.high is not None
        assert row.samples.low is not None
        assert row.samples.high is not None
        assert row.samples.low <= row.quality.low + 1e-12
        assert row.samples.high >= row.quality.high - 1e-12


def test_one_seed_is_two_models(run: Any) -> None:
    """One pair has McNemar's test under that name, in a table of its own, and no interval or verdict."""
    comparison = compared(run, both([range(9)]), both([range(8, 10)]))
    row = row_of(comparison)
    assert row.samples is not None
    assert (row.samples.low, row.samples.holds, row.samples.needed) == (None, None, None)
    (pair,) = row.samples.models
    assert (pair.seed, pair.arm_only, pair.reference_only) == (0, 1, 8)
    assert pair.p == pytest.approx(2 * binom.cdf(1, 9, 0.5))
    for reporter in (Markdown(), Html()):
        text = reporter.render(comparison)
        assert "These two models" in text
        assert "on new images" not in text
    assert str(row.quality).startswith("inconclusive")


def test_missing_results_of_one_run_are_said(run: Any) -> None:
    """An old record among new ones leaves the comparison without an interval for new images, and is named."""
    records = [run(arm, seed, np.ones(IMAGES, dtype=bool)) for arm in ("fp32", "half") for seed in range(3)]
    records[4] = make_record("half", 1, top1=1.0)
    comparison = make_comparison(records, arms=["fp32", "half"], margin=0.5)
    assert "Not compared image by image: half (1 of 6 runs keep no per-image results)." in comparison.reading


def test_other_images_are_not_compared(run: Any) -> None:
    """Runs whose validation labels differ, in value or in order, saw other images."""
    correct, labels = np.ones(IMAGES, dtype=bool), np.arange(IMAGES)[::-1] % 10
    records = [run(arm, seed, correct) for arm in ("fp32", "half") for seed in range(3)]
    records[5] = run("half", 2, correct, labels)
    comparison = make_comparison(records, arms=["fp32", "half"], margin=0.5)
    row = row_of(comparison)
    assert row.samples is not None
    assert row.samples.models == []
    assert "their labels differ" in row.samples.unusable
