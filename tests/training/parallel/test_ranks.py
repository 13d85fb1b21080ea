"""What ranks compare, without processes: one rank alone, and values as several would give them."""

import hashlib
from typing import Any

import pytest
from torch import Tensor, nn

from ampcompare.base.errors import RanksDiffer
from ampcompare.training.parallel.ranks import Communicator, require_equal, weights_digest


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
        require_equal(Told(7, 8, 7, 8), "thing", 7, "do it")
    told = r"rank 1 of 2 hold another environment than rank 0: torch is 2.0 there and 2.1 on rank 0;"
    with pytest.raises(RanksDiffer, match=told):
        require_equal(Told({"torch": "2.1", "a": 1}, {"torch": "2.0", "a": 1}), "environment", {}, "do it")


@pytest.mark.parametrize(("limit", "transfers"), [(1, 5), (16, 3), (2**20, 1)])
def test_weights_are_hashed_by_few_transfers(limit: int, transfers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is that of all bytes in order, however many tensors come from the device together."""
    model = nn.BatchNorm1d(2)
    held = [*model.parameters(), *model.buffers()]
    whole = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in held)).hexdigest()[:16]
    seen: list[int] = []
    cpu = Tensor.cpu
    monkeypatch.setattr("ampcompare.training.parallel.ranks.TRANSFER_BYTES", limit)
    monkeypatch.setattr(Tensor, "cpu", lambda self: seen.append(self.numel()) or cpu(self))
    assert weights_digest([model]) == whole
    assert (len(seen), sum(seen)) == (transfers, 40)
