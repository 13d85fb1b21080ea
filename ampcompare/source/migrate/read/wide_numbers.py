"""Find arithmetic of a tensor with one that may hold a single number in fp32.

O1 computes it in fp32, the widest of both types. torch keeps the type of the other tensor, since a tensor without
dimensions does not count there. Shapes are not known to a text, so whatever may have no dimensions counts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from enum import Enum, auto
from functools import reduce
from itertools import permutations
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.networks import registered_tensor_names_of_class
from ampcompare.source.syntax import argument_values, dotted_name, elements, last_name
from ampcompare.source.torch_methods import WITH_INDICES

if TYPE_CHECKING:
    from ampcompare.source.index import Index, ProjectFunction
    from ampcompare.source.module import Module, Scope


class DimensionCount(Enum):
    """How many dimensions a value may have."""

    PLAIN = auto()  # a number of Python, or what else is no tensor
    NUMBER = auto()  # a tensor without dimensions
    ROW = auto()  # a tensor with one dimension, maybe: an index or a reduction makes a number of it
    TENSOR = auto()  # any other


Shapes = frozenset[DimensionCount]
PLAIN, NUMBER, ROW, TENSOR = (frozenset({each}) for each in DimensionCount)
REDUCING = frozenset({
    "sum", "mean", "max", "min", "norm", "prod", "amax", "amin", "median", "nanmedian", "nanmean", "nansum",
    "logsumexp", "quantile",
})  # fmt: skip
OF_ALL = frozenset({"trace", "dot", "vdot", "dist", "det", "logdet"})  # always to one number
KEEPING = frozenset({
    "exp", "log", "sqrt", "abs", "sigmoid", "tanh", "relu", "relu_", "relu6", "leaky_relu", "elu", "gelu", "silu",
    "softmax", "log_softmax", "pow", "square", "neg", "clamp", "dropout", "float", "detach", "clone", "contiguous",
    "cuda", "to", "type_as", "chunk", "split", "zeros_like", "ones_like", "full_like", "masked_fill", "unbind",
    "repeat", "expand", "expand_as",
})  # fmt: skip
MAKING = frozenset({
    "ones", "zeros", "full", "rand", "randn", "empty", "arange", "linspace", "new_ones", "new_zeros", "new_full",
})  # fmt: skip
FLAT = frozenset({"view", "reshape", "flatten", "squeeze"})
WEIGHTS = frozenset({"weight", "bias", "running_mean", "running_var"})
HOLDING = frozenset({"zip", "enumerate", "list", "tuple", "reversed"})
OF_PYTHON = frozenset({
    "shape", "ndim", "dtype", "device", "training", "size", "dim", "numel", "item", "len", "int", "float", "range",
    "bool", "isinstance", "round",
})  # fmt: skip
# What computes a loss, by the names that these have everywhere.
LOSS = re.compile(r"(?:loss|cross_entropy|criterion|crit)\w*$|Loss$", re.IGNORECASE)
# Of methods and functions, those that O1 gives arguments of one type.
MIXING = frozenset({
    "add", "mul", "div", "add_", "mul_", "div_", "eq", "ne", "gt", "ge", "lt", "le", "__add__", "__radd__", "__sub__",
    "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__iadd__", "__isub__", "__imul__",
    "__itruediv__", "__eq__", "__ne__", "__gt__", "__ge__", "__lt__", "__le__",
})  # fmt: skip
ORDERS = (ast.Eq, ast.NotEq, ast.Gt, ast.GtE, ast.Lt, ast.LtE)
MAX_DIMS = 2  # that a reduction may take away from a tensor without making a number of it
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod, ast.FloorDiv)


class ScalarTensorFinder:
    """Tells which expressions of a module may be tensors that hold one number.

    Args:
        module: of the expressions.
        index: of the calls of its project.
    """

    def __init__(self, module: Module, index: Index) -> None:
        self._module = module  # of what is looked at: that of a function, while its results are
        self._index = index
        # Of variables, and of what functions return: these grow from round to round, as one refers to another.
        self._known: dict[tuple[Scope, str], Shapes] = {}
        self._asked: set[tuple[Scope, str]] = set()

    def nodes_mixing_scalar_tensors(self, nodes: Iterable[ast.AST]) -> list[ast.expr | ast.AugAssign]:
        """Return the arithmetic in which a tensor of one number meets another tensor, or goes to a function."""
        nodes, before = list(nodes), None
        found: list[ast.expr | ast.AugAssign] = []
        while before != self._known:
            before = dict(self._known)
            self._asked.clear()
            found = [
                each
                for each in nodes
                if isinstance(each, (ast.expr, ast.AugAssign)) and self._mixes_scalar_with_tensor(each)
            ]
        return found

    def arithmetic_without_python_number(self, nodes: Iterable[ast.AST]) -> list[ast.BinOp]:
        """Return the arithmetic in which no operand is surely a number of Python, and not all hold one number."""
        found = []
        for node in nodes:
            if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
                shapes = [self._shapes_of(node.left), self._shapes_of(node.right)]
                if PLAIN not in shapes and not all(each <= PLAIN | NUMBER for each in shapes):
                    found.append(node)
        return found

    def _mixes_scalar_with_tensor(self, node: ast.expr | ast.AugAssign) -> bool:
        """Return whether a tensor of one number meets another tensor at a node, which may change the type."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            operands = [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, OPERATORS):
            operands = [node.target, node.value]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and last_name(node.func) in MIXING:
            operands = [*self._receivers_of(node), *argument_values(node)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sum":
            operands = [one for each in node.args for one in elements(each)]
        else:
            return isinstance(node, ast.Call) and self._passes_scalar_tensor(node)
        shapes = [(self._shapes_of(each), self._is_made_fp32(each)) for each in operands]
        return any(
            DimensionCount.NUMBER in one
            and {DimensionCount.TENSOR, DimensionCount.ROW} & other
            and not is_fp32
            for (one, _), (other, is_fp32) in permutations(shapes, 2)
        )

    def _is_made_fp32(self, node: ast.expr) -> bool:
        """Return whether an expression is a tensor that is made fp32 there, as torch and O1 leave it."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        given = argument_values(node)
        if node.func.attr == "float":
            return not given
        kinds = ("torch.float32", "torch.float")
        return node.func.attr == "to" and any(self._module.resolve(each) in kinds for each in given)

    def _passes_scalar_tensor(self, call: ast.Call) -> bool:
        """Return whether a function of the project gets such a number."""
        if not self._index.project_functions_of(call, self._module.scope_of.get(call, self._module.top)):
            return False
        return any(DimensionCount.NUMBER in self._shapes_of(each) for each in argument_values(call))

    def _receivers_of(self, call: ast.Call) -> list[ast.expr]:
        """Return the tensor whose method is called, in a list; an empty one for a function of a module."""
        is_method = isinstance(call.func, ast.Attribute) and self._module.resolve(call.func) is None
        return [call.func.value] if is_method and isinstance(call.func, ast.Attribute) else []

    def _shapes_of(self, node: ast.expr) -> Shapes:
        """Return the shapes that an expression may have, as far as this round knows."""
        scope = self._module.scope_of.get(node, self._module.top)
        if isinstance(node, (ast.Constant, ast.Compare, ast.JoinedStr)):
            return PLAIN
        if isinstance(node, ast.UnaryOp):
            return self._shapes_of(node.operand)
        if isinstance(node, ast.IfExp):
            return self._shapes_of(node.body) | self._shapes_of(node.orelse)
        if isinstance(node, ast.BinOp):
            return _shapes_of_arithmetic(self._shapes_of(node.left), self._shapes_of(node.right))
        if isinstance(node, ast.Starred):
            return self._shapes_of_element(node.value)
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
            return TENSOR | (NUMBER & frozenset[DimensionCount]().union(*map(self._shapes_of, node.elts)))
        if isinstance(node, ast.Subscript):
            return self._shapes_of_subscript(node, scope)
        if isinstance(node, ast.Call):
            return self._shapes_of_call(node, scope)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._shapes_of_name(node, scope)
        return TENSOR

    def _shapes_of_name(self, node: ast.Name | ast.Attribute, scope: Scope) -> Shapes:
        name, text = last_name(node), dotted_name(node) or ""
        if name in OF_PYTHON or text.startswith("math."):
            return PLAIN
        if isinstance(node, ast.Attribute):
            if name in WEIGHTS or name in registered_tensor_names_of_class(scope):
                return ROW
            if name == "data":
                return self._shapes_of(node.value)
        values = self._module.values_of(text, scope)
        if values is None:
            return PLAIN if self._has_number_default(text, scope) else TENSOR
        return self._shapes_of_any((scope, text), values)

    def _shapes_of_any(self, key: tuple[Scope, str], values: Iterable[ast.expr]) -> Shapes:
        """Return the shapes of a variable or result that has one of several values."""
        if key not in self._asked:
            self._asked.add(key)
            found = frozenset[DimensionCount]().union(*map(self._shapes_of, values))
            self._known[key] = self._known.get(key, frozenset()) | found
        return self._known.get(key, frozenset())

    def _has_number_default(self, name: str, scope: Scope) -> bool:
        """Return whether a parameter has a number as default."""
        arguments = getattr(scope.node, "args", None)
        if not isinstance(arguments, ast.arguments):
            return False
        named = [*arguments.posonlyargs, *arguments.args]
        pairs = [
            *zip(reversed(named), reversed(arguments.defaults), strict=False),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        return any(
            each.arg == name and isinstance(value, ast.Constant) and value.value is not None
            for each, value in pairs
        )

    def _shapes_of_element(self, node: ast.expr) -> Shapes:
        """Return the shapes of what a loop or an assignment to several names takes out of a value."""
        name = last_name(node.func) if isinstance(node, ast.Call) else ""
        if name in ("chunk", "split"):
            return self._shapes_of(node)
        if name in WITH_INDICES:
            return self._shapes_of(node) | ROW
        if name in HOLDING and isinstance(node, ast.Call):
            return PLAIN.union(*map(self._shapes_of_element, node.args))
        shapes = self._shapes_of(node)
        return frozenset(DimensionCount.NUMBER if each is DimensionCount.ROW else each for each in shapes)

    def _shapes_of_subscript(self, node: ast.Subscript, scope: Scope) -> Shapes:
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not all(self._may_be_integer(each) for each in indices):
            is_open = (
                isinstance(node.slice, ast.Name) and self._module.values_of(node.slice.id, scope) is None
            )
            return (
                NUMBER
                if is_open and DimensionCount.ROW in self._shapes_of(node.value)
                else self._shapes_of(node.value)
            )
        if len(indices) > 1:
            return NUMBER
        found = set[DimensionCount]()
        for each in self._shapes_of(node.value):
            found.add(
                {DimensionCount.ROW: DimensionCount.NUMBER, DimensionCount.TENSOR: DimensionCount.ROW}.get(
                    each, each
                )
            )
            if each is DimensionCount.TENSOR:
                found.add(DimensionCount.TENSOR)
        return frozenset(found)

    def _may_be_integer(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Slice, ast.Compare)) or getattr(node, "value", 0) in (None, ...):
            return False
        return DimensionCount.PLAIN in self._shapes_of(node)

    def _shapes_of_call(self, call: ast.Call, scope: Scope) -> Shapes:
        name, receivers = last_name(call.func), self._receivers_of(call)
        if is_loss_call(call):
            is_of_each = any(
                one.arg == "reduction"
                and isinstance(one.value, ast.Constant)
                and one.value.value in ("none", None)
                for one in call.keywords
            )
            return TENSOR if is_of_each else NUMBER
        if name in MAKING or name.endswith("Parameter"):
            return ROW
        if name == "tensor" and self._is_of_torch(call):
            return NUMBER if call.args and isinstance(call.args[0], ast.Constant) else ROW
        if name in HOLDING and isinstance(call.func, ast.Name):
            return TENSOR.union(*map(self._shapes_of, call.args))
        if receivers or self._is_of_torch(call):
            return self._shapes_of_tensor_function(call, scope, [*receivers, *argument_values(call)])
        if name in ("iter", "next") and call.args:
            return self._shapes_of(call.args[0]) if name == "iter" else self._shapes_of_element(call.args[0])
        if name in ("sum", "max", "min"):
            return self._shapes_of_python_function(name, argument_values(call))
        return PLAIN if name in OF_PYTHON else self._shapes_of_own_function(call, scope)

    def _shapes_of_tensor_function(self, call: ast.Call, scope: Scope, values: list[ast.expr]) -> Shapes:
        """Return the shapes of what a method of a tensor returns, or a function of torch.

        Args:
            values: the tensor, or first argument, and the others.
        """
        name = last_name(call.func)
        if name in OF_ALL:
            return NUMBER
        if name == "select" and values:
            return self._shapes_of_element(values[0]) | self._shapes_of(values[0]) & TENSOR
        if name in REDUCING and values:
            return self._shapes_of_reduction(call, values[0], values[1:])
        if name in FLAT and values:
            return self._shapes_of_reshaped_tensor(name, values[0], values[1:])
        if name in KEEPING and values:
            return self._shapes_of(values[0])
        if name in OF_PYTHON:
            return PLAIN
        given = frozenset[DimensionCount]().union(*map(self._shapes_of, values))
        is_layer = dotted_name(values[0]) == "self" if values else False
        is_row = not is_layer and bool((ROW | NUMBER) & given)
        return self._shapes_of_own_function(call, scope) | (NUMBER if is_row else frozenset())

    def _shapes_of_python_function(self, name: str, values: list[ast.expr]) -> Shapes:
        """Return the shapes of what `sum`, `max` or `min` of Python returns."""
        if name == "sum" or len(values) < 2:
            return self._shapes_of_element(values[0]) if values else PLAIN
        return reduce(_shapes_of_arithmetic, map(self._shapes_of, values))

    def _is_of_torch(self, call: ast.Call) -> bool:
        return (self._module.resolve(call.func) or "").startswith("torch.")

    def _shapes_of_reshaped_tensor(self, name: str, tensor: ast.expr, options: list[ast.expr]) -> Shapes:
        if len(options) == 1 and isinstance(options[0], (ast.List, ast.Tuple)) and not options[0].elts:
            return NUMBER
        if name == "squeeze":
            shapes = self._shapes_of(tensor)
            return NUMBER if DimensionCount.ROW in shapes or DimensionCount.NUMBER in shapes else shapes
        return ROW if len(options) < 2 else TENSOR

    def _shapes_of_reduction(self, call: ast.Call, tensor: ast.expr, options: list[ast.expr]) -> Shapes:
        keeps = any(each.arg == "keepdim" and not _is_false(each.value) for each in call.keywords)
        if not options:
            return NUMBER
        if last_name(call.func) in ("max", "min") and not self._may_be_integer(options[0]):
            return reduce(_shapes_of_arithmetic, map(self._shapes_of, [tensor, *options]))
        shapes = self._shapes_of(tensor)
        if keeps or len(options) > 1 + (last_name(call.func) == "norm"):
            return shapes
        dims = getattr(options[0], "elts", [])
        if DimensionCount.ROW in shapes or DimensionCount.NUMBER in shapes or len(dims) > MAX_DIMS:
            return NUMBER
        return TENSOR if last_name(call.func) in WITH_INDICES else ROW

    def _shapes_of_own_function(self, call: ast.Call, scope: Scope) -> Shapes:
        """Return the shapes of what a function of the project returns; those of a tensor for any other."""
        functions = self._index.project_functions_of(call, scope)
        return reduce(frozenset.union, map(self._shapes_returned_by, functions)) if functions else TENSOR

    def _shapes_returned_by(self, function: ProjectFunction) -> Shapes:
        node = function.scope.node
        returned = [node.body] if isinstance(node, ast.Lambda) else []
        returned += [
            each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value is not None
        ]
        around, self._module = self._module, function.module
        try:
            return self._shapes_of_any((function.scope, "return"), returned)
        finally:
            self._module = around


def is_loss_call(call: ast.Call) -> bool:
    """Return whether a loss is called, by its name: a function, a layer, or a layer where it is made."""
    maker = call.func.func if isinstance(call.func, ast.Call) else call.func
    return bool(LOSS.search(last_name(maker)))


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _shapes_of_arithmetic(left: Shapes, right: Shapes) -> Shapes:
    """Return the shapes of a result: that of the operand with more dimensions; none where one is not known yet."""
    order = (DimensionCount.PLAIN, DimensionCount.NUMBER, DimensionCount.ROW, DimensionCount.TENSOR)
    return frozenset(max(one, other, key=order.index) for one in left for other in right)
