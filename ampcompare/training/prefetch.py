"""Prefetched batches: on a GPU their copies overlap with computation."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ampcompare.tasks.batches import tensors_of

__all__ = ["CopyStream", "CudaCopyStream", "prefetch"]


class CopyStream(abc.ABC):
    """Where batches are fetched while the main stream computes."""

    @abc.abstractmethod
    def fetch(self, batches: Iterator[Any]) -> tuple[Any, Any] | None:
        """Start the copy of the next batch; return it with a mark of its end, or None if none is left."""

    @abc.abstractmethod
    def hand_over(self, batch: Any, mark: Any) -> None:
        """Make the main stream wait, on the device, until the batch is copied."""


class CudaCopyStream(CopyStream):
    """A separate CUDA stream on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(
            torch.cuda.current_stream(device)
        )  # the data that batches are cut from may still be written

    def fetch(self, batches: Iterator[Any]) -> tuple[Any, Any] | None:
        with torch.cuda.stream(self._stream):
            batch = next(batches, None)
            return None if batch is None else (batch, self._stream.record_event())

    def hand_over(self, batch: Any, mark: Any) -> None:
        main = torch.cuda.current_stream(self._device)
        main.wait_event(mark)
        for part in tensors_of(batch):
            part.record_stream(main)  # its memory is not reused while the main stream reads it


def prefetch(batches: Iterable[Any], depth: int, stream: CopyStream) -> Iterator[Any]:
    """Yield the same batches in the same order, and start up to `depth` of them in advance."""
    source = iter(batches)
    waiting: deque[tuple[Any, Any]] = deque()
    more = True
    while True:
        while more and len(waiting) < depth + 1:
            fetched = stream.fetch(source)
            more = fetched is not None
            if fetched is not None:
                waiting.append(fetched)
        if not waiting:
            return
        batch, mark = waiting.popleft()
        stream.hand_over(batch, mark)
        yield batch
