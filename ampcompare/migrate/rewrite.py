"""Migrate one module: text in, text and findings out."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

from ampcompare.migrate.cleanup.branches import join_branches
from ampcompare.migrate.cleanup.help_texts import rewrite_texts
from ampcompare.migrate.cleanup.imports import import_from_engine, import_functools, rewrite_imports, torch_name
from ampcompare.migrate.core.core import rewrite_core
from ampcompare.migrate.edits import Edits
from ampcompare.migrate.finding import BY_HAND, MARK, NOTE, Finding
from ampcompare.migrate.fp16_utils.fp16_optimizer import at_level_2
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.neighbours import ALONE, Around
from ampcompare.migrate.read.sites import Unsure
from ampcompare.migrate.read.tree import Tree
from ampcompare.migrate.twins.cast_differences import cast_notes
from ampcompare.migrate.twins.twins import Twins

__all__ = ["Migration", "may_use_apex", "migrate_text"]

WORD = re.compile(r"\bapex\b|\bamp_C\b|\bapex_C\b|\bamp\.scale_loss\(")
CORE = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")

PROBE = (
    "the answer is yes now, whether Apex is there or not, since migrated files ask it; a file that asks it and still "
    "imports Apex fails without"
)


@dataclass(frozen=True)
class Migration:
    """The result for a module.

    Attributes:
        text: the new source; the very same if nothing was to do.
        findings: in the order of lines.
        uses: how often the module used Apex.
        left: how many of these uses remain.
    """

    text: str
    findings: list[Finding]
    uses: int = 0
    left: int = 0


def may_use_apex(text: str) -> bool:
    """Return whether a text is worth parsing."""
    return WORD.search(text) is not None


def migrate_text(text: str, target: str = "torch", around: Around = ALONE) -> Migration:
    """Return the module for `torch.amp`, or for ampcompare's contract.

    Args:
        target: "torch" or "precision".
        around: what other modules have to do with this one.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deeply.
        RecursionError: an expression is nested too deeply.
    """
    if not may_use_apex(text):
        return Migration(text, [])
    tree = Tree(text)
    names = Names(tree, around.helpers(tree.module), around.passed_on(tree.module))
    if not names.imports and not names.uses:
        return Migration(text, [])
    edits, findings, unsure = Edits(tree), [], None
    torch, above = torch_name(tree, names, edits)
    if (earlier := _without_fp16_optimizer(tree, names, torch, target)) is not None:
        return earlier
    try:
        findings += rewrite_core(tree, names, edits, torch, target, around)
    except Unsure as error:
        unsure = error
        edits = Edits(tree)
        findings.append(_by_hand(error.node, str(error)))
    if target == "precision":
        return _for_precision(tree, names, edits, findings, unsure, above)
    twins = Twins(tree, names, edits, torch, core=unsure is None)
    kept: list[ast.AST] = []
    for node, meaning in names.uses:
        if meaning.startswith("apex.amp.") and meaning.split(".")[2] in CORE:
            if unsure is not None:
                kept.append(node)
            continue
        try:
            if not twins.rewrite(node, meaning):
                kept.append(node)
        except Unsure as error:
            kept.append(node)
            findings.append(_by_hand(error.node, str(error)))
    findings += twins.findings
    rewrite_imports(tree, names, edits, kept, twins.imports)
    findings += _probes(tree, names, edits)
    if unsure is None:
        rewrite_texts(tree, edits, names)
        findings += cast_notes(tree, names)
    findings = sorted(set(findings))
    if edits and above is not None and _needs_torch(edits, torch):
        edits.before(above, [f"import {torch}"])
    if edits and "functools.partial(" in edits.inserted():
        import_functools(tree, edits)
    _mark(tree, edits, findings)
    result = join_branches(edits.result()) if edits else text
    return Migration(result, findings, len(names.uses), len(kept))


def _without_fp16_optimizer(tree: Tree, names: Names, torch: str, target: str) -> Migration | None:
    """Return the migration of a module with `FP16_Optimizer`; None without one, or where a line remains by hand."""
    try:
        level_2 = at_level_2(tree, names, torch)
    except Unsure:
        return None
    if level_2 is None:
        return None
    result = migrate_text(level_2.text, target)
    if any(each.kind == BY_HAND for each in result.findings):
        return None
    moved = [replace(each, line=level_2.lines.get(each.line, each.line)) for each in result.findings]
    return Migration(result.text, sorted({*moved, *level_2.notes}), len(names.uses), result.left)


def _for_precision(
    tree: Tree, names: Names, edits: Edits, findings: list[Finding], unsure: Unsure | None, above: ast.stmt | None
) -> Migration:
    """Finish a module whose core is rewritten: what else it uses of Apex comes from `ampcompare.apex`."""
    kept = [
        node
        for node, meaning in names.uses
        if unsure is not None or not (meaning.startswith("apex.amp.") and meaning.split(".")[2] in CORE)
    ]
    imported = import_from_engine(tree, names, edits, kept)
    if edits and unsure is None and "ampcompare.make_precision" in edits.inserted():
        first = next((each for each in tree.module.body if isinstance(each, (ast.Import, ast.ImportFrom))), above)
        if isinstance(first, ast.ImportFrom) and first.module == "__future__":
            first = above
        if first is not None:
            edits.before(first, ["import ampcompare"])
    findings = sorted(set(findings))
    _mark(tree, edits, findings)
    left = 0 if imported else len(kept)
    return Migration(edits.result() if edits else tree.text, findings, len(names.uses), left)


def _probes(tree: Tree, names: Names, edits: Edits) -> list[Finding]:
    """Return notes on a module that only says whether Apex is there, and says so always from now on."""
    if names.uses:
        return []
    found = []
    for statement in dict.fromkeys(each for each, _ in names.imports):
        around = tree.parent(statement)
        answers = (ast.Assign, ast.Return)
        if isinstance(around, ast.Try) and any(isinstance(each, answers) for each in (*around.body, *around.orelse)):
            if edits.is_removed(statement):
                found.append(Finding(statement.lineno, statement.col_offset, NOTE, PROBE))
    return found


def _by_hand(node: ast.AST, message: str) -> Finding:
    return Finding(node.lineno, node.col_offset, BY_HAND, message)  # type: ignore[attr-defined]


def _needs_torch(edits: Edits, torch: str) -> bool:
    return re.search(rf"(?<!from )(?<![\w.]){re.escape(torch)}\.", edits.inserted()) is not None


def _mark(tree: Tree, edits: Edits, findings: list[Finding]) -> None:
    """Put a comment above each statement that is left by hand, unless it is there already."""
    done: set[ast.stmt] = set()
    for finding in findings:
        if finding.kind == NOTE:
            continue
        statement = _statement_at(tree, finding)
        if statement is None or statement in done:
            continue
        done.add(statement)
        line = tree.line_of(statement)
        above = tree.line_text(line - 1).strip() if line > 1 else ""
        if not above.startswith(MARK.strip()) and edits.begins_line(statement) and not _is_elif(tree, statement):
            edits.before(statement, [f"{MARK}{finding.message}"])


def _is_elif(tree: Tree, statement: ast.stmt) -> bool:
    return tree.text.startswith("elif", tree.span(statement)[0])


def _statement_at(tree: Tree, finding: Finding) -> ast.stmt | None:
    for node in tree.nodes:
        if getattr(node, "lineno", None) == finding.line and getattr(node, "col_offset", None) == finding.column:
            return tree.statement(node)
    return None
