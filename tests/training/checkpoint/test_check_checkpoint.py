"""Checkpoints of other models are refused before anything is loaded."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.base.errors import CheckpointError
from ampcompare.training.checkpoint.check_checkpoint import check_training_state

Change = Callable[[dict[str, Any]], Any]


def _drop_a_parameter(state: dict[str, Any]) -> None:
    state["optimizer"]["param_groups"][0]["params"].pop()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: state.update(model=[state["model"]] * 2),
            "2 models and 1 optimizers, but the run has 1 and 1",
        ),
        (
            lambda state: state["model"].update(weight=torch.zeros(5, 3)),
            r"weight is \[5, 3\] there and \[2, 3\] here",
        ),
        (
            lambda state: state["model"].update(weight=torch.zeros(2, 3).half()),
            "weight is torch.float16 there",
        ),
        (
            lambda state: state["model"].update(
                {f"layer{at}": state["model"].pop("bias", None) for at in range(12)}
            ),
            r"another model: 13 of its tensors do not fit: bias is missing; layer0 is unexpected.* and 3 more; use one",
        ),
        (_drop_a_parameter, r"groups of \[1\] parameters there and of \[2\] here"),
        (
            lambda state: state["optimizer"]["state"][0].update(momentum_buffer=torch.zeros(3)),
            r"optimizer.state.0.momentum_buffer is \[3\] there and \[2, 3\] here",
        ),
    ],
)
def test_what_is_of_another_model_is_named(change: Change, words: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
    state |= {"arm": "fp32", "masters": {}}
    arguments = ([model], [optimizer])
    check_training_state(state, *arguments)
    change(state)
    with pytest.raises(CheckpointError, match=words):
        check_training_state(state, *arguments)
