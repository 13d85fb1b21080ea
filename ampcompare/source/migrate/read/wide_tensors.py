"""Find what works in place on a tensor with another one that may be fp32, and powers in place.

O1 makes both fp32 for `x += y`, and casts `y` to the type of `x` for `x.add_(y)`. torch computes in fp32 and keeps the
type of `x`. `x **= y` is fp32 under O1, whatever the types are. Of types a text shows those of parameters, of new
tensors, of what a model gets, and of what O1 and autocast compute in fp32; what any other function gets, or another
network returns, counts as being of the type of `x`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.cast_lists import (
    HALF_UNDER_BOTH,
    WIDE_LAYERS,
    WIDE_UNDER_AUTOCAST,
    WIDE_UNDER_O1_ALONE,
)
from ampcompare.source.migrate.read.networks import registered_tensor_names_of_class
from ampcompare.source.migrate.read.wide_numbers import (
    LOSS,
    MAKING,
    OF_PYTHON,
    OPERATORS,
    WEIGHTS,
    is_loss_call,
)
from ampcompare.source.syntax import argument_values, dotted_name, last_name, walk

if TYPE_CHECKING:
    from ampcompare.source.module import Module, Scope

# What may be fp32 under O1 or under autocast: functions, methods, and layers by their classes.
WIDE_FUNCTIONS = WIDE_UNDER_AUTOCAST | WIDE_UNDER_O1_ALONE | {"float", "renorm"}
WIDE_CLASSES = frozenset(WIDE_LAYERS) | {"Embedding", "Parameter"}
IN_PLACE = frozenset({"add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "atan2_"})


class Fp32TensorFinder:
    """Tells which expressions of a module may be fp32 tensors.

    Args:
        module: whose expressions are asked for.
        forwards: functions that get tensors as they are loaded, so in fp32: those of models.
    """

    def __init__(self, module: Module, forwards: Collection[Scope] = ()) -> None:
        self._module = module
        self._forwards = forwards
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
            if any(map(self._may_be_wide, values)) and not self._is_fp32_itself(node):
                found.append(node)
        return found

    def _is_fp32_itself(self, node: ast.AugAssign | ast.Call) -> bool:
        """Return whether what a node works on is a loss, or a number at first, which becomes what is added to it."""
        target = node.target if isinstance(node, ast.AugAssign) else getattr(node.func, "value", node)
        text, scope = dotted_name(target) or "", self._module.scope_of.get(node, self._module.top)
        values = self._module.values_of(text, scope) or []
        return bool(values) and all(
            isinstance(each, ast.Constant) or (isinstance(each, ast.Call) and is_loss_call(each))
            for each in values
        )

    def _may_be_wide(self, node: ast.expr) -> bool:
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
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.MatMult):
                return False
            return (
                isinstance(node.op, ast.Pow) or self._may_be_wide(node.left) or self._may_be_wide(node.right)
            )
        return False

    def _may_name_be_wide(self, node: ast.Name | ast.Attribute) -> bool:
        scope = self._module.scope_of.get(node, self._module.top)
        name, text = last_name(node), dotted_name(node) or ""
        if isinstance(node, ast.Attribute) and (
            name in WEIGHTS or name in registered_tensor_names_of_class(scope)
        ):
            return True
        if isinstance(node, ast.Name) and self._is_given_to_model(node, scope):
            return True
        key = (scope, text)
        if key not in self._known:
            self._known[key] = False  # while it is asked for: what it is made of itself tells nothing
            self._known[key] = any(map(self._may_be_wide, self._module.values_of(text, scope) or []))
        return self._known[key]

    def _is_given_to_model(self, node: ast.Name, scope: Scope) -> bool:
        """Return whether a name is what a model gets: no line above, outside of branches, binds it again."""
        if scope not in self._forwards or node.id not in scope.parameters or node.id == "self":
            return False
        above = (each for each in getattr(scope.node, "body", []) if each.lineno < node.lineno)
        return not any(
            isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id == node.id
            for statement in above
            if isinstance(statement, ast.Assign)
            for each in walk(statement)
        )

    def _may_call_be_wide(self, call: ast.Call) -> bool:
        name, values = last_name(call.func), argument_values(call)
        scope = self._module.scope_of.get(call, self._module.top)
        if name in OF_PYTHON - WIDE_FUNCTIONS:
            return False
        if name in WIDE_FUNCTIONS | MAKING | WIDE_CLASSES or LOSS.search(name):
            return not (isinstance(call.func, ast.Name) and name in ("sum", "float"))
        if isinstance(call.func, ast.Call):  # a layer where it is made
            return last_name(call.func.func) in WIDE_CLASSES
        layers = self._module.values_of(dotted_name(call.func) or "", scope) or []
        if layers:
            return any(isinstance(each, ast.Call) and last_name(each.func) in WIDE_CLASSES for each in layers)
        is_method = isinstance(call.func, ast.Attribute) and self._module.resolve(call.func) is None
        if is_method and isinstance(call.func, ast.Attribute) and dotted_name(call.func.value) != "self":
            return name not in HALF_UNDER_BOTH and self._may_be_wide(call.func.value)
        is_of_torch = (self._module.resolve(call.func) or "").startswith("torch.")
        return is_of_torch and name not in HALF_UNDER_BOTH and any(map(self._may_be_wide, values))
