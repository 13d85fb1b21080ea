"""Decays in 16 bits that do nothing: a factor so near to 1 that each product rounds back to what it was.

Numbers of bf16 are at least 2**-8 of their size apart, so that a decay of 0.999 changes none; in fp16 one of 0.9999.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampcompare.base.location import user_location
from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.remarks.sampled_calls import SampledCallsWatch

REPEATED = 16  # products of one tensor that were seen, behind which they are a decay
MAX_TENSORS = 16
SMALL = 2.0**-6  # of 1: factors farther away cost no more than this comparison


class LostDecayWatch:
    """Notes decays that do nothing: by a factor in a line of the script, and the weight decay of an optimizer."""

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        self._products: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage
        self._noted: set[str] = set()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def follow(self, steps: OptimizerStepEvents, calls: SampledCallsWatch, *, optimizers: bool) -> None:
        """Begin at the first step of an optimizer; with `optimizers` look at their weight decay too."""

        def after_step(optimizer: Any) -> None:
            if optimizer not in self._seen:
                self._seen.add(optimizer)
                self._look_at_weight_decay(optimizer)

        for name in ("mul_", "__imul__"):
            calls.watch(Tensor, name, self._look_after_multiplication)
        if optimizers:
            steps.call_after_each(after_step)

    def _look_after_multiplication(
        self, inner: Any, target: Tensor, factor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = inner(target, factor, *args, **kwargs)
        if type(factor) is float and 0 < 1 - factor < SMALL and target.dtype in HALF_DTYPES:
            if not target.requires_grad and 1 - factor < relative_change_lost_to_rounding(target.dtype):
                self._count_lost_product(target, factor)
        return result

    def _count_lost_product(self, target: Tensor, factor: float) -> None:
        storage = target.untyped_storage()
        known = self._products.get(storage._cdata)
        if known is None or known[0].expired():
            self._products = {key: one for key, one in self._products.items() if not one[0].expired()}
            if len(self._products) >= MAX_TENSORS:
                return
            known = StorageWeakRef(storage), 0
        self._products[storage._cdata] = known[0], known[1] + 1
        place = str(user_location()) if known[1] + 1 == REPEATED else ""
        if place and place not in self._noted:
            self._noted.add(place)
            self._rows.add_rounding_remark(
                f"a decay in {dtype_name(target.dtype)} does nothing: rounding turns each product by {factor:g} back "
                f"into what it was; keep it in fp32 ({place})"
            )

    def _look_at_weight_decay(self, optimizer: Any) -> None:
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            rate, decay = group.get("lr"), group.get("weight_decay")
            # since 2.7
            is_decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
            if not is_decoupled or group.get("fused") or not isinstance(rate, float):
                continue
            stepped = [param.dtype for param in group["params"] if param.grad is not None]
            held = [dtype for dtype in stepped if dtype in HALF_DTYPES]
            if not held or not decay or kind in self._noted:
                continue
            if 0 < rate * decay < min(map(relative_change_lost_to_rounding, held)):
                self._noted.add(kind)
                self._rows.add_rounding_remark(
                    f"the weight decay of {kind} does nothing at its present rate: it multiplies {dtype_name(held[0])} "
                    f"weights by {1 - rate * decay:.9g}, which rounding turns back into what they were; keep the "
                    f"weights, or masters of them, in fp32 ({user_location()})"
                )


def relative_change_lost_to_rounding(dtype: torch.dtype) -> float:
    """Return the relative change below which a product rounds back to what it was, whatever the number."""
    return torch.finfo(dtype).eps / 4
