"""Differences in an evaluation of two 16-bit sums that agree in nearly all of their digits, as in a variance or an R².

The sum of 512 squares near 400 is 205,000, where bf16 has steps of 1024: what is left of it less the squared mean is
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ampcompare.base.location import user_location
from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.patches import Subscriptions, calling_frame
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.script.recording.recorder import RecordedSteps

SUBTRACTIONS = ("__sub__", "sub")
LOOKS = 8  # of each line, each of which waits for the device
DIGITS_LEFT = 2  # in multiples of eps: what is below keeps two binary digits of the 8 or 11


class CancelledNumbersWatch:
    """Notes lines that subtract single 16-bit numbers outside of training, of which hardly a digit is left, once each.

    Args:
        rows: where remarks go.
    """

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        self._looks: dict[tuple[CodeType, int], int] = {}
        self._noted: set[str] = set()
        self._has_begun = False

    def follow(self, steps: OptimizerStepEvents, events: Subscriptions) -> None:
        """Begin at the first step of an optimizer, and leave out what runs inside of steps."""

        def begin(_optimizer: Any) -> None:
            if not self._has_begun:
                self._has_begun = True
                for name in SUBTRACTIONS:
                    events.wrap(Tensor, name, look)

        def look(inner: Callable[..., Any], one: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(one, other, *args, **kwargs)
            if (
                not torch.is_grad_enabled()
                and _are_half_numbers(one, other, result)
                and not steps.is_inside()
            ):
                self._look_at_difference(one, other, result)
            return result

        steps.call_before_first_of_each(begin)

    def _look_at_difference(self, one: Tensor, other: Tensor, result: Tensor) -> None:
        frame = calling_frame()
        line = (frame.f_code, frame.f_lineno)
        self._looks[line] = self._looks.get(line, 0) + 1
        if self._looks[line] > LOOKS:
            return
        left, right, rest = (float(each) for each in (one, other, result))
        eps = torch.finfo(result.dtype).eps
        are_exact = all(number == round(number) and abs(number) <= 2 / eps for number in (left, right))
        place = str(user_location())
        if not left or not right or are_exact or place in self._noted:
            return
        if abs(rest) < DIGITS_LEFT * eps * min(abs(left), abs(right)):
            self._noted.add(place)
            self._rows.add_rounding_remark(
                f"an evaluation subtracts {dtype_name(result.dtype)} numbers of which hardly a digit is left, "
                f"{left:.6g} - {right:.6g}: a metric of it, such as a variance or R², is that of rounding; compute it "
                f"in fp32 ({place})"
            )


def _are_half_numbers(one: Any, other: Any, result: Any) -> bool:
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one is not other
        and one.dtype in HALF_DTYPES
        and one.dtype is other.dtype
        and one.numel() == other.numel() == 1
        and isinstance(result, Tensor)
    )
