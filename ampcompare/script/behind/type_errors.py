"""What an error of torch about types means where an arm has brought the types about."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import linecache
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.location import is_users_or_installed_file, location_of_error
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.base.tensors.tree import tensors_in_value
from ampcompare.script.behind.failing_call import find_types_given_to_failing_call
from ampcompare.script.process.banned_loss import BANNED
from ampcompare.script.torch_amp.half_weights import TorchAmpByHalfWeights
from ampcompare.script.torch_amp.keep_fp32 import model_inside_wrappers
from ampcompare.script.torch_amp.o1 import TorchAmpByO1
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn
from ampcompare.script.torch_amp.widening_modules import WideningModulesWatch
from ampcompare.training.precision.base import half_dtype_of

TYPES = re.compile(
    rf"{BANNED.pattern}|dtype|scalar type|must have the type|to have the same type|[^a-z](Half|BFloat16)\b"
    r"|should be the same|unscale.*Complex",
    re.IGNORECASE,
)
# Of an operation that wants fp32, not of one whose operands differ.
FP32_WANTED = re.compile(
    r"(?:expect|must|only|requir|support|need)(?!.*\b(?:same|equal|match|got \w+ and)\b)"
    r".*?\b(?:float|float32|fp32)\b",
    re.IGNORECASE,
)
BUT_FOUND = re.compile(r"\b(?:found|got)\b")  # of two tensors, or of one
NO_KERNEL = re.compile(
    r"not implemented for|Unsupported dtype|Low precision dtypes not supported"
    r"|supports? floating point, complex, and integer tensors, but got (?:Half|BFloat16)"
    r"|but got BFloat16 and BFloat16"
)
# Of products, whose operands all arms that cast functions cast; Apex's lists lack that of attention.
PRODUCT = re.compile(
    r"\bmat[12]\b|\bm1 and m2\b|\bbatch[12]\b|^Input type .* type|Input and parameter tensors|^RNN input dtype"
)
ATTENTION = re.compile("query, key")
# ValueErrors, the second of older torch such as 2.6
RECURRENT = re.compile(
    r"^RNN input dtype .* does not match weight dtype|^input must have the type torch\.\w+, got type torch\."
)
DENSE = re.compile(r"does not support dense gradients")
BEYOND_RANGE = re.compile(r"converted to type (?:c10|at)::(Half|BFloat16) without overflow")
BOTH_HALVES = re.compile(r"\bHalf\b.*\bBFloat16\b|\bBFloat16\b.*\bHalf\b")
COMPLEX = re.compile("Complex")
HALF_TYPE = re.compile("BFloat16|bfloat16|Half|half|float16")
TYPE_NAME = re.compile(
    r"(?<![A-Za-z])(?:BFloat16|Half|Float|Double|Long|Int|Short|Char|Byte|Bool|Complex\w*|"
    r"b?float\d*|half|double|long|u?int\d*|complex\d*|bool|fp32)(?![A-Za-z0-9])"
)
FP32_TAKES_HALF = re.compile("got Float for the destination and (?:Half|BFloat16) for the source")
CALL_OF_PART = re.compile(r"\bself\.(\w+)\(")  # in a line of a model
ANY = re.compile("")
WHOLE = (torch.int16, torch.int32, torch.int64)
MAX_READ = 2**20  # numbers of a tensor that are looked at
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer of many that are alike
OUT_OF_BOUNDS = re.compile(r"out of (?:bounds|range)")
ANOMALY = re.compile(r"^Function '\w+' returned nan values")
NO_GRAPH = re.compile(
    r"does not require grad and does not have a grad_fn|appears to not have been used in the graph"
    r"|to `grad\(\)` cannot be empty"
)
NUMPY_LACKS = re.compile(r"unsupported ScalarType BFloat16")


def find_refusal_under_arm(
    error: BaseException,
    arm: Arm,
    stand_in: TorchAmpStandIn,
    *,
    arm_has_cast: bool,
    lifted_types: Sequence[str],
    rounded_numbers_text: str = "",
) -> UnsupportedCombination | None:
    """Return that the types of an arm do not fit a script, if torch raised that, and a library perhaps again.

    Args:
        error: that ended the script.
        arm: that it ran under.
        stand_in: what stands behind `torch.amp`.
        arm_has_cast: as in `_ScriptFailure`, like the next two.
        lifted_types: 16-bit types of weights.
        rounded_numbers_text: what casts have made of whole numbers.
    """
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    explained = (
        _find_refusal_of_failure(
            one,
            arm,
            stand_in,
            arm_has_cast=arm_has_cast,
            lifted_types=lifted_types,
            rounded_numbers_text=rounded_numbers_text,
        )
        for one in chain
    )
    return next((found for found in explained if found is not None), None)


class _StandInKind(enum.Enum):
    """What of an arm stands behind `torch.amp`, as far as types go."""

    WEIGHTS = "weights in 16 bits"
    O1 = "Apex's casts of functions"
    AUTOCAST = "autocast"
    NO_CASTS = "nothing, where the script has autocast"


@dataclasses.dataclass(frozen=True)
class _TorchFunctionCall:
    """A function of torch that is written in Python, as the script or a library has called it.

    Attributes:
        name: of the function; of a part of the model if that was called.
        types: of the floating-point tensors that it was given, and of its own weights.
    """

    name: str
    types: frozenset[torch.dtype]


@dataclasses.dataclass(frozen=True)
class _UserAutogradFunction:
    """A `torch.autograd.Function` of the user.

    Attributes:
        name: of its class.
        decorated_for: device for which `custom_fwd` decorates it, where it computes on another one; "" otherwise.
    """

    name: str
    decorated_for: str


@dataclasses.dataclass(frozen=True)
class _ScriptFailure:
    """An exception that a script has met under an arm.

    Attributes:
        casts: the arm computes in 16 bits, and has acted on the script.
        lifted: 16-bit types of the script's own weights, which the arm has made fp32.
        rounded: which whole numbers of inputs a cast of the arm has changed; "" for none.
        widening: modules that gave fp32 where they got 16 bits; None for an arm that casts no model.
        has_gradient_graph: as of `ScriptAmpUse`.
    """

    error: BaseException
    arm: Arm
    stands: _StandInKind
    casts: bool
    lifted: Sequence[str]
    rounded: str = ""
    widening: WideningModulesWatch | None = None
    has_gradient_graph: bool = False

    @property
    def first_message_line(self) -> str:
        """The first line of what it says."""
        return str(self.error).partition("\n")[0]

    @property
    def is_refusal_of_types(self) -> bool:
        """Whether torch refuses types, at a place where those of the arm may be the reason."""
        may_be = self.casts or bool(self.lifted) or self.stands is _StandInKind.NO_CASTS
        # as of code of torch whose table of types lacks those of 16 bits
        if not isinstance(self.error, RuntimeError) and not RECURRENT.search(self.first_message_line):
            return (
                self.casts
                and isinstance(self.error, Exception)
                and self.names_only_half_types
                and bool(self.torch_call_that_raised)
            )
        if not may_be or not TYPES.search(self.first_message_line):
            return False
        return self.casts or not BEYOND_RANGE.search(
            self.first_message_line
        )  # else of a type that the script has chosen itself

    @property
    def names_only_half_types(self) -> bool:
        """Whether the message names 16-bit types and no other, so that one of them is refused."""
        names = TYPE_NAME.findall(self.first_message_line)
        return bool(names) and all(HALF_TYPE.fullmatch(name) for name in names)

    @property
    def torch_call_that_raised(self) -> _TorchFunctionCall | None:
        """The call of code of torch in Python that has raised; None where the script's own line has."""
        return _find_call_into_torch_that_raised(self.error.__traceback__)

    @property
    def has_call_only_halves(self) -> bool:
        """Whether the call that has raised got 16-bit tensors and none of fp32, as far as its expression shows."""
        given = find_types_given_to_failing_call(self.error.__traceback__)
        if given is not None and (given.is_complete or not given.types <= set(HALF_DTYPES)):
            return bool(given.types) and given.types <= set(HALF_DTYPES)
        if given is not None and not BUT_FOUND.search(self.first_message_line):
            return True
        return _holds_raising_function_only_halves(self.error.__traceback__)

    @property
    def has_call_one_half_type(self) -> bool:
        """Whether the call that has raised is known to have got tensors of one 16-bit type alone."""
        given = find_types_given_to_failing_call(self.error.__traceback__)
        return (
            given is not None
            and given.is_complete
            and len(given.types) == 1
            and given.types <= set(HALF_DTYPES)
        )


