"""Rules about `amp.scale_loss`, and what happens to gradients in and after its block."""

import ast
import re
from collections.abc import Iterator, Mapping

from ampcompare.source.branches import (
    Facts,
    conditions_contradict,
    conditions_of_test,
    facts_with_conditions_of_test,
)
from ampcompare.source.lint.read.module import (
    Finding,
    LintModule,
    Mistake,
    Trace,
    dotted_text_of,
    events_after,
    events_before,
    register_rule,
    text_of_literal,
)
from ampcompare.source.lint.read.update_events import EventKind, TrainingEvent
from ampcompare.source.module import Scope
from ampcompare.source.syntax import FunctionNode, argument, is_literal, last_name, strip_star

EMPTIES = ("zero_", "detach_", "requires_grad_")
FLAGS = (ast.Name, ast.Attribute, ast.BoolOp, ast.UnaryOp, ast.Compare)  # values that another flag may have
# Questions whether an optimizer is one that Apex has wrapped.
ASKS_FOR_APEX = re.compile(r"FP16_Optimizer|clip_master_grads|_amp_stash|master_params")
FLAG = re.compile(r"[A-Za-z_][\w.]*")  # a plain name, which stays as it is
IN_TURN = re.compile(r"(?i)accum|micro|delay|update|sync|last|step|iter|round|skip")
OPTIMIZER_NAME = re.compile(r"(?i)opt")
LAST_PART = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")


@register_rule(
    Mistake(
        "AMP103",
        "clip-in-scale-loss",
        "gradients are clipped inside the `scale_loss` block, where they are still scaled",
        "the norm is too large by the loss scale: almost nothing is left of the gradients after unscaling",
        "clip `amp.master_params(optimizer)` after the block",
        """
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # AMP103  # wrong
torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # right
optimizer.step()
""",
        guard="clip-scaled",
    ),
    Mistake(
        "AMP105",
        "step-in-scale-loss",
        "`optimizer.step()` inside the `scale_loss` block",
        "the step uses scaled gradients; they are unscaled when the block ends, after the step",
        "step after the block",
        """
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
    optimizer.step()  # AMP105  # wrong
optimizer.step()  # right
""",
    ),
    Mistake(
        "AMP106",
        "backward-unscaled",
        "`backward()` is called on the loss inside `scale_loss`, not on the scaled loss",
        "the gradients are unscaled without having been scaled: they are too small by the loss scale",
        "call `backward()` on the name that `as` binds",
        """
with amp.scale_loss(loss, optimizer) as scaled_loss:  # wrong
with amp.scale_loss(loss, optimizer) as loss:  # right
    loss.backward()  # AMP106
optimizer.step()
""",
        fixable=True,
    ),
    needs=("scale_loss",),
)
def misuse_inside_scale_loss(module: LintModule) -> Iterator[Finding]:
    """Clipping, stepping, and the wrong loss, inside a `scale_loss` block."""
    for trace, _, event in module.events(EventKind.CLIP, EventKind.STEP, EventKind.BACKWARD):
        block = event.scale_loss_block()
        if block is None or block.call is None:
            continue
        if event.kind is not EventKind.BACKWARD:
            if any(
                other.scale_loss_block() is block for other in events_before(trace, event, EventKind.BACKWARD)
            ):
                shown = f"`{event.subject_name}` steps with gradients that are still scaled"
                code = "AMP105" if event.kind is EventKind.STEP else "AMP103"
                shown = (
                    shown
                    if event.kind is EventKind.STEP
                    else "the gradients are still scaled inside this block"
                )
                yield module.make_finding(code, event.call, shown)
        elif isinstance(event.call.func, ast.Attribute):
            loss = argument(block.call, "loss", 0)
            if loss is None or block.name == event.subject or event.scope is not module.scope_of[block.call]:
                continue
            if dotted_text_of(event.receiver) and dotted_text_of(event.receiver) == dotted_text_of(loss):
                bound = next(
                    item.optional_vars for item in block.node.items if item.context_expr is block.call
                )
                edits = (
                    () if bound is None else module.replacement_edits(event.receiver, dotted_text_of(bound))
                )
                yield module.make_finding(
                    "AMP106", event.call, f"`{dotted_text_of(loss)}` is not the scaled loss", edits
                )


