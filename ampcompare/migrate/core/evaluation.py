"""O1 casts in evaluation too: put its forward passes under autocast where it is plain to see."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.migrate.read.forward import model_keys
from ampcompare.migrate.read.order import functions_by_name
from ampcompare.migrate.read.tree import walk

if TYPE_CHECKING:
    from ampcompare.migrate.core.context import Core

__all__ = ["cast_evaluation"]

NO_GRAD = ("torch.no_grad", "torch.inference_mode")


def cast_evaluation(core: Core) -> None:
    """Add autocast to `with torch.no_grad():` around calls of a model, and note the calls that stay in fp32."""
    if core.forward.missing or not core.sites.initializes or not any(each.scales for each in core.sites.backwards):
        return  # the model itself runs under autocast, or nothing is trained here
    tails = {key.rpartition(".")[2] for key in model_keys(core.tree, core.sites)}
    wrapped: set[ast.AST] = set()
    for node in core.tree.nodes:
        if not isinstance(node, ast.With) or not _is_no_grad(core, node) or not _calls(node, tails):
            continue
        if any(outer in wrapped for outer in core.tree.ancestors(node)) or not _reaches(core, node):
            continue
        wrapped.add(node)
        header = core.autocast(node, None).removeprefix("with ").removesuffix(":")
        _, end = core.tree.span(node.items[-1].optional_vars or node.items[-1].context_expr)
        core.edits.replace_span(end, end, f", {header}")
    trained = {each.function for each in core.sites.backwards}
    for functions in functions_by_name(core.tree).values():
        for function in functions:
            if function in trained or any(each in wrapped for each in walk(function)):
                continue
            call = next(
                (each for each in walk(function) if isinstance(each, ast.Call) and _is_model(each, tails)), None
            )
            if call is not None and _evaluates(function):
                core.note(call, "Apex cast in this forward pass too; it is in fp32 now, unless under autocast")


def _is_no_grad(core: Core, node: ast.With) -> bool:
    return all(
        isinstance(item.context_expr, ast.Call) and core.names.meaning(item.context_expr.func) in NO_GRAD
        for item in node.items
    )


def _is_model(call: ast.Call, tails: set[str]) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in tails


def _calls(node: ast.AST, tails: set[str]) -> bool:
    return any(isinstance(each, ast.Call) and _is_model(each, tails) for each in walk(node))


def _evaluates(function: ast.AST) -> bool:
    """Return whether a function looks like evaluation: it switches a model to `eval()`, or gradients off."""
    names = {each.attr for each in walk(function) if isinstance(each, ast.Attribute)}
    return bool(names & {"eval", "no_grad", "inference_mode"})


def _reaches(core: Core, node: ast.AST) -> bool:
    """Return whether the scaler is in scope."""
    if core.scalers.home == "optimizer":
        return False
    if core.always or core.scalers.home == "module":
        return True
    function = core.tree.function(node)
    if core.scalers.home == "self":
        return function is not None and [each.arg for each in function.args.args[:1]] == ["self"]
    created = {each.function for each in core.sites.initializes}
    while function is not None and function not in created:
        function = core.tree.function(function)
    return function in created
