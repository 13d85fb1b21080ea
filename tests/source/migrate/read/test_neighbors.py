"""Files that have a part of one training: they are left for the adapter, which serves them all."""

import os
from pathlib import Path

import pytest

from ampcompare.source.migrate.project import migrate_file
from ampcompare.source.project import ImportIndex

HEAD = "import torch\nfrom apex import amp\n"
TRAIN = """

def train(args, model, optimizer, loader):
    for x in loader:
        loss = model(x).mean()
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
"""
MAIN = """

def main(args, model, optimizer, loader):
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer)
    train(args, model, optimizer, loader)
"""


def _files(folder: Path, **texts: str) -> None:
    # the topmost folder: above it lie those of all other tests, which would be searched
    (folder / "README.md").touch()
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _migrated(path: Path) -> str:
    migration = migrate_file(path).migration
    return migration.text


def test_a_pipe_next_to_a_script_is_not_waited_for(tmp_path: Path) -> None:
    """Its name says that it is a script; nothing would ever come from it."""
    _files(tmp_path, one=HEAD + TRAIN + MAIN)
    os.mkfifo(tmp_path / "other.py")
    assert "global scaler" in _migrated(tmp_path / "one.py")


HOOK = """

class Hook:
    def after_iteration(self, runner):
        with amp.scale_loss(runner.loss, runner.optimizer) as scaled_loss:
            scaled_loss.backward()
        runner.step()
"""
TWO_PASSES = """

def main(args, model, opt, loader, criterion):
    if args.half_prec:
        model, opt = amp.initialize(model, opt)
    for x, y in loader:
        loss = criterion(model(x), y)
        if args.half_prec:
            with amp.scale_loss(loss, opt) as scaled_loss:
                grad = torch.autograd.grad(scaled_loss, x)[0]
        else:
            grad = torch.autograd.grad(loss, x)[0]
        output = model(x + grad.sign())
        loss = criterion(output, y)
        {call}
        opt.step()
"""


def _is_left(path: Path, said: str) -> bool:
    return "amp.GradScaler" not in _migrated(path) and said in "\n".join(migrate_file(path).lines())


@pytest.mark.parametrize("line", ["from one import train", "from .one import train", "import one"])
def test_a_function_that_another_script_trains_with(tmp_path: Path, line: str) -> None:
    """A global scaler of its module would be off there, without a word."""
    _files(tmp_path, one=HEAD + TRAIN + MAIN, other=f"{HEAD}{line}\n{MAIN}")
    assert _is_left(tmp_path / "one.py", "a part of Apex's core is in other.py too")
    assert _is_left(tmp_path / "other.py", "a part of Apex's core is in one.py too")


def test_two_scripts_that_train_apart_under_one_importer(tmp_path: Path) -> None:
    _files(tmp_path, one=HEAD + TRAIN + MAIN, two=HEAD + TRAIN + MAIN, both="import one\nimport two\n")
    assert "scaler.update()" in _migrated(tmp_path / "one.py")
    _files(tmp_path, two=HEAD + TRAIN)
    assert _is_left(tmp_path / "one.py", "a part of Apex's core is in two.py too")
    _files(tmp_path, two=HEAD + "import one\n" + TRAIN + MAIN)
    assert _is_left(tmp_path / "one.py", "a part of Apex's core is in two.py too")


def test_a_state_that_another_file_saves(tmp_path: Path) -> None:
    """As the checkpoints of a script often are in a module of their own."""
    save = f"{HEAD}\ndef save(optimizer, path):\n    torch.save({{'amp': amp.state_dict()}}, path)\n"
    _files(tmp_path, main=f"{HEAD}from checkpoints import save\n{TRAIN}{MAIN}", checkpoints=save)
    assert _is_left(tmp_path / "main.py", "a part of Apex's core is in checkpoints.py too")
    assert _is_left(tmp_path / "checkpoints.py", "a part of Apex's core is in main.py too")
    _files(tmp_path, main="from checkpoints import save\nsave(optimizer, 'last.pt')\n")
    assert _is_left(tmp_path / "checkpoints.py", "amp.initialize is in no place of this file")


def test_a_loss_that_a_file_without_an_import_may_scale(tmp_path: Path) -> None:
    """A registry or a string leads there, as to the hooks of mmcv."""
    loop = "\n\ndef main(model, optimizer):\n    model, optimizer = amp.initialize(model, optimizer)\n"
    _files(tmp_path, hooks=HEAD + HOOK, train=f"{HEAD}{loop}    model.backward()\n")
    assert _is_left(tmp_path / "train.py", "a part of Apex's core is in hooks.py too")
    _files(tmp_path, hooks="")
    assert "no file calls scale_loss" in "\n".join(migrate_file(tmp_path / "train.py").lines())
    _files(tmp_path, train=HEAD + loop)
    assert _is_left(tmp_path / "train.py", "no backward pass is in this file")


