"""Errors of old scripts are recognized, and `torch.nn.SyncBatchNorm` runs under `--device cpu`."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ampcompare.script.legacy.old_script import may_compat_torch_prevent


def _full_of_integers() -> object:
    return torch.nn.functional.binary_cross_entropy(torch.full((2,), 0.5), torch.full((2,), 1))


@pytest.mark.parametrize(
    "old",
    [
        _full_of_integers,
        lambda: np.float,  # type: ignore[attr-defined]
        lambda: np.Inf,  # type: ignore[attr-defined]
        lambda: iter(torch.utils.data.DataLoader([1])).next(),  # type: ignore[attr-defined]
        lambda: 1 - torch.ones(1, dtype=torch.bool),
        lambda: torch.ones(2, 3).t().view(-1),
        lambda: __import__("torch._six"),
        lambda: exec("from collections import Mapping"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_libraries_say_now(old: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:
        old()
    assert may_compat_torch_prevent(f"{type(caught.value).__name__}: {caught.value}"), caught.value


def test_other_errors_are_left_alone() -> None:
    assert not may_compat_torch_prevent("RuntimeError: size mismatch")
    assert not may_compat_torch_prevent(None)


def test_the_option_is_named(write, legacy) -> None:  # type: ignore[no-untyped-def]
    """In the last line, unless it was given."""
    write("train.py", "import torch, time; time.clock()")
    assert legacy("train.py").stderr.splitlines()[-1].endswith("try --compat-torch")


TRAIN = """
    import os, torch
    from torch import nn
    torch.distributed.init_process_group("nccl")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))

    x = torch.randn(8, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net()).cuda()
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    plain = net()
    part = x[rank * (8 // world):(rank + 1) * (8 // world)]
    for one, batch in ((model, part.cuda()), (plain, x)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(batch).square().mean().backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        close = dict(rtol=0, atol=0) if world == 1 else {}
        torch.testing.assert_close(model.module.state_dict()[name], value, **close)
    model.eval()(part.cuda())
    if rank == 0:
        print("trained", type(model.module[1]).__name__)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sync_batch_norm_trains_on_a_cpu(ranks: int, write, forked) -> None:
    """It has the statistics of all ranks, as plain batch norm of the whole batch; one rank has its very bits."""
    write("train.py", TRAIN)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = forked(*launch, "-m", "ampcompare", "exec", "--device", "cpu", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "trained SyncBatchNorm"
