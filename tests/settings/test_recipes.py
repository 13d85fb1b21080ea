"""The recipes that ship: each is complete and can be planned; names of optimizers, read without torch."""

from typing import Any

import pytest

from ampcompare.base.errors import BackendUnavailable, ConfigError
from ampcompare.experiment.matrix import rows_of_matrix
from ampcompare.experiment.plan import make_plan_of_rows, parse_seeds
from ampcompare.experiment.sources import (
    SettingsRequest,
    collect_settings,
    matrix_rows,
    published_table_matched_to_rows,
)
from ampcompare.settings.config import RunConfig
from ampcompare.settings.file import join_matrices, list_recipes, load_recipe
from ampcompare.settings.layers import Layer, resolve_settings
from ampcompare.settings.optimizers import (
    BUILT_IN,
    canonical_optimizer_name,
    list_optimizers,
    require_optimizer,
)
from ampcompare.settings.reads import TRAIN
from ampcompare.settings.recipe import OptimizerConfig
from ampcompare.settings.validation import build_validated_model

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
    rows = rows_of_matrix(recipe.matrix)
    plan = make_plan_of_rows(full, rows, parse_seeds(str(recipe.matrix.seeds)))
    assert len(plan.arms) == len(rows)
    for scale in recipe.matrix.scales:
        smaller = recipe.settings_at_scale(scale, name)
        config = resolve_settings([Layer("recipe", recipe.settings), Layer(scale, smaller.settings)]).config
        there = rows_of_matrix(join_matrices(recipe.matrix, smaller.matrix))
        assert [row.arm for row in there] == [row.arm for row in rows]
        assert [list(row.varied) for row in there] == [list(row.varied) for row in rows]
        make_plan_of_rows(config, there, [0])
        assert config.recipe.data.name in ("digits", "ampcompare.tasks.overflow_digits:overflow_digits")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("articles/")])
def test_published_figures_have_their_rows(name: str) -> None:
    """At each scale every published figure stands beside the same row of the recipe."""
    sources = collect_settings(SettingsRequest(recipe=name), TRAIN)
    rows = matrix_rows(sources)
    published = published_table_matched_to_rows(sources, rows)
    assert published is not None
    assert published.differs == []
    assert all(line.row for line in published.rows)
    for scale in load_recipe(name).matrix.scales:
        small = collect_settings(SettingsRequest(recipe=name, size=scale), TRAIN)
        there = matrix_rows(small)
        again = published_table_matched_to_rows(small, there)
        assert again is not None
        places = {row.label: place for place, row in enumerate(rows)}
        found = {row.label: place for place, row in enumerate(there)}
        assert [places[line.row or ""] for line in published.rows] == [
            found[line.row or ""] for line in again.rows
        ]


def test_the_recipe_of_the_digits_is_what_runs_without_one() -> None:
    """`digits` spells out the defaults, so that leaving it out changes nothing."""
    assert resolve_settings([Layer("recipe", load_recipe("digits").settings)]).config == RunConfig()


def test_a_mistyped_name_has_its_nearest() -> None:
    """A recipe that does not exist is answered with the one that was meant, also without its folder."""
    for name, meant in (("digit", "'digits'"), ("r18-leafs", "'articles/r18-leaves'")):
        with pytest.raises(ConfigError, match=f"did you mean {meant}"):
            load_recipe(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("SGD", "sgd"),
        ("fused-adam", "fused_adam"),
        ("torch.optim.AdamW", "adamw"),
        ("torch.optim:SGD", "sgd"),
        ("apex.optimizers.FusedLAMB", "fused_lamb"),
        ("ampcompare.apex.optimizers.FusedSGD", "fused_sgd"),
        ("torch.optim.RMSprop", "torch.optim:RMSprop"),
        ("mine:make", "mine:make"),
    ],
)
def test_one_optimizer_has_one_name(text: str, name: str) -> None:
    """Whatever way it is written, its cell has one digest."""
    assert canonical_optimizer_name(text) == name
    assert OptimizerConfig(name=text).name == name


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"lr": 1}, "lr is a setting of its own; give it as recipe.optimizer.lr"),
        ({"fused": True}, "give it as recipe.optimizer.implementation"),
        ({"params": []}, "give it as recipe.optimizer.groups"),
    ],
)
def test_arguments_that_are_settings_are_refused(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_validated_model(OptimizerConfig, {"args": args})


def test_rates_by_layer_are_not_adapted_twice() -> None:
    with pytest.raises(ConfigError, match="fused_lamb already does"):
        build_validated_model(OptimizerConfig, {"name": "fused_lamb", "layer_lr": "larc"})


def test_gradients_that_stay_scaled_are_not_clipped() -> None:
    """FusedSGD without master gradients leaves nothing to clip at its size."""
    optimizer = {"name": "fused_sgd", "args": {"materialize_master_grads": False}}
    with pytest.raises(ConfigError, match="clip_grad reads unscaled gradients"):
        build_validated_model(RunConfig, {"recipe": {"optimizer": optimizer, "clip_grad": 1.0}})
    build_validated_model(RunConfig, {"recipe": {"optimizer": optimizer}})


def test_what_is_not_installed_is_refused_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known package asks to be installed; an unknown module does not exist."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(BackendUnavailable, match="bitsandbytes is not installed: pip install bitsandbytes"):
        require_optimizer("bitsandbytes.optim:AdamW8bit")
    with pytest.raises(ConfigError, match="there is no module 'nowhere_to_be_found'"):
        require_optimizer("nowhere_to_be_found:Class")
    rows = {name: (available, reason) for name, available, reason in list_optimizers()}
    assert rows["torchao.optim.AdamW8bit"] == (False, "not installed: pip install 'ampcompare[fp8]'")
    assert set(BUILT_IN) < set(rows)
