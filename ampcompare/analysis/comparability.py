"""Whether two runs answer the same question: equal settings, except for the arm, the seed and how it was launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ampcompare.records.run import RunRecord
from ampcompare.settings.config import NON_NUMERIC_SETTINGS, RunConfig
from ampcompare.settings.paths import flatten

__all__ = ["accuracy_incomparable_reason", "changed_settings", "settings", "time_incomparable_reason"]

APART_BY_DESIGN = ("arm", "recipe.seed")
MAX_NAMED = 3


def settings(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every setting by its place, such as `recipe.optimizer.lr`; an empty group has none."""
    return ((place, value) for place, value in flatten(values) if value != {})


def changed_settings(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the settings in which two configurations differ, except arm, seed, and how they were saved."""
    first, second = (dict(settings(config.model_dump(exclude=set(NON_NUMERIC_SETTINGS)))) for config in (one, other))
    return [
        place for place in {**first, **second} if first.get(place) != second.get(place) and place not in APART_BY_DESIGN
    ]


def accuracy_incomparable_reason(arm: RunRecord, reference: RunRecord) -> str:
    """Return how the recipes of two runs differ, so that their accuracies cannot be compared; "" if they can."""
    places = [place for place in changed_settings(arm.config, reference.config) if place.startswith("recipe.")]
    return _named(places, arm.config, reference.config)


def time_incomparable_reason(arm: RunRecord, reference: RunRecord) -> str:
    """Return why the times of two runs cannot be compared; "" if they can.

    A launch setting such as the number of loader workers may differ, for its effect on time can be the question.
    """
    recipe = accuracy_incomparable_reason(arm, reference)
    if recipe:
        return recipe
    jobs = max(arm.jobs, reference.jobs)
    if jobs > 1:
        return f"{jobs} cells ran at once"
    if "fp16 emulated" in (arm.half, reference.half):
        return "fp16 computed in fp32"
    for name in ("device_name", "processor"):
        here, there = arm.environment.get(name), reference.environment.get(name)
        if here != there:
            return f"{name.replace('_', ' ')} {here}, not {there}"
    return ""


def _named(places: list[str], arm: RunConfig, reference: RunConfig) -> str:
    here, there = dict(settings(arm.model_dump())), dict(settings(reference.model_dump()))
    words = [f"{place.rpartition('.')[2]} {here.get(place)}, not {there.get(place)}" for place in places[:MAX_NAMED]]
    return "; ".join([*words, *(["..."] if len(places) > MAX_NAMED else [])])
