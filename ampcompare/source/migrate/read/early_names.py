"""Names of torch's functions that a module binds before `amp.initialize`, under which O1 does not cast them.

O1 puts other functions in the place of those of `torch` and `torch.nn.functional`: what
`from torch.nn.functional import mse_loss` has bound by then stays the one without casts. Autocast casts a function
whatever its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompare.source.migrate.read.cast_lists import CAST_BY_AUTOCAST
from ampcompare.source.module import Module
from ampcompare.source.syntax import FunctionNode

BOUND_EARLY = "{}: bound before amp.initialize, so O1 does not cast under this name; autocast casts under any"
PLACES = ("torch.nn.functional.", "torch.")
# Of other modules of torch, by what they call.
OF_OTHER_MODULES = frozenset({
    "torch.linalg.cond", "torch.linalg.matmul", "torch.linalg.matrix_norm", "torch.linalg.matrix_power",
    "torch.linalg.multi_dot", "torch.linalg.norm", "torch.linalg.pinv", "torch.linalg.vector_norm",
    "torch.special.expm1", "torch.special.log1p", "torch.special.log_softmax", "torch.special.logsumexp",
    "torch.special.softmax",
})  # fmt: skip
NAMES = CAST_BY_AUTOCAST | {each.rpartition(".")[2] for each in OF_OTHER_MODULES}


def find_early_bindings_of_torch(module: Module) -> dict[ast.AST, str]:
    """Return the statements and expressions that bind functions of torch which autocast casts, with their names.

    Those of imports at the top, and those of a function as a value, where the module is imported or a constructor
    runs.
    """
    found: dict[ast.AST, list[str]] = {}
    for node, name in _early_bindings(module):
        found.setdefault(node, []).append(name)
    return {node: ", ".join(names) for node, names in found.items()}


def _early_bindings(module: Module) -> Iterator[tuple[ast.AST, str]]:
    for statement, alias, full in module.imports:
        if _name_cast_by_autocast(full) and _is_evaluated_early(module, statement):
            yield statement, alias.name
    for node in module.nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        outer = module.parent(node)
        is_called = isinstance(outer, ast.Call) and outer.func is node
        name = "" if is_called or node.attr not in NAMES else module.resolve(node, follow=False)
        if name and _name_cast_by_autocast(name) and _is_evaluated_early(module, node):
            yield node, node.attr


def _is_evaluated_early(module: Module, node: ast.AST) -> bool:
    """Return whether a node runs where its module is imported, or in a constructor."""
    below = node
    for outer in module.ancestors(node):
        if isinstance(outer, ast.Lambda):
            return False
        if isinstance(outer, FunctionNode) and below in outer.body:
            return outer.name == "__init__" and not isinstance(node, ast.stmt)
        below = outer
    return True


def has_early_bindings_of_torch(module: Module) -> bool:
    """Return whether a module binds a function of torch early."""
    return any(True for _ in _early_bindings(module))


def _name_cast_by_autocast(full: str) -> bool:
    head, _, name = full.rpartition(".")
    return full in OF_OTHER_MODULES or (f"{head}." in PLACES and name in CAST_BY_AUTOCAST)
