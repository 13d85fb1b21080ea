"""Changes that are trained next to an arm: which are tried, and what a trial says."""

from __future__ import annotations

from typing import Any

import pytest

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.diagnosis.profiling.profile_recipe import memory_variants, profile_config, run_trials
from ampcompare.diagnosis.profiling.step_profiler import Steps
from ampcompare.results.records.profile import ArmProfile, Held, Memory
from ampcompare.results.report.profile import memory_sentences
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import validate

CHECKPOINT, HALF, LOOP = "--checkpoint-activations", "--batch-size 32", "--optimizer-implementation for-loop"


def _found(activations: int = 60, **facts: Any) -> ArmProfile:
    held = [
        Held(kind="weights", dtype="fp32", bytes=100 - activations),
        Held(kind="activations", dtype="fp32", bytes=activations),
    ]
    memory = Memory(measured_bytes=100, held=held, rest_bytes=0, at=facts.pop("at", "backward"))
    return ArmProfile(arm="fp32", memory=memory, **facts)


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        (_found(), [CHECKPOINT, HALF]),
        (_found(5), []),
        (_found(5, at="optimizer", optimizer="Adam (foreach)"), [LOOP]),
        (_found(5, at="backward", optimizer="Adam (foreach)"), []),
        (_found(5, at="optimizer", optimizer="Adam (for-loop)"), []),
        (ArmProfile(arm="fp32"), []),
    ],
)
def test_what_holds_the_peak_suggests_changes(found: ArmProfile, changes: list[str]) -> None:
    """Activations suggest checkpoints and half the batch, and lists of an optimizer at the peak a loop."""
    config = validate(RunConfig, {"arm": "fp32", "recipe": {"batch_size": 64}})
    assert [variant.change for variant in memory_variants(config, found)] == changes


@pytest.mark.parametrize(("steps", "seconds"), [((0.6, 0.7), 1.2), ((0.4, 0.6), 1.0), ((0.3, 0.4), 0.6)])
def test_a_trial_of_memory_has_both_peaks(steps: tuple[float, float], seconds: float) -> None:
    """The time is that of the same work, equal where rounds overlap; what a model lacks gives no trial."""
    config = validate(RunConfig, {"arm": "fp32", "recipe": {"batch_size": 64}})
    of_half = iter(steps)

    def measure(tried: RunConfig) -> tuple[float, int]:
        if tried.recipe.checkpoint_activations:
            raise UnsupportedCombination("no repeated blocks")
        return (1.0 if tried == config else next(of_half)), tried.recipe.batch_size

    (trial,) = run_trials(config, memory_variants(config, _found()), measure)
    assert (trial.change, trial.before_peak_bytes, trial.peak_bytes) == (HALF, 64, 32)
    assert (trial.before_seconds, trial.seconds) == (1.0, seconds)


@pytest.mark.integration
def test_changes_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer with many activations has a smaller peak with checkpoints, and with half the batch."""
    monkeypatch.setattr("ampcompare.diagnosis.profiling.profile_recipe.ROUNDS", 1)
    monkeypatch.setattr("ampcompare.diagnosis.profiling.profile_recipe.time_variants", lambda *_: [])
    recipe = {
        "task": "lm",
        "batch_size": 32,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "epochs": 1,
        "model": {"args": {"width": 32, "depth": 2, "heads": 2}},
        "data": {"sequence_length": 32, "train_size": 64, "val_size": 8},
    }
    config = validate(RunConfig, {"arm": "fp32", "device": "cpu", "recipe": recipe})
    found, _ = profile_config(config, Steps(warmup=1, timed=1, profiled=1), trials=True)
    assert [trial.change for trial in found.memory_trials] == [CHECKPOINT, "--batch-size 16"]
    for trial in found.memory_trials:
        assert not trial.failure
        assert trial.before_peak_bytes == pytest.approx(found.memory.measured_bytes, rel=0.05)
        assert trial.peak_bytes is not None
        assert trial.peak_bytes < 0.95 * found.memory.measured_bytes, memory_sentences(found)
