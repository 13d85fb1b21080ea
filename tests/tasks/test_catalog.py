"""The lists of data sets and models."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare.tasks import catalog, list_data, list_models
from ampcompare.tasks.models import build_model
from ampcompare.tasks.task import Task


def test_lists_need_no_torch() -> None:
    """Listing data sets and models imports neither torch nor torchvision nor numpy."""
    code = (
        "import sys\n"
        "from ampcompare.tasks import list_data, list_models\n"
        "assert list_data() and list_models()\n"
        "print([name for name in ('torch', 'torchvision', 'numpy', 'sklearn') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


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


def test_listed_models_can_be_built() -> None:
    rows = [row for row in list_models() if row[1] and " " not in row[0] and ":" not in row[0]]
    names = [name for name, _, description in rows if "--task" not in description]
    assert names == ["convnet", "mlp", "transformer"]
    for name in names:
        assert build_model(name, num_classes=2, sample_shape=(1, 8, 8)).training
    assert {"unet", "gpt"} <= {name for name, *_ in rows}


@pytest.mark.parametrize("name", catalog.TASKS)
def test_a_task_measures_what_the_catalog_says(name: str) -> None:
    """Margins and limits are checked against the metrics of the catalog before torch is imported."""
    spec = catalog.TASKS[name]
    module = importlib.import_module(spec.implementation.partition(":")[0])
    classes = [made for made in vars(module).values() if isinstance(made, type)]
    (task,) = (made for made in classes if issubclass(made, Task) and made is not Task)
    assert tuple(task.metrics) == tuple(spec.metrics)
