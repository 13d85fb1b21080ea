"""What an error of torch about types means where an arm has brought the types about."""

import dataclasses
import enum
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.location import is_users, raised_at
from ampcompare.base.tensors.tree import tensors_in
from ampcompare.script.banned_loss import BANNED
from ampcompare.script.keep_fp32 import bare_model
from ampcompare.script.torch_amp.half_weights import HalfWeights
from ampcompare.script.torch_amp.o1 import O1BehindTorch
from ampcompare.script.torch_amp.protocol import TorchAmpStandIn

TYPES = re.compile(
    rf"{BANNED.pattern}|dtype|scalar type|[^a-z](Half|BFloat16)\b|should be the same|unscale.*Complex", re.IGNORECASE
)
# Of an operation that wants fp32, not of one whose operands differ.
FP32_WANTED = re.compile(
    r"(?:expect|must|only|requir|support|need)(?!.*\b(?:same|equal|match|got \w+ and)\b)"
    r".*?\b(?:float|float32|fp32)\b",
    re.IGNORECASE,
)
NO_KERNEL = re.compile(
    r"not implemented for|Unsupported dtype|Low precision dtypes not supported"
    r"|supports? floating point, complex, and integer tensors, but got (?:Half|BFloat16)"
    r"|but got BFloat16 and BFloat16"
)
# Of products, whose operands all arms that cast functions cast; Apex's lists lack that of attention.
PRODUCT = re.compile(r"\bmat[12]\b|\bm1 and m2\b|\bbatch[12]\b|^Input type .* type|Input and parameter tensors")
ATTENTION = re.compile("query, key")
DENSE = re.compile(r"does not support dense gradients")
BEYOND_RANGE = re.compile(r"converted to type (?:c10|at)::(Half|BFloat16) without overflow")
COMPLEX = re.compile("Complex")
HALF_TYPE = re.compile("BFloat16|bfloat16|Half|half|float16")
ANY = re.compile("")
NUMPY_LACKS = re.compile(r"unsupported ScalarType BFloat16")


def explain_types(
    error: BaseException, arm: Arm, names: TorchAmpStandIn, *, casts: bool, lifted: Sequence[str]
) -> UnsupportedCombination | None:
    """Return that the types of an arm do not fit a script, if torch raised that, and a library perhaps again."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    explained = (_explain(one, arm, names, casts=casts, lifted=lifted) for one in chain)
    return next((found for found in explained if found is not None), None)


class _Stands(enum.Enum):
    """What of an arm stands behind `torch.amp`, as far as types go."""

    WEIGHTS = "weights in 16 bits"
    O1 = "Apex's casts of functions"
    AUTOCAST = "autocast"
    NO_CASTS = "nothing, where the script has autocast"


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An exception that a script has met under an arm.

    Attributes:
        casts: the arm computes in 16 bits, and has acted on the script.
        lifted: 16-bit types of the script's own weights, which the arm has made fp32.
    """

    error: BaseException
    arm: Arm
    stands: _Stands
    casts: bool
    lifted: Sequence[str]

    @property
    def message(self) -> str:
        """The first line of what it says."""
        return str(self.error).partition("\n")[0]

    @property
    def is_of_types(self) -> bool:
        """Whether torch refuses types, at a place where those of the arm may be the reason."""
        may_be = self.casts or bool(self.lifted) or self.stands is _Stands.NO_CASTS
        if not may_be or not isinstance(self.error, RuntimeError) or not TYPES.search(self.message):
            return False
        return self.casts or not BEYOND_RANGE.search(self.message)  # else of a type that the script has chosen itself


@dataclasses.dataclass(frozen=True)
class _Row:
    """A kind of failure, and what is said of it.

    Attributes:
        pattern: of the message.
        why: what is wrong under the arm; a function gets the failure.
        advice: what to do.
        applies: which failures with that message are of the kind.
        shown: in the place of the message; "" for the message.
    """

    pattern: re.Pattern[str]
    why: str | Callable[[_Failure], str]
    advice: str | Callable[[_Failure], str]
    applies: Callable[[_Failure], bool] = lambda failure: True
    shown: str = ""

    def is_of(self, failure: _Failure) -> bool:
        return bool(self.pattern.search(failure.message)) and self.applies(failure)

    def text(self, failure: _Failure) -> str:
        why, advice = (one if isinstance(one, str) else one(failure) for one in (self.why, self.advice))
        return f"under {failure.arm} {why} ({self.shown or failure.message}); {advice}"


