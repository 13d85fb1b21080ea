"""Follow a function line by line, through the functions and methods of the module that it calls."""

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ampcompare.source.branches import Facts, narrow
from ampcompare.source.module import Module, Scope
from ampcompare.source.syntax import child_nodes, dotted_name

MAX_DEPTH = 5
MAX_REACHED = 4000
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Conditions of a part of an expression, each with whether it holds.
Tests: TypeAlias = tuple[tuple[ast.expr, bool], ...]


@dataclass(frozen=True)
class Frame:
    """Where a follower is.

    Attributes:
        scope: whose statements it follows.
        facts: conditions that hold.
        loops: around, the outermost first.
        contexts: what `enter` makes of the blocks around, the outermost first.
        names: of parameters, each with what `given` says of its argument.
        prefix: of local names, another one for each call.
        active: the functions that are followed, the outermost first.
    """

    scope: Scope
    facts: Facts
    loops: tuple[ast.AST, ...]
    contexts: tuple[Any, ...]
    names: dict[str, str]
    prefix: str
    active: tuple[Scope, ...]


class CallFollower:
    """Reaches the calls of a function or module in the order in which they run.

    Every branch is followed, with the conditions under which it runs. Calls of functions of this module and of methods
    of `self` are followed where `reach` asks for it. The body of a loop is followed once.

    Attributes:
        kinds: of expressions that are reached.
        apart: expressions whose inside runs at another time, or holds none of these.
    """

    kinds: tuple[type[ast.AST], ...] = (ast.Call,)
    apart: tuple[type[ast.AST], ...] = (ast.Lambda, *DEFINITIONS, ast.Name, ast.Constant)

    def __init__(self, module: Module) -> None:
        self.module = module
        self._known: dict[ast.AST, list[tuple[ast.AST, Tests]]] = {}

    def follow(self, scope: Scope) -> None:
        """Follow a function or the module."""
        assert not isinstance(scope.node, (ast.ClassDef, ast.Lambda))
        self._reached = 0
        self._frames = itertools.count(1)
        self._block(scope.node.body, Frame(scope, {}, (), (), {}, "", (scope,)))

    # What a kind of follower does.

    def reach(self, node: ast.AST, statement: ast.stmt, frame: Frame) -> None:
        """Do what is to be done at an expression; `inline` follows its function."""
        raise NotImplementedError

    def enter(self, item: ast.withitem, statement: ast.With | ast.AsyncWith, frame: Frame) -> Any:
        """Return what is to be known of a context of a `with` inside of it."""
        return None

    def after_statement(self, statement: ast.stmt, frame: Frame) -> None:
        """Do what is to be done behind a simple statement."""

    def bind_arguments(self, callee: Scope, call: ast.Call, frame: Frame) -> dict[str, str]:
        """Return what the arguments of a call are, by parameter."""
        return {}

    def spelled_out(self, test: ast.expr, frame: Frame) -> ast.expr:
        """Return a condition in the words of the function that was begun with."""
        return test

    def is_full(self) -> bool:
        """Return whether enough was reached."""
        return False

    def callee(self, node: ast.expr, frame: Frame) -> Scope | None:
        """Return the function of this module, or method of `self`, that an expression names."""
        text = dotted_name(node)
        if text is None:
            return None
        if text.startswith("self.") and frame.scope.owner is not None:
            return self.module.method(frame.scope.owner, text.removeprefix("self."))
        for scope in frame.scope.enclosing():
            if text in scope.functions:
                found = scope.functions[text]
                return None if isinstance(found.node, ast.ClassDef) else found
            if text in scope.parameters:
                return None
        return None

    def inline(self, node: ast.expr, frame: Frame, call: ast.Call | None = None) -> bool:
        """Follow a function of this module where it is called; return whether it was followed."""
        callee = self.callee(node, frame)
        if callee is None or callee in frame.active or len(frame.active) > MAX_DEPTH:
            return False
        assert isinstance(callee.node, (ast.FunctionDef, ast.AsyncFunctionDef))
        home = callee.parent
        sees = home is not None and home in frame.scope.enclosing()
        names = dict(frame.names) if sees and home is not None and home.function is not None else {}
        if call is not None:
            names.update(self.bind_arguments(callee, call, frame))
        prefix = f"{next(self._frames)}:"
        active = (*frame.active, callee)
        self._block(callee.node.body, replace(frame, scope=callee, names=names, prefix=prefix, active=active))
        return True

    def _block(self, body: list[ast.stmt], frame: Frame) -> Facts | None:
        """Follow statements; return what is known behind them, or None if that is not reached."""
        for statement in body:
            if isinstance(statement, DEFINITIONS):
                continue
            if self._reached > MAX_REACHED or self.is_full():
                return None
            if isinstance(statement, ast.If):
                self._expression(statement.test, statement, frame)
                test = self.spelled_out(statement.test, frame)
                branches = ((statement.body, True), (statement.orelse, False))
                known = [
                    self._block(branch, replace(frame, facts=narrow(frame.facts, test, holds)))
                    for branch, holds in branches
                ]
                reached = [facts for facts in known if facts is not None]
                if not reached:
                    return None
                if len(reached) == 1:
                    frame = replace(frame, facts=reached[0])
            elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
                head = statement.test if isinstance(statement, ast.While) else statement.iter
                self._expression(head, statement, frame)
                self._block(statement.body, replace(frame, loops=(*frame.loops, statement)))
                self._block(statement.orelse, frame)
            elif isinstance(statement, (ast.With, ast.AsyncWith)):
                facts = self._block(statement.body, self._with(statement, frame))
                if facts is None:
                    return None
                frame = replace(frame, facts=facts)
            elif isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
                self._try(statement, frame)  # type: ignore[arg-type]
            elif isinstance(statement, ast.Match):
                self._expression(statement.subject, statement, frame)
                key = f"match {ast.unparse(statement.subject)}"
                for number, case in enumerate(statement.cases):
                    self._block(case.body, replace(frame, facts={**frame.facts, key: number}))
            else:
                self._expression(statement, statement, frame)
                self.after_statement(statement, frame)
                if isinstance(statement, ENDS):
                    return None
        return frame.facts

    def _try(self, statement: ast.Try, frame: Frame) -> None:
        key = f"try at {statement.lineno}"
        self._block([*statement.body, *statement.orelse], replace(frame, facts={**frame.facts, key: True}))
        for handler in statement.handlers:
            self._block(handler.body, replace(frame, facts={**frame.facts, key: False}))
        self._block(statement.finalbody, frame)

    def _with(self, statement: ast.With | ast.AsyncWith, frame: Frame) -> Frame:
        contexts = list(frame.contexts)
        for item in statement.items:
            self._expression(item.context_expr, statement, frame)
            contexts.append(self.enter(item, statement, frame))
        return replace(frame, contexts=tuple(contexts))

    def _expression(self, node: ast.AST, statement: ast.stmt, frame: Frame) -> None:
        inside = self._known.get(node)
        if inside is None:
            inside = self._known[node] = list(self._inside(node, ()))
        for each, tests in inside:
            self._reached += 1
            inner = frame
            for test, holds in tests:
                inner = replace(inner, facts=narrow(inner.facts, self.spelled_out(test, frame), holds))
            self.reach(each, statement, inner)

    def _inside(self, node: ast.AST, tests: Tests) -> Iterator[tuple[ast.AST, Tests]]:
        """Yield the expressions that are reached in a node, the inner ones first.

        With each come the tests of conditional expressions, `and` and `or` under which it is evaluated.
        """
        if isinstance(node, ast.IfExp):
            yield from self._inside(node.test, tests)
            yield from self._inside(node.body, (*tests, (node.test, True)))
            yield from self._inside(node.orelse, (*tests, (node.test, False)))
            return
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self._inside(value, tests)
                tests = (*tests, (value, isinstance(node.op, ast.And)))
            return
        for child in child_nodes(node):
            if not isinstance(child, self.apart):
                yield from self._inside(child, tests)
        if isinstance(node, self.kinds):
            yield node, tests
