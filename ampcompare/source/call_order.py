"""Follow a function line by line, through the functions and methods of the module that it calls."""

import abc
import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_args

from ampcompare.source.branches import Facts, facts_with_conditions_of_test
from ampcompare.source.index import Index, ProjectFunction
from ampcompare.source.module import Scope
from ampcompare.source.syntax import DefinitionNode, FunctionNode, LoopNode, WithNode, child_nodes

ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
DEFINITIONS: tuple[type[ast.AST], ...] = get_args(DefinitionNode)
# Conditions of a part of an expression, each with whether it holds.
Tests: TypeAlias = tuple[tuple[ast.expr, bool], ...]


@dataclass(frozen=True)
class CallFrame:
    """The place of a `CallFollower` in a program: its function, the loops and blocks around, what is known there.

    Attributes:
        scope: whose statements it follows.
        receiver: the class of the object that `self` is there, where it is known.
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
    receiver: Scope | None = None


class CallFollower(abc.ABC):
    """Reaches the calls of a function or module in the order in which they run.

    Every branch is followed, with the conditions under which it runs. Calls are followed where `reach` asks for it and
    the index knows the one function that they name. The body of a loop is followed once.

    Attributes:
        kinds: of expressions that are reached.
        apart: expressions whose inside runs at another time, or holds none of these.
        max_reached: how many expressions are reached at most.
        max_depth: how many functions are followed within each other.
        cut: whether something was left out, because there is too much or it is called too deep.
    """

    kinds: tuple[type[ast.AST], ...] = (ast.Call,)
    apart: tuple[type[ast.AST], ...] = (ast.Lambda, *DEFINITIONS, ast.Name, ast.Constant)

    max_reached = 4000
    max_depth = 5

    def __init__(self, index: Index) -> None:
        self.index = index
        self.module = index.module
        self._known: dict[ast.AST, list[tuple[ast.AST, Tests]]] = {}

    def follow_scope(self, scope: Scope) -> None:
        """Follow a function or the module."""
        assert not isinstance(scope.node, (ast.ClassDef, ast.Lambda))
        self._reached = 0
        self.cut = False
        self._frames = itertools.count(1)
        self._follow_block_to_facts(scope.node.body, CallFrame(scope, {}, (), (), {}, "", (scope,)))

    # What a kind of follower does.

    @abc.abstractmethod
    def handle_node(self, node: ast.AST, statement: ast.stmt, frame: CallFrame) -> None:
        """Do what is to be done at an expression; `inline` follows its function."""

    def context_of_with_item(self, item: ast.withitem, statement: WithNode, frame: CallFrame) -> Any:
        """Return what is to be known of a context of a `with` inside of it."""
        return None

    def after_statement(self, statement: ast.stmt, frame: CallFrame) -> None:  # noqa: B027 - most need expressions alone
        """Do what is to be done behind a simple statement."""

    def bind_arguments(self, function: ProjectFunction, call: ast.Call, frame: CallFrame) -> dict[str, str]:
        """Return what the arguments of a call are, by parameter."""
        return {}

    def condition_with_caller_arguments(self, test: ast.expr, frame: CallFrame) -> ast.expr:
        """Return a condition in the words of the function that was begun with: a parameter as its argument."""
        if isinstance(test, ast.UnaryOp):
            return ast.UnaryOp(test.op, self.condition_with_caller_arguments(test.operand, frame))
        if isinstance(test, ast.BoolOp):
            return ast.BoolOp(
                test.op, [self.condition_with_caller_arguments(value, frame) for value in test.values]
            )
        if isinstance(test, ast.Compare):
            return ast.Compare(
                self.condition_with_caller_arguments(test.left, frame), test.ops, test.comparators
            )
        return self.condition_part_in_root_names(test, frame)

    def condition_part_in_root_names(self, test: ast.expr, frame: CallFrame) -> ast.expr:
        """Return a part of a condition that no operator joins, in the words of the function that was begun with."""
        return test

    def is_done_following(self) -> bool:
        """Return whether enough was reached."""
        return False

    def callee(self, node: ast.expr, frame: CallFrame) -> ProjectFunction | None:
        """Return the one function of this module that an expression surely is."""
        found = self.index.function_of_expression(node, frame.scope, frame.receiver)
        return found if isinstance(found, ProjectFunction) and found.module is self.module else None

    def follow_named_function(self, node: ast.expr, frame: CallFrame, call: ast.Call | None = None) -> bool:
        """Follow a function where it is called; return whether it was followed."""
        callee = self.callee(node, frame)
        return callee is not None and self.follow_called_function(callee, frame, call)

    def follow_called_function(
        self, function: ProjectFunction, frame: CallFrame, call: ast.Call | None
    ) -> bool:
        """Follow a function where it is called; return whether it was followed: not within itself, nor too deep."""
        callee = function.scope
        if callee in frame.active or isinstance(callee.node, ast.Lambda):
            return False
        if len(frame.active) > self.max_depth:
            self.cut = True
            return False
        assert isinstance(callee.node, FunctionNode)
        home = callee.parent
        sees = home is not None and home in frame.scope.lookup_scopes()
        names = dict(frame.names) if sees and home is not None and home.function is not None else {}
        if call is not None:
            names.update(self.bind_arguments(function, call, frame))
        receiver = function.receiver
        if receiver is None and callee.owner is frame.scope.owner:
            receiver = frame.receiver
        prefix = f"{next(self._frames)}:"
        active = (*frame.active, callee)
        inner = replace(frame, scope=callee, names=names, prefix=prefix, active=active, receiver=receiver)
        self._follow_block_to_facts(callee.node.body, inner)
        return True

    def _follow_block_to_facts(self, body: list[ast.stmt], frame: CallFrame) -> Facts | None:
        """Follow statements; return what is known behind them, or None if that is not reached."""
        for statement in body:
            if isinstance(statement, DefinitionNode):
                continue
            if self._reached > self.max_reached or self.is_done_following():
                self.cut = True
                return None
            if isinstance(statement, ast.If):
                self._follow_expression(statement.test, statement, frame)
                test = self.condition_with_caller_arguments(statement.test, frame)
                branches = ((statement.body, True), (statement.orelse, False))
                known = [
                    self._follow_block_to_facts(
                        branch, replace(frame, facts=facts_with_conditions_of_test(frame.facts, test, holds))
                    )
                    for branch, holds in branches
                ]
                reached = [facts for facts in known if facts is not None]
                if not reached:
                    return None
                if len(reached) == 1:
                    frame = replace(frame, facts=reached[0])
            elif isinstance(statement, LoopNode):
                head = statement.test if isinstance(statement, ast.While) else statement.iter
                self._follow_expression(head, statement, frame)
                self._follow_block_to_facts(statement.body, replace(frame, loops=(*frame.loops, statement)))
                self._follow_block_to_facts(statement.orelse, frame)
            elif isinstance(statement, WithNode):
                facts = self._follow_block_to_facts(statement.body, self._follow_with(statement, frame))
                if facts is None:
                    return None
                frame = replace(frame, facts=facts)
            elif isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
                facts = self._follow_try_to_facts(statement, frame)  # type: ignore[arg-type]
                if facts is None:
                    return None
                frame = replace(frame, facts=facts)
            elif isinstance(statement, ast.Match):
                self._follow_expression(statement.subject, statement, frame)
                key = f"match {ast.unparse(statement.subject)}"
                for number, case in enumerate(statement.cases):
                    self._follow_block_to_facts(case.body, replace(frame, facts={**frame.facts, key: number}))
            else:
                self._follow_expression(statement, statement, frame)
                self.after_statement(statement, frame)
                if isinstance(statement, ENDS):
                    return None
        return frame.facts

    def _follow_try_to_facts(self, statement: ast.Try, frame: CallFrame) -> Facts | None:
        key = f"try at {statement.lineno}"
        behind = self._follow_block_to_facts(
            [*statement.body, *statement.orelse], replace(frame, facts={**frame.facts, key: True})
        )
        handled = [
            self._follow_block_to_facts(handler.body, replace(frame, facts={**frame.facts, key: False}))
            for handler in statement.handlers
        ]
        last = self._follow_block_to_facts(statement.finalbody, frame)
        if last is None or (behind is None and all(facts is None for facts in handled)):
            return None
        # Where every handler ends the round, what follows has seen the body run.
        return behind if behind is not None and all(facts is None for facts in handled) else frame.facts

    def _follow_with(self, statement: WithNode, frame: CallFrame) -> CallFrame:
        contexts = list(frame.contexts)
        for item in statement.items:
            self._follow_expression(item.context_expr, statement, frame)
            contexts.append(self.context_of_with_item(item, statement, frame))
        return replace(frame, contexts=tuple(contexts))

    def _follow_expression(self, node: ast.AST, statement: ast.stmt, frame: CallFrame) -> None:
        inside = self._known.get(node)
        if inside is None:
            inside = self._known[node] = list(self._evaluated_expressions_with_tests(node, ()))
        for each, tests in inside:
            self._reached += 1
            inner = frame
            for test, holds in tests:
                inner = replace(
                    inner,
                    facts=facts_with_conditions_of_test(
                        inner.facts, self.condition_with_caller_arguments(test, frame), holds
                    ),
                )
            self.handle_node(each, statement, inner)

    def _evaluated_expressions_with_tests(
        self, node: ast.AST, tests: Tests
    ) -> Iterator[tuple[ast.AST, Tests]]:
        """Yield the expressions that are reached in a node, the inner ones first.

        With each come the tests of conditional expressions, `and` and `or` under which it is evaluated.
        """
        if isinstance(node, ast.IfExp):
            yield from self._evaluated_expressions_with_tests(node.test, tests)
            yield from self._evaluated_expressions_with_tests(node.body, (*tests, (node.test, True)))
            yield from self._evaluated_expressions_with_tests(node.orelse, (*tests, (node.test, False)))
            return
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self._evaluated_expressions_with_tests(value, tests)
                tests = (*tests, (value, isinstance(node.op, ast.And)))
            return
        for child in child_nodes(node):
            if not isinstance(child, self.apart):
                yield from self._evaluated_expressions_with_tests(child, tests)
        if isinstance(node, self.kinds):
            yield node, tests
