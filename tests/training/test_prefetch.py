"""Batches that are fetched ahead are the same, in the same order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ampcompare.training.session import CudaCopyStream, prefetch_batches


class Noted:
    """A lane that writes down what is fetched and handed over."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def fetch_batch_and_mark_of_its_end(self, batches: Iterator[Any]) -> tuple[Any, Any] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        self.seen.append(f"fetch {int(batch[0])}")
        return batch, int(batch[0])

    def wait_for_batch(self, batch: Any, mark: Any) -> None:
        assert mark == int(batch[0])
        self.seen.append(f"give {mark}")


def numbered(count: int) -> Iterator[Any]:
    return ((torch.tensor(number),) for number in range(count))


@pytest.mark.parametrize("depth", [1, 2, 9])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_order_is_kept(depth: int, count: int) -> None:
    """Whatever the depth, also beyond the number of batches, each comes once and in order."""
    assert [int(batch[0]) for batch in prefetch_batches(numbered(count), depth, Noted())] == list(
        range(count)
    )


def test_so_many_are_begun_ahead() -> None:
    """While the first batch is trained on, the next two are under way, and no more."""
    lane = Noted()
    batches = prefetch_batches(numbered(5), 2, lane)
    next(batches)
    assert lane.seen == ["fetch 0", "fetch 1", "fetch 2", "give 0"]
    next(batches)
    assert lane.seen[4:] == ["fetch 3", "give 1"]


@pytest.mark.requires(cuda=1)
def test_on_a_gpu_batches_are_whole() -> None:
    """Copies on a stream of their own have arrived when the main stream computes with them."""
    device = torch.device("cuda")
    host = [torch.full((1 << 20,), float(number)).pin_memory() for number in range(8)]
    batches = ((part.to(device, non_blocking=True),) for part in host)
    assert [float(batch[0].sum()) for batch in prefetch_batches(batches, 3, CudaCopyStream(device))] == [
        n * float(1 << 20) for n in range(8)
    ]