@register_rule(
    Mistake(
        "AMP104",
        "clip-model-under-o2",
        "`model.parameters()` are clipped under opt level O2",
        "these are the fp16 copies; the optimizer uses the fp32 gradients, which stay unclipped",
        "clip `amp.master_params(optimizer)`",
        """
from apex import amp
from torch.nn.utils import clip_grad_norm_

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")  # wrong
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # right
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
clip_grad_norm_(model.parameters(), 1.0)  # AMP104
optimizer.step()
""",
        guard="clip-scaled",
    ),
    Mistake(
        "AMP117",
        "gradients-edited-under-o2",
        "gradients of `model.parameters()` are changed between backward pass and step, under opt level O2",
        "these are the fp16 copies; the optimizer uses the fp32 gradients, which stay unchanged",
        "change the gradients of `amp.master_params(optimizer)`",
        """
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
for parameter in model.parameters():  # wrong
for parameter in amp.master_params(optimizer):  # right
    parameter.grad.mul_(mask)  # AMP117
optimizer.step()
for parameter in model.parameters():  # right
    parameter.grad = None  # right
""",
    ),
    needs=("apex", "initialize"),
)
def misused_fp16_gradients_of_o2(module: LintModule) -> Iterator[Finding]:
    """Gradients of the fp16 copies that are clipped or changed under O2."""
    if module.opt_levels != {"O2"} or _may_lack_masters(module):
        return
    for trace, _, event in module.events(EventKind.GRADIENT, EventKind.CLIP):
        if _never_runs_with_initialize(module, event) or event.scale_loss_block() is not None:
            continue
        if event.kind is EventKind.GRADIENT:
            if _changes_gradient_before_step(module, trace, event):
                yield module.make_finding(
                    "AMP117", event.call, "this changes the gradient of an fp16 copy under O2"
                )
        elif event.subject.endswith(".parameters()"):
            if events_before(trace, event, EventKind.SCALE_LOSS) or _clips_model_of_other_method(
                module, event
            ):
                yield module.make_finding(
                    "AMP104", event.call, f"`{event.subject_name}` are the fp16 copies under O2"
                )


def _may_lack_masters(module: LintModule) -> bool:
    """Return whether an initialize may leave the fp16 parameters in the optimizer, without fp32 copies."""
    given = (argument(call, "master_weights", 7) for call in module.calls_of_functions("apex.amp.initialize"))
    return any(
        each is not None and not is_literal(each, None) and not is_literal(each, True) for each in given
    )


def _never_runs_with_initialize(module: LintModule, event: TrainingEvent) -> bool:
    """Return whether an event never runs where models are initialized: a flag guards the one or the other.

    Functions may know a flag by different names, such as `args.fp16` and `self.fp16`: the last part of it counts.
    """
    if any(not value and ASKS_FOR_APEX.search(key) for key, value in event.facts.items()):
        return True
    calls = [one for trace in module.traces for one in trace if one.kind is EventKind.INITIALIZE]
    here = _conditions_of_flags(module, event.facts, event.scope)
    return bool(calls) and all(
        conditions_contradict(here, _conditions_of_flags(module, _conditions_of_initialize(one), one.scope))
        for one in calls
    )


def _conditions_of_initialize(event: TrainingEvent) -> Facts:
    """Return the conditions of an `amp.initialize`, its `enabled=` among them."""
    enabled = argument(event.call, "enabled")
    if enabled is None or isinstance(enabled, ast.Constant):
        return event.facts
    return facts_with_conditions_of_test(event.facts, enabled, True)


def _conditions_of_flags(module: LintModule, facts: Facts, scope: Scope) -> Facts:
    """Return what facts say of flags, and of what these are assigned from, by the last part of their names."""
    found = dict(facts)
    for key, value in facts.items():
        values = module.values_of(key, scope) or []
        if len(values) == 1 and isinstance(value, bool) and isinstance(values[0], FLAGS):
            found |= conditions_of_test(values[0], value)
    return {LAST_PART.sub("", key): value for key, value in found.items()}


