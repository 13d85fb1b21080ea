"""From the numbers of a run to its faults: each with the place where it began and what led from there to the loss."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ampcompare.base.formatting import format_rough_percent_number
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.base.tensors.type_names import HALF_NAMES
from ampcompare.diagnosis.laws import HIGH
from ampcompare.diagnosis.observation import (
    RunObservation,
    StepFacts,
    error_of_event,
    name_of_parameter,
    operation_place_of,
    own_error_of_event,
)
from ampcompare.diagnosis.operation_watch import (
    FP16_LARGEST,
    FP16_ZERO,
    UNIFORM,
    OperationResult,
    WatchedStep,
)
from ampcompare.diagnosis.ranges import magnitude_range_of_counts, total_nonfinite_and_lost_of
from ampcompare.results.records.diagnosis import Fault, FaultKind, MagnitudeRange, OperationPlace

HARM = 0.5  # relative error from which a gradient or a loss is wrong rather than inexact
HARM_IN_BF16 = 0.9  # whose three bits less make half of a gradient noise in a sound network of many layers
# share of a wrong gradient that is zero in the arm alone, from which that is called the cause
UNDERFLOW = 0.1
NEGLIGIBLE = 0.1  # of the largest gradient of a module: a smaller one may be what sums that cancel have left
# of it: in fp32 a smaller gradient is that of a weight without effect, as a bias before batch norm
NO_EFFECT = 1e-3
REDUCTIONS = ("mean", "sum")  # whose terms may cancel, as those of a loss whose exact value is zero
AMPLIFIED = 1 / 8  # of the error of a function's result, from which its argument's rounding is the cause
# of positions, times and frequencies: what is wrong there is so in each step
PERIODIC = ("sin", "cos", "tan")
# error of a periodic function; in sound networks, with random features or sines, a tenth of it
MIN_TURN = 0.25
# times below a scale that was applied, more than the gradients of a sound training grow in its first steps
FALL = 8
SMALL_SCALE = ("underflow", "rounding")  # which a loss scale that has fallen leads to
MAX_CHAIN = 12
MAX_NEAR = 2
# They take integers as places.
INDEXING = frozenset(
    ("embedding", "embedding_bag", "gather", "index", "index_select", "take", "index_put", "scatter")
)
BINNING = ("_to_copy", "bucketize", "searchsorted")  # of numbers that need not be whole
BEST = ("argmax", "argmin", "max", "min", "topk")  # which sort alone would leave to chance
ROUNDING = frozenset(("round", "floor", "ceil", "trunc"))
# They take elements of their floating input; of the numbers that were ordered these differ by the rounding alone.
TAKING = frozenset(("gather", "index", "index_select", "take"))
# share of wrong indices: of numbers that are whole in fp32, as positions are, and of others, as of bins or of experts
MIN_WRONG_POSITIONS, MIN_WRONG_BINS = 0.01, 0.25
# They pass values on: an infinity that fp32 has not there was not asked for.
MOVING = frozenset(("where", "masked_fill", "tril", "triu"))
MIN_CHOSEN = 8  # by an order of numbers that are not whole: of fewer a share says nothing
POLES_AT_ONE = frozenset(("acosh", "atanh", "erfinv", "log1p"))  # which a limit may keep from 1 or -1
LIMIT_REACH = 2  # operations between a limit and what is not finite at 1, such as a change of sign


@dataclass(frozen=True)
class FaultReason:
    """What is said of a fault, and where to look first."""

    text: str
    at: int | None = None  # place among the events where it was made; None if that is the fault's own
    buffer: str = ""  # of a model, that the arm has cast


def reason_of_first_nonfinite_result(events: Sequence[OperationResult], origin: int) -> FaultReason | None:
    """Return why the result at `origin` is the first that is not finite; None if that is not known."""
    number = events[origin].number
    if abs(number) > FP16_LARGEST:
        return FaultReason(f"{number:g} is beyond the largest number of fp16")

    def operations_before(at: int) -> list[int]:
        # of finite numbers a product, a sum or exp becomes infinite by their size, never by a zero
        sources = events[at].poles if at == origin else events[at].sources
        before = [source for source in sources if source < at]
        return [
            one
            for one in before
            if share_lost_to_zero(events[one])
            or (events[one].key[1] == "_to_copy" and any(map(is_lost, events[one].sources)))
        ]

    def is_lost(at: int) -> bool:  # before it was widened, which changes no value
        return at < origin and share_lost_to_zero(events[at]) > 0

    reached = set(_indices_reached_backwards([origin], operations_before)) - {origin}
    zeros = sorted(at for at in reached if is_lost(at))
    if (reason := _reason_of_limit_rounded_to_one(events, [*zeros, origin], origin)) is not None:
        return reason
    if not zeros:
        return None
    small = [at for at in zeros if 0 < abs(events[at].number) <= FP16_ZERO]
    at = max(small, default=zeros[0])
    name = _place_name_for_reader_of(events[at], events[origin])
    made = None if _module_and_line_key(events[at]) == _module_and_line_key(events[origin]) else at
    if small:
        return FaultReason(f"{events[at].number:g} in {name} is zero in fp16", made)
    percent = format_rough_percent_number(share_lost_to_zero(events[at]))
    if events[at].key[1] in UNIFORM:
        half = dtype_name(events[at].dtype)
        text = f"{percent} % of the random numbers that {name} draws in {half} are zero, of which fp32 draws hardly any"
        return FaultReason(text, made)
    text = f"{percent} % of the results of {name} are zero in the arm alone"
    cast = _cast_buffer_reason(events, at)
    return (
        FaultReason(text, made) if cast is None else replace(cast, text=f"{cast.text}, and {text}", at=made)
    )


def _cast_buffer_reason(events: Sequence[OperationResult], index: int) -> FaultReason | None:
    """Return that the arm has cast a buffer, if the error of a result comes from one; None for another error."""

    def operations_before(place: int) -> list[int]:
        return [one for one in events[place].sources if one < place and error_of_event(events[one]) > 0]

    for place in _indices_reached_backwards([index], operations_before):
        event = events[place]
        if event.buffer and own_error_of_event(event) < error_of_event(event) / 2:
            text = f"the arm casts the buffer {event.buffer} to {dtype_name(event.dtype)}"
            return FaultReason(text, buffer=event.buffer)
    return None


def _reason_of_limit_rounded_to_one(
    events: Sequence[OperationResult], places: Sequence[int], origin: int
) -> FaultReason | None:
    """Return that a limit lets 1 through, if one of it does that leads to some places by at most two operations.

    So is `log1p(-p)` of what is clamped to 0.999999: in 16 bits that is 1.
    """
    if not events[origin].poles and events[origin].key[1] not in POLES_AT_ONE:
        return None
    at_hand = set(places)
    for _ in range(LIMIT_REACH):
        at_hand |= {source for at in at_hand for source in events[at].sources if source < origin}
    at = max((at for at in at_hand if events[at].limit), default=None)
    if at is None:
        return None
    one = math.copysign(1, events[at].limit)
    name, half = _place_name_for_reader_of(events[at], events[origin]), dtype_name(events[at].dtype)
    made = None if _module_and_line_key(events[at]) == _module_and_line_key(events[origin]) else at
    return FaultReason(f"{events[at].limit:.9g} in {name} is {one:g} in {half}", made)


def share_lost_to_zero(event: OperationResult) -> float:
    """Return the share of a result that is zero in the arm alone."""
    elements, _, lost = total_nonfinite_and_lost_of(event.row)
    return lost / elements if elements else 0.0


def _place_name_for_reader_of(event: OperationResult, known_event: OperationResult) -> str:
    """Return the name of a place for a reader who knows another one."""
    place = operation_place_of(event.key)
    if _module_and_line_key(event) == _module_and_line_key(known_event):
        return place.operation
    return f"{place.name} ({place.where})" if place.where else place.name


def find_first_faults_by_kind(
    observation: RunObservation, left_out: Collection[FaultKind] = ()
) -> list[Fault]:
    """Return the faults of a run, at most one of each kind, the earliest first, without kinds that are left out."""
    found: dict[FaultKind, Fault] = {}
    highest = 0.0  # scale at which a step was applied
    fallen = False
    for facts in observation.facts:
        if facts.is_unfinished:
            faults = list(_overflows_of_unfinished_step(facts))
        elif facts.applied:
            highest = max(highest, facts.scale)
            faults = [
                one for one in _faults_of_applied_step(facts) if not (fallen and one.kind in SMALL_SCALE)
            ]
        else:
            is_falling = facts.scale <= highest / FALL
            faults = list(_skip_faults_beyond_loss_scale(facts, highest if is_falling else None))
            fallen |= is_falling and bool(faults)
        for fault in faults:
            found.setdefault(fault.kind, fault)
    collapse = _no_step_applied_fault(observation)
    if collapse is not None and "overflow" not in found:
        found.setdefault(collapse.kind, collapse)
    if not found and (ended := _fault_of_error_of_script(observation)) is not None:
        found[ended.kind] = ended
    lost = _lost_updates_fault(observation)
    if lost is not None and not {"overflow", "gradient overflow", "underflow"} & set(found):
        found.setdefault(lost.kind, lost)
    return [fault for kind, fault in found.items() if kind not in left_out]


def _faults_of_applied_step(facts: StepFacts) -> Iterator[Fault]:
    events = facts.step.events
    loss = None if facts.step.index_of_loss is None else events[facts.step.index_of_loss]
    if loss is not None and _is_nonfinite_result(loss):
        yield _nonfinite_loss_fault(facts, facts.step.index_of_loss or 0)
        return
    gradients = [(at, event) for at, event in enumerate(events) if event.key[3] == "gradient"]
    if broken := _indices_of_broken_gradients(facts):
        yield _gradient_overflow_fault(facts, broken)
        return
    if (fault := _fault_of_gradients_broken_later(facts) or _nonfinite_update_fault(facts)) is not None:
        yield fault
        return
    harm = HARM_IN_BF16 if any(event.dtype is torch.bfloat16 for event in events) else HARM
    wrong = [
        (at, event)
        for at, event in gradients
        if _is_wrong_gradient(event, [one for _, one in gradients], harm)
    ]
    if wrong:
        yield _inexact_result_fault(facts, wrong)
    elif (
        loss is not None
        and error_of_event(loss) > harm
        and not _is_cancelled_sum(events, facts.step.index_of_loss or 0)
    ):
        yield _inexact_result_fault(facts, [(facts.step.index_of_loss or 0, loss)])
    elif (swallowed := _find_overflow_and_value_made_wrong(events, harm)) is not None:
        yield _swallowed_overflow_fault(facts, *swallowed)
    elif (fault := _fault_of_rounded_argument(facts)) is not None:
        yield fault


def _overflows_of_unfinished_step(facts: StepFacts) -> Iterator[Fault]:
    """Yield an overflow in a step that the script did not finish; what is wrong by rounding is no loss there.

    What it last computed may be a check, such as how far a sum is off 1, whose exact value is zero.
    """
    events, last = facts.step.events, facts.step.index_of_loss or 0
    if _is_nonfinite_result(events[last]):
        yield _nonfinite_loss_fault(facts, last)
    elif (swallowed := _find_overflow_and_value_made_wrong(events, HARM_IN_BF16)) is not None:
        yield _swallowed_overflow_fault(facts, *swallowed)


def _fault_of_rounded_argument(facts: StepFacts) -> Fault | None:
    """Return the fault of one rounding that a function amplifies, or that changes indices; None without."""
    if (amplified := _find_index_and_event_of_amplified_rounding(facts.step.events)) is not None:
        return _inexact_result_fault(facts, [amplified])
    wrong = _find_wrong_choice_and_user(facts.step)
    return None if wrong is None else _wrong_choice_fault(facts, *wrong)


def _nonfinite_update_fault(facts: StepFacts) -> Fault | None:
    """Return the fault of an optimizer that makes a weight that is not finite."""
    update = next((one for one in facts.updates if one.nonfinite), None)
    if update is None:
        return None
    return Fault(
        kind="update",
        place=OperationPlace(
            module=update.parameter.rpartition(".")[0], operation="optimizer step", phase="weight"
        ),
        step=facts.index,
        text=f"the optimizer made {update.nonfinite} elements of {update.parameter} non-finite, not its gradients",
        reason="" if update.eps is None else f"its eps={update.eps:g} is zero in {update.dtype}",
    )


def _indices_of_broken_gradients(facts: StepFacts) -> list[int]:
    """Return the gradients that are not finite, else the backward results that made one of a tensor of no module.

    The watch knows the gradients of parameters of modules alone; that of a temperature, say, is none of them.
    """
    events = facts.step.events
    broken = [
        at for at, event in enumerate(events) if event.key[3] == "gradient" and _is_nonfinite_result(event)
    ]
    seen = {name_of_parameter(event.key) for event in events if event.key[3] == "gradient"}
    if broken or not any(one.nonfinite_gradient for one in facts.updates if one.parameter not in seen):
        return broken
    return [
        at for at, event in enumerate(events) if event.key[3] == "backward" and _is_nonfinite_result(event)
    ]


def _fault_of_gradients_broken_later(facts: StepFacts) -> Fault | None:
    """Return the fault of gradients that are finite and not zero behind the backward pass, and else at the step."""
    events = [one for one in facts.step.events if one.key[3] == "gradient" and not one.constant]
    if not facts.updates or all(magnitude_range_of_counts(event.row).largest is None for event in events):
        return None
    seen = {name_of_parameter(event.key) for event in facts.step.events if event.key[3] == "gradient"}
    broken = sum(one.nonfinite_gradient for one in facts.updates if one.parameter in seen)
    if not broken and any(one.moved for one in facts.updates):
        return None
    what = f"with {broken} elements that are not finite" if broken else "that are all zero"
    squares = sum(
        event.errors[1] ** 2 for event in events if event.dtype is torch.float16 and event.errors is not None
    )
    is_beyond = not broken and facts.scale == 1 and squares > FP16_LARGEST
    beyond = f"; their squares add up to {squares:.3g}, which fp16 cannot hold" if is_beyond else ""
    return Fault(
        kind="update",
        place=OperationPlace(module="", operation="optimizer step", phase="weight"),
        step=facts.index,
        text=f"the optimizer gets gradients {what}, and the backward pass has left others: what runs between the two, "
        f"such as clipping or unscaling, has changed them{beyond}",
    )


def _is_cancelled_sum(events: Sequence[OperationResult], index: int) -> bool:
    """Return whether a result is wrong since terms that are right cancel each other in a sum: its exact value is zero
    up to the rounding of the terms, as that of a policy's loss is."""
    origin = _index_of_error_origin(events, index)
    return (
        events[origin].key[1] in REDUCTIONS and events[origin].dtype not in HALF_DTYPES
    )  # which would round the sum itself


