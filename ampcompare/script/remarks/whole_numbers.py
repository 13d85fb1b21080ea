"""Whole numbers that an arm rounds as it casts the inputs of a model, such as timesteps, positions and counts.

bf16 has all whole numbers up to 256, fp16 up to 2048: a timestep of 999 becomes 1000 in bf16, and may index past a
table. A feature loses digits so, as any number does; a label or a code becomes another one. So what a model makes of
rounded inputs is computed a second time from the numbers as the script gave them, up to where it meets a weight.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ampcompare.base.formatting import format_ordinal
from ampcompare.base.location import user_location
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.script.recording.recorder import RecordedSteps

CALLS = 32  # of models that are looked at: each look waits for the device
MAX_ELEMENTS = 2**16


class RoundedWholeNumberWatch:
    """Notes the inputs whose whole numbers a cast to 16 bits changes.

    Attributes:
        seen: what was noted first; "" for nothing.
    """

    def __init__(self, arm: str, rows: RecordedSteps | None) -> None:
        self.seen = ""
        self._arm = arm
        self._rows = rows
        self._calls = 0
        self._noted: set[str] = set()
        self._rounded: list[Tensor] = []  # inputs of the last call, as the script gave them
        self._has_rounded_codes = False

    def note_rounded_inputs(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        """Look at the inputs of a model that an arm casts to a 16-bit type."""
        self._rounded = []
        if self._calls >= CALLS:
            return
        self._calls += 1
        for name, tensor in _named_input_tensors(module, args, kwargs):
            changed, column = _find_rounded_number_and_column(tensor, dtype)
            place = f"{column}{name} of {type(module).__name__}"
            if changed is not None:
                self._rounded.append(tensor)
            if changed is not None and place not in self._noted:
                self._noted.add(place)
                text = (
                    f"{self._arm} casts the inputs of the model to {dtype_name(dtype)}, which rounds the whole numbers "
                    f"of {place}: {changed[0]:.0f} becomes {changed[1]:.0f}"
                )
                self.seen = self.seen or text
                if self._rows is not None:
                    apart = ", apart from the others," if column else ""
                    self._rows.add_rounding_remark(
                        f"{text}; pass them{apart} as integers, which nothing casts, though arithmetic with 16-bit "
                        f"tensors rounds them too ({user_location()})"
                    )

    def follow_inputs(self) -> AbstractContextManager[object]:
        """Follow what a model makes of the inputs that `note_rounded_inputs` has found rounded, from their cast on."""
        if not self._rounded or self._has_rounded_codes or self._rows is None:
            return nullcontext()
        return _UnroundedReplayMode(self._rounded, self._note_rounded_codes)

    def _note_rounded_codes(self, given: float, read: float) -> None:
        """Note that a number is a label or a code, and has become another one."""
        if not self._has_rounded_codes and self._rows is not None:
            self._has_rounded_codes = True
            self._rows.add_rounded_labels_remark(
                f"{self._arm} trains on other labels or codes than the script gives it: "
                f"{given:.6g} becomes {read:.6g} ({user_location()})"
            )


# They give the same result for the same arguments, write to none, and keep numbers what they are, or count with them.
REPEATABLE = frozenset({
    "__getitem__", "select", "narrow", "split", "chunk", "unbind", "squeeze", "unsqueeze", "flatten",
    "view", "reshape", "permute", "transpose", "t", "contiguous", "expand", "detach", "clone", "float",
    "double", "half", "bfloat16", "to", "type", "type_as", "round", "floor", "abs", "neg", "__neg__", "add",
    "sub", "mul", "div", "__add__", "__sub__", "__mul__", "__truediv__", "__radd__", "__rsub__", "__rmul__",
    "__rtruediv__", "true_divide", "masked_select", "index_select", "gather", "cat", "stack", "long", "int",
    "short", "eq", "ne", "__eq__", "__ne__",
})  # fmt: skip
CASTS = frozenset(("half", "bfloat16", "to", "type", "type_as"))
EQUALITIES = frozenset(("eq", "ne", "__eq__", "__ne__"))
SUBTRACTIONS = frozenset(("sub", "__sub__", "rsub", "__rsub__", "subtract"))
LOSSES_WITH_TARGET = frozenset(
    (
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "gaussian_nll_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "soft_margin_loss"),
    )
)


@dataclass(frozen=True)
class _FollowedTensor:
    """A tensor that is computed of rounded inputs alone.

    Attributes:
        read: as the model has it.
        given: computed of the numbers as the script gave them.
        origin: one number for a tensor and its copies, casts and reshaped views; a part has its own.
        is_of_whole: it is computed of whole numbers that rounding has changed, and of no others.
    """

    read: Tensor
    given: Tensor
    origin: int
    is_of_whole: bool


class _UnroundedReplayMode(TorchFunctionMode):
    """Repeats what is computed of rounded inputs alone on the numbers as they were given.

    Integers, answers to `==` and targets of losses that differ then are labels or codes which rounding has changed. So
    is what a prediction is subtracted from, if no layer gets it.

    Args:
        inputs: as the script gave them; their cast to 16 bits is not repeated, nor is any other.
        note: called with a number as it was given and as the model reads it.
    """

    def __init__(self, inputs: Sequence[Tensor], note: Callable[[float, float], None]) -> None:
        super().__init__()
        self._note = note
        self._followed: dict[int, _FollowedTensor] = {}  # by id; keeps the tensors alive
        self._subtracted: list[_FollowedTensor] = []
        self._fed: set[int] = set()  # origins that went into anything else together with a weight
        for one in inputs:
            self._follow(one, one.detach(), id(one), is_of_whole=False)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for one in self._subtracted:
            if one.is_of_whole and one.origin not in self._fed:
                self._note_first_difference(one.given, one.read)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        if torch.compiler.is_compiling():  # torch 2.6 cannot trace what follows
            return result
        name = getattr(func, "__name__", "")
        given = [one for one in map(self._find_followed, _tensors_in(args, kwargs)) if one is not None]
        results = _tensors_in((result,))
        if not given or not results:
            return result
        if name in LOSSES_WITH_TARGET:
            target = self._find_followed(args[1] if len(args) > 1 else kwargs.get("target"))
            if target is not None and target.is_of_whole:
                self._note_first_difference(target.given, target.read)
        elif any(one.requires_grad for one in results):
            if name in SUBTRACTIONS:
                self._subtracted += given
            else:
                self._fed.update(one.origin for one in given)
        elif name not in REPEATABLE:
            self._fed.update(one.origin for one in given)
        else:
            as_given = [tree_map_only(Tensor, self._tensor_as_given, one) for one in (args, kwargs)]
            repeated = _tensors_in((func(*as_given[0], **as_given[1]),))
            self._compare_results(name, given[0], results, repeated)
        return result

    def _compare_results(
        self, name: str, source: _FollowedTensor, results: list[Tensor], repeated: list[Tensor]
    ) -> None:
        for read, given in zip(results, repeated, strict=False):
            if read.shape != given.shape:
                continue
            if read.is_floating_point():
                given = source.given if read.dtype in HALF_DTYPES and name in CASTS else given
                origin = source.origin if read.numel() == source.read.numel() else id(read)
                self._follow(read, given, origin, is_of_whole=source.is_of_whole)
            elif not source.is_of_whole:
                continue
            elif name not in EQUALITIES:
                self._note_first_difference(given, read)
            elif read.shape == source.read.shape:
                self._note_first_difference(source.given, source.read, where=read != given)

    def _follow(self, read: Tensor, given: Tensor, origin: int, *, is_of_whole: bool) -> None:
        if not is_of_whole and given.numel():
            is_of_whole = bool((given == given.round()).all() and (given != read).any())
        self._followed[id(read)] = _FollowedTensor(read, given, origin, is_of_whole)

    def _find_followed(self, value: Any) -> _FollowedTensor | None:
        return self._followed.get(id(value))

    def _tensor_as_given(self, tensor: Tensor) -> Tensor:
        known = self._find_followed(tensor)
        return tensor if known is None else known.given

    def _note_first_difference(self, given: Tensor, read: Tensor, where: Tensor | None = None) -> None:
        """Note the first number that differs, of those that a mask selects."""
        differs = (given.double() != read.double()) if where is None else where
        if differs.any():
            at = int(differs.flatten().int().argmax())
            self._note(float(given.flatten()[at]), float(read.flatten()[at]))


def _tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> list[Tensor]:
    """Return the tensors among arguments of a function, also those of its lists."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        items = value if isinstance(value, list | tuple) else (value,)
        found += [one for one in items if isinstance(one, Tensor)]
    return found


