"""A task tells an arm that loses its gradients from one that keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

import ampcompare


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.integration
def test_a_loss_scale_that_is_too_small_learns_nothing_in_detection(tmp_path: Path) -> None:
    """Under O2 with a loss scale of 1e-7 the gradients are zero: the verdict says that the arm learned nothing."""
    comparison = ampcompare.compare(
        ["fp32", "apex:O2,loss_scale=1e-7"],
        seeds=range(2),
        recipe=ampcompare.Recipe(
            task="detection",
            epochs=10,
            batch_size=16,
            data={"name": "shapes", "image_size": 16, "train_size": 192, "val_size": 64},
        ),
        output_dir=tmp_path,
    )
    good, bad = comparison.arms
    assert good.metric_mean > 0.1
    assert bad.metric_mean < 0.01
    assert str(bad.quality) is not None
    assert str(bad.quality).startswith(("worse", "learned nothing"))
