"""Rules about code that a backward pass calls with gradients, which are scaled there whatever the script does later."""

import ast
from collections.abc import Iterator

from ampcompare.source.index import ProjectFunction, functions_of_callee, own_nodes_of_scope
from ampcompare.source.lint.read.module import Finding, LintModule, is_disabled_by_literal, register_rule
from ampcompare.source.lint.read.update_events import EventKind, name_in_source
from ampcompare.source.lint.rules.gradients import SCALE_WORDS
from ampcompare.source.module import Scope
from ampcompare.source.syntax import (
    ForNode,
    FunctionNode,
    argument,
    is_literal,
    last_name,
    parameter_names_without_stars,
)
from ampcompare.source.torch_methods import LIMITING, is_gradient

# Methods that register a hook, and the place of its first gradient among what it gets; None: it gets the parameter.
REGISTERING = {
    "register_hook": 0, "register_backward_hook": 1, "register_full_backward_hook": 1,
    "register_full_backward_pre_hook": 1, "register_post_accumulate_grad_hook": None,
}  # fmt: skip
PASSING_ON = (*LIMITING, "clone", "detach", "contiguous", "float", "to", "data")
LIMITS_OF_HARDTANH = (ast.Constant(-1.0), ast.Constant(1.0))
MAX_ROUNDS = 4  # of assignments that pass a gradient on


@register_rule(
    "AMP218", needs=("hook|Function", "scale(|scale_loss|caler.scale", "backward", "clamp|clip|hardtanh")
)
def gradient_limits_in_hooks(module: LintModule) -> Iterator[Finding]:
    """A hook, or the backward of a function, that limits gradients to a size, where the module scales its losses."""
    limits = list(_limits_of_gradients(module))
    # What each function does in order is asked last: it costs most.
    if limits and (how := _loss_scaling_text(module)):
        what = f"gradients within a backward pass are scaled by {how}, and the limit is not"
        for call in limits:
            yield module.make_finding("AMP218", call, f"{what}: limit `p.grad` behind it")


def _limits_of_gradients(module: LintModule) -> Iterator[ast.Call]:
    """Yield the calls in what a backward pass calls that limit a gradient to a size; none where it names a scale."""
    seen: set[ast.AST] = set()
    for function, first, around in _functions_with_gradients(module):
        if function.module is not module or function.scope.node in seen:
            continue
        seen.add(function.scope.node)
        if not any(SCALE_WORDS.search(ast.unparse(scope.node)) for scope in (function.scope, around)):
            yield from _calls_limiting_gradient_size(function, first)


def _loss_scaling_text(module: LintModule) -> str:
    """Return what scales a loss of a module whose backward pass it makes; "" for nothing."""
    makers = module.calls_making_scalers
    is_off = bool(makers) and all(map(is_disabled_by_literal, makers))
    for _, _, event in module.events(EventKind.BACKWARD, with_amp=True):
        if event.scale_loss_block() is not None:
            return "`amp.scale_loss`"
        if event.scaler and not is_off:
            return f"`{name_in_source(event.scaler)}`"
    return ""


def _functions_with_gradients(module: LintModule) -> Iterator[tuple[ProjectFunction, int | None, Scope]]:
    """Yield what a backward pass calls, the place of its first gradient, and the function that has registered it."""
    for call, _ in module.method_calls(*REGISTERING):
        hook, scope = argument(call, "hook", 0), module.scope_of[call]
        first = REGISTERING[last_name(call.func)]
        if hook is not None:
            around = scope if isinstance(scope.node, FunctionNode) else None
            for found in functions_of_callee(module.index.function_of_expression(hook, scope)):
                if isinstance(found, ProjectFunction):
                    yield found, first, around or found.scope
    for scope in module.scopes:
        if scope.owner is not None and getattr(scope.node, "name", "") == "backward":
            if module.index.has_outside_base(scope.owner, "torch.autograd.Function"):
                yield ProjectFunction(scope), 1, scope.owner


