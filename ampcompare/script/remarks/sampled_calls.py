"""Functions of torch that are watched in some of a script's steps only, since a script may call them for each weight.

Between the steps that are watched they are torch's own and cost nothing.
"""

from collections.abc import Callable
from typing import Any

from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.patches import Layer, Subscriptions

FIRST_STEPS = 40  # all of which are watched
PERIOD = 101  # behind them two of so many; a prime number, so that what a script does every 10 steps meets it
WINDOW = 2

Around = Callable[..., Any]


class SampledCallsWatch:
    """Watches calls from the first step of an optimizer on, outside of steps, but in the closures that these call."""

    def __init__(self, steps: OptimizerStepEvents, events: Subscriptions) -> None:
        self._steps = steps
        self._events = events
        # the last is the one that was given, which the third calls outside of steps
        self._sampled: list[tuple[Any, str, Around, Around]] = []
        self._window: Subscriptions | None = None  # of the steps that are watched
        steps.call_before_first_of_each(self._open_at_first_step)
        steps.call_after_each(self._open_or_close_after_step)
        events.call_at_end(self._close_window)

    def watch(self, owner: Any, name: str, around: Around) -> None:
        """Let calls of `owner.name` in watched steps go to `around(inner, *args, **kwargs)`."""
        outside = self._make_around_outside_of_steps(around)
        self._sampled.append((owner, name, outside, around))
        if self._window is not None:
            self._window.wrap(owner, name, outside)

    def watch_always(self, owner: Any, name: str, around: Around) -> None:
        """Let all calls go there from now on, where `watch` has let some go; others that watch the function stay."""
        self._sampled = [
            one for one in self._sampled if not (one[0] is owner and one[1] == name and one[3] is around)
        ]
        was_open = self._window is not None
        self._close_window()
        if was_open:
            self._open_window()
        self._events.wrap(owner, name, self._make_around_outside_of_steps(around))

    def _make_around_outside_of_steps(self, around: Around) -> Around:
        def around_outside(inner: Any, *args: Any, **kwargs: Any) -> Any:
            if self._steps.is_inside() and not self._steps.is_inside_closure():
                return inner(*args, **kwargs)
            return around(inner, *args, **kwargs)

        return around_outside

    def _open_at_first_step(self, _optimizer: Any) -> None:
        if not self._steps.num_ended and self._window is None:
            self._open_window()

    def _open_or_close_after_step(self, _optimizer: Any) -> None:
        is_wanted = self._steps.num_ended < FIRST_STEPS or self._steps.num_ended % PERIOD < WINDOW
        if is_wanted and self._window is None:
            self._open_window()
        elif not is_wanted:
            self._close_window()

    def _open_window(self) -> None:
        self._window = Subscriptions(Layer.RECORD)
        for owner, name, outside, _ in self._sampled:
            self._window.wrap(owner, name, outside)

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.end()
            self._window = None