UPDATES = (
    "loop.optimizer.step()",
    "torch.nn.utils.clip_grad_norm_(w, 1.0)",
    "loss.backward()",
    "print(w.grad.norm())",
)


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_of_a_file_that_imports_one_that_trains(tmp_path: Path, update: str) -> None:
    """It may step the optimizer, or clip its gradients, between the backward pass and the step of the other file."""
    head = "import torch\nimport loop\nfor w in loop.model.parameters():\n    "
    _files(tmp_path, loop=HEAD + TRAIN + MAIN, run=f"{head}{update}\n")
    assert _is_left(tmp_path / "loop.py", "of run.py, which imports this file, may belong to this training")
    _files(tmp_path, run=f"{head}scheduler.step()\n    w.zero_grad()\n")
    assert "scaler.update()" in _migrated(tmp_path / "loop.py")


def test_an_object_of_another_file_that_gets_the_loss_stays(tmp_path: Path) -> None:
    """What it does cannot be seen; nor may the step run where no loss was scaled."""
    _files(tmp_path, one=HEAD + TWO_PASSES.replace("{call}", "engine.backward(loss, opt)"))
    migration = migrate_file(tmp_path / "one.py")
    assert migration.num_lines_by_hand == 1
    assert "engine.backward is no backward pass of a loss by its name and arguments" in migration.lines()[0]
    branches = (
        "if args.half_prec:\n            opt.zero_grad()\n        else:\n            engine.backward(loss)"
    )
    _files(tmp_path, two=HEAD + TWO_PASSES.replace("{call}", branches))
    assert "            engine.backward(loss)\n" in _migrated(tmp_path / "two.py")
    assert "scaler.step fails without one" in "\n".join(migrate_file(tmp_path / "two.py").lines())


def test_what_a_function_that_nobody_knows_does_with_gradients_is_not_guessed(tmp_path: Path) -> None:
    """It may scale the loss, clip or step: the file stays on Apex, with the reason."""
    caller = TWO_PASSES.replace("{call}", "run(loss, opt)")
    _files(tmp_path, one=f"{HEAD}from far import run\n{caller}")
    assert "what run() in line 18 does with the gradients, before the step, is not known" in "\n".join(
        migrate_file(tmp_path / "one.py").lines()
    )
    assert _migrated(tmp_path / "one.py").count("amp.scale_loss") == 1


EXPORTS = """try:
    from apex.normalization import FusedLayerNorm as Norm
    from apex.optimizers import FusedAdam as Adam
    from apex.optimizers import FusedLAMB
except ImportError:
    from torch.nn import LayerNorm as Norm
    from torch.optim import AdamW as Adam
"""


@pytest.mark.parametrize(
    "user",
    [
        "from fast import Adam, Norm\n",
        "import fast\nfast.Adam(fast.Norm(2).parameters())\n",
        "import fast as quick\nquick.Adam(quick.Norm(2).parameters())\n",
        "from fast import *\nAdam(Norm(2).parameters())\n",
        "def build():\n    from .fast import (\n        Adam,\n        Norm as N,\n    )\n",
    ],
)
def test_names_that_another_file_imports_are_used(tmp_path: Path, user: str) -> None:
    """A layer with the same arguments becomes that of torch; an optimizer has others; what nobody imports goes."""
    _files(tmp_path, fast=EXPORTS, user=user)
    text = _migrated(tmp_path / "fast.py")
    assert text == EXPORTS.replace(
        "from apex.normalization import FusedLayerNorm", "from torch.nn import LayerNorm"
    ).replace("    from apex.optimizers import FusedLAMB\n", "")
    assert _migrated(tmp_path / "fast.py") == text
    _files(tmp_path, user="import other\nprint('fast', other.Adam, other.Norm)\n")
    assert _migrated(tmp_path / "fast.py") == ""


def test_a_name_of_a_package_that_lists_it_is_used(tmp_path: Path) -> None:
    _files(tmp_path, user="from layers import FusedAdam\n")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "__init__.py").write_text(
        "from apex.optimizers import FusedAdam\n", encoding="utf-8"
    )
    assert "FusedAdam" in _migrated(tmp_path / "layers" / "__init__.py")
    _files(
        tmp_path, user="", all="from apex.optimizers import FusedAdam, FusedSGD\n__all__ = ['FusedAdam']\n"
    )
    assert (
        _migrated(tmp_path / "all.py") == "from apex.optimizers import FusedAdam\n__all__ = ['FusedAdam']\n"
    )


def test_apex_itself_stays_where_another_file_has_it_from_there(tmp_path: Path) -> None:
    base = "try:\n    import apex\nexcept ImportError:\n    apex = None\n"
    _files(tmp_path, base=base, main="from base import apex\nprint(apex.optimizers.FusedLAMB)\n")
    assert _migrated(tmp_path / "base.py") == base
    _files(tmp_path, main="")
    assert _migrated(tmp_path / "base.py") == ""


ATTACKS = """def attack(model, x, y):
    loss = model(x).mean()
    loss.backward()
    return x.grad.sign()
"""


