"""One module under examination, with everything that rules ask for."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ampcompare.lint.finding import Edit, Finding, Text
from ampcompare.lint.mistake import Mistake
from ampcompare.lint.roles import Roles
from ampcompare.lint.trace import Event, Facts, Kind, Tracer, narrowed
from ampcompare.source.names import ModuleNames, Scope
from ampcompare.source.syntax import dotted

__all__ = [
    "RULES",
    "LintModule",
    "Rule",
    "Trace",
    "events_between",
    "keyword",
    "literal",
    "name_of",
    "rule",
    "training_scopes",
]

Trace = list[Event]
Check = Callable[["LintModule"], Iterator[Finding]]
RULES: list[Rule] = []
# Without one of these calls in it, a trace has no finding.
OF_TRAINING = re.compile(
    r"backward|scaler|clip_grad|^(?:scale|unscale_|initialize|scale_loss|binary_cross_entropy|FP16_Optimizer)$",
    re.IGNORECASE,
)


class Rule(NamedTuple):
    """A function that yields findings, with the codes that it finds and the mistakes that it states."""

    codes: tuple[str, ...]
    mistakes: tuple[Mistake, ...]
    check: Check


def rule(*found: Mistake | str) -> Callable[[Check], Check]:
    """Register a function that yields findings of these mistakes; one that another rule states is given by its code."""

    def register(check: Check) -> Check:
        mistakes = tuple(each for each in found if isinstance(each, Mistake))
        codes = tuple(each.code if isinstance(each, Mistake) else each for each in found)
        RULES.append(Rule(codes, mistakes, check))
        return check

    return register


class LintModule:
    """The tree of a module, its names, and the traces of its functions.

    Attributes:
        tree: of the module.
        text: of the module, by lines and columns.
        names: imports and assignments by scope.
        roles: what objects are.
    """

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.tree = tree
        self.text = Text(text)
        self.names = ModuleNames(tree)
        self.roles = Roles(self.names)

    @functools.cached_property
    def traces(self) -> list[Trace]:
        """The events of each function and of the module, those that have nothing to do with training left out."""
        tracer = Tracer(self.names, self.roles)
        scopes = training_scopes(self.names, self.text.text)
        return [trace for scope in scopes if (trace := tracer.trace(scope))]

    @functools.cached_property
    def resolved(self) -> list[tuple[ast.Call, str]]:
        """All calls whose functions have a full name."""
        pairs = ((call, self.names.resolve_here(call.func)) for call in self.names.calls)
        return [(call, name) for call, name in pairs if name is not None]

    @functools.cached_property
    def new_scalers(self) -> list[ast.Call]:
        """All calls that build a GradScaler."""
        return [call for call in self.names.calls if self.roles.is_new_scaler(call, self.names.scope_of[call])]

    @functools.cached_property
    def opt_levels(self) -> set[str | None]:
        """The opt levels of all calls of `amp.initialize`; None stands for one that is not written there."""
        return {
            literal(level) if (level := keyword(call, "opt_level")) is not None else "O1"
            for call in self.calls_of("apex.amp.initialize")
        }

    def calls_of(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions by full name."""
        for call, name in self.resolved:
            if name in names:
                yield call

    def mentions(self, pattern: str) -> bool:
        """Return whether the text matches a regular expression anywhere."""
        return re.search(pattern, self.text.text) is not None

    def statement_of(self, node: ast.AST) -> ast.stmt | None:
        """Return the statement around a node."""
        while not isinstance(node, ast.stmt):
            if node not in self.names.parents:
                return None
            node = self.names.parents[node]
        return node

    def function_of(self, node: ast.AST) -> ast.AST:
        """Return the function around a node, or the module."""
        scope: Scope = self.names.scope_of[node]
        return scope.node

    def is_conditional(self, node: ast.AST) -> bool:
        """Return whether a node stands under an `if` of its function."""
        while node in self.names.parents:
            node = self.names.parents[node]
            if isinstance(node, ast.If):
                return True
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return False
        return False

    def facts_at(self, node: ast.AST) -> Facts:
        """Return the conditions of the `if` statements of its function under which a node is reached."""
        found: list[tuple[ast.If, bool]] = []
        while node in self.names.parents and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parent = self.names.parents[node]
            if isinstance(parent, ast.If) and node is not parent.test:
                found.append((parent, node in parent.body))
            node = parent
        facts: Facts = {}
        for outer, holds in reversed(found):
            facts = narrowed(facts, outer.test, holds)
        return facts

    def siblings(self, statement: ast.stmt) -> tuple[list[ast.stmt], int]:
        """Return the block in which a statement stands, and its place there."""
        parent = self.names.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block, block.index(statement)
        return [statement], 0

    def finding(self, code: str, node: ast.AST, message: str, edits: tuple[Edit, ...] = ()) -> Finding:
        """Return a finding at a node."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        statement = self.statement_of(node)
        last = line
        if statement is not None and not hasattr(statement, "body"):
            last = statement.end_lineno or line
        elif isinstance(node, ast.expr):
            last = node.end_lineno or line
        return Finding(code, line, self.text.column(line, column), message, edits, last)


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the value of an argument, by keyword or by position."""
    for one in call.keywords:
        if one.arg == name:
            return one.value
    if position is not None and len(call.args) > position:
        value = call.args[position]
        return None if isinstance(value, ast.Starred) else value
    return None


def literal(node: ast.expr | None) -> str | None:
    """Return the text of a string literal."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def events_between(trace: Trace, first: Event, last: Event, *kinds: Kind) -> list[Event]:
    """Return the events of some kinds between two others that one run can meet along with both."""
    inside = trace[trace.index(first) + 1 : trace.index(last)]
    return [event for event in inside if event.kind in kinds and event.may_follow(first) and event.may_follow(last)]


def name_of(node: ast.AST) -> str:
    """Return the dotted text of a node, or an empty text."""
    return dotted(node) or ""


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
