"""Training functions that several scripts call: each optimizer carries its scaler there."""

import os
from pathlib import Path

import pytest

from ampcompare.source.migrate.project import migrate_file

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
    (folder / "README.md").touch()  # the topmost folder: above it lie those of all other tests, which would be searched
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


@pytest.mark.parametrize("line", ["from one import train", "from .one import train", "import one"])
def test_a_function_that_another_script_imports_takes_the_scaler_of_its_optimizer(tmp_path: Path, line: str) -> None:
    """A global one of its module would be off there, without a word."""
    _files(tmp_path, one=HEAD + TRAIN + MAIN, other=f"{HEAD}{line}\n{MAIN}")
    one, other = _migrated(tmp_path / "one.py"), _migrated(tmp_path / "other.py")
    assert "global" not in one
    assert "scaler = optimizer.grad_scaler if args.fp16 else torch.amp.GradScaler" in one
    assert one.count("optimizer.grad_scaler = scaler") == other.count("optimizer.grad_scaler = scaler") == 2


def test_it_does_not_matter_which_file_is_written_first(tmp_path: Path) -> None:
    _files(tmp_path, one=HEAD + TRAIN + MAIN, other=f"{HEAD}from one import train\n{MAIN}")
    expected = [_migrated(tmp_path / name) for name in ("one.py", "other.py")]
    migrate_file(tmp_path / "other.py").write()
    assert _migrated(tmp_path / "one.py") == expected[0]
    migrate_file(tmp_path / "one.py").write()
    assert [(tmp_path / name).read_text(encoding="utf-8") for name in ("one.py", "other.py")] == expected
    assert not any(migrate_file(tmp_path / name).changed for name in ("one.py", "other.py"))


def test_a_file_that_only_saves_the_state_gets_the_scaler_with_the_optimizer(tmp_path: Path) -> None:
    """As the checkpoints of a script often are in a module of their own."""
    save = f"{HEAD}\ndef save(optimizer, path):\n    torch.save({{'amp': amp.state_dict()}}, path)\n"
    _files(tmp_path, main=f"{HEAD}from checkpoints import save\n{TRAIN}{MAIN}", checkpoints=save)
    assert "optimizer.grad_scaler = scaler" in _migrated(tmp_path / "main.py")
    assert "optimizer.grad_scaler.state_dict()" in _migrated(tmp_path / "checkpoints.py")


SCALE = """

def backward(loss, opt, half_prec):
    if half_prec:
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
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


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("from steps import backward as run", "run(loss, opt, args.half_prec)"),
        ("from steps import *", "backward(criterion(output, model(y)), opt, args.half_prec)"),
    ],
)
def test_a_helper_next_to_a_block_of_the_caller(tmp_path: Path, line: str, call: str) -> None:
    """The call stays, the model is under autocast wherever it is called, and the step goes through the scaler."""
    caller = TWO_PASSES.replace("{call}", call)
    _files(tmp_path, steps=HEAD + SCALE, train=f"{HEAD}{line}\n{caller}")
    train = _migrated(tmp_path / "train.py")
    assert f"        {call}\n        scaler.step(opt)\n" in train
    assert "model.forward = torch.autocast(" in train
    assert "opt.grad_scaler = scaler" in train


def test_an_object_of_another_file_that_gets_the_loss_stays(tmp_path: Path) -> None:
    """What it does cannot be seen; nor may the step run where no loss was scaled."""
    _files(tmp_path, one=HEAD + TWO_PASSES.replace("{call}", "engine.backward(loss, opt)"))
    migration = migrate_file(tmp_path / "one.py")
    assert migration.by_hand == 1
    assert "what engine.backward does with its loss cannot be seen in this file" in migration.lines()[0]
    branches = "if args.half_prec:\n            opt.zero_grad()\n        else:\n            engine.backward(loss)"
    _files(tmp_path, two=HEAD + TWO_PASSES.replace("{call}", branches))
    assert "            engine.backward(loss)\n" in _migrated(tmp_path / "two.py")
    assert "scaler.step fails without one" in "\n".join(migrate_file(tmp_path / "two.py").lines())


def test_what_a_function_that_nobody_knows_does_with_gradients_is_not_guessed(tmp_path: Path) -> None:
    """It may scale the loss, clip or step: the file stays on Apex, with the reason."""
    caller = TWO_PASSES.replace("{call}", "run(loss, opt)")
    _files(tmp_path, one=f"{HEAD}from far import run\n{caller}")
    assert "what run() in line 18 does with the gradients, before the step, cannot be seen" in "\n".join(
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
    (tmp_path / "layers" / "__init__.py").write_text("from apex.optimizers import FusedAdam\n", encoding="utf-8")
    assert "FusedAdam" in _migrated(tmp_path / "layers" / "__init__.py")
    _files(tmp_path, user="", all="from apex.optimizers import FusedAdam, FusedSGD\n__all__ = ['FusedAdam']\n")
    assert _migrated(tmp_path / "all.py") == "from apex.optimizers import FusedAdam\n__all__ = ['FusedAdam']\n"


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
    assert f"            x = x + {name}(model, x, 1)\n            loss = model(x)" in _migrated(tmp_path / "one.py")


HOOK = """

