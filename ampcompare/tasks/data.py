"""The interface of data to training: sizes, and batches that depend on (seed, epoch, index) only.

Arms draw from the global generators in different ways (dropout, stochastic depth), and data must not depend on that. So
orders and augmentations come from generators keyed by (purpose, seed, epoch, index). Code that uses the global
generators (transforms, users' data sets) runs between a save and a restore of them.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ampcompare.base.errors import ConfigError
from ampcompare.base.tensors.tree import map_tensors_in_tree
from ampcompare.settings.recipe import Recipe

Part = Literal["train", "val"]


@dataclass(frozen=True)
class SampleOptions:
    """What is wanted of a data set; None takes the set's own."""

    seed: int
    image_size: int | None = None
    channels: int | None = None
    train_size: int | None = None
    val_size: int | None = None
    augment: bool = True

    @classmethod
    def from_recipe(cls, recipe: Recipe, channels: int | None) -> SampleOptions:
        """Return what a recipe asks for, with the channels of its model."""
        data = recipe.data
        return cls(recipe.seed, data.image_size, channels, data.train_size, data.val_size, data.augment)

    @property
    def sizes_by_part(self) -> dict[str, int | None]:
        return {"train": self.train_size, "val": self.val_size}


@dataclass(frozen=True, eq=False)
class Data(abc.ABC):
    """A data set with a training and a validation part.

    A batch is what the task takes: tensors on the device that was asked for, alone or in tuples and dicts, each with
    the batch as its first dimension. Two objects created with the same arguments give bitwise equal batches, whatever
    was drawn from global generators in between; the state of those generators does not change.
    """

    name: str
    num_train: int
    num_val: int
    seed: int  # of the order of each epoch
    on_device: ClassVar[bool] = False  # samples are gathered there, by indices that are there too

    def train_batches(
        self,
        epoch: int,
        batch_size: int,
        *,
        device: str | torch.device,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = True,
        start: int = 0,
        pin_memory: bool | None = None,
    ) -> Iterator[Any]:
        """Yield the `num_batches` batches of `batch_size` samples that `rank` trains on in this epoch, from `start` on.

        The union of all ranks' i-th batches is what a single process with `world_size * batch_size` samples a batch
        would see i-th. Without `drop_last` the last batch may be smaller, and unequal between ranks by one sample.
        On a GPU batches come through pinned memory, unless `pin_memory` is False; elsewhere it changes nothing.

        Raises:
            ConfigError: no batch can be made.
        """
        count = self.num_batches(batch_size, world_size, drop_last=drop_last)
        order = order_of_epoch(self.seed, epoch, self.num_train)
        batches = self._cut_batches(order, batch_size, count, torch.device(device), rank, world_size)
        return self._read_batches("train", epoch, batches[start:], torch.device(device), workers, pin_memory)

    def val_batches(
        self,
        batch_size: int,
        *,
        device: str | torch.device,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool | None = None,
    ) -> Iterator[Any]:
        """Yield every `world_size`-th validation sample from `rank` on, in the order of their indices.

        All ranks together see each sample exactly once. Per-image results are kept by these indices: a data set that
        repeats samples to fill batches gets none, and one with another order in each run has none that can be compared.
        """
        order = torch.arange(self.num_val)
        batches = self._cut_batches(order, batch_size, self.num_val, torch.device(device), rank, world_size)
        return self._read_batches("val", 0, batches, torch.device(device), workers, pin_memory)

    @abc.abstractmethod
    def _read_batches(
        self,
        part: Part,
        epoch: int,
        batches: Sequence[Tensor],
        device: torch.device,
        workers: int,
        pin_memory: bool | None,
    ) -> Iterator[Any]:
        """Yield the samples of each batch of positions, on `device`."""

    def _cut_batches(
        self, order: Tensor, batch_size: int, count: int, device: torch.device, rank: int, world_size: int
    ) -> list[Tensor]:
        """Cut the positions of `order` that belong to `rank` into at most `count` batches."""
        return list(order.to(device if self.on_device else "cpu")[rank::world_size].split(batch_size)[:count])

    def num_batches(self, batch_size: int, world_size: int = 1, *, drop_last: bool = True) -> int:
        """Return how many training batches an epoch has, equal for all ranks."""
        if batch_size < 1:
            raise ConfigError(f"the batch size is {batch_size}; it must be at least 1")
        full, rest = divmod(self.num_train, batch_size * world_size)
        # A last batch without samples for some rank would leave the others waiting for its gradients.
        count = full if drop_last or rest < world_size else full + 1
        if count == 0:
            raise ConfigError(
                f"{self.name} has {self.num_train} training samples, fewer than one batch of {batch_size}"
                f"{f' on each of {world_size} ranks' if world_size > 1 else ''}; use a smaller --batch-size"
            )
        return count


@dataclass(frozen=True, eq=False)
class LabeledData(Data):
    """Samples with one class each.

    A batch is a pair: float32 samples of shape `(batch, *sample_shape)` and int64 labels of shape `(batch,)`.
    """

    num_classes: int
    sample_shape: tuple[int, ...]


def order_of_epoch(seed: int, epoch: int, num_samples: int) -> Tensor:
    """Return the order of an epoch: a permutation of `range(num_samples)`, int64."""
    return torch.randperm(num_samples, generator=seeded_generator("order", seed, epoch))


def choose_indices_evenly(
    num_samples: int, size: int | None, *, what: str, labels: Tensor | None = None
) -> Tensor:
    """Choose `size` of `num_samples` samples evenly, over the classes too if `labels` are given; all if `size` is None.

    The choice depends on nothing random: a subset is the same for every seed. Positions ascend, int64.
    """
    if size is None or size == num_samples:
        return torch.arange(num_samples)
    if not 1 <= size <= num_samples:
        raise ConfigError(
            f"{size} samples were requested, but {what} has {num_samples}; choose between 1 and {num_samples}"
        )
    picked = torch.arange(size) * num_samples // size
    if labels is not None:
        picked = torch.argsort(labels, stable=True)[picked]
    return picked.sort().values


def split_batch(batch: Any, count: int) -> Sequence[Any]:
    """Split a batch into micro-batches.

    Args:
        batch: nested mappings and sequences of tensors whose first dimension is that of samples, (batch, ...).
        count: how many; it divides the number of samples.

    Returns:
        `count` batches with the structure of `batch`, (batch / count, ...) each. What is no tensor is in each of them.
    """
    leaves, structure = tree_flatten(batch)
    size = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor)) // count
    parts = [leaf.split(size) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([part[place] for part in parts], structure) for place in range(count)]


def to_channels_last(batch: Any) -> Any:
    """Return a batch with its tensors of rank four (N, C, H, W) in channels-last format."""
    return map_tensors_in_tree(
        batch,
        lambda tensor: tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor,
    )


def derive_seed(purpose: str, *key: int) -> int:
    """Hash `purpose` and `key` to a seed of 63 bits, the same on every machine and Python."""
    text = ":".join([purpose, *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seeded_generator(purpose: str, *key: int) -> torch.Generator:
    """Return a generator on the CPU seeded by `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(purpose, *key))


def seed_global_generators(seed: int) -> None:
    """Seed the global generators of torch (CPU), numpy and `random`; for data, inside `global_generators_restored`."""
    # torch.manual_seed would seed the devices as well, or defer that until CUDA is initialized.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def global_generators_restored() -> Iterator[None]:
    """Restore the global generators of torch (CPU), numpy and `random` on exit, also after an error."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
