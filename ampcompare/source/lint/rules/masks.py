"""Rules about numbers that fp16 cannot hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompare.source.amp_names import AUTOCASTS
from ampcompare.source.edits import Edit
from ampcompare.source.lint.module import Finding, LintModule, Mistake, name_of, rule
from ampcompare.source.lint.rules.autocast import is_fp16, is_in_fp16_block
from ampcompare.source.module import Scope
from ampcompare.source.syntax import argument

__all__: list[str] = []

LARGEST = 65504.0
HALF = ("torch.float16", "torch.half")
# What autocast runs in fp16, by full name and as methods of tensors.
CAST_TO_FP16 = frozenset(f"torch.{name}" for name in ("matmul", "bmm", "mm", "einsum", "nn.functional.linear"))
CAST_METHODS = ("matmul", "bmm", "mm")
# Methods whose result has the dtype of the tensor.
KEEPING = frozenset(
    {
        *("transpose", "permute", "view", "reshape", "contiguous", "unsqueeze", "squeeze", "flatten", "expand"),
        *("detach", "clone", "cuda", "masked_fill", "masked_fill_", "div", "div_", "mul", "mul_"),
    }
)


@rule(
    Mistake(
        "AMP236",
        "mask-beyond-fp16",
        "`masked_fill` of an fp16 tensor with a number such as `-1e9`",
        "it raises a RuntimeError: the largest fp16 number is 65504",
        "write `torch.finfo(scores.dtype).min`",
        """
import math
import torch

with torch.autocast("cuda"):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(64)
    scores = scores.masked_fill(mask == 0, -1e9)  # AMP236
""",
        """
import math
import torch

with torch.autocast("cuda"):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(64)
    scores = scores.float().masked_fill(mask == 0, -1e9)
    scores = other.masked_fill(mask == 0, float("-inf"))
""",
        fixable=True,
    ),
)
def masked_by_overflow(module: LintModule) -> Iterator[Finding]:
    """`masked_fill` of an fp16 tensor with a number beyond the range of fp16."""
    for call in module.calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("masked_fill", "masked_fill_"):
            continue
        value = argument(call, "value", 1)
        number = _number(value)
        if value is None or number is None or not LARGEST < abs(number) < float("inf"):
            continue
        if _is_half(module, call.func.value, module.scope_of[call], call.lineno):
            shown = f"`{module.source(call.func.value)}` is fp16, which holds no number beyond {LARGEST:.0f}"
            yield module.finding("AMP236", call, shown, _smallest(module, call, value, number))


def _number(node: ast.expr | None) -> float | None:
    """Return the number that a literal, or `float` of one, stands for."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _number(node.operand)
        return None if number is None else -number
    if isinstance(node, ast.Call) and name_of(node.func) == "float" and len(node.args) == 1:
        node = node.args[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
        try:
            return float(node.value)
        except ValueError:
            return None
    return None


def _is_half(module: LintModule, node: ast.expr, scope: Scope, line: int) -> bool:
    """Return whether an expression above a line is surely an fp16 tensor."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.MatMult):
            return _is_cast(module, node)
        return _is_half(module, node.left, scope, line) and _is_plain_number(module, node.right, scope)
    if isinstance(node, ast.Name):
        values = [] if node.id in scope.parameters else scope.values.get(node.id, [])
        above = [one for one in values if getattr(one, "lineno", line) < line]
        return bool(above) and all(_is_half(module, one, scope, one.lineno) for one in above)
    if not isinstance(node, ast.Call):
        return False
    if (module.resolve(node.func) or "") in CAST_TO_FP16:
        return _is_cast(module, node)
    dtype = argument(node, "dtype")
    if dtype is not None:
        return module.resolve(dtype) in HALF
    if not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in CAST_METHODS:
        return _is_cast(module, node)
    if node.func.attr in ("half", "to"):
        return node.func.attr == "half" or any(module.resolve(one) in HALF for one in node.args)
    plain = node.func.attr not in ("div", "div_", "mul", "mul_") or _is_plain_number(module, node.args[0], scope)
    return node.func.attr in KEEPING and plain and _is_half(module, node.func.value, scope, line)


def _is_plain_number(module: LintModule, node: ast.expr, scope: Scope) -> bool:
    """Return whether an expression is surely a number of Python, which leaves the dtype of a tensor as it is."""
    if _number(node) is not None:
        return True
    if isinstance(node, ast.BinOp):
        # `head_dim ** -0.5` is one of a size: tensors are not raised to it by hand.
        return isinstance(node.op, ast.Pow) and _number(node.right) in (0.5, -0.5)
    if isinstance(node, ast.Call):
        return (module.resolve(node.func) or "").startswith(("math.", "numpy.sqrt"))
    values = module.values_of(name_of(node), scope) or []
    return bool(values) and all(not _mentions(one, node) and _is_plain_number(module, one, scope) for one in values)


def _mentions(value: ast.expr, node: ast.expr) -> bool:
    """Return whether a value is an element of something, or made of the name that it is assigned to."""
    return isinstance(value, ast.Starred) or any(name_of(one) == name_of(node) for one in ast.walk(value))


def _is_cast(module: LintModule, node: ast.expr) -> bool:
    """Return whether autocast surely runs an operation in fp16: by a block around it, or as decorator."""
    if is_in_fp16_block(module, node):
        return True
    function = module.scope_of[node].node
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or _has_block(module, node):
        return False
    casts = [
        one for one in function.decorator_list if isinstance(one, ast.Call) and module.resolve(one.func) in AUTOCASTS
    ]
    return len(casts) == 1 and is_fp16(module, casts[0])


def _has_block(module: LintModule, node: ast.AST) -> bool:
    """Return whether any `with` that may be an autocast stands around a node in its function."""
    return any(isinstance(outer, (ast.With, ast.AsyncWith)) for outer in module.within_function(node))


def _smallest(module: LintModule, call: ast.Call, value: ast.expr, number: float) -> tuple[Edit, ...]:
    """Return the edit that writes the limit of the tensor's dtype, where tensor and torch have plain names."""
    assert isinstance(call.func, ast.Attribute)
    tensor = name_of(call.func.value)
    if not tensor or module.top.imports.get("torch") != ["torch"]:
        return ()
    return module.replace(value, f"torch.finfo({tensor}.dtype).{'min' if number < 0 else 'max'}")