def _find_index_and_event_of_amplified_rounding(
    events: Sequence[OperationResult],
) -> tuple[int, OperationResult] | None:
    """Return a result that is wrong since a function amplifies one rounding of its argument; None without.

    That is a gradient that is wrong by more than half of its size, as it also may be in a sound network in bf16, or a
    periodic function: of positions or timesteps that 16 bits cannot tell apart, which gradients show in part only.
    """
    gradients = [event for event in events if event.key[3] == "gradient"]

    def is_candidate(event: OperationResult) -> bool:
        _, operation, _, phase = event.key
        if phase == "gradient":
            return _is_wrong_gradient(event, gradients, HARM)
        return phase == "forward" and operation in PERIODIC and error_of_event(event) > MIN_TURN

    caused: list[tuple[int, OperationResult]] = []
    for at, event in enumerate(events):
        if (
            is_candidate(event)
            and _find_index_of_amplified_argument(events, _index_of_error_origin(events, at)) is not None
        ):
            caused.append((at, event))
    return max(caused, key=lambda pair: _error_capped_to_finite(pair[1]), default=None)


def _find_wrong_choice_and_user(step: WatchedStep) -> tuple[int, int] | None:
    """Return the result whose rounding makes many indices or truth values others than in fp32, and what takes them.

    The wide run takes those of the arm, so that nothing behind them is wrong there.
    """
    events = step.events
    chosen = [at for at, event in enumerate(events) if event.choice is not None and _is_wrong_choice(event)]
    if not chosen:
        return None
    ends = [] if step.index_of_loss is None else [step.index_of_loss]
    behind = set(
        _indices_reached_backwards(
            ends, lambda at: [one for one in (*events[at].sources, *events[at].decided) if one < at]
        )
    )
    for at, event in enumerate(events):
        if event.key[3] != "forward" or not (event.key[1] in INDEXING or at in behind):
            continue
        for place in chosen:
            choice = events[place].choice
            assert choice is not None
            takes_ordered = event.key[1] in TAKING and event.sources == (place,) and not choice.is_whole
            if place in event.decided and not takes_ordered and (event.key[1] in INDEXING or choice.is_whole):
                return place, at
    return None


