"""Guards of weights that exist twice, in a model and as the master weights of its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ampcompare.guards.detection.detector import Detector, guard_of_name

if TYPE_CHECKING:
    from torch import Tensor

    from ampcompare.base.tensors.data_access import DataAccessFollower
    from ampcompare.guards.detection.master_pairs import MasterPairs

MAX_READS = 32  # steps that only read `data`, each of which makes the guard wait for the device


class WeightsApart(Detector):
    """Weights of a model, or their masters, that something other than the step of their optimizer has made differ.

    A write is seen by the version of a tensor; by its bits where the script accessed its `data`, and by the version of
    what it keeps of that. What is put back before the next step is none.
    """

    guard = guard_of_name("weights-apart")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pairs: weakref.WeakKeyDictionary[Any, MasterPairs] = weakref.WeakKeyDictionary()
        # steps that only read `data`
        self._reads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._data: DataAccessFollower | None = None
        self._stepping: Any = None

    def after_masters_made(self, optimizer: Any) -> None:
        self._watch_writes(optimizer)

    def after_masters_copied(self, optimizer: Any) -> None:
        self._watch_writes(optimizer)

    def at_scale_loss_block(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if (pairs := self._pairs.get(optimizer)) is None:
                continue
            if count := pairs.count_written_masters_that_differ():
                name = type(optimizer).__name__
                self.report(
                    f"this loss was computed without what was written into {count} master weights of {name} since its "
                    f"last step, which the model gets by step() of this {name} only"
                )
            pairs.note_distance_before_pass()

    def at_step_attempt(self, optimizer: Any, scaler: Any) -> None:
        if (pairs := self._pairs.get(optimizer)) is None:
            return
        if count := pairs.count_written_params_that_differ():
            self.report(
                f"this step overwrites {count} weights of the model, into which something else has written since the "
                "last step, by master weights that lack it"
            )
        self._stepping = optimizer

    def after_step_attempt(self, optimizer: Any, scaler: Any, applied: bool) -> None:
        if optimizer in self._pairs and any(cls.__name__ == "FusedSGD" for cls in type(optimizer).__mro__):
            self._watch_writes(optimizer)  # its kernel writes both

    def at_guard_removal(self) -> None:
        if self._data is not None:
            self._data.end()

    def _watch_writes(self, optimizer: Any) -> None:
        """Look for writes from now on, when the model has the weights of the masters."""
        from ampcompare.base.tensors.data_access import DataAccessFollower
        from ampcompare.guards.detection.master_pairs import MasterPairs

        before = self._pairs.get(optimizer)
        if before is not None and before.was_data_accessed:
            self._reads[optimizer] = self._reads.get(optimizer, 0) + 1
        self._pairs[optimizer] = pairs = MasterPairs(optimizer, before)
        if self._data is None:
            self._data = DataAccessFollower(self._note_before_access, self._note_after_access)
        followed = [*pairs.params, *pairs.masters]
        self._data.was_accessed_since_last_call(followed)
        self._data.follow_tensors(followed)
        self._stepping = None

    def _note_before_access(self, tensor: Tensor) -> None:
        for optimizer, pairs in self._pairs.items():
            if optimizer is not self._stepping and self._reads.get(optimizer, 0) < MAX_READS:
                pairs.keep_bit_sum(tensor)

    def _note_after_access(self, tensor: Tensor, data: Tensor) -> None:
        for optimizer, pairs in self._pairs.items():
            if optimizer is not self._stepping:
                pairs.keep_data_version(tensor, data)
