"""The rule by which a dynamic loss scale moves: on the host, and on a device whose overflow flag nobody reads."""

import math

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max
_MAX_EXACT = 2.0**127
_MIN_EXACT = 2.0**-126
_SEVERAL_WINDOWS = -1  # several windows since the last `load`: doublings cannot be bounded by a division


def next_scale_and_good_steps(
    scale: float,
    good_steps: int,
    *,
    overflow: bool,
    growth_interval: int,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    min_scale: float | None = None,
    max_scale: float = math.inf,
) -> tuple[float, int]:
    """Return the loss scale after an update, and the number of good updates in a row.

    Args:
        scale: before the update.
        good_steps: updates without an overflow since the scale moved.
        overflow: this update had one, so that the scale shrinks.
        growth_interval: good updates after which the scale grows.
        growth_factor, backoff_factor: what it is multiplied by when it grows, and at an overflow.
        min_scale: the floor, which holds after an overflow alone; None or 0 for none.
        max_scale: the ceiling, which holds in growth alone.
    """
    if overflow:
        shrunk = scale * backoff_factor
        return (max(min_scale, shrunk) if min_scale else shrunk), 0
    if good_steps + 1 != growth_interval:
        return scale, good_steps + 1
    return min(max_scale, scale * growth_factor), 0


class DeviceLossScale:
    """Loss scale, its inverse and the number of good steps in a row, as scalars of one device.

    Each keeps its storage and is updated in place, so that a CUDA graph that recorded an update can repeat it.

    Attributes:
        scale: fp32, what the loss is multiplied by; `copy` gives one that does not change.
        inverse: fp32, what gradients are multiplied by; at most the largest float.
        tracker: int32, good steps in a row.
        repeated: updates are recorded and repeated, so each applies all bounds, even those out of reach so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scale = torch.ones((), dtype=torch.float32, device=device)
        self.inverse = torch.ones((), dtype=torch.float32, device=device)
        self.tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.repeated = False
        self._clear = torch.zeros((), dtype=torch.float32, device=device)
        self._flag: Tensor | None = None
        # What the host knows without a read: the initial scale, and how often it can have moved since.
        self._loaded = 1.0
        self._steps = 0
        self._halvings = 0
        self._window: int | None = None

    def new_overflow_flag(self) -> Tensor:
        """Return an overflow flag that is not set: a separate fp32 scalar, valid after the pass."""
        flag, self._flag = self._flag, None
        return self._clear.clone() if flag is None else flag

    def initial_grad(self) -> Tensor:
        """Return a copy of the scale, fp32 of shape (), to start a backward pass from.

        One kernel makes it and the flag of the pass. A copy, because autograd may use it as the gradient of a
        parameter, which is then unscaled in place.
        """
        initial_grad, self._flag = torch.empty_like(self.scale), torch.empty_like(self._clear)
        torch._foreach_copy_([initial_grad, self._flag], [self.scale, self._clear])
        return initial_grad

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, computed in fp32 and rounded to the dtype of the loss, as by a number."""
        return (
            loss * self.scale if loss.dtype is torch.float32 else (loss.float() * self.scale).to(loss.dtype)
        )

    def copy(self) -> Tensor:
        """Return the scale as it is now, fp32 of shape (), in a tensor that will not change."""
        return self.scale.clone()

    def set_scale_and_good_steps(self, scale: float, good_steps: int) -> None:
        """Set the host's values; does not wait for the device.

        Args:
            scale: a positive number.
            good_steps: steps since the scale has changed last.
        """
        self.scale.fill_(scale)
        self.tracker.fill_(good_steps)
        self._loaded = scale
        self._steps = good_steps
        self._halvings = 0
        self._window = None
        self._update_inverse(None)

    def update(
        self, flag: Tensor, growth_interval: int, min_scale: float | None = None, max_scale: float = math.inf
    ) -> None:
        """Move the scale by the rule of `next_scale_and_good_steps`: by the factor 2, down if `flag` is not 0.

        Args:
            flag: fp32 of shape () on the device; above 0 after an overflow.
            growth_interval: good steps that double the scale.
            min_scale: below which it does not fall; None for no limit.
            max_scale: above which it does not rise.
        """
        torch._amp_update_scale_(self.scale, self.tracker, flag, 2.0, 0.5, growth_interval)
        self._count_good_steps(growth_interval)
        if min_scale or self.repeated or self._may_exceed_max_scale(max_scale, growth_interval):
            self.scale.clamp_(min=min_scale or None, max=max_scale)
        self._update_inverse(min_scale)

    def _count_good_steps(self, window: int) -> None:
        self._steps += 1
        self._halvings += 1
        if self._window is None:
            self._window = window
        elif self._window != window:
            self._window = _SEVERAL_WINDOWS

    def _may_exceed_max_scale(self, max_scale: float, window: int) -> bool:
        """Return whether the scale can be above `max_scale`: the clamp costs a kernel."""
        doublings = min(self._steps // max(window, 1), 256)
        return self._window == _SEVERAL_WINDOWS or math.ldexp(self._loaded, doublings) > max_scale

    def _update_inverse(self, min_scale: float | None) -> None:
        torch.reciprocal(self.scale, out=self.inverse)
        # that it can be
        smallest = max(math.ldexp(self._loaded, -min(self._halvings, 512)), min_scale or 0.0)
        if self.repeated or smallest < 1 / _MAX_EXACT:
            self.inverse.clamp_(max=FLOAT32_MAX)

    def read_scale_and_good_steps(self) -> tuple[float, int]:
        """Return the scale and the counter; waits for the device."""
        return self.scale.item(), int(self.tracker.item())


def is_loss_scale_exact_on_device(
    scale: float, min_scale: float | None = None, max_scale: float | None = _MAX_EXACT
) -> bool:
    """Return whether fp32 scalars of a device follow the host's arithmetic bit for bit.

    Powers of two have exact inverses, and bounds that hold at the start need no separate check later: the floor is for
    halving only, and the ceiling for doubling only.

    Args:
        scale: the present loss scale.
        min_scale: the floor; None or 0 for none.
        max_scale: the ceiling; with None for none the answer is no, since the scale could grow without end.
    """
    if not _is_power_of_two(scale) or not _is_power_of_two(max_scale) or scale > max_scale:  # type: ignore[operator]
        return False
    return not min_scale or (_is_power_of_two(min_scale) and min_scale <= scale)


def _is_power_of_two(value: float | None) -> bool:
    return (
        isinstance(value, (int, float)) and _MIN_EXACT <= value <= _MAX_EXACT and math.frexp(value)[0] == 0.5
    )