def _calls_limiting_gradient_size(
    function: ProjectFunction, first_gradient_index: int | None
) -> Iterator[ast.Call]:
    """Yield the calls of a function that limit a gradient, one of what it gets, to a size that is no gradient's."""
    node = function.scope.node
    assert isinstance(node, FunctionNode | ast.Lambda)
    names = parameter_names_without_stars(node, positional=True)
    bound = sum(len(call.args) - 1 for call in function.given)
    is_method = function.receiver is not None or names[:1] == ["self"]
    names = names[bound + (is_method and names[:1] != ["ctx"]) :]
    gradients = set(names[:1] if first_gradient_index is None else names[first_gradient_index:])
    gradients |= {node.args.vararg.arg} if node.args.vararg is not None else set()
    nodes = list(own_nodes_of_scope(function.scope))
    for _ in range(MAX_ROUNDS):
        gradients |= _names_derived_from_gradients(nodes, gradients)
    for call in nodes:
        if isinstance(call, ast.Call) and (limited := _limited_tensor_and_bounds(function, call)) is not None:
            tensor, bounds = limited
            is_of_parameter = any(is_gradient(one) for one in ast.walk(tensor))
            if _name_before_items_and_limits(tensor) in gradients and (
                first_gradient_index is not None or is_of_parameter
            ):
                if _are_fixed_nonzero_bounds(bounds, gradients) and _is_result_returned_or_stored(
                    call, nodes
                ):
                    yield call


def _name_before_items_and_limits(node: ast.expr) -> str:
    """Return the name with which attributes, elements and limits begin, such as `g` of `g[0].clamp(0, 1)`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Call):
            is_passed_on = isinstance(node.func, ast.Attribute) and last_name(node.func) in PASSING_ON
            node = node.func if is_passed_on else ast.Constant(None)
        else:
            node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names_derived_from_gradients(nodes: list[ast.AST], gradients: set[str]) -> set[str]:
    """Return the names that stand for a gradient, a part of several, or what is limited already."""
    found: set[str] = set()
    for node in nodes:
        values: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            values = [(target, node.value) for target in node.targets]
        elif isinstance(node, ForNode | ast.comprehension):
            values = [(node.target, node.iter)]
        for target, value in values:
            if _name_before_items_and_limits(value) in gradients:
                found |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found


def _limited_tensor_and_bounds(
    function: ProjectFunction, call: ast.Call
) -> tuple[ast.expr, list[ast.expr]] | None:
    """Return what a call limits, and between which values; None for a call that limits nothing."""
    name, given = last_name(call.func).removesuffix("_"), [each.value for each in call.keywords]
    full = function.module.resolve(call.func, function.scope) or ""
    if full == "torch.nn.functional.hardtanh" and call.args:
        return call.args[0], [*call.args[1:], *given] or list(LIMITS_OF_HARDTANH)
    if name not in LIMITING or not isinstance(call.func, ast.Attribute):
        return None
    if full.startswith("torch."):
        return (call.args[0], [*call.args[1:], *given]) if call.args else None
    return call.func.value, [*call.args, *given]


def _are_fixed_nonzero_bounds(bounds: list[ast.expr], gradients: set[str]) -> bool:
    """Return whether bounds are numbers, or names of what no gradient has made, and not zero alone."""
    inner = [each.operand if isinstance(each, ast.UnaryOp) else each for each in bounds]
    known = [each for each in inner if not is_literal(each, None)]
    plain = all(isinstance(each, (ast.Constant, ast.Name, ast.Attribute)) for each in known)
    return (
        plain
        and not any(_name_before_items_and_limits(each) in gradients for each in known)
        and any(not (isinstance(each, ast.Constant) and each.value == 0) for each in known)
    )


def _is_result_returned_or_stored(call: ast.Call, nodes: list[ast.AST]) -> bool:
    """Return whether the result of a call is what a function returns, or a tensor that was there before."""
    if last_name(call.func).endswith("_"):
        return True
    for node in nodes:
        if isinstance(node, ast.Return) and any(one is call for one in ast.walk(node)):
            return True
        if isinstance(node, ast.Assign) and any(one is call for one in ast.walk(node.value)):
            return True
    return bool(nodes) and isinstance(nodes[0], ast.expr) and any(one is call for one in ast.walk(nodes[0]))