@dataclasses.dataclass(frozen=True)
class _FailureKind:
    """A kind of failure, and what is said of it.

    Attributes:
        pattern: of the message.
        why: what is wrong under the arm; a function gets the failure, as for arms and remedy.
        arms: others that may train the script.
        remedy: what else helps.
        applies: which failures with that message are of the kind.
        shown: in the place of the message; "" for the message.
    """

    pattern: re.Pattern[str]
    why: str | Callable[[_ScriptFailure], str]
    arms: tuple[str, ...] | Callable[[_ScriptFailure], tuple[str, ...]] = ()
    remedy: str | Callable[[_ScriptFailure], str] = ""
    applies: Callable[[_ScriptFailure], bool] = lambda failure: True
    shown: str = ""

    def matches_failure(self, failure: _ScriptFailure) -> bool:
        return bool(self.pattern.search(failure.first_message_line)) and self.applies(failure)

    def refusal_of_failure(self, failure: _ScriptFailure) -> UnsupportedCombination:
        why = self.why if isinstance(self.why, str) else self.why(failure)
        arms = self.arms if isinstance(self.arms, tuple) else self.arms(failure)
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(failure)
        kind = "" if isinstance(failure.error, RuntimeError) else f"{type(failure.error).__name__}: "
        seen = f"under {failure.arm} {why} ({self.shown or kind + failure.first_message_line})"
        place = location_of_error(failure.error) or "the script"
        return UnsupportedCombination.with_advice(f"{place}: {seen}", *arms, remedy=remedy)


