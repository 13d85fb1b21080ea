"""Types of the tensors that a failing call got, by the expression of its line and the values of its function."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.tensors.tree import tensors_in_value

CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
# Methods whose results have the type of their tensor under each arm.
KEEPING = frozenset((
    "abs", "neg", "view", "reshape", "transpose", "permute", "flatten", "squeeze", "unsqueeze", "contiguous", "detach",
    "clone", "t", "expand", "repeat", "clamp", "relu", "chunk", "split", "unbind", "select", "narrow", "cpu", "cuda",
))  # fmt: skip
SAME_NUMBERS = frozenset(("T", "mT", "data"))  # attributes


@dataclass(frozen=True)
class GivenTypes:
    """What is known of the floating-point tensors that a failing call got.

    Attributes:
        types: of those whose type is known.
        is_complete: there are no others.
    """

    types: frozenset[torch.dtype]
    is_complete: bool


NOTHING = GivenTypes(frozenset(), is_complete=True)
UNKNOWN = GivenTypes(frozenset(), is_complete=False)


def find_types_given_to_failing_call(trace: types.TracebackType | None) -> GivenTypes | None:
    """Return the types that the innermost call of a trace got.

    Nothing is computed again: operands are names and attributes, and methods of them that keep or name a type.

    Returns:
        None where the source is not known, or what has raised is no operation, such as a `raise`.
    """
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    place = next(itertools.islice(code.co_positions(), trace.tb_lasti // 2, None), None)
    if place is None or None in place:
        return None
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, trace.tb_frame.f_globals)))
    except SyntaxError:
        return None
    operands = _operands_at_place(tree, place)
    if operands is None:
        return None
    return _unite_types(_types_of_expression(operand, trace.tb_frame) for operand in operands)


def _operands_at_place(tree: ast.AST, place: tuple[int | None, ...]) -> list[ast.expr] | None:
    """Return the operands of the operation at the place of an instruction: first and last line, and column."""
    ending: list[ast.Call] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _place_of_node(target) == place:
                    return [target.value, target.slice, node.value]
        if not isinstance(node, ast.expr | ast.AugAssign):
            continue
        if _place_of_node(node) == place and (found := _operands_of_operation(node)) is not None:
            return found
        # of a method the place begins in the line of its name
        if isinstance(node, ast.Call) and _place_of_node(node)[1::2] == place[1::2]:
            ending.append(node)
    return _operands_of_operation(ending[0]) if len(ending) == 1 else None


def _place_of_node(node: ast.expr | ast.stmt) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _operands_of_operation(node: ast.AST) -> list[ast.expr] | None:
    match node:
        case ast.Call():
            receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return [*receiver, *node.args, *(keyword.value for keyword in node.keywords)]
        case ast.BinOp():
            return [node.left, node.right]
        case ast.UnaryOp():
            return [node.operand]
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.AugAssign():
            return [node.target, node.value]
        case ast.Subscript():
            return [node.value, node.slice]
    return None


def _types_of_expression(node: ast.expr, frame: types.FrameType) -> GivenTypes:
    match node:
        case ast.Constant() | ast.Slice():
            return NOTHING
        case ast.Name() | ast.Attribute():
            is_known, value = _find_value(node, frame)
            return _types_of_value(value) if is_known else UNKNOWN
        case ast.Tuple() | ast.List():
            return _unite_types(_types_of_expression(item, frame) for item in node.elts)
        case ast.Starred() | ast.NamedExpr() | ast.Subscript():
            return _types_of_expression(node.value, frame)
        case ast.UnaryOp():
            return _types_of_expression(node.operand, frame)
        case ast.BinOp():
            found = _unite_types(_types_of_expression(side, frame) for side in (node.left, node.right))
            return (
                GivenTypes(_promoted_types(found.types), found.is_complete) if found.is_complete else UNKNOWN
            )
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)):
            base = _types_of_expression(receiver, frame)
            if name in CASTS and base.types:
                return GivenTypes(frozenset((CASTS[name],)), is_complete=True)
            return base if name in KEEPING and base.types else UNKNOWN
    return UNKNOWN


def _find_value(node: ast.expr, frame: types.FrameType) -> tuple[bool, Any]:
    """Return whether the value of a name, or of an attribute of it, is known, and the value; runs no property."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if node.id in names:
                return True, names[node.id]
        return False, None
    if not isinstance(node, ast.Attribute):
        return False, None
    is_known, base = _find_value(node.value, frame)
    if not is_known:
        return False, None
    if isinstance(base, Tensor):
        return node.attr in SAME_NUMBERS, base
    if isinstance(base, nn.Module):
        own = (base._parameters, base._buffers, base._modules)
        held = next((names for names in own if node.attr in names), vars(base))
    else:
        held = getattr(base, "__dict__", {})
    return node.attr in held, held.get(node.attr)


def _types_of_value(value: Any) -> GivenTypes:
    tensors = [one for one in tensors_in_value(value) if one.is_floating_point()]
    return GivenTypes(frozenset(one.dtype for one in tensors), is_complete=True)


def _promoted_types(found: frozenset[torch.dtype]) -> frozenset[torch.dtype]:
    return frozenset((functools.reduce(torch.promote_types, found),)) if found else found


def _unite_types(given: Iterable[GivenTypes]) -> GivenTypes:
    parts = list(given)
    return GivenTypes(
        frozenset().union(*(part.types for part in parts)), all(part.is_complete for part in parts)
    )
