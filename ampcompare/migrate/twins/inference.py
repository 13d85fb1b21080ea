"""Files that only evaluate a model: what stands for `network_to_half`, and for the casts of `amp.init`."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ampcompare.migrate.edits import Edits
from ampcompare.migrate.read.booleans import as_bool
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.tree import Tree
from ampcompare.source.syntax import dotted

__all__ = ["cast_from_here", "evaluate_half"]

TRAINING = {"backward", "scale_loss", "step", "wrap_optimizer"}


def _trains(tree: Tree) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in TRAINING for each in tree.nodes)


def evaluate_half(
    tree: Tree,
    names: Names,
    edits: Edits,
    torch: str,
    node: ast.Name | ast.Attribute,
    note: Callable[[ast.AST, str], None],
) -> bool:
    """Let a model run under autocast instead of in fp16; return False where that is not sure to be the same."""
    call, statement = tree.parent(node), tree.statement(node)
    if not isinstance(call, ast.Call) or call.func is not node or not call.args or call.keywords or _trains(tree):
        return False
    if any(meaning.endswith("FP16_Optimizer") for _, meaning in names.uses):
        return False
    if any(isinstance(each, ast.Attribute) and each.attr == "DataParallel" for each in tree.nodes):
        return False
    if len(call.args) > 1 and names.meaning(call.args[1]) not in ("torch.half", "torch.float16"):
        return False
    model = dotted(call.args[0])
    if isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1:
        model = dotted(statement.targets[0])
    elif not (isinstance(statement, ast.Expr) and statement.value is call):
        return False
    if model is None:
        return False
    source = tree.source(call.args[0])
    wrap = f'{model}.forward = {torch}.autocast("cuda", dtype={torch}.float16)({model}.forward)'
    edits.replace_statement(statement, [*([f"{model} = {source}"] if source != model else []), wrap])
    note(call, f"{dotted(node)} made the weights fp16; under autocast they stay fp32, and products are in fp16")
    return True


def cast_from_here(tree: Tree, edits: Edits, torch: str, call: ast.Call) -> bool:
    """Turn the casts of `amp.init` on for the rest of the process; return False where its handle is used."""
    statement = tree.statement(call)
    given = {str(each.arg): each.value for each in call.keywords}
    handle = dotted(statement.targets[0]) if isinstance(statement, ast.Assign) else None
    names = [each for each in tree.nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)]
    if handle is None or any(each.id == handle for each in names) or _trains(tree):
        return False
    if call.args or set(given) - {"enabled", "verbose", "enable_caching"}:
        return False
    enabled = f", enabled={as_bool(tree, tree.source(given['enabled']))}" if "enabled" in given else ""
    autocast = f'{torch}.autocast("cuda", dtype={torch}.float16, cache_enabled=False{enabled})'
    lines = [f"{handle} = {autocast}", f"{handle}.__enter__()  # for the rest of the process, as amp.init has it"]
    edits.replace_statement(statement, lines)
    return True