def _is_wrong_choice(event: OperationResult) -> bool:
    """Return whether more of what a result decides is wrong than where numbers lie near the border of two of them.

    Numbers that are not whole, or were rounded on purpose, lie near one where they are many. Their order is wrong where
    another one is often the best of a few, as of the experts of a router.
    """
    choice = event.choice
    if choice is None:
        return False
    if choice.is_whole and event.key[1] not in ROUNDING:
        return choice.share >= MIN_WRONG_POSITIONS
    if choice.operation in BEST and choice.count < MIN_CHOSEN:
        return False
    return choice.operation in (*BINNING, *BEST) and choice.share >= MIN_WRONG_BINS


def _wrong_choice_fault(facts: StepFacts, choice_index: int, user_index: int) -> Fault:
    events = facts.step.events
    choice = events[choice_index].choice
    assert choice is not None
    origin = _index_of_event_where_rounding_began(events, choice_index)
    first, name = operation_place_of(events[origin].key).name, operation_place_of(events[user_index].key).name
    share = f"{format_rough_percent_number(choice.share)} %"
    if choice.operation == "_to_copy":
        what = "indices" if events[user_index].key[1] in INDEXING else "whole numbers"
        text = f"{first} rounds what becomes {what}: {share} of those of {name} are others than in fp32"
    else:
        text = (
            f"{first} rounds what {choice.operation} compares: {share} of its results, or rows of them, are others "
            f"than in fp32 and decide {name}"
        )
    return _make_fault("rounding", facts, origin, text, [first, name], severity=choice.share)


