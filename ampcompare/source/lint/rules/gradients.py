"""Rules about gradients that are read, changed or skipped while a GradScaler has them scaled."""

import ast
import re
from collections.abc import Iterator

from ampcompare.source.amp_names import CLIPS
from ampcompare.source.branches import conditions_of_test, expression_of_condition
from ampcompare.source.edits import Edit, Edits
from ampcompare.source.index import ProjectFunction, own_nodes_of_scope
from ampcompare.source.lint.read.module import (
    EXITS,
    Finding,
    LintModule,
    Mistake,
    Trace,
    dotted_text_of,
    events_after,
    events_before,
    events_between,
    register_rule,
)
from ampcompare.source.lint.read.update_events import FINITE, EventKind, TrainingEvent, name_in_source
from ampcompare.source.module import Scope
from ampcompare.source.syntax import FunctionNode, LoopNode, argument, is_literal, last_name
from ampcompare.source.torch_methods import is_gradient

# `mul_` by a mask is right at any scale
IN_PLACE = ("add_", "sub_", "clamp_", "clip_", "addcmul_", "addcdiv_")
READS = ("norm", "vector_norm", "pow", "square", "abs", "get_total_norm")
OF_MODEL = re.compile(r"param|modules\(")
SCALE_WORDS = re.compile(r"get_scale|inv_scale")


@register_rule(
    Mistake(
        "AMP201",
        "clip-scaled",
        "gradients are clipped while they are scaled, or the fp16 copies of Apex's O2 are clipped",
        "the norm is too large by the factor of the loss scale, so almost nothing is left after "
        "unscaling; under O2 the optimizer uses the fp32 gradients, which stay unclipped",
        "call `scaler.unscale_(optimizer)` before clipping; with Apex clip "
        "`amp.master_params(optimizer)` after the `scale_loss` block",
        """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)  # right
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # AMP201
scaler.step(optimizer)
scaler.update()
""",
        fixable=True,
    ),
    Mistake(
        "AMP218",
        "gradients-read-scaled",
        "the size of gradients is read, or a number is added to them, while they are scaled",
        "a norm is too large by the loss scale and jumps with it; what is added has almost no effect",
        "call `scaler.unscale_(optimizer)` before gradients are read or changed",
        """
scaler.scale(loss).backward()
for p in model.parameters():  # right
    p.grad.mul_(mask)  # right
scaler.unscale_(optimizer)  # right
total = sum(p.grad.norm() ** 2 for p in model.parameters())  # AMP218
scaler.step(optimizer)
scaler.update()
""",
    ),
    needs=("caler", "backward", "step"),
)
def misuse_of_scaled_gradients(module: LintModule) -> Iterator[Finding]:
    """Gradients that are clipped, read or changed between a scaled backward pass and `scaler.step`."""
    for trace, _, event in module.events(EventKind.CLIP, EventKind.GRADIENT, EventKind.ELSEWHERE):
        if event.scale_loss_block() is not None or (
            event.kind is EventKind.ELSEWHERE and not _function_elsewhere_clips_or_measures(module, event)
        ):
            continue
        if event.kind is EventKind.GRADIENT and not _depends_on_gradient_size(event):
            continue
        for last in _latest_scaled_passes(trace, event):
            steps = _steps_with_scaled_gradients(trace, last, event)
            if steps and not SCALE_WORDS.search(_source_around(module, event)):
                near = events_between(trace, last, event, EventKind.CLIP)
                near += events_between(trace, event, steps[0], EventKind.UNSCALE)
                yield _scaled_gradient_finding(module, event, last, steps, may_unscale=not near)
                break


def _function_elsewhere_clips_or_measures(module: LintModule, event: TrainingEvent) -> bool:
    """Return whether a function of another file of the project surely clips, or takes norms of gradients."""
    found = module.index_of_project.callee(event.call, event.scope)
    return (
        isinstance(found, ProjectFunction)
        and found.module is not module
        and _clips_or_measures_gradients(found)
    )


def _clips_or_measures_gradients(function: ProjectFunction) -> bool:
    """Return whether a function clips with torch, or measures and multiplies gradients by itself."""
    nodes = list(own_nodes_of_scope(function.scope))
    calls = [each for each in nodes if isinstance(each, ast.Call)]
    if any(function.module.resolve(each.func) in CLIPS for each in calls):
        return True
    of_grad = [each for each in nodes if is_gradient(each)]
    return bool(of_grad) and any(last_name(each.func) in (*READS, "clamp_", "clip_") for each in calls)