def _clips_model_of_other_method(module: LintModule, event: TrainingEvent) -> bool:
    """Return whether a class clips the parameters of a model that another of its methods gave to `amp.initialize`."""
    model = event.subject.removesuffix(".parameters()")
    calls = module.calls_of_functions("apex.amp.initialize")
    homes = [
        module.scope_of[call].owner
        for call in calls
        if dotted_text_of(argument(call, "models", 0) or call) == model
    ]
    return model.startswith("self.") and event.scope.owner is not None and event.scope.owner in homes


def _changes_gradient_before_step(module: LintModule, trace: Trace, event: TrainingEvent) -> bool:
    """Return whether the gradient of a model's parameter is changed between `scale_loss` and the step."""
    if isinstance(event.call, ast.Call):
        method = last_name(event.call.func)
        if not method.endswith("_") or method in EMPTIES:
            return False
    loop = event.loops[-1] if event.loops else None
    if not isinstance(loop, ast.For):
        return False
    source = last_name(loop.iter.func) if isinstance(loop.iter, ast.Call) else ""
    of_model = source in ("modules", "named_modules") or module.kinds.model_of_parameters(
        loop.iter, event.scope
    )
    before, after = (
        events_before(trace, event, EventKind.SCALE_LOSS),
        events_after(trace, event, EventKind.STEP),
    )
    return bool(of_model and before and after)


@register_rule(
    Mistake(
        "AMP107",
        "scale-loss-without-with",
        "`amp.scale_loss` is called without `with`",
        "it returns a context manager: the loss is not scaled and the gradients are not unscaled",
        "write `with amp.scale_loss(loss, optimizer) as scaled_loss:`",
        """
scaled_loss = amp.scale_loss(loss, optimizer)  # AMP107  # wrong
scaled_loss.backward()  # wrong
block = amp.scale_loss(loss, optimizer)  # right
with block as scaled_loss:  # right
    scaled_loss.backward()  # right
""",
    ),
    needs=("apex", "scale_loss"),
)
def scale_loss_without_with(module: LintModule) -> Iterator[Finding]:
    """`scale_loss` whose result is used as if it were the loss."""
    for call in module.calls_of_functions("apex.amp.scale_loss"):
        parent = module.parents[call]
        used = isinstance(parent, (ast.Attribute, ast.Expr))
        if isinstance(parent, ast.Assign) and parent.value is call:
            name = dotted_text_of(parent.targets[0])
            uses = [dotted_text_of(other.func) for other in module.calls]
            used = bool(name) and f"{name}.backward" in uses
            entered = any(
                isinstance(node, ast.withitem) and dotted_text_of(node.context_expr) == name
                for node in ast.walk(module.tree)
            )
            used = used and not entered
        if used:
            yield module.make_finding("AMP107", call, "`amp.scale_loss` is not entered by `with`")


@register_rule(
    Mistake(
        "AMP125",
        "scaled-by-another-optimizer",
        "an optimizer steps with gradients of a loss whose `scale_loss` does not name it",
        "Apex unscales the gradients of the named optimizers alone: this one steps too far by the loss scale",
        "name every optimizer whose weights a loss reaches: `amp.scale_loss(loss, [optimizer_a, optimizer_b])`",
        """
for batch in loader:
    optimizer_a.zero_grad()
    optimizer_b.zero_grad()
    with amp.scale_loss(loss, optimizer_a) as scaled_loss:  # wrong
    with amp.scale_loss(loss, [optimizer_a, optimizer_b]) as scaled_loss:  # right
        scaled_loss.backward()
    optimizer_a.step()
    optimizer_b.step()  # AMP125
""",
    ),
    needs=("apex", "scale_loss", "step"),
)
def steps_with_foreign_scaled_gradients(module: LintModule) -> Iterator[Finding]:
    """Steps with gradients that a `scale_loss` of other optimizers has left scaled."""
    for trace in module.traces:
        models = {
            event.subject: {name.partition(".")[0] for name in event.sources}
            for event in trace
            if event.kind is EventKind.NEW_OPTIMIZER
        }
        for index, step in enumerate(trace):
            if step.kind is EventKind.STEP and step.subject and "[" not in step.subject:
                passes = _pending_scale_loss_blocks(trace[:index], step)
                named = [names for one in passes if (names := _optimizers_of_scale_loss(one)) is not None]
                if len(named) < len(passes):
                    continue  # a name may hold several
                others = [one for one, names in zip(passes, named, strict=True) if step.subject not in names]
                steps = {one.subject for one in trace if one.kind is EventKind.STEP}
                if len(others) < len(passes):
                    others = [one for one in others if _shares_graph_with_step(trace, one, step, models)]
                if others and all(name in steps for names in named for name in names):
                    shown = (
                        f"`{step.subject_name}` gets gradients of line {others[0].call.lineno}, which does not "
                        "name it"
                    )
                    yield module.make_finding("AMP125", step.call, shown)


