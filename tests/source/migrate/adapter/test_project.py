"""Where the adapter lies, and which files share it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampcompare.source.amp_names import ADAPTER
from ampcompare.source.migrate.adapter.imports import adapter_text
from ampcompare.source.migrate.adapter.project import (
    adapter_plans_and_unread_files,
    files_needing_apex_despite_adapter,
)

USE = "from apex import amp\n"
MAIN = "if __name__ == '__main__':\n    pass\n"


def _plans(
    folder: Path, files: dict[str, str], *, is_repository: bool = True, named: str = "."
) -> dict[str, tuple[str, list[str]]]:
    """Return the place of each adapter, with its name and the files that import it.

    Args:
        named: the folder that is named to `migrate`.
    """
    if is_repository:
        (folder / ".git").mkdir()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    plans, faults = adapter_plans_and_unread_files(sorted((folder / named).rglob("*.py")))
    assert not faults
    return {
        str(plan.adapter.path.relative_to(folder)): (
            plan.adapter.name,
            [str(each.path.relative_to(folder)) for each in plan.files],
        )
        for plan in plans
    }


@pytest.mark.parametrize(
    ("files", "place", "name"),
    [
        ({"train.py": USE, "steps.py": USE}, "torch_amp_adapter.py", ADAPTER),
        ({"train.py": USE + "import lib.steps\n", "lib/steps.py": USE}, "torch_amp_adapter.py", ADAPTER),
        (
            {"train.py": USE + "import lib.steps\n", "lib/__init__.py": "", "lib/steps.py": USE},
            "lib/torch_amp_adapter.py",
            "lib.torch_amp_adapter",
        ),
        (
            {
                "tools/train.py": f"{USE}import lib\n{MAIN}",
                "lib/__init__.py": "",
                "lib/sub/steps.py": f"{USE}import lib\n",
            },
            "lib/torch_amp_adapter.py",
            "lib.torch_amp_adapter",
        ),
        # A module of a package that runs by `python -m`.
        ({"lib/__init__.py": "", "lib/train.py": f"{USE}from . import net\n{MAIN}", "lib/net.py": ""},
         f"lib/{ADAPTER}.py", f"lib.{ADAPTER}"),
        # A package without `__init__.py`.
        ({"main.py": f"import lib.train\n{MAIN}", "lib/train.py": f"{USE}from .net import x\n",
          "lib/net.py": ""},
         f"{ADAPTER}.py", ADAPTER),
        # A script without a function, next to a file __init__.py; and a folder whose name no import can have.
        ({"lib/__init__.py": "", "lib/train.py": f"{USE}with amp.scale_loss(1, 2) as loss: pass\n"},
         f"lib/{ADAPTER}.py", ADAPTER),
        ({"my-lib/__init__.py": "", "my-lib/steps.py": USE}, f"my-lib/{ADAPTER}.py", ADAPTER),
        # A package with a module of its own name, which its files and a console script import.
        ({"pack/__init__.py": "from pack.pack import Trainer\n", "pack/pack.py": f"{USE}from pack.version import x\n",
          "pack/cli.py": f"import fire\nfrom pack import Trainer\n{USE}", "pack/version.py": "x = 1\n"},
         f"pack/{ADAPTER}.py", f"pack.{ADAPTER}"),
        # A script next to the package that it imports, which may be installed.
        ({"tools/train.py": f"from pack.net import x\n{USE}{MAIN}", "pack/__init__.py": "", "pack/net.py": "x = 1\n"},
         f"pack/{ADAPTER}.py", f"pack.{ADAPTER}"),
        # A package with a module that is called apex, which `from apex import amp` elsewhere does not mean.
        ({"pack/__init__.py": "", "pack/plugins/__init__.py": "", "pack/plugins/apex.py": USE,
          "pack/core/__init__.py": "", "pack/core/loop.py": f"{USE}from pack.plugins.apex import x\n"},
         f"pack/{ADAPTER}.py", f"pack.{ADAPTER}"),
        # A folder of scripts with a file __init__.py that nothing imports as a package.
        ({"__init__.py": "", "train.py": USE + "import steps\n", "steps.py": USE}, "torch_amp_adapter.py", ADAPTER),
    ],
)  # fmt: skip
def test_one_adapter_serves_a_project(tmp_path: Path, files: dict[str, str], place: str, name: str) -> None:
    plans = _plans(tmp_path, files)
    assert list(plans) == [place]
    assert plans[place] == (name, sorted(path for path, text in files.items() if USE in text))


@pytest.mark.parametrize(
    ("importer", "place"),
    [
        ({"main.py": "from engine.trainer import fit\n"}, ADAPTER),
        ({"main.py": "from engine.trainer import *\n"}, ADAPTER),
        ({"main.py": "if True:\n    import engine.trainer as t\n"}, ADAPTER),
        ({"tools/main.py": "from engine import net, trainer\n"}, ADAPTER),
        ({"main.py": "from engine.trainers import fit\n"}, f"engine/{ADAPTER}"),
        ({"engine/main.py": "from trainer import fit\n"}, f"engine/{ADAPTER}"),
    ],
)
def test_the_adapter_lies_where_a_file_is_imported_from(
    tmp_path: Path, importer: dict[str, str], place: str
) -> None:
    """Through a folder without `__init__.py`, which itself imports nothing of the project."""
    plans = _plans(tmp_path, {"engine/trainer.py": USE, **importer})
    assert plans == {f"{place}.py": (ADAPTER, ["engine/trainer.py"])}


PATHS = "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))\n"
RUN = "import sys\nsys.path.append('../src')\nfrom engine.trainer import Trainer\n"


@pytest.mark.parametrize(
    ("files", "place", "name"),
    [
        # A helper of the scripts puts a folder on the path, with `__init__.py` in it or not.
        ({"tools/train.py": f"import _init_paths\n{USE}from core.engine import train\n", "tools/_init_paths.py": PATHS,
          "lib/core/__init__.py": "", "lib/core/engine.py": USE}, "lib/core", "core."),
        ({"tools/train.py": f"import _init_paths\n{USE}from core.engine import train\n", "tools/_init_paths.py": PATHS,
          "lib/__init__.py": "", "lib/core/__init__.py": "", "lib/core/engine.py": USE}, "lib/core", "core."),
        # The module that trains reaches the one with Apex through another.
        ({"tools/train.py": f"import _init_paths\n{USE}import core.runner\n", "tools/_init_paths.py": PATHS,
          "lib/core/runner.py": "from core.engine import train\n", "lib/core/engine.py": USE}, "lib", ""),
        # Only modules have Apex.
        ({"scripts/run.py": RUN, "src/engine/trainer.py": USE}, "src", ""),
        ({"scripts/run.py": RUN, "src/__init__.py": "", "src/engine/__init__.py": "", "src/engine/trainer.py": USE},
         "src/engine", "engine."),
        ({"scripts/run.py": "import sys\nsys.path.append('..')\nfrom src.engine.trainer import Trainer\n",
          "src/engine/__init__.py": "", "src/engine/trainer.py": USE}, "", ""),
        ({"main.py": "from engine.trainer import fit\nfrom utils.setup import begin\n",
          "engine/trainer.py": USE, "utils/setup.py": USE}, "", ""),
        # A package is imported as a whole, and its modules by each other.
        ({"run.py": "import sys\nsys.path.append('src')\nimport engine\n", "src/__init__.py": "",
          "src/engine/__init__.py": "from .trainer import fit\n", "src/engine/trainer.py": USE},
         "src/engine", "engine."),
    ],
)  # fmt: skip
def test_files_that_train_together_share_an_adapter_that_all_of_them_find(
    tmp_path: Path, files: dict[str, str], place: str, name: str
) -> None:
    expected = sorted(each for each, text in files.items() if USE in text)
    plans = _plans(tmp_path, files)
    assert {path: (full, sorted(users)) for path, (full, users) in plans.items()} == {
        str(Path(place) / f"{ADAPTER}.py"): (f"{name}{ADAPTER}", expected)
    }


NET = "import sys\nsys.path.append('..')\nfrom network.net import Net\n"


@pytest.mark.parametrize(
    ("files", "place"),
    [
        # A package that no other file imports, of tests or not.
        ({"train.py": f"from network.net import Net\n{USE}", "test/__init__.py": "", "test/net.py": NET + USE}, ""),
        ({"train.py": f"from network.net import Net\n{USE}", "tmp_script/__init__.py": "",
          "tmp_script/net.py": NET + USE}, ""),
        ({"train.py": f"from network.net import Net\n{USE}", "old/__init__.py": "", "old/net.py": NET + USE}, ""),
        # One of tests, or with a name of the standard library, although a file imports it.
        ({"train.py": f"from tests.net import Net\n{USE}", "tests/__init__.py": "", "tests/net.py": USE}, ""),
        ({"train.py": f"from code.net import Net\n{USE}", "code/__init__.py": "", "code/net.py": USE}, ""),
        ({"code/__init__.py": "", "code/net.py": USE}, ""),
        # The tests of a package; and tests alone.
        ({"pkg/__init__.py": "", "pkg/net.py": USE, "tests/__init__.py": "", "tests/net.py": f"import pkg.net\n{USE}",
          "tests/more.py": f"import pkg.net\n{USE}"}, "pkg/"),
        ({"tests/__init__.py": "", "tests/net.py": USE}, "tests/"),
    ],
)  # fmt: skip
def test_the_adapter_lies_in_no_package_that_the_project_can_do_without(
    tmp_path: Path, files: dict[str, str], place: str
) -> None:
    plans = _plans(tmp_path, {"network/net.py": "", **files})
    assert [*plans] == [f"{place}{ADAPTER}.py"]


@pytest.mark.parametrize(
    "importer",
    [
        "from engine import (\n    net,  # (which is small)\n    trainer,\n)\n",
        "import sys; import engine.trainer\n",
        "from engine.trainer \\\n    import fit\n",
        "if True: from engine.trainer import fit\n",
    ],
)
def test_imports_are_read_in_every_form(tmp_path: Path, importer: str) -> None:
    plans = _plans(tmp_path, {"engine/trainer.py": USE, "main.py": importer})
    assert plans == {f"{ADAPTER}.py": (ADAPTER, ["engine/trainer.py"])}


def test_a_module_of_the_same_name_in_another_project_is_not_meant(tmp_path: Path) -> None:
    """The files of a training are spread over folders that only its start script puts on the path."""
    files = {
        "a/run/config/events.py": f"import convert\nfrom model.net import Net\n{USE}",
        "a/run/config/convert.py": "",
        "a/run/base/model/net.py": "",
        "b/train.py": f"from model.net import Net\n{USE}{MAIN}",
        "b/model/net.py": "",
        "c/d/e/train.py": f"from other import Net\n{USE}{MAIN}",
        "c/d/e/other.py": "",
        "f/g.py": f"import h\nimport other\n{USE}",
        "f/h.py": "",
    }
    plans = _plans(tmp_path, files)
    assert [*plans] == [f"{each}/{ADAPTER}.py" for each in ("a/run/config", "b", "c/d/e", "f")]


def test_projects_next_to_each_other_have_adapters_of_their_own(tmp_path: Path) -> None:
    files = {
        f"{one}/{name}": text
        for one in "ab"
        for name, text in {"main.py": f"{USE}from utils.log import x\n{MAIN}", "utils/log.py": USE}.items()
    }
    assert [*_plans(tmp_path, files)] == [f"a/{ADAPTER}.py", f"b/{ADAPTER}.py"]


def test_imports_of_a_project_next_to_it_do_not_say_where_one_imports_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two projects have a module of the same name, which one of them imports without its package."""
    files = {
        "faces/README.md": "",
        "faces/pack/__init__.py": "",
        "faces/pack/train.py": USE,
        "faces/pack/utils/__init__.py": "from .utils import read\n",
        "faces/pack/utils/utils.py": USE,
        "words/README.md": "",
        "words/main.py": "import sys\nimport utils\n",
    }
    monkeypatch.chdir(tmp_path)
    assert _plans(tmp_path, files, is_repository=False) == {
        f"faces/pack/{ADAPTER}.py": (f"pack.{ADAPTER}", ["faces/pack/train.py", "faces/pack/utils/utils.py"])
    }