def _find_refusal_of_failure(
    error: BaseException,
    arm: Arm,
    stand_in: TorchAmpStandIn,
    *,
    arm_has_cast: bool,
    lifted_types: Sequence[str],
    rounded_numbers_text: str,
) -> UnsupportedCombination | None:
    widening = stand_in.widening if isinstance(stand_in, TorchAmpByHalfWeights) else None
    kind, has_graph = _kind_of_stand_in(arm, stand_in), stand_in.script.has_gradient_graph
    failure = _ScriptFailure(
        error, arm, kind, arm_has_cast, lifted_types, rounded_numbers_text, widening, has_graph
    )
    rows = (*OTHER_ERRORS, *TYPE_ERRORS) if failure.is_refusal_of_types else OTHER_ERRORS
    row = next((row for row in rows if row.matches_failure(failure)), None)
    return None if row is None else row.refusal_of_failure(failure)


def _kind_of_stand_in(arm: Arm, stand_in: TorchAmpStandIn) -> _StandInKind:
    if isinstance(stand_in, TorchAmpByHalfWeights):
        return _StandInKind.WEIGHTS
    if isinstance(stand_in, TorchAmpByO1):
        return _StandInKind.O1
    lacks_casts = stand_in.script.has_autocast and arm.roles is not None and arm.roles.operand_type == "fp32"
    return _StandInKind.NO_CASTS if lacks_casts else _StandInKind.AUTOCAST


def _beyond_range_text(failure: _ScriptFailure) -> str:
    is_fp16 = _is_beyond_fp16_range(failure)
    most = torch.finfo(torch.float16 if is_fp16 else torch.bfloat16).max
    return (
        f"a tensor there is {'fp16' if is_fp16 else 'bf16'}, whose largest number is {most:g}, and the script puts a "
        "larger one into it"
    )


def _is_beyond_fp16_range(failure: _ScriptFailure) -> bool:
    found = BEYOND_RANGE.search(failure.first_message_line)
    return found is not None and found[1] == "Half"


def _arms_with_wider_range(failure: _ScriptFailure) -> tuple[str, ...]:
    return ("native:bf16",) if _is_beyond_fp16_range(failure) else ()


def _may_be_from_lifted_weights(failure: _ScriptFailure) -> bool:
    """Return whether a failure may come from the script's own 16-bit weights, which the arm has lifted to fp32."""
    return bool(failure.lifted) and (not failure.casts or failure.stands is not _StandInKind.WEIGHTS)


def _arms_for_mixed_weights(failure: _ScriptFailure) -> tuple[str, ...]:
    """Return the arms that can compute what does not fit 16-bit weights."""
    kept = _keep_fp32_patterns(failure)
    arms = tuple(str(_arm_keeping_one_more_module(failure.arm, one)) for one in kept)
    if ATTENTION.search(failure.first_message_line):
        return (*arms, "native:bf16", "native:fp16")
    return (
        (*arms, "native:bf16", "native:fp16", "apex:O1")
        if PRODUCT.search(failure.first_message_line)
        else arms
    )


def _arms_for_mixed_types_in_torch(failure: _ScriptFailure) -> tuple[str, ...]:
    """Return the arms that can compute what code of torch inside of a module does with both types."""
    trace = failure.error.__traceback__
    model = _raising_modules_and_their_locals(trace)[0][0]
    inside = _pattern_of_module(model, _name_of_module_inside_which_torch_raised(trace))
    other = "native:fp16" if failure.stands is _StandInKind.O1 else "fp32"
    return str(_arm_keeping_one_more_module(failure.arm, inside)), other


def _arms_for_attention_under_o1(failure: _ScriptFailure) -> tuple[str, ...]:
    return ("native:bf16", "native:fp16") if ATTENTION.search(failure.first_message_line) else ()


def _index_out_of_bounds_text(failure: _ScriptFailure) -> str:
    return f"an index is out of bounds, and {failure.rounded}"


def _refused_bce_text(failure: _ScriptFailure) -> str:
    who = "Apex" if failure.stands is _StandInKind.O1 else "torch.autocast"
    return f"{who} refuses BCELoss, as rounding makes it infinite"


