"""What a training script does, as events: the functions of torch and Apex that every script passes, each replaced once.

A subscriber wraps a point by `around(inner, *args, **kwargs)`, which calls `inner` or does something in its place.
Several subscribers of one point lie around each other in the order of their layers, whichever came first. A point
without subscribers is torch's own function object. What a subscriber raises reaches the script.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import autocast_mode
from torch.optim import Optimizer

__all__ = [
    "ADD_PARAM_GROUP",
    "BACKWARD",
    "ENTER_AUTOCAST",
    "FORWARD",
    "GRAD",
    "GRADIENT_READS",
    "LEAVE_AUTOCAST",
    "MAKE_AUTOCAST",
    "MAKE_OPTIMIZER",
    "MAKE_SCALER",
    "GradientReads",
    "Layer",
    "Point",
    "Subscriptions",
    "calling_frame",
    "has_stand_in",
    "of_scaler",
    "without_subscribers",
]

Around = Callable[..., Any]
_GRAD: Any = vars(torch._C.TensorBase)["grad"]


class Layer(enum.IntEnum):
    """Who subscribes, innermost first."""

    STAND_IN = 0  # what an arm does in the place of torch or Apex
    RECORD = 1
    GUARDS = 2
    WATCH = 3


class Point(NamedTuple):
    """A function that a script calls, by the module or class that has it."""

    owner: Any
    name: str


FORWARD = Point(nn.Module, "__call__")
BACKWARD = Point(torch.autograd, "backward")  # Tensor.backward calls it
GRAD = Point(torch.autograd, "grad")
MAKE_OPTIMIZER = Point(Optimizer, "__init__")
ADD_PARAM_GROUP = Point(Optimizer, "add_param_group")
MAKE_AUTOCAST = Point(autocast_mode.autocast, "__init__")
ENTER_AUTOCAST = Point(autocast_mode.autocast, "__enter__")
LEAVE_AUTOCAST = Point(autocast_mode.autocast, "__exit__")
MAKE_SCALER = Point(torch.amp.GradScaler, "__init__")


def of_scaler(name: str) -> Point:
    """Return a method of `GradScaler`, those of `torch.cuda.amp` and other subclasses included."""
    return Point(torch.amp.GradScaler, name)


class _Place:
    """One function that is replaced at present.

    Attributes:
        base: what the innermost subscriber calls: the original, or what stands in its place.
        chain: calls all subscribers.
    """

    def __init__(self, point: Point) -> None:
        self.point = point
        self._is_own = point.name in vars(point.owner)
        self._before = vars(point.owner).get(point.name)
        self.original: Any = getattr(point.owner, point.name, None)
        self.value = self._before
        self.base: Any = self.original
        self.chain: Any = self.original
        self.puts: list[Any] = []
        self.arounds: list[tuple[Layer, Around]] = []
        self._dispatch: Any = None

    def set(self) -> None:
        """Put in place what the present subscribers need; code that has wrapped it since calls them still."""
        self.base = self.puts[-1] if self.puts else self.original
        self.chain = self.base
        for _, around in sorted(self.arounds, key=lambda one: one[0]):
            self.chain = functools.partial(around, self.chain)
        is_wrapped = vars(self.point.owner).get(self.point.name) is not self.value
        if is_wrapped:
            return
        self.value = self._dispatcher() if self.arounds else self.base if self.puts else self._before
        if self.arounds or self.puts or self._is_own:
            setattr(self.point.owner, self.point.name, self.value)
        elif self.point.name in vars(self.point.owner):
            delattr(self.point.owner, self.point.name)

    def _dispatcher(self) -> Any:
        if self._dispatch is None:
            compiler = torch.compiler

            @functools.wraps(self.original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                # `is_compiling` in one call: torch.compile and torch.export must not trace subscribers.
                if compiler._is_compiling_flag or compiler.is_dynamo_compiling():
                    return self.base(*args, **kwargs)
                return self.chain(*args, **kwargs)

            self._dispatch = replacement
        return self._dispatch


_places: dict[tuple[int, str], _Place] = {}  # of this process


def _place(point: Point) -> _Place:
    key = id(point.owner), point.name
    if key not in _places:
        _places[key] = _Place(point)
    return _places[key]


def _release(place: _Place) -> None:
    place.set()
    if not place.arounds and not place.puts:
        _places.pop((id(place.point.owner), place.point.name), None)


class Subscriptions:
    """What one subscriber has replaced, and its end.

    Attributes:
        active: it has not ended.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._undo: list[Callable[[], None]] = []
        self.active = True

    def wrap(self, point: Point, around: Around) -> None:
        """Let calls of a point go to `around(inner, *args, **kwargs)`; while torch.compile traces, to `inner` alone."""
        place = _place(point)
        entry = self._layer, around
        place.arounds.append(entry)
        place.set()

        def undo() -> None:
            place.arounds.remove(entry)
            _release(place)

        self._undo.append(undo)

    def put(self, point: Point, value: Any) -> None:
        """Set what the subscribers of a point lie around: a function, or any other attribute."""
        place = _place(point)
        place.puts.append(value)
        place.set()

        def undo() -> None:
            place.puts.remove(value)
            _release(place)

        self._undo.append(undo)

    def at_end(self, function: Callable[[], None]) -> None:
        """Call a function at the end, such as `remove` of a hook of torch's own."""
        self._undo.append(function)

    def end(self) -> None:
        """Undo everything, the last one first."""
        self.active = False
        while self._undo:
            self._undo.pop()()


