"""The registry of patches: the functions of torch and Apex that every script passes, each replaced once.

A subscriber wraps a point by `around(inner, *args, **kwargs)`, which calls `inner` or does something in its place.
Several subscribers of one point lie around each other in the order of their layers, whichever came first. A point
without subscribers is torch's own function object. What a subscriber raises reaches the script. A module whose class
has a `__call__` of its own passes `PatchPoints.FORWARD` too, once `follow_modules_with_own_call` has found the class.
"""

import enum
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import autocast_mode
from torch.jit import _builtins
from torch.nn.utils import stateless
from torch.optim import Optimizer

Around = Callable[..., Any]
_GRAD: Any = vars(torch._C.TensorBase)["grad"]


class Layer(enum.IntEnum):
    """Who subscribes, innermost first."""

    STAND_IN = 0  # what an arm does in the place of torch or Apex
    RECORD = 1
    GUARDS = 2
    WATCH = 3


class PatchPoints:
    """Functions of torch that are replaced, each by the module or class that has the function, and its name there."""

    FORWARD = (nn.Module, "__call__")
    FUNCTIONAL_CALL = (stateless, "_functional_call")  # torch.func.functional_call calls it
    BACKWARD = (torch.autograd, "backward")  # Tensor.backward calls it
    GRAD = (torch.autograd, "grad")
    MAKE_OPTIMIZER = (Optimizer, "__init__")
    ADD_PARAM_GROUP = (Optimizer, "add_param_group")
    MAKE_AUTOCAST = (autocast_mode.autocast, "__init__")
    ENTER_AUTOCAST = (autocast_mode.autocast, "__enter__")
    LEAVE_AUTOCAST = (autocast_mode.autocast, "__exit__")
    MAKE_SCALER = (torch.amp.GradScaler, "__init__")


class _ReplacedFunction:
    """One function that is replaced at present."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._is_own = name in vars(owner)
        self._original: Any = getattr(owner, name, None)
        self._before = self._value = vars(owner).get(name)
        self._inner: Any = None  # what the innermost subscriber calls
        self._chain: Any = None  # what calls them all
        self._replacement: Any = None
        self.puts: list[Any] = []
        self.arounds: list[tuple[Layer, Around]] = []
        self.others: list[_ReplacedFunction] = []  # with the same subscribers

    def install_or_restore(self) -> None:
        """Put in place what the present subscribers need; code that has wrapped it since calls them still."""
        self._inner = self._chain = self.puts[-1] if self.puts else self._original
        for _, around in sorted(self.arounds, key=lambda one: one[0]):
            self._chain = functools.partial(around, self._chain)
        for other in self.others:
            other.install_or_restore()
        if not self.arounds and not self.puts:
            _places.pop((id(self._owner), self._name), None)
        if vars(self._owner).get(self._name) is not self._value:
            return
        if self.arounds or self.puts or self._is_own:
            if self.arounds:
                self._value = self._replacement_with_subscribers()
            else:
                self._value = self.puts[-1] if self.puts else self._before
            setattr(self._owner, self._name, self._value)
        elif self._name in vars(self._owner):
            self._value = None
            delattr(self._owner, self._name)

    def _replacement_with_subscribers(self) -> Any:
        if self._replacement is None:
            compiler, tracing = torch.compiler, torch._C._get_tracing_state

            @functools.wraps(self._original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                # `is_compiling` in one call: torch.compile, torch.export, torch.jit.trace must not trace subscribers.
                # dynamo knows its own answer; it would guard the flag, which is another one when the code runs.
                if compiler.is_dynamo_compiling() or compiler._is_compiling_flag or tracing() is not None:
                    return self._inner(*args, **kwargs)
                return self._chain(*args, **kwargs)

            self._replacement = replacement
            register_as_jit_builtin(self._original, replacement)
        return self._replacement


def register_as_jit_builtin(original: Any, replacement: Any) -> None:
    """Let `torch.jit.script` compile a call of `replacement` as the operator that `original` is.

    It knows functions of C++ by their id, and reads the source of any other.
    """
    operator = _builtins._find_builtin(original)
    if operator is not None:
        _builtins._register_builtin(replacement, operator)


_places: dict[tuple[int, str], _ReplacedFunction] = {}  # of this process


def _replaced_function_at(owner: Any, name: str) -> _ReplacedFunction:
    return _places.setdefault((id(owner), name), _ReplacedFunction(owner, name))


def follow_modules_with_own_call() -> None:
    """Let the calls of modules whose classes have a `__call__` of their own pass `PatchPoints.FORWARD` from now on."""
    forward = _replaced_function_at(*PatchPoints.FORWARD)
    waiting = nn.Module.__subclasses__()
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        has_own = "__call__" in vars(kind) and not kind.__module__.startswith("torch.")
        if has_own and (id(kind), "__call__") not in _places and forward.arounds:
            place = _replaced_function_at(kind, "__call__")
            place.arounds = forward.arounds
            forward.others.append(place)
            place.install_or_restore()


class Subscriptions:
    """What one subscriber has replaced, and its end.

    Attributes:
        active: it has not ended.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._undo: list[Callable[[], None]] = []
        self.active = True

    def wrap(self, owner: Any, name: str, around: Around) -> None:
        """Let calls of `owner.name` go to `around(inner, *args, **kwargs)`; those that torch traces do not.

        Args:
            owner: a module or class of torch, or of the user.
            name: of the function or method.
            around: gets the next function inside of it first, then the arguments of the call, and returns what the
                caller gets.
        """
        place = _replaced_function_at(owner, name)
        self._add_subscriber(place, place.arounds, (self._layer, around))

    def put_innermost(self, owner: Any, name: str, value: Any) -> None:
        """Set what the subscribers of `owner.name` lie around: a function, or any other attribute.

        Args:
            owner: a module, class or object.
            name: of the attribute.
            value: what stands there until `end`; of several subscribers the last one counts.
        """
        place = _replaced_function_at(owner, name)
        self._add_subscriber(place, place.puts, value)

    def _add_subscriber(self, place: _ReplacedFunction, entries: list[Any], entry: Any) -> None:
        def remove_subscriber() -> None:
            entries.remove(entry)
            place.install_or_restore()

        entries.append(entry)
        place.install_or_restore()
        self._undo.append(remove_subscriber)

    def call_at_end(self, function: Callable[[], None]) -> None:
        """Call a function at the end, such as `remove` of a hook of torch's own."""
        self._undo.append(function)

    def end(self) -> None:
        """Undo everything, the last one first."""
        self.active = False
        while self._undo:
            self._undo.pop()()


