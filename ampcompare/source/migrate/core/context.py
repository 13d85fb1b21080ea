"""What the rewriting of the core of a module works on, and the words of its target."""

import ast
import functools
from dataclasses import dataclass, field

from ampcompare.source.amp_names import AUTOCASTS
from ampcompare.source.edits import Edits
from ampcompare.source.index import Index, ProjectFunction, functions_of_callee
from ampcompare.source.migrate.core.early_runs import EarlyRuns, PlaceAroundInitialize
from ampcompare.source.migrate.core.scalers import PlannedScaler, ifs_around_call
from ampcompare.source.migrate.read.finding import NOTE, Finding
from ampcompare.source.migrate.read.forward import ForwardPasses
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.neighbors import Neighbors
from ampcompare.source.migrate.read.order import GradientEventOrder
from ampcompare.source.migrate.read.sites import Sites, model_names
from ampcompare.source.module import Module
from ampcompare.source.syntax import (
    ForNode,
    FunctionNode,
    LoopNode,
    argument_values,
    arguments,
    elements,
    last_name,
    walk,
)


@dataclass
class ApexCore:
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
    around: Neighbors
    names: ModuleImports
    edits: Edits
    torch: str
    sites: Sites
    planned: PlannedScaler
    order: GradientEventOrder
    forward: ForwardPasses
    findings: list[Finding] = field(default_factory=list)
    always: bool = False
    update: str = ""
    declared: set[FunctionNode] = field(default_factory=set)
    has_global: bool = False
    made: dict[ast.Call, list[str]] = field(default_factory=dict)
    defaults: set[ast.stmt] = field(default_factory=set)
    bracketed: set[ast.stmt] = field(default_factory=set)
    wrapped: set[ast.AST] = field(default_factory=set)
    unscaled: set[int] = field(default_factory=set)

    @property
    def is_all_fp32(self) -> bool:
        """Whether all is in fp32, at O0 alone."""
        levels = [each.arguments.get("opt_level") for each in self.sites.initializes]
        return bool(levels) and all(isinstance(each, ast.Constant) and each.value == "O0" for each in levels)

    @property
    def idle_scaler_expression(self) -> str:
        """The expression for a scaler that does nothing."""
        return f'{self.torch}.amp.GradScaler("cuda", enabled=False)'

    @functools.cached_property
    def early_runs(self) -> EarlyRuns:
        """What runs above `amp.initialize`."""
        return EarlyRuns(self.index, self.sites.initializes)

    @functools.cached_property
    def model_names(self) -> set[str]:
        """The names by which models are called, as they are or as members of a list or dict.

        They are those of `amp.initialize`, those to which these are assigned, and parameters that get them.
        """
        module = self.module
        called = {last_name_before_index(each.func) for each in module.calls}
        members = [
            (_names_stored_by(target), last_names_of_objects(holder))
            for node in module.nodes
            if isinstance(node, ForNode | ast.comprehension)
            for target, holder in _loop_targets_with_holders(node.target, node.iter)
        ]
        for targets, holders in members:
            called |= holders if targets & called else set()
        assigned = [
            (_names_stored_by(target), last_names_of_objects(value))
            for node in module.nodes
            if isinstance(node, ast.Assign)
            for each in node.targets
            for target, value in _targets_with_values(each, node.value)
        ]
        found = set(model_names(module, self.sites)) | (self._names_of_initialized_containers() & called)
        waiting = list(found)
        while waiting:
            names = {waiting.pop()}
            new: set[str] = set()
            for call in module.calls:
                new |= {
                    name
                    for name, function in self.parameters_receiving(call, names)
                    if function.module is module
                }
            for targets, values in (*members, *assigned):
                new |= targets if names & values else set()
            new = new & called - found - {""}
            waiting += new
            found |= new
        return found

    def _names_of_initialized_containers(self) -> set[str]:
        """Return the names of lists and dicts of which `amp.initialize` gets members, or which get its models."""
        given = [each.arguments["models"] for each in self.sites.initializes if "models" in each.arguments]
        return {
            last_name_before_index(one)
            for each in given
            for one in _members_or_expression_itself(each)
            if isinstance(one, ast.Subscript)
        }

    def parameters_receiving(
        self, call: ast.Call, argument_names: set[str]
    ) -> list[tuple[str, ProjectFunction]]:
        """Return the parameters of functions of the project that get one of some objects in a call of this module."""
        return parameters_receiving(self.index, call, argument_names)

    def runs_only_before_initialize(self, statement: ast.stmt) -> bool:
        """Return whether a statement runs before `amp.initialize` alone, so that Apex casts nothing in it."""
        if self.early_runs.places_of(statement) == {PlaceAroundInitialize.ABOVE}:
            return True
        module, function = self.module, self.module.function_around(statement)
        later = [each.statement for each in self.sites.initializes if each.function is function]
        loops = {each for each in module.ancestors_up_to_function(statement) if isinstance(each, LoopNode)}
        return bool(later) and all(
            statement.lineno < each.lineno and loops.isdisjoint(module.ancestors_up_to_function(each))
            for each in later
        )

    def _is_above_scaler(self, node: ast.AST) -> bool:
        """Return whether a node stands above all that makes the scaler in its function."""
        line, function = self.module.statement_around(node).lineno, self.module.function_around(node)
        made = [each for each in self.sites.initializes if each.function is function]
        # which has the default
        first = [[each.statement, *ifs_around_call(self.module, each)][-1] for each in made]
        return bool(first) and all(line < each.lineno for each in first)

    def add_note(self, node: ast.AST, message: str) -> None:
        """Add a note on the line of a node."""
        self.findings.append(Finding.of_node(node, NOTE, message))

    @property
    def scaler_expression(self) -> str:
        """The expression for the scaler."""
        return self.planned.expression

    def is_in_disable_casts_block(self, node: ast.AST) -> bool:
        """Return whether a place is in a block of `amp.disable_casts`, in which autocast stays off."""
        blocks = (each for each in self.module.ancestors(node) if isinstance(each, ast.With))
        calls = (
            item.context_expr
            for each in blocks
            for item in each.items
            if isinstance(item.context_expr, ast.Call)
        )
        return any(self.names.full_name_of(each.func) == "apex.amp.disable_casts" for each in calls)

    def has_autocast(self, node: ast.AST) -> bool:
        """Return whether a node stands in a part of the text that has autocast now."""
        statement = self.module.statement_around(node)
        above = [statement, *self.module.ancestors(statement)]
        if any(each in self.wrapped for each in above):
            return True
        spans = ((first.lineno, last.end_lineno or last.lineno) for first, last in self.forward.regions)
        if any(first <= statement.lineno <= last for first, last in spans):
            return True
        contexts = [item.context_expr for each in above if isinstance(each, ast.With) for item in each.items]
        if any(
            self.names.full_name_of(each.func) in AUTOCASTS for each in contexts if isinstance(each, ast.Call)
        ):
            return True
        return any(each.statement in above and node in walk(each.loss) for each in self.forward.inline)

    def reaches_scaler(self, node: ast.AST) -> bool:
        """Return whether the scaler is in scope, and made, where autocast asks it."""
        function = self.module.function_around(node)
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
    def autocast_line(self) -> str:
        """The `with` line for a forward pass."""
        enabled = "" if self.always else f", enabled={self.scaler_expression}.is_enabled()"
        return f'with {self.torch}.autocast("cuda", dtype={self.torch}.float16{enabled}):'


