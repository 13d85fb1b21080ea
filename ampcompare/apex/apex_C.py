"""Flattening of tensor lists by the names of Apex's module `apex_C`, for any device.

Source: Apex 25.05, the bindings of its module `apex_C`.
"""

from collections.abc import Sequence

from torch import Tensor

from ampcompare.base.tensors.lists import flatten as flatten_dense
from ampcompare.base.tensors.lists import unflatten as unflatten_dense


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Return one vector with the elements of all tensors of `bucket`, which are of one dtype and on one device."""
    return flatten_dense(bucket)


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Return views into `coalesced` with the shapes of the tensors of `bucket`, in order."""
    return unflatten_dense(coalesced, bucket)
