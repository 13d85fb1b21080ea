"""Comparisons in an evaluation whose 16-bit numbers are often equal, as of scores that are counted for a rank.

Of 4,000 scores between 0.5 and 1 bf16 tells 128 apart, so `scores > score_of_the_right_one` leaves many out.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.formatting import format_rough_percent_number
from ampcompare.base.location import user_location
from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.patches import Subscriptions, calling_frame
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.script.recording.recorder import RecordedSteps

COMPARISONS = ("__gt__", "__ge__", "__lt__", "__le__", "gt", "ge", "lt", "le")
LOOKS = 8  # of each line, each of which waits for the device
LEAST = 0.01  # of the numbers that are compared
MIN_COMPARED = 256
MAX_COMPARED = 2**24


class TiedComparisonWatch:
    """Notes lines that compare many 16-bit numbers with few without gradients, where some are equal, once each.

    Args:
        rows: where remarks go.
        half: 16-bit type of an arm, whose numbers may be of fp32, as outputs of a model are behind autocast.
    """

    def __init__(self, rows: RecordedSteps, half: torch.dtype | None) -> None:
        self._half = half
        self._rows = rows
        self._looks: dict[tuple[CodeType, int], int] = {}
        self._noted: set[str] = set()
        self._has_begun = False

    def follow(self, steps: OptimizerStepEvents, events: Subscriptions) -> None:
        """Begin at the first step of an optimizer."""

        def begin(_optimizer: Any) -> None:
            if not self._has_begun:
                self._has_begun = True
                for name in COMPARISONS:
                    events.wrap(Tensor, name, self._look_at_comparison)

        steps.call_before_first_of_each(begin)

    def _look_at_comparison(
        self, inner: Callable[..., Any], one: Any, other: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = inner(one, other, *args, **kwargs)
        if not torch.is_grad_enabled() and _compares_many_with_few(one, other, result):
            frame = calling_frame()
            line = (frame.f_code, frame.f_lineno)
            self._looks[line] = self._looks.get(line, 0) + 1
            if self._looks[line] <= LOOKS:
                self._remark_on_ties(one, other)
        return result

    def _remark_on_ties(self, one: Tensor, other: Tensor) -> None:
        half = self._find_half_type(one)
        if half is None:
            return
        # zeros of a ReLU, labels and counts are equal in fp32 too
        tied = (one == other) & (one != one.round())
        # each of the few is one of the many
        share = (int(tied.sum()) - min(one.numel(), other.numel())) / tied.numel()
        place = str(user_location())
        if share < LEAST or place in self._noted:
            return
        self._noted.add(place)
        share_text = format_rough_percent_number(share)
        self._rows.add_equal_numbers_remark(
            f"of the {dtype_name(half)} numbers that an evaluation compares, {share_text} % equal what they are "
            f"compared with, so that a rank or a count by it may be another than in fp32; compute them in fp32, or "
            f"count equal ones as half ({place})",
            place,
        )

    def _find_half_type(self, tensor: Tensor) -> torch.dtype | None:
        """Return the 16-bit type that numbers have, or were rounded to; None for none."""
        if tensor.dtype in HALF_DTYPES:
            return tensor.dtype
        is_rounded = self._half is not None and bool((tensor.to(self._half) == tensor).all())
        return self._half if is_rounded else None


def _compares_many_with_few(one: Any, other: Any, result: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not isinstance(result, Tensor):
        return False
    if not one.is_floating_point() or other.dtype != one.dtype or one.numel() == other.numel():
        return False
    return (
        MIN_COMPARED <= result.numel() <= MAX_COMPARED and max(one.numel(), other.numel()) == result.numel()
    )
