"""Averages of weights in 16 bits that do not move: rounding loses what each step adds to them.

With a decay of 0.999 an average takes a thousandth of the difference to the weights; bf16 has steps of 0.2 to 0.4 %.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ampcompare.base.formatting import format_rough_percent_number
from ampcompare.base.location import user_location
from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.remarks.sampled_calls import SampledCallsWatch
from ampcompare.training.precision.base import owned_params

WRITES = (
    (Tensor, "add_"),
    (Tensor, "sub_"),
    (Tensor, "__iadd__"),
    (Tensor, "__isub__"),
    (Tensor, "lerp_"),
    (Tensor, "copy_"),
    (torch, "_foreach_add_"),
    (torch, "_foreach_sub_"),
    (torch, "_foreach_lerp_"),
)
STEPS = 16  # behind which an average that has moved nowhere is one that stands still
MOST = 0.9  # of the elements that differ from the weights
MAX_TENSORS = 16
MAX_ELEMENTS = 4096  # of each


class StuckAverageWatch:
    """Notes the averages of weights that stand still, once for each line that writes them."""

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        self._watched: dict[int, _WatchedAverage] = {}  # by storage
        self._noted: set[str] = set()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have stepped
        self._is_installed = False

    def follow(
        self, steps: OptimizerStepEvents, calls: SampledCallsWatch, has_16_bits: Callable[[], bool]
    ) -> None:
        """Begin at the first step of an optimizer with 16-bit weights, or of any where others are there."""

        def before_step(optimizer: Any) -> None:
            self._seen.add(optimizer)
            if self._is_installed:
                return
            if has_16_bits() or any(param.dtype in HALF_DTYPES for param in owned_params(optimizer)):
                self._is_installed = True
                for owner, name in WRITES:
                    calls.watch(owner, name, functools.partial(self._look_after_inplace_write, name))

        steps.call_before_first_of_each(before_step)

    def _look_after_inplace_write(self, name: str, inner: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(target, *args, **kwargs)
        given: Any = args[0] if args else kwargs.get("end", kwargs.get("other"))
        are_lists = isinstance(target, list | tuple) and isinstance(given, list | tuple)
        pairs = zip(target, given, strict=False) if are_lists else [(target, given)]
        for one, other in itertools.islice(pairs, MAX_TENSORS):
            if isinstance(one, Tensor) and one.dtype in HALF_DTYPES:
                self._look_at_average(name, one, other)
        return result

    def _look_at_average(self, name: str, target: Tensor, given: Any) -> None:
        """Follow what is written to one tensor by others of its shape: weights, or their difference to it."""
        is_weights = isinstance(given, Tensor) and given.shape == target.shape and given.is_floating_point()
        # what has gradients is trained, as by a step by hand
        if not is_weights or (target.requires_grad and (not target.is_leaf or target.grad is not None)):
            return
        if name == "copy_" and not isinstance(target, nn.Parameter):
            return
        storage = target.untyped_storage()
        known = self._watched.get(storage._cdata)
        if known is None or known.reference.expired():
            if len(self._watched) < MAX_TENSORS:
                self._watched[storage._cdata] = _WatchedAverage(target, self._rows.num_steps)
            return
        if known.is_over or self._rows.num_steps < known.first_step + STEPS:
            return
        known.is_over = True
        if name == "copy_":  # of the average that was computed apart
            given = self._find_weights_like(target)
        share = 0.0 if given is None else known.share_of_unchanged_elements(target, given)
        place = str(user_location())
        if share >= MOST and place not in self._noted and not self._is_data_of_stepped_weights(target):
            self._noted.add(place)
            steps = self._rows.num_steps - known.first_step
            self._rows.add_rounding_remark(
                f"an average in {dtype_name(target.dtype)} stands still: {steps} steps moved "
                f"{format_rough_percent_number(1 - share)} % of its elements that differ from what is averaged, as "
                f"rounding loses what is added; keep it in fp32 ({place})"
            )

    def _is_data_of_stepped_weights(self, target: Tensor) -> bool:
        """Return whether a tensor is the `data` of weights, which a script may also write by hand."""
        owned = (param for optimizer in list(self._seen) for param in owned_params(optimizer))
        return any(param.data_ptr() == target.data_ptr() for param in owned)

    def _find_weights_like(self, target: Tensor) -> Tensor | None:
        """Return weights of the shape of an average that an optimizer steps."""
        owned = (param for optimizer in list(self._seen) for param in owned_params(optimizer))
        return next((param for param in owned if param.shape == target.shape), None)


class _WatchedAverage:
    """What a tensor was behind its first write."""

    def __init__(self, target: Tensor, step: int) -> None:
        self.reference = StorageWeakRef(target.untyped_storage())
        self.first_step = step
        self.is_over = False
        self._before = _first_elements_to_watch(target).clone()

    def share_of_unchanged_elements(self, target: Tensor, source_or_difference: Tensor) -> float:
        """Return the share of elements that are what they were, of those that differ from what is averaged.

        `source_or_difference` is what is averaged, or its difference to the average: where that is 0, nothing is due.
        """
        now, weights = _first_elements_to_watch(target), _first_elements_to_watch(source_or_difference)
        differs = (weights.to(now.dtype) != now).logical_and_(weights != 0)
        count = int(differs.sum())
        return int((differs & (now == self._before)).sum()) / count if count >= len(now) / 2 else 0.0


@torch.no_grad()
def _first_elements_to_watch(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:MAX_ELEMENTS]
