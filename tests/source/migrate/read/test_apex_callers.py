"""What of other packages calls the installed Apex, which no file of the project makes another one."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.adapter.project import adapter_plans_and_unread_files
from ampcompare.source.migrate.read.apex_callers import find_apex_callers, find_own_autocast
from ampcompare.source.module import Module


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from torch_lr_finder import LRFinder\nfinder = LRFinder(net, optimizer, loss)\n", 1),
        ("import torch_lr_finder as find\nfind.LRFinder(net, optimizer, loss)\n", 1),
        ("from own import LRFinder\nLRFinder(net, optimizer, loss)\n", 0),
        ("from timm.utils import ApexScaler\nscaler = ApexScaler()\n", 1),
        (
            "from classy_vision.tasks import ClassificationTask\nclass Task(ClassificationTask):\n    pass\n",
            1,
        ),
        ("from own.tasks import ClassificationTask\nclass Task(ClassificationTask):\n    pass\n", 0),
    ],
)
def test_what_calls_the_installed_apex_is_known_by_its_package(text: str, count: int) -> None:
    assert len(list(find_apex_callers(Module(text)))) == count


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        ("with torch.autocast('cuda'):\n    f()\n", True),
        ("with torch.cuda.amp.autocast():\n    f()\n", True),
        ("with torch.cuda.amp.autocast(enabled=flag):\n    f()\n", True),
        ("@torch.cuda.amp.autocast()\ndef f(): pass\n", True),
        ("with torch.cuda.amp.autocast(False):\n    f()\n", False),
        ("with torch.autocast('cuda', enabled=False):\n    f()\n", False),
        ("with torch.autocast('cpu'):\n    f()\n", False),
        ("def f(block: torch.autocast): pass\n", False),
    ],
)
def test_blocks_that_switch_autocast_on(text: str, is_on: bool) -> None:
    assert (find_own_autocast(Module(f"import torch\n{text}")) is not None) == is_on


TRAIN = """import torch
from apex import amp
{0}
model, optimizer = amp.initialize(model, optimizer{1})
{2}
"""


def _notes(folder: Path, **files: str) -> list[str]:
    (folder / "README.md").touch()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    plans, _ = adapter_plans_and_unread_files(sorted(folder.glob("*.py")))
    found = [each.migration for plan in plans for each in plan.files]
    return [one.message for each in found if each is not None for one in each.findings]


@pytest.mark.parametrize(
    ("level", "count"), [("", 1), (", opt_level='O1'", 1), (", opt_level=level", 1), (", 'O2'", 0)]
)
def test_an_own_block_of_autocast_under_o1_is_named(tmp_path: Path, level: str, count: int) -> None:
    """There both cast; the adapter takes casts away from what O1 does not list."""
    text = TRAIN.format("", level, "with torch.autocast('cuda'):\n    model(x)").replace(
        "optimizer, 'O2'", "optimizer, opt_level='O2'"
    )
    found = [each for each in _notes(tmp_path, train=text) if "switches torch.autocast on" in each]
    assert len(found) == count
    loop = "import torch\ndef run(model):\n    with torch.autocast('cuda'):\n        model(1)\n"
    text = TRAIN.format("import loop", level, "loop.run(model)").replace(
        "optimizer, 'O2'", "optimizer, opt_level='O2'"
    )
    found = [each for each in _notes(tmp_path, train=text, loop=loop) if "loop.py switches" in each]
    assert len(found) == count


def test_a_package_that_gets_model_and_optimizer_is_named(tmp_path: Path) -> None:
    text = TRAIN.format(
        "import tuner\nfrom own import fit",
        "",
        "tuner.Tuner(model, optimizer=optimizer)\nfit(model, optimizer)",
    )
    (note,) = (
        each
        for each in _notes(tmp_path, train=text, own="def fit(model, optimizer): pass\n")
        if "gets model" in each
    )
    assert note.startswith("Tuner of tuner gets model and optimizer")


def test_a_training_with_a_finder_of_rates_that_scales_by_apex_stays(tmp_path: Path) -> None:
    use = "finder = LRFinder(model, optimizer, loss)"
    (message,) = _notes(tmp_path, train=TRAIN.format("from torch_lr_finder import LRFinder", "", use))
    assert (
        message
        == "LRFinder of torch_lr_finder scales the loss by the installed Apex, so the file stays on it"
    )
    (tmp_path / "train.py").write_text(TRAIN.format("import rates", "", "rates.find(model, optimizer)"))
    rates = f"from torch_lr_finder import LRFinder\ndef find(model, optimizer, loss=0):\n    {use}\n"
    found = _notes(tmp_path, rates=rates)
    assert any("rates.py calls a package" in each for each in found)


def test_what_the_project_itself_has_is_no_other_package(tmp_path: Path) -> None:
    """A package that has such a task, and initializes, takes the adapter with it."""
    (tmp_path / "classy_vision").mkdir()
    (tmp_path / "classy_vision" / "tasks.py").write_text("class ClassificationTask: pass\n")
    task = "from classy_vision.tasks import ClassificationTask\nclass Task(ClassificationTask): pass\n"
    assert _notes(tmp_path, train=TRAIN.format(task, "", "")) == []
    assert _notes(tmp_path, train=TRAIN.format("import task", "", ""), task=task) == []


INITIALIZE = "amp.initialize(model, optimizer)\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"from apex import amp\nmodel = make()\n{INITIALIZE}", 0),
        (f"model = make()\nfrom apex import amp\n{INITIALIZE}", 1),
        (f"def start(model, optimizer):\n    from apex import amp\n    return {INITIALIZE}", 1),
    ],
)
def test_hooks_that_may_be_there_before_the_adapter_is_imported_are_named(
    tmp_path: Path, text: str, count: int
) -> None:
    """The adapter casts in hooks that are registered behind its import."""
    net = "def mask(weight):\n    weight.register_hook(lambda grad: grad @ grad)\n"
    found = _notes(tmp_path, train=f"import net\n{text}", net=net)
    assert len([each for each in found if "net.py registers hooks of tensors" in each]) == count
