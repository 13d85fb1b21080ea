"""What every data set promises about its batches, for each way in which one is made."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ampcompare.base.errors import ConfigError
from ampcompare.tasks import Data, load_data

KINDS = ["digits", "mnist", "imagefolder", "user"]
STREAMED = ["imagefolder", "user"]

# On one core torch warns of two workers; from Python 3.12 on, forking beside other threads warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

NOISY = """
import random
import time
import numpy as np
import torch

class Noisy(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([[float(index), *draws]]), index % 4

def make():
    return Noisy(37), Noisy(11), 4
"""

Maker = Callable[..., Data]


@pytest.fixture
def make(
    request: pytest.FixtureRequest,
    image_root: Path,
    mnist_root: Path,
    user_module: Callable[[str, str], None],
) -> Maker:
    """Return a function that loads the data set of the test's kind, with other options if given."""
    kind = request.param
    user_module("noisy_samples", NOISY)
    names = {"imagefolder": f"imagefolder:{image_root}", "user": "noisy_samples:make"}
    options = {
        "digits": {"train_size": 103, "val_size": 50},
        "mnist": {"data_dir": str(mnist_root)},
        "imagefolder": {"image_size": 16},
        "user": {},
    }[kind]
    return lambda **more: load_data(names.get(kind, kind), **{"seed": 0, **options, **more})


def collect(batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(samples.clone(), labels.clone()) for samples, labels in batches]


def same(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(x, other_x) and torch.equal(y, other_y)
        for (x, y), (other_x, other_y) in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("make", KINDS, indirect=True)
def test_stream_does_not_follow_the_global_generators(make: Maker) -> None:
    """Two objects of one seed give bitwise the same batches although the global generators differ."""
    first = collect(make().train_batches(3, 8, device="cpu"))
    torch.manual_seed(999)
    np.random.seed(999)
    random.seed(999)
    data = make()
    second = []
    for batch in data.train_batches(3, 8, device="cpu"):
        torch.rand(7)
        np.random.rand(7)
        random.random()
        second.append(batch)
    assert same(first, second)


@pytest.mark.parametrize("make", KINDS, indirect=True)
@pytest.mark.usefixtures("unchanged_globals")
def test_global_generators_stay_as_they_were(make: Maker) -> None:
    """Loading, training and validation batches leave the state of torch, numpy and random alone."""
    data = make()
    assert collect(data.train_batches(0, 8, device="cpu"))
    assert collect(data.val_batches(8, device="cpu"))


@pytest.mark.parametrize("make", STREAMED, indirect=True)
@pytest.mark.usefixtures("unchanged_globals")
@pytest.mark.integration
def test_workers_change_no_bit(make: Maker) -> None:
    """Two worker processes, kept over epochs, give the batches that no worker process gives."""
    data = make()
    for epoch in (0, 1, 0):
        alone = collect(data.train_batches(epoch, 4, device="cpu"))
        assert same(alone, collect(data.train_batches(epoch, 4, device="cpu", workers=2)))
    assert same(
        collect(data.val_batches(4, device="cpu")), collect(data.val_batches(4, device="cpu", workers=2))
    )


@pytest.mark.parametrize("make", KINDS, indirect=True)
def test_epoch_and_seed_change_the_stream(make: Maker) -> None:
    """Another epoch, and another seed, give other batches; the first epoch comes back as it was."""
    data = make()
    first = collect(data.train_batches(0, 8, device="cpu"))
    assert not same(first, collect(data.train_batches(1, 8, device="cpu")))
    assert not same(first, collect(make(seed=1).train_batches(0, 8, device="cpu")))
    assert same(first, collect(data.train_batches(0, 8, device="cpu")))


@pytest.mark.parametrize("make", KINDS, indirect=True)
def test_batches_have_the_announced_form(make: Maker) -> None:
    """Number, size, shape, dtype and labels of the batches are those that the data set announces."""
    data = make()
    batches = collect(data.train_batches(0, 8, device="cpu"))
    assert len(batches) == data.num_batches(8) == data.num_train // 8
    for samples, labels in [*batches, *data.val_batches(8, device="cpu")]:
        assert samples.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert samples.shape == (len(labels), *data.sample_shape)
        assert 0 <= int(labels.min()) <= int(labels.max()) < data.num_classes
    assert all(len(labels) == 8 for _, labels in batches)
    whole = collect(data.train_batches(0, 8, device="cpu", drop_last=False))
    assert sum(len(labels) for _, labels in whole) == data.num_train
    assert len(whole) == data.num_batches(8, drop_last=False)
    assert same(whole[: len(batches)], batches)


@pytest.mark.parametrize("make", KINDS, indirect=True)
@pytest.mark.parametrize("world_size", [3])
def test_validation_counts_each_sample_once(make: Maker, world_size: int) -> None:
    """The ranks' validation batches are together exactly the validation set, without padding."""
    data = make()
    parts = [
        collect(data.val_batches(4, device="cpu", rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    counts = [sum(len(labels) for _, labels in part) for part in parts]
    assert sum(counts) == data.num_val
    assert max(counts) - min(counts) <= 1
    whole = torch.cat([samples for samples, _ in data.val_batches(data.num_val, device="cpu")])
    for rank, part in enumerate(parts):
        assert torch.equal(torch.cat([samples for samples, _ in part]), whole[rank::world_size])


@pytest.mark.parametrize("make", KINDS, indirect=True)
def test_ranks_split_the_global_batch(make: Maker) -> None:
    """Two ranks with batches of 3 see in each step what one process with batches of 6 sees, and all equally often."""
    data = make()
    whole = collect(data.train_batches(2, 6, device="cpu"))
    ranks = [collect(data.train_batches(2, 3, device="cpu", rank=rank, world_size=2)) for rank in range(2)]
    assert len(whole) == len(ranks[0]) == len(ranks[1]) == data.num_batches(3, 2)
    for (samples, labels), *shares in zip(whole, *ranks, strict=True):
        for rank, (share, share_labels) in enumerate(shares):
            assert torch.equal(share, samples[rank::2])
            assert torch.equal(share_labels, labels[rank::2])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("num_train", [24, 25, 31])
def test_ranks_agree_on_the_number_of_batches(world_size: int, num_train: int) -> None:
    """Without dropping the last batch, no rank waits for gradients that another never computes."""
    data = load_data("digits", seed=0, train_size=num_train)
    counts = {
        len(
            collect(data.train_batches(0, 4, device="cpu", rank=rank, world_size=world_size, drop_last=False))
        )
        for rank in range(world_size)
    }
    assert counts == {data.num_batches(4, world_size, drop_last=False)}


@pytest.mark.parametrize("batch_size, world_size", [(0, 1), (104, 1), (64, 2)])
def test_a_batch_that_cannot_be_filled_is_refused(batch_size: int, world_size: int) -> None:
    """An empty batch and one larger than the data set are errors, not epochs without steps."""
    data = load_data("digits", seed=0, train_size=103)
    with pytest.raises(ConfigError, match=r"batch size is 0|fewer than one batch"):
        data.train_batches(0, batch_size, device="cpu", world_size=world_size)


@pytest.mark.parametrize("make", ["user"], indirect=True)
@pytest.mark.integration
def test_an_epoch_overtaken_by_another_says_so(make: Maker) -> None:
    """Reading on in an epoch after a later one was begun raises instead of handing out the later one's batches."""
    data = make()
    first = iter(data.train_batches(0, 4, device="cpu", workers=2))
    next(first)
    second = iter(data.train_batches(1, 4, device="cpu", workers=2))
    begun = [next(second)]
    with pytest.raises(RuntimeError, match="read one epoch at a time"):
        next(first)
    assert begun[0][0].shape == (4, 1, 4)


@pytest.mark.parametrize("make", ["user"], indirect=True)
@pytest.mark.integration
def test_an_abandoned_epoch_leaves_the_next_one_whole(make: Maker) -> None:
    """Workers that were stopped in the middle of an epoch begin the next one at its first batch."""
    data = make()
    next(iter(data.train_batches(0, 4, device="cpu", workers=2)))
    after = collect(data.train_batches(1, 4, device="cpu", workers=2))
    assert same(after, collect(data.train_batches(1, 4, device="cpu")))


def test_writing_into_a_batch_does_not_reach_the_data() -> None:
    """A model that changes its input in place does not change what the next arm sees."""
    data = load_data("digits", seed=0)
    before = collect(data.train_batches(0, 64, device="cpu"))
    for samples, _ in data.train_batches(0, 64, device="cpu"):
        samples.zero_()
    assert same(before, collect(data.train_batches(0, 64, device="cpu")))