def _pending_scale_loss_blocks(earlier_events: Trace, step: TrainingEvent) -> list[TrainingEvent]:
    """Return the `scale_loss` blocks whose gradients an optimizer may find at its step; none where other passes run."""
    found: list[TrainingEvent] = []
    for other in reversed([one for one in earlier_events if one.may_share_run_with(step)]):
        outside = other.loops[: len(step.loops)] != step.loops
        own = other.kind in (EventKind.ZERO_GRAD, EventKind.STEP) and other.subject == step.subject
        of_model = other.kind is EventKind.ZERO_GRAD and not OPTIMIZER_NAME.search(other.subject_name)
        if other.kind in (EventKind.FOREIGN_BACKWARD, EventKind.OPAQUE):
            return []
        if other.kind is EventKind.BACKWARD and other.scale_loss_block() is None:
            return []
        if outside or own or of_model:
            break
        if other.kind is EventKind.SCALE_LOSS:
            found.append(other)
    return found


def _optimizers_of_scale_loss(event: TrainingEvent) -> set[str] | None:
    """Return the optimizers that a `scale_loss` names, by their own names; None where a name may hold several."""
    node = argument(event.call, "optimizers", 1)
    if isinstance(node, (ast.List, ast.Tuple)):
        names = {one.id for one in node.elts if isinstance(one, ast.Name)}
        return names if len(names) == len(node.elts) else None
    return {event.target} if event.target and "[" not in event.target else None


def _shares_graph_with_step(
    trace: Trace, block: TrainingEvent, step: TrainingEvent, models: Mapping[str, set[str]]
) -> bool:
    """Return whether a loss that names other optimizers surely reaches weights of the one that steps.

    Both hold parts of one model, and the graph of the loss is kept for the loss of the other.
    """
    kept = [
        one
        for one in trace
        if one.kind is EventKind.BACKWARD and is_literal(argument(one.call, "retain_graph", 1), True)
    ]
    mine = models.get(step.subject, set())
    return bool(kept) and any(
        mine & models.get(name, set()) for name in _optimizers_of_scale_loss(block) or ()
    )


@register_rule(
    Mistake(
        "AMP118",
        "scaled-loss-logged",
        "the scaled loss is read as a number",
        "the curve follows the loss scale, not the loss",
        "log the loss itself",
        """
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
total += scaled_loss.item()  # AMP118  # wrong
total += loss.item()  # right
""",
    ),
    needs=("apex", "scale_loss"),
)
def scaled_loss_read(module: LintModule) -> Iterator[Finding]:
    """Numbers that are read from a scaled loss."""
    for call in module.calls:
        node: ast.expr | None = None
        if isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args:
            node = call.func.value
        elif dotted_text_of(call.func) == "float" and len(call.args) == 1:
            node = call.args[0]
        parent = module.parents[call]
        if not isinstance(node, ast.Name) or (
            isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Div, ast.FloorDiv))
        ):
            continue
        for value in _values_of_name_at(module, call, node.id):
            inner = strip_star(value)
            if not isinstance(inner, ast.Call) or _is_labelled_as_scaled(parent):
                continue
            if module.resolve(inner.func) == "apex.amp.scale_loss":
                yield module.make_finding("AMP118", call, f"`{node.id}` follows the loss scale")


