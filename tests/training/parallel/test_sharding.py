"""Which parts of a model are gathered together, and what sharding does to an optimizer."""

from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.base.errors import BackendUnavailable, PreparationError
from ampcompare.base.tensors.sharded import gather_whole, is_sharded
from ampcompare.base.tensors.skippable_step import make_step_skippable
from ampcompare.training.parallel.sharding import ShardTypes, is_sharded_model, shard_models, units_to_gather
from ampcompare.training.process.process_group import process_group_of_one

CPU = torch.device("cpu")


class Blocks(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks: Any = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
        )
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.blocks[0][0].weight = self.blocks[1][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)


def test_blocks_are_units() -> None:
    """The children of lists; without lists the children of the model; nothing that shares a weight."""
    model, plain, row = Blocks(), Plain(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert units_to_gather(model) == list(model.blocks)
    assert units_to_gather(plain) == [plain.one, plain.two]
    assert units_to_gather(row) == [row[0]]
    assert units_to_gather(Blocks(tied=True)) == []


def test_a_torch_that_shards_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused on a CPU, with the version that is needed."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.6.0+cu124"))
    with (
        process_group_of_one("gloo", CPU),
        pytest.raises(BackendUnavailable, match=r"from torch 2\.7 on, and this is 2\.6\.0"),
    ):
        shard_models([Plain()], [])


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="its FSDP2 needs a GPU")
def test_an_optimizer_steps_shards() -> None:
    """Its groups and its state are of the shards, in the order and with the values that they had."""
    torch.manual_seed(0)
    model: Any = Blocks()
    # has state from the start
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    before = [param.detach().clone() for param in model.parameters()]
    with process_group_of_one("gloo", CPU):
        shard_models([model], [optimizer], ShardTypes(torch.bfloat16, torch.float32, torch.float32))
        params = optimizer.param_groups[0]["params"]
        assert all(is_sharded(param) for param in params)
        assert [id(param) for param in params] == [id(param) for param in model.parameters()]
        assert all(
            torch.equal(gather_whole(param.detach()), value)
            for param, value in zip(params, before, strict=True)
        )
        assert all(is_sharded(optimizer.state[param]["sum"]) for param in params)
        assert is_sharded_model(model.blocks[0])
        assert is_sharded_model(model.blocks[0][1])  # batch norm, in fp32
        assert not is_sharded_model(model.blocks[0][0])
        seen: list[torch.dtype] = []
        model.blocks[0][0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model.blocks[0][1].register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
        assert model(torch.arange(4)).dtype is torch.float32
        assert seen == [torch.bfloat16, torch.float32]


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="its FSDP2 needs a GPU")
def test_what_cannot_be_sharded() -> None:
    """No process group, tensors that are not the model's, and steps that copy whole weights are refused."""
    model = nn.Linear(2, 2)
    with pytest.raises(PreparationError, match=r"call torch.distributed.init_process_group first"):
        shard_models([model], [])
    with process_group_of_one("gloo", CPU):
        masters = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(PreparationError, match="such as a master weight"):
            shard_models([model], [torch.optim.SGD(masters, lr=0.1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        make_step_skippable(optimizer)
        with pytest.raises(PreparationError, match="leave out skip_on_device"):
            shard_models([model], [optimizer])
    assert not is_sharded_model(model)