@pytest.mark.parametrize(
    ("line", "name"), [("from attacks import attack", "attack"), ("import attacks as a", "a.attack")]
)
def test_a_function_of_another_file_that_runs_a_backward_pass_is_not_under_autocast(
    tmp_path: Path, line: str, name: str
) -> None:
    attacks = f"x = x + {name}(model, x, 1)\n        "
    clears = "optimizer.zero_grad()\n        "
    text = HEAD + line + TRAIN.replace("loss = model(x)", f"{attacks}{clears}loss = model(x)") + MAIN
    _files(tmp_path, attacks=ATTACKS, one=text)
    assert f"        {attacks}{clears}with torch.autocast(" in _migrated(tmp_path / "one.py")
    _files(tmp_path, one=text.replace(clears, ""))
    assert "adds to the gradients of optimizer before they are scaled" in _migrated(tmp_path / "one.py")
    _files(tmp_path, attacks=ATTACKS.replace("    loss.backward()\n", ""), one=text.replace(clears, ""))
    assert f"            x = x + {name}(model, x, 1)\n            loss = model(x)" in _migrated(
        tmp_path / "one.py"
    )


SETUP = """

def setup(args, model, optimizer):
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer)
    return Runner(model, optimizer)
"""


def test_a_project_with_too_many_files_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of Apex that lies beyond is not taken for one that does not exist."""
    monkeypatch.setattr("ampcompare.source.project.MAX_MODULES", 4)
    monkeypatch.setattr("ampcompare.source.migrate.read.neighbors.MAX_MODULES", 4)
    layers = [f"layer_{number}" for number in range(9)]
    imports = "".join(f"import {name}\n" for name in [*layers, "hooks"])
    _files(
        tmp_path, hooks=HEAD + HOOK, train=HEAD + imports + SETUP, **dict.fromkeys(layers, "import torch\n")
    )
    assert _is_left(tmp_path / "train.py", "a part of Apex's core is in hooks.py too")


def test_a_package_of_tests_with_the_folders_of_the_library(tmp_path: Path) -> None:
    """An import by the full name means the library, from within the tests too."""
    (tmp_path / "README.md").touch()
    for folder in ("lib", "lib/engine", "tests", "tests/lib", "tests/lib/engine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "lib/engine/__init__.py").write_text(HEAD + TRAIN, encoding="utf-8")
    test = tmp_path / "tests/lib/engine/test_train.py"
    test.write_text(f"{HEAD}from lib.engine import train\n{MAIN}", encoding="utf-8")
    assert _is_left(test, "a part of Apex's core is in ../../../lib/engine/__init__.py too")


def test_amp_and_the_question_for_it_that_a_star_import_passes_on(tmp_path: Path) -> None:
    question = "def has_apex():\n    try:\n        from apex import amp\n        return True\n    except ImportError:\n"
    question += "        return False\n"
    shared = "from question import has_apex\nif has_apex():\n    from apex import amp\n"
    _files(tmp_path, question=question, shared=shared, loop=f"from shared import *\n{TRAIN}{MAIN}")
    assert migrate_file(tmp_path / "loop.py").num_lines_by_hand
    assert shared.splitlines()[-1] in _migrated(tmp_path / "shared.py").splitlines()
    assert "apex import" in _migrated(tmp_path / "question.py")
    _files(tmp_path, loop=f"from shared import *\nfrom apex import amp\n{TRAIN}{MAIN}")
    assert "amp" not in _migrated(tmp_path / "shared.py")
    assert "apex import" not in _migrated(tmp_path / "question.py")


def test_a_test_that_asks_for_apex_as_long_as_what_it_tests_needs_that(tmp_path: Path) -> None:
    asks = "    there = True\n    try:\n        import apex\n    except ImportError:\n        there = False\n"
    test = f"from loop import train\n\n\ndef test_train():\n{asks}    train(amp=there)\n"
    _files(tmp_path, loop=HEAD + HOOK, test_loop=test)
    text = _migrated(tmp_path / "test_loop.py")
    assert "        there = False\n" in text
    _files(tmp_path, loop=HEAD + TRAIN + MAIN)
    assert "import apex" not in _migrated(tmp_path / "test_loop.py")


def test_files_that_only_lie_nearby_are_of_no_project(tmp_path: Path) -> None:
    """Below the root of a repository, and in a folder that was named, all files are of one; else imports say so."""
    loop = "\n\ndef main(model, optimizer):\n    model, optimizer = amp.initialize(model, optimizer)\n"
    for name, text in (("one", f"{HEAD}{loop}    model.backward()\n"), ("two", HEAD + HOOK)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text, encoding="utf-8")
    script, said = tmp_path / "one" / "train.py", "a part of Apex's core is in ../two/train.py too"
    assert "no file calls scale_loss" in "\n".join(migrate_file(script).lines())
    assert "no file calls scale_loss" in "\n".join(
        migrate_file(script, imports=ImportIndex([tmp_path / "one"])).lines()
    )
    assert said in "\n".join(migrate_file(script, imports=ImportIndex([tmp_path])).lines())
    (tmp_path / "setup.py").touch()
    assert said in "\n".join(migrate_file(script).lines())
