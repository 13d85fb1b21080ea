"""Where a program makes tensors of fp64 for its networks, which O1 casts as any others, and autocast leaves alone.

They are made in a network, as it runs or in its constructor, or outside of it, and given to a network or a loss.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from ampcompare.source.migrate.read.networks import network_classes
from ampcompare.source.module import Module
from ampcompare.source.syntax import (
    ForNode,
    FunctionNode,
    argument_values,
    arguments,
    dotted_name,
    last_name,
    names_bound_in,
    walk,
)

KINDS = frozenset({"torch.float64", "torch.double", "torch.DoubleTensor", "torch.cuda.DoubleTensor"})
WORDS = re.compile(r"\bfloat64\b|\bdouble\b|\bDoubleTensor\b")  # of a module without one nothing is asked
MADE_FP64 = "{0} makes tensors of fp64: O1 casts these, to fp16 in products, to fp32 in sums and losses"
BY_AUTOCAST = MADE_FP64 + ", and autocast leaves them alone; write .float() where it matters"
BY_ADAPTER = MADE_FP64 + ", and the adapter in products alone; write .float() where it matters"
DEFAULTS = frozenset({"set_default_dtype", "set_default_tensor_type"})
# What gives a number, a tensor of another type, or one on the host, where O1 casts nothing.
LEAVING_FP64 = frozenset({
    "float", "half", "bfloat16", "to", "type", "type_as", "int", "long", "bool", "item", "numpy", "tolist", "cpu",
    "shape", "size", "dtype", "device", "argmax", "argmin", "argsort",
})  # fmt: skip
INDEXING = frozenset({"multinomial", "argmax", "argmin", "argsort", "searchsorted", "bucketize"})  # of torch
KEEPING = frozenset(
    {"list", "tuple", "dict", "zip", "map", "iter", "next", "reversed", "sorted", "sum", "enumerate"}
)
REGISTERING = frozenset({"register_buffer", "register_parameter", "Parameter", "Buffer"})
CALLED_AS_MODEL = re.compile(
    r"(?!save|load|log|plot|print|update|write|record|store).*?(?:model|net|module|criterion|loss(?!es)|forward)",
    re.IGNORECASE,
)
# What these return comes from a loader.
OF_DATA = frozenset({"__getitem__", "__iter__", "__next__", "collate_fn"})


def find_fp64(module: Module) -> Iterator[ast.expr]:
    """Yield where a module makes tensors of fp64 on which a network may compute."""
    if WORDS.search(module.text) is None:
        return
    networks = set(network_classes(module))
    made = _UsesOfFp64(module)
    for node in module.nodes:
        if not isinstance(node, (ast.Call, ast.Name, ast.Attribute)) or not _makes_fp64(module, node):
            continue
        function = module.function_around(node)
        holder = module.class_of(function)
        runs = function is not None and function.name != "__init__" and (holder is None or holder in networks)
        if (networks and runs) or _sets_default_dtype(module, node) or made.reaches_network(node):
            yield node


def makes_fp64(module: Module) -> bool:
    """Return whether a module makes tensors of fp64 on which a network may compute."""
    return any(True for _ in find_fp64(module))


class _UsesOfFp64:
    """Follows tensors of a module to networks: to what is called as one, or what a constructor keeps."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._attributes = [each for each in module.nodes if isinstance(each, ast.Attribute)]
        self._constructors = {
            each
            for network in network_classes(module)
            for each in network.body
            if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        }

    def reaches_network(self, node: ast.expr) -> bool:
        """Return whether a network keeps or gets what is made at a node, as far as names of this module say."""
        seen, waiting = set[ast.expr](), [node]
        while waiting:
            start = waiting.pop()
            below: ast.AST = start
            if start in seen:
                continue
            seen.add(start)
            for outer in self._module.ancestors(start):
                if isinstance(outer, ast.stmt):
                    if self._is_kept_or_loaded(outer):
                        return True
                    waiting += self._uses_of_bound_names(outer, below)
                    break
                is_called = isinstance(outer, ast.Call) and outer.func is start
                if is_called or self._is_sink(outer, below):
                    return True
                if self._leaves_fp64(outer, below):
                    break
                waiting += self._uses_of_bound_parameters(outer, below)
                below = outer
        return False

    def _is_sink(self, outer: ast.AST, below: ast.AST) -> bool:
        """Return whether a node is a call of a network or a loss with what is below it, or keeps that as a weight."""
        if not isinstance(outer, ast.Call) or below is outer.func:
            return False
        name, full = last_name(outer.func), self._module.resolve(outer.func) or ""
        if full.startswith("torch."):
            is_loss = full.startswith("torch.nn.") and full.endswith("Loss")
            return is_loss or full.startswith("torch.nn.functional.") or name in REGISTERING
        return name in REGISTERING or CALLED_AS_MODEL.match(name) is not None

    def _is_kept_or_loaded(self, statement: ast.stmt) -> bool:
        """Return whether a statement makes a value part of a network or of what a loader gives."""
        function = self._module.function_around(statement)
        if isinstance(statement, (ast.Return, ast.Expr)) and getattr(function, "name", "") in OF_DATA:
            return isinstance(statement, ast.Return) or isinstance(statement.value, ast.Yield)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            # of a module, as that of a tensor changes nothing
            return last_name(statement.value.func) == "double"
        is_assigned = isinstance(statement, (ast.Assign, ast.AnnAssign)) and function in self._constructors
        return is_assigned and any(each.startswith("self.") for each in names_bound_in(statement))

    def _uses_of_bound_names(self, statement: ast.stmt, below: ast.AST) -> list[ast.expr]:
        """Return where a module uses the names that a statement binds to an expression below it, or calls."""
        module = self._module
        if isinstance(statement, ast.Return):
            name = getattr(module.function_around(statement), "name", "")
            return [each for each in module.calls if name and last_name(each.func) == name]
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and below is statement.value:
            bound = names_bound_in(statement)
        elif isinstance(statement, ForNode) and below is statement.iter:
            bound = names_bound_in(statement.target)
        else:
            return []
        return self._reads_of_names(bound, module.function_around(statement))

    def _uses_of_bound_parameters(self, outer: ast.AST, below: ast.AST) -> list[ast.expr]:
        """Return where functions of the module use what is below a call of them."""
        module = self._module
        found: list[ast.expr] = []
        if not isinstance(outer, ast.Call) or below is outer.func:
            return found
        for function in module.nodes:
            if isinstance(function, FunctionNode) and function.name == last_name(outer.func):
                value = below.value if isinstance(below, ast.keyword) else below
                given = arguments(outer, module.positional_parameters_without_self(function))
                found += self._reads_of_names(
                    {name for name, each in given.items() if each is value}, function
                )
        return found

    def _reads_of_names(self, names: set[str], function: FunctionNode | None) -> list[ast.expr]:
        """Return where names have their values: plain ones in a function, attributes in all of the module."""
        nodes = walk(function) if function is not None else self._module.nodes
        plain = [each for each in nodes if isinstance(each, ast.Name) and each.id in names]
        found: list[ast.Name | ast.Attribute] = [
            *plain,
            *(each for each in self._attributes if dotted_name(each) in names),
        ]
        return [each for each in found if isinstance(each.ctx, ast.Load)]

    def _leaves_fp64(self, outer: ast.AST, below: ast.AST) -> bool:
        """Return whether what is below a node is no tensor of fp64 any more in it."""
        if isinstance(outer, ast.Attribute):
            return outer.attr in LEAVING_FP64
        if isinstance(outer, ast.Call) and below is not outer.func:
            name, is_plain = last_name(outer.func), isinstance(outer.func, ast.Name)
            return name in INDEXING or (is_plain and hasattr(builtins, name) and name not in KEEPING)
        return isinstance(outer, (ast.Compare, ast.FormattedValue, ast.Lambda))


