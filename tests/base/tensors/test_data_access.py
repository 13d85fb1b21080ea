"""Accesses of `tensor.data`, noted for several followers at once."""

import torch
from torch import Tensor

from ampcompare.base.tensors.data_access import DataAccessFollower


def test_each_follower_notes_its_own_tensors() -> None:
    """Reads and assignments count for each follower of a tensor, until taken; the last one leaves nothing."""
    one, other = torch.zeros(2), torch.zeros(2)
    before: list[list[float]] = []
    first, second = DataAccessFollower(), DataAccessFollower(lambda tensor: before.append(tensor.tolist()))
    try:
        first.follow_tensors([one])
        second.follow_tensors([one, other])
        one.data = torch.ones(2)
        one.data.add_(1)  # noted already
        assert (
            first.was_accessed_since_last_call([other]),
            first.was_accessed_since_last_call([one]),
            first.was_accessed_since_last_call([one]),
        ) == (False, True, False)
        assert before == [[0.0, 0.0]]
        first.end()
        other.data.add_(1)
        assert second.was_accessed_since_last_call([one, other])
        assert before == [[0.0, 0.0], [0.0, 0.0]]
        assert one.tolist() == [2.0, 2.0]
    finally:
        first.end()
        second.end()
    assert "data" not in vars(Tensor)