def test_an_import_that_leads_nowhere_says_nothing_next_to_one_that_leads_to_a_file(tmp_path: Path) -> None:
    """As of a script that was moved, with the name of another module."""
    files = {
        "train.py": USE + "from pack.engine.trainer import fit\n" + MAIN,
        "pack/engine/trainer.py": USE,
        "old/predict.py": "from trainer import fit\n",
    }
    assert _plans(tmp_path, files) == {f"{ADAPTER}.py": (ADAPTER, ["pack/engine/trainer.py", "train.py"])}


def test_a_package_that_is_installed_from_a_folder_has_the_adapter_though_a_file_names_the_folder(
    tmp_path: Path,
) -> None:
    """Most import the package by its own name, which leads nowhere from their folders."""
    files = {
        "src/__init__.py": "",
        "src/pack/__init__.py": "",
        "src/pack/steps.py": USE,
        "src/pack/optims.py": USE + "from src.pack import steps\n",
        "examples/a.py": "from pack.steps import fit\n",
        "examples/b.py": "from pack.steps import fit\nfrom pack.optims import make\n",
    }
    assert _plans(tmp_path, files) == {
        f"src/pack/{ADAPTER}.py": (f"pack.{ADAPTER}", ["src/pack/optims.py", "src/pack/steps.py"])
    }


