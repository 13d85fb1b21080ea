"""Names of models and data sets, checked by files alone."""

import os
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks import load
from ampcompare.tasks.catalog import check_model, check_task, torchvision_models
from ampcompare.tasks.torchvision_loader import load_torchvision


def test_the_catalog_is_that_of_torchvision() -> None:
    """The names that are read from torchvision's source are those that torchvision itself lists."""
    models = load_torchvision().models
    found = torchvision_models()
    assert found is not None
    assert sorted(found) == models.list_models()
    for kind, module in (("classification", models), ("segmentation", models.segmentation)):
        assert sorted(name for name, other in found.items() if other == kind) == models.list_models(module=module)


@pytest.mark.parametrize(
    ("task", "arch", "message"),
    [
        ("classification", "resnet19", "there is no model 'resnet19'; did you mean 'resnet18"),
        ("classification", "fcn_resnet50", "is a torchvision model for segmentation, not for classification"),
        ("classification", "hf:gpt2", "causal language models of Transformers, without weights, for --task lm"),
        ("classification", "timm:", "names no model; write it as timm:resnet50"),
        ("lm", "gtp", "the task lm has no model 'gtp'; did you mean 'gpt'"),
    ],
)
def test_models_that_a_task_does_not_have(task: str, arch: str, message: str) -> None:
    """A model that cannot be is refused with the nearest name."""
    with pytest.raises(ConfigError, match=message):
        check_model(arch, task)


@pytest.mark.parametrize(
    ("task", "name", "message"),
    [
        ("lm", "grammer", "the task lm has no data set 'grammer'; did you mean 'grammar'"),
        ("segmentation", "nomod:x", "the task segmentation has no data set 'nomod:x'"),
    ],
)
def test_data_that_a_task_does_not_have(task: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_task(Recipe.model_validate({"task": task, "data": {"name": name}}))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_among_images(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ConfigError, match=r"pipe.png cannot be read as an image .*it is a pipe"):
        load._open_image(str(tmp_path / "pipe.png"))
