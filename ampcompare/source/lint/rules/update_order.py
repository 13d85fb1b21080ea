"""Rules about the order within an update, whatever scales the loss: accumulation, clipping, schedule, zero_grad."""

import ast
import re
from collections.abc import Iterator

from ampcompare.source.branches import Facts, expression_of_condition, known_conditions_at
from ampcompare.source.lint.read.module import (
    Finding,
    LintModule,
    Mistake,
    Trace,
    dotted_text_of,
    events_after,
    events_before,
    events_between,
    first_event_after,
    last_event_before,
    register_rule,
)
from ampcompare.source.lint.read.update_events import FINITE, EventKind, TrainingEvent, name_in_source
from ampcompare.source.module import Scope, flatten_conditional_values
from ampcompare.source.syntax import last_name
from ampcompare.source.torch_methods import is_gradient

STEPS = (EventKind.STEP, EventKind.SCALER_STEP)
LIBRARIES = ("torch.", "transformers.", "optim.", "lr_scheduler.")
CLEARING = re.compile(r"(?i)zero_?grad|(?:clear|reset|clean)_?grad|^zero_$|foreach_zero")
# The `zero_grad` events of a trace, by the call: a function that clears may be called for several optimizers.
Cleared = dict[int, list[TrainingEvent]]
SAYS_SO = re.compile(r"accum|micro|chunk|split|sub_?batch", re.IGNORECASE)


def _optimizer_name(event: TrainingEvent) -> str:
    return event.target if event.kind is EventKind.SCALER_STEP else event.subject


def _accumulation_condition_text(event: TrainingEvent, other: TrainingEvent) -> str:
    """Return the condition on a remainder under which one event runs and another does not, if there is one."""
    return next((key for key in event.facts if "%" in key and key not in other.facts), "")


@register_rule(
    Mistake(
        "AMP209",
        "update-every-microbatch",
        "`scaler.update()` runs for every micro-batch, and `scaler.step` only for some",
        "an update without a step before it is an AssertionError",
        "call `scaler.update()` next to `scaler.step`, under the same condition",
        """
for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()  # right
        optimizer.zero_grad()
    scaler.update()  # AMP209  # wrong
""",
    ),
    Mistake(
        "AMP210",
        "unscale-every-microbatch",
        "`unscale_` runs for every micro-batch, and `scaler.update` only for some",
        "the second `unscale_` before an update raises a RuntimeError",
        "call `scaler.unscale_(optimizer)` once, right before the step",
        """
for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    scaler.unscale_(optimizer)  # AMP210  # wrong
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)  # right
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    Mistake(
        "AMP211",
        "clip-every-microbatch",
        "gradients are clipped after every micro-batch, and the optimizer steps only after some",
        "partial sums are clipped, the first ones several times",
        "clip once, right before the step",
        """
from torch.nn.utils import clip_grad_norm_

for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    clip_grad_norm_(model.parameters(), 1.0)  # AMP211  # wrong
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)  # right
        clip_grad_norm_(model.parameters(), 1.0)  # right
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    needs=("caler|apex", "backward", "step"),
)
def update_calls_at_every_microbatch(module: LintModule) -> Iterator[Finding]:
    """Calls that run for each micro-batch of an accumulation and belong to the step."""
    for trace in module.amp_traces:
        for step in trace:
            if not _is_step_after_accumulation(trace, step):
                continue
            for event in trace:
                condition = (
                    _accumulation_condition_text(step, event)
                    if event.loops == step.loops and event.may_share_run_with(step)
                    else ""
                )
                if (
                    not condition
                    or any("%" in key for key in event.facts)
                    or _other_step_runs_as_often(trace, event)
                ):
                    continue
                if code := _accumulation_rule_code_broken_by(trace, event, step):
                    yield module.make_finding(code, event.call, f"the step runs only if `{condition}`")


def _is_step_after_accumulation(trace: Trace, step: TrainingEvent) -> bool:
    """Return whether an event is a step that runs for some micro-batches of a loop with a backward pass for each."""
    loop = step.loops[-1:]
    if step.kind not in STEPS or not loop or not any("%" in key for key in step.facts):
        return False
    passes = (other for other in trace if other.kind is EventKind.BACKWARD and other.loops[-1:] == loop)
    # The pass itself must run for each micro-batch: `if i % 2: train the generator` accumulates nothing.
    return any(
        other.may_share_run_with(step) and _accumulation_condition_text(step, other) for other in passes
    )