def _find_overflow_and_value_made_wrong(
    events: Sequence[OperationResult], harm: float
) -> tuple[int, int] | None:
    """Return a result that is not finite in the arm alone, and the finite one that it has made wrong; None without.

    An infinity may end in a 0, as behind `rsqrt`, so that neither loss nor gradients show it. Where what comes of it is
    right, as behind the softmax of a mask, it does no harm.
    """
    origins: dict[int, int] = {}  # of the results that are wrong as something overflowed
    for at, event in enumerate(events):
        if event.key[3] != "forward" or event.constant:
            continue
        before = [origins[source] for source in event.sources if source in origins]
        if _is_nonfinite_result(event):
            if before or _is_finite_in_fp32(event):
                origins[at] = min(before, default=at)
        elif before and error_of_event(event) > harm:
            return min(before), at
        elif before and error_of_event(event) > NEGLIGIBLE:
            origins[at] = min(before)
    return None


def _swallowed_overflow_fault(facts: StepFacts, origin: int, wrong_index: int) -> Fault:
    events = facts.step.events
    name, first = (
        operation_place_of(events[wrong_index].key).name,
        operation_place_of(events[origin].key).name,
    )
    distance = _distance_from_fp32_text(events[wrong_index])
    text = f"{first} is not finite, though the loss is, and makes results wrong: {name} {distance}"
    onward = _places_on_path(events, origin, wrong_index)
    return _make_fault(
        "overflow",
        facts,
        origin,
        text,
        onward,
        reason=reason_of_first_nonfinite_result(events, origin),
        severity=_error_capped_to_finite(events[wrong_index]),
    )


