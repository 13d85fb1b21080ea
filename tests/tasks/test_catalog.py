"""The lists of data sets and models, and their names, checked by files alone."""

import importlib
import os
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks import catalog, image_data, list_data, list_models
from ampcompare.tasks.catalog import check_model, check_task_of_recipe, torchvision_model_kinds
from ampcompare.tasks.task import Task
from ampcompare.tasks.torchvision_loader import load_torchvision


def test_data_sets_are_available_where_their_files_are(mnist_root: Path) -> None:
    """MNIST counts as available in the folder that has it only; the reason names folder and options."""
    here = {name: (available, reason) for name, available, reason in list_data(mnist_root)}
    assert here["mnist"][0]
    assert here["digits"][0]
    assert here["synthetic"][0]
    available, reason = here["cifar10"]
    assert not available
    assert str(mnist_root / "cifar-10-batches-py") in reason
    assert "--download" in reason


@pytest.mark.parametrize(
    "package, name", [("sklearn", "digits"), ("torchvision", "mnist"), ("PIL", "imagefolder:PATH")]
)
def test_missing_packages_are_told(
    monkeypatch: pytest.MonkeyPatch, mnist_root: Path, package: str, name: str
) -> None:
    """A data set whose package is not installed says what to install."""
    real = catalog.find_spec
    monkeypatch.setattr(catalog, "find_spec", lambda wanted: None if wanted == package else real(wanted))
    rows = {row[0]: row for row in list_data(mnist_root)}
    assert not rows[name][1]
    assert "pip install" in rows[name][2]
    models = {row[0]: row for row in list_models()}
    assert models["any torchvision classifier"][1] is (package != "torchvision")


@pytest.mark.parametrize("name", catalog.TASKS)
def test_a_task_measures_what_the_catalog_says(name: str) -> None:
    """Margins and limits are checked against the metrics of the catalog before torch is imported."""
    spec = catalog.TASKS[name]
    module = importlib.import_module(spec.implementation.partition(":")[0])
    classes = [made for made in vars(module).values() if isinstance(made, type)]
    (task,) = (made for made in classes if issubclass(made, Task) and made is not Task)
    assert tuple(task.metrics) == tuple(spec.metrics)


def test_the_catalog_is_that_of_torchvision() -> None:
    """The names that are read from torchvision's source are those that torchvision itself lists."""
    models = load_torchvision().models
    found = torchvision_model_kinds()
    assert found is not None
    assert sorted(found) == models.list_models()
    for kind, module in (("classification", models), ("segmentation", models.segmentation)):
        assert sorted(name for name, other in found.items() if other == kind) == models.list_models(
            module=module
        )


@pytest.mark.parametrize(
    ("task", "arch", "message"),
    [
        ("classification", "resnet19", "there is no model 'resnet19'; did you mean 'resnet18"),
        ("classification", "fcn_resnet50", "is a torchvision model for segmentation, not for classification"),
        (
            "classification",
            "hf:gpt2",
            "causal language models of Transformers, without weights, for --task lm",
        ),
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
        check_task_of_recipe(Recipe.model_validate({"task": task, "data": {"name": name}}))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_among_images(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ConfigError, match=r"pipe.png cannot be read as an image .*it is a pipe"):
        image_data._open_image(str(tmp_path / "pipe.png"))