def _accumulation_rule_code_broken_by(trace: Trace, event: TrainingEvent, step: TrainingEvent) -> str:
    """Return the code of a rule that an event breaks as it runs more often than a step; "" if none."""
    if event.kind is EventKind.CLIP:
        return "AMP211"
    if step.kind is not EventKind.SCALER_STEP:
        return ""
    if event.kind is EventKind.UPDATE and event.subject == step.subject:
        return "AMP209"
    unscales = event.kind is EventKind.UNSCALE and event.target == step.target
    updates = [other for other in trace if other.kind is EventKind.UPDATE and other.loops == event.loops]
    return "AMP210" if unscales and all(any("%" in key for key in other.facts) for other in updates) else ""


def _other_step_runs_as_often(trace: Trace, event: TrainingEvent) -> bool:
    """Return whether another step runs as often as a call does, which then belongs to that one."""
    for other in trace:
        is_conditional = any("%" in key for key in other.facts)
        if (
            other.kind in STEPS
            and other.loops == event.loops
            and other.may_share_run_with(event)
            and not is_conditional
        ):
            return True
    return False


@register_rule(
    Mistake(
        "AMP212",
        "clip-after-step",
        "gradients are clipped after the step",
        "clipping has no effect: the step has used the gradients already",
        "clip before the step",
        """
from torch.nn.utils import clip_grad_norm_

for batch in loader:
    optimizer.zero_grad()  # wrong
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)  # wrong
    scaler.step(opt_a)  # right
    scaler.unscale_(opt_b)  # right
    clip_grad_norm_(other.parameters(), 1.0)  # right
    scaler.step(opt_b)  # right
    scaler.update()
    clip_grad_norm_(model.parameters(), 1.0)  # AMP212  # wrong
    opt_a.zero_grad()  # right
    opt_b.zero_grad()  # right
""",
    ),
    needs=("clip_grad", "caler|apex", "backward", "step"),
)
def clip_after_step(module: LintModule) -> Iterator[Finding]:
    """Clipping between a step and the next `zero_grad` or backward pass."""
    for trace, _, event in module.events(EventKind.CLIP, with_amp=True):
        before = events_before(
            trace, event, *STEPS, EventKind.BACKWARD, EventKind.FOREIGN_BACKWARD, EventKind.UNSCALE
        )
        if not before or before[-1].kind not in STEPS or before[-1].loops != event.loops:
            continue
        if events_after(trace, event, *STEPS, EventKind.UNSCALE) or all(
            one.kind is not EventKind.BACKWARD for one in before
        ):
            continue
        shown = (
            f"`{name_in_source(_optimizer_name(before[-1]))}` has stepped in line {before[-1].call.lineno}"
        )
        yield module.make_finding("AMP212", event.call, shown)


@register_rule(
    Mistake(
        "AMP213",
        "scheduler-first",
        "`scheduler.step()` runs before `optimizer.step()`",
        "the first learning rate is never used, and every update uses that of the next one",
        "call `optimizer.step()` (or `scaler.step(optimizer)`) first, then `scheduler.step()`",
        """
for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scheduler.step()  # AMP213  # wrong
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # right
""",
    ),
    needs=("caler|apex", "backward", "step"),
)
def scheduler_before_step(module: LintModule) -> Iterator[Finding]:
    """A scheduler that is called between backward pass and step."""
    own = {scope.node.name for scope in module.scopes if isinstance(scope.node, ast.ClassDef)}
    for trace, _, event in module.events(EventKind.SCHEDULE, with_amp=True):
        if not event.loops:
            continue
        last = last_event_before(trace, event, *STEPS, EventKind.BACKWARD)
        following = first_event_after(
            trace, event, *STEPS, EventKind.BACKWARD, EventKind.SCHEDULE, EventKind.OPAQUE
        )
        if (
            last is None
            or following is None
            or last.kind is not EventKind.BACKWARD
            or following.kind not in STEPS
        ):
            continue
        if (
            last.loops != event.loops
            or following.loops != event.loops
            or _is_scheduler_of_own_class(module, event, own)
        ):
            continue
        shown = (
            f"`{name_in_source(_optimizer_name(following))}` steps after it, in line {following.call.lineno}"
        )
        yield module.make_finding("AMP213", event.call, shown)


def _is_scheduler_of_own_class(module: LintModule, event: TrainingEvent, classes: set[str]) -> bool:
    """Return whether a scheduler is of a class outside torch, which may set the first rate in its first step."""
    last = dotted_text_of(event.receiver).rpartition(".")[2]
    for scope in module.scopes:
        for name, values in scope.values.items():
            if name.rpartition(".")[2] != last:
                continue
            for value in flatten_conditional_values(values):
                if not isinstance(value, ast.Call):
                    continue
                made = module.resolve(value.func, scope) or dotted_text_of(value.func)
                kind = made.rpartition(".")[2]
                if kind in classes or (kind[:1].isupper() and not made.startswith(LIBRARIES)):
                    return True
    return False


