"""Calls and casts outside of autocast: refused, or named in a note."""

from pathlib import Path

import pytest
import torch

from ampcompare.source.migrate.core.outside import NO_GRAD, OF_MODULE
from ampcompare.source.migrate.project import migrate_file
from ampcompare.source.migrate.read.finding import BY_HAND, NOTE
from ampcompare.source.migrate.rewrite import migrate_text

TRAINING = """import torch
from apex import amp
from evaluation import validate, count
ABOVE
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x in data:
    WITHIN
    loss = model(x).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
BELOW
"""


def _script(*, above: str = "", within: str = "", below: str = "") -> str:
    script = TRAINING.replace("ABOVE", above).replace("BELOW", below)
    return script.replace("    WITHIN\n", f"    {within}\n" if within else "")


@pytest.mark.parametrize(
    "cast",
    [
        "model = model.half()",
        "model.cuda().to(torch.float16)",
        "model.module.encoder.to(dtype=torch.half)",
        "save(model)",
        "for each in model.modules():\n        each.half()",
    ],
)
def test_weights_that_become_fp16_while_they_train_leave_the_file(cast: str) -> None:
    """GradScaler refuses their gradients."""
    above = "def save(net):\n    torch.save(net.half().state_dict(), path)\n"
    found = migrate_text(_script(above=above, within=cast)).findings
    assert any(each.kind == BY_HAND and "to fp16; GradScaler" in each.message for each in found)


@pytest.mark.parametrize(
    "cast",
    [
        "copy = copy.deepcopy(model).half()",
        "image = model(x).half()",
        "model = model.float()",
        "y = x.half()",
    ],
)
def test_casts_of_other_things_are_no_casts_of_weights(cast: str) -> None:
    assert not any(
        "to fp16; GradScaler" in each.message for each in migrate_text(_script(below=cast)).findings
    )


def test_what_else_computes_is_named(tmp_path: Path) -> None:
    """Another network, and an evaluation in another file; not what only counts parameters, nor what runs before."""
    (tmp_path / "evaluation.py").write_text(
        "import torch\n\ndef validate(net, x):\n    with torch.no_grad():\n        return net(x)\n\n"
        "def count(net):\n    return sum(each.numel() for each in net.parameters())\n",
        encoding="utf-8",
    )
    above = "teacher = torch.nn.Linear(4, 4)\nvalidate(model, x)\n"
    within = "with torch.no_grad():\n        target = teacher(x)"
    path = tmp_path / "train.py"
    path.write_text(
        _script(above=above, within=within, below="count(model)\nvalidate(model, x)"), encoding="utf-8"
    )
    migration = migrate_file(path).migration
    assert migration is not None
    (found,) = [
        each for each in migration.findings if each.message.startswith("O1 cast all over the process")
    ]
    assert found.kind == NOTE
    assert found.message.endswith("as by: teacher() (line 10), validate() (line 16)")


def test_a_model_is_known_by_the_names_of_parameters_that_get_it() -> None:
    above = "def evaluate(net, x):\n    with torch.no_grad():\n        return net(x)\n"
    text = migrate_text(_script(above=above, below="evaluate(model, x)")).text
    assert 'with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):' in text


@pytest.mark.parametrize(
    ("held", "call"),
    [
        ("nets = {}\nnets['g'] = model", "nets['g'](x)"),
        ("nets = {'g': model}", "nets['g'](x)"),
        ("nets = [model, other]", "[net(x) for net in nets]"),
        ("loss_of, (nets) = other, [model]", "[net(loss_of(x)) for loss_of, net in zip(losses, nets)]"),
        (
            "nets = dict(a=1)\nnets['g'], rest = model, 1\nnets['g'] = model",
            "sum(net(x) for _, net in nets.items())",
        ),
    ],
)
def test_a_model_is_known_as_a_member_of_lists_and_dicts(held: str, call: str) -> None:
    above = f"def evaluate(nets, x):\n    with torch.no_grad():\n        return {call}\n"
    migration = migrate_text(_script(above=above, below=f"{held}\nevaluate(nets, x)\nnets.items()"))
    assert 'with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):' in migration.text
    assert not any("nets.items() is outside" in each.message for each in migration.findings)