def _depends_on_gradient_size(event: TrainingEvent) -> bool:
    """Return whether an event reads or changes the gradient of a parameter in a way that its size decides."""
    if not isinstance(event.call, ast.Call) or last_name(event.call.func) not in (*READS, *IN_PLACE):
        return False
    gradient = next(node for node in ast.walk(event.call) if is_gradient(node))
    owner = dotted_text_of(gradient.value).partition(".")[0]
    values = event.scope.values.get(owner, [])
    loops = [ast.unparse(value.value) for value in values if isinstance(value, ast.Starred)]
    return len(loops) == len(values) > 0 and all(OF_MODEL.search(loop) for loop in loops)


def _latest_scaled_passes(trace: Trace, event: TrainingEvent) -> list[TrainingEvent]:
    """Return the scaled backward passes that may be the last before an event: one for each branch."""
    found: list[TrainingEvent] = []
    for other in reversed(trace[: trace.index(event)]):
        if other.kind in (EventKind.BACKWARD, EventKind.FOREIGN_BACKWARD) and other.may_share_run_with(event):
            if any(other.may_share_run_with(later) for later in found):
                break
            found.append(other)
    return [one for one in found if one.scaler]


def _steps_with_scaled_gradients(
    trace: Trace, last_pass: TrainingEvent, event: TrainingEvent
) -> list[TrainingEvent]:
    """Return the steps that use the gradients of an event, if nothing unscales them between backward pass and event."""
    unscaling = (EventKind.UNSCALE, EventKind.SCALER_STEP, EventKind.STEP, EventKind.UPDATE, EventKind.OPAQUE)
    if any(other.call is not event.call for other in events_between(trace, last_pass, event, *unscaling)):
        return []
    # Which gradients are clipped, and which are unscaled below, is known only of one optimizer.
    optimizers = {other.target for other in trace if other.kind is EventKind.SCALER_STEP}
    steps = []
    for other in trace[trace.index(event) + 1 :]:
        if not (other.may_share_run_with(event) and other.may_share_run_with(last_pass)):
            continue
        unscales = other.kind is EventKind.UNSCALE and event.kind is EventKind.CLIP
        if other.kind is EventKind.BACKWARD or (unscales and len(optimizers) > 1):
            break
        if other.kind is EventKind.SCALER_STEP and other.subject == last_pass.scaler:
            steps.append(other)
    return steps


def _scaled_gradient_finding(
    module: LintModule,
    event: TrainingEvent,
    last_pass: TrainingEvent,
    steps: list[TrainingEvent],
    *,
    may_unscale: bool,
) -> Finding:
    """Return the finding, with the edit that unscales unless something near it does, or will once it is corrected."""
    code = "AMP218" if event.kind is EventKind.GRADIENT else "AMP201"
    edits: tuple[Edit, ...] = ()
    names = {(name_in_source(step.subject), name_in_source(step.target)) for step in steps}
    same_place = steps[0].scope is event.scope and steps[0].loops == event.loops
    known = all(event.facts.get(key) == value for key, value in last_pass.facts.items())
    if event.kind is EventKind.CLIP and len(names) == 1 and same_place and known and may_unscale:
        optimizer = "".join(map(module.source, steps[0].call.args[:1]))
        line = f"{module.source(steps[0].receiver)}.unscale_({optimizer})"
        unscale = Edits(module)
        unscale.insert_above(event.statement, [line])
        edits = unscale.sorted_edits() if module.is_alone_on_lines(event.statement) else ()
    return module.make_finding(
        code, event.call, f"the gradients are still scaled by `{name_in_source(last_pass.scaler)}`", edits
    )


def _source_around(module: LintModule, event: TrainingEvent) -> str:
    function = module.scope_of[event.call].node
    return module.text_without_comments if isinstance(function, ast.Module) else ast.unparse(function)


@register_rule(
    Mistake(
        "AMP219",
        "update-skipped",
        "gradients are unscaled, and `scaler.update` runs only if what is found out then allows it",
        "the next `unscale_` raises a RuntimeError, and a loss scale that overflowed is not lowered",
        "call `scaler.update()` after every `unscale_`; `scaler.step` skips gradients that are not finite by itself",
        """
for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scaler.unscale_(optimizer)  # AMP219
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):  # wrong
        continue  # wrong
    scaler.step(optimizer)  # wrong
    if torch.isfinite(norm):  # right
        scaler.step(optimizer)  # right
    scaler.update()
""",
    ),
    needs=("unscale_", "caler", "update"),
)
def scaler_update_skipped(module: LintModule) -> Iterator[Finding]:
    """`unscale_` whose update depends on a condition that is decided after it."""
    for trace, _, event in module.events(EventKind.UNSCALE):
        if not (event.loops or _is_in_function_of_one_step(trace, event)):
            continue
        updates = [
            other for other in events_after(trace, event, EventKind.UPDATE) if other.subject == event.subject
        ]
        if any(other.subject == event.subject for other in events_after(trace, event, EventKind.OPAQUE)):
            continue
        keys = {key for update in updates for key in update.facts} - event.facts.keys()
        for key in sorted(key for key in keys if "%" not in key):
            values = {update.facts.get(key, "both") for update in updates}
            if len(values) == 1 and _condition_depends_on_unscaled_gradients(module, event, key):
                if not _ends_training_unless_condition(module, updates[0].scope, key, values.pop()):
                    shown = f"`{name_in_source(event.subject)}.update()` runs only for one outcome of `{key}`"
                    yield module.make_finding("AMP219", event.call, shown)
                    break


