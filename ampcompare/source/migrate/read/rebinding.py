"""Which names a module binds by their texts, past the statements that bind names: `globals()["amp"] = None`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompare.source.module import Module
from ampcompare.source.syntax import argument, argument_values, dotted_name, last_name

# Methods of a table of names that bind or take away one, which is their first argument.
OF_ONE = frozenset({"setdefault", "pop", "__setitem__", "__delitem__"})
# Calls that bind or take away an attribute of a module: of Python, of `monkeypatch`, and `mock.patch.object`.
OF_ATTRIBUTES = frozenset({"setattr", "delattr", "__setattr__", "object"})
UNSEEN = ""


def names_bound_by_string(module: Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield what binds names of a module by their texts, with each name; "" stands for names that are not seen."""
    if not any(word in module.text for word in ("globals(", "vars(", "locals(", "__dict__", "sys.modules")):
        return
    for node in module.nodes:
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if _is_table_of_names(module, node.value):
                yield node, _constant_text(node.slice)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if _is_module_itself(module, node.value):
                yield node, node.attr
        elif isinstance(node, ast.Call):
            for name in _names_bound_by_call(module, node):
                yield node, name


def _names_bound_by_call(module: Module, call: ast.Call) -> Iterator[str]:
    """Yield the names that a call binds in the module, or takes away."""
    name = last_name(call.func)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if name in OF_ATTRIBUTES and call.args and _is_module_itself(module, call.args[0]):
        yield _constant_text(argument(call, "attribute", 1))
    elif owner is None or not _is_table_of_names(module, owner):
        return
    elif name in OF_ONE:
        yield _constant_text(argument(call, "key", 0))
    elif name == "update":
        yield from (each.arg or UNSEEN for each in call.keywords)
        for each in call.args:
            yield from map(_constant_text, each.keys) if isinstance(each, ast.Dict) else [UNSEEN]


def _constant_text(node: ast.AST | None) -> str:
    value = node.value if isinstance(node, ast.Constant) else UNSEEN
    return value if isinstance(value, str) else UNSEEN


def _is_table_of_names(module: Module, node: ast.expr) -> bool:
    """Return whether an expression is the table of the module's names: `globals()`, or at its top `vars()`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__" and _is_module_itself(module, node.value)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if given := argument_values(node):
        return node.func.id == "vars" and _is_module_itself(module, given[0])
    at_top = module.scope_of[node] is module.top
    return node.func.id == "globals" or (node.func.id in ("vars", "locals") and at_top)


def _is_module_itself(module: Module, node: ast.expr) -> bool:
    """Return whether an expression is `sys.modules[__name__]`, or a name that has this alone."""
    if isinstance(node, ast.Name):
        values = module.values_of(node.id, module.scope_of.get(node, module.top)) or []
        return (
            len(values) == 1 and not isinstance(values[0], ast.Name) and _is_module_itself(module, values[0])
        )
    if not isinstance(node, ast.Subscript) or dotted_name(node.value) != "sys.modules":
        return False
    return dotted_name(node.slice) == "__name__" or _constant_text(node.slice) == "__main__"