def test_files_outside_of_a_folder_that_is_named_say_nothing_of_its_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "project/pack/__init__.py": "",
        "project/pack/utils/__init__.py": "from .utils import read\n",
        "project/pack/utils/utils.py": USE,
        "project/pack/loss.py": USE,
        "other/train.py": "from utils.utils import log\n",
    }
    monkeypatch.chdir(tmp_path)
    assert _plans(tmp_path, files, is_repository=False, named="project") == {
        f"project/pack/{ADAPTER}.py": (
            f"pack.{ADAPTER}",
            ["project/pack/loss.py", "project/pack/utils/utils.py"],
        )
    }


def test_imports_of_files_that_are_named_are_read_among_many_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampcompare.source.migrate.adapter.places.MAX_FILES", 1)
    files = {
        "many/a.py": "",
        "tools/train.py": USE + "from lib.engine.steps import fit\n" + MAIN,
        "lib/engine/steps.py": USE,
        "lib/engine/__init__.py": "",
    }
    assert _plans(tmp_path, files) == {
        f"{ADAPTER}.py": (ADAPTER, ["lib/engine/steps.py"]),
        f"tools/{ADAPTER}.py": (ADAPTER, ["tools/train.py"]),
    }


def test_a_folder_that_imports_lead_to_has_an_adapter_of_its_own_below_another_project(
    tmp_path: Path,
) -> None:
    """As a folder with a task of its own inside of a project, whose scripts get their path from outside."""
    files = {
        "optimizers.py": USE,
        "main.py": f"from optimizers import x\n{MAIN}",
        "task/steps/fit.py": USE,
        "task/steps/__init__.py": "",
        "task/tools/train.py": f"from steps import fit\n{MAIN}",
    }
    places = _plans(tmp_path, files)
    assert places == {
        f"{ADAPTER}.py": (ADAPTER, ["optimizers.py"]),
        f"task/steps/{ADAPTER}.py": (f"steps.{ADAPTER}", ["task/steps/fit.py"]),
    }