def last_name_before_index(node: ast.expr) -> str:
    """Return the last part of the name of an object, or of the list or dict whose member it is, as of `nets["g"]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return last_name(node)


def parameters_receiving(
    index: Index, call: ast.Call, argument_names: set[str]
) -> list[tuple[str, ProjectFunction]]:
    """Return the parameters of functions of the project that get one of some objects in a call of a module."""
    if not any(argument_names & last_names_of_objects(each) for each in argument_values(call)):
        return []
    found = []
    for each in functions_of_callee(index.callee(call, index.module.scope_of[call])):
        if isinstance(each, ProjectFunction) and isinstance(each.scope.node, FunctionNode):
            bound = arguments(call, each.module.positional_parameters_without_self(each.scope.node))
            found += [
                (key, each) for key, one in bound.items() if argument_names & last_names_of_objects(one)
            ]
    return found


def last_names_of_objects(node: ast.expr) -> set[str]:
    """Return the last parts of the names of an object, or of those in a list, tuple or dict that is written out."""
    return {last_name_before_index(each) for each in _members_or_expression_itself(node)}


def _members_or_expression_itself(node: ast.expr) -> list[ast.expr]:
    """Return the values of a list, tuple or dict that is written out; any other expression is its only one."""
    return (
        [each for each in node.values if each is not None] if isinstance(node, ast.Dict) else elements(node)
    )


def _names_stored_by(target: ast.expr) -> set[str]:
    """Return the last parts of the names that an assignment binds, or into whose members it puts something."""
    return {last_name_before_index(each) for each in elements(target)}


def _targets_with_values(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the parts of an assignment with what each gets, where both sides are written out."""
    targets, values = elements(target), elements(value)
    is_apart = len(targets) == len(values) > 1 and not any(
        isinstance(each, ast.Starred) for each in (*targets, *values)
    )
    return list(zip(targets, values, strict=True)) if is_apart else [(target, value)]


def _loop_targets_with_holders(target: ast.expr, over: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of a loop with the list or dict whose members each gets, through `zip`, `items` and others."""
    if not isinstance(over, ast.Call):
        return [(target, over)]
    name, targets = last_name(over.func), elements(target)
    if isinstance(over.func, ast.Attribute) and name in ("values", "items") and not over.args:
        return [(targets[-1], over.func.value)]
    if name == "enumerate" and len(targets) == 2 and over.args:
        return _loop_targets_with_holders(targets[1], over.args[0])
    if name == "zip" and len(targets) == len(over.args):
        return [
            pair
            for each, one in zip(targets, over.args, strict=True)
            for pair in _loop_targets_with_holders(each, one)
        ]
    return []
