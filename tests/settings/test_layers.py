"""How settings of several sources come together, and what is said of where they came from."""

from typing import Any

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.settings.config import RunConfig
from ampcompare.settings.file import Matrix, join_matrices, settings_file_from_values, settings_file_schema
from ampcompare.settings.layers import Layer, resolve_settings


def test_the_last_layer_wins_and_says_so() -> None:
    """Groups are joined value by value, and each place knows its source; the rest are defaults."""
    settled = resolve_settings(
        [
            Layer("low", {"recipe": {"epochs": 3, "optimizer": {"lr": 0.1, "momentum": 0.5}}}),
            Layer(
                "high", {"recipe": {"optimizer": {"lr": 0.2}}, "device": "cpu"}, {"device": "flag --device"}
            ),
        ]
    )
    recipe = settled.config.recipe
    assert (recipe.epochs, recipe.optimizer.lr, recipe.optimizer.momentum) == (3, 0.2, 0.5)
    origins = settled.origins
    assert origins["recipe.optimizer.lr"] == "high"
    assert origins["recipe.optimizer.momentum"] == "low"
    assert origins["device"] == "flag --device"
    assert origins["recipe.data.name"] == "default"


@pytest.mark.parametrize(
    ("low", "high", "lr", "batch"),
    [
        ({"optimizer": {"lr_base": 0.1}, "global_batch_size": 512}, {"optimizer": {"lr": 0.7}}, 0.7, 512),
        ({"optimizer": {"lr_base": 0.1}, "global_batch_size": 512}, {"batch_size": 128}, 0.05, 128),
        ({"optimizer": {"lr": 0.3}, "batch_size": 64}, {"optimizer": {"lr_base": 0.1}}, 0.025, 64),
        ({"batch_size": 64}, {"global_batch_size": 32}, 0.05, 32),
    ],
)
def test_what_gives_the_same_thing_gives_way(
    low: dict[str, Any], high: dict[str, Any], lr: float, batch: int
) -> None:
    """A learning rate or batch size from above takes the place of what would have led to another one below."""
    recipe = resolve_settings([Layer("low", {"recipe": low}), Layer("high", {"recipe": high})]).config.recipe
    assert recipe.optimizer.lr == pytest.approx(lr)
    assert recipe.batch_size == batch


def test_within_one_source_both_are_a_mistake() -> None:
    """One source that gives a learning rate in two ways, with two values, is refused."""
    both = {"recipe": {"optimizer": {"lr_base": 0.1, "lr": 3.0}}}
    with pytest.raises(ConfigError, match="give only one of them"):
        resolve_settings([Layer("low", both)])


def test_values_that_follow_say_from_what() -> None:
    """A learning rate that was worked out names what it was worked out from."""
    low = {"recipe": {"optimizer": {"lr_base": 0.1}, "global_batch_size": 512}, "processes": 2}
    origins = resolve_settings([Layer("low", low)]).origins
    assert origins["recipe.optimizer.lr"] == "follows from recipe.optimizer.lr_base"
    assert origins["recipe.batch_size"] == "follows from recipe.global_batch_size"
    assert origins["parallel.kind"] == "follows from processes"


def test_another_network_has_arguments_of_its_own() -> None:
    """Arguments of a network below go with it; the same network named again keeps them."""
    low = Layer("low", {"recipe": {"model": {"arch": "convnet", "args": {"width": 8}}}})
    other = resolve_settings([low, Layer("high", {"recipe": {"model": {"arch": "mlp"}}})])
    assert other.config.recipe.model.args == {}
    same = resolve_settings([low, Layer("high", {"recipe": {"model": {"arch": "convnet"}}})])
    assert same.config.recipe.model.args == {"width": 8}


def test_an_empty_group_takes_nothing_away() -> None:
    """`recipe: {}` in a file leaves what a recipe said."""
    low = Layer("low", {"recipe": {"epochs": 3}})
    assert resolve_settings([low, Layer("high", {"recipe": {}})]).config.recipe.epochs == 3


def test_a_group_is_not_a_value() -> None:
    with pytest.raises(ConfigError, match="recipe is 3, not a group of settings"):
        resolve_settings([Layer("low", {"recipe": 3}), Layer("high", {"recipe": {"epochs": 1}})])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arm_s": []}, "mine: there is no setting 'arm_s' (did you mean 'arms'?)"),
        ({"sedes": 1}, "did you mean 'seeds'?"),
        ({"zzz": 1}, "known are title, arms"),
        ({"rows": [{"lr": 1}]}, "every row names an arm"),
        ({"reference": {"source": "x", "figures": [{"arm": "fp32", "top": 1}]}}, "'reference.figures.0.top'"),
        ({"arms": 1}, "arms"),
    ],
)
def test_what_a_file_may_not_hold(values: dict[str, Any], message: str) -> None:
    """A mistyped key or a wrong kind of value is one line with the file's name."""
    with pytest.raises(ConfigError) as caught:
        settings_file_from_values(values, "mine")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arms_take_the_place_of_rows() -> None:
    """A file that names arms is not crossed with the rows of the recipe below it."""
    rows = Matrix(rows=[{"arm": "fp32", "lr": 0.1}], seeds="0-4")
    both = join_matrices(rows, Matrix(arms=["half"]))
    assert (both.rows, both.arms, both.seeds) == (None, ["half"], "0-4")
    assert join_matrices(rows, Matrix(seeds=3)).rows == rows.rows


def test_the_schema_knows_every_key() -> None:
    """Editors are offered the settings of a run and the keys of a comparison, and told of others."""
    found = settings_file_schema()
    assert {"recipe", "device", "arms", "rows", "vary", "reference"} <= set(found["properties"])
    assert set(found["properties"]) == set(RunConfig.model_fields) | set(Matrix.model_fields)
    assert found["additionalProperties"] is False
