"""What a trace of steps looks at: copies of weights that the script holds, and nothing that runs code of a library."""

import collections
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.script.resume import resume_trace


class Shadow:
    """A moving average of a script's own class."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: each.detach().clone() for name, each in model.named_parameters()}


class LazyMapping(collections.OrderedDict):  # type: ignore[type-arg]
    """Like a mapping of a library: it imports what it holds when it is asked."""

    def values(self) -> Any:
        raise AssertionError("it was asked")


class LazyObject:
    """Like a module that is imported when it is used, of which its class is a use."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_only_objects_of_the_script_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    shadow = Shadow(model)
    found = resume_trace._objects_of_script_classes_but_models()
    assert any(each is shadow for each in found)
    assert not {type(each) for each in found} & {types.FunctionType, types.ModuleType, types.MethodType}
    owners = [each for each in found if each is shadow]
    assert resume_trace._digests_of_averages([model], set(), owners)["Shadow.values"]["values"]


def test_what_is_held_is_read_without_code_of_its_owner() -> None:
    tensor = torch.ones(2)
    assert resume_trace._parameters_or_items(LazyMapping(a=tensor))[0] is tensor
    assert resume_trace._parameters_or_items(LazyObject()) == []
    assert (
        resume_trace._parameters_or_items([tensor])[0]
        is resume_trace._parameters_or_items((tensor,))[0]
        is tensor
    )
    assert all(isinstance(each, Tensor) for each in resume_trace._parameters_or_items(nn.Linear(2, 1)))
    owner = types.SimpleNamespace(held=[LazyObject(), LazyObject()])
    assert not any(
        "held" in name for name in resume_trace._digests_of_averages([nn.Linear(2, 1)], set(), [owner])
    )
