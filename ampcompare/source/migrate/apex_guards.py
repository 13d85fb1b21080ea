"""Questions whether Apex is installed, or imported, which nothing answers with yes once no file imports it."""

import ast

from ampcompare.source.edits import Edits
from ampcompare.source.migrate.finding import BY_HAND, NOTE, Finding
from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted_name, is_literal, last_name

ANSWERED = "this asked for Apex, which the result does not import; the answer is yes now"
ASKS = "this asks for Apex, which the result does not import: the part that it guards would never run"
FINDERS = ("find_spec", "find_loader", "find_module")
IMPORTERS = ("import_module", "__import__", "get_distribution", "version", "is_package_available", "require")


def answer_guards(module: Module, edits: Edits) -> list[Finding]:
    """Answer questions whether Apex is there with yes; return what is said about them."""
    findings = []
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(".")[0] == "apex":
            answer = _question(module, node)
            if answer is None:
                if _is_asked_by_import(module, node):
                    findings.append(Finding.at(node, BY_HAND, ASKS))
                continue
            question, value = answer
            edits.replace(question, str(value))
            findings.append(Finding.at(question, NOTE, ANSWERED))
    return findings


def _question(module: Module, name: ast.Constant) -> tuple[ast.expr, bool] | None:
    """Return the expression that asks for a module by its name, and its value where that is there."""
    parent = module.parent(name)
    if isinstance(parent, ast.Compare) and parent.left is name and len(parent.ops) == 1:
        if (dotted_name(parent.comparators[0]) or "").endswith("modules"):
            return parent, isinstance(parent.ops[0], ast.In)
    if not isinstance(parent, ast.Call) or last_name(parent.func) not in FINDERS:
        return None
    outer = module.parent(parent)
    if isinstance(outer, ast.Compare) and outer.left is parent and is_literal(outer.comparators[0], None):
        return outer, isinstance(outer.ops[0], (ast.IsNot, ast.NotEq))
    return parent, True


def _is_asked_by_import(module: Module, name: ast.Constant) -> bool:
    parent = module.parent(name)
    return isinstance(parent, ast.Call) and last_name(parent.func) in IMPORTERS
