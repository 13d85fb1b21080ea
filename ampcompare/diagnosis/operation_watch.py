"""Watches operations as torch dispatches them and keeps numbers only: ranges, errors against a wide run, and types."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.diagnosis.fp32_reference import Fp32Reference, tensors_written_by
from ampcompare.diagnosis.ranges import (
    CHUNK,
    range_counts_of,
    range_counts_without_lost,
    total_nonfinite_and_lost_of,
)
from ampcompare.diagnosis.sites import RunningModulesTracker
from ampcompare.results.records.diagnosis import Phase

MIN_SQUARE = 1e-30  # of sums in fp32: what is below has lost digits


def error_norms_of(result: Tensor, wide_result: Tensor, own_result: Tensor | None) -> Any:
    """Return norms of the difference, of the wide result and of the own difference, in the wide type; 0 without one.

    (3,) floats for tensors on the host; a float64 tensor on another device, unread.
    """
    wide, values = wide_result.detach().reshape(-1), result.detach().reshape(-1)
    alone = (
        None if own_result is None or own_result.numel() != len(values) else own_result.detach().reshape(-1)
    )
    if values.device.type != "cpu":
        return _norms_on_device(values.to(wide.dtype), wide, alone)
    if len(values) <= CHUNK:
        return tuple(map(math.sqrt, _square_norms_on_host(values, wide, alone)))
    parts = values.split(CHUNK)
    alones = [None] * len(parts) if alone is None else alone.split(CHUNK)
    squares = map(_square_norms_on_host, parts, wide.split(CHUNK), alones)
    return tuple(math.sqrt(sum(column)) for column in zip(*squares, strict=True))


def _square_norms_on_host(values: Tensor, wide: Tensor, alone: Tensor | None) -> tuple[float, float, float]:
    """Return the squared norms of `error_norms_of` for vectors on the host."""
    values = values.to(wide.dtype, copy=True)
    apart = 0.0 if alone is None else _square_norm_of(values - alone)
    difference = _square_norm_of(values.sub_(wide))  # in place, which takes no memory
    return difference, _square_norm_of(wide), apart


def _square_norm_of(part: Tensor) -> float:
    array = part.numpy()
    with np.errstate(all="ignore"):
        total = float(array.dot(array))
    if part.dtype is torch.float64 or MIN_SQUARE < total < math.inf:
        return total
    double = part.double()  # too large or too small for squares in fp32
    return float(torch.dot(double, double))


def _norms_on_device(values: Tensor, wide: Tensor, own_result: Tensor | None) -> Tensor:
    norm = torch.ops.aten.linalg_vector_norm.default
    alone = values.new_zeros(()) if own_result is None else norm(values - own_result)
    return torch.stack([norm(values - wide), norm(wide), alone]).double()


# They make constants or move values: an infinity that they write was asked for.
CONSTANT = frozenset(
    (
        *("full", "full_like", "fill", "masked_fill", "new_full"),
        *("scalar_tensor", "lift_fresh", "zeros", "zeros_like"),
        *("new_zeros", "ones", "ones_like", "where", "tril", "triu"),
    )
)
# They use a number of the code as an element of the result's type would be used.
LIMITS = frozenset(("clamp", "clamp_min", "clamp_max"))
WITH_NUMBER = LIMITS | {"add", "sub", "rsub", "mul"}
FP16_ZERO, FP16_LARGEST = 2.0**-25, 65504.0  # what is not above the first is rounded to zero
MAX_UNSEEN = 2**20  # elements of a tensor that is followed before the first step
OWN_RUNS = 2  # of a place: what an operation itself rounds hardly changes from step to step
# Their backward pass reads a workspace whose layout depends on the type: with one of another type it corrupts memory.
OPAQUE = ("mkldnn_rnn", "_cudnn_rnn", "miopen_rnn", "cudnn_batch_norm", "miopen_batch_norm")
# They make integers or truth values of numbers, some by an order in which equal numbers have no place of their own.
COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isin", "searchsorted", "bucketize"))
ORDERING = frozenset(("argmax", "argmin", "max", "min", "sort", "topk"))
CHOOSING = COMPARING | ORDERING | {"_to_copy"}
# They make infinities or NaN of a zero: of any argument, or of the second one.
POLES_AT_ZERO = frozenset(
    ("digamma", "lgamma", "log", "log10", "log2", "logit", "polygamma", "reciprocal", "rsqrt")
)
ZERO_DIVISORS = frozenset(
    ("binary_cross_entropy_backward", "div", "floor_divide", "fmod", "remainder", "xlogy")
)
# They give Python a number, or as many as there are different ones.
READING = frozenset(("_local_scalar_dense", "_unique2", "unique_consecutive", "unique_dim"))
MIN_READ, MAX_WHOLE = 2.0, 2.0**24  # fp32 has all whole numbers up to the second
MIN_WRONG_READ = 0.01
COLLECTIVE = ("c10d", "c10d_functional")  # other ranks would wait for a repeated one
UNSET = ("empty", "new_empty")
RANDOM = torch.Tag.nondeterministic_seeded
# They draw numbers of which hardly any is zero or an end of their range in fp32, and some in a thousand are in 16 bits.
UNIFORM = frozenset(("uniform", "rand", "rand_like"))
Key = tuple[str, str, str, Phase]  # module, operation, file:line, phase


@contextmanager
def computing_without_modes() -> Iterator[None]:
    """Compute without any mode, cast or gradient: nothing of it is emulated, watched or recorded."""
    with torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), torch._C._DisableTorchDispatch():
        with torch.no_grad():
            yield


@dataclass(frozen=True, slots=True)
class DiscreteChoice:
    """Integers or truth values that an operation has made of numbers.

    Attributes:
        share: of them that are others in the wide run; of truth values in several dimensions that of rows with one.
        is_whole: whether all numbers are whole in the wide run, as positions and counts are.
        count: of these integers or truth values.
    """

    operation: str
    share: float
    is_whole: bool
    count: int


@dataclass(slots=True)
class OperationResult:
    """One floating result of an operation, in the order of a step."""

    key: Key
    dtype: torch.dtype
    row: Any  # counts of `ranges.range_row`
    errors: Any  # of `error_norms_of`; None without a wide run
    sources: tuple[int, ...]  # places in the step's list of the results that went in
    # values were asked for rather than computed, or are gradients that no step has used
    constant: bool = False
    wide: Any = None  # counts of the wide result, for gradients
    version: tuple[int, int] = (-1, -1)  # of the tensor when it was counted, with its number of elements
    # places of the results from which an index or a mask was computed that went in
    decided: tuple[int, ...] = ()
    number: float = 0.0  # that it adds, takes as a limit or multiplies by and that fp16 lacks; 0 for none
    limit: float = 0.0  # that it takes and that its type rounds to 1 or -1; 0 for none
    # what was decided by it: the integers or truth values of which the most are others in the wide run
    choice: "DiscreteChoice | None" = None
    buffer: str = ""  # that it reads and that the arm has cast
    # places of the results that went in and of which a zero makes it infinite or NaN, as a divisor does
    poles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundedRead:
    """A whole number, or how many there are, that Python reads and that rounding has changed.

    Attributes:
        at: place of the result that was rounded, among the events of the step.
        where: file:line of the read.
        seen, exact: what the arm and the wide run have there, in words.
    """

    at: int
    where: str
    seen: str
    exact: str


@dataclass
class WatchedStep:
    """What one step showed, drained from the device."""

    events: list[OperationResult] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)  # places among the events
    reads: list[RoundedRead] = field(default_factory=list)

    @property
    def index_of_loss(self) -> int | None:
        """The place of the first loss that is not finite, else of the last one; None without any."""
        broken = (at for at in self.losses if total_nonfinite_and_lost_of(self.events[at].row)[1])
        return next(broken, self.losses[-1] if self.losses else None)


class OperationWatch(TorchDispatchMode):
    """Counts the results of each operation while it is entered and not paused.

    Attributes:
        follows_unseen: while it is paused it keeps the wide results, so that what was cast then, as a table before the
            first step, has one.
    """

    def __init__(self, sites: RunningModulesTracker, reference: Fp32Reference | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites = sites
        self.reference = reference
        self.is_paused = self.follows_unseen = False
        self._step = WatchedStep()
        self._producer: dict[int, int] = {}  # storage of a floating result -> its place in the step's list
        # storage of whole numbers or booleans -> places behind them
        self._decided: dict[int, frozenset[int]] = {}
        self._own_runs: Counter[Key] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled under a watch, and the guard against it costs time at each operation
        return False

    def note_operation_of_loss(self, loss: Tensor) -> None:
        """Note which operation of this step has produced a loss."""
        place = self._producer.get(_storage_address(loss))
        if place is not None:
            self._step.losses.append(place)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let what runs inside pass unseen, without a call of this mode if no other one was entered behind it."""
        before, self.is_paused = self.is_paused, True
        entered = torch._C._len_torch_dispatch_stack()
        is_last = entered > 0 and torch._C._get_dispatch_stack_at(entered - 1) is self
        try:
            with _pop_mode_temporarily() if is_last else nullcontext():
                yield
        finally:
            self.is_paused = before

    def drain(self) -> WatchedStep:
        """Return what was seen since the last call, with its numbers read from the device at once."""
        step, self._step = self._step, WatchedStep()
        self._producer.clear()
        self._decided.clear()
        with computing_without_modes():
            if step.events:
                for name in ("row", "wide", "errors"):
                    _replace_event_field_by_numbers(step.events, name)
        return step

    def add_weights_or_gradients(
        self, tensors: Iterable[tuple[Key, Tensor]], unused: Container[Key] = ()
    ) -> None:
        """Count weights, or gradients; one that no operation of this step made, or no step uses, is constant."""
        with computing_without_modes():
            for key, tensor in tensors:
                self._add_weight_or_gradient_event(key, tensor, key in unused)

    def _add_weight_or_gradient_event(self, key: Key, tensor: Tensor, is_unused: bool) -> None:
        exact = None if self.reference is None else self.reference.wide_tensor_of(tensor)
        source = self._producer.get(_storage_address(tensor))
        known = self._find_event_that_counted(tensor)
        if key[3] == "weight":
            self._producer[_storage_address(tensor)] = len(self._step.events)
        row = (
            known.row if known is not None and known.dtype is tensor.dtype else range_counts_of(tensor, exact)
        )
        errors = None if exact is None else error_norms_of(tensor, exact, None)
        sources = () if source is None else (source,)
        wide_row = range_counts_of(exact) if exact is not None and key[3] == "gradient" else None
        constant = is_unused or (key[3] == "gradient" and source is None)
        self._step.events.append(OperationResult(key, tensor.dtype, row, errors, sources, constant, wide_row))

    def _find_event_that_counted(self, tensor: Tensor) -> OperationResult | None:
        """Return the event that has counted a tensor, if all of it was and nothing was written to it since."""
        place = self._producer.get(_storage_address(tensor))
        event = None if place is None else self._step.events[place]
        return event if event is not None and event.version == (tensor._version, tensor.numel()) else None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.is_paused:
            return (
                self._run_and_keep_wide(func, tuple(args), kwargs)
                if self.follows_unseen
                else func(*args, **kwargs)
            )
        module, where, phase = self.sites.module_location_and_phase()
        if func.is_view:
            return func(*args, **kwargs)
        tensors = _tensors_in(args) + _tensors_in(kwargs) if kwargs else _tensors_in(args)
        given = [value for value in tensors if value.is_floating_point()]
        decided = (
            self._indices_of_results_behind_choices(tensors) if len(given) < len(tensors) else frozenset()
        )
        key = (module, _operation_name_without_overload(func), where, phase)
        exact = None
        own = None
        written = []
        if self.reference is not None:
            # As `computing_without_modes`, at less cost: nothing records gradients here anyway.
            with (
                torch._C.DisableTorchFunction(),
                torch._C._DisableAutocast(),
                torch._C._DisableTorchDispatch(),
            ):
                written = tensors_written_by(func, tuple(args), kwargs)
                exact, own = self._results_of_wide_run_and_of_arm_inputs(
                    func, key, tuple(args), kwargs, given, written
                )
        output = func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), torch._C._DisableTorchDispatch():
            if self.reference is not None and key[1] in UNIFORM and output.dtype in HALF_DTYPES:
                exact = uniform_numbers_off_ends(args, output, self.reference.dtype)
                self.reference.keep_wide_tensor(output, exact)
            numbers = [one for one in args if type(one) is float] if key[1] in WITH_NUMBER else []
            if key[1] in READING:
                self._note_host_read(tensors[0], output, exact, decided, where)
            if exact is not None and key[1] in CHOOSING:
                self._note_choice(key[1], given, output, exact, _sorting_dim_of_operation(func, args, kwargs))
            first = len(self._step.events)
            poles = self._indices_of_results_in(_tensors_with_pole_at_zero(key[1], args))
            self._record_results(
                key, given, output, exact, own, {id(one) for one in written}, decided, numbers
            )
            for event in self._step.events[first:] if poles else ():
                event.poles = poles
        return output

    def _run_and_keep_wide(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation and keep no more than its wide results."""
        reference = self.reference
        given = [value for value in _tensors_in(args) + _tensors_in(kwargs) if value.is_floating_point()]
        if (
            reference is None
            or func.is_view
            or not (kwargs.get("dtype") in HALF_DTYPES or reference.concerns_tensors(given))
        ):
            return func(*args, **kwargs)
        with computing_without_modes():
            written = tensors_written_by(func, args, kwargs)
            exact = None
            if all(tensor.numel() <= MAX_UNSEEN for tensor in given):
                exact, _ = self._results_of_wide_run_and_of_arm_inputs(
                    func,
                    ("", _operation_name_without_overload(func), "", "forward"),
                    args,
                    kwargs,
                    given,
                    written,
                )
            if exact is None:
                reference.forget_wide_tensors(written)
        output = func(*args, **kwargs)
        with computing_without_modes():
            written_ids = {id(one) for one in written}
            for result, wide in zip(_floating_tensors_in(output), _floating_tensors_in(exact), strict=False):
                if id(result) not in written_ids and result.shape == wide.shape:
                    reference.keep_wide_tensor(result, wide)
        return output

    def _indices_of_results_behind_choices(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the places of the results that decided whole numbers or booleans among some arguments."""
        known = (self._decided.get(_storage_address(one)) for one in tensors if not one.is_floating_point())
        return frozenset().union(*filter(None, known))

    def _results_of_wide_run_and_of_arm_inputs(
        self,
        func: Any,
        key: Key,
        args: Any,
        kwargs: dict[str, Any],
        given: list[Tensor],
        written: list[Tensor],
    ) -> tuple[Any, Any]:
        """Return the results of the wide run, and those of the arm's own inputs in the wide type; None for neither."""
        reference = self.reference
        if reference is None:
            return None, None
        if func.namespace.endswith(COLLECTIVE):
            reference.forget_wide_tensors(given)  # their schemas do not say that they write
            return None, None
        if RANDOM in func.tags or key[1].startswith(UNSET):
            reference.forget_wide_tensors(written)
            return None, None
        if key[1].startswith(OPAQUE):
            reference.forget_wide_tensors(written)
            reference.failures.add(key[1])
            return None, None
        narrows = kwargs.get("dtype") in HALF_DTYPES
        if not narrows and not reference.concerns_tensors(given):
            return None, None
        own = None
        is_half = narrows or any(tensor.dtype in HALF_DTYPES for tensor in given)
        if is_half and self._own_runs[key] < OWN_RUNS:
            self._own_runs[key] += 1
            own = reference.run_on_arm_values(func, args, kwargs, written)
        return reference.repeat_operation_wide(func, args, kwargs, written), own

    def _keep_and_return_wide_result(self, result: Tensor, wide: Tensor) -> Tensor | None:
        """Keep a result of the wide run for the operations that follow, and return it; None if its shape is another."""
        if self.reference is None:
            return wide
        if wide.shape != result.shape:
            return None
        self.reference.keep_wide_tensor(result, wide)
        return wide

    def _record_results(
        self,
        key: Key,
        given: Sequence[Tensor],
        output: Any,
        exact: Any,
        own: Any,
        written: set[int],
        decided: frozenset[int],
        numbers: Sequence[float],
    ) -> None:
        if key[1].startswith(UNSET):
            return
        sources = self._indices_of_results_in(given)
        self._note_sources_of_integers_and_booleans(output, decided.union(sources))
        results = _floating_tensors_in(output)
        if not results:
            return
        constant = key[1] in CONSTANT
        # To widen a 16-bit tensor changes no value: its counts are known.
        is_cast_of_half = key[1] == "_to_copy" and bool(given) and given[0].dtype in HALF_DTYPES
        source = self._find_event_that_counted(given[0]) if is_cast_of_half else None
        wide, alone = _tensors_matched_to_results(exact, results), _tensors_matched_to_results(own, results)
        for result, wide_result, by_itself in zip(results, wide, alone, strict=True):
            if wide_result is not None and id(result) not in written:
                wide_result = self._keep_and_return_wide_result(result, wide_result)
            self._producer[_storage_address(result)] = len(self._step.events)
            if source is not None and result.dtype is torch.float32 and source.version[1] == result.numel():
                row = range_counts_without_lost(source.row)
            else:
                row = range_counts_of(result, wide_result if result.dtype in HALF_DTYPES else None)
            errors = None if wide_result is None else error_norms_of(result, wide_result, by_itself)
            version = (result._version, result.numel())
            event = OperationResult(
                key, result.dtype, row, errors, sources, constant, None, version, tuple(decided)
            )
            if errors is not None and result.dtype in HALF_DTYPES:
                event.buffer = self._name_of_cast_buffer(given)
            if numbers and result.dtype in HALF_DTYPES:
                _note_numbers_that_type_cannot_hold(event, numbers, key[1])
            self._step.events.append(event)

    def _indices_of_results_in(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        """Return the places of the results that some tensors hold."""
        return tuple({at for one in tensors if (at := self._producer.get(_storage_address(one))) is not None})

    def _name_of_cast_buffer(self, given: Sequence[Tensor]) -> str:
        """Return the name of a 16-bit buffer among arguments that no operation of this step made; "" for none."""
        unmade = [
            one
            for one in given
            if one.dtype in HALF_DTYPES and self._producer.get(_storage_address(one)) is None
        ]
        return next(filter(None, map(self.sites.find_name_of_buffer, unmade)), "")

    def _note_sources_of_integers_and_booleans(self, output: Any, places: frozenset[int]) -> None:
        """Note of which results those that are no floating tensors are made."""
        for value in _tensors_in(output):
            if not value.is_floating_point():
                self._decided[_storage_address(value)] = places

    def _note_choice(
        self, operation: str, given: Sequence[Tensor], output: Any, exact: Any, dim: int | None
    ) -> None:
        """Note in the event of a rounded tensor which integers or truth values were made of it."""
        results, wides = (
            [one for one in _tensors_in(value) if not one.is_floating_point()] for value in (output, exact)
        )
        if not results or not wides or not results[0].numel():
            return
        if operation == "_to_copy" and results[0].dtype is torch.bool:
            return
        known = [(at, one, wide) for one in given for at, wide in self._event_index_and_wide_tensor(one)]
        rounded = [(at, wide) for at, one, wide in known if len(known) == 1 or bool((one != wide).any())]
        if not rounded:
            return
        place, wide = rounded[0]
        ordered = wide if operation in ORDERING else None
        share = share_of_wrong_choices(results[0], wides[0], ordered, dim, is_set=operation == "topk")
        is_whole = all(bool((wide == wide.round()).all()) for _, _, wide in known)
        event = self._step.events[place]
        found = DiscreteChoice(operation, float(share), is_whole, results[0].numel())
        if event.choice is None or (found.is_whole, found.share) > (
            event.choice.is_whole,
            event.choice.share,
        ):
            event.choice = found

    def _note_host_read(
        self, tensor: Tensor, output: Any, exact: Any, decided: Iterable[int], where: str
    ) -> None:
        """Note a whole number that is read from a rounded tensor, or the number of values that are told apart.

        What is read decides in Python, where nothing of it is followed.
        """
        if not tensor.is_floating_point():
            choices = [(at, self._step.events[at].choice) for at in sorted(decided)]
            for at, choice in choices:
                if choice is not None and choice.is_whole and choice.share >= MIN_WRONG_READ:
                    share = f"{100 * choice.share:.3g} %"
                    self._step.reads.append(
                        RoundedRead(at, where, f"{share} of the numbers behind it are", "")
                    )
                    return
            return
        for at, wide in self._event_index_and_wide_tensor(tensor):
            if not bool((wide == wide.round()).all()):
                continue
            if isinstance(output, int | float) and isinstance(exact, int | float):
                if MIN_READ <= abs(exact) <= MAX_WHOLE and output != exact:
                    self._step.reads.append(RoundedRead(at, where, f"{output:.9g}", f"{exact:.9g}"))
            elif exact is not None and not isinstance(exact, int | float):
                seen, true = (len(_tensors_in(value)[0]) for value in (output, exact))
                if seen != true:
                    self._step.reads.append(RoundedRead(at, where, f"{seen} different numbers", f"{true}"))

    def _event_index_and_wide_tensor(self, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """Return the place of a floating tensor, and its tensor of the wide run; empty where one is not known."""
        place = self._producer.get(_storage_address(tensor))
        wide = None if self.reference is None else self.reference.wide_tensor_of(tensor)
        return [] if place is None or wide is None else [(place, wide)]


def share_of_wrong_choices(
    result: Tensor,
    wide_result: Tensor,
    ordered: Tensor | None = None,
    dim: int | None = None,
    *,
    is_set: bool = False,
) -> float:
    """Return which share of integers or truth values is another one in the wide run; 0 where there are not as many.

    Of truth values in several dimensions the rows count that have a wrong one, as in the mask of an attention.

    Args:
        ordered: the numbers of the wide run whose order was asked for, of which equal ones may be exchanged.
        dim: along which they were ordered; None for all as one row.
        is_set: their order among each other does not count, as of the experts of a token.
    """
    if result.shape != wide_result.shape:
        return 0.0
    wrong = result != wide_result
    if result.dtype is torch.bool and wrong.dim() > 1:
        wrong = wrong.any(-1)
    elif ordered is not None:
        chosen, best = (_gather_numbers_at_indices(ordered, places, dim) for places in (result, wide_result))
        if is_set and dim is not None and chosen.dim():
            chosen, best = chosen.sort(dim).values, best.sort(dim).values
        wrong = chosen != best
    return float(wrong.double().mean())


def _gather_numbers_at_indices(numbers: Tensor, places: Tensor, dim: int | None) -> Tensor:
    if dim is None or not numbers.dim():
        return numbers.reshape(-1)[places.reshape(-1)]
    return numbers.gather(dim, places if places.dim() == numbers.dim() else places.unsqueeze(dim))


def _sorting_dim_of_operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return along which dimension an operation orders numbers; None for all of them."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            value = args[place] if place < len(args) else kwargs.get("dim", argument.default_value)
            return None if value is None else int(value)
    return None


def uniform_numbers_off_ends(args: Sequence[Any], drawn: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform 16-bit random numbers in a wide type, those off zero and the ends of their range that lie on them.

    They move by a quarter of the type's eps, relative to the range: what fp32 would have drawn there is nearer to the
    end than the next number of 16 bits, and hardly ever the end itself.

    Args:
        args: of an operation of `UNIFORM`.
        drawn: its result.
    """
    wide = drawn.detach().to(dtype, copy=True)
    ends = args[1:] if args and args[0] is drawn else ()  # without those behind, if they are the defaults
    low = float(ends[0]) if ends else 0.0
    high = float(ends[1]) if len(ends) > 1 else 1.0
    if low == high:
        return wide
    part = torch.finfo(drawn.dtype).eps / 4 * (high - low)
    wide.clamp_(low + part, high - part)
    return wide.masked_fill_(wide == 0, part)


def _replace_event_field_by_numbers(events: Sequence[OperationResult], name: str) -> None:
    """Replace a field of events that lies on a device by numbers, with one read."""
    waiting = [event for event in events if isinstance(getattr(event, name), Tensor)]
    if waiting:
        values = torch.stack([getattr(event, name) for event in waiting]).cpu().numpy()
        for event, value in zip(waiting, values, strict=True):
            setattr(event, name, value)


@lru_cache(maxsize=4096)
def _operation_name_without_overload(func: Any) -> str:
    """Return the name of an operation without its overload, such as add."""
    return str(func.__name__).partition(".")[0].rstrip("_")


def _tensors_with_pole_at_zero(operation: str, args: Sequence[Any]) -> list[Tensor]:
    """Return the arguments of which a zero makes the result of an operation infinite or NaN."""
    if operation in POLES_AT_ZERO or (operation == "pow" and _is_negative_number(args[-1])):
        return _tensors_in(args)
    if operation in ZERO_DIVISORS:
        return _tensors_in(args[1:2])
    return _tensors_in(args[:1]) if operation == "_weight_norm_interface" else []


def _is_negative_number(value: Any) -> bool:
    return isinstance(value, int | float) and value < 0


def _storage_address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _note_numbers_that_type_cannot_hold(
    event: OperationResult, numbers: Sequence[float], operation: str
) -> None:
    """Note in the event of a 16-bit result the number that its type cannot hold, and the limit that it rounds to 1."""
    event.number = _number_beyond_fp16(numbers) if event.dtype is torch.float16 else 0.0
    event.limit = _number_rounded_to_one(numbers, event.dtype) if operation in LIMITS else 0.0


def _number_beyond_fp16(numbers: Sequence[float]) -> float:
    """Return a number that is zero or not finite in fp16; 0 for none."""
    beyond = (one for one in numbers if not FP16_ZERO < abs(one) <= FP16_LARGEST and math.isfinite(one))
    return next(beyond, 0.0)


def _number_rounded_to_one(numbers: Sequence[float], dtype: torch.dtype) -> float:
    """Return a number near 1 or -1 that a 16-bit type rounds to it; 0 for none."""
    eps = torch.finfo(dtype).eps
    near = (one for one in numbers if abs(one) != 1 and -eps / 4 <= abs(one) - 1 <= eps / 2)
    return next(near, 0.0)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, dict | list | tuple) else ():
        if isinstance(item, Tensor):  # by far the most
            found.append(item)
        elif isinstance(item, list | tuple | dict):
            found += _tensors_in(item)
    return found


def _tensors_matched_to_results(value: Any, results: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the floating tensors of another run of an operation, one for each result; None where it gave others."""
    found = _floating_tensors_in(value)
    return found if len(found) == len(results) else [None] * len(results)


def _floating_tensors_in(value: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors_in(value) if tensor.is_floating_point()]
