"""What the rewriting of the core of a module works on, and the words of its target."""

import ast
import functools
from dataclasses import dataclass, field

from ampcompare.source.amp_names import AUTOCASTS
from ampcompare.source.edits import Edits
from ampcompare.source.index import Function as Called
from ampcompare.source.index import Index, choices_of
from ampcompare.source.migrate.core.scalers import LOOPS, Scaler, conditions_of
from ampcompare.source.migrate.finding import NOTE, Finding
from ampcompare.source.migrate.read.forward import Forward
from ampcompare.source.migrate.read.names import Names
from ampcompare.source.migrate.read.neighbors import Around
from ampcompare.source.migrate.read.order import Order
from ampcompare.source.migrate.read.sites import Sites, model_names
from ampcompare.source.module import Function, Module
from ampcompare.source.syntax import argument_values, arguments, dotted_name, last_name, last_part, walk


@dataclass
class Core:
    """A core that can be rewritten; `rewrite_core` fills it.

    Attributes:
        around: what other modules have to do with it.
        edits: gets the changes.
        torch: the name by which the module knows torch.
        findings: notes on what differs.
        wrapped: statements of evaluation that have autocast now.
        unscaled: steps (by `id` of the call) above which gradients are unscaled whether it runs or not.
    """

    module: Module
    index: Index
    around: Around
    names: Names
    edits: Edits
    torch: str
    sites: Sites
    planned: Scaler
    order: Order
    forward: Forward
    findings: list[Finding] = field(default_factory=list)
    always: bool = False
    update: str = ""
    declared: set[Function] = field(default_factory=set)
    has_global: bool = False
    made: dict[ast.Call, list[str]] = field(default_factory=dict)
    defaults: set[ast.stmt] = field(default_factory=set)
    bracketed: set[ast.stmt] = field(default_factory=set)
    wrapped: set[ast.AST] = field(default_factory=set)
    unscaled: set[int] = field(default_factory=set)

    @property
    def is_off(self) -> bool:
        """Whether all is in fp32, at O0 alone."""
        levels = [each.arguments.get("opt_level") for each in self.sites.initializes]
        return bool(levels) and all(isinstance(each, ast.Constant) and each.value == "O0" for each in levels)

    @property
    def off(self) -> str:
        """The expression for a scaler that does nothing."""
        return f'{self.torch}.amp.GradScaler("cuda", enabled=False)'

    @functools.cached_property
    def models(self) -> set[str]:
        """The names by which models are called: those of `amp.initialize`, and those of parameters that get them."""
        module, found = self.module, set(model_names(self.module, self.sites))
        called = {last_name(each.func) for each in module.calls}
        waiting = list(found)
        while waiting:
            names = {waiting.pop()}
            for call in module.calls:
                given = {name for name, function in self.parameters_given(call, names) if function.module is module}
                waiting += (given & called) - found
                found |= given & called
            for node in module.nodes:
                if isinstance(node, ast.Assign) and last_part(dotted_name(node.value) or "") in names:
                    targets = {last_part(dotted_name(each) or "") for each in node.targets} & called - found
                    waiting += targets
                    found |= targets
        return found

    def parameters_given(self, call: ast.Call, names: set[str]) -> list[tuple[str, Called]]:
        """Return the parameters of functions of the project that get one of some objects in a call of this module."""
        if not any(last_part(dotted_name(each) or "") in names for each in argument_values(call)):
            return []
        found = []
        for each in choices_of(self.index.callee(call, self.module.scope_of[call])):
            if isinstance(each, Called) and isinstance(each.scope.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                bound = arguments(call, each.module.positional(each.scope.node))
                found += [(key, each) for key, one in bound.items() if last_part(dotted_name(one) or "") in names]
        return found

    def runs_before(self, statement: ast.stmt) -> bool:
        """Return whether a statement runs before `amp.initialize` alone, so that Apex casts nothing in it."""
        module, function = self.module, self.module.function(statement)
        later = [each.statement for each in self.sites.initializes if each.function is function]
        loops = {each for each in module.within_function(statement) if isinstance(each, LOOPS)}
        return bool(later) and all(
            statement.lineno < each.lineno and loops.isdisjoint(module.within_function(each)) for each in later
        )

    def _is_above_scaler(self, node: ast.AST) -> bool:
        """Return whether a node stands above all that makes the scaler in its function."""
        line, function = self.module.statement(node).lineno, self.module.function(node)
        made = [each for each in self.sites.initializes if each.function is function]
        first = [[each.statement, *conditions_of(self.module, each)][-1] for each in made]  # which has the default
        return bool(first) and all(line < each.lineno for each in first)

    def note(self, node: ast.AST, message: str) -> None:
        """Add a note on the line of a node."""
        self.findings.append(Finding.at(node, NOTE, message))

    @property
    def scaler(self) -> str:
        """The expression for the scaler."""
        return self.planned.expression

    def is_without_casts(self, node: ast.AST) -> bool:
        """Return whether a place is in a block of `amp.disable_casts`, in which autocast stays off."""
        blocks = (each for each in self.module.ancestors(node) if isinstance(each, ast.With))
        calls = (item.context_expr for each in blocks for item in each.items if isinstance(item.context_expr, ast.Call))
        return any(self.names.meaning(each.func) == "apex.amp.disable_casts" for each in calls)

    def is_covered(self, node: ast.AST) -> bool:
        """Return whether a node stands in a part of the text that has autocast now."""
        statement = self.module.statement(node)
        above = [statement, *self.module.ancestors(statement)]
        if any(each in self.wrapped for each in above):
            return True
        spans = ((first.lineno, last.end_lineno or last.lineno) for first, last in self.forward.regions)
        if any(first <= statement.lineno <= last for first, last in spans):
            return True
        contexts = [item.context_expr for each in above if isinstance(each, ast.With) for item in each.items]
        if any(self.names.meaning(each.func) in AUTOCASTS for each in contexts if isinstance(each, ast.Call)):
            return True
        return any(each.statement in above and node in walk(each.loss) for each in self.forward.inline)

    def reaches_scaler(self, node: ast.AST) -> bool:
        """Return whether the scaler is in scope, and made, where autocast asks it."""
        function = self.module.function(node)
        if self.always or (self.planned.home == "module" and function is not None):
            return True
        if self._is_above_scaler(node):
            return False
        if self.planned.home == "module":
            return True
        if self.planned.home == "self":
            return function is not None and [each.arg for each in function.args.args[:1]] == ["self"]
        created = {each.function for each in self.sites.initializes}
        return any(each in created for each in (*self.module.functions_around(node), None))

    @property
    def autocast(self) -> str:
        """The `with` line for a forward pass."""
        enabled = "" if self.always else f", enabled={self.scaler}.is_enabled()"
        return f'with {self.torch}.autocast("cuda", dtype={self.torch}.float16{enabled}):'
