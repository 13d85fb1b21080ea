"""Sums in 16 bits that do not grow: rounding loses what each step adds, as to a loss that is summed up for its mean.

A sum of numbers near 1 ends at 256 in bf16, and at 2048 in fp16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompare.base.formatting import rough_percent
from ampcompare.base.location import user_location
from ampcompare.base.patches import Subscriptions
from ampcompare.base.tensors.products import dtype_name
from ampcompare.script.recording.recorder import Rows

HALF = (torch.float16, torch.bfloat16)
LOOKS = 64  # additions between two reads of a counter, each of which waits for the device
MOST = 0.9  # of the additions between two reads
MAX_ELEMENTS = 16
MAX_SUMS = 16


class SumWatch:
    """Notes the small tensors to which a script adds in place and that stay as they are, once for each line."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._sums: dict[int, _Sum] = {}  # by storage
        self._is_installed = False
        self._depth = 0  # of optimizers that step: what they add to is theirs

    def follow(self, events: Subscriptions) -> None:
        """Begin at the first step of an optimizer."""

        def before_step(*_: Any) -> None:
            self._depth += 1
            if not self._is_installed:
                self._is_installed = True
                for name in ("add_", "__iadd__"):
                    events.wrap(Tensor, name, self._add)

        def after_step(*_: Any) -> None:
            self._depth = max(0, self._depth - 1)

        events.at_end(register_optimizer_step_pre_hook(before_step).remove)
        events.at_end(register_optimizer_step_post_hook(after_step).remove)

    def _add(self, inner: Callable[..., Any], target: Tensor, given: Any, *args: Any, **kwargs: Any) -> Any:
        is_sum = target.dtype in HALF and target.numel() <= MAX_ELEMENTS and not target.requires_grad
        if self._depth or not is_sum:
            return inner(target, given, *args, **kwargs)
        before = target.detach().clone()
        result = inner(target, given, *args, **kwargs)
        if (one := self._sum_of(target)) is not None and one.count(before, target, given):
            self._rows.add_remark(
                f"a sum in {dtype_name(target.dtype)} stands still: rounding has lost {rough_percent(one.share)} % of "
                f"what the last {LOOKS} additions would have added; sum up in fp32, as by .float() or .item() "
                f"({user_location()})"
            )
        return result

    def _sum_of(self, target: Tensor) -> "_Sum | None":
        storage = target.untyped_storage()
        known = self._sums.get(storage._cdata)
        if known is not None and not known.reference.expired():
            return known
        self._sums = {key: one for key, one in self._sums.items() if not one.reference.expired()}
        if len(self._sums) >= MAX_SUMS:
            return None
        return self._sums.setdefault(storage._cdata, _Sum(target))


class _Sum:
    """How many of the additions to one tensor have changed nothing of it.

    Attributes:
        share: of the last ones that were read.
    """

    def __init__(self, target: Tensor) -> None:
        self.reference = StorageWeakRef(target.untyped_storage())
        self.share = 0.0
        self._lost = torch.zeros((), dtype=torch.int64, device=target.device)
        self._seen = 0
        self._is_over = False

    def count(self, before: Tensor, after: Tensor, given: Any) -> bool:
        """Count an addition, and return whether the sum is first seen to stand still."""
        if self._is_over:
            return False
        adds = (given.detach() != 0).any() if isinstance(given, Tensor) else bool(given)
        self._lost = self._lost + ((before == after.detach()).all() & adds)
        self._seen += 1
        if self._seen < LOOKS:
            return False
        self.share = float(self._lost) / self._seen
        self._seen = 0
        self._lost = torch.zeros_like(self._lost)
        self._is_over = self.share >= MOST
        return self._is_over
