"""What an error of torch about types means where an arm has brought the types about."""

import dataclasses
import re
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.tensors.tree import tensors_in
from ampcompare.guards.location import is_users, raised_at
from ampcompare.script.banned_loss import BANNED
from ampcompare.script.keep_fp32 import bare_model
from ampcompare.script.torch_amp.autocast_and_scaler import TorchAmpStandIn
from ampcompare.script.torch_amp.half_weights import HalfWeights
from ampcompare.script.torch_amp.o1 import O1BehindTorch

TYPES = re.compile(
    rf"{BANNED.pattern}|dtype|scalar type|[^a-z](Half|BFloat16)\b|should be the same|unscale.*Complex", re.IGNORECASE
)
# Of an operation that wants fp32, not of one whose operands differ.
FP32_WANTED = re.compile(
    r"(?:expect|must|only|requir|support|need)(?!.*\b(?:same|equal|match|got \w+ and)\b)"
    r".*?\b(?:float|float32|fp32)\b",
    re.IGNORECASE,
)
NO_KERNEL = re.compile(r"not implemented for|Unsupported dtype")
# Of products, whose operands all arms that cast functions cast; Apex's lists lack that of attention.
PRODUCT = re.compile(r"\bmat[12]\b|\bm1 and m2\b|\bbatch[12]\b|^Input type .* type|Input and parameter tensors")
ATTENTION = re.compile("query, key")
DENSE = re.compile(r"does not support dense gradients")
BEYOND_RANGE = re.compile(r"converted to type (?:c10|at)::(Half|BFloat16) without overflow")
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


def _explain(
    error: BaseException, arm: Arm, names: TorchAmpStandIn, *, casts: bool, lifted: Sequence[str]
) -> UnsupportedCombination | None:
    line = raised_at(error) or "the script"
    if casts and isinstance(error, TypeError) and NUMPY_LACKS.search(str(error)):
        return UnsupportedCombination(
            f"{line}: under {arm} the script passes a bfloat16 tensor to NumPy, which has no such type "
            f"({error}); write .float() before .numpy() there, or compare an arm of fp16"
        )
    if casts and isinstance(error, RuntimeError) and DENSE.search(str(error)):
        return UnsupportedCombination(
            f"{line}: the masters of {arm} get dense gradients, as those of Apex, "
            f"and the optimizer takes sparse ones alone ({error}); compare native:fp16 or half:masters=fp32"
        )
    lacks_casts = names.has_autocast and arm.roles is not None and arm.roles.operands == "fp32"
    fits = not casts and not lifted and not lacks_casts
    if fits or not isinstance(error, RuntimeError) or not TYPES.search(said := str(error).partition("\n")[0]):
        return None
    if beyond := BEYOND_RANGE.search(said):
        if not casts:  # a type that the script has chosen itself
            return None
        kind = beyond[1]
        most = torch.finfo(torch.float16 if kind == "Half" else torch.bfloat16).max
        return UnsupportedCombination(
            f"{line}: under {arm} a tensor there is {'fp16' if kind == 'Half' else 'bf16'}, whose largest number is "
            f"{most:g}, and the script puts a larger one into it ({said}); use torch.finfo(tensor.dtype).min or max "
            f"there{', or compare native:bf16' if kind == 'Half' else ''}"
        )
    is_whole, is_o1 = (isinstance(names, kind) for kind in (HalfWeights, O1BehindTorch))
    # Only arms that can compute what has failed here.
    others = "" if is_whole or is_o1 else "compare fp32, or "
    if ATTENTION.search(said) and (is_whole or is_o1):
        others = "compare native:bf16 or native:fp16, or "
    elif PRODUCT.search(said) and is_whole:
        others = "compare native:bf16, native:fp16 or apex:O1, or "
    advice = f"{others}give it tensors of one type there, for example with .to(other.dtype)"
    kept = _module_to_keep(error.__traceback__) if is_whole else ""
    if kept:
        advice = f"compare {_with_kept(arm, kept)}, {advice.removeprefix('compare ')}"
    if is_whole:
        why = "the script makes or keeps fp32 tensors of its own, which do not fit the 16-bit weights"
    elif is_o1:
        why = "an operation gets tensors of both types, and Apex's lists of functions to cast lack it"
        if inside := _module_of_torch(error.__traceback__):  # no line of the user could be changed
            why = f"code of torch itself in {inside} computes with both types, which Apex's lists do not cast"
            advice = f"compare {_with_kept(arm, inside)}, which computes that module in fp32, or native:fp16"
    elif lacks_casts:
        why = "an operation gets tensors of both types, which autocast would cast, and this arm does not"
        advice = "give it tensors of one type there, for example with .to(other.dtype)"
    else:
        why = "an operation gets tensors of both types, and torch.autocast does not cast it"
    if lifted and any(name in said for name in ("BFloat16", "bfloat16", "Half", "half", "float16")):
        types = " and ".join(lifted)
        if not casts or not is_whole:
            why = f"the script casts tensors to {types} itself, and its weights, which were that, are fp32"
            advice = "compare script, or cast to the type of the weight there"
    if BANNED.search(said):
        why = f"{'Apex' if is_o1 else 'torch.autocast'} refuses BCELoss, as rounding makes it infinite"
        said = "binary_cross_entropy after sigmoid"
        advice = "compare fp32, or let the model return logits and use BCEWithLogitsLoss"
    elif "Complex" in said:
        why, advice = "torch cannot unscale the gradients of complex weights", "compare native:bf16"
    elif FP32_WANTED.search(said) and _are_all_16_bit(error.__traceback__):
        why = "an operation takes fp32 alone, and gets 16-bit tensors"
        advice = "compare fp32, or cast its inputs to fp32 and its result back there"
    elif NO_KERNEL.search(said):
        why = "torch cannot compute this in 16 bits on this device"
        advice = "compare fp32, or cast its inputs to fp32 there"
    return UnsupportedCombination(f"{line}: under {arm} {why} ({said}); {advice}")


def _module_to_keep(trace: types.TracebackType | None) -> str:
    """Return the name of the module that has raised, if it holds 16-bit weights and was given fp32; "" if not.

    Such a module runs whole in fp32 as it is: a head behind a `.float()` of the model.
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
    if not modules:
        return ""
    weights = {param.dtype for param in modules[-1].parameters()}
    inputs = {one.dtype for one in tensors_in(given) if one.is_floating_point()}
    if inputs != {torch.float32} or not weights or not weights <= {torch.float16, torch.bfloat16}:
        return ""
    return next((name for name, module in modules[0].named_modules() if module is modules[-1]), "")


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