class Hook:
    def after_iteration(self, runner):
        with amp.scale_loss(runner.loss, runner.optimizer) as scaled_loss:
            scaled_loss.backward()
        runner.step()
"""
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
    _files(tmp_path, hooks=HEAD + HOOK, train=HEAD + imports + SETUP, **dict.fromkeys(layers, "import torch\n"))
    assert "hooks.py is left by hand" in "\n".join(migrate_file(tmp_path / "train.py").lines())
    _files(tmp_path, hooks=HEAD + HOOK.replace("runner.step()", "runner.optimizer.step()"))
    assert "optimizer.grad_scaler = scaler" in _migrated(tmp_path / "train.py")
    assert "runner.optimizer.grad_scaler.step(runner.optimizer)" in _migrated(tmp_path / "hooks.py")


def test_a_package_of_tests_with_the_folders_of_the_library(tmp_path: Path) -> None:
    """An import by the full name means the library, from within the tests too."""
    (tmp_path / "README.md").touch()
    for folder in ("lib", "lib/engine", "tests", "tests/lib", "tests/lib/engine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "lib/engine/__init__.py").write_text(HEAD + TRAIN, encoding="utf-8")
    test = tmp_path / "tests/lib/engine/test_train.py"
    test.write_text(f"{HEAD}from lib.engine import train\n{MAIN}", encoding="utf-8")
    assert "optimizer.grad_scaler = scaler" in _migrated(test)


@pytest.mark.parametrize(
    "use", ["DataParallelWithCallback(model, [0])", "copy.deepcopy(model)", "copy.deepcopy(self.model)", "Ema(model)"]
)
def test_a_model_that_another_file_copies(tmp_path: Path, use: str) -> None:
    """Each copy casts in its own forward pass, and does not run that of the first model."""
    loop = HEAD + TRAIN.replace("    for x in loader", f"    twin = {use}\n    for x in loader")
    main = HEAD + "from loop import train\n" + MAIN
    _files(tmp_path, loop=loop, main=main)
    assert "model.__class__ = Autocast" in _migrated(tmp_path / "main.py")
    _files(tmp_path, loop=loop.replace(use, "DistributedDataParallel(model)"))
    assert "model.forward = torch.autocast(" in _migrated(tmp_path / "main.py")


def test_amp_and_the_question_for_it_that_a_star_import_passes_on(tmp_path: Path) -> None:
    question = "def has_apex():\n    try:\n        from apex import amp\n        return True\n    except ImportError:\n"
    question += "        return False\n"
    shared = "from question import has_apex\nif has_apex():\n    from apex import amp\n"
    _files(tmp_path, question=question, shared=shared, loop=f"from shared import *\n{TRAIN}{MAIN}")
    assert migrate_file(tmp_path / "loop.py").by_hand
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


def test_a_static_scale_stays_where_another_file_updates_it(tmp_path: Path) -> None:
    main = MAIN.replace("(model, optimizer)\n", "(model, optimizer, loss_scale=128.0)\n", 1)
    _files(tmp_path, loop=HEAD + TRAIN, main=HEAD + "from loop import train\n" + main)
    assert "scaler.update()" in _migrated(tmp_path / "loop.py")
    assert 'GradScaler("cuda", init_scale=128.0, growth_interval=2**31 - 1)' in _migrated(tmp_path / "main.py")
    assert "halves after an overflow" in "\n".join(migrate_file(tmp_path / "main.py").lines())


def test_a_state_that_no_file_around_initializes_is_left_by_hand(tmp_path: Path) -> None:
    """Apex saves an empty one there, and an optimizer without a scaler has none."""
    save = f"{HEAD}\ndef save(optimizer, path):\n    torch.save({{'amp': amp.state_dict()}}, path)\n"
    _files(tmp_path, checkpoints=save, main="from checkpoints import save\nsave(optimizer, 'last.pt')\n")
    assert "amp.state_dict()" in _migrated(tmp_path / "checkpoints.py")
    assert migrate_file(tmp_path / "checkpoints.py").by_hand
