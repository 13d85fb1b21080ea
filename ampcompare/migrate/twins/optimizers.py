"""Rewrite Apex's fused optimizers: calls, and classes that are chosen first and called later."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ampcompare.migrate.edits import Edits
from ampcompare.migrate.read.sites import Unsure
from ampcompare.migrate.read.tree import Tree
from ampcompare.migrate.twins.catalog import OPTIMIZERS, Optimizer
from ampcompare.source.syntax import dotted

__all__ = ["add_argument", "rewrite_optimizer"]

Note: TypeAlias = Callable[[ast.AST, str], None]
NO_CORRECTION = "FusedAdam without bias correction has no equivalent in torch; it stays, and current Apex still has it"


def add_argument(tree: Tree, edits: Edits, call: ast.Call, text: str) -> None:
    """Put an argument at the end of those of a call."""
    start = tree.span(call.func)[1]
    inner = tree.text[start : tree.span(call)[1] - 1].rstrip()
    separator = "" if inner.endswith("(") else (" " if inner.endswith(",") else ", ")
    at = start + len(inner)
    edits.replace_span(at, at, f"{separator}{text}")


def rewrite_optimizer(
    tree: Tree, edits: Edits, torch: str, node: ast.Name | ast.Attribute, name: str, note: Note, *, fused: bool
) -> bool:
    """Rewrite a use of a fused optimizer; return False where it stays.

    Args:
        torch: the name by which the module knows torch.
        name: of the class in Apex.
        note: gets a remark on a node.
        fused: whether to ask torch for its fused step; one with hooks that read gradients must not be.

    Raises:
        Unsure: its arguments have no equivalent, or cannot be seen.
    """
    parent = tree.parent(node)
    twin = OPTIMIZERS[name]
    if isinstance(parent, ast.ClassDef):
        note(node, f"{name} is a base class here; it stays, and current Apex still has it")
        return False
    if not (isinstance(parent, ast.Call) and parent.func is node):
        _value(tree, edits, torch, node, name, fused)
        return True
    given = {each.arg: each.value for each in parent.keywords if each.arg is not None}
    target, stays = _target(tree, parent, name, given)
    if stays:
        note(node, NO_CORRECTION)
        return False
    spread = any(each.arg is None for each in parent.keywords)
    if spread:
        note(parent, f"arguments passed as ** must be those of {target}, without {', '.join(twin.dropped)}")
    _call(tree, edits, torch, parent, twin, target, fused)
    return True


def _target(tree: Tree, call: ast.Call, name: str, given: dict[str, ast.expr]) -> tuple[str, bool]:
    """Return the class of torch for a call, and whether Apex's stays."""
    twin = OPTIMIZERS[name]
    if any(isinstance(each, ast.Starred) for each in call.args) or len(call.args) > 2:
        raise Unsure(call, f"the arguments of {name} cannot be matched; pass them by name")
    for argument in given:
        if argument not in twin.arguments and argument not in ("fused", "maximize"):
            raise Unsure(call, f"{name}({argument}=...) has no equivalent in {twin.torch}")
    late = given.get("wd_after_momentum") or given.get("adagrad_w_mode")
    if late is not None and not (isinstance(late, ast.Constant) and not late.value):
        raise Unsure(call, f"{name} with another order of weight decay has no equivalent in torch")
    if name != "FusedAdam":
        return twin.torch, False
    mode, bias = given.get("adam_w_mode"), given.get("bias_correction")
    if isinstance(bias, ast.Constant) and not bias.value:
        return twin.torch, True
    if bias is not None and not isinstance(bias, ast.Constant):
        raise Unsure(call, "bias_correction is chosen at run time; torch has no Adam without it")
    if mode is not None and not isinstance(mode, ast.Constant):
        raise Unsure(call, "adam_w_mode is chosen at run time: AdamW if true, Adam if not")
    return ("torch.optim.Adam" if mode is not None and not mode.value else twin.torch), False