def _explain(
    error: BaseException, arm: Arm, names: TorchAmpStandIn, *, casts: bool, lifted: Sequence[str]
) -> UnsupportedCombination | None:
    failure = _Failure(error, arm, _what_stands(arm, names), casts, lifted)
    rows = (*OTHER_ERRORS, *TYPE_ERRORS) if failure.is_of_types else OTHER_ERRORS
    row = next((row for row in rows if row.is_of(failure)), None)
    return None if row is None else UnsupportedCombination(f"{raised_at(error) or 'the script'}: {row.text(failure)}")


def _what_stands(arm: Arm, names: TorchAmpStandIn) -> _Stands:
    if isinstance(names, HalfWeights):
        return _Stands.WEIGHTS
    if isinstance(names, O1BehindTorch):
        return _Stands.O1
    lacks_casts = names.script.has_autocast and arm.roles is not None and arm.roles.operands == "fp32"
    return _Stands.NO_CASTS if lacks_casts else _Stands.AUTOCAST


def _beyond_range(failure: _Failure) -> str:
    is_fp16 = _is_beyond_fp16(failure)
    most = torch.finfo(torch.float16 if is_fp16 else torch.bfloat16).max
    return (
        f"a tensor there is {'fp16' if is_fp16 else 'bf16'}, whose largest number is {most:g}, and the script puts a "
        "larger one into it"
    )


def _is_beyond_fp16(failure: _Failure) -> bool:
    found = BEYOND_RANGE.search(failure.message)
    return found is not None and found[1] == "Half"


def _within_range(failure: _Failure) -> str:
    other = ", or compare native:bf16" if _is_beyond_fp16(failure) else ""
    return f"use torch.finfo(tensor.dtype).min or max there{other}"


def _is_of_lifted(failure: _Failure) -> bool:
    return bool(failure.lifted) and (not failure.casts or failure.stands is not _Stands.WEIGHTS)


def _fit_weights(failure: _Failure) -> str:
    """Return the arms that can compute what does not fit 16-bit weights, and how a script makes it fit."""
    arms = []
    if kept := _module_to_keep(failure.error.__traceback__):
        arms.append(str(_with_kept(failure.arm, kept)))
    if ATTENTION.search(failure.message):
        arms.append("native:bf16 or native:fp16")
    elif PRODUCT.search(failure.message):
        arms.append("native:bf16, native:fp16 or apex:O1")
    return (f"compare {', '.join(arms)}, or " if arms else "") + ONE_TYPE


def _fit_o1(failure: _Failure) -> str:
    if inside := _module_of_torch(failure.error.__traceback__):  # no line of the user could be changed
        return f"compare {_with_kept(failure.arm, inside)}, which computes that module in fp32, or native:fp16"
    return ("compare native:bf16 or native:fp16, or " if ATTENTION.search(failure.message) else "") + ONE_TYPE


def _lacks_o1(failure: _Failure) -> str:
    if inside := _module_of_torch(failure.error.__traceback__):
        return f"code of torch itself in {inside} computes with both types, which Apex's lists do not cast"
    return "an operation gets tensors of both types, and Apex's lists of functions to cast lack it"


