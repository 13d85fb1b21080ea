"""Changes that are trained next to an arm: which are tried, and what a trial says."""

from typing import Any

import pytest

from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.diagnosis.profiling.profile_recipe import changes_worth_timing, time_config_variants
from ampcompare.results.records.profile import ArmProfile, StepPart
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model

CONFIG = build_validated_model(
    RunConfig, {"arm": "fp32", "recipe": {"batch_size": 64, "optimizer": {"name": "sgd", "lr": 0.1}}}
)


def _found(phase: Any, kind: Any, optimizer: str = "SGD (for-loop)") -> ArmProfile:
    parts = [
        StepPart(phase=phase, kind=kind, seconds=0.2),
        StepPart(phase="forward", kind="product", seconds=0.8),
    ]
    return ArmProfile(arm="fp32", seconds=1.0, parts=parts, optimizer=optimizer)


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        (
            _found("optimizer", "pointwise"),
            ["--optimizer-implementation fused", "--optimizer-implementation foreach", "--batch-size 256"],
        ),
        (_found("optimizer", "pointwise", "SGD (fused)"), ["--batch-size 256"]),
        (_found("data", "copy"), ["--workers 2"]),
        (_found("forward", "host"), ["--batch-size 256"]),
        (_found("forward", "cast"), []),
    ],
)
def test_what_takes_time_suggests_changes(found: ArmProfile, changes: list[str]) -> None:
    assert [variant.change for variant in changes_worth_timing(CONFIG, found)] == changes


@pytest.mark.parametrize(("steps", "seconds"), [((2.4, 2.8), 0.6), ((3.2, 4.4), 1.0), ((4.8, 5.6), 1.2)])
def test_a_gain_is_one_in_each_round(steps: tuple[float, float], seconds: float) -> None:
    """The time is that of the same work, equal where rounds overlap."""
    larger = iter(steps)
    variants = changes_worth_timing(CONFIG, _found("forward", "host"))
    (trial,) = time_config_variants(CONFIG, variants, lambda tried: 1.0 if tried == CONFIG else next(larger))
    assert (trial.change, trial.before_seconds, trial.seconds) == (
        "--batch-size 256",
        1.0,
        pytest.approx(seconds),
    )


def test_what_a_training_lacks_gives_no_trial() -> None:
    """Another failure is one, with its reason."""

    def measure(tried: RunConfig) -> float:
        if tried.recipe.optimizer.implementation == "fused":
            raise UnsupportedCombination("no fused one")
        if tried.recipe.batch_size > 64:
            raise ConfigError("no such batch")
        return 1.0

    trials = time_config_variants(
        CONFIG, changes_worth_timing(CONFIG, _found("optimizer", "pointwise")), measure
    )
    assert [(one.change, one.failure) for one in trials] == [
        ("--optimizer-implementation foreach", ""),
        ("--batch-size 256", "no such batch"),
    ]
