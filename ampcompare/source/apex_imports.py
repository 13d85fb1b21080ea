"""Where a source imports Apex or asks for it, and whether it goes on where that is not there."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ampcompare.source.syntax import FunctionNode, ImportNode, catches_missing_module, last_name

# always: when the file is imported; asked: behind a condition; tried: its error is caught; called: in a function.
Reach = Literal["always", "asked", "tried", "called", "question"]
TOPS = ("apex", "amp_C", "apex_C", "fused_layer_norm_cuda")
BYTES = tuple(top.encode() for top in TOPS)
MENTION = re.compile(rb"\b(?:apex|amp_C|apex_C|fused_layer_norm_cuda)\b")
NAME = re.compile(r"apex(?:\.\w+)*")
QUESTIONS = re.compile(r"available|^find_spec$|^find_loader$|^RequirementCache$|^get_distribution$|^version$")


@dataclass(frozen=True)
class ApexImport:
    """One import of Apex in a source, or one question whether it is installed.

    Attributes:
        module: what is imported or asked for, such as "apex.amp" for `from apex import amp`.
        line: from 1.
        reach: when it runs; question: where it only asks.
    """

    module: str
    line: int
    reach: Reach


def find_apex_imports(data: bytes) -> list[ApexImport]:
    """Return the imports of Apex in a source, by line; none where it cannot be parsed."""
    if not any(top in data for top in BYTES) or not MENTION.search(data):  # the first look is fast
        return []
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return sorted(_apex_imports_in(tree.body, "always"), key=lambda one: one.line)


def _apex_imports_in(body: list[ast.stmt], reach: Reach) -> Iterator[ApexImport]:
    for node in body:
        if isinstance(node, ImportNode):
            for module in _apex_modules_imported_by(node):
                yield ApexImport(module, node.lineno, reach)
            continue
        inner = reach
        if isinstance(node, FunctionNode):
            inner = "called" if reach != "tried" else reach
        elif isinstance(node, ast.If) and reach == "always":
            if "TYPE_CHECKING" in ast.unparse(node.test):
                yield from _apex_imports_in(node.orelse, reach)
                continue
            inner = "asked"
        elif isinstance(node, ast.Try | ast.TryStar) and any(map(_goes_on_without_module, node.handlers)):
            yield from _apex_imports_in(node.body, "tried")
            for handler in node.handlers:
                yield from _apex_imports_in(handler.body, reach)
            yield from _apex_imports_in([*node.orelse, *node.finalbody], reach)
            continue
        yield from _apex_availability_calls_in_statement(node, inner)
        for field in ("body", "orelse", "finalbody"):
            yield from _apex_imports_in(getattr(node, field, []), inner)
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _apex_imports_in(part.body, inner)


def _apex_modules_imported_by(node: ImportNode) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif node.level or node.module is None:
        names = []
    elif node.module == "apex":
        names = ["apex" if alias.name == "*" else f"apex.{alias.name}" for alias in node.names]
    else:
        names = [node.module]
    return list(dict.fromkeys(name for name in names if name.partition(".")[0] in TOPS))


def _goes_on_without_module(handler: ast.ExceptHandler) -> bool:
    """Return whether a script goes on where a module is not there: what catches that does not raise again."""
    return catches_missing_module(handler) and not any(isinstance(last, ast.Raise) for last in handler.body)


def _apex_availability_calls_in_statement(node: ast.stmt, reach: Reach) -> Iterator[ApexImport]:
    """Yield calls in a statement, without the statements inside it, that are given the name of a module of Apex."""
    inside = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
    for call in (one for expression in inside for one in ast.walk(expression) if isinstance(one, ast.Call)):
        named = call.args[0] if call.args else None
        if not (
            isinstance(named, ast.Constant) and isinstance(named.value, str) and NAME.fullmatch(named.value)
        ):
            continue
        function = last_name(call.func) or ""
        if function in ("import_module", "__import__"):
            yield ApexImport(named.value, call.lineno, reach)
        elif QUESTIONS.search(function):
            yield ApexImport(named.value, call.lineno, "question")
