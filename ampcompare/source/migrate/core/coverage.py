"""Which places of a project run under autocast in the result: the blocks of the file, and what is called in them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ampcompare.source.index import Answer
from ampcompare.source.migrate.core.context import last_name_before_index
from ampcompare.source.migrate.core.model_casts import puts_autocast_in_forward
from ampcompare.source.module import Module, Scope

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import ApexCore

# Methods that run where an object is called, by whatever name that has there.
OF_OBJECTS = frozenset({"forward", "__call__"})


def strongest_answer(answers: Iterable[Answer]) -> Answer:
    """Return yes if one of some answers is, and else whether one is unknown."""
    found = set(answers)
    return next((each for each in (Answer.YES, Answer.UNKNOWN) if each in found), Answer.NO)


class AutocastCoverage:
    """Goes from a place to the calls that lead to it, until these stand in a block of autocast, or do not."""

    def __init__(self, core: ApexCore) -> None:
        self._core = core
        self._reached: dict[Scope, Answer] = {}
        self._always: dict[Scope, bool] = {}

    def coverage_of_node(self, module: Module, node: ast.AST) -> Answer:
        """Return whether a place of any module of the project runs under autocast, in one of its calls at least."""
        if module is self._core.module and self._is_node_covered(node):
            return Answer.YES
        return self.coverage_of_function(scope_around(module, node))

    def coverage_of_function(self, scope: Scope) -> Answer:
        """Return whether a function runs under autocast, in one of its calls at least; a module does not."""
        if scope.function is None or scope.function is not scope.node:
            return Answer.NO
        if scope not in self._reached:
            self._reached[scope] = Answer.NO  # for one that calls itself
            index, name = self._core.index, scope.function.name
            calls, complete = index.possible_calls_and_completeness(scope)
            found = [self.coverage_of_node(index.scope_around_call(each).module, each) for each in calls]
            # A constructor runs where training is set up, unless a block is seen to have it.
            if name in OF_OBJECTS or (not complete and name != "__init__"):
                found.append(Answer.UNKNOWN)
            self._reached[scope] = strongest_answer(found)
        return self._reached[scope]

    def is_always_covered(self, scope: Scope) -> bool:
        """Return whether all calls of a function of the file are known, and under autocast."""
        if scope not in self._always:
            self._always[scope] = False
            module = self._core.module
            calls, complete = (
                ([], False)
                if scope is module.top
                else self._core.index.possible_calls_and_completeness(scope)
            )
            self._always[scope] = (
                complete
                and bool(calls)
                and all(
                    each in module.scope_of
                    and (self._is_node_covered(each) or self.is_always_covered(scope_around(module, each)))
                    for each in calls
                )
            )
        return self._always[scope]

    def _is_node_covered(self, node: ast.AST) -> bool:
        """Return whether a node of the file is under autocast, or calls a model that casts by itself."""
        if self._core.has_autocast(node):
            return True
        is_of_model = (
            isinstance(node, ast.Call) and last_name_before_index(node.func) in self._core.model_names
        )
        return is_of_model and puts_autocast_in_forward(self._core)


def scope_around(module: Module, node: ast.AST) -> Scope:
    """Return the function in which a node stands, or the module."""
    function = module.function_around(node)
    return module.top if function is None else module.scope_from[function]