def _skip_faults_beyond_loss_scale(facts: StepFacts, fallen_from: float | None) -> Iterator[Fault]:
    """Yield the fault of a step that was skipped, unless a smaller loss scale may be all that it needs.

    `fallen_from` is a scale far above this step's at which others are applied.
    """
    events, end = facts.step.events, facts.step.index_of_loss
    if end is not None and _is_nonfinite_result(events[end]):
        yield _nonfinite_loss_fault(facts, end)
        return
    broken = [
        at for at, event in enumerate(events) if event.key[3] == "gradient" and _is_nonfinite_result(event)
    ]
    if not broken:
        return
    origin = min(_indices_of_nonfinite_origins(events, broken))
    if (
        fallen_from is not None
        or _is_forward_result_before_loss(facts, origin)
        or not _is_finite_in_fp32(events[origin])  # which no scale removes
    ):
        yield _gradient_overflow_fault(facts, broken, fallen_from=fallen_from)


def _is_forward_result_before_loss(facts: StepFacts, origin: int) -> bool:
    """Return whether a result of the forward pass comes before the loss is scaled."""
    is_forward = facts.step.events[origin].key[3] == "forward"
    return is_forward and (facts.step.index_of_loss is None or origin < facts.step.index_of_loss)


def _nonfinite_loss_fault(facts: StepFacts, loss_index: int) -> Fault:
    """Return the fault of a loss that is not finite: the first place that its values lead back to."""
    events = facts.step.events
    origin = min(_indices_of_nonfinite_origins(events, [loss_index]))
    name = operation_place_of(events[origin].key).name
    if _is_finite_in_fp32(events[origin]):
        text = f"{name} is the first result that is not finite"
        reason = reason_of_first_nonfinite_result(events, origin)
        return _make_fault(
            "overflow", facts, origin, text, _places_on_path(events, origin, loss_index), reason=reason
        )
    chosen = _find_nonfinite_deciding_index_or_mask(events, origin)
    if chosen is not None:
        text = (
            f"{operation_place_of(events[chosen].key).name} is not finite and decides an index or a "
            f"mask, by which {name} fails"
        )
        return _make_fault(
            "overflow",
            facts,
            chosen,
            text,
            _places_on_path(events, origin, loss_index),
            reason=reason_of_first_nonfinite_result(events, chosen),
        )
    text = f"{name} is the first result that is not finite, and it is not finite in fp32 either"
    return _make_fault("not precision", facts, origin, text, _places_on_path(events, origin, loss_index))


def _gradient_overflow_fault(
    facts: StepFacts, broken: Sequence[int], *, in_every_step: bool = False, fallen_from: float | None = None
) -> Fault:
    """Return the fault of gradients that are not finite.

    `in_every_step`: finite in none. `fallen_from`: a scale from which the loss scale has fallen to this step's.
    """
    events = facts.step.events
    origin = min(_indices_of_nonfinite_origins(events, broken))
    first = events[origin]
    kind: FaultKind = "gradient overflow" if _is_finite_in_fp32(first) else "not precision"
    when = f"at loss scale {facts.scale:g}"
    if fallen_from is not None:
        when += f", which has fallen from {fallen_from:g}"
    if in_every_step:
        when = f"in every step, down to loss scale {facts.scale:g}"
    elif _is_forward_result_before_loss(facts, origin):
        when = "whatever the loss scale"
    name = operation_place_of(first.key).name
    if first.key[3] == "forward":
        text = f"{name} is not finite, which the loss does not show, and breaks gradients {when}"
    else:
        text = f"{name} makes a gradient that is not finite {when}"
    if kind == "not precision":
        return _make_fault(
            kind, facts, origin, f"{text}, and in fp32 too", _places_on_path(events, origin, broken[0])
        )
    return _make_fault(
        kind,
        facts,
        origin,
        text,
        _places_on_path(events, origin, broken[0]),
        reason=reason_of_first_nonfinite_result(events, origin),
    )


