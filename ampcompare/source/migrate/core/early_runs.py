"""Which statements run above `amp.initialize`, where Apex casts and scales nothing yet, through all functions."""

from __future__ import annotations

import ast
from enum import Enum
from typing import TYPE_CHECKING

from ampcompare.source.branches import never_run_together
from ampcompare.source.syntax import LoopNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ampcompare.source.index import Index
    from ampcompare.source.migrate.read.sites import InitializeCall
    from ampcompare.source.module import Scope

MAX_CALLERS = 200  # that are followed for one question


class PlaceAroundInitialize(Enum):
    """Where a statement runs, seen from `amp.initialize`: above it, below it, or not known."""

    ABOVE = "above amp.initialize"
    BELOW = "below it, or again in a loop that has it"
    UNSEEN = "where no line of the project is seen to lead from one to the other"


class EarlyRuns:
    """The places from which `amp.initialize` is reached, and what runs above all of them."""

    def __init__(self, index: Index, initializes: list[InitializeCall]) -> None:
        self._index = index
        self._leading: dict[Scope, list[ast.stmt]] = {}
        for each in initializes:
            for scope, statement, _ in self._statements_leading_to(each.statement):
                self._leading.setdefault(scope, []).append(statement)
        self._known: dict[ast.stmt, set[PlaceAroundInitialize]] = {}

    def places_of(self, statement: ast.stmt) -> set[PlaceAroundInitialize]:
        """Return where a statement of the module runs, by all lines that lead to it."""
        if statement not in self._known:
            self._known[statement] = set(self._places(statement))
        return self._known[statement]

    def _places(self, statement: ast.stmt) -> Iterator[PlaceAroundInitialize]:
        for scope, each, is_last in self._statements_leading_to(statement, set(self._leading)):
            if scope in self._leading:
                yield self._place_in_scope(scope, each)
            elif is_last:
                yield PlaceAroundInitialize.UNSEEN

    def _place_in_scope(self, scope: Scope, statement: ast.stmt) -> PlaceAroundInitialize:
        module = scope.module
        loops = {each for each in module.ancestors_up_to_function(statement) if isinstance(each, LoopNode)}
        leading = self._leading[scope]
        is_above = all(
            statement.lineno < each.lineno
            and loops.isdisjoint(module.ancestors_up_to_function(each))
            and not never_run_together(module, statement, each)
            for each in leading
        )
        return PlaceAroundInitialize.ABOVE if is_above else PlaceAroundInitialize.BELOW

    def _statements_leading_to(
        self, statement: ast.stmt, ends: set[Scope] | None = None
    ) -> Iterator[tuple[Scope, ast.stmt, bool]]:
        """Yield a statement and those that call its function, with their scopes, and whether nothing known calls them.

        Args:
            ends: scopes whose callers are not asked.
        """
        seen: set[Scope] = set()
        module = self._index.module
        waiting: list[tuple[Scope, ast.stmt]] = [(module.scope_of[statement], statement)]
        for _ in range(MAX_CALLERS):
            if not waiting:
                return
            scope, each = waiting.pop()
            calls: list[ast.Call] = []
            complete = True
            if scope.function is scope.node and scope not in (ends or ()):
                calls, complete = self._index.possible_calls_and_completeness(scope)
            yield scope, each, not calls or not complete or _may_library_call(scope)
            if scope in seen:
                continue
            seen.add(scope)
            for call in calls:
                home = self._index.scope_around_call(call)
                waiting.append((home, home.module.statement_around(call)))
        if waiting:
            yield (*waiting[0], True)


def _may_library_call(scope: Scope) -> bool:
    """Return whether a library may call a method: one of a class with a base, or by its name."""
    name = getattr(scope.node, "name", "")
    is_special = name == "forward" or (name.startswith("__") and name != "__init__")
    has_base = scope.owner is not None and bool(getattr(scope.owner.node, "bases", ()))
    return is_special or (has_base and name != "__init__")
