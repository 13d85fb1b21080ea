"""The loss scaler of a migrated module, and how each of its functions reaches it."""

import ast
from dataclasses import dataclass

from ampcompare.source.index import Index
from ampcompare.source.migrate.read.apex_guards import tests_only_apex_presence
from ampcompare.source.migrate.read.sites import InitializeCall, Sites
from ampcompare.source.module import Module
from ampcompare.source.syntax import (
    DefinitionNode,
    FunctionNode,
    LoopNode,
    arguments,
    dotted_name,
    names_bound_in,
    walk,
)


@dataclass(frozen=True)
class PlannedScaler:
    """The scaler of a module, one for all its losses.

    Attributes:
        name: of the variable.
        home: "local" (a variable), "module" (a global one), "self" (an attribute of the object).
    """

    name: str
    home: str

    @property
    def expression(self) -> str:
        """The expression for it where it is made."""
        return f"self.{self.name}" if self.home == "self" else self.name


def plan_scaler(module: Module, sites: Sites) -> PlannedScaler:
    """Return the scaler that the uses of a module need."""
    home = _scaler_home(module, sites)
    return PlannedScaler(_unused_scaler_name(module, attribute=home == "self"), home)


def _unused_scaler_name(module: Module, *, attribute: bool) -> str:
    used = {
        node.attr
        for node in module.nodes
        if isinstance(node, ast.Attribute) and dotted_name(node.value) == "self"
    }
    if not attribute:
        used = {node.id for node in module.nodes if isinstance(node, ast.Name)}
        used |= {node.arg for node in module.nodes if isinstance(node, ast.arg)}
    names = ("scaler", "grad_scaler", "amp_scaler", "scaler_of_amp")
    return next((name for name in names if name not in used), "scaler_for_amp")


def _scaler_home(module: Module, sites: Sites) -> str:
    created = {each.function for each in sites.initializes}
    others = [*sites.masters, *sites.saves, *sites.loads]
    used: set[FunctionNode | None] = {each.function for each in sites.backwards}
    used |= {each.function for each in sites.steps} | {each.function for each in sites.reads}
    used |= {module.function_around(each) for each in others}
    if len(created) == 1:
        (function,) = created
        if function is None:
            # A class body at the top of the module is no scope for the functions in it.
            return "module"
        if all(each is not None and function in (each, *module.functions_around(each)) for each in used):
            return "local"
    owners = {module.class_of(_outermost_function(module, each)) for each in created | used}
    if len(owners) == 1 and None not in owners:
        return (
            "self"
            if all(_has_self(_outermost_function(module, each)) for each in created | used)
            else "module"
        )
    return "module"


def _outermost_function(module: Module, function: FunctionNode | None) -> FunctionNode | None:
    return None if function is None else [function, *module.functions_around(function)][-1]


def _has_self(function: FunctionNode | None) -> bool:
    return function is not None and [each.arg for each in function.args.args[:1]] == ["self"]


def ifs_around_call(module: Module, initialize: InitializeCall) -> list[ast.If]:
    """Return the `if` statements of its function around a call, those around its loops too, the innermost first.

    One that only asks whether Apex is there is none: the result does not ask.
    """
    found = []
    for outer in module.ancestors(initialize.statement):
        if isinstance(outer, ast.If) and not tests_only_apex_presence(module, outer.test):
            found.append(outer)
        elif isinstance(outer, DefinitionNode):
            break
    return found


def runs_under_varying_tests(index: Index, initialize: InitializeCall) -> bool:
    """Return whether a call runs under tests that change from round to round of a loop, or from call to call.

    What was initialized once stays so where they do not hold, as in `if epoch == 0:`.
    """
    return _tests_vary_in_loop(index.module, initialize) or _scaler_outlasts_call(index, initialize)


def _tests_around_initialize(module: Module, initialize: InitializeCall) -> list[ast.expr]:
    """Return the tests that decide on a call in each round of its loop, or else in each call of its function."""
    loop = next(
        (
            each
            for each in module.ancestors_up_to_function(initialize.statement)
            if isinstance(each, LoopNode)
        ),
        None,
    )
    inside = [
        each for each in ifs_around_call(module, initialize) if loop is None or loop in module.ancestors(each)
    ]
    return [each.test for each in inside]


def _dotted_names_in(nodes: list[ast.expr]) -> set[str]:
    return {key for node in nodes for each in walk(node) if (key := dotted_name(each)) is not None}


def _tests_vary_in_loop(module: Module, initialize: InitializeCall) -> bool:
    keys = _dotted_names_in(_tests_around_initialize(module, initialize))
    return any(
        isinstance(loop, LoopNode) and keys & names_bound_in(loop)
        for loop in module.ancestors_up_to_function(initialize.statement)
    )


def _scaler_outlasts_call(index: Index, initialize: InitializeCall) -> bool:
    """Return whether a function initializes in some of its calls only, and trains in later ones with the same scaler.

    Its test asks for a parameter that counts, or one that a loop binds where the function is called, or for a flag that
    the function itself sets.
    """
    module, function = index.module, initialize.function
    if function is None or is_constructor(function):
        return False
    tests = _tests_around_initialize(module, initialize)
    keys = _dotted_names_in(tests)
    models = _dotted_names_in(
        [each for name in ("models", "optimizers") if (each := initialize.arguments.get(name)) is not None]
    )
    first = min((each.lineno for each in tests), default=0)
    flags = {
        key for each in walk(function) if getattr(each, "lineno", 0) > first for key in names_bound_in(each)
    } - models
    if any(key in keys and ("." in key or key in module.scope_from[function].globals) for key in flags):
        return True
    asked = keys & module.scope_from[function].parameters
    if any(
        isinstance(each, ast.Compare) and _compares_with_numbers(each, asked)
        for test in tests
        for each in walk(test)
    ):
        return True
    names = module.positional_parameters_without_self(function)
    for call in index.possible_calls_and_completeness(module.scope_from[function])[0]:
        given = [value for name, value in arguments(call, names).items() if name in asked]
        home = index.scope_around_call(call).module
        loops = [each for each in home.ancestors_up_to_function(call) if isinstance(each, LoopNode)]
        if any(_dotted_names_in(given) & names_bound_in(loop) for loop in loops):
            return True
    return False


def is_constructor(function: FunctionNode | None) -> bool:
    """Return whether a function runs once for each object."""
    return function is not None and function.name == "__init__"


def _compares_with_numbers(test: ast.Compare, names: set[str]) -> bool:
    """Return whether a comparison asks which number a name is, or whether it is one of several."""
    sides = [test.left, *test.comparators]
    if not any((dotted_name(part) or "") in names for side in sides for part in walk(side)):
        return False
    numbers = any(isinstance(each, ast.Constant) and type(each.value) in (int, float) for each in sides)
    return numbers or any(isinstance(each, (ast.In, ast.NotIn)) for each in test.ops)