def _both_halves_text(failure: _ScriptFailure) -> str:
    arms_type, scripts_type = "bf16", "fp16"
    if half_dtype_of(failure.arm) is torch.float16:
        arms_type, scripts_type = scripts_type, arms_type
    return f"the arm casts the model to {arms_type} and the script casts tensors itself to {scripts_type}"


def _lifted_weights_text(failure: _ScriptFailure) -> str:
    lifted = " and ".join(failure.lifted)
    return f"the script casts tensors to {lifted} itself, and its weights, which were that, are fp32"


def _mixed_types_in_torch_text(failure: _ScriptFailure) -> str:
    call = failure.torch_call_that_raised
    return f"code of torch itself in {call and call.name} computes with both types"


def _own_fp32_tensors_text(failure: _ScriptFailure) -> str:
    modules, _ = _raising_modules_and_their_locals(failure.error.__traceback__)
    without_weights = bool(modules) and next(modules[-1].parameters(), None) is None
    has_buffers = without_weights and any(one.dtype in HALF_DTYPES for one in modules[-1].buffers())
    what = "buffers, which the arm has cast" if has_buffers else "weights"
    return f"the script makes or keeps fp32 tensors of its own, which do not fit the 16-bit {what}"


def _remedy_by_one_type(failure: _ScriptFailure) -> str:
    if _has_integers_arm_would_round(failure):
        return "compute in fp32 there: 16 bits round its whole numbers, such as positions"
    return "give it tensors of one type there, for example with .to(other.dtype)"


def _has_integers_arm_would_round(failure: _ScriptFailure) -> bool:
    """Return whether the script's line that has raised, in a module, got whole numbers that the arm's type rounds."""
    half = half_dtype_of(failure.arm)
    _, given = _raising_modules_and_their_locals(failure.error.__traceback__)
    if half is None or not given:
        return False
    whole = [one for one in tensors_in_value(given[-1]) if one.dtype in WHOLE]
    return any(bool((one.to(half).to(one.dtype) != one).any()) for one in whole if one.numel() <= MAX_READ)


def _uncast_torch_call_text(failure: _ScriptFailure) -> str:
    return f"{_mixed_types_in_torch_text(failure)}, which Apex's lists do not cast"


def _uncast_torch_module_text(failure: _ScriptFailure) -> str:
    module = _name_of_module_inside_which_torch_raised(failure.error.__traceback__)
    return f"code of torch itself in {module} computes with both types, which {_missing_cast_phrase(failure)}"


def _missing_cast_phrase(failure: _ScriptFailure) -> str:
    return "Apex's lists do not cast" if failure.stands is _StandInKind.O1 else "torch.autocast does not cast"


def _mixed_types_in_backward_text(failure: _ScriptFailure) -> str:
    function = _find_function_that_failed_in_backward(failure.error.__traceback__)
    assert function is not None
    text = f"{function.name} gets tensors of both types in its backward pass, where autocast is off"
    return f"{text}, as its custom_fwd is for {function.decorated_for}" if function.decorated_for else text


def _has_rounded_index(failure: _ScriptFailure) -> bool:
    return failure.casts and bool(failure.rounded) and isinstance(failure.error, IndexError)


def _lacks_half_kernel(failure: _ScriptFailure) -> bool:
    return failure.names_only_half_types or bool(NO_KERNEL.search(failure.first_message_line))


def _has_mixed_types_inside_torch_module(failure: _ScriptFailure) -> bool:
    """Return whether code of torch inside of a module has mixed types where functions are cast."""
    trace = failure.error.__traceback__
    if not _name_of_module_inside_which_torch_raised(trace):
        return False
    if failure.stands is _StandInKind.O1:
        return True
    given = _raising_modules_and_their_locals(trace)[1]
    inputs = {one.dtype for one in tensors_in_value(given[-1:]) if one.is_floating_point()}
    return (
        failure.stands is _StandInKind.AUTOCAST and len(inputs) < 2
    )  # else the script's own line mixes them


def _is_overflow_in_anomaly_mode(failure: _ScriptFailure) -> bool:
    """Return whether torch refuses a pass that overflows at a loss scale which would have skipped its step."""
    scale = None if failure.arm.roles is None else failure.arm.roles.loss_scale
    return scale is not None and torch.is_anomaly_enabled() and isinstance(failure.error, RuntimeError)


def _has_optimizer_lost_gradient_graph(failure: _ScriptFailure) -> bool:
    """Return whether an optimizer has computed with the graph of gradients, in whose place an arm gives it others."""
    roles = failure.arm.roles
    gives_others = roles is not None and (roles.loss_scale is not None or bool(roles.masters))
    if (
        not gives_others
        or not failure.has_gradient_graph
        or not isinstance(failure.error, RuntimeError | ValueError)
    ):
        return False
    trace = failure.error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        is_optimizer = isinstance(trace.tb_frame.f_locals.get("self"), torch.optim.Optimizer)
        if is_optimizer and code.co_name == "step" and is_users_or_installed_file(code.co_filename):
            return True
        trace = trace.tb_next
    return False


