"""Steps of optimizers as they begin and end: one pair of torch's hooks for all who follow them."""

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampcompare.base.location import find_code_of_callable
from ampcompare.base.patches import Subscriptions

Follower = Callable[[Any], None]  # given the optimizer


class OptimizerStepEvents:
    """Tells followers that a step begins or has ended, and whether this thread is inside of one.

    Attributes:
        num_ended: steps that have ended, without those inside of others, such as that of a wrapped optimizer.
    """

    def __init__(self, events: Subscriptions) -> None:
        self.num_ended = 0
        self._running: dict[int, list[Any]] = {}  # by thread: the optimizers that step, the outer one first
        self._closures: dict[int, set[CodeType]] = {}  # by thread: what these steps may call back
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have begun a step
        self._before_first: list[Follower] = []
        self._before: list[Follower] = []
        self._after: list[Follower] = []
        events.call_at_end(register_optimizer_step_pre_hook(self._begin).remove)
        events.call_at_end(register_optimizer_step_post_hook(self._end).remove)

    def call_before_first_of_each(self, follower: Follower) -> None:
        """Call a function with each optimizer before the first of its steps from now on."""
        self._before_first.append(follower)

    def call_before_each(self, follower: Follower) -> None:
        """Call a function with the optimizer before each step from now on."""
        self._before.append(follower)

    def call_after_each(self, follower: Follower) -> None:
        """Call a function with the optimizer behind each step from now on, outside of it."""
        self._after.append(follower)

    def is_inside(self) -> bool:
        """Return whether an optimizer steps in this thread."""
        return bool(self._running) and get_ident() in self._running

    def is_inside_closure(self) -> bool:
        """Return whether a step in this thread has called the closure that it got, in which the script computes."""
        codes = self._closures.get(get_ident())
        frame: FrameType | None = sys._getframe(1) if codes else None
        while frame is not None:
            if codes and frame.f_code in codes:
                return True
            frame = frame.f_back
        return False

    def _begin(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        codes = {
            code for one in (*args[1:], *(kwargs or {}).values()) if (code := find_code_of_callable(one))
        }
        if codes:
            self._closures.setdefault(get_ident(), set()).update(codes)
        running = self._running.get(get_ident())
        if running is None:
            self._running[get_ident()] = [optimizer]
        else:
            _drop_optimizer_and_those_inside(running, optimizer)  # its last step has ended with an exception
            running.append(optimizer)
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            for follower in self._before_first:
                follower(optimizer)
        for follower in self._before:
            follower(optimizer)

    def _end(self, optimizer: Any, *_: Any) -> None:
        running = self._running.get(get_ident(), [])
        if running and running[-1] is optimizer:
            running.pop()
        else:
            _drop_optimizer_and_those_inside(running, optimizer)
        if not running:
            self._running.pop(get_ident(), None)
            self._closures.pop(get_ident(), None)
            self.num_ended += 1
        for follower in self._after:
            follower(optimizer)


def _drop_optimizer_and_those_inside(running: list[Any], optimizer: Any) -> None:
    """Remove an optimizer and those that it has stepped."""
    at = next((index for index, one in enumerate(running) if one is optimizer), len(running))
    del running[at:]