def _call(tree: Tree, edits: Edits, torch: str, call: ast.Call, twin: Optimizer, target: str, fused: bool) -> None:
    given = {each.arg for each in call.keywords}
    arguments = [tree.source(each) for each in call.args]
    arguments += [
        f"{each.arg}={tree.source(each.value)}" if each.arg else f"**{tree.source(each.value)}"
        for each in call.keywords
        if each.arg not in twin.dropped
    ]
    added = [
        f"{key}={value}"
        for key, value in twin.added
        if key not in given and None not in given and target != "torch.optim.Adam"
    ]
    if fused and "fused" not in given:
        added.append("fused=True")
    full = f"{torch}{target.removeprefix('torch')}"
    if given & set(twin.dropped) or not added:
        edits.replace(call, f"{full}({', '.join([*arguments, *added])})")
    else:
        edits.replace(call.func, full)
        add_argument(tree, edits, call, ", ".join(added))


# a class that is chosen first: `cls = FusedAdam`, `{"adam": FusedAdam}[name]`


def _value(tree: Tree, edits: Edits, torch: str, node: ast.Name | ast.Attribute, name: str, fused: bool) -> None:
    """Replace a class that is only called later, with arguments that can all be seen, by a partial of its twin."""
    twin = OPTIMIZERS[name]
    calls = list(_calls(tree, node, name))
    if not calls:
        raise Unsure(node, f"{name} is chosen, but its call is not found; its twin {twin.torch} has other arguments")
    allowed = set(twin.arguments) - set(twin.dropped)
    explicit: list[set[str]] = []
    for call in calls:
        given = _argument_names(tree, call)
        if given is None or any(isinstance(each, ast.Starred) for each in call.args) or len(call.args) > 2:
            raise Unsure(node, f"{name} is chosen here, and the arguments of its call in line {call.lineno} are hidden")
        wrong = sorted(given - allowed)
        if wrong:
            raise Unsure(
                node, f"{name} is chosen here, and {twin.torch} has no {wrong[0]}, given in line {call.lineno}"
            )
        explicit.append(given)
    added = [f"{key}={value}" for key, value in twin.added if any(key not in given for given in explicit)]
    full = f"{torch}{twin.torch.removeprefix('torch')}"
    edits.replace(node, f"functools.partial({', '.join([full, *added, *(['fused=True'] if fused else [])])})")


def _calls(tree: Tree, node: ast.expr, name: str) -> Iterator[ast.Call]:
    """Yield the calls that a chosen class comes to.

    Raises:
        Unsure: it also goes somewhere else.
    """
    parent = tree.parent(node)
    if isinstance(parent, ast.Call) and parent.func is node:
        yield parent
        return
    if isinstance(parent, ast.IfExp) and parent.test is not node:
        yield from _calls(tree, parent, name)
        return
    if isinstance(parent, ast.Dict) and node in parent.values:
        yield from _entries(tree, parent, name)
        return
    variable = _assigned(parent, node)
    if variable is None:
        raise Unsure(node, f"{name} is passed as a value; its twin {OPTIMIZERS[name].torch} has other arguments")
    for use in _loads(tree, variable):
        call = tree.parent(use)
        if not (isinstance(call, ast.Call) and call.func is use):
            raise Unsure(node, f"{name} is passed on in line {use.lineno}, where its call cannot be seen")
        yield call


def _entries(tree: Tree, table: ast.Dict, name: str) -> Iterator[ast.Call]:
    parent = tree.parent(table)
    if isinstance(parent, ast.Subscript) and parent.value is table:
        yield from _calls(tree, parent, name)
        return
    variable = _assigned(parent, table)
    if variable is None:
        raise Unsure(table, f"the table with {name} is passed on; its equivalent has other arguments")
    for use in _loads(tree, variable):
        outer = tree.parent(use)
        if isinstance(outer, ast.Subscript) and outer.value is use and isinstance(outer.ctx, ast.Load):
            yield from _calls(tree, outer, name)
        elif not _reads_keys(tree, outer, use):
            raise Unsure(table, f"the table with {name} is passed on in line {use.lineno}")