def _sets_default_dtype(module: Module, node: ast.expr) -> bool:
    """Return whether a type is that of all new tensors from then on."""
    outer = module.parent(node)
    return isinstance(outer, ast.Call) and (module.resolve(outer.func) or "").rpartition(".")[2] in DEFAULTS


def _makes_fp64(module: Module, node: ast.Call | ast.Name | ast.Attribute) -> bool:
    """Return whether an expression names the type, other than to compare with it, or calls `double` of a tensor."""
    if not isinstance(node, ast.Call):
        return module.resolve(node, follow=False) in KINDS and not _is_in_type_comparison(module, node)
    is_method = isinstance(node.func, ast.Attribute) and module.resolve(node.func) is None
    if not is_method or last_name(node.func) != "double" or argument_values(node):
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else node
    on_host = any(isinstance(each, ast.Attribute) and each.attr == "cpu" for each in walk(owner))
    is_self = dotted_name(owner) == "self" and getattr(module.function_around(node), "name", "") != "__init__"
    return not on_host and not isinstance(owner, (ast.Compare, ast.BoolOp)) and not is_self


def _is_in_type_comparison(module: Module, kind: ast.Name | ast.Attribute) -> bool:
    """Return whether a type stands in a comparison, or in a question for the type of an object."""
    around = (each for each in module.ancestors(kind) if isinstance(each, (ast.Compare, ast.Call, ast.stmt)))
    outer = next(around)
    is_question = isinstance(outer, ast.Call) and last_name(outer.func) == "isinstance"
    return isinstance(outer, ast.Compare) or is_question