def _no_step_applied_fault(observation: RunObservation) -> Fault | None:
    """Return the fault of a run in which no step was applied although its loss was finite."""
    if observation.steps == 0 or observation.skipped < observation.steps:
        return None
    for facts in reversed(observation.facts):
        broken = [
            at
            for at, event in enumerate(facts.step.events)
            if event.key[3] == "gradient" and _is_nonfinite_result(event)
        ]
        if broken:
            return _gradient_overflow_fault(facts, broken, in_every_step=True)
    return None


def _fault_of_error_of_script(observation: RunObservation) -> Fault | None:
    """Return the fault of a script that ended by itself in a step that has no other fault; None without.

    Some finite number may be wrong by little and decide all the same, as in a Cholesky factorization. Where it began is
    not known: looked at first are results of 16 bits of which a tenth became zero, and then those nearest to the end.
    """
    facts = observation.facts[-1] if observation.facts else None
    if facts is None or not facts.is_unfinished:
        return None
    events = facts.step.events
    computed = [at for at, event in enumerate(events) if event.key[3] in ("forward", "backward")]
    halves = [at for at in computed if events[at].dtype in HALF_DTYPES and not events[at].constant]
    if not halves:
        return None
    behind = set(
        _indices_reached_backwards(
            computed[-1:], lambda at: [one for one in (*events[at].sources, *events[at].decided) if one < at]
        )
    )
    order = sorted(
        halves, key=lambda at: (share_lost_to_zero(events[at]) <= UNDERFLOW, at not in behind, -at)
    )
    first = operation_place_of(events[order[0]].key).name
    text = f"the script ends by itself, and {first} is the 16-bit result nearest to its end"
    if (lost := share_lost_to_zero(events[order[0]])) > UNDERFLOW:
        percent = format_rough_percent_number(lost)
        text = f"the script ends by itself, and {percent} % of the results of {first} before are zero in the arm alone"
    fault = _make_fault("error", facts, order[0], text, [first])
    near = [_module_and_line_key(events[at]) for at in order]
    return fault.model_copy(update={"near": list(dict.fromkeys(near))[1:MAX_CHAIN]})


def _inexact_result_fault(facts: StepFacts, wrong: Sequence[tuple[int, OperationResult]]) -> Fault:
    """Return the fault of finite results that are wrong: the place where the error first becomes large."""
    events = facts.step.events
    origins = {at: _index_of_error_origin(events, at) for at, _ in wrong}
    origin = min(origins.values())
    at, worst = max(
        (pair for pair in wrong if origins[pair[0]] == origin),
        key=lambda pair: _error_capped_to_finite(pair[1]),
    )
    if events[origin].key[3] == "forward" and _is_nonfinite_result(events[origin]):
        return _swallowed_overflow_fault(facts, origin, at)
    path = _places_on_path(events, origin, at)
    severity = _error_capped_to_finite(worst)
    lost = max(share_lost_to_zero(events[origin]), share_lost_to_zero(events[at]))
    if events[origin].key[3] != "forward" and lost > UNDERFLOW:
        text = _underflow_text(events[origin], worst)
        return _make_fault("underflow", facts, origin, text, path, severity=severity)
    first, name = operation_place_of(events[origin].key).name, operation_place_of(worst.key).name
    begin = _find_index_of_amplified_argument(events, origin)
    if begin is None:
        begin = origin
        text = f"{first} makes or amplifies rounding errors: {name} {_distance_from_fp32_text(worst)}"
    else:
        text = (
            f"{_rounded_argument_text(events[begin])}, which {first} amplifies: {name} "
            f"{_distance_from_fp32_text(worst)}"
        )
        path = _places_on_path(events, begin, at)
    reason = _cast_buffer_reason(events, begin)
    return _make_fault("rounding", facts, begin, text, path, severity=severity, reason=reason)


def _underflow_text(origin: OperationResult, worst: OperationResult) -> str:
    """Return where gradients are lost to zero: where the error begins, or in the gradient that is furthest off."""
    first, name = operation_place_of(origin.key).name, operation_place_of(worst.key).name
    at_origin, at_worst = share_lost_to_zero(origin), share_lost_to_zero(worst)
    share, what = (
        (at_origin, "its results") if at_origin > at_worst else (at_worst, f"the gradient of {name}")
    )
    text = (
        f"{first} loses gradients below the range of fp16: {100 * share:.0f} % of {what} are "
        "zero in the arm alone"
    )
    if at_origin <= at_worst:
        return text
    return f"{text}, and the gradient of {name} {_distance_from_fp32_text(worst)}"


def _rounded_argument_text(event: OperationResult) -> str:
    """Return by how much a result is rounded that a function amplifies."""
    how = "rounds its result" if event.dtype in HALF_DTYPES else "differs from fp32"
    rounding = format_rough_percent_number(error_of_event(event))
    return f"{operation_place_of(event.key).name} {how} by {rounding} % of its size"


