"""The settings of a run: what is checked when they are built, and how a mistake is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ampcompare.config import OptimizerConfig, Recipe, RunConfig, validated
from ampcompare.errors import ConfigError


def _nested(place: str, value: Any) -> dict[str, Any]:
    for name in reversed(place.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("recipe.epochs", 0, "recipe.epochs: Input should be greater than or equal to 1 (seen: 0)"),
        ("recipe.epochs", 1.5, "(seen: 1.5)"),
        ("recipe.batch_size", -1, "(seen: -1)"),
        ("recipe.max_steps", 0, "(seen: 0)"),
        ("recipe.seed", -1, "(seen: -1)"),
        ("recipe.seed", 2**31, "(seen: 2147483648)"),
        ("recipe.optimizer.lr", 0, "(seen: 0)"),
        ("recipe.optimizer.lr", float("nan"), "recipe.optimizer.lr: Input should be a finite number (seen: nan)"),
        ("recipe.optimizer.momentum", 1, "(seen: 1)"),
        (
            "recipe.optimizer.name",
            "sdg",
            "recipe.optimizer.name: Input should be 'sgd', 'adam' or 'adamw' (seen: 'sdg')",
        ),
        ("recipe.clip_grad", float("inf"), "(seen: inf)"),
        ("recipe.label_smoothing", 1.0, "(seen: 1.0)"),
        ("warmup_steps", -1, "(seen: -1)"),
        ("device", "gpu", "device: device 'gpu' is not auto, cpu, cuda or cuda:INDEX (seen: 'gpu')"),
        ("device", "cuda:x", "device 'cuda:x' is not"),
        ("arm", "apex:02", "write O2"),
        ("on_nan", "ignore", "'stop' or 'continue' (seen: 'ignore')"),
        ("recipe.optimizer", 3, "recipe.optimizer: it is a group of settings, name, lr, momentum"),
        ("recipe.data.name", ["x" * 9999], "recipe.data.name: Input should be a valid string (seen: ['xxx"),
    ],
)
def test_a_bad_value_is_named_and_shown(place: str, value: Any, message: str) -> None:
    """A value out of range is refused in one short line with its place, what was seen, and what is taken."""
    with pytest.raises(ConfigError) as caught:
        validated(RunConfig, _nested(place, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        ("recipe.epohcs", "did you mean 'recipe.epochs'?"),
        ("recipe.optimizer.lrr", "did you mean 'recipe.optimizer.lr'?"),
        ("recipe.data.train-size", "did you mean 'recipe.data.train_size'?"),
        ("recipee.epochs", "there is no setting 'recipee' (did you mean 'recipe'?)"),
        ("devcie", "did you mean 'device'?"),
        ("epochs", "did you mean 'recipe.epochs'?"),
        ("optimizer.lr", "there is no setting 'optimizer'"),
        ("lr", "did you mean 'recipe.optimizer.lr'?"),
        ("recipe.optimizer.learning_rate", "known in recipe.optimizer are name, lr, momentum"),
        ("qqq", "known are recipe, arm, device"),
    ],
)
def test_an_unknown_setting_gives_the_nearest(place: str, hint: str) -> None:
    """A mistyped or misplaced key is an error that names the setting that was meant, or those that there are."""
    with pytest.raises(ConfigError) as caught:
        validated(RunConfig, _nested(place, 3))
    assert "there is no setting" in str(caught.value)
    assert hint in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    """Two mistakes are two parts of one message."""
    with pytest.raises(ConfigError) as caught:
        validated(RunConfig, {"recipe": {"epochs": 0}, "devcie": "cpu"})
    assert "recipe.epochs" in str(caught.value)
    assert "'devcie'" in str(caught.value)


def test_a_batch_that_cannot_be_cut() -> None:
    """Micro-batches are equal, so their number must divide the batch."""
    with pytest.raises(ConfigError, match="batch size 10 cannot be cut into 4 equal micro-batches"):
        validated(Recipe, {"batch_size": 10, "grad_accum_steps": 4})


@pytest.mark.parametrize("values", [{"momentum": 0.0}, {"name": "adam"}])
def test_nesterov_needs_momentum(values: dict[str, Any]) -> None:
    """Nesterov without momentum, or with another optimizer, is refused as torch would refuse it later."""
    with pytest.raises(ConfigError, match="nesterov needs sgd with a momentum above 0"):
        validated(OptimizerConfig, {"nesterov": True, **values})


def test_the_arm_is_canonical() -> None:
    """Two ways to write an arm give equal configurations, and so one cell."""
    one, other = RunConfig(arm="native"), RunConfig(arm="native:float16")
    assert one == other
    assert one.digest() == other.digest()


def test_settings_are_frozen() -> None:
    """A configuration cannot be changed after its check."""
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().recipe.epochs = 0


OTHER_VALUES: dict[str, Any] = {
    "recipe.data.name": "mnist",
    "recipe.data.dir": "there",
    "recipe.model.arch": "mlp",
    "recipe.model.args": {"width": 3},
    "recipe.optimizer.name": "adam",
    "recipe.optimizer.momentum": 0.5,
    "recipe.optimizer.betas": (0.8, 0.9),
    "recipe.schedule.name": "step",
    "recipe.label_smoothing": 0.5,
    "arm": "half",
    "device": "cpu",
    "cpu_half": "native",
    "on_nan": "continue",
}


def _changes(model: BaseModel, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with a value other than its default."""
    for name in type(model).model_fields:
        value, place = getattr(model, name), above + name
        if isinstance(value, BaseModel):
            yield from _changes(value, f"{place}.")
        elif place in OTHER_VALUES:
            yield place, OTHER_VALUES[place]
        elif isinstance(value, bool):
            yield place, not value
        else:
            yield place, 2 if value is None else 2 * value + 2


CHANGES = dict(_changes(RunConfig()))


@pytest.mark.parametrize("place", CHANGES)
def test_any_setting_makes_another_cell(place: str) -> None:
    """The name of a cell changes with each single setting, so that no record is taken for another's."""
    changed = validated(RunConfig, _nested(place, CHANGES[place]))
    assert changed.digest() != RunConfig().digest()


def test_the_name_of_a_cell_is_stable() -> None:
    """The same settings, written out or left at their defaults, name the same cell."""
    assert RunConfig().digest() == RunConfig.model_validate(RunConfig().model_dump(mode="json")).digest()
    assert len(RunConfig().digest()) == 12


def test_json_schema_knows_every_setting() -> None:
    """Editors can complete and check a configuration file by its schema."""
    schema = RunConfig.model_json_schema()
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert set(schema["$defs"]["Recipe"]["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