def _reads_keys(tree: Tree, outer: ast.AST, use: ast.Name) -> bool:
    """Return whether only the keys of a table are used."""
    if isinstance(outer, ast.Compare):
        return use in outer.comparators and all(isinstance(each, (ast.In, ast.NotIn)) for each in outer.ops)
    call = tree.parent(outer)
    return isinstance(outer, ast.Attribute) and outer.attr == "keys" and isinstance(call, ast.Call)


def _assigned(parent: ast.AST, value: ast.expr) -> ast.Name | None:
    """Return the plain name that a value is assigned to."""
    if isinstance(parent, ast.Assign) and parent.value is value and len(parent.targets) == 1:
        target = parent.targets[0]
        return target if isinstance(target, ast.Name) else None
    return None


def _loads(tree: Tree, variable: ast.Name) -> Iterator[ast.Name]:
    """Yield the places where a variable is read, except those that it reaches only after it was bound again.

    They are in its function, or anywhere if it is of the module or global.
    """
    scope: ast.AST = tree.function(variable) or tree.module
    for each in ast.walk(scope):
        if isinstance(each, (ast.Global, ast.Nonlocal)) and variable.id in each.names:
            scope = tree.module
    for each in ast.walk(scope):
        if isinstance(each, ast.Name) and each.id == variable.id and isinstance(each.ctx, ast.Load):
            last = _last_binding(tree, each)
            if last is None or last.lineno <= variable.lineno:
                yield each


def _last_binding(tree: Tree, use: ast.Name) -> ast.Assign | None:
    """Return the nearest assignment that always runs before a use, in its function."""
    current: ast.stmt = tree.statement(use)
    while True:
        block = tree.block(current)
        for each in reversed(block[: next(i for i, statement in enumerate(block) if statement is current)]):
            if isinstance(each, ast.Assign) and any(dotted(target) == use.id for target in each.targets):
                return each
        parent = tree.parent(current)
        while not isinstance(parent, (ast.stmt, ast.Module)):
            parent = tree.parent(parent)
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            return None
        current = parent


def _argument_names(tree: Tree, call: ast.Call) -> set[str] | None:
    """Return the keywords of a call; those of `**options` from its one dict, and None if that cannot be seen."""
    found: set[str] = set()
    for each in call.keywords:
        keys = {each.arg} if each.arg is not None else _keys(tree, each.value)
        if keys is None:
            return None
        found |= keys
    return found


def _keys(tree: Tree, options: ast.expr) -> set[str] | None:
    """Return the keys that a dict of options may have at a use; None if something else may change it."""
    if not isinstance(options, ast.Name):
        return None
    scope = tree.function(options) or tree.module
    last = _last_binding(tree, options)
    loops = any(isinstance(each, (ast.For, ast.While)) for each in tree.ancestors(options))
    found: set[str] = set()
    for node in ast.walk(scope):
        if not isinstance(node, ast.Name) or node.id != options.id:
            continue
        if last is not None and (node.lineno < last.lineno or (node.lineno > options.lineno and not loops)):
            continue
        parent = tree.parent(node)
        if isinstance(parent, ast.keyword) and parent.arg is None:
            continue
        keys = _bound_keys(parent, node)
        if keys is None:
            return None
        found |= keys
    return found or None


def _bound_keys(parent: ast.AST, node: ast.Name) -> set[str] | None:
    if isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.slice, ast.Constant):
        return {str(parent.slice.value)}
    if not isinstance(parent, ast.Assign) or not isinstance(parent.value, ast.Dict):
        return None
    keys = [key.value for key in parent.value.keys if isinstance(key, ast.Constant)]
    return {str(key) for key in keys} if len(keys) == len(parent.value.keys) else None
