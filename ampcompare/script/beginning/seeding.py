"""Record where a script seeds its generators, and add an offset for the seed of the cell to what it seeds them with.

Global generators are those of torch, NumPy and Python that draw where no other is given: weights, dropout, shuffled
batches, augmentation. A sampler of a library seeds a generator of its own, by a seed that it was given or that it has
by default: it counts as global. What the script seeds apart from these stays as written, unless all are shifted.

A seed that the script reads back, as by `torch.initial_seed()`, and seeds with again is not shifted twice.
"""

import functools
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler

from ampcompare.base.location import PACKAGE, Location, is_installed_file, is_users_or_installed_file
from ampcompare.base.patches import Layer, Subscriptions, calling_frame
from ampcompare.script.beginning.seed_shift import (
    NUMPY_SEEDS,
    shifted_numpy_seed,
    shifted_python_seed,
    shifted_torch_seed,
)

MAX_CALLS = 50  # that are recorded
MAX_TEXT = 40
MAX_SEEDS = 10_000  # of torch's generator that are remembered
IMPORTS = "<frozen importlib"
CUDA = ("manual_seed", "manual_seed_all")
OTHER_DEVICES = ("xpu", "mps", "mtia")
BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
Shift = Callable[[Any, int], Any]


class SeedFollower:
    """What the script of this process seeds.

    Args:
        offset: what is added; 0 leaves each seed as written.
        shifts: which generators it is added to; None: it is not, and only the global ones are recorded.
    """

    def __init__(self, offset: int = 0, shifts: Literal["global", "all"] | None = None) -> None:
        self._offset = offset if shifts is not None else 0
        self._shifts = shifts
        self._calls: dict[tuple[str, str], dict[str, Any]] = {}
        self._own = threading.local()  # whether a call of torch that calls another one has begun
        self._used: set[int] = set()  # numbers that have the offset
        self._known: set[int] = set()  # seeds that torch's generator was given by functions that are followed
        self._events = Subscriptions(Layer.RECORD)

    def end(self) -> None:
        """Put the functions that seed back."""
        self._events.end()

    @property
    def seed_calls(self) -> list[dict[str, Any]]:
        """The lines that seed, in the order of their first call."""
        self._record_direct_generator_seeding()
        return list(self._calls.values())

    def install(self) -> None:
        """Follow the functions that seed from now on."""
        wrap = self._events.wrap
        self._note_current_torch_seed()
        self._follow_torch_seeds()
        wrap(np.random, "seed", self._make_call_with_shifted_seed("numpy.random.seed", shifted_numpy_seed))
        wrap(random, "seed", self._make_call_with_shifted_seed("random.seed", shifted_python_seed))
        # Under the names that scripts and trainers use; torch restores what it has saved under others.
        for owner, name in ((torch, "set_rng_state"), (np.random, "set_state"), (random, "setstate")):
            wrap(
                owner,
                name,
                functools.partial(self._note_generator_state_set, "state", f"{owner.__name__}.{name}"),
            )
        if self._shifts is None:
            return
        wrap(random.Random, "seed", self._shift_new_python_generator)
        wrap(np.random, "default_rng", self._shift_new_default_rng)
        self._follow_generator_classes()
        for module, name in ((torch, "load"), (nn.Module, "load_state_dict")):
            wrap(
                module,
                name,
                functools.partial(self._note_generator_state_set, "load", f"{module.__name__}.{name}"),
            )

    def _follow_torch_seeds(self) -> None:
        for owner, name, told in (
            (torch.random, "manual_seed", "torch.manual_seed"),
            (torch.random, "seed", "torch.seed"),
            *((torch.cuda.random, name, f"torch.cuda.{name}") for name in CUDA),
        ):
            found = vars(owner)[name]
            around = (
                self._seed_torch_shifted_from_entropy
                if name == "seed"
                else self._make_call_with_shifted_seed(told, shifted_torch_seed)
            )
            self._events.wrap(owner, name, around)
            # The same object under both names: a process that is spawned gets functions by their name.
            parent = torch if owner is torch.random else torch.cuda
            if vars(parent).get(name) is found:
                self._events.put_innermost(parent, name, vars(owner)[name])
            else:
                self._events.wrap(parent, name, around)
        for device in OTHER_DEVICES:
            module = getattr(torch, device, None)
            for name in CUDA:
                if hasattr(module, name):
                    self._events.wrap(
                        module,
                        name,
                        self._make_call_with_shifted_seed(f"torch.{device}.{name}", shifted_torch_seed),
                    )

    def _make_call_with_shifted_seed(
        self, function: str, shift: Shift, kind: str = "global"
    ) -> Callable[..., Any]:
        def around(inner: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._own, "busy", False):
                return inner(*args, **kwargs)
            name = next((name for name in ("seed", "a") if name in kwargs), None)
            if name is not None:
                seed, rest = kwargs.pop(name), args
            else:
                seed, rest = (args[0] if args else None), args[1:]
            return self._seed_generator_shifted(
                lambda number: inner(number, *rest, **kwargs), seed, function, shift, kind, calling_frame()
            )

        return around

    def _seed_torch_shifted_from_entropy(self, inner: Any) -> Any:
        return self._seed_generator_shifted(
            lambda _: inner(), None, "torch.seed", shifted_torch_seed, "global", calling_frame()
        )

    def _seed_generator_shifted(
        self,
        seed_with: Callable[[Any], Any],
        seed: Any,
        function: str,
        shift: Shift,
        kind: str,
        caller: FrameType,
    ) -> Any:
        """Seed a generator as the script does, which raises what it would raise, and again with the offset."""
        if caller.f_code.co_filename.startswith(PACKAGE):
            try:
                return seed_with(seed)
            finally:
                self._note_current_torch_seed()
        self._record_direct_generator_seeding()
        self._own.busy = True
        try:
            result = seed_with(seed)
            used = seed
            if self._offset and seed is not None and (kind == "global" or self._shifts == "all"):
                used = self._seed_with_offset(seed, shift)
                if used is not seed:
                    result = seed_with(used)
        finally:
            self._own.busy = False
            self._note_current_torch_seed()
        if seed is not None or kind == "global":
            self._record_seed_call(function, kind, seed, used)
        return result

    def _seed_with_offset(self, seed: Any, shift: Shift) -> Any:
        """Return a seed with the offset; itself where it has it already, or where it is another object that seeds."""
        if not isinstance(seed, str | bytes | bytearray) and np.ndim(seed) == 0 and int(seed) in self._used:
            return seed
        used = shift(seed, self._offset)
        if isinstance(used, int):
            self._used |= {used, used % NUMPY_SEEDS}
        return used

    def _record_seed_call(self, function: str, kind: str, seed: Any = None, used: Any = None) -> None:
        place = _running_location_text(skips_imports=kind == "own")
        if not place:
            return
        call = self._calls.get((place, function))
        if call is not None:
            call["calls"] += 1
        elif len(self._calls) < MAX_CALLS:
            row = {"place": place, "function": function, "kind": kind, "calls": 1}
            row |= {} if seed is None else {"seed": _seed_text(seed)}
            row |= {} if used is seed else {"used": _seed_text(used)}
            self._calls[place, function] = row

    def _note_current_torch_seed(self) -> None:
        if len(self._known) < MAX_SEEDS:
            self._known.add(torch.default_generator.initial_seed())

    def _record_direct_generator_seeding(self) -> None:
        """Record that a method of torch's generator itself, which cannot be followed, has seeded it."""
        seed = torch.default_generator.initial_seed()
        if seed in self._known or len(self._known) >= MAX_SEEDS:
            return
        self._known.add(seed)
        function = "torch.default_generator.manual_seed"
        self._calls["", function] = {"place": "", "function": function, "kind": "state", "calls": 1}

    def _note_generator_state_set(
        self, kind: str, function: str, inner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        caller = calling_frame()
        # A library sets a state that it has read itself, as around a check; transformers' does from a checkpoint.
        is_own = not _is_of_library(caller) or caller.f_code.co_name == "_load_rng_state"
        if is_own or (kind == "load" and is_users_or_installed_file(caller.f_code.co_filename)):
            self._record_seed_call(function, kind)
        if kind != "state":
            return inner(*args, **kwargs)
        self._record_direct_generator_seeding()
        try:
            return inner(*args, **kwargs)
        finally:
            self._note_current_torch_seed()

    def _shift_new_python_generator(self, inner: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        around = self._make_call_with_shifted_seed("random.Random", shifted_python_seed, "own")
        return around(functools.partial(inner, generator), *args, **kwargs)

    def _shift_new_default_rng(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        seed = kwargs.get("seed", args[0] if args else None)
        if not _is_sequence_of_numbers(seed):  # a generator, say
            return inner(*args, **kwargs)
        shift = functools.partial(shifted_numpy_seed, seeds=None)
        return self._make_call_with_shifted_seed("numpy.random.default_rng", shift, "own")(
            inner, *args, **kwargs
        )

    def _follow_generator_classes(self) -> None:
        """Let generators that are made from now on be seeded with the offset; what is made stays of its type."""
        self._events.put_innermost(torch, "Generator", self._shifted_torch_generator_class(torch.Generator))
        for name, seeds in (
            ("RandomState", NUMPY_SEEDS),
            *dict.fromkeys(("SeedSequence", *BIT_GENERATORS)).items(),
        ):
            made = self._shifted_numpy_class(getattr(np.random, name), f"numpy.random.{name}", seeds)
            self._events.put_innermost(np.random, name, made)

    def _shifted_torch_generator_class(self, make: Any) -> Any:
        """Return the class in the place of `torch.Generator`, or of what stands there and makes one by `make`."""
        base: Any = torch._C.Generator

        def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
            return base.__new__(kind, make(*args, **kwargs).device)

        def manual_seed(generator: Any, seed: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__") == torch.utils.data.sampler.__name__:
                return base.manual_seed(generator, seed)  # drawn from a generator that the seed has reached
            is_samplers = _is_of_library(caller) and isinstance(caller.f_locals.get("self"), Sampler)
            kind, function = ("global", "sampler") if is_samplers else ("own", "torch.Generator")
            seed_with = functools.partial(base.manual_seed, generator)
            return self._seed_generator_shifted(seed_with, seed, function, shifted_torch_seed, kind, caller)

        # torch pickles a generator as one of `torch.Generator`.
        return _make_replacement_class(base, __module__="torch", __new__=new, manual_seed=manual_seed)

    def _shifted_numpy_class(self, base: Any, function: str, seeds: int | None) -> Any:
        first = "entropy" if function.endswith("SeedSequence") else "seed"

        def make(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if kind is not replacement:  # a class of the script that inherits it
                return base.__new__(kind, *args, **kwargs)
            seed = kwargs.pop(first, args[0] if args else None)
            if seed is not None and not _is_sequence_of_numbers(seed):
                return base(seed, *args[1:], **kwargs)
            shift = functools.partial(shifted_numpy_seed, seeds=seeds)
            caller = sys._getframe(1)
            return self._seed_generator_shifted(
                lambda number: base(number, *args[1:], **kwargs), seed, function, shift, "own", caller
            )

        replacement = _make_replacement_class(base, __new__=make)
        return replacement


def _is_of_library(frame: FrameType) -> bool:
    """Return whether a frame is of a library, torch's among them."""
    file = frame.f_code.co_filename
    return not is_users_or_installed_file(file) or is_installed_file(file)


def _is_sequence_of_numbers(seed: Any) -> bool:
    return isinstance(seed, int | np.integer | np.ndarray) or (
        isinstance(seed, list | tuple) and all(isinstance(word, int | np.integer) for word in seed)
    )


def _make_replacement_class(base: Any, **members: Any) -> Any:
    """Return a class in the place of another one, whose instances count as its own wherever they were made."""

    def is_instance(cls: Any, value: Any) -> bool:
        return isinstance(value, base) if cls is made else type.__instancecheck__(cls, value)

    def is_subclass(cls: Any, other: Any) -> bool:
        return issubclass(other, base) if cls is made else type.__subclasscheck__(cls, other)

    kind = type(base)
    meta: Any = type(
        kind.__name__, (kind,), {"__instancecheck__": is_instance, "__subclasscheck__": is_subclass}
    )
    made = meta(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **members})
    return made


def _running_location_text(*, skips_imports: bool) -> str:
    """Return the script's line that is running; of an installed package where there is no other; "" without any.

    Args:
        skips_imports: "" too for what a package does while it is imported.
    """
    frame: FrameType | None = sys._getframe(1)
    first = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if skips_imports and file.startswith(IMPORTS):
            return ""
        if is_users_or_installed_file(file) and not file.startswith("<"):
            first = first or str(Location(file, frame.f_lineno))
            if not is_installed_file(file):
                return str(Location(file, frame.f_lineno))
        frame = frame.f_back
    return first


def _seed_text(seed: Any) -> str:
    text = str(seed.item() if isinstance(seed, torch.Tensor) and seed.numel() == 1 else seed)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
