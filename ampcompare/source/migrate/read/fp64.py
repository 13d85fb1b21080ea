"""Where a network makes tensors of fp64, which O1 casts as any others, and autocast leaves alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompare.source.migrate.read.networks import network_classes
from ampcompare.source.module import Module
from ampcompare.source.syntax import argument_values, dotted_name, last_name, walk

KINDS = frozenset({"torch.float64", "torch.double", "torch.DoubleTensor", "torch.cuda.DoubleTensor"})
MADE_FP64 = "{0} makes tensors of fp64: O1 casts these, to fp16 in products, to fp32 in sums and losses"
BY_AUTOCAST = MADE_FP64 + ", and autocast leaves them alone; write .float() where it matters"
BY_ADAPTER = MADE_FP64 + ", and the adapter in products alone; write .float() where it matters"


def find_fp64_in_networks(module: Module) -> Iterator[ast.expr]:
    """Yield where networks of a module, or functions next to them, make tensors fp64, but not in a constructor."""
    networks = set(network_classes(module))
    for node in module.nodes if networks else ():
        if not isinstance(node, (ast.Call, ast.Name, ast.Attribute)) or not _makes_fp64(module, node):
            continue
        function = module.function_around(node)
        holder = module.class_of(function)
        if function is not None and function.name != "__init__" and (holder is None or holder in networks):
            yield node


def makes_fp64(module: Module) -> bool:
    """Return whether networks of a module make tensors of fp64."""
    return any(True for _ in find_fp64_in_networks(module))


def _makes_fp64(module: Module, node: ast.Call | ast.Name | ast.Attribute) -> bool:
    """Return whether an expression names the type, other than to compare with it, or calls `double` of a tensor."""
    if not isinstance(node, ast.Call):
        return module.resolve(node, follow=False) in KINDS and not _is_in_type_comparison(module, node)
    is_method = isinstance(node.func, ast.Attribute) and module.resolve(node.func) is None
    if not is_method or last_name(node.func) != "double" or argument_values(node):
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else node
    on_host = any(isinstance(each, ast.Attribute) and each.attr == "cpu" for each in walk(owner))
    return not on_host and not isinstance(owner, (ast.Compare, ast.BoolOp)) and dotted_name(owner) != "self"


def _is_in_type_comparison(module: Module, kind: ast.Name | ast.Attribute) -> bool:
    """Return whether a type stands in a comparison, or in a question for the type of an object."""
    around = (each for each in module.ancestors(kind) if isinstance(each, (ast.Compare, ast.Call, ast.stmt)))
    outer = next(around)
    is_question = isinstance(outer, ast.Call) and last_name(outer.func) == "isinstance"
    return isinstance(outer, ast.Compare) or is_question
