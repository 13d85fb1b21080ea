"""Mistakes in what a user wrote: each is named, with what was meant, and all are told at once."""

from typing import Any

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import validate


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("recipe.epohcs", "did you mean 'recipe.epochs'?"),
        ("recipee.epochs", "there is no setting 'recipee' (did you mean 'recipe'?)"),
        ("epochs", "did you mean 'recipe.epochs'?"),
        ("optimizer.lr", "there is no setting 'optimizer' (did you mean 'recipe.optimizer'?)"),
        ("recipe.optimizer.learning_rate", "known in recipe.optimizer are name, lr, momentum"),
        ("qqq", "known are recipe, arm, processes"),
    ],
)
def test_an_unknown_setting_gives_the_nearest(place: str, hint: str) -> None:
    """A mistyped or misplaced key is an error that names the setting that was meant, or those that there are."""
    group, _, name = place.rpartition(".")
    values: dict[str, Any] = {name: 3}
    for above in filter(None, reversed(group.split("."))):
        values = {above: values}
    with pytest.raises(ConfigError) as caught:
        validate(RunConfig, values)
    assert "there is no setting" in str(caught.value)
    assert hint in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    """Two mistakes are two parts of one message."""
    with pytest.raises(ConfigError) as caught:
        validate(RunConfig, {"recipe": {"epochs": 0}, "devcie": "cpu"})
    assert "recipe.epochs" in str(caught.value)
    assert "'devcie'" in str(caught.value)
