"""Which functions can have a backward pass, a scaler or Apex in them: the others have nothing that rules compare."""

from __future__ import annotations

import ast
import re

from ampcompare.source.names import ModuleNames, Scope
from ampcompare.source.syntax import dotted

__all__ = ["training_scopes"]

# Without one of these calls in it, a trace has no finding.
OF_TRAINING = re.compile(
    r"backward|scaler|clip_grad|^(?:scale|unscale_|initialize|scale_loss|binary_cross_entropy|FP16_Optimizer)$",
    re.IGNORECASE,
)


def training_scopes(names: ModuleNames, text: str) -> list[Scope]:
    """Return the functions, and the module, that make a call of training, or call a function that does.

    A call by name counts for every function of that name, wherever it is defined: one too many does no harm.

    Args:
        names: of the module.
        text: of the module.
    """
    scopes = [scope for scope in names.scopes if not isinstance(scope.node, (ast.ClassDef, ast.Lambda))]
    if re.search(r"\bBCELoss\b", text):  # an object that is called by any name
        return scopes
    reached: set[Scope] = set()
    callers: dict[str, set[Scope]] = {}
    for call in names.calls:
        scope = names.scope_of[call]
        name = _last(call.func)
        callers.setdefault(name, set()).add(scope)
        if name == "step":
            for argument in call.args:  # a closure
                callers.setdefault(_last(argument), set()).add(scope)
        if _is_of_training(call, scope, names):
            reached.add(scope)
    waiting = list(reached)
    while waiting:
        node = waiting.pop().node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += callers.get(node.name, set()) - reached
            reached |= callers.get(node.name, set())
    return [scope for scope in scopes if scope in reached]


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_of_training(call: ast.Call, scope: Scope, names: ModuleNames) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute):
        return OF_TRAINING.search(function.attr) is not None or "scaler" in (dotted(function) or "").lower()
    full = names.resolve(function, scope) or _last(function)
    return OF_TRAINING.search(full.rpartition(".")[2]) is not None
