"""What ranks compare, without processes, and what a configuration of replicas becomes."""

import contextlib
import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.apex.parallel import SyncBatchNorm
from ampcompare.base.errors import RanksDiffer, UnsupportedCombination
from ampcompare.settings.config import ParallelConfig
from ampcompare.training.assemble import make_parallel
from ampcompare.training.parallel.ranks import Communicator, digest_of_weights, require_equal_on_ranks
from ampcompare.training.parallel.replication import ApexDDP


class Told(Communicator):
    """Hears fixed values from other ranks."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)
        self.size = len(values)

    def gather(self, value: Any) -> list[Any]:
        return self.values


def test_differences_are_named() -> None:
    """The ranks that differ from rank 0 are named, with the first differing items and both values."""
    told = r"^ranks 1, 3 of 4 hold another thing than rank 0: 8 there and 7 on rank 0; do it$"
    with pytest.raises(RanksDiffer, match=told):
        require_equal_on_ranks(Told(7, 8, 7, 8), "thing", 7, "do it")
    told = r"rank 1 of 2 hold another environment than rank 0: torch is 2.0 there and 2.1 on rank 0;"
    with pytest.raises(RanksDiffer, match=told):
        require_equal_on_ranks(
            Told({"torch": "2.1", "a": 1}, {"torch": "2.0", "a": 1}), "environment", {}, "do it"
        )


@pytest.mark.parametrize(("limit", "transfers"), [(1, 5), (16, 3), (2**20, 1)])
def test_weights_are_hashed_by_few_transfers(
    limit: int, transfers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is that of all bytes in order, however many tensors come from the device together."""
    model = nn.BatchNorm1d(2)
    held = [*model.parameters(), *model.buffers()]
    whole = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in held)).hexdigest()[:16]
    seen: list[int] = []
    cpu = Tensor.cpu
    monkeypatch.setattr("ampcompare.training.parallel.ranks.TRANSFER_BYTES", limit)
    monkeypatch.setattr(Tensor, "cpu", lambda self: seen.append(self.numel()) or cpu(self))
    assert digest_of_weights([model]) == whole
    assert (len(seen), sum(seen)) == (transfers, 40)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def make(device: torch.device = CPU, engine: str | None = None, **settings: Any) -> Any:
    return make_parallel(ParallelConfig(**settings), device, engine)


@pytest.mark.parametrize(
    ("device", "engine", "settings", "message"),
    [
        (CPU, None, {"kind": "dp"}, "the device is cpu, where it has no effect"),
        (GPU, "nvidia", {"kind": "dp"}, "the real Apex replaces the forward of the one model"),
        (CPU, None, {"kind": "ddp", "sync_bn": "torch"}, "has no CPU kernels.*--sync-bn apex"),
        (CPU, "nvidia", {"kind": "apex-ddp"}, "of the real Apex needs a GPU"),
    ],
)
def test_what_cannot_work(
    device: torch.device, engine: str | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedCombination, match=message):
        make(device, engine, **settings)


def test_batch_norms_are_replaced() -> None:
    """SyncBN of Apex takes the place of batch norm and shares its parameters; without it a model is left alone."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    weight = model[1].weight
    assert make(kind="ddp").convert_batchnorm(model)[1].__class__ is nn.BatchNorm2d
    converted = make(kind="ddp", sync_bn="apex").convert_batchnorm(model)
    assert isinstance(converted[1], SyncBatchNorm)
    assert converted[1].weight is weight


def test_torch_batch_norms_on_a_gpu() -> None:
    """torch's SyncBatchNorm is what `sync_bn=torch` means where there are kernels for it."""
    converted = make(GPU, kind="apex-ddp", sync_bn="torch").convert_batchnorm(
        nn.Sequential(nn.BatchNorm2d(2))
    )
    assert isinstance(converted[0], nn.SyncBatchNorm)


class Wrapper(nn.Module):
    """Stands for Apex's class: notes what it is told."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options, self.reduces = module, options, True

    def disable_allreduce(self) -> None:
        self.reduces = False

    def enable_allreduce(self) -> None:
        self.reduces = True


def test_options_of_apex_ddp() -> None:
    """MiB become elements of fp32, and what was not given is left to Apex."""
    assert ApexDDP(Wrapper).wrap(nn.Linear(1, 1)).options == {"delay_allreduce": False}
    assert ApexDDP(Wrapper, bucket_cap_mb=4).wrap(nn.Linear(1, 1)).options["message_size"] == 2**20


def test_reducing_is_on_again_after_an_error() -> None:
    """Gradients stay local inside the block only, also where it ends with an error."""
    parallel = ApexDDP(Wrapper)
    model: Any = parallel.wrap(nn.Linear(1, 1))
    assert model.reduces
    inside = []
    with contextlib.suppress(ZeroDivisionError), parallel.no_sync([model]):
        inside.append(model.reduces)
        raise ZeroDivisionError
    assert inside == [False]
    assert model.reduces
