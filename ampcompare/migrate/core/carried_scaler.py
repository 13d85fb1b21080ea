"""The scaler that comes with the optimizer from another file, in functions that also train without one."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.migrate.core.autocast import optimizer_near
from ampcompare.migrate.read.sites import Backward
from ampcompare.migrate.read.tree import Function, Tree

if TYPE_CHECKING:
    from ampcompare.migrate.core.context import Core

__all__ = ["name_carried"]


def name_carried(core: Core) -> None:
    """Bind the carried scaler to a variable in each function where a test of the script says whether there is one.

    Where the script trains in fp32 no `amp.initialize` ran, so the optimizer carries nothing.
    """
    if core.scalers.home != "optimizer":
        return
    tests = {each.function: _test(core.tree, each, core.sites.backwards) for each in core.sites.backwards if each.block}
    common = next(iter(tests.values())) if len(set(tests.values())) == 1 else None
    nodes: dict[Function | None, list[ast.stmt]] = {}
    for statement in (
        *(each.statement for each in core.sites.backwards),
        *(each.statement for each in core.sites.steps),
        *(first for first, _ in core.forward.regions),
    ):
        nodes.setdefault(core.tree.function(statement), []).append(statement)
    for function, statements in nodes.items():
        test = tests.get(function, common)
        key = optimizer_near(core, statements[0])
        if function is None or test is None or key is None:
            continue
        first = min(statements, key=lambda each: each.lineno)
        place = next(each for each in function.body if each is first or each in core.tree.ancestors(first))
        if _is_known(core.tree, f"{key}, {test}", function, place):
            name = core.scalers.names[0]
            core.local[function] = name
            core.edits.before(
                place, [f"{name} = {key}.{core.scalers.attribute} if {test} else {core.off}"], outside=True
            )
        else:
            core.note(first, f"the optimizer must carry {core.scalers.attribute} here even where {test} does not hold")


def _test(tree: Tree, backward: Backward, others: list[Backward]) -> str | None:
    """Return the test of the nearest `if` that has the block in one branch and a plain backward pass in the other."""
    below: ast.AST = backward.statement
    for outer in tree.ancestors(backward.statement):
        if isinstance(outer, ast.If):
            positive = any(each is below for each in outer.body)
            other = outer.orelse if positive else outer.body
            if any(not each.scales and _is_in(tree, each.statement, other) for each in others):
                text = ast.unparse(outer.test)
                return text if positive else f"not ({text})"
        below = outer
    return None


def _is_in(tree: Tree, statement: ast.stmt, block: list[ast.stmt]) -> bool:
    around = [statement, *tree.ancestors(statement)]
    return any(each in around for each in block)


def _is_known(tree: Tree, expression: str, function: Function, place: ast.stmt) -> bool:
    """Return whether all names of an expression have the value above a statement that they have below it."""
    names = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
    arguments = function.args
    known = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for node in tree.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
            if tree.function(node) is function:
                if node.lineno >= place.lineno:
                    return False
                known.add(node.id)
            elif tree.function(node) is None:
                known.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and tree.function(node) is None:
            known |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return names <= known