UNSCALED = Arm.parse("native:bf16")
OTHER_ERRORS = (
    _FailureKind(
        ANOMALY,
        "an overflow at a loss scale, whose step is skipped and the scale halved, is an error by "
        "torch.autograd.set_detect_anomaly of the script",
        lambda failure: _arms_without_scale(failure),
        "leave out set_detect_anomaly, which slows the training too",
        applies=_is_overflow_in_anomaly_mode,
    ),
    _FailureKind(
        NO_GRAPH,
        "the optimizer differentiates gradients in its step, and those that the arm unscales, or copies to masters, "
        "have no graph",
        ("native:bf16", "fp32"),
        applies=_has_optimizer_lost_gradient_graph,
    ),
    _FailureKind(
        NUMPY_LACKS,
        "the script passes a bfloat16 tensor to NumPy, which has no such type",
        ("native:fp16",),
        "write .float() before .numpy() there",
        applies=lambda failure: failure.casts and isinstance(failure.error, TypeError),
    ),
    _FailureKind(
        OUT_OF_BOUNDS,
        _index_out_of_bounds_text,
        ("native:bf16", "native:fp16"),
        "pass whole numbers as integers, which nothing casts",
        applies=_has_rounded_index,
    ),
    _FailureKind(
        DENSE,
        "masters get dense gradients, as those of Apex, and the optimizer takes sparse ones alone",
        ("native:fp16", "half:masters=fp32"),
        applies=lambda failure: failure.casts and isinstance(failure.error, RuntimeError),
    ),
)
# The first row that fits: messages that say what is wrong, then what each kind of arm makes of the others.
TYPE_ERRORS = (
    _FailureKind(
        BEYOND_RANGE,
        _beyond_range_text,
        _arms_with_wider_range,
        "use torch.finfo(tensor.dtype).min or max there",
    ),
    _FailureKind(
        BANNED,
        _refused_bce_text,
        ("fp32",),
        "let the model return logits and use BCEWithLogitsLoss",
        shown="binary_cross_entropy after sigmoid",
    ),
    _FailureKind(
        COMPLEX,
        "torch cannot unscale the gradients of complex weights",
        lambda failure: _arms_without_scale(failure),
    ),
    _FailureKind(
        FP32_WANTED,
        "an operation takes fp32 alone, and gets 16-bit tensors",
        lambda failure: _arms_for_missing_half_kernel(failure),
        "cast its inputs to fp32 and its result back there",
        applies=lambda failure: failure.has_call_only_halves,
    ),
    _FailureKind(
        BOTH_HALVES,
        _both_halves_text,
        ("fp32",),
        "cast to the type of the weight there",
        applies=lambda failure: failure.stands is _StandInKind.WEIGHTS,
    ),
    _FailureKind(
        ANY,
        "torch cannot compute a gradient in 16 bits on this device",
        ("native:bf16", "native:fp16", "fp32"),
        "keep the module whose gradient it is in fp32, by keep_fp32=",
        applies=lambda failure: (
            failure.stands is _StandInKind.WEIGHTS
            and _lacks_half_kernel(failure)
            and _has_torch_raised_in_backward(failure.error.__traceback__)
        ),
    ),
    _FailureKind(
        ANY,
        "torch cannot compute this in 16 bits on this device",
        lambda failure: _arms_for_missing_half_kernel(failure),
        lambda failure: _remedy_by_fp32_inputs(failure),
        applies=_lacks_half_kernel,
    ),
    _FailureKind(
        ANY,
        "an operation refuses 16-bit tensors, and gets no others",
        lambda failure: _arms_for_missing_half_kernel(failure),
        "cast its inputs to fp32 and its result back there",
        applies=lambda failure: failure.casts and failure.has_call_one_half_type,
    ),
    _FailureKind(
        HALF_TYPE,
        _lifted_weights_text,
        ("script",),
        "cast to the type of the weight there",
        applies=_may_be_from_lifted_weights,
    ),
    _FailureKind(
        ANY,
        _mixed_types_in_torch_text,
        lambda failure: _arms_for_missing_half_kernel(failure),
        "cast its inputs to fp32 there",
        applies=lambda failure: (
            failure.stands is _StandInKind.WEIGHTS and _has_torch_made_second_type(failure)
        ),
    ),
    _FailureKind(
        ANY,
        _own_fp32_tensors_text,
        _arms_for_mixed_weights,
        _remedy_by_one_type,
        applies=lambda failure: failure.stands is _StandInKind.WEIGHTS,
    ),
    _FailureKind(
        ANY,
        _uncast_torch_module_text,
        _arms_for_mixed_types_in_torch,  # no line of the user could be changed
        applies=_has_mixed_types_inside_torch_module,
    ),
    _FailureKind(
        ANY,
        _uncast_torch_call_text,
        ("native:fp16", "fp32"),
        "call it outside of autocast there",
        applies=lambda failure: failure.stands is _StandInKind.O1 and _has_torch_made_second_type(failure),
    ),
    _FailureKind(
        ANY,
        "an operation gets tensors of both types, and Apex's lists of functions to cast lack it",
        _arms_for_attention_under_o1,
        _remedy_by_one_type,
        applies=lambda failure: failure.stands is _StandInKind.O1,
    ),
    _FailureKind(
        ANY,
        "an operation gets tensors of both types, which autocast would cast, and this arm does not",
        remedy=_remedy_by_one_type,
        applies=lambda failure: failure.stands is _StandInKind.NO_CASTS,
    ),
    _FailureKind(
        ANY,
        _mixed_types_in_backward_text,
        ("fp32",),
        "give custom_fwd and custom_bwd the device_type that it computes on",
        applies=lambda failure: _is_function_decorated_for_other_device(failure),
    ),
    _FailureKind(
        ANY,
        _mixed_types_in_backward_text,
        ("fp32",),
        "decorate its forward with torch.amp.custom_fwd and its backward with torch.amp.custom_bwd, both with the "
        "device_type that it computes on",
        applies=lambda failure: (
            _find_function_that_failed_in_backward(failure.error.__traceback__) is not None
        ),
    ),
    _FailureKind(
        ANY,
        "an operation gets tensors of both types, and torch.autocast does not cast it",
        lambda failure: _arms_for_operands_of_two_types(failure),
        _remedy_by_one_type,
    ),
)


