"""Data sets read sample by sample through a DataLoader, each sample under its own seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ampcompare.base.errors import AmpCompareError, ConfigError
from ampcompare.tasks.data import LabeledData, Part
from ampcompare.tasks.randomness import derive, isolated_globals, seed_globals

__all__ = ["KeyedSamples", "StreamData"]

Key: TypeAlias = tuple[int, int]


class KeyedSamples(Dataset[tuple[Tensor, int]]):
    """A data set whose keys are (epoch, position): the epoch travels with each request, so workers can outlive it.

    Args:
        samples: map-style, gives (float tensor, int).
        positions: which of the samples to use, int64.
        name: of the data set, for errors.
        purpose: part of every sample's seed; keeps training and validation apart.
        seed: of the run.
        num_classes: labels must lie below it.
        channels: repeat gray images this many times; None does not change samples.
    """

    def __init__(
        self,
        samples: Any,
        positions: Tensor,
        *,
        name: str,
        purpose: str,
        seed: int,
        num_classes: int,
        channels: int | None = None,
    ) -> None:
        self.samples = samples
        self.positions = positions
        self.name = name
        self.purpose = purpose
        self.seed = seed
        self.num_classes = num_classes
        self.channels = channels

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple[Tensor, int]]:
        """Return the samples of one batch, seeding the global generators before each; torch's loader calls this.

        Raises:
            ConfigError: a label is not one of the classes; on a GPU that would abort the process.
        """
        batch = []
        with isolated_globals():
            for epoch, position in keys:
                index = int(self.positions[position])
                seed_globals(derive(self.purpose, self.seed, epoch, index))
                sample, label = self.samples[index]
                if self.channels is not None and sample.shape[0] == 1:
                    sample = sample.expand(self.channels, *sample.shape[1:])
                if not 0 <= label < self.num_classes:
                    raise ConfigError(
                        f"{self.name}: sample {index} of {self.purpose} has the label {label}, "
                        f"and labels of {self.num_classes} classes are 0 to {self.num_classes - 1}"
                    )
                batch.append((sample, int(label)))
        return batch


class _Batches:
    """The batch sampler of a loader that is kept between epochs; the batches of an epoch are set from outside."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches: Sequence[Tensor] = []

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        return ([(epoch, position) for position in batch.tolist()] for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass
class _Loader:
    """A DataLoader that is kept with its worker processes, and the number of passes that were begun on it."""

    batches: _Batches
    loader: DataLoader[tuple[Tensor, int]]
    passes: int = 0


@dataclass(frozen=True, eq=False)
class StreamData(LabeledData):
    """Samples prepared by a DataLoader.

    Worker processes are kept between epochs, and beginning an epoch ends an unfinished one.
    """

    train: KeyedSamples = field(repr=False)
    val: KeyedSamples = field(repr=False)
    _loaders: dict[tuple[Part, int, bool], _Loader] = field(default_factory=dict, repr=False)

    def _read(
        self,
        part: Part,
        epoch: int,
        batches: Sequence[Tensor],
        device: torch.device,
        workers: int,
        pin_memory: bool | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        kept = self._loader(part, workers, pin=device.type == "cuda" and pin_memory is not False)
        kept.batches.epoch, kept.batches.batches = epoch, batches
        kept.passes += 1
        number = kept.passes
        for samples, labels in _unwrapped(iter(kept.loader)):
            if kept.passes != number:
                # Persistent workers serve one pass: this iterator would yield batches of the newer one.
                raise RuntimeError(
                    f"an epoch of {self.name} was read after a later one had started; read one epoch at a time"
                )
            yield samples.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def _loader(self, part: Part, workers: int, *, pin: bool) -> _Loader:
        key = part, workers, pin
        if key not in self._loaders:
            batches = _Batches()
            loader = DataLoader(
                self.train if part == "train" else self.val,
                batch_sampler=batches,
                num_workers=workers,
                pin_memory=pin,
                persistent_workers=workers > 0,
                # A loader draws a base seed at each pass, and would draw it from the global generator.
                generator=torch.Generator(),
            )
            self._loaders[key] = _Loader(batches, loader)
        return self._loaders[key]


def _unwrapped(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches; raise an error of a worker with its own one-line message."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except AmpCompareError as error:
            # The loader puts the worker's whole traceback into the message; its last line is the error.
            text = str(error).strip().rpartition("\n")[2]
            kind = type(error)
            raise kind(text.removeprefix(f"{kind.__module__}.{kind.__qualname__}: ")) from error
        yield batch
