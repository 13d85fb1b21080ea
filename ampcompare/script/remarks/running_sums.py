"""Sums in 16 bits from which rounding takes what a script adds to them, as to a loss that is summed up for its mean.

A sum of numbers near 1 ends at 256 in bf16, and at 2048 in fp16.
"""

import functools
import itertools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampcompare.base.formatting import format_rough_percent_number
from ampcompare.base.location import user_location
from ampcompare.base.patches import calling_frame
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.remarks.sampled_calls import SampledCallsWatch

LOOKS = 64  # additions between two reads of a counter, each of which waits for the device
LEAST = 0.05  # of what was added
MAX_ELEMENTS = 16
MAX_SUMS = 16  # that one line adds to at a time
Around = Callable[..., Any]


class LossySumWatch:
    """Notes the small tensors to which a script adds in place and from which rounding keeps it, once for each line.

    A sum that a line makes again, as in each epoch, takes over the count of the one before it. What is written to a
    tensor between two additions makes it no sum, such as a factor for an average.
    """

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        self._sums: dict[tuple[CodeType, int], list[_WatchedSum]] = {}  # by the line that adds
        self._noted: set[str] = set()
        self._always: set[str] = set()  # functions of which all calls are watched

    def follow(self, calls: SampledCallsWatch) -> None:
        """Begin at the first step of an optimizer; from the second addition to one tensor on all of them are seen."""
        self._calls = calls
        self._rows.recorder.call_before_close(self._remark_on_remaining_lossy_sums)
        self._arounds = {
            name: functools.partial(self._look_at_addition, name) for name in ("add_", "__iadd__")
        }
        for name, around in self._arounds.items():
            calls.watch(Tensor, name, around)

    def _look_at_addition(
        self, name: str, inner: Around, target: Tensor, given: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if target.dtype not in HALF_DTYPES or target.numel() > MAX_ELEMENTS or target.requires_grad:
            return inner(target, given, *args, **kwargs)
        one = self._watched_sum_of_line(target)
        if one.is_over or not one.is_unwritten_since_addition(target):
            result = inner(target, given, *args, **kwargs)
            one.version = _version_of(target)
            return result
        before = target.detach().clone()
        result = inner(target, given, *args, **kwargs)
        if one.version is not None and name not in self._always:
            self._always.add(name)
            self._calls.watch_always(Tensor, name, self._arounds[name])
        one.count_addition(before, target, given, kwargs.get("alpha", 1))
        if one.num_counted % LOOKS == 0:
            one.place = str(user_location())
            self._remark_on_lossy_sum(one)
        return result

    def _remark_on_remaining_lossy_sums(self) -> None:
        for one in itertools.chain(*self._sums.values()):
            if one.num_counted > LOOKS and not one.is_over:
                self._remark_on_lossy_sum(one)

    def _remark_on_lossy_sum(self, one: "_WatchedSum") -> None:
        if not one.loses_notable_share() or one.place in self._noted:
            return
        self._noted.add(one.place)
        way = "loses" if one.lost_share > 0 else "gains"
        self._rows.add_rounding_remark(
            f"a sum in {dtype_name(one.dtype)} {way} by rounding "
            f"{format_rough_percent_number(abs(one.lost_share))} % of what "
            f"{one.num_counted} additions gave to it; sum up in fp32, as by .float() or .item() ({one.place})"
        )

    def _watched_sum_of_line(self, target: Tensor) -> "_WatchedSum":
        """Return what is known of a tensor at the line that adds to it, or of one that it takes the place of."""
        frame = calling_frame()
        known = self._sums.setdefault((frame.f_code, frame.f_lineno), [])
        storage = target.untyped_storage()
        for one in known:
            if one.key == storage._cdata and not one.reference.expired():
                return one
        for one in known:
            if one.reference.expired() and one.shape == target.shape and one.device == target.device:
                one.begin(target)
                return one
        if len(known) >= MAX_SUMS:
            del known[0]
        known.append(_WatchedSum(target))
        return known[-1]


class _WatchedSum:
    """What the additions to one tensor gave, and what of it has not arrived.

    Attributes:
        version: of the tensor behind the last addition; None before the first one.
        num_counted: the additions between which nothing else was written.
        lost_share: of what they gave, when it was last read; below 0 where the sum has grown by more.
        is_over: it has a remark.
        place: the line that adds, once the first additions were read; empty before.
    """

    def __init__(self, target: Tensor) -> None:
        self.shape, self.device, self.dtype = target.shape, target.device, target.dtype
        self.place = ""
        self.num_counted = 0
        self.lost_share = 0.0
        self.is_over = False
        self._lost, self._given = torch.zeros(2, *target.shape, dtype=torch.float32, device=target.device)
        self.begin(target)

    def begin(self, target: Tensor) -> None:
        """Go on with another tensor."""
        self.key = target.untyped_storage()._cdata
        self.reference = StorageWeakRef(target.untyped_storage())
        self.version: int | None = None

    def is_unwritten_since_addition(self, target: Tensor) -> bool:
        """Return whether nothing has written to the tensor since the last addition."""
        return self.version in (None, _version_of(target))

    @torch.no_grad()
    def count_addition(self, target_before: Tensor, target_after: Tensor, addend: Any, factor: float) -> None:
        """Add what an addition gave, and what of it has not arrived."""
        self.version = _version_of(target_after)
        added = (addend.float() if isinstance(addend, Tensor) else float(addend)) * factor
        self._lost += added - (target_after.float() - target_before)
        self._given += abs(added)
        self.num_counted += 1

    def loses_notable_share(self) -> bool:
        """Return whether a share of what was added is lost, which waits for the device."""
        shares = self._lost / self._given  # not a number where nothing was given
        self.lost_share = max(shares.flatten().tolist(), key=lambda one: abs(one) if one == one else -1.0)
        self.is_over = abs(self.lost_share) >= LEAST
        return self.is_over


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