def test_a_script_finds_the_adapter_before_it_changes_the_path(tmp_path: Path) -> None:
    """A line of `sys.path` acts below itself, so the adapter lies next to the script, whose folder is always there."""
    files = {
        "tools/amp/train.py": f"import sys\n{USE}sys.path.append('../..')\nimport lib.net\n",
        "lib/net.py": "",
    }
    assert _plans(tmp_path, files) == {f"tools/amp/{ADAPTER}.py": (ADAPTER, ["tools/amp/train.py"])}


def test_an_import_above_a_change_of_the_path_is_named_where_files_share_the_adapter(tmp_path: Path) -> None:
    early = f"import sys\n{USE}sys.path.append('..')\nimport lib.net\nimport steps\n"
    late = f"import sys\nsys.path.append('..')\nimport lib.net\n{USE}"
    files = {"tools/train.py": early, "tools/test.py": late, "steps.py": USE, "lib/net.py": ""}
    places = _plans(tmp_path, files)
    assert [*places] == [f"{ADAPTER}.py"]
    (plan,), _ = adapter_plans_and_unread_files([*sorted(tmp_path.rglob("t*.py")), tmp_path / "steps.py"])
    migrations = {file.path.name: file.migration for file in plan.files}
    found = {
        name: [each.message for each in one.findings] for name, one in migrations.items() if one is not None
    }
    assert [len(found[name]) for name in ("steps.py", "test.py", "train.py")] == [0, 0, 1]
    assert "move it below" in found["train.py"][0]


