"""Rules about numbers that fp16 cannot hold."""

import ast
import math
import operator
from collections.abc import Callable, Iterator

from ampcompare.source.edits import Edit
from ampcompare.source.lint.read.module import Finding, LintModule, Mistake, dotted_text_of, register_rule
from ampcompare.source.lint.rules.autocast import is_in_fp16_block
from ampcompare.source.module import Scope
from ampcompare.source.syntax import argument, last_name

LARGEST = 65504.0
LARGEST_FP32 = 3.4028234663852886e38
HALF = ("torch.float16", "torch.half")
FP32 = ("torch.float32", "torch.float")
# What fills a tensor, with the position of the number.
FILLING = {"masked_fill": 1, "masked_fill_": 1, "fill_": 0, "full": 1, "full_like": 1, "new_full": 1}
OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
# What autocast runs in fp16, by full name and as methods of tensors.
CAST_TO_FP16 = frozenset(
    f"torch.{name}" for name in ("matmul", "bmm", "mm", "einsum", "nn.functional.linear")
)
CAST_METHODS = ("matmul", "bmm", "mm")
# Methods whose result has the dtype of the tensor.
KEEPING = frozenset(
    {
        *("transpose", "permute", "view", "reshape", "contiguous"),
        *("unsqueeze", "squeeze", "flatten", "expand"),
        *("detach", "clone", "cuda", "masked_fill", "masked_fill_", "div", "div_", "mul", "mul_"),
    }
)


@register_rule(
    Mistake(
        "AMP236",
        "mask-beyond-fp16",
        "an fp16 tensor is filled with a number such as `-1e9`, by `masked_fill`, `torch.full` or the like",
        "it raises a RuntimeError: the largest fp16 number is 65504",
        "write `torch.finfo(scores.dtype).min`",
        """
import math
import torch

with torch.autocast("cuda"):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(64)
    scores = scores.masked_fill(mask == 0, -1e9)  # AMP236  # wrong
    scores = scores.float().masked_fill(mask == 0, -1e9)  # right
    scores = other.masked_fill(mask == 0, float("-inf"))  # right
""",
        fixable=True,
    ),
    needs=("half|float16|autocast", "torch|half", "fill call"),
)
def fp16_fill_beyond_range(module: LintModule) -> Iterator[Finding]:
    """Tensors of fp16 that are filled with a number beyond its range."""
    for call in module.calls:
        name = last_name(call.func)
        if name not in FILLING:
            continue
        scope = module.scope_of[call]
        value = argument(call, "fill_value" if "full" in name else "value", FILLING[name])
        number = _number_of_expression(module, value, scope)
        if value is None or number is None or not LARGEST < abs(number) < float("inf"):
            continue
        tensor = argument(call, "input", 0) if name == "full_like" else getattr(call.func, "value", None)
        dtype = argument(call, "dtype")
        is_full = name == "full" and (module.resolve(call.func) or "").startswith("torch.")
        if dtype is not None or is_full:
            if dtype is None or module.resolve(dtype) not in HALF:
                continue
            shown = f"this tensor is fp16, which holds no number beyond {LARGEST:.0f}"
            yield module.make_finding(
                "AMP236", call, shown, _dtype_limit_edits(module, value, number, module.source(dtype))
            )
        elif tensor is not None and _is_fp16_tensor(module, tensor, scope, call.lineno):
            shown = f"`{module.source(tensor)}` is fp16, which holds no number beyond {LARGEST:.0f}"
            of_tensor = f"{dotted_text_of(tensor)}.dtype" if dotted_text_of(tensor) else ""
            yield module.make_finding(
                "AMP236", call, shown, _dtype_limit_edits(module, value, number, of_tensor)
            )


