"""The weights of a model and their master weights under Apex, and which of them are written outside of a step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.tensors.bits import bit_sum

# Of a unit in the last place: what adding to 16-bit weights and subtracting again may leave, with room.
ROUNDING = 4.0


class MasterPairs:
    """The pairs of one optimizer, since the model last had the weights of its masters.

    Args:
        optimizer: one that Apex has prepared.
        before: the pairs until then, whose `data` the script may have kept.

    Attributes:
        params: 16-bit weights of the model.
        masters: their master weights, in the same order.
        is_read: `data` of one of them was read since.
    """

    def __init__(self, optimizer: Any, before: MasterPairs | None = None) -> None:
        stash = optimizer._amp_stash
        self.params: list[Tensor] = list(stash.all_fp16_params)
        self.masters: list[Tensor] = list(stash.all_fp32_from_fp16_params)
        self._versions = {id(one): one._version for one in (*self.params, *self.masters)}
        self._sums: dict[int, Tensor] = {}
        # What `data` has given, by the tensor, with its version: it shares the values, and no version with the tensor.
        self._given: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}
        for key, given in before._given.items() if before is not None else ():
            alive = [(ref, one._version) for ref, _ in given if (one := ref()) is not None]
            if alive and key in self._versions:
                self._given[key] = alive
        self._farthest = 0.0  # norm of what the model was away from its masters, when a loss was scaled

    @property
    def was_data_accessed(self) -> bool:
        return bool(self._sums)

    def keep_bit_sum(self, tensor: Tensor) -> None:
        """Note what a tensor of a pair is before its `data` is accessed; nothing waits for its device."""
        if id(tensor) in self._versions:
            self._sums[id(tensor)] = bit_sum(tensor)

    def keep_data_version(self, tensor: Tensor, data: Tensor) -> None:
        """Note what the `data` of a tensor of a pair has given, which the script may keep and write later."""
        if id(tensor) in self._versions:
            self._given.setdefault(id(tensor), []).append((weakref.ref(data), data._version))

    @torch.no_grad()
    def count_written_masters_that_differ(self) -> int:
        """Return how many masters were written while the weights of the model stayed, and differ from these."""
        indices = self._indices_of_written(self.masters)
        if not indices:
            return 0
        stayed = [not written for written in self._written_flags([self.params[index] for index in indices])]
        pairs = [
            (self.params[index], self.masters[index])
            for index, stays in zip(indices, stayed, strict=True)
            if stays
        ]
        return sum(not torch.equal(param, master.to(param.dtype)) for param, master in pairs)

    def note_distance_before_pass(self) -> None:
        """Note how far the model is from its masters, where it was written before a loss is scaled."""
        if written := self._indices_of_written(self.params):
            self._farthest = max(self._farthest, self._distance_from_masters(written))

    def count_written_params_that_differ(self) -> int:
        """Return how many weights of the model were written, and differ from the masters that overwrite them in a step.

        What rounding leaves of weights that were moved for a pass and moved back does not count, nor that between a
        weight and a master that were both written.
        """
        written = self._indices_of_written(self.params)
        distance = self._distance_from_masters(written) if written else 0.0
        if not distance > 0:
            return 0
        both = any(self._written_flags([self.masters[index] for index in written]))
        if both or self._farthest > distance:
            unit = torch.finfo(self.params[0].dtype).eps
            if distance <= ROUNDING * unit * (float(_norm_of_tensors(self.masters)) + self._farthest):
                return 0
        return sum(
            not torch.equal(self.params[index], self.masters[index].to(self.params[index].dtype))
            for index in written
        )

    def _indices_of_written(self, tensors: Sequence[Tensor]) -> list[int]:
        return [index for index, written in enumerate(self._written_flags(tensors)) if written]

    def _written_flags(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return for each tensor whether it was written; this waits for the device where `data` was read."""
        read = [one for one in tensors if id(one) in self._sums and one._version == self._versions[id(one)]]
        changed: dict[int, bool] = {}
        if read:
            differ = torch.stack([(self._sums[id(one)] != bit_sum(one)).to(read[0].device) for one in read])
            changed = {id(one): bool(is_other) for one, is_other in zip(read, differ.tolist(), strict=True)}
        return [
            one._version != self._versions[id(one)]
            or changed.get(id(one), False)
            or self._is_kept_data_written(one)
            for one in tensors
        ]

    def _is_kept_data_written(self, tensor: Tensor) -> bool:
        """Return whether the script has written what it keeps of the `data` of a tensor."""
        given = self._given.get(id(tensor), ())
        return any((one := ref()) is not None and one._version != version for ref, version in given)

    @torch.no_grad()
    def _distance_from_masters(self, indices: Sequence[int]) -> float:
        pairs = [(self.params[index], self.masters[index]) for index in indices]
        return float(
            _norm_of_tensors([param.float() - master.to(param.dtype).float() for param, master in pairs])
        )


@torch.no_grad()
def _norm_of_tensors(tensors: Sequence[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(one.detach().float()) for one in tensors]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))
    return norm