@register_rule(
    Mistake(
        "AMP214",
        "zero-grad-before-step",
        "`zero_grad()` between backward pass and step",
        "the step has no gradients to apply: nothing is trained",
        "call `zero_grad()` after the step or before the backward pass",
        """
for batch in loader:
    optimizer.zero_grad()  # right
    scaler.scale(model(batch)).backward()
    optimizer.zero_grad()  # AMP214  # wrong
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    needs=("zero_grad", "caler|apex", "backward", "step"),
)
def zero_grad_before_step(module: LintModule) -> Iterator[Finding]:
    """Gradients that are cleared between backward pass and step."""
    for trace, _, event in module.events(EventKind.ZERO_GRAD, with_amp=True):
        if module.kinds.kind_of_object(event.receiver, event.scope) != "optimizer":
            continue
        relevant = (*STEPS, EventKind.BACKWARD, EventKind.FOREIGN_BACKWARD, EventKind.OPAQUE)
        last, after = last_event_before(trace, event, *relevant), first_event_after(trace, event, *relevant)
        if last is None or after is None or last.kind is not EventKind.BACKWARD or after.kind not in STEPS:
            continue
        if any(FINITE.search(key) for key in event.facts):
            continue  # gradients that are not finite are dropped on purpose
        if (
            last.loops == event.loops == after.loops
            and _optimizer_name(after) == event.subject
            and "[" not in event.subject
        ):
            shown = f"`{name_in_source(event.subject)}` steps in line {after.call.lineno} without gradients"
            yield module.make_finding("AMP214", event.call, shown)


@register_rule(
    Mistake(
        "AMP215",
        "zero-grad-missing",
        "a loop steps with scaled gradients that nothing clears: anywhere, in its branch, or of this optimizer",
        "gradients add up over all steps; after one overflow they stay infinite and every step is skipped",
        "call `optimizer.zero_grad()` after every step, skipped or not",
        """
for batch in loader:
    for parameter in model.parameters():  # right
        parameter.grad = None  # right
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)  # AMP215
    scaler.update()
""",
        guard="gradients-kept",
    ),
    needs=("caler|apex", "backward", "step"),
)
def zero_grad_missing(module: LintModule) -> Iterator[Finding]:
    """A loop of passes and steps whose gradients are cleared nowhere, or only in another branch or of others."""
    if not module.amp_traces or module.code_mentions_pattern("ZeRO"):
        return
    clearing = [node for node in module.nodes if _may_clear_gradients(node)]
    for trace in module.amp_traces:
        cleared: Cleared = {}
        for event in trace:
            if event.kind is EventKind.ZERO_GRAD:
                cleared.setdefault(id(event.call), []).append(event)
        scopes = {event.scope for event in trace}
        steps = {_optimizer_name(event) for event in trace if event.kind in STEPS}
        for event in trace:
            optimizer = _optimizer_name(event)
            others = steps - {optimizer}
            seen = [one for some in cleared.values() for one in some if one.subject not in others]
            # A function of one step may be called by a file that clears, unless it does so itself in another branch.
            if event.kind not in STEPS or not (event.loops or seen):
                continue
            if not _step_follows_scaled_pass(trace, event):
                continue
            if not any(
                _node_may_clear_for_step(module, event, node, cleared, others, scopes) for node in clearing
            ):
                where = " in this branch" if seen or len(cleared) < len(clearing) else ""
                shown = f"the gradients of `{name_in_source(optimizer)}` are never cleared{where}"
                yield module.make_finding("AMP215", event.call, shown)


def _step_follows_scaled_pass(trace: Trace, step: TrainingEvent) -> bool:
    """Return whether a step is next to a backward pass whose loss is scaled for it, and nothing else may step."""
    passes = (one for one in trace[: trace.index(step)] if one.kind is EventKind.BACKWARD)
    known = [one for one in passes if one.loops == step.loops and _scales_loss_for_step(one, step)]
    is_passed_on = any(one.kind is EventKind.OPAQUE and one.subject == _optimizer_name(step) for one in trace)
    return bool(known) and not is_passed_on and known[-1].scope is step.scope


def _node_may_clear_for_step(
    module: LintModule,
    step: TrainingEvent,
    node: ast.AST,
    cleared: Cleared,
    other_optimizers: set[str],
    scopes: set[Scope],
) -> bool:
    """Return whether a node that clears gradients may clear those of a step.

    Args:
        module: of both.
        step: of an optimizer.
        node: clears gradients, by `_may_clear_gradients`.
        cleared: what the trace of the step has met.
        other_optimizers: optimizers that step in the trace too.
        scopes: those of the trace.
    """
    if id(node) in cleared:
        return any(
            _event_may_clear_for_step(module, step, one.subject in other_optimizers, one.facts)
            for one in cleared[id(node)]
        )
    return _unseen_node_may_clear_for_step(module, step, node, scopes)


def _scales_loss_for_step(backward: TrainingEvent, step: TrainingEvent) -> bool:
    """Return whether the loss of a backward pass is scaled, by Apex or the scaler that makes a step."""
    if step.kind is EventKind.SCALER_STEP:
        return backward.scaler == step.subject
    return backward.scale_loss_block() is not None and backward.may_share_run_with(step)


def _may_clear_gradients(node: ast.AST) -> bool:
    """Return whether a node clears gradients, or may do so."""
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        return bool(CLEARING.search(name)) or any(one.arg == "set_to_none" for one in node.keywords)
    targets = node.targets if isinstance(node, ast.Assign) else [node] if isinstance(node, ast.Delete) else []
    return any(is_gradient(one) for target in targets for one in ast.walk(target))


def _event_may_clear_for_step(
    module: LintModule, event: TrainingEvent, of_others: bool, facts: Facts
) -> bool:
    """Return whether gradients may be cleared for a step: not those of others, nor where the step never runs."""
    if of_others:
        return False
    return not any(
        key in event.facts
        and event.facts[key] != value
        and _is_condition_constant_in_loop(module, key, event)
        for key, value in facts.items()
    )


def _unseen_node_may_clear_for_step(
    module: LintModule, event: TrainingEvent, node: ast.AST, scopes: set[Scope]
) -> bool:
    """Return whether gradients may be cleared for a step by what its trace has not met.

    A function that trains by itself clears its own gradients.
    """
    home = module.scope_of[node]
    if home is event.scope:
        return _event_may_clear_for_step(module, event, False, known_conditions_at(module, node))
    trains = any(module.scope_of[call] is home for call, _ in module.method_calls("backward"))
    return home in scopes or not trains


def _is_condition_constant_in_loop(module: LintModule, key: str, step: TrainingEvent) -> bool:
    """Return whether a condition has one value for all steps: nothing in their loop changes the names that it has."""
    test = expression_of_condition(key)
    if test is None:
        return False
    names = {dotted_text_of(one) for one in ast.walk(test) if isinstance(one, (ast.Name, ast.Attribute))}
    if any(isinstance(one, (ast.Call, ast.Mod)) for one in ast.walk(test)):
        return False
    if not step.loops and not all(name.startswith("self") or name in module.top.values for name in names):
        return False
    loop = step.loops[0] if step.loops else step.scope.node
    stored = (one for one in ast.walk(loop) if isinstance(getattr(one, "ctx", None), (ast.Store, ast.Del)))
    kept = [one for one in names if one.startswith("self.")]
    once = all(
        len(values) < 2 for scope in module.scopes for name, values in scope.values.items() if name in kept
    )
    return once and not names & {dotted_text_of(one) for one in stored}


@register_rule(
    Mistake(
        "AMP217",
        "loss-undivided",
        "gradients of several mean losses add up before a step without being divided by their number",
        "the gradients are too large by that factor: a larger effective learning rate, and clipping and overflow much "
        "sooner",
        "divide the loss by the number of accumulated passes before `backward()`",
        """
for i, batch in enumerate(loader):
    loss = criterion(model(batch))  # wrong
    loss = criterion(model(batch)) / accumulation_steps  # right
    scaler.scale(loss).backward()  # AMP217
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    needs=("caler|apex", "backward", "step"),
)
def accumulated_loss_undivided(module: LintModule) -> Iterator[Finding]:
    """Accumulation over a number that divides nothing."""
    for trace, index, step in module.events(*STEPS, with_amp=True):
        if not step.loops:
            continue
        key = next((key for key in step.facts if "%" in key and SAYS_SO.search(key)), "")
        divisor = key.partition("%")[2].strip(" )").partition(" ")[0].rstrip(")")
        word = divisor.rpartition(".")[2].strip("'\"]")
        if not word.isidentifier() or _may_divide_by_number(module, word):
            continue
        passes = [
            other
            for other in trace[:index]
            if other.kind is EventKind.BACKWARD and other.loops == step.loops and key not in other.facts
        ]
        if len(passes) == 1 and not events_between(trace, passes[0], step, EventKind.BACKWARD):
            shown = f"nothing is divided by `{divisor}`, the number of passes that add up"
            yield module.make_finding("AMP217", passes[0].call, shown)


def _may_divide_by_number(module: LintModule, word: str) -> bool:
    """Return whether anything may be divided by a number of this name, or by one that follows from it."""
    divided = rf"(/=?|\bdiv_?\(|\bmul_?\()\s*[^\n]*\b\w*(?:{re.escape(word)}|accum|num_micro)\w*"
    return module.code_mentions_pattern(rf"(?i){divided}|1\.?0?\s*/|reduction\s*=\s*.sum|\.sum\(")