def calling_frame() -> FrameType:
    """Return the frame that called the replaced function whose subscriber calls this."""
    frame: Any = sys._getframe(1)
    while frame.f_globals is not globals() or frame.f_code.co_name != "replacement":
        frame = frame.f_back
    caller: FrameType = frame.f_back
    return caller


def has_stand_in(owner: Any, name: str) -> bool:
    """Return whether an arm stands behind `owner.name`.

    Args:
        owner: the class or module, as in `PatchPoints`.
        name: of its function.
    """
    place = _places.get((id(owner), name))
    return place is not None and (
        bool(place.puts) or any(layer is Layer.STAND_IN for layer, _ in place.arounds)
    )


@contextmanager
def without_subscribers(owner: Any, name: str) -> Iterator[None]:
    """Run a block in which a function is what it is without subscribers.

    Args:
        owner: a module or a class that has the function.
        name: of the function.
    """
    place = _replaced_function_at(owner, name)
    arounds, puts = place.arounds[:], place.puts[:]
    place.arounds.clear()
    place.puts.clear()
    place.install_or_restore()
    _places[id(owner), name] = place
    try:
        yield
    finally:
        place.arounds += arounds
        place.puts += puts
        place.install_or_restore()


class GradientAccessEvents:
    """Reads and writes of `tensor.grad`, which an arm waits for to unscale gradients, and where they lead.

    Watching costs two assignments; while nobody wants it, `tensor.grad` is torch's own. `zero_grad` is no reader.
    """

    def __init__(self) -> None:
        self._wanted_by: list[Callable[[Tensor], None]] = []
        self._pauses = 0
        self._watching = False
        self._get: Callable[[Tensor], Any] = _GRAD.__get__
        self._put: Callable[[Tensor, Any], None] = _GRAD.__set__
        self._is_redirected = False
        self._property = property(self._read_gradient, self._write_gradient, _GRAD.__delete__)

    def _read_gradient(self, tensor: Any) -> Any:
        self._notify_of_read(tensor)
        return self._get(tensor)

    def _write_gradient(self, tensor: Any, grad: Any) -> None:
        if grad is not None:  # else the others are cleared too, or stay as they are
            self._notify_of_read(tensor)
        self._put(tensor, grad)

    def _notify_of_read(self, tensor: Any) -> None:
        if self._wanted_by and not self._pauses and sys._getframe(2).f_code.co_name != "zero_grad":
            for before in tuple(self._wanted_by):
                before(tensor)

    def redirect_gradient_reads(
        self, get: Callable[[Tensor], Any] | None, put: Callable[[Tensor, Any], None] | None
    ) -> None:
        """Let reads and assignments go elsewhere, also while nobody wants to notice them; None ends that."""
        self._get, self._put = get or _GRAD.__get__, put or _GRAD.__set__
        self._is_redirected = get is not None
        self._install_or_remove_property()

    def call_before_reads(self, callback: Callable[[Tensor], None], is_wanted: bool) -> None:
        """Call a function with the tensor before each read from now on, or no longer."""
        if is_wanted != (callback in self._wanted_by):
            (self._wanted_by.append if is_wanted else self._wanted_by.remove)(callback)
            self._install_or_remove_property()

    @contextmanager
    def pause_notices_of_reads(self) -> Iterator[None]:
        """Run a block whose reads do not count; blocks nest."""
        self._pauses += 1
        self._install_or_remove_property()
        try:
            yield
        finally:
            self._pauses -= 1
            self._install_or_remove_property()

    def _install_or_remove_property(self) -> None:
        wanted = self._is_redirected or (bool(self._wanted_by) and not self._pauses)
        if wanted == self._watching:
            return
        self._watching = wanted
        if wanted:
            Tensor.grad = self._property  # type: ignore[assignment]
        elif vars(Tensor).get("grad") is self._property:
            del Tensor.grad


GRADIENT_READS = GradientAccessEvents()  # of this process