ONE_TYPE = "give it tensors of one type there, for example with .to(other.dtype)"
OTHER_ERRORS = (
    _Row(
        NUMPY_LACKS,
        "the script passes a bfloat16 tensor to NumPy, which has no such type",
        "write .float() before .numpy() there, or compare an arm of fp16",
        lambda failure: failure.casts and isinstance(failure.error, TypeError),
    ),
    _Row(
        DENSE,
        "masters get dense gradients, as those of Apex, and the optimizer takes sparse ones alone",
        "compare native:fp16 or half:masters=fp32",
        lambda failure: failure.casts and isinstance(failure.error, RuntimeError),
    ),
)
# The first row that fits: messages that say what is wrong, then what each kind of arm makes of the others.
TYPE_ERRORS = (
    _Row(BEYOND_RANGE, _beyond_range, _within_range),
    _Row(
        BANNED,
        lambda failure: (
            f"{'Apex' if failure.stands is _Stands.O1 else 'torch.autocast'} refuses BCELoss, as rounding makes it "
            "infinite"
        ),
        "compare fp32, or let the model return logits and use BCEWithLogitsLoss",
        shown="binary_cross_entropy after sigmoid",
    ),
    _Row(COMPLEX, "torch cannot unscale the gradients of complex weights", "compare native:bf16"),
    _Row(
        FP32_WANTED,
        "an operation takes fp32 alone, and gets 16-bit tensors",
        "compare fp32, or cast its inputs to fp32 and its result back there",
        lambda failure: _are_all_16_bit(failure.error.__traceback__),
    ),
    _Row(
        NO_KERNEL,
        "torch cannot compute this in 16 bits on this device",
        lambda failure: f"compare {_with_fp32_there(failure)}, or cast its inputs to fp32 there",
    ),
    _Row(
        HALF_TYPE,
        lambda failure: (
            f"the script casts tensors to {' and '.join(failure.lifted)} itself, and its weights, which were that, are "
            "fp32"
        ),
        "compare script, or cast to the type of the weight there",
        _is_of_lifted,
    ),
    _Row(
        ANY,
        "the script makes or keeps fp32 tensors of its own, which do not fit the 16-bit weights",
        _fit_weights,
        lambda failure: failure.stands is _Stands.WEIGHTS,
    ),
    _Row(ANY, _lacks_o1, _fit_o1, lambda failure: failure.stands is _Stands.O1),
    _Row(
        ANY,
        "an operation gets tensors of both types, which autocast would cast, and this arm does not",
        ONE_TYPE,
        lambda failure: failure.stands is _Stands.NO_CASTS,
    ),
    _Row(
        ANY,
        "an operation gets tensors of both types, and torch.autocast does not cast it",
        f"compare fp32, or {ONE_TYPE}",
    ),
)


def _with_fp32_there(failure: _Failure) -> str:
    """Return arms that compute in fp32 what has no kernel in 16 bits."""
    name, _ = _module_that_raised(failure.error.__traceback__) if failure.stands is _Stands.WEIGHTS else ("", [])
    return f"{_with_kept(failure.arm, name)} or fp32" if name else "fp32"


def _module_to_keep(trace: types.TracebackType | None) -> str:
    """Return the name of the module that has raised, if it was given fp32; "" if not.

    Such a module runs whole in fp32 as it is: a head behind a `.float()` of the model.
    """
    name, given = _module_that_raised(trace)
    inputs = {one.dtype for one in tensors_in(given) if one.is_floating_point()}
    return name if inputs == {torch.float32} else ""


def _module_that_raised(trace: types.TracebackType | None) -> tuple[str, list[Any]]:
    """Return the name of the innermost part of a model that has raised, and what its `forward` holds.

    The name is "" where that has no 16-bit weights, or weights of other types too.
    """
    modules: list[nn.Module] = []
    given: list[Any] = []
    while trace is not None:
        values = trace.tb_frame.f_locals
        module = values.get("self")
        if isinstance(module, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            modules.append(bare_model(module))
            given = [value for name, value in values.items() if name != "self"]
        trace = trace.tb_next
    weights = {param.dtype for param in modules[-1].parameters()} if modules else set()
    if not weights or not weights <= {torch.float16, torch.bfloat16}:
        return "", given
    return next((name for name, module in modules[0].named_modules() if module is modules[-1]), ""), given


def _module_of_torch(trace: types.TracebackType | None) -> str:
    """Return the name of the innermost module inside of whose call code of torch itself has raised; "" if none has."""
    modules: list[nn.Module] = []
    inner = ""
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        is_own = is_users(code.co_filename)
        if isinstance(module, nn.Module):
            modules.append(bare_model(module))
            names = {id(one): name for name, one in modules[0].named_modules() if "parametrizations" not in name}
            inner = "" if is_own else names.get(id(modules[-1]), inner)
        elif is_own:
            inner = ""
        trace = trace.tb_next
    return inner


def _with_kept(arm: Arm, name: str) -> Arm:
    """Return an arm that keeps one more module in fp32."""
    kept = [*filter(None, [str(arm.options.get("keep_fp32", ""))]), name]
    return dataclasses.replace(arm, options={**arm.options, "keep_fp32": "|".join(kept)})


def _are_all_16_bit(trace: types.TracebackType | None) -> bool:
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
    return bool(found) and found <= {torch.float16, torch.bfloat16}
