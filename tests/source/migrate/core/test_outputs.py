"""What follows autocast gets it too, where O1 cast, and nothing else does."""

import itertools
from pathlib import Path

import pytest

from ampcompare.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampcompare.source.migrate.core.outputs import CASTS, PLAIN
from ampcompare.source.migrate.project import migrate_file
from ampcompare.source.migrate.read.finding import BY_HAND, Finding
from ampcompare.source.migrate.rewrite import migrate_text

TRAINING = """import numpy as np
import torch
import torch.nn.functional as F
from apex import amp
from metrics import dice
from unknown import measure

DEFINITIONS
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x, y in data:
    out = model(x)
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    BELOW
"""
HEADER = 'with torch.autocast("cuda", dtype=torch.float16):'
DEFINITIONS = """
class Meter:
    def __init__(self):
        self.total = 0

    def update(self, value):
        self.total += value

    def power(self):
        return self.total ** 2

    def rate(self, value):
        self.total += value.exp()


def accuracy(output, target):
    return output.topk(1)[1].t().eq(target.view(1, -1)).float().sum(0)


def entropy(output):
    return (output * weights(output)).sum()


def weights(output):
    return output


squares = lambda value: value ** 2


def infer(x):
    with torch.no_grad():
        return model(x), x.shape


meter = Meter()
criterion = torch.nn.CrossEntropyLoss()"""


def _notes(below: str) -> list[Finding]:
    """Return the notes on what nobody knows in the lines below a step."""
    text = TRAINING.replace("DEFINITIONS", "import logging").replace("BELOW", below)
    return [each for each in migrate_text(text).findings if "with torch" in each.message]


def _statements(below: str) -> str:
    """Return what becomes of the lines below a step."""
    text = TRAINING.replace("DEFINITIONS", DEFINITIONS).replace("BELOW", below.replace("\n", "\n    "))
    return migrate_text(text).text.partition("scaler.update()\n")[2].replace("\n    ", "\n").strip()


@pytest.mark.parametrize(
    "statement",
    [
        "mask = (out > 0).type(out.dtype).sum()",
        "probabilities = F.softmax(out, dim=1)",
        "scale = out.detach()[:, 0] ** 2",
        "similarity = out.data @ out.t()",
        "losses.append(criterion(out, y))",
        "value = entropy(out)",
        "score = squares(out)",
        "score = model.score(out)",
        "meter.rate(out.mean())",
        "print(torch.exp(loss))",
        "meter.update(out)\nlast = meter.power()",
        "kept = infer(x)[0].norm()",
    ],
)
def test_what_o1_casts_is_put_under_autocast(statement: str) -> None:
    """By lists, by layers, and by functions of the file that lead to lists."""
    above, _, last = statement.rpartition("\n")
    assert _statements(statement) == f"{above}\n{HEADER}\n    {last}".strip()


@pytest.mark.parametrize(
    "statement",
    [
        "total += loss.item()",
        "prediction = out.argmax(dim=1)",
        "value = accuracy(out, y)",
        "meter.update(loss.item())",
        "meter.update(out.mean())",
        "average = np.mean([loss.item()])",
        "half = torch.sigmoid(out) / 2",
        "record(loss, step)",
        "record(loss.detach().mean(), step)",
        "print(y.float().norm(), x.sum())",
        "kept = [each.detach() for each in out]",
        "score = dice(x, y)",
        "out = out.float()\nsimilarity = out @ out.t()",
        "kept['out'] = out\nvalue = kept['rate'] ** 2",
        "kept = out\nvalue = [kept ** 2 for kept in sizes]",
        "value = np.interp(kept, [0, 1], losses) ** 2",
        "print(f'{loss}', '%g' % loss)",
    ],
)
def test_what_o1_leaves_alone_stays(statement: str) -> None:
    """Numbers, integers, the script's own data, and what computes in the type that it gets."""
    assert _statements(statement) == statement


def test_what_is_held_is_followed_through_names_containers_attributes_and_returns() -> None:
    below = "kept.append(out)\nfor each in kept:\n    other, _ = each, 0\nlast = other.sum()"
    assert _statements(below).splitlines()[-2:] == [HEADER, "    last = other.sum()"]


def test_a_condition_that_computes_is_left() -> None:
    text = TRAINING.replace("DEFINITIONS", "").replace("BELOW", "if out.norm() > 1:\n        break")
    (found,) = [each for each in migrate_text(text).findings if each.kind == BY_HAND]
    assert "has no statement of its own" in found.message


@pytest.mark.parametrize("statement", ["value = measure(out, y)", "unknown.add(dice(torch.sigmoid(out)), y)"])
def test_what_nobody_knows_is_noted(statement: str) -> None:
    """It may compute by torch, or by something else."""
    assert _statements(statement) == statement
    (found,) = _notes(statement)
    assert "is not in sight" in found.message
    assert "(line " in found.message


@pytest.mark.parametrize(
    "statement", ["record(loss)", "logging.info(out)", "report({'loss': out})", "measure(out.cpu())"]
)
def test_what_computes_surely_not_by_torch_is_not_noted(statement: str) -> None:
    """Losses are one number; the standard library and what is on the CPU do without torch."""
    assert not _notes(statement)


def test_what_runs_before_the_scaler_is_made_stays() -> None:
    """Options that hold a loss from their last lines on are read as before, also above `amp.initialize`."""
    text = """import torch
from apex import amp

def power(options):
    return options["rate"] ** 2 if "rate" in options else options["loss"] ** 2

def train(options, model, optimizer, data, fp16):
    for each in range(2):
        optimizer.param_groups[each]["lr"] = options["rate"] ** 2 * power(options)
    if fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for x in data:
        rate = options["rate"] ** 2
        loss = model(x).mean()
        options["loss"] = loss
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        SEEN = power(options)
"""
    lines = migrate_text(text).text.splitlines()
    assert [
        line.strip() for above, line in itertools.pairwise(lines) if above.strip().startswith("with ")
    ] == [
        "loss = model(x).mean()",
        "SEEN = power(options)",
    ]


def test_what_another_file_gets_is_noted(tmp_path: Path) -> None:
    text = TRAINING.replace("DEFINITIONS", DEFINITIONS).replace("    BELOW\n", "")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    (tmp_path / "score.py").write_text(
        "from train import infer\nprint(infer(x).softmax(1))\n", encoding="utf-8"
    )
    migration = migrate_file(tmp_path / "train.py").migration
    assert migration is not None
    (found,) = [each for each in migration.findings if "computes on it outside of autocast" in each.message]
    assert "score.py gets it" in found.message


def test_the_lists_are_those_of_the_engine() -> None:
    names: set[str] = set()
    for module in (functional_overrides, torch_overrides, tensor_overrides):
        names |= {name for name in [*module.FP16_FUNCS, *module.FP32_FUNCS] if not name.startswith("__")}
    assert names - CASTS == {"cpu"}
    assert CASTS - names == {"addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot"}
    assert PLAIN.isdisjoint(CASTS)


@pytest.mark.parametrize("name", ["probe", "display", "size", "float", "append"])
def test_a_function_of_the_project_computes_what_its_lines_say_whatever_its_name_is(name: str) -> None:
    definition = f"def {name}(output):\n    return output.softmax(1)\n"
    text = TRAINING.replace("DEFINITIONS", definition).replace("BELOW", f"top = {name}(out)")
    assert f"    {HEADER}\n        top = {name}(out)\n" in migrate_text(text).text
