"""Find models that a script casts to fp16 for `FP16_Optimizer`: in its function, or in another method of its class."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.sites import Unsure
from ampcompare.migrate.read.tree import Function, Tree
from ampcompare.source.syntax import dotted

__all__ = ["ModelCast", "find_casts"]

CONVERTERS = ("apex.fp16_utils.network_to_half", "apex.fp16_utils.convert_network")
OF_MODELS = ("parameters", "named_parameters", "train", "eval", "state_dict")


@dataclass(frozen=True)
class ModelCast:
    """A call such as `model.half()` or `network_to_half(model)`.

    Attributes:
        key: of the model, where the optimizer is made.
    """

    call: ast.Call
    statement: ast.stmt
    key: str


def find_casts(tree: Tree, names: Names, wrapped: ast.stmt) -> list[ModelCast]:
    """Return the casts of the models that belong to the optimizer of a statement.

    Args:
        wrapped: makes the `FP16_Optimizer`.

    Raises:
        Unsure: there is none, or one under other conditions than those of the statement.
    """
    function = tree.function(wrapped)
    tests = _tests(tree, wrapped)
    found: list[ModelCast] = []
    for node in tree.nodes:
        if not isinstance(node, ast.Call):
            continue
        statement, key = tree.statement(node), _cast(tree, names, node)
        if key is None or not _is_model(tree, key):
            continue
        if tree.function(node) is function:
            if not _belongs(tree, statement, wrapped, key, function):
                continue
        elif (own := _own(tree, node, key, function)) is not None and _is_model(tree, own):
            key = own
        else:
            continue
        if not _tests(tree, statement) <= tests:
            raise Unsure(node, "the model is cast to fp16 here under another condition than FP16_Optimizer is made")
        found.append(ModelCast(node, statement, key))
    if not found:
        raise Unsure(wrapped, "the fp16 model of FP16_Optimizer is not found; keep it in fp32, use autocast")
    return found


def _cast(tree: Tree, names: Names, call: ast.Call) -> str | None:
    """Return the key of the model that a call such as `model.half()` casts."""
    statement = tree.statement(call)
    converts = names.meaning(call.func) in CONVERTERS and len(call.args) == 1 and not call.keywords
    halves = isinstance(call.func, ast.Attribute) and call.func.attr == "half" and not call.args
    if not converts and not halves:
        return None
    cast = call.args[0] if converts else call.func.value  # type: ignore[attr-defined]
    if isinstance(statement, ast.Expr):
        return dotted(cast) if statement.value is call else None
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1 or not _is_chain(statement.value, call):
        return None
    bound = dotted(statement.targets[0])
    return bound if converts or dotted(cast) == bound or _makes_module(cast) else None


def _own(tree: Tree, call: ast.Call, key: str, function: Function | None) -> str | None:
    """Return the attribute of the object to which another method of its class binds the model that it casts."""
    method = tree.function(call)
    if method is None or function is None or tree.class_of(method) is None:
        return None
    if tree.class_of(method) is not tree.class_of(function):
        return None
    if key.startswith("self."):  # not in a method such as `half`, which casts for another reason
        return key if method.name == "__init__" or _tests(tree, tree.statement(call)) else None
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and node.lineno > call.lineno and _mentions(node.value, key):
            bound = dotted(node.targets[0])
            return bound if bound is not None and bound.startswith("self.") else None
    return None


def _is_model(tree: Tree, key: str) -> bool:
    """Return whether the module uses a name as it does with models only, or puts it into a parallel wrapper."""
    for node in tree.nodes:
        if isinstance(node, ast.Attribute) and node.attr in OF_MODELS and dotted(node.value) == key:
            return True
        if isinstance(node, ast.Call) and (dotted(node.func) or "").endswith("DataParallel"):
            if any(dotted(each) == key for each in node.args):
                return True
    return False


def _belongs(tree: Tree, statement: ast.stmt, wrapped: ast.stmt, key: str, function: Function | None) -> bool:
    """Return whether no other model is bound to the name between a cast and the optimizer."""
    first, last = sorted((statement.lineno, wrapped.lineno))
    for node in ast.walk(function or tree.module):
        if not isinstance(node, ast.Assign) or not first < node.lineno < last:
            continue
        if any(dotted(each) == key for each in node.targets) and not _mentions(node.value, key):
            return False
    return True


def _tests(tree: Tree, statement: ast.stmt) -> set[str]:
    """Return the tests around a statement, up to its function; the other branch of one is another test."""
    found, below = set(), statement
    for outer in tree.ancestors(statement):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if isinstance(outer, ast.If) and below in outer.body:
            both = isinstance(outer.test, ast.BoolOp) and isinstance(outer.test.op, ast.And)
            found |= {ast.unparse(each) for each in (outer.test.values if both else [outer.test])}  # type: ignore[attr-defined]
        elif isinstance(outer, ast.If):
            found.add(f"not {ast.unparse(outer.test)}")
        if isinstance(outer, ast.stmt):
            below = outer
    return found


def _mentions(node: ast.AST, key: str) -> bool:
    return any(dotted(each) == key for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))


def _is_chain(value: ast.expr, call: ast.Call) -> bool:
    """Return whether a call is a link of a chain of method calls such as `Net().half().cuda()`."""
    while value is not call:
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return False
        value = value.func.value
    return True


def _makes_module(value: ast.expr) -> bool:
    """Return whether a chain of calls begins with the making of an object such as `Net()`, not with a tensor."""
    while (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call)
    ):
        value = value.func.value
    name = (dotted(value.func) or "").rpartition(".")[2] if isinstance(value, ast.Call) else ""
    return name[:1].isupper() or name.startswith(("get_model", "build_model", "from_pretrained"))