def calling_frame() -> FrameType:
    """Return the frame that called the point whose subscriber calls this."""
    frame: Any = sys._getframe(1)
    while frame.f_globals is not globals() or frame.f_code.co_name != "replacement":
        frame = frame.f_back
    caller: FrameType = frame.f_back
    return caller


def has_stand_in(point: Point) -> bool:
    """Return whether an arm stands behind a point."""
    place = _places.get((id(point.owner), point.name))
    return place is not None and (bool(place.puts) or any(layer is Layer.STAND_IN for layer, _ in place.arounds))


@contextmanager
def without_subscribers(point: Point) -> Iterator[None]:
    """Run a block in which calls of a point reach nobody but torch or Apex."""
    place = _place(point)
    kept = place.arounds, place.puts
    place.arounds, place.puts = [], []
    place.set()
    try:
        yield
    finally:
        place.arounds, place.puts = kept
        _release(place)


class GradientReads:
    """Reads of `tensor.grad`, which an arm waits for to unscale gradients, and where they lead.

    Watching costs two assignments; while nobody wants it, `tensor.grad` is torch's own. `zero_grad` is no reader.
    """

    def __init__(self) -> None:
        self._wanted_by: list[Callable[[Tensor], None]] = []
        self._pauses = 0
        self._watching = False
        self._get: Callable[[Tensor], Any] = _GRAD.__get__
        self._put: Callable[[Tensor, Any], None] = _GRAD.__set__
        self._is_redirected = False
        self._property = property(self._read, lambda tensor, grad: self._put(tensor, grad), _GRAD.__delete__)

    def _read(self, tensor: Any) -> Any:
        if self._wanted_by and not self._pauses and sys._getframe(1).f_code.co_name != "zero_grad":
            for before in tuple(self._wanted_by):
                before(tensor)
        return self._get(tensor)

    def redirect(self, get: Callable[[Tensor], Any] | None, put: Callable[[Tensor, Any], None] | None) -> None:
        """Let reads and assignments go elsewhere, also while nobody wants to notice them; None ends that."""
        self._get, self._put = get or _GRAD.__get__, put or _GRAD.__set__
        self._is_redirected = get is not None
        self._set()

    def want(self, before: Callable[[Tensor], None], wanted: bool) -> None:
        """Call a function with the tensor before each read from now on, or no longer."""
        if wanted != (before in self._wanted_by):
            (self._wanted_by.append if wanted else self._wanted_by.remove)(before)
            self._set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run a block whose reads do not count; blocks nest."""
        self._pauses += 1
        self._set()
        try:
            yield
        finally:
            self._pauses -= 1
            self._set()

    def _set(self) -> None:
        wanted = self._is_redirected or (bool(self._wanted_by) and not self._pauses)
        if wanted == self._watching:
            return
        self._watching = wanted
        if wanted:
            Tensor.grad = self._property  # type: ignore[assignment]
        elif vars(Tensor).get("grad") is self._property:
            del Tensor.grad


GRADIENT_READS = GradientReads()  # of this process
