"""How a value of a checkpoint differs from that of the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampcompare.training.state.check_checkpoint import unlike


def moment(**changes: Any) -> dict[str, Any]:
    """A moment in 8 bits, as a checkpoint holds it."""
    tensors = {"codes": torch.zeros(4, 2, dtype=torch.uint8), "scale": torch.ones(2)}
    made = {"tensor_class": "package.Moment", "tensors": tensors, "attributes": [True, torch.float32]}
    return {**made, "shape": torch.Size([4, 2]), "stride": (2, 1), **changes}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (moment(), ""),
        (moment(shape=(4, 2), attributes=[True, torch.bfloat16]), ""),
        (moment(attributes=[False, torch.float32]), "has attributes [False, torch.float32] there and [True"),
        (moment(attributes=[True, torch.int8]), "has attributes"),
        (moment(shape=(8,)), "has shape (8,) there"),
        (moment(stride=None), "has stride None there"),
        (moment(tensors=None), "is a NoneType there and a dict here"),
        (moment(tensors={}), "holds [] there and ['codes', 'scale'] here"),
        (moment(tensors={**moment()["tensors"], "scale": torch.ones(3)}), "has scale, which is [3] there and [2] here"),
        (moment(tensor_class="package.Other"), "is of class Other there and of class Moment here"),
        ({"tensor_shards": [moment(), moment()]}, "is in shards of 2 ranks there and of class Moment here"),
        (torch.zeros(4, 2), "is a whole tensor there and of class Moment here"),
        ([], "is a list there and of class Moment here"),
    ],
)
def test_a_tensor_of_a_class_of_its_own_is_compared_by_what_it_is_made_of(found: Any, said: str) -> None:
    """Class, shape, attributes and inner tensors are compared; only the dtype that it shows may be another."""
    fault = unlike(found, moment())
    assert fault.startswith(said)
    assert bool(fault) is bool(said)


def test_shards_fit_as_many_ranks_only() -> None:
    wanted = {"tensor_shards": [moment(), torch.zeros(1, 2)]}
    assert unlike({"tensor_shards": [moment(), torch.zeros(1, 2)]}, wanted) == ""
    short = {"tensor_shards": [moment(), torch.zeros(2)]}
    assert unlike(short, wanted) == "has a shard that is [2] there and [1, 2] here"
    assert unlike(moment(), wanted) == "is of class Moment there and in shards of 2 ranks here"
    assert unlike(torch.zeros(5, 2), wanted) == "is a whole tensor there and in shards of 2 ranks here"