def _find_index_of_amplified_argument(events: Sequence[OperationResult], origin: int) -> int | None:
    """Return the result whose rounding a function of one argument amplifies; None if `origin` is no such function.

    A cosine of a large number is wrong because its argument was rounded: it makes no error itself, and is as wrong in
    fp32. Results that only move values, such as a copy or a concatenation, are passed over. Where several results went
    in, they may cancel each other there, so that the fault is at that place.
    """
    at, large = origin, error_of_event(events[origin])
    if events[origin].key[3] != "forward":
        return None
    while own_error_of_event(events[at]) < error_of_event(events[at]) / 2:
        before = [
            source for source in events[at].sources if source < at and error_of_event(events[source]) > 0
        ]
        if len(before) != 1:
            break
        at = before[0]
    is_amplified = at != origin and error_of_event(events[at]) < large * AMPLIFIED
    return (
        _index_of_event_where_rounding_began(events, at)
        if is_amplified and events[at].key[3] == "forward"
        else None
    )


def _index_of_event_where_rounding_began(events: Sequence[OperationResult], rounded_index: int) -> int:
    """Return which event made half of the error of a rounded result or more on an earlier line, as by a cast."""
    at = first = rounded_index
    while True:
        least = error_of_event(events[rounded_index]) / 2
        before = [
            source for source in events[at].sources if source < at and error_of_event(events[source]) >= least
        ]
        if len(before) != 1:
            return first
        at = before[0]
        if (
            _module_and_line_key(events[at]) != _module_and_line_key(events[rounded_index])
            and own_error_of_event(events[at]) >= least
        ):
            first = at


def _distance_from_fp32_text(event: OperationResult) -> str:
    """Return how far a result is from that of the wide run, as a predicate."""
    error = error_of_event(event)
    if error < 10:
        return f"differs from fp32 by {format_rough_percent_number(error)} % of its size"
    times = f"{error:.2g}" if error < 1000 else "over 1000"
    return f"differs from fp32 by {times} times its size"


def _error_capped_to_finite(event: OperationResult) -> float:
    """Return the error of a result, finite so that errors can be compared."""
    return min(error_of_event(event), 1e30)


def _lost_updates_fault(observation: RunObservation) -> Fault | None:
    worst = max(
        (one for one in observation.updates.values() if one.dtype in HALF_NAMES and one.moved),
        key=lambda one: one.lost / one.moved,
        default=None,
    )
    if worst is None or worst.lost <= HIGH * worst.moved:
        return None
    return Fault(
        kind="lost updates",
        place=OperationPlace(
            module=worst.parameter.rpartition(".")[0], operation="optimizer step", phase="weight"
        ),
        step=observation.facts[-1].index,
        text=f"{100 * worst.lost / worst.moved:.0f} % of the updates of {worst.parameter} are below half a unit in the "
        f"last place of its {worst.dtype} weights and are lost at this learning rate; diagnose --ahead counts the rest",
        severity=worst.lost / worst.moved,
    )


def _is_wrong_gradient(event: OperationResult, gradients: Sequence[OperationResult], harm: float) -> bool:
    """Return whether the gradient of a parameter is far from that of the wide run, and matters in its module."""
    if event.constant or event.errors is None or error_of_event(event) <= harm:
        return False
    sizes = [
        _root_mean_square_error(one, 1)
        for one in gradients
        if one.key[0] == event.key[0] and one.errors is not None
    ]
    largest = max(sizes, default=0.0)
    share = 1.0 if _root_mean_square_error(event, 1) <= NO_EFFECT * largest else NEGLIGIBLE
    return not _root_mean_square_error(event, 0) <= HARM * share * largest


def _root_mean_square_error(event: OperationResult, norm: int) -> float:
    """Return the root mean square that belongs to a norm of `Event.errors`."""
    return float(event.errors[norm]) / math.sqrt(max(1, total_nonfinite_and_lost_of(event.row)[0]))


def _is_nonfinite_result(event: OperationResult) -> bool:
    """Return whether a result is not finite, other than by an infinity that was asked for."""
    if not total_nonfinite_and_lost_of(event.row)[1]:
        return False
    return not event.constant or (
        event.key[1] in MOVING and event.errors is not None and math.isfinite(event.errors[1])
    )


def _is_finite_in_fp32(event: OperationResult) -> bool:
    """Return whether a result is finite in the wide run, or, without one, is of a 16-bit type."""
    return (
        event.dtype in HALF_DTYPES
        if event.errors is None or event.key[3] == "weight"
        else math.isfinite(event.errors[1])
    )


