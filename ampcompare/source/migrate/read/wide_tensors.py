"""Find what works in place on a tensor with another one that may be fp32, and powers in place.

O1 makes both fp32 for `x += y`, and casts `y` to the type of `x` for `x.add_(y)`. torch computes in fp32 and keeps the
type of `x`. `x **= y` is fp32 under O1, whatever the types are. A text shows only what is surely not fp32: numbers, and
what comes from a layer or function that computes in fp16, through others that keep a type. All else may be.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.cast_lists import HALF_UNDER_BOTH
from ampcompare.source.migrate.read.wide_numbers import OF_PYTHON, OPERATORS, is_loss_call
from ampcompare.source.syntax import argument_values, dotted_name, elements, last_name, names_bound_in

if TYPE_CHECKING:
    from ampcompare.source.module import Module, Scope

# Layers that return fp16 whatever they get, and the type that they get.
HALF_LAYERS = re.compile(r"Linear|Conv(?:Transpose)?[123]d")
KEEPING_LAYERS = re.compile(
    r"(?:Batch|SyncBatch|Instance)Norm(?:[123]d)?|(?:Adaptive)?(?:Max|Avg)Pool[123]d|Dropout[23]?d?|Identity|Flatten|"
    r"(?:Leaky)?ReLU6?|[SC]?ELU|SiLU|Hardswish|Hardsigmoid|Sigmoid|Tanh|(?:Zero|Reflection|Replication)Pad[123]d|"
    r"PixelShuffle"
)
# Functions and methods that do.
KEEPING_TYPE = frozenset({
    "relu", "relu_", "relu6", "leaky_relu", "elu", "silu", "sigmoid", "tanh", "dropout", "max_pool1d", "max_pool2d",
    "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "pad", "pixel_shuffle", "cat", "stack",
    "view", "reshape", "flatten", "permute", "transpose", "t", "contiguous", "squeeze", "unsqueeze", "chunk", "split",
    "expand", "repeat", "clone", "detach", "abs", "clamp", "mul", "add", "sub", "div",
})  # fmt: skip
IN_PLACE = frozenset({"add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "atan2_"})


class Fp32TensorFinder:
    """Tells which expressions of a module may be fp32 tensors: all but those that are surely none.

    Args:
        module: whose expressions are asked for.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[tuple[Scope, str], bool] = {}

    def inplace_arithmetic_with_fp32_operand(
        self, nodes: Iterable[ast.AST]
    ) -> list[ast.expr | ast.AugAssign]:
        """Return the arithmetic in place among nodes whose other operand may be fp32, or that is a power."""
        found: list[ast.expr | ast.AugAssign] = []
        for node in nodes:
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Pow):
                found.append(node)
                continue
            if isinstance(node, ast.AugAssign) and isinstance(node.op, OPERATORS):
                values = [node.value]
            elif isinstance(node, ast.Call) and last_name(node.func) in IN_PLACE:
                values = argument_values(node)
            else:
                continue
            if any(map(self._may_be_wide, values)) and not self._is_target_loss_or_number(node):
                found.append(node)
        return found

    def _is_target_loss_or_number(self, node: ast.AugAssign | ast.Call) -> bool:
        """Return whether what a node works on is a loss, or a number at first, which becomes what is added to it."""
        target = node.target if isinstance(node, ast.AugAssign) else getattr(node.func, "value", node)
        text, scope = dotted_name(target) or "", self._module.scope_of.get(node, self._module.top)
        values = self._module.values_of(text, scope) or []
        return bool(values) and all(
            isinstance(each, ast.Constant) or (isinstance(each, ast.Call) and is_loss_call(each))
            for each in values
        )

    def _may_be_wide(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Constant, ast.Compare, ast.JoinedStr)):
            return False
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._may_name_be_wide(node)
        if isinstance(node, ast.Call):
            return self._may_call_be_wide(node)
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self._may_be_wide(node.value)
        if isinstance(node, ast.UnaryOp):
            return self._may_be_wide(node.operand)
        if isinstance(node, ast.IfExp):
            return self._may_be_wide(node.body) or self._may_be_wide(node.orelse)
        if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            return self._may_be_wide(node.left) or self._may_be_wide(node.right)
        return not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))

    def _may_name_be_wide(self, node: ast.Name | ast.Attribute) -> bool:
        if last_name(node) in OF_PYTHON:
            return False
        scope, text = self._module.scope_of.get(node, self._module.top), dotted_name(node) or ""
        if isinstance(node, ast.Name) and self._is_parameter(node, scope):
            return True
        key = (scope, text)
        if key not in self._known:
            self._known[key] = False  # while it is asked for: what it is made of itself tells nothing
            values = self._module.values_of(text, scope)
            self._known[key] = not values or any(map(self._may_be_wide, values))
        return self._known[key]

    def _is_parameter(self, node: ast.Name, scope: Scope) -> bool:
        """Return whether a name is what a function gets: no line above, outside of branches, binds it again."""
        if node.id not in scope.parameters:
            return False
        above = (each for each in getattr(scope.node, "body", []) if each.lineno < node.lineno)
        return not any(isinstance(each, ast.Assign) and node.id in names_bound_in(each) for each in above)

    def _may_call_be_wide(self, call: ast.Call) -> bool:
        scope = self._module.scope_of.get(call, self._module.top)
        layers = self._module.values_of(dotted_name(call.func) or "", scope)
        if layers or isinstance(call.func, ast.Call):  # or a layer where it is made
            given = any(map(self._may_be_wide, argument_values(call)))
            return any(self._may_layer_be_wide(each, given) for each in layers or [call.func])
        name, full = last_name(call.func), self._module.resolve(call.func)
        if name in OF_PYTHON and (name != "float" or isinstance(call.func, ast.Name)):
            return False
        if full is not None:
            return not full.startswith("math.") and not self._keeps_type(
                call, name, [], full.startswith("torch.")
            )
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        return owner is None or not self._keeps_type(call, name, [owner], dotted_name(owner) != "self")

    def _keeps_type(self, call: ast.Call, name: str, owner: list[ast.expr], is_of_torch: bool) -> bool:
        """Return whether a function of torch or a method of tensors surely returns no fp32 tensor."""
        given = (one for each in [*owner, *argument_values(call)] for one in elements(each))
        is_kept = name in HALF_UNDER_BOTH or (name in KEEPING_TYPE and not any(map(self._may_be_wide, given)))
        return is_of_torch and is_kept

    def _may_layer_be_wide(self, layer: ast.expr, is_given_wide: bool) -> bool:
        """Return whether a layer, as it is made, may return fp32."""
        name = last_name(layer.func) if isinstance(layer, ast.Call) else ""
        if not isinstance(layer, ast.Call) or not (self._module.resolve(layer.func) or "").startswith(
            "torch.nn."
        ):
            return True
        if HALF_LAYERS.fullmatch(name):
            return False
        if name == "Sequential":
            return reduce(
                lambda is_wide, each: self._may_layer_be_wide(each, is_wide), layer.args, is_given_wide
            )
        return is_given_wide or KEEPING_LAYERS.fullmatch(name) is None
