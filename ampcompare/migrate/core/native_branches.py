"""Files that use torch.amp as well as Apex: where the two cannot meet, the core of Apex is still rewritten."""

from __future__ import annotations

import ast

from ampcompare.migrate.read.exclusive import is_exclusive
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.sites import Sites, Step, Unsure
from ampcompare.migrate.read.tree import Tree
from ampcompare.source.syntax import dotted

__all__ = ["check_native"]

NATIVE = ("torch.cuda.amp", "torch.amp", "torch.autocast", "torch.cpu.amp")


def check_native(tree: Tree, names: Names, sites: Sites) -> bool:
    """Return whether torch.amp is used in the branches of an `if` that do not use Apex.

    Raises:
        Unsure: the two may meet.
    """
    for step in sites.steps if sites.natives else []:
        if not sites.initializes or not _steps_apart(tree, step):
            raise Unsure(step.call, "this step may follow a GradScaler or Apex; remove the branch of Apex by hand")
    if "autocast" not in tree.text and "GradScaler" not in tree.text:
        return False
    found = [node for node in tree.nodes if isinstance(node, (ast.Name, ast.Attribute)) and _is_native(names, node)]
    used = [node for node in found if not _is_dead(tree, node)]
    apart = bool(not sites.backwards and not sites.masters and sites.initializes)
    alive = [node for node in used if not _is_harmless(tree, names, node) and not _is_elsewhere(tree, sites, node)]
    alive = [node for node in alive if not _is_another_branch(tree, names, sites, node)]
    if not alive:
        return apart and bool(used)
    for node in alive:
        if not apart or not all(_is_apart(tree, node, each.statement) for each in sites.initializes):
            raise Unsure(node, "the file uses torch.amp as well as Apex; remove the branch of Apex by hand")
    return True


def _is_native(names: Names, node: ast.Name | ast.Attribute) -> bool:
    if isinstance(node.ctx, ast.Store) or (meaning := names.meaning(node)) is None:
        return False
    return meaning.startswith(NATIVE) and meaning.rpartition(".")[2] in ("autocast", "GradScaler")


def _is_harmless(tree: Tree, names: Names, node: ast.Name | ast.Attribute) -> bool:
    """Return whether a use is an annotation, or an autocast that cannot switch another one off."""
    below: ast.AST = node
    for outer in tree.ancestors(node):
        if below in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
            return True
        if isinstance(outer, ast.stmt):
            break
        below = outer
    meaning = str(names.meaning(node))
    if not meaning.endswith(".autocast"):
        return False
    call = tree.parent(node)
    if not (isinstance(call, ast.Call) and call.func is node):
        return isinstance(call, ast.Assign)
    before_enabled = 2 if meaning in ("torch.autocast", "torch.amp.autocast") else 0
    return len(call.args) <= before_enabled and not any(
        each.arg is None or (each.arg == "enabled" and not (isinstance(each.value, ast.Constant) and each.value.value))
        for each in call.keywords
    )


def _is_elsewhere(tree: Tree, sites: Sites, node: ast.AST) -> bool:
    """Return whether the outermost function around a use has nothing of Apex in it."""
    outermost = [each for each in tree.ancestors(node) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not outermost:
        return False
    statements: list[ast.AST] = [*sites.masters, *sites.saves, *sites.loads]
    statements += [each.statement for each in sites.initializes]
    statements += [each.statement for each in sites.backwards] + [each.statement for each in sites.steps]
    return not any(outermost[-1] in tree.ancestors(each) for each in statements)


def _is_another_branch(tree: Tree, names: Names, sites: Sites, node: ast.Name | ast.Attribute) -> bool:
    """Return whether a use is one of a branch that never runs together with a block of `scale_loss`.

    A GradScaler is, wherever it is made: what it scales is looked at elsewhere.
    """
    blocks = [each.statement for each in sites.backwards if each.scales]
    if not blocks:
        return False
    if str(names.meaning(node)).endswith(".GradScaler"):
        return True
    near = [each for each in blocks if tree.function(each) is tree.function(node)]
    return bool(near) and all(is_exclusive(tree, node, each) for each in near)


def _steps_apart(tree: Tree, step: Step) -> bool:
    """Return whether another branch steps the same optimizer through a GradScaler, so that this one is not for it."""
    for node in tree.nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "step" and node.args:
            if dotted(node.args[0]) == step.optimizer and tree.function(node) is step.function:
                if is_exclusive(tree, node, step.statement):
                    return True
    return False


def _is_dead(tree: Tree, node: ast.AST) -> bool:
    """Return whether an object is only bound to a name of the module that nothing reads."""
    statement = tree.statement(node)
    if not isinstance(statement, ast.Assign) or tree.function(statement) is not None:
        return False
    targets = {target.id for target in statement.targets if isinstance(target, ast.Name)}
    if len(targets) != len(statement.targets):
        return False
    words = {each.value for each in tree.nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    read = {each.id for each in tree.nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    return not targets & (read | words)


def _is_apart(tree: Tree, node: ast.AST, initialize: ast.stmt) -> bool:
    """Return whether two places are in different branches of one `if`, and the first only chooses something."""
    statement = tree.statement(node)
    if not isinstance(statement, ast.Assign):
        return False
    for outer in tree.ancestors(statement):
        if isinstance(outer, ast.If):
            sides = [
                [_is_below(tree, each, place) for each in (outer.body, outer.orelse)]
                for place in (statement, initialize)
            ]
            if sides in ([[True, False], [False, True]], [[False, True], [True, False]]):
                return True
    return False


def _is_below(tree: Tree, block: list[ast.stmt], statement: ast.stmt) -> bool:
    return any(each is statement or each in tree.ancestors(statement) for each in block)
