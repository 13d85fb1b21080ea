"""Networks whose weights a script casts to fp16: those that train, and those that run outside of autocast."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from ampcompare.source.index import Answer, Index, ProjectFunction, functions_of_callee
from ampcompare.source.migrate.core.coverage import AutocastCoverage, scope_around
from ampcompare.source.migrate.core.model_calls import MAX_DEPTH, calls_parameter, find_traced_network
from ampcompare.source.migrate.core.model_casts import fp16_level_of_file
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.module import Module, Scope
from ampcompare.source.syntax import (
    FunctionNode,
    LoopNode,
    argument_values,
    arguments,
    dotted_name,
    last_name,
    names_bound_in,
    walk,
)
from ampcompare.source.torch_methods import GIVING_BACK, PARTS, receiver_of

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import ApexCore

HALVES = ("torch.half", "torch.float16", "torch.cuda.HalfTensor")
HALF_WEIGHTS = (
    "this casts weights of a model that amp.initialize got to fp16; GradScaler refuses gradients of fp16, which "
    "Apex takes, as the adapter does"
)
HALF_RUNS = (
    "this runs a network outside of autocast whose weights line {0} casts to fp16; O1 cast its inputs to that, and "
    "without it those in fp32 fail; the adapter casts them"
)
HALF_RUNS_ELSEWHERE = (
    "line {1} of {0} runs a network whose weights line {2} casts to fp16; O1 cast its inputs to that; outside of "
    "autocast those in fp32 fail now"
)


def refuse_half_weights(core: ApexCore) -> None:
    """Refuse casts of the weights of a model that trains to fp16, as they are in place."""
    if not any(each.block for each in core.sites.backwards):
        return
    for call, owner in calls_casting_to_fp16(core.module):
        if not core.runs_only_before_initialize(core.module.statement_around(call)) and _is_model_or_part(
            core, owner
        ):
            raise UnsureRewrite(call, HALF_WEIGHTS)
    for call in core.module.calls:
        for parameter, function in core.parameters_receiving(call, core.model_names):
            module = function.module
            for each, owner in module.method_calls("half"):
                if module.function_around(each) is function.scope.node and dotted_name(owner) == parameter:
                    raise UnsureRewrite(call, HALF_WEIGHTS)


def refuse_or_note_half_networks(core: ApexCore) -> None:
    """Refuse networks that run outside of autocast with weights in fp16, and note those of files that this one imports.

    O1 cast the inputs of their layers, in the whole process.

    Raises:
        UnsureRewrite: one of them is called, or traced.
    """
    if fp16_level_of_file(core.sites) or not core.sites.initializes:
        return
    for run, line in _calls_and_line_of_fp16_cast(core.index):
        if not core.has_autocast(run) and not core.runs_only_before_initialize(
            core.module.statement_around(run)
        ):
            raise UnsureRewrite(run, HALF_RUNS.format(line))
    coverage, first = AutocastCoverage(core), core.sites.initializes[0].call
    for module in core.around.modules_imported_transitively(core.module):
        runs = [
            each
            for each in _calls_and_line_of_fp16_cast(core.index.index_seen_from(module))
            if not _runs_under_autocast(coverage, module, each[0])
        ]
        for number, (run, line) in enumerate(runs):
            words = core.index.relative_path_of(module), run.lineno, line
            if _is_called_from_file(core, scope_around(module, run)):
                raise UnsureRewrite(first, HALF_RUNS_ELSEWHERE.format(*words))
            if not number:
                core.add_note(first, HALF_RUNS_ELSEWHERE.format(*words))


def _runs_under_autocast(coverage: AutocastCoverage, module: Module, run: ast.Call) -> bool:
    return coverage.coverage_of_node(module, run) is Answer.YES


def _is_called_from_file(core: ApexCore, scope: Scope, depth: int = 0) -> bool:
    """Return whether the file calls a function, if only through others."""
    if scope.function is None:
        return False
    return any(
        each in core.module.scope_of
        or (depth < MAX_DEPTH and _is_called_from_file(core, core.index.scope_around_call(each), depth + 1))
        for each in core.index.possible_calls_and_completeness(scope)[0]
    )


def calls_casting_to_fp16(module: Module) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield the calls of methods that cast an object to fp16, with that object."""
    for call, owner in module.method_calls("half", "to", "type"):
        types = [call] if last_name(call.func) == "half" else argument_values(call)
        if any(makes_fp16(module, each) for each in types):
            yield call, owner