def test_scripts_of_folders_of_their_own_have_adapters_of_their_own(tmp_path: Path) -> None:
    plans = _plans(tmp_path, {"a/train.py": USE + MAIN, "b/train.py": USE + MAIN})
    assert list(plans) == ["a/torch_amp_adapter.py", "b/torch_amp_adapter.py"]


def test_a_script_that_leaves_its_path_alone_keeps_the_adapter_next_to_itself(tmp_path: Path) -> None:
    """A module that only another project has is none that its imports find, where nothing changes `sys.path`."""
    script = f"{USE}from lamb import Lamb\nif __name__ == '__main__':\n    train()\n"
    plans = _plans(tmp_path, {"denoise/train.py": script, "glow/train.py": script, "glow/lamb.py": ""})
    assert set(plans) == {f"denoise/{ADAPTER}.py", f"glow/{ADAPTER}.py"}


def test_modules_of_a_package_with_names_of_the_standard_library_are_not_those(tmp_path: Path) -> None:
    files = {"pack/__init__.py": "", "pack/typing.py": "", "pack/sub/__init__.py": ""}
    plans = _plans(tmp_path, {**files, "pack/sub/steps.py": f"from typing import Any\n{USE}"})
    assert plans == {"pack/torch_amp_adapter.py": ("pack.torch_amp_adapter", ["pack/sub/steps.py"])}


def test_a_question_for_apex_stays_where_a_file_stays_on_apex(tmp_path: Path) -> None:
    asks = "try:\n    from apex import amp\n    has_apex = True\nexcept ImportError:\n    has_apex = False\n"
    (tmp_path / "settings.py").write_text(asks)
    (tmp_path / "train.py").write_text(
        "from settings import has_apex\nfrom apex import amp\namp.initialize(model)\n"
    )
    ((plan,), _) = adapter_plans_and_unread_files(sorted(tmp_path.glob("*.py")))
    assert [each.is_changed for each in plan.files] == [True, True]
    (tmp_path / "train.py").write_text(
        "from settings import has_apex\nfrom apex import amp\namp.init(enabled=True)\n"
    )
    ((plan,), _) = adapter_plans_and_unread_files(sorted(tmp_path.glob("*.py")))
    assert [each.is_changed for each in plan.files] == [False, False]
    assert "train.py is left by hand and imports Apex" in plan.files[0].lines()[0]


def test_a_core_stays_on_apex_with_the_part_that_another_file_has(tmp_path: Path) -> None:
    """The adapter cannot scale what Apex has initialized; a file without a part of the core moves."""
    (tmp_path / "setup_amp.py").write_text(
        "from apex import amp\nprint(amp.__version__)\namp.initialize(model)\n"
    )
    (tmp_path / "train.py").write_text(
        "import setup_amp\nfrom apex import amp\namp.master_params(optimizer)\n"
    )
    (tmp_path / "wrap.py").write_text("from apex.parallel import SyncBatchNorm\nSyncBatchNorm(2)\n")
    ((plan,), _) = adapter_plans_and_unread_files(sorted(tmp_path.glob("*.py")))
    assert [(each.path.name, each.is_changed) for each in plan.files] == [
        ("setup_amp.py", False),
        ("train.py", False),
        ("wrap.py", True),
    ]
    assert plan.files[1].lines()[0].endswith("one of them would scale what the other initialized")


def test_a_file_without_initialize_stays_with_a_core_of_another_folder(tmp_path: Path) -> None:
    """What it registers is cast by the `initialize` of a training that stays, wherever its adapter would lie."""
    path = "import sys\nsys.path.insert(0, '../..')\nfrom run.nets import net\n"
    fused = "from apex.fp16_utils import FP16_Optimizer\noptimizer = FP16_Optimizer(None)\n"
    steps = path + USE + fused + "amp.scale_loss(None, optimizer)\n"
    files = {
        "fast/__init__.py": "",
        "fast/ops.py": USE + "import torch\namp.register_float_function(torch, 'relu')\n",
        "run/nets.py": "from fast import ops\n",
        "run/im/training.py": steps,
        "run/main.py": USE + "from im.training import step\namp.initialize(None, None)\n" + MAIN,
    }
    plans = _plans(tmp_path, files)
    assert len(plans) == 2, plans
    left = {"ops.py", "training.py", "main.py"}
    assert {each.name for each in files_needing_apex_despite_adapter(sorted(tmp_path.rglob("*.py")))} == left
    (tmp_path / "run" / "im" / "training.py").write_text(steps.replace(fused, "optimizer = None\n"))
    assert files_needing_apex_despite_adapter(sorted(tmp_path.rglob("*.py"))) == []