def _indices_of_nonfinite_origins(events: Sequence[OperationResult], ends: Iterable[int]) -> list[int]:
    """Return the non-finite results that others come from and that have only finite inputs, or inputs asked for."""

    def operations_before(at: int) -> list[int]:
        return [
            source for source in events[at].sources if source < at and _is_nonfinite_result(events[source])
        ]

    return [at for at in _indices_reached_backwards(ends, operations_before) if not operations_before(at)]


def _find_nonfinite_deciding_index_or_mask(events: Sequence[OperationResult], end: int) -> int | None:
    """Return the first result, not finite in the arm alone, that decided an index or a mask behind `end`.

    The wide run takes the indices and masks of the arm, so that what they spoil is spoiled there too.
    """

    def operations_before(at: int) -> list[int]:
        return [source for source in (*events[at].sources, *events[at].decided) if source < at]

    behind = _indices_reached_backwards([end], operations_before)
    deciding = {one for at in behind for one in events[at].decided if _is_nonfinite_result(events[one])}
    return min(
        (one for one in _indices_of_nonfinite_origins(events, deciding) if _is_finite_in_fp32(events[one])),
        default=None,
    )


def _index_of_error_origin(events: Sequence[OperationResult], end: int) -> int:
    """Return the earliest result that leads to `end` with a large error all the way."""

    def operations_before(at: int) -> list[int]:
        return [
            source
            for source in events[at].sources
            if source < at and error_of_event(events[source]) > HARM / 2
        ]

    return min(_indices_reached_backwards([end], operations_before))


def _places_on_path(events: Sequence[OperationResult], origin: int, end: int) -> list[str]:
    """Return the places from `origin` to `end` along sources, each once, in order."""
    reached = {origin}
    for at in range(origin + 1, end + 1):
        if any(source in reached for source in events[at].sources):
            reached.add(at)
    ends = [end] if end in reached else []
    back = _indices_reached_backwards(
        ends, lambda at: [source for source in events[at].sources if source < at and source in reached]
    )
    names = list(dict.fromkeys(operation_place_of(events[at].key).name for at in sorted(back)))
    return names if len(names) <= MAX_CHAIN else [*names[: MAX_CHAIN - 2], "...", names[-1]]


def _make_fault(
    kind: FaultKind,
    facts: StepFacts,
    origin: int,
    text: str,
    chain: list[str],
    *,
    severity: float = 1.0,
    reason: FaultReason | None = None,
) -> Fault:
    events = facts.step.events
    event = events[origin]
    made = [] if reason is None or reason.at is None else [_module_and_line_key(events[reason.at])]
    if reason is not None and (owner := reason.buffer.rpartition(".")[0]):
        made.insert(0, (owner, ""))  # whose buffers stay fp32 where it does
    return Fault(
        kind=kind,
        place=operation_place_of(event.key),
        step=facts.index,
        text=text,
        severity=severity,
        inputs=[
            f"{operation_place_of(events[at].key).name}: "
            f"{_value_spread_text(magnitude_range_of_counts(events[at].row))}"
            for at in event.sources
            if at < origin
        ],
        chain=chain,
        near=list(dict.fromkeys([*made, *_neighboring_places(events, origin)])),
        reason="" if reason is None else reason.text,
    )


def _neighboring_places(events: Sequence[OperationResult], origin: int) -> list[tuple[str, str]]:
    """Return where the inputs of a result were made, and where it went next: the two nearest other places of each."""
    after: dict[int, list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        for source in event.sources:
            if source < at:
                after[source].append(at)
    before = _first_other_places_reached(
        events, origin, lambda at: [source for source in events[at].sources if source < at]
    )
    return list(dict.fromkeys([*before, *_first_other_places_reached(events, origin, lambda at: after[at])]))


def _first_other_places_reached(
    events: Sequence[OperationResult], origin: int, next_to: Callable[[int], list[int]]
) -> list[tuple[str, str]]:
    """Return the first places that are reached from a result through results of the same place."""
    here = _module_and_line_key(events[origin])
    found: list[tuple[str, str]] = []
    todo, seen = deque([origin]), {origin}
    while todo and len(found) < MAX_NEAR:
        at = todo.popleft()
        if _module_and_line_key(events[at]) != here and events[at].key[3] in ("forward", "backward"):
            found = list(dict.fromkeys([*found, _module_and_line_key(events[at])]))
        else:
            todo += [other for other in next_to(at) if other not in seen]
            seen.update(next_to(at))
    return found


def _module_and_line_key(event: OperationResult) -> tuple[str, str]:
    """Return the module and the line of a result."""
    return event.key[0], event.key[2]


def _value_spread_text(values: MagnitudeRange) -> str:
    if values.largest is None:
        return "zeros" if not values.nonfinite else "not finite"
    return f"{values.smallest:.3g} to {values.largest:.3g}"


def _indices_reached_backwards(ends: Iterable[int], before: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yield each place that is reached from `ends` by going to the places before it, once, in no order."""
    seen: set[int] = set()
    todo = list(ends)
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            yield at
            todo += before(at)
