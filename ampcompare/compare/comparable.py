"""Whether two runs answer the same question: equal settings, but for the arm, the seed and how it was launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ampcompare.config import WITHOUT_EFFECT, RunConfig
from ampcompare.recipes.layers import leaves
from ampcompare.record import RunRecord

__all__ = ["differing", "settings", "why_not_accuracy", "why_not_time"]

APART_BY_DESIGN = ("arm", "recipe.seed")
MOST_NAMED = 3


def settings(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every setting by its place, such as `recipe.optimizer.lr`; an empty group has none."""
    return ((place, value) for place, value in leaves(values) if value != {})


def differing(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the places at which two configurations differ, but for arm, seed, and how they were saved."""
    first, second = (dict(settings(config.model_dump(exclude=set(WITHOUT_EFFECT)))) for config in (one, other))
    return [
        place for place in {**first, **second} if first.get(place) != second.get(place) and place not in APART_BY_DESIGN
    ]


def why_not_accuracy(arm: RunRecord, reference: RunRecord) -> str:
    """Return in what the recipes of two runs differ, so that their accuracies cannot be compared; "" if they can."""
    places = [place for place in differing(arm.config, reference.config) if place.startswith("recipe.")]
    return _named(places, arm.config, reference.config)


def why_not_time(arm: RunRecord, reference: RunRecord) -> str:
    """Return why the times of two runs cannot be compared; "" if they can.

    A launch setting such as the number of loader workers may differ, for its effect on time can be the question.
    """
    recipe = why_not_accuracy(arm, reference)
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
    words = [f"{place.rpartition('.')[2]} {here.get(place)}, not {there.get(place)}" for place in places[:MOST_NAMED]]
    return "; ".join([*words, *(["..."] if len(places) > MOST_NAMED else [])])
