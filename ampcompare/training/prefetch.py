"""Batches fetched ahead of the step that trains on them: on a GPU their copies run beside the computation."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["CudaLane", "Lane", "ahead"]

Batch = tuple[Tensor, ...]


class Lane(abc.ABC):
    """Where batches are fetched while the main line computes."""

    @abc.abstractmethod
    def fetch(self, batches: Iterator[Batch]) -> tuple[Batch, Any] | None:
        """Begin the next batch and return it with a mark of its end; None where there is none left."""

    @abc.abstractmethod
    def hand_over(self, batch: Batch, mark: Any) -> None:
        """Make the main line wait, on the device, until the batch is there."""


class CudaLane(Lane):
    """A stream of its own on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # what batches are cut from may still be written

    def fetch(self, batches: Iterator[Batch]) -> tuple[Batch, Any] | None:
        with torch.cuda.stream(self._stream):
            batch = next(batches, None)
            return None if batch is None else (batch, self._stream.record_event())

    def hand_over(self, batch: Batch, mark: Any) -> None:
        main = torch.cuda.current_stream(self._device)
        main.wait_event(mark)
        for part in batch:
            part.record_stream(main)  # its memory is not given away while the main line reads it


def ahead(batches: Iterable[Batch], depth: int, lane: Lane) -> Iterator[Batch]:
    """Yield the same batches in the same order, `depth` of them begun ahead."""
    source = iter(batches)
    waiting: deque[tuple[Batch, Any]] = deque()
    more = True
    while True:
        while more and len(waiting) < depth + 1:
            fetched = lane.fetch(source)
            more = fetched is not None
            if fetched is not None:
                waiting.append(fetched)
        if not waiting:
            return
        batch, mark = waiting.popleft()
        lane.hand_over(batch, mark)
        yield batch