def _values_of_name_at(module: LintModule, call: ast.Call, name: str) -> list[ast.expr]:
    """Return what a name holds at a call: its only value, or the nearest above it whose block the call stands in."""
    values = module.scope_of[call].values.get(name, [])
    if len(values) < 2:
        return values
    above = [value for value in map(strip_star, values) if value.lineno < call.lineno]
    nearest = max(above, key=lambda value: value.lineno, default=None)
    if nearest is None:
        return []
    return [nearest] if module.parent(module.statement_around(nearest)) in module.ancestors(call) else []


def _is_labelled_as_scaled(parent: ast.AST) -> bool:
    """Return whether a number goes into a call that names it the scaled loss, as in `log("scaled_loss", ...)`."""
    texts = [text_of_literal(one) or "" for one in parent.args] if isinstance(parent, ast.Call) else []
    return any("scaled" in text.lower() for text in texts)


@register_rule(
    Mistake(
        "AMP126",
        "scale-loss-without-step",
        "one branch scales the loss and steps, another scales it and never steps, nor does what calls it",
        "in that branch nothing is ever trained, without an error",
        "step in each branch, or once below all of them",
        """
def update(loss):
    optimizer.zero_grad()
    if distributed:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()  # wrong
    else:
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # AMP126
            scaled_loss.backward()
    optimizer.step()  # right


for batch in loader:
    update(model(batch))
""",
    ),
    needs=("apex", "scale_loss", "step"),
)
def branch_scaling_loss_without_step(module: LintModule) -> Iterator[Finding]:
    """A branch with `scale_loss` but without a step, next to one that steps the same optimizer."""
    for call in module.calls_of_functions("apex.amp.scale_loss"):
        met = [(trace, event) for trace in module.traces for event in trace if event.call is call]
        met = [(trace, event) for trace, event in met if event.kind is EventKind.SCALE_LOSS]
        if (
            not met
            or argument(call, "delay_unscale") is not None
            or not _is_called_in_module_alone(module, call)
        ):
            continue
        if any(_may_lead_to_step(trace, event) for trace, event in met):
            continue
        if any(_does_other_branch_step_optimizer(trace, event) for trace, event in met):
            shown = f"nothing steps `{met[0][1].target.rpartition(':')[2]}` here, as another branch does"
            yield module.make_finding("AMP126", call, shown)


def _is_called_in_module_alone(module: LintModule, call: ast.Call) -> bool:
    """Return whether all that calls the function of a call is in this module, and something does."""
    scope = module.scope_of[call]
    if not isinstance(scope.node, FunctionNode):
        return isinstance(scope.node, ast.Module)
    calls, complete = module.index.possible_calls_and_completeness(scope)
    return complete and bool(calls)


def _may_lead_to_step(trace: Trace, block: TrainingEvent) -> bool:
    """Return whether a step, or something that may step, follows a block, in the next round of its loop too."""
    kinds = (EventKind.STEP, EventKind.SCALER_STEP, EventKind.OPAQUE, EventKind.FOREIGN_BACKWARD)
    return any(
        one.kind in kinds
        and one.may_share_run_with(block)
        and (trace.index(one) > trace.index(block) or one.loops)
        for one in trace
    )


def _does_other_branch_step_optimizer(trace: Trace, block: TrainingEvent) -> bool:
    """Return whether another branch, by a flag that stays, scales a loss and steps the optimizer of a block."""
    for step in trace:
        if step.kind is not EventKind.STEP or step.subject != block.target or step.may_share_run_with(block):
            continue
        decided = [
            key for key, value in block.facts.items() if key in step.facts and step.facts[key] != value
        ]
        if decided and all(FLAG.fullmatch(key) and not IN_TURN.search(key) for key in decided):
            if any(one.kind is EventKind.SCALE_LOSS and one.may_share_run_with(step) for one in trace):
                return True
    return False