def test_what_is_not_seen_to_compute_is_not_named(tmp_path: Path) -> None:
    """A function that wraps or loads a model, one of NumPy, an average of weights; one that leads to a call is."""
    (tmp_path / "evaluation.py").write_text(
        "import torch\n\n"
        "def validate(nets, x):\n    return run(nets['g'], x)\n\ndef run(net, x):\n    return net(x)\n\n"
        "def count(net):\n    return torch.nn.DataParallel(net)\n\n"
        "def load(net, path):\n    net.load_state_dict(torch.load(path))\n    torch.save({'net': net}, path)\n\n"
        "class Average:\n    def __init__(self, net):\n        self.net = copy.deepcopy(net)\n\n"
        "    def update(self, net):\n        self.net.load_state_dict(net.state_dict())\n",
        encoding="utf-8",
    )
    above = (
        "import unseen\nnet = torch.nn.DataParallel(other)\nfrom evaluation import Average, load\n"
        "average = Average(model)"
    )
    within = (
        "for rotate in [left, right]:\n        y = rotate(x)\n"
        "    x = torch.nn.functional.pad(x, 1)\n    x.to(y)\n    net.module.save(y)"
    )
    below = (
        "count(model)\nload(model, p)\naverage.update(model)\nunseen.wrap(model)\nvalidate({'g': model}, x)"
    )
    path = tmp_path / "train.py"
    path.write_text(_script(above=above, within=within, below=below), encoding="utf-8")
    migration = migrate_file(path).migration
    assert migration is not None
    (found,) = [
        each for each in migration.findings if each.message.startswith("O1 cast all over the process")
    ]
    assert found.message.endswith("as by: validate() (line 23)")


def test_methods_of_a_model_that_nothing_shows_are_named() -> None:
    """A guess by their names is said; those of torch are known."""
    script = _script(
        below="model.update_queue(x)\nmodel.sample()\nmodel.load_state_dict(x)\nmodel.train(True)"
    )
    found = [each.message for each in migrate_text(script).findings if "nothing here shows" in each.message]
    assert [each.split()[0] for each in found] == ["model.update_queue()", "model.sample()"]


def test_methods_of_a_model_in_the_project_are_named_where_they_are_seen_to_compute() -> None:
    above = (
        "class Net(torch.nn.Module):\n    def __init__(self):\n        self.encoder = torch.nn.Linear(4, 4)\n\n"
        "    def update_rate(self, x):\n        self.log_rate(x)\n        self.show(x)\n        self.rate = x\n\n"
        "    def log_rate(self, x):\n        print(x)\n\n    def update_queue(self, x):\n        self.put(x)\n\n"
        "    def put(self, x):\n        self.queue = self.encoder(x)\n\n"
        "    def get_scores(self, x):\n        return torch.mm(x, self.weight)\n"
    )
    script = _script(above=above, below="model.update_rate(x)\nmodel.update_queue(x)\nmodel.get_scores(x)")
    found = [each.message for each in migrate_text(script).findings if "is in fp32 now" in each.message]
    assert [each.split()[3] for each in found] == ["model.update_queue()", "model.get_scores()"]


def test_the_methods_of_modules_are_those_of_torch() -> None:
    own = {
        name
        for name in dir(torch.nn.Module)
        if not name.startswith("_") and callable(getattr(torch.nn.Module, name))
    }
    assert own - {"forward"} <= OF_MODULE
    assert all(hasattr(torch, name.removeprefix("torch.").split(".")[0]) for name in NO_GRAD)


def test_averages_of_a_model_compute_outside_of_autocast_and_are_named() -> None:
    """Both of torch: the averaged network itself, and the pass over all batches for its batch norms."""
    above = "from torch.optim.swa_utils import AveragedModel, update_bn"
    below = "average = AveragedModel(model)\nupdate_bn(data, average)\nprint(average(x))"
    notes = [each.message for each in migrate_text(_script(above=above, below=below)).findings]
    assert [each.partition("as by: ")[2] for each in notes] == ["update_bn() (line 12), average() (line 13)"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("print(runner.evaluate(model, data))", "runner.evaluate()"),
        ("Evaluator(model).run(data)", "Evaluator()"),
        ("print(partial(check, model)(data))", "partial()"),
        ("print(check({'net': model}, data))", "check()"),
        ("print(list(map(model, data)))", "map()"),
        ("print(check(model, data))", "check()"),
        ("wandb.watch(model)", ""),
        ("print(len(model), copy.deepcopy(model))", ""),
        ("model = Wrapped(model)", ""),
        ("torch.save(model, path)", ""),
        ("print(count_parameters(model))", ""),
    ],
)
def test_what_gets_a_model_and_is_not_read_is_named(line: str, named: str) -> None:
    """A function of a package, or one that gets the model inside of something else, may run it outside of autocast."""
    above = (
        "import copy, wandb\nfrom functools import partial\n"
        "from elsewhere import check, runner, Evaluator, Wrapped, count_parameters"
    )
    notes = [each.message for each in migrate_text(_script(above=above, below=line)).findings]
    found = [each.partition("as by: ")[2] for each in notes if "as by: " in each]
    assert found == ([f"{named} (line 13)"] if named else [])