def _remedy_by_fp32_inputs(failure: _ScriptFailure) -> str:
    """Return what lets a line compute in fp32: of code of torch in Python, the products inside are cast again."""
    if failure.torch_call_that_raised is None or failure.stands not in (
        _StandInKind.AUTOCAST,
        _StandInKind.O1,
    ):
        return "cast its inputs to fp32 there"
    is_o1 = failure.stands is _StandInKind.O1
    off = "amp.disable_casts()" if is_o1 else "torch.autocast(device_type, enabled=False)"
    return f"call {failure.torch_call_that_raised.name} inside of `with {off}:`, with its inputs cast to fp32"


def _arms_for_missing_half_kernel(failure: _ScriptFailure) -> tuple[str, ...]:
    """Return arms that compute in fp32 what has no kernel in 16 bits."""
    trace = failure.error.__traceback__
    if failure.stands in (_StandInKind.AUTOCAST, _StandInKind.O1):
        name = _name_of_last_module_in_first(_raising_modules_and_their_locals(trace)[0])
    elif failure.stands is _StandInKind.WEIGHTS:
        modules, _ = _raising_modules_and_their_locals(trace)
        # complex ones are no 16-bit weights: the arm leaves them alone
        without_weights = bool(modules) and all(one.is_complex() for one in modules[-1].parameters())
        name = (
            _name_of_last_module_in_first(modules)
            if without_weights
            else _name_and_locals_of_innermost_half_module(trace)[0]
        )
    else:
        name = ""
    if not name:
        return *_arms_for_cast_buffers(failure), "fp32"
    model = _raising_modules_and_their_locals(trace)[0][0]
    scales = half_dtype_of(failure.arm) is torch.float16
    # torch cannot unscale complex gradients, so another dtype without a scale is what trains such a model
    arm = UNSCALED if scales and any(each.is_complex() for each in model.parameters()) else failure.arm
    return str(_arm_keeping_one_more_module(arm, _pattern_of_module(model, name))), "fp32"


def _arms_for_cast_buffers(failure: _ScriptFailure) -> tuple[str, ...]:
    """Return the arm with autocast in the 16-bit type of one that has cast a buffer of the module that has raised.

    In fp32 it may make fp32 of what it meets, as the window of `torch.stft` does; whether it does so shows a trial.
    """
    modules, _ = _raising_modules_and_their_locals(failure.error.__traceback__)
    is_cast = failure.stands is _StandInKind.WEIGHTS and bool(modules)
    if not is_cast or not any(one.dtype in HALF_DTYPES for one in modules[-1].buffers()):
        return ()
    return ("native:fp16" if half_dtype_of(failure.arm) is torch.float16 else "native:bf16",)


