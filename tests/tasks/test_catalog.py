"""The lists of data sets and models."""

import importlib
from pathlib import Path

import pytest

from ampcompare.tasks import catalog, list_data, list_models
from ampcompare.tasks.task import Task


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
def test_missing_packages_are_told(monkeypatch: pytest.MonkeyPatch, mnist_root: Path, package: str, name: str) -> None:
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