def _named_input_tensors(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the inputs of a module with their names."""
    try:
        # of the class: an arm has put a function in the place of the model's own
        names = list(inspect.signature(type(module).forward).parameters)[1:]
    except (AttributeError, TypeError, ValueError):  # the first of a class of TorchScript
        names = []
    for at, value in enumerate(args):
        if isinstance(value, Tensor):
            yield names[at] if at < len(names) else f"the {format_ordinal(at + 1)} input", value
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            yield name, value


def _find_rounded_number_and_column(
    tensor: Tensor, dtype: torch.dtype
) -> tuple[tuple[float, float] | None, str]:
    """Return a whole number of a tensor and what rounding makes of it, or None, and "column N of " in front of a name.

    All numbers of the tensor are whole, or all of a column, as of labels that travel with the features.
    """
    is_wide = tensor.dtype in (torch.float32, torch.float64)
    if not is_wide or not 0 < tensor.numel() <= MAX_ELEMENTS or tensor.requires_grad:
        return None, ""
    values = tensor.detach()
    apart, whole = values.to(dtype).to(values.dtype) != values, values == values.round()
    column = ""
    if values.dim() > 1 and not bool(whole.all()):
        rounded = whole.flatten(0, -2).all(0) & apart.flatten(0, -2).any(0)
        number_of_column = int(rounded.double().argmax())
        column = f"column {number_of_column} of "
        values, apart, whole = (one[..., number_of_column] for one in (values, apart, whole))
    if not bool(apart.any()) or not bool(whole.all()):
        return None, ""
    number = values[apart].abs().max()
    return (float(number), float(number.to(dtype))), column
