"""Find arithmetic of a tensor with one that may hold a single number in fp32.

O1 computes it in fp32, the widest of both types. torch keeps the type of the other tensor, since a tensor without
dimensions does not count there. Shapes are not known to a text, so whatever may have no dimensions counts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from functools import reduce
from typing import TYPE_CHECKING

from ampcompare.source.syntax import argument_values, dotted_name, last_name, walk

if TYPE_CHECKING:
    from ampcompare.source.module import Module, Scope


def network_classes(module: Module) -> Iterator[ast.ClassDef]:
    """Yield the classes with a method `forward`, or that are modules of torch by their bases."""
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            has_forward = any(
                isinstance(each, ast.FunctionDef) and each.name == "forward" for each in node.body
            )
            if has_forward or any(
                (module.resolve(each) or "").startswith("torch.nn.") for each in node.bases
            ):
                yield node


def mixed_nodes_of_networks(module: Module) -> list[ast.expr | ast.AugAssign]:
    """Return the arithmetic in classes of networks in which such a number may meet another tensor."""
    finder = NumberFinder(module)
    return [each for network in network_classes(module) for each in finder.mixed_nodes(walk(network))]


class Shape(Enum):
    """How many dimensions a value may have."""

    PLAIN = auto()  # a number of Python, or what else is no tensor
    NUMBER = auto()  # a tensor without dimensions
    ROW = auto()  # a tensor with one dimension, maybe: an index or a reduction makes a number of it
    TENSOR = auto()  # any other


Shapes = frozenset[Shape]
PLAIN, NUMBER, ROW, TENSOR = (frozenset({each}) for each in Shape)
REDUCING = frozenset({"sum", "mean", "max", "min", "norm", "prod"})
PAIRS = frozenset({"max", "min", "topk", "sort"})  # with a dimension: of values and indices
KEEPING = frozenset({
    "exp", "log", "sqrt", "abs", "sigmoid", "tanh", "relu", "relu_", "relu6", "leaky_relu", "elu", "gelu", "silu",
    "softmax", "log_softmax", "pow", "square", "neg", "clamp", "dropout", "float", "detach", "clone", "contiguous",
    "cuda", "to", "type_as", "chunk", "split", "zeros_like", "ones_like", "full_like", "masked_fill",
})  # fmt: skip
MAKING = frozenset(
    {
        "ones",
        "zeros",
        "full",
        "rand",
        "randn",
        "empty",
        "arange",
        "linspace",
        "new_ones",
        "new_zeros",
        "new_full",
    }
)
FLAT = frozenset({"view", "reshape", "flatten", "squeeze"})
WEIGHTS = frozenset({"weight", "bias", "running_mean", "running_var"})
OF_PYTHON = frozenset({
    "shape", "ndim", "dtype", "device", "training", "size", "dim", "numel", "item", "len", "int", "float", "range",
    "enumerate", "bool", "isinstance", "round",
})  # fmt: skip
# What computes a loss, by the names that these have everywhere.
LOSS = re.compile(r"(?:loss|cross_entropy|criterion|crit)\w*$|Loss$", re.IGNORECASE)
MIXING = frozenset(
    {"add", "mul", "div", "add_", "mul_", "div_"}
)  # of methods those that O1 gives equal types
MAX_DIMS = 2  # that a reduction may take away from a tensor without making a number of it
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod, ast.FloorDiv)


class NumberFinder:
    """Tells which expressions of a module may be tensors that hold one number."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._asked: set[tuple[ast.AST, Scope]] = set()

    def mixed_nodes(self, nodes: Iterable[ast.AST]) -> Iterator[ast.expr | ast.AugAssign]:
        """Yield the arithmetic among nodes in which such a number meets another tensor, or where it goes unseen."""
        for node in nodes:
            if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
                operands = [node.left, node.right]
            elif isinstance(node, ast.AugAssign) and isinstance(node.op, OPERATORS):
                operands = [node.target, node.value]
            elif isinstance(node, ast.Call) and last_name(node.func) in MIXING:
                operands = [*self._receivers_of(node), *argument_values(node)]
            else:
                if isinstance(node, ast.Call) and self._passes_number(node):
                    yield node
                continue
            shapes = [self._shapes_of(each) for each in operands]
            for place, each in enumerate(shapes):
                others = shapes[:place] + shapes[place + 1 :]
                if Shape.NUMBER in each and any({Shape.TENSOR, Shape.ROW} & other for other in others):
                    yield node
                    break

    def _passes_number(self, call: ast.Call) -> bool:
        """Return whether a function of the module, or a method of the class, gets such a number."""
        if self._own_function(call, self._module.scope_of.get(call, self._module.top)) is None:
            return False
        return any(Shape.NUMBER in self._shapes_of(each) for each in argument_values(call))

    def _receivers_of(self, call: ast.Call) -> list[ast.expr]:
        """Return the tensor whose method is called, in a list; an empty one for a function of a module."""
        is_method = isinstance(call.func, ast.Attribute) and self._module.resolve(call.func) is None
        return [call.func.value] if is_method and isinstance(call.func, ast.Attribute) else []

    def _shapes_of(self, node: ast.expr) -> Shapes:
        """Return the shapes that an expression may have; none while it is asked for itself."""
        scope = self._module.scope_of.get(node, self._module.top)
        if (node, scope) in self._asked:
            return frozenset()
        self._asked.add((node, scope))
        try:
            return self._shapes_by_kind(node, scope)
        finally:
            self._asked.discard((node, scope))

    def _shapes_by_kind(self, node: ast.expr, scope: Scope) -> Shapes:
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
            if name in WEIGHTS or name in self._buffers_of(scope):
                return ROW
            if name == "data":
                return self._shapes_of(node.value)
        values = self._module.values_of(text, scope)
        if values is None:
            return PLAIN if self._is_plain_parameter(text, scope) else TENSOR
        return frozenset().union(*(self._shapes_of(each) for each in values))

    def _is_plain_parameter(self, name: str, scope: Scope) -> bool:
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

    def _buffers_of(self, scope: Scope) -> set[str]:
        calls = ast.walk(scope.owner.node) if scope.owner is not None else ()
        return {
            str(each.args[0].value)
            for each in calls
            if isinstance(each, ast.Call)
            and last_name(each.func) in ("register_buffer", "register_parameter")
            and each.args
            and isinstance(each.args[0], ast.Constant)
        }

    def _shapes_of_element(self, node: ast.expr) -> Shapes:
        """Return the shapes of what a loop or an assignment to several names takes out of a value."""
        name = last_name(node.func) if isinstance(node, ast.Call) else ""
        if name in ("chunk", "split"):
            return self._shapes_of(node)
        if name in PAIRS:
            return self._shapes_of(node) | ROW
        shapes = self._shapes_of(node)
        return frozenset(Shape.NUMBER if each is Shape.ROW else each for each in shapes)

    def _shapes_of_subscript(self, node: ast.Subscript, scope: Scope) -> Shapes:
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not all(self._may_be_integer(each) for each in indices):
            is_open = (
                isinstance(node.slice, ast.Name) and self._module.values_of(node.slice.id, scope) is None
            )
            return (
                NUMBER
                if is_open and Shape.ROW in self._shapes_of(node.value)
                else self._shapes_of(node.value)
            )
        if len(indices) > 1:
            return NUMBER
        found = set[Shape]()
        for each in self._shapes_of(node.value):
            found.add({Shape.ROW: Shape.NUMBER, Shape.TENSOR: Shape.ROW}.get(each, each))
            if each is Shape.TENSOR:
                found.add(Shape.TENSOR)
        return frozenset(found)

    def _may_be_integer(self, node: ast.expr) -> bool:
        if isinstance(node, (ast.Slice, ast.Compare)) or getattr(node, "value", 0) in (None, ...):
            return False
        return Shape.PLAIN in self._shapes_of(node)

    def _shapes_of_call(self, call: ast.Call, scope: Scope) -> Shapes:
        name, receivers = last_name(call.func), self._receivers_of(call)
        values = argument_values(call)
        if LOSS.search(name) or (isinstance(call.func, ast.Call) and LOSS.search(last_name(call.func.func))):
            is_whole = any(each.arg == "reduction" and _is_none(each.value) for each in call.keywords)
            return TENSOR if is_whole else NUMBER
        if name in MAKING or name.endswith("Parameter"):
            return ROW
        of = receivers or values[:1]
        options = values if receivers else values[1:]
        if name in REDUCING and (receivers or self._is_of_torch(call)):
            return self._shapes_of_reduction(call, of, options)
        if name == "sum" and values:
            return self._shapes_of_element(values[0])
        if name in ("max", "min") and values:
            return reduce(_shapes_of_arithmetic, map(self._shapes_of, values))
        if name in OF_PYTHON and not (name == "float" and receivers):
            return PLAIN
        if name in FLAT and of:
            is_empty = (
                len(options) == 1 and isinstance(options[0], (ast.List, ast.Tuple)) and not options[0].elts
            )
            return NUMBER if is_empty else self._shapes_of_flat(name, of[0], options)
        if name in KEEPING and of:
            return self._shapes_of(of[0])
        return self._shapes_of_own_function(call, scope)

    def _is_of_torch(self, call: ast.Call) -> bool:
        return (self._module.resolve(call.func) or "").startswith("torch.")

    def _shapes_of_flat(self, name: str, tensor: ast.expr, options: list[ast.expr]) -> Shapes:
        if name == "squeeze":
            shapes = self._shapes_of(tensor)
            return NUMBER if Shape.ROW in shapes or Shape.NUMBER in shapes else shapes
        return ROW if len(options) < 2 else TENSOR

    def _shapes_of_reduction(self, call: ast.Call, of: list[ast.expr], options: list[ast.expr]) -> Shapes:
        keeps = any(each.arg == "keepdim" and not _is_false(each.value) for each in call.keywords)
        if not options:
            return NUMBER
        if last_name(call.func) in ("max", "min") and not self._may_be_integer(options[0]):
            return reduce(_shapes_of_arithmetic, map(self._shapes_of, [*of, *options]))
        shapes = self._shapes_of(of[0])
        if keeps or len(options) > 1 + (last_name(call.func) == "norm"):
            return shapes
        dims = getattr(options[0], "elts", [])
        if Shape.ROW in shapes or Shape.NUMBER in shapes or len(dims) > MAX_DIMS:
            return NUMBER
        return TENSOR if last_name(call.func) in PAIRS else ROW

    def _shapes_of_own_function(self, call: ast.Call, scope: Scope) -> Shapes:
        """Return what a function of the module, or a method of the class, returns; a tensor for any other."""
        function = self._own_function(call, scope)
        if function is None:
            return TENSOR
        returned = [
            each.value
            for each in ast.walk(function.node)
            if isinstance(each, ast.Return) and each.value is not None
        ]
        return frozenset().union(*map(self._shapes_of, returned))

    def _own_function(self, call: ast.Call, scope: Scope) -> Scope | None:
        text = dotted_name(call.func) or ""
        home = scope.owner if text.startswith("self.") else self._module.top
        return home.functions.get(text.removeprefix("self.")) if home is not None else None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in ("none", None)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _shapes_of_arithmetic(left: Shapes, right: Shapes) -> Shapes:
    """Return the shapes of a result: that of the operand with more dimensions."""
    order = (Shape.PLAIN, Shape.NUMBER, Shape.ROW, Shape.TENSOR)
    if not left or not right:
        return left or right
    return frozenset(max(one, other, key=order.index) for one in left for other in right)