def _number_of_expression(module: LintModule, node: ast.expr | None, scope: Scope) -> float | None:
    """Return the number that an expression of literals stands for, or a name or attribute that is assigned once."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _number_of_expression(module, node.operand, scope)
        return None if number is None else -number
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = (
            _number_of_expression(module, node.left, scope),
            _number_of_expression(module, node.right, scope),
        )
        try:
            return None if left is None or right is None else float(OPERATIONS[type(node.op)](left, right))
        except (ArithmeticError, TypeError, ValueError):  # no real number
            return None
    if isinstance(node, ast.Call) and len(node.args) == 1:
        if dotted_text_of(node.func) == "float" or module.resolve(node.func) == "torch.tensor":
            return _number_of_expression(module, node.args[0], scope)
    if isinstance(node, ast.Attribute) and node.attr in ("min", "max") and isinstance(node.value, ast.Call):
        is_fp32 = (
            module.resolve(node.value.func) == "torch.finfo"
            and node.value.args
            and dotted_text_of(node.value.args[0])
        )
        return {"min": -LARGEST_FP32, "max": LARGEST_FP32}[node.attr] if is_fp32 in FP32 else None
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
        try:
            return float(node.value)
        except (ValueError, OverflowError):
            return None
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    values = _constants_assigned_to(module, dotted_text_of(node), scope)
    if len(values) != 1 or _is_element_or_self_derived(values[0], node):
        return None
    return _number_of_expression(module, values[0], module.scope_of.get(values[0], module.top))


def _constants_assigned_to(module: LintModule, name: str, scope: Scope) -> list[ast.expr]:
    """Return what is assigned to a name, or to an attribute of `self` or of a class, in its methods or in its body."""
    values = module.values_of(name, scope) or []
    owner, _, attribute = name.rpartition(".")
    home = scope.owner if owner in ("self", "cls") else module.top.functions.get(owner)
    return [*values, *(home.values.get(attribute, ()) if home is not None else ())]


def _is_fp16_tensor(module: LintModule, node: ast.expr, scope: Scope, line: int) -> bool:
    """Return whether an expression above a line is surely an fp16 tensor."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.MatMult):
            return is_in_fp16_block(module, node)
        return _is_fp16_tensor(module, node.left, scope, line) and _is_plain_number(module, node.right, scope)
    if isinstance(node, ast.Name):
        above = [one for one in scope.values.get(node.id, []) if getattr(one, "lineno", line) < line]
        # A parameter is set in each call by a statement of the function's own body alone.
        is_always_set = any(module.parent(module.statement_around(one)) is scope.node for one in above)
        if node.id in scope.parameters and not is_always_set:
            return False
        return bool(above) and all(_is_fp16_tensor(module, one, scope, one.lineno) for one in above)
    if not isinstance(node, ast.Call):
        return False
    if (module.resolve(node.func) or "") in CAST_TO_FP16:
        return is_in_fp16_block(module, node)
    dtype = argument(node, "dtype")
    if dtype is not None:
        return module.resolve(dtype) in HALF
    if not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in CAST_METHODS:
        return is_in_fp16_block(module, node)
    if node.func.attr in ("half", "to"):
        return node.func.attr == "half" or any(module.resolve(one) in HALF for one in node.args)
    plain = node.func.attr not in ("div", "div_", "mul", "mul_") or _is_plain_number(
        module, node.args[0], scope
    )
    return node.func.attr in KEEPING and plain and _is_fp16_tensor(module, node.func.value, scope, line)


def _is_plain_number(module: LintModule, node: ast.expr, scope: Scope) -> bool:
    """Return whether an expression is surely a number of Python, which leaves the dtype of a tensor as it is."""
    if _number_of_expression(module, node, scope) is not None:
        return True
    if isinstance(node, ast.BinOp):
        # `head_dim ** -0.5` is one of a size: tensors are not raised to it by hand.
        return isinstance(node.op, ast.Pow) and _number_of_expression(module, node.right, scope) in (
            0.5,
            -0.5,
        )
    if isinstance(node, ast.Call):
        return (module.resolve(node.func) or "").startswith(("math.", "numpy.sqrt"))
    values = module.values_of(dotted_text_of(node), scope) or []
    return bool(values) and all(
        not _is_element_or_self_derived(one, node) and _is_plain_number(module, one, scope) for one in values
    )


def _is_element_or_self_derived(value: ast.expr, node: ast.AST) -> bool:
    """Return whether a value is an element of something, or made of the name that it is assigned to."""
    return isinstance(value, ast.Starred) or any(
        dotted_text_of(one) == dotted_text_of(node) for one in ast.walk(value)
    )


def _dtype_limit_edits(module: LintModule, value: ast.expr, number: float, dtype: str) -> tuple[Edit, ...]:
    """Return the edit that writes the limit of a dtype, where that and torch have plain names."""
    if not dtype or module.top.imports.get("torch") != ["torch"]:
        return ()
    return module.replacement_edits(value, f"torch.finfo({dtype}).{'min' if number < 0 else 'max'}")
