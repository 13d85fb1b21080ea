"""Which classes of a module are networks, and what they register."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from ampcompare.source.syntax import last_name

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


@lru_cache(maxsize=16)  # of the methods that are read now: each of their attributes asks
def registered_tensor_names_of_class(scope: Scope) -> frozenset[str]:
    """Return the names of buffers and parameters that the class around a method registers by name."""
    calls = ast.walk(scope.owner.node) if scope.owner is not None else ()
    return frozenset(
        str(each.args[0].value)
        for each in calls
        if isinstance(each, ast.Call)
        and last_name(each.func) in ("register_buffer", "register_parameter")
        and each.args
        and isinstance(each.args[0], ast.Constant)
    )