def _is_in_function_of_one_step(trace: Trace, event: TrainingEvent) -> bool:
    """Return whether an event stands in a function that makes one step: with a backward pass, and without a loop."""
    return isinstance(event.scope.node, FunctionNode) and any(
        other.scaler == event.subject and not other.loops
        for other in events_before(trace, event, EventKind.BACKWARD)
    )


def _condition_depends_on_unscaled_gradients(module: LintModule, event: TrainingEvent, key: str) -> bool:
    """Return whether a condition asks for something that comes from the gradients which an event has unscaled."""
    if FINITE.search(key):
        return True
    test = expression_of_condition(key)
    for node in ast.walk(test) if test is not None else ():
        if isinstance(node, (ast.Name, ast.Attribute)):
            values = event.scope.values.get(dotted_text_of(node), ())
            if any(
                value.lineno > event.call.lineno for value in values if not isinstance(value, ast.Starred)
            ):
                return True
        if (
            isinstance(node, ast.Call)
            and (scope := _find_function_called_by_test(module, event, node)) is not None
        ):
            inside = list(ast.walk(scope.node))
            if any(is_gradient(one) for one in inside):
                return True
            if any(isinstance(one, ast.Call) and module.resolve(one.func) in CLIPS for one in inside):
                return True
    return False


def _find_function_called_by_test(module: LintModule, event: TrainingEvent, call: ast.Call) -> Scope | None:
    """Return the function of this module that a test calls."""
    found = module.index.callee(call, event.scope)
    return found.scope if isinstance(found, ProjectFunction) and found.module is module else None


def _ends_training_unless_condition(module: LintModule, scope: Scope, key: str, value: object) -> bool:
    """Return whether training ends where a condition of a scope has another value than the given one."""
    for node in ast.walk(scope.node):
        if not isinstance(node, ast.If):
            continue
        for branch, holds in ((node.body, True), (node.orelse, False)):
            if branch and conditions_of_test(node.test, holds).get(key, value) != value:
                last = branch[-1]
                around = [one for one in module.ancestors_up_to_function(node) if isinstance(one, LoopNode)]
                if isinstance(last, (ast.Raise, ast.Break)) or (isinstance(last, ast.Return) and around):
                    return True
                if any(
                    isinstance(one, ast.Call) and EXITS.search(dotted_text_of(one.func))
                    for one in ast.walk(last)
                ):
                    return True
    return False


@register_rule(
    Mistake(
        "AMP220",
        "penalty-scaled",
        "a gradient penalty or a meta step is computed from the gradients of a scaled loss",
        "it is too large by the loss scale, and changes with it",
        "multiply the gradients by `1 / scaler.get_scale()` before anything is computed with them",
        """
grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)  # AMP220
penalty = sum(grad.pow(2).sum() for grad in grads).sqrt()  # wrong
penalty = sum((grad / scaler.get_scale()).pow(2).sum() for grad in grads).sqrt()  # right
scaler.scale(loss + penalty).backward()
scaler.step(optimizer)
scaler.update()
""",
    ),
    needs=("create_graph", "caler", "autograd"),
)
def gradient_penalty_from_scaled_loss(module: LintModule) -> Iterator[Finding]:
    """A gradient penalty from gradients of a scaled loss, in a function that divides by no scale."""
    for call in module.calls_of_functions("torch.autograd.grad"):
        graph, outputs = argument(call, "create_graph"), argument(call, "outputs", 0)
        if not is_literal(graph, True) or outputs is None:
            continue
        scope = module.scope_of[call]
        values = scope.values.get(outputs.id, []) if isinstance(outputs, ast.Name) else [outputs]
        scaled = [
            value for value in values if module.kinds.kind_of_method_owner(value, "scale", scope) == "scaler"
        ]
        if len(scaled) == len(values) == 1 and not re.search(
            r"get_scale|inv_|/ *\w*scale", ast.unparse(scope.node)
        ):
            yield module.make_finding("AMP220", call, "the gradients of a scaled loss are scaled too")
