"""Remove imports of Apex that nothing needs any more, with the `try` around them; others get their twin."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ampcompare.migrate.edits import Edits
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.tree import Block, Tree

__all__ = ["import_from_engine", "import_functools", "rewrite_imports", "torch_name"]

CAUGHT = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")


def torch_name(tree: Tree, names: Names, edits: Edits) -> tuple[str, ast.stmt | None]:
    """Return the name by which a module knows torch, and the statement above which to import it, if any."""
    for node in tree.module.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch" or (alias.name.startswith("torch.") and alias.asname is None):
                    return alias.asname or "torch", None
    body = [each for each in tree.module.body if not _is_prologue(each)]
    return "torch", body[0] if body else None


def import_functools(tree: Tree, edits: Edits) -> None:
    """Import functools at the top of a module that has not."""
    body = [each for each in tree.module.body if not _is_prologue(each)]
    imported = {alias.asname or alias.name for each in body if isinstance(each, ast.Import) for alias in each.names}
    if "functools" not in imported:
        edits.before(body[0], ["import functools"])


def _is_prologue(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def rewrite_imports(
    tree: Tree, names: Names, edits: Edits, kept: Iterable[ast.AST], twins: dict[tuple[ast.stmt, str], str]
) -> None:
    """Rewrite the imports.

    Args:
        kept: uses of Apex that remain.
        twins: full names in torch of what is imported, by statement and name in Apex's module.
    """
    needed = {_root(node) for node in kept}
    stars = any(alias.name == "*" for _, alias in names.imports) and bool(needed)
    gone: set[ast.stmt] = set()
    for statement in dict.fromkeys(statement for statement, _ in names.imports):
        lines, complete = _rewritten(statement, needed, twins, stars)
        if complete and not lines:
            gone.add(statement)
            edits.remove(statement)
        elif lines is not None:
            edits.replace_statement(statement, lines)
            if complete:
                gone.add(statement)
    for node in tree.nodes:
        if isinstance(node, ast.Try):
            _settle_try(tree, edits, node, gone)


def import_from_engine(tree: Tree, names: Names, edits: Edits, kept: Iterable[ast.AST]) -> bool:
    """Import what remains from `ampcompare.apex`, which has the surface of Apex; return whether that serves."""
    needed = {_root(node) for node in kept}
    complete = True
    for statement in dict.fromkeys(statement for statement, _ in names.imports):
        lines: list[str] = []
        for alias in statement.names:
            local = alias.asname or alias.name.split(".")[0]
            if alias.name != "*" and local not in needed:
                continue
            if isinstance(statement, ast.ImportFrom):
                module = _engine_name(statement.module or "")
                lines.append(f"from {module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""))
            elif alias.name in ("apex", "amp_C", "apex_C"):
                lines.append(f"from ampcompare.apex import {alias.name} as {local}" if alias.name != "apex" else "")
                lines[-1] = lines[-1] or f"import ampcompare.apex as {local}"
            elif alias.asname:
                lines.append(f"import {_engine_name(alias.name)} as {local}")
            elif alias.name.startswith("apex."):
                lines += ["import ampcompare.apex as apex", f"import {_engine_name(alias.name)}"]
            else:
                lines.append(f"import {alias.name}")
        edits.replace_statement(statement, lines)
    return complete


def _engine_name(module: str) -> str:
    return f"ampcompare.{module}" if module.split(".")[0] == "apex" else module


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _rewritten(
    statement: ast.Import | ast.ImportFrom, needed: set[str], twins: dict[tuple[ast.stmt, str], str], stars: bool
) -> tuple[list[str] | None, bool]:
    """Return the statements instead of an import (None: as it is), and whether Apex is gone from it."""
    kept: list[ast.alias] = []
    lines: list[str] = []
    for alias in statement.names:
        local = alias.asname or alias.name.split(".")[0]
        twin = twins.get((statement, alias.name))
        if isinstance(statement, ast.Import) and alias.name.split(".")[0] not in ("apex", "amp_C", "apex_C"):
            kept.append(alias)
        elif twin is not None:
            module, _, name = twin.rpartition(".")
            lines.append(f"from {module} import {name}" + (f" as {local}" if local != name else ""))
        elif (alias.name == "*" and stars) or local in needed:
            kept.append(alias)
    foreign = isinstance(statement, ast.Import) and all(
        each.name.split(".")[0] not in ("apex", "amp_C", "apex_C") for each in kept
    )
    complete = not kept or foreign
    if len(kept) == len(statement.names):
        return None, False
    if kept:
        text = ", ".join(each.name + (f" as {each.asname}" if each.asname else "") for each in kept)
        if isinstance(statement, ast.Import):
            lines.append(f"import {text}")
        else:
            lines.append(f"from {'.' * statement.level}{statement.module or ''} import {text}")
    return lines, complete


def _settle_try(tree: Tree, edits: Edits, node: ast.Try, gone: set[ast.stmt]) -> None:
    """Remove a `try` that guarded only imports of Apex; what else its body does stays."""
    if not any(each in gone for each in node.body) or node.finalbody:
        return
    if not all(_catches_import_error(handler) for handler in node.handlers):
        return
    if not all(each in gone or _cannot_fail(each) for each in node.body):
        if all(edits.is_removed(each) for each in node.body):
            edits.remove(node)
        return
    body: Block = [each for each in node.body if not edits.is_removed(each)]
    if body:
        edits.unwrap(node, _whole(node.body))
    else:
        edits.remove(node)
    if node.orelse:
        _keep_else(tree, edits, node)


def _whole(body: Block) -> Block:
    return body


def _keep_else(tree: Tree, edits: Edits, node: ast.Try) -> None:
    outer = tree.indent(node)
    inner = tree.indent(node.orelse[0])
    text = "".join(
        tree.line_text(number) for number in range(tree.line_of(node.orelse[0]), (node.orelse[-1].end_lineno or 0) + 1)
    )
    lines = [line.removeprefix(inner) if line.startswith(inner) else line.strip() for line in text.splitlines()]
    edits.after(node, lines)
    del outer


def _cannot_fail(statement: ast.stmt) -> bool:
    """Return whether a statement is a flag such as `has_apex = True`."""
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Constant, ast.Name))
    )


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in CAUGHT for kind in kinds)