def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from apex import amp\nprint 1\n")
    plans, faults = adapter_plans_and_unread_files([tmp_path / "train.py"])
    assert not plans
    assert faults[0].fault


def test_an_edited_adapter_stays(tmp_path: Path) -> None:
    (tmp_path / f"{ADAPTER}.py").write_text("# mine\n")
    (tmp_path / "train.py").write_text(USE)
    ((plan,), _) = adapter_plans_and_unread_files([tmp_path / "train.py"])
    assert plan.adapter.is_edited
    assert not plan.adapter.is_new
    assert not plan.adapter.diff()


def test_files_that_need_apex_even_so_are_told_apart(tmp_path: Path) -> None:
    for name, text in {"a": USE, "b": "from apex.optimizers import FusedLAMB\nFusedLAMB([])\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert files_needing_apex_despite_adapter(tmp_path.glob("*.py")) == [tmp_path / "b.py"]


def test_copies_in_two_folders_act_as_one(tmp_path: Path) -> None:
    """A script and the package that trains for it may reach the adapter by two names."""
    main = f"from lib.bot import step\n{USE}{MAIN}"
    files = {"lib/__init__.py": "", "lib/bot.py": USE, "one/main.py": main}
    plans = _plans(tmp_path, {**files, "one/evaluate.py": f"from main import step\n{USE}{MAIN}"})
    assert plans == {
        "lib/torch_amp_adapter.py": ("lib.torch_amp_adapter", ["lib/bot.py"]),
        "one/torch_amp_adapter.py": ("torch_amp_adapter", ["one/evaluate.py", "one/main.py"]),
    }
    for name in plans:
        (tmp_path / name).write_text(adapter_text())
    code = (
        "import torch_amp_adapter as amp, lib.torch_amp_adapter as other\n"
        "from lib.torch_amp_adapter import state_dict\n"
        "amp.initialize([], opt_level='O2', verbosity=0)\n"
        "print(amp is other, len(state_dict()))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(tmp_path / "one")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True 1\n"


def test_a_script_whose_imports_say_nothing_has_the_adapter_next_to_itself(tmp_path: Path) -> None:
    """Its neighbors reach the folder above by `sys.path`, and it does not."""
    script = f"{USE}if __name__ == '__main__':\n    pass\n"
    neighbor = f"import sys\nsys.path.append('..')\nfrom vlm.data import X\n{script}"
    files = {"vlm/__init__.py": "", "vlm/data.py": "X = 1\n", "vlm/glue.py": script, "vlm/lm.py": neighbor}
    (tmp_path / ".git").mkdir()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    plans, _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
    found = {each.path.name: plan.adapter.name for plan in plans for each in plan.files}
    assert found["glue.py"] == "torch_amp_adapter"
    assert {plan.adapter.path for plan in plans} == {tmp_path / "vlm/torch_amp_adapter.py"}


def test_a_library_whose_callers_initialize_says_whose_function_they_must_call(tmp_path: Path) -> None:
    finder = f"{USE}def step(loss, optimizer):\n    with amp.scale_loss(loss, optimizer) as scaled:\n        pass\n"
    files = {"finder/__init__.py": "", "finder/finder.py": finder, "finder/log.py": USE}

    def notes() -> list[tuple[str, str]]:
        plans, _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
        files = [each for plan in plans for each in plan.files]
        return [
            (each.path.name, found.message)
            for each in files
            if each.migration
            for found in each.migration.findings
        ]

    _plans(tmp_path, files)
    ((name, message),) = notes()
    assert name == "finder.py"
    assert "must call that of finder.torch_amp_adapter" in message
    (tmp_path / "use.py").write_text(f"{USE}import finder\nfinder.step(*amp.initialize(model, optimizer))\n")
    assert notes() == []
    (tmp_path / "use.py").write_text(
        "def begin(amp, model, optimizer):\n    return amp.initialize(model, optimizer)\n"
    )
    assert notes() == []
    (tmp_path / "use.py").write_text("def begin(weights):\n    return weights.initialize()\n")
    assert len(notes()) == 1
    (tmp_path / "README.md").touch()
    for shown in ("tests/test_finder.py", "docs/examples/use.py", "test_use.py"):
        (tmp_path / shown).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / shown).write_text(f"{USE}import finder\nfinder.step(*amp.initialize(model, optimizer))\n")
    found = [message for name, message in notes() if "must call" in message]
    assert len(found) == 1
    assert "except tests and examples" in found[0]


@pytest.mark.parametrize(
    "scales", ["", "with amp.scale_loss(loss, optimizer) as loss:\n    pass\n", "import steps\n"]
)
def test_o1_without_a_scaled_loss_has_a_note(tmp_path: Path, scales: str) -> None:
    """Apex keeps its casts of weights until a block of `scale_loss` ends."""
    train = f"{USE}model, optimizer = amp.initialize(model, optimizer)\nloss.backward()\n{scales}{MAIN}"
    _plans(tmp_path, {"train.py": train, "steps.py": f"{USE}def step(x):\n    amp.scale_loss(x, y)\n"})
    plans, _ = adapter_plans_and_unread_files([tmp_path / "train.py"])
    lines = [line for plan in plans for each in plan.files for line in each.lines()]
    assert any("no scale_loss is seen in this program" in line for line in lines) == (not scales)


def test_an_import_without_use_stays_with_a_core_that_stays(tmp_path: Path) -> None:
    texts = {"train.py": "from apex import amp\nimport steps\namp.init()\n" + MAIN, "steps.py": USE}
    _plans(tmp_path, texts)
    plans, _ = adapter_plans_and_unread_files(sorted(tmp_path.glob("*.py")))
    files = {each.path.name: each for plan in plans for each in plan.files}
    assert not any(each.is_changed for each in files.values())
    (line,) = files["steps.py"].lines()
    assert (
        "steps.py:1:1: by hand: train.py calls apex.amp and stays on Apex, so this import stays too" in line
    )


def test_a_module_finds_the_adapter_in_the_folder_of_its_script_before_it_changes_the_path(
    tmp_path: Path,
) -> None:
    tool = f"import sys\n{USE}sys.path.insert(1, './')\nfrom train.tools.log import x\n"
    files = {
        "work/train/run.py": f"from tools.fitter import fit\n{MAIN}",
        "work/train/tools/fitter.py": tool,
        "work/train/tools/log.py": "x = 1\n",
    }
    assert [*_plans(tmp_path, files)] == [f"work/train/{ADAPTER}.py"]
    plans, _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
    assert not [
        each for plan in plans for file in plan.files if file.migration for each in file.migration.findings
    ]


def test_a_module_finds_the_adapter_in_the_folder_of_its_script_that_imports_it_from_above(
    tmp_path: Path,
) -> None:
    """Of a program its own folder comes first in `sys.path`, before any line runs; a second run says nothing new."""
    late = "import sys\nfrom apex import amp\nsys.path.insert(1, './')\nimport train.tools.kinds\n"
    late += "def step(loss, optimizer):\n    with amp.scale_loss(loss, optimizer) as scaled:\n"
    late += "        scaled.backward()\n"
    program = "import sys\nfrom apex import amp\nsys.path.insert(1, './')\nfrom train.tools.fitter import *\n"
    program += "amp.initialize(model, optimizer)\nif __name__ == '__main__':\n    step(loss, optimizer)\n"
    files = {
        "abba/train/program.py": program,
        "abba/train/tools/fitter.py": late,
        "abba/train/tools/kinds.py": "KINDS = 1\n",
        "show.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    plans, _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
    assert [each.adapter.path for each in plans] == [tmp_path / "abba/train/torch_amp_adapter.py"]
    assert not any(each.num_lines_by_hand for each in plans[0].files)


def test_a_file_that_may_run_without_its_package_is_named(tmp_path: Path) -> None:
    head = "import os\ntry:\n    from apex import amp\nexcept ImportError:\n    amp = None\n"
    alone = f"{head}if 'ALONE' not in os.environ:\n    from .metrics import mean\namp.initialize(model, optimizer)\n"
    for text, num_notes in ((alone, 1), (f"{alone}from .metrics import total\n", 0)):
        files = {
            "pkg/__init__.py": "",
            "pkg/bert.py": text,
            "pkg/metrics.py": "mean = total = sum\n",
            "run.py": "import pkg.bert\n",
        }
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        plans, _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
        found = [
            each.message for file in plans[0].files if file.migration for each in file.migration.findings
        ]
        assert [each.startswith("this file imports from pkg only here") for each in found].count(
            True
        ) == num_notes


def test_a_module_named_as_an_installed_library_is_none_that_bare_imports_mean(tmp_path: Path) -> None:
    """Its package imports it relatively; `from library import x` elsewhere is of the library."""
    files = {
        "src/__init__.py": "",
        "src/models/library.py": f"from library.parts import x\n{USE}",
        "src/models/net.py": f"from .library import y\n{USE}",
        "src/tasks/run.py": f"from library import z\nfrom src.models.net import Net\n{MAIN}",
    }
    assert [*_plans(tmp_path, files)] == [f"src/{ADAPTER}.py"]


def test_a_script_takes_the_adapter_next_to_it_by_its_bare_name_above_its_change_of_the_path(
    tmp_path: Path,
) -> None:
    script = f"import sys\n{USE}sys.path.append('..')\nfrom nets.net import Net\nfrom train.level import x\n"
    main = "if __name__ == '__main__':\n    amp.initialize(model, optimizer)\n"
    files = {f"train/run{at}.py": f"{script}{main}" for at in range(3)}
    files |= {
        "train/__init__.py": "",
        "train/level.py": "x = 1\n",
        "nets/__init__.py": "",
        "nets/net.py": USE,
    }
    assert [*_plans(tmp_path, files)] == [f"train/{ADAPTER}.py"]
    (plan,), _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
    texts = {each.path.name: each.migration.text for each in plan.files if each.migration}
    assert f"import train.{ADAPTER} as amp" in texts["net.py"]
    for name in ("run0.py", "run1.py", "run2.py"):
        assert f"import {ADAPTER} as amp" in texts[name]


def test_a_file_that_imports_its_own_modules_in_two_ways_is_named(tmp_path: Path) -> None:
    """As a script it does not find the adapter of its package."""
    both = "try:\n    from parts import x\nexcept ImportError:\n    from .parts import x\n"
    files = {"pkg/__init__.py": "", "pkg/parts.py": "x = 1\n", "pkg/train.py": f"{both}{USE}{MAIN}"}
    files["use.py"] = "from pkg.train import x\n"
    _plans(tmp_path, files)
    (plan,), _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
    said = [one.message for each in plan.files if each.migration for one in each.migration.findings]
    assert any("imports parts as a script does and as a module of its package" in each for each in said)
    # two modules of one name
    (tmp_path / "pkg" / "train.py").write_text(f"from parts import x\nfrom .parts import y\n{USE}{MAIN}")
    (plan,), _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
    assert not any(each.num_lines_by_hand for each in plan.files)


@pytest.mark.parametrize(("importer", "is_named"), [("pkg.sub.engine", True), ("sub.engine", False)])
def test_a_second_folder_from_which_a_file_is_imported_is_named(
    tmp_path: Path, importer: str, is_named: bool
) -> None:
    """The adapter has the name that it has from one of them."""
    path = "import sys\nsys.path.insert(0, '..')\n"
    files = {
        "pkg/__init__.py": "",
        "pkg/sub/__init__.py": "",
        "pkg/sub/engine.py": f"{USE}def fit():\n    return amp\n",
        "tools/train.py": f"{path}from sub.engine import fit\n",
        "tools/test.py": f"{path}from sub.engine import fit\n",
        "tools/eval.py": f"{path}from {importer} import fit\n",
    }
    _plans(tmp_path, files)
    (plan,), _ = adapter_plans_and_unread_files(sorted(tmp_path.rglob("*.py")))
    said = [one.message for each in plan.files if each.migration for one in each.migration.findings]
    assert any("another file imports this one from the folder ../.." in each for each in said) == is_named
