"""Models that cast by themselves: those of O2 and O3 return fp32, so that what follows them is computed as in Apex."""

import functools
from collections import ChainMap, UserDict, deque, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch

from ampcompare.source.migrate.read.finding import BY_HAND
from ampcompare.source.migrate.rewrite import migrate_text

CONTRASTIVE = """import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
for x in data:
    out = model(x)
    z = out["z"]
    similarity = torch.matmul(z, z.t())
    loss = external_loss(similarity, out["rest"])
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
EVALUATION
"""
EVALUATION = """model.eval()
with torch.no_grad():
    scores = model(x)["z"].softmax(dim=1)"""
Pair = namedtuple("Pair", "first second")


class Net(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        """Return what no list of casts says the type of, with the type of the product."""
        z = super().forward(x)
        return {"z": z, "rest": (Pair(z, x.long()), [z.dtype, None])}


@pytest.mark.parametrize(
    "copies", ["", "\nother = copy.deepcopy(model)\nscores = other(x)['z'].softmax(dim=1)"]
)
def test_what_follows_a_model_of_O2_is_computed_in_fp32(copies: str) -> None:
    """Products of its outputs and functions of other packages as well, in training, evaluation and copies."""
    text = migrate_text(CONTRASTIVE.replace("EVALUATION", EVALUATION + copies)).text.replace(
        '"cuda"', '"cpu"'
    )
    model = Net(4, 4)
    seen: list[Any] = []

    def external_loss(similarity: torch.Tensor, rest: Any) -> torch.Tensor:
        seen.append((similarity.dtype, *(rest[0].first.dtype, rest[0].second.dtype), type(rest[0]), rest[1]))
        return similarity.mean()

    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": [torch.randn(2, 4)],
        "external_loss": external_loss,
    }
    exec("import copy\n" + text, names)
    assert seen == [(torch.float32, torch.float32, torch.int64, Pair, [torch.float16, None])]
    assert names["scores"].dtype == torch.float32
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32


class Batch:
    """An iterable that is made of another one, as Apex makes it."""

    def __init__(self, values: Any) -> None:
        self.values = list(values)

    def __iter__(self) -> Any:
        """Return its values."""
        return iter(self.values)


CONTAINERS = {
    "UserDict": lambda z: UserDict(z=z),
    "a proxy": lambda z: MappingProxyType({"z": z}),
    "ChainMap": lambda z: ChainMap({"z": z}),
    "deque": lambda z: deque([z]),
    "set": lambda z: {z},
    "frozenset": lambda z: frozenset([z]),
    "an iterable": lambda z: Batch([z]),
    "nested": lambda z: [deque([(z,)])],
}


def _types(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value.dtype]
    values = value.values() if isinstance(value, Mapping) else value
    return [each for one in values for each in _types(one)]


def _returned(value: Any) -> Any:
    """Return what a migrated model of O2 returns where its forward pass returns a value."""
    text = migrate_text(CONTRASTIVE.replace("EVALUATION", "")).text
    names: dict[str, Any] = {"torch": torch, "functools": functools}
    exec(text[text.index("def returns_fp32") :].partition("\n\n\n")[0], names)
    return names["returns_fp32"](lambda: value)()


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_outputs_of_O2_are_fp32_in_any_container(make: Any) -> None:
    """A mapping becomes a dict, and what can be iterated one of its kind, as in Apex."""
    made = make(torch.ones(2, dtype=torch.float16))
    result = _returned(made)
    assert _types(result) == [torch.float32]
    assert type(result) is (dict if isinstance(made, Mapping) else type(made))


def test_outputs_of_O2_that_an_iterator_gives_are_fp32() -> None:
    assert _types(_returned(iter([torch.ones(2, dtype=torch.float16)]))) == [torch.float32]


@pytest.mark.parametrize("value", ["text", b"bytes", 3, None, numpy.ones(2), range(3)], ids=str)
def test_other_outputs_of_O2_stay(value: Any) -> None:
    assert _returned(value) is value


def test_a_model_of_another_level_keeps_the_type_of_its_outputs() -> None:
    """O1 returns what its last function computed in; where only a run knows the level, autocast covers the loss."""
    for level in ('"O1"', '"O0"', "level"):
        assert "returns_fp32" not in migrate_text(CONTRASTIVE.replace('"O2"', level)).text


@pytest.mark.parametrize("copies", ["", "\nother = copy.deepcopy(model)"])
def test_a_model_of_O2_that_is_off_returns_what_it_returns(copies: str) -> None:
    """As Apex left it alone."""
    script = CONTRASTIVE.replace('"O2"', '"O2", enabled=False').replace("EVALUATION", copies)
    model = Net(4, 4)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": [],
    }
    exec("import copy\n" + migrate_text(script).text.replace('"cuda"', '"cpu"'), names)
    assert type(model) is Net
    assert model.forward.__func__ is Net.forward  # type: ignore[attr-defined]


def test_several_models_under_one_name_are_left() -> None:
    text = "import torch\nfrom apex import amp\nmodels = [first, second]\n"
    text += CONTRASTIVE.replace("import torch\nfrom apex import amp\n", "").replace("model,", "models,")
    found = migrate_text(text.replace("(model, opt", "(models, opt")).findings
    assert [
        each.kind for each in found if "no plain name" in each.message or "not a plain name" in each.message
    ] == [BY_HAND]


def test_a_cross_entropy_of_probabilities_inside_a_model_of_O2_is_noted() -> None:
    """Outside of it, the loss is computed without autocast, so nothing refuses it."""
    loss = "class Net(torch.nn.Module):\n    def forward(self, x):\n        return torch.nn.BCELoss()(x, x)\n"
    found = migrate_text(CONTRASTIVE.replace("for x in data", f"{loss}for x in data")).findings
    assert [each.line for each in found if "AMP230" in each.message] == [7]
    outside = CONTRASTIVE.replace("external_loss(similarity, ", "torch.nn.BCELoss()(similarity, ")
    assert not any("AMP230" in each.message for each in migrate_text(outside).findings)