def makes_fp16(module: Module, node: ast.AST) -> bool:
    """Return whether a node makes a tensor or an object fp16, or is that type."""
    if isinstance(node, ast.Call):
        return receiver_of(node, ("half",)) is not None and not node.args
    is_name = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)
    return is_name and module.resolve(node, follow=False) in HALVES


def _calls_and_line_of_fp16_cast(index: Index) -> Iterator[tuple[ast.Call, int]]:
    """Yield the calls that run an object after its cast to fp16, each with the line of that.

    What is called is a network, or a copy of one: tensors are not.
    """
    module, halves = index.module, dict[str, ast.Call]()
    casts = dict(calls_casting_to_fp16(module))
    for call, owner in casts.items():
        for key in {dotted_name(_object_of_method(owner)), *_names_given_result(module, call)} - {None}:
            halves.setdefault(str(key), call)
    for call in module.calls if casts else ():
        for each in (call.func, *argument_values(call)):
            cast = _find_cast_in_chain(casts, each)
            if cast is None and (name := dotted_name(_object_of_method(each)) or "") in halves:
                cast = _cast_if_it_may_run_before(module, call, halves[name], name)
            if cast is not None and (
                each is call.func
                or each is find_traced_network(module, call)
                or _is_called_by_function(index, call, each)
            ):
                yield call, cast.lineno
                break


def _is_called_by_function(index: Index, call: ast.Call, argument: ast.expr) -> bool:
    """Return whether a function of the project gets an object and calls it."""
    for each in functions_of_callee(index.callee(call, index.module.scope_of[call])):
        if isinstance(each, ProjectFunction) and isinstance(each.scope.node, FunctionNode):
            bound = arguments(call, each.module.positional_parameters_without_self(each.scope.node))
            if any(one is argument and calls_parameter(index, each, key) for key, one in bound.items()):
                return True
    return False


def _find_cast_in_chain(casts: Collection[ast.Call], node: ast.expr) -> ast.Call | None:
    """Return the cast to fp16 whose result an expression is, as of `copy.deepcopy(net).half()`."""
    while (owner := receiver_of(node, GIVING_BACK)) is not None:
        if isinstance(node, ast.Call) and node in casts:
            return node
        node = owner
    return None


def _cast_if_it_may_run_before(module: Module, call: ast.Call, cast: ast.Call, name: str) -> ast.Call | None:
    """Return a cast that may have run where a call stands: above it, in another function, or in a round of a loop."""
    function = module.function_around(cast)
    if function is not module.function_around(call):
        is_shared = (
            name.startswith("self.") or function is None or function in list(module.functions_around(call))
        )
        return cast if is_shared else None
    loops = [each for each in module.ancestors_up_to_function(call) if isinstance(each, LoopNode)]
    return (
        cast if cast.lineno < call.lineno or any(each in module.ancestors(cast) for each in loops) else None
    )


def _names_given_result(module: Module, call: ast.Call) -> set[str]:
    """Return the names that get the result of a call, which is all of the value that is assigned."""
    statement = module.statement_around(call)
    value = statement.value if isinstance(statement, ast.Assign) else None
    while value is not None and value is not call:
        value = receiver_of(value, GIVING_BACK)
    return set() if value is None else names_bound_in(statement)


def _object_of_method(node: ast.expr) -> ast.expr:
    """Return what an expression is a method of, as of `net.cuda().half`, through methods that give the object back."""
    while True:
        if (owner := receiver_of(node, GIVING_BACK)) is not None:
            node = owner
        elif isinstance(node, ast.Attribute) and node.attr == "module":
            node = node.value
        else:
            return node


def _is_model_or_part(core: ApexCore, node: ast.expr) -> bool:
    """Return whether an expression is a model, a part of one, or one of what a loop gets from a model."""
    while not dotted_name(node):
        if (owner := receiver_of(node, GIVING_BACK)) is not None:
            node = owner
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        else:
            return False
    names = (dotted_name(node) or "").split(".")
    if not core.model_names.isdisjoint(names):
        return True
    loops = [
        each
        for each in core.module.nodes
        if isinstance(each, ast.For) and names[0] in names_bound_in(each.target)
    ]
    calls = (each for loop in loops for each in walk(loop.iter) if isinstance(each, ast.Call))
    return any(last_name(each.func) in PARTS for each in calls)
