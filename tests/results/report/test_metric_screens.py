"""What a terminal shows of tasks other than classification, against the texts in `screens/`.

The comparisons are made from records by `summarize`, as those of real runs. After a wanted change,
`WRITE_SCREENS=1 pytest tests/results/report/test_metric_screens.py` writes them anew; read the diff.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.evaluation import EpochResult, pack_sample_values
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord, RunSummary
from ampcompare.results.report.base import FORMATS
from ampcompare.results.report.terminal import Terminal
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe

SCREENS = Path(__file__).parent / "screens"
BITS = Metric(
    name="bits per byte", better="lower", decimals=4, difference="log ratio", margin=0.01, over_samples="mean"
)
PERPLEXITY = Metric(name="perplexity", better="lower", decimals=2, difference="ratio")
IOU = Metric(name="mean IoU", unit="%", factor=100.0, margin=0.5, highest=1.0)
PIXELS = Metric(name="pixel accuracy", unit="%", factor=100.0, over_samples="share", highest=1.0)
SAMPLES = 200
SEEDS = range(5)


def _record(arm: str, seed: int, values: dict[str, float], metrics: Sequence[Metric], unit: str) -> RunRecord:
    metric = metrics[0]
    config = RunConfig(arm=arm, recipe=Recipe(seed=seed))
    draws = np.random.default_rng([seed, len(arm)])
    spread = draws.normal(0, 0.1, SAMPLES)
    kept = None
    if metric.over_samples == "mean":
        kept = pack_sample_values(values[metric.name] + spread - spread.mean(), np.arange(SAMPLES))
    counts = {one.name: round(values[one.name] * SAMPLES) for one in metrics if one.over_samples == "share"}
    values = {**values, **{name: count / SAMPLES for name, count in counts.items()}}
    results = [
        EpochResult(
            epoch=epoch, samples=SAMPLES, values=values, counts=counts, loss=1.0, train_seconds=4.0, eval_seconds=0.5,
            chance=8.0 if metric.better == "lower" else 0.05, per_sample=kept if epoch == 2 else None,
        )
        for epoch in range(3)
    ]  # fmt: skip
    seconds = (0.006 if arm == "native:bf16" else 0.01) + 0.0001 * seed
    final = values[metric.name]
    return RunRecord(
        cell=config.digest(),
        arm=arm,
        status="completed",
        config=config,
        metrics=list(metrics),
        unit=unit,
        environment={"torch": "2.13.0", "device": "cuda"},
        summary=RunSummary(
            metric_final=final,
            metric_best=final,
            others_final={name: value for name, value in values.items() if name != metric.name},
            epochs=results,
            num_steps=300,
            step_seconds_median=seconds,
            samples_per_second=4096 / seconds,
            epoch_seconds=4.0,
            peak_bytes=300 * 2**20,
            losses_sha256=f"{arm} {seed}",
            weights_moved=True,
        ),
    )


def _bits() -> Comparison:
    """A language model: bf16 as good, fp16 without a scale far worse, O3 no better than guessing."""
    noise = np.random.default_rng(7).normal(0, 0.003, (4, len(SEEDS)))
    means = {"fp32": 2.1, "native:bf16": 2.1, "half": 2.31, "apex:O3": 8.2}
    records = [
        _record(
            arm, seed, {BITS.name: mean + noise[row, seed], PERPLEXITY.name: 2 ** (mean + noise[row, seed])},
            [BITS, PERPLEXITY], "tokens",
        )
        for row, (arm, mean) in enumerate(means.items())
        for seed in SEEDS
    ]  # fmt: skip
    return summarize(
        records, arms=list(means), reference="fp32", command="ampcompare compare --task lm --seeds 0-4"
    )


def _iou() -> Comparison:
    """A segmenter: bf16 better, O2 open, half worse."""
    noise = np.random.default_rng(3).normal(0, 0.002, (4, len(SEEDS)))
    noise[2] *= 4
    means = {"fp32": 0.742, "native:bf16": 0.755, "apex:O2": 0.742, "half": 0.722}
    records = [
        _record(arm, seed, {IOU.name: mean + noise[row, seed], PIXELS.name: 0.9}, [IOU, PIXELS], "images")
        for row, (arm, mean) in enumerate(means.items())
        for seed in SEEDS
    ]
    return summarize(
        records, arms=list(means), reference="fp32", terms=Terms(prefer="accuracy"),
        command="ampcompare compare --task segmentation --seeds 0-4",
    )  # fmt: skip


SCENES = {"bits-per-byte": _bits, "mean-iou": _iou}


@pytest.mark.parametrize("scene", SCENES)
def test_a_screen_is_as_it_was_read(scene: str) -> None:
    """The whole text with all details, each line of which fits the terminal."""
    text = Terminal(100, details=True).render(SCENES[scene]())
    assert max(map(len, text.splitlines())) <= 100
    screen = SCREENS / f"{scene}-100.txt"
    if os.environ.get("WRITE_SCREENS"):
        screen.write_text(text, encoding="utf-8")
    assert text == screen.read_text(encoding="utf-8")


def test_no_report_speaks_of_images_classified() -> None:
    """Every format names the metric of the task, and none top-1."""
    comparison = SCENES["bits-per-byte"]()
    for name, form in FORMATS.items():
        text = form.make_reporter().render(comparison)
        assert "bits per byte" in text
        assert name == "json" or "top-1" not in text.lower()
    assert "bits per byte equivalent" in str(comparison)
    assert str(comparison.records[0]).endswith("completed, bits per byte 2.1000")
    assert (
        Comparison.model_validate_json(FORMATS["json"].make_reporter().render(comparison)).arms
        == comparison.arms
    )