def _arms_for_operands_of_two_types(failure: _ScriptFailure) -> tuple[str, ...]:
    """Return arms for operands of two types: where fp32 takes 16 bits, first that with the called modules in fp32."""
    if not FP32_TAKES_HALF.search(failure.first_message_line):
        return _arms_for_missing_half_kernel(failure)
    trace, line, modules = failure.error.__traceback__, "", []
    while trace is not None:
        module, code = trace.tb_frame.f_locals.get("self"), trace.tb_frame.f_code
        if isinstance(module, nn.Module) and is_users_or_installed_file(code.co_filename):
            modules.append(model_inside_wrappers(module))
            line = linecache.getline(code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    parts = [getattr(modules[-1], name, None) for name in CALL_OF_PART.findall(line)] if modules else []
    called = [part for part in parts if isinstance(part, nn.Module)]
    names = [_name_of_last_module_in_first([modules[0], part]) for part in called]
    kept = "|".join(_pattern_of_module(modules[0], name) for name in filter(None, names))
    arms = _arms_for_missing_half_kernel(failure)
    return (str(_arm_keeping_one_more_module(failure.arm, kept)), *arms) if kept else arms


def _arms_without_scale(failure: _ScriptFailure) -> tuple[str, ...]:
    """Return arms that scale no loss, the first with the modules in fp32 that the failed arm keeps so."""
    kept = failure.arm.keep_fp32
    return str(_arm_keeping_one_more_module(UNSCALED, kept) if kept else UNSCALED), "fp32"


def _keep_fp32_patterns(failure: _ScriptFailure) -> list[str]:
    """Return patterns of modules each of which may let a script train: what makes fp32 of 16 bits, and what got fp32.

    The first give the type of their inputs if the arm keeps them. Of the second, which run whole in fp32 as they are,
    as a head behind a `.float()` of the model, the outermost counts that was given nothing else. Without any, it is the
    innermost that has raised, as a table of frequencies whose buffer was cast.
    """
    modules, given = _raising_modules_and_their_locals(failure.error.__traceback__)
    if not modules:
        return []
    names = {id(module): name for name, module in modules[0].named_modules()}
    found = (
        [] if failure.widening is None else failure.widening.names_of_innermost_widening_modules(modules[0])
    )
    patterns = ["|".join(dict.fromkeys(LAYER_NUMBER.sub("*", name) for name in found))] if found else []
    outermost = ""
    for module, values in zip(reversed(modules), reversed(given), strict=True):
        inputs = {one.dtype for one in tensors_in_value(values) if one.is_floating_point()}
        if inputs != {torch.float32} or not _has_16_bit_weights_alone(module):
            break
        outermost = names.get(id(module), "") or outermost
    innermost = names.get(id(modules[-1]), "")
    if not patterns and not outermost and innermost:
        return [_pattern_of_module(modules[0], innermost)]
    return [*patterns, *([outermost] if outermost else [])]


def _name_and_locals_of_innermost_half_module(trace: types.TracebackType | None) -> tuple[str, list[Any]]:
    """Return the name of the innermost part of a model that has raised, and what its `forward` holds.

    The name is "" where that has no 16-bit weights, or weights of other types too.
    """
    modules, given = _raising_modules_and_their_locals(trace)
    is_known = bool(modules) and _has_16_bit_weights_alone(modules[-1])
    return _name_of_last_module_in_first(modules) if is_known else "", given[-1] if given else []


def _has_16_bit_weights_alone(module: nn.Module) -> bool:
    weights = {param.dtype for param in module.parameters() if not param.is_complex()}
    return bool(weights) and weights <= set(HALF_DTYPES)


def _raising_modules_and_their_locals(
    trace: types.TracebackType | None,
) -> tuple[list[nn.Module], list[list[Any]]]:
    """Return the modules whose `forward` has raised, the model first, and what that of each holds."""
    modules: list[nn.Module] = []
    given: list[list[Any]] = []
    while trace is not None:
        values = trace.tb_frame.f_locals
        module = values.get("self")
        if isinstance(module, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            modules.append(model_inside_wrappers(module))
            code = trace.tb_frame.f_code
            arguments = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            arguments += (
                ("args", "kwargs") if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) else ()
            )
            given.append([values.get(name) for name in arguments])
        trace = trace.tb_next
    return modules, given


def _name_of_last_module_in_first(modules: list[nn.Module]) -> str:
    """Return the name of the last of some modules in the first one; "" if it is that, or there is none."""
    return (
        next((name for name, module in modules[0].named_modules() if module is modules[-1]), "")
        if modules
        else ""
    )


def _pattern_of_module(model: nn.Module, name: str) -> str:
    """Return what `keep_fp32` matches a module of a model by, and those that are alike, which would fail next.

    Several of one type without weights, as what quantizes in training, have the name of their type; of a layer of many
    its number is left open.
    """
    module = dict(model.named_modules())[name]
    alike = [one for one in model.modules() if type(one) is type(module)]
    if len(alike) > 1 and not any(True for one in alike for _ in one.parameters()):
        return type(module).__name__
    return LAYER_NUMBER.sub("*", name)


def _name_of_module_inside_which_torch_raised(trace: types.TracebackType | None) -> str:
    """Return the name of the innermost module inside of whose call code of torch itself has raised; "" if none has."""
    modules: list[nn.Module] = []
    inner = ""
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        is_own = is_users_or_installed_file(code.co_filename)
        if isinstance(module, nn.Module):
            modules.append(model_inside_wrappers(module))
            names = {
                id(one): name for name, one in modules[0].named_modules() if "parametrizations" not in name
            }
            inner = "" if is_own else names.get(id(modules[-1]), inner)
        elif is_own:
            inner = ""
        trace = trace.tb_next
    return inner


def _find_call_into_torch_that_raised(trace: types.TracebackType | None) -> _TorchFunctionCall | None:
    """Return the call of code of torch from the innermost line of the user, if that code has raised."""
    entry: types.FrameType | None = None
    while trace is not None:
        frame = trace.tb_frame
        if is_users_or_installed_file(frame.f_code.co_filename):
            entry = None
        elif entry is None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
            entry = frame
        trace = trace.tb_next
    if entry is None:
        return None
    code = entry.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    given: list[Any] = [entry.f_locals.get(name) for name in code.co_varnames[:count]]
    for value in list(given):
        if isinstance(value, nn.Module):
            given += [*value.parameters(), *value.buffers()]
    found = frozenset(one.dtype for one in tensors_in_value(given) if one.is_floating_point())
    return _TorchFunctionCall(code.co_qualname.rpartition(".<locals>.")[2], found)


def _find_function_that_failed_in_backward(trace: types.TracebackType | None) -> _UserAutogradFunction | None:
    """Return the user's `torch.autograd.Function` whose backward pass has raised; None for none."""
    found = None
    while trace is not None:
        frame = trace.tb_frame
        first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if is_users_or_installed_file(frame.f_code.co_filename) and isinstance(
            first, torch.autograd.function.BackwardCFunction
        ):
            name = frame.f_code.co_qualname.rpartition(".<locals>.")[2].partition(".")[0]
            forward = getattr(getattr(first, "_forward_cls", None), "forward", None)
            decorated_for = _value_in_closure(forward, "device_type")
            devices = {one.device.type for one in tensors_in_value([*frame.f_locals.values()])}
            found = _UserAutogradFunction(name, "" if decorated_for in devices else str(decorated_for or ""))
        trace = trace.tb_next
    return found


def _value_in_closure(function: Any, name: str) -> Any:
    """Return what a nested function has of the one around it by a name; None without."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    return next((cell.cell_contents for one, cell in zip(names, cells, strict=False) if one == name), None)


def _is_function_decorated_for_other_device(failure: _ScriptFailure) -> bool:
    function = _find_function_that_failed_in_backward(failure.error.__traceback__)
    return function is not None and bool(function.decorated_for)


def _has_torch_raised_in_backward(trace: types.TracebackType | None) -> bool:
    """Return whether torch's own part of a backward pass has raised, which no code of a model or script runs."""
    is_inside = False
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_inside and (is_users_or_installed_file(code.co_filename) or code.co_name == "forward"):
            return False
        is_inside |= code.co_name == "_engine_run_backward"
        trace = trace.tb_next
    return is_inside


def _has_torch_made_second_type(failure: _ScriptFailure) -> bool:
    """Return whether code of torch got tensors of one type, and has made those of another."""
    return (
        failure.torch_call_that_raised is not None
        and len(failure.torch_call_that_raised.types) == 1
        and not failure.names_only_half_types
    )


def _arm_keeping_one_more_module(arm: Arm, name: str) -> Arm:
    """Return an arm that keeps one more module in fp32."""
    kept = dict.fromkeys([*(arm.keep_fp32 or "").split("|"), name])
    return dataclasses.replace(arm, options={**arm.options, "keep_fp32": "|".join(filter(None, kept))})


def _holds_raising_function_only_halves(trace: types.TracebackType | None) -> bool:
    """Return whether the function that has raised holds 16-bit tensors and none of fp32, of its modules neither."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    held: list[Any] = list(trace.tb_frame.f_locals.values())
    held += [trace.tb_frame.f_globals.get(name) for name in trace.tb_frame.f_code.co_names]
    for value in list(held):
        if isinstance(value, torch.nn.Module):
            held += [*value.parameters(recurse=False), *value.buffers(recurse=False)]
        if isinstance(value, list | tuple):
            held += value
    found = {one.dtype for one in held if isinstance(one, Tensor) and one.is_floating_point()}
    return bool(found) and found <= set(HALF_DTYPES)
