"""The recipes that ship: each is complete, can be planned at every scale, and has its published figures in place."""

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.matrix import expand_matrix
from ampcompare.experiment.plan import parse_seeds, plan_rows
from ampcompare.experiment.sources import SettingsRequest, collect_settings, matrix_rows, published_beside
from ampcompare.settings.config import RunConfig
from ampcompare.settings.file import join_settings, list_recipes, load_recipe
from ampcompare.settings.layers import Layer, resolve_settings

NAMES = [
    "cifar10-r18", "digits", "articles/loader-study", "articles/r18-leaves", "articles/r50-imagenet-amp",
    "articles/r50-imagenet-apex", "articles/r50-imagenet-fp16bn",
]  # fmt: skip


def test_the_recipes_that_are_promised_are_there() -> None:
    """The names are those of the documentation, in its order, and each has a title."""
    assert [name for name, _, _ in list_recipes()] == NAMES
    assert all(title for _, _, title in list_recipes())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_can_be_planned(name: str) -> None:
    """As published and at each smaller scale the settings fit together, and rows keep their order and number."""
    recipe = load_recipe(name)
    full = resolve_settings([Layer("recipe", recipe.settings)]).config
    rows = expand_matrix(recipe.matrix)
    plan = plan_rows(full, rows, parse_seeds(str(recipe.matrix.seeds)))
    assert len(plan.arms) == len(rows)
    for scale in recipe.matrix.scales:
        smaller = recipe.smaller(scale, name)
        config = resolve_settings([Layer("recipe", recipe.settings), Layer(scale, smaller.settings)]).config
        there = expand_matrix(join_settings(recipe.matrix, smaller.matrix))
        assert [row.arm for row in there] == [row.arm for row in rows]
        assert [list(row.varied) for row in there] == [list(row.varied) for row in rows]
        plan_rows(config, there, [0])
        assert config.recipe.data.name in ("digits", "ampcompare.tasks.overflow_digits:overflow_digits")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("articles/")])
def test_published_figures_have_their_rows(name: str) -> None:
    """At each scale every published figure stands beside the same row of the recipe."""
    sources = collect_settings(SettingsRequest(recipe=name))
    rows = matrix_rows(sources)
    published = published_beside(sources, rows)
    assert published is not None
    assert published.differs == []
    assert all(line.row for line in published.rows)
    for scale in load_recipe(name).matrix.scales:
        small = collect_settings(SettingsRequest(recipe=name, size=scale))
        there = matrix_rows(small)
        again = published_beside(small, there)
        assert again is not None
        places = {row.label: place for place, row in enumerate(rows)}
        found = {row.label: place for place, row in enumerate(there)}
        assert [places[line.row or ""] for line in published.rows] == [found[line.row or ""] for line in again.rows]


def test_the_recipe_of_the_digits_is_what_runs_without_one() -> None:
    """`digits` spells out the defaults, so that leaving it out changes nothing."""
    assert resolve_settings([Layer("recipe", load_recipe("digits").settings)]).config == RunConfig()


def test_a_mistyped_name_has_its_nearest() -> None:
    """A recipe that does not exist is answered with the one that was meant, also without its folder."""
    for name, meant in (("digit", "'digits'"), ("r18-leafs", "'articles/r18-leaves'")):
        with pytest.raises(ConfigError, match=f"did you mean {meant}"):
            load_recipe(name)
