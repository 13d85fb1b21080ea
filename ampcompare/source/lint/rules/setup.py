"""Rules about a GradScaler: what it is built for, where, and what it steps."""

import ast
import re
from collections.abc import Iterator, Sequence

from ampcompare.source.amp_names import AUTOCASTS
from ampcompare.source.index import ProjectFunction, own_nodes_of_scope
from ampcompare.source.lint.read.module import (
    Finding,
    LintModule,
    Mistake,
    dotted_text_of,
    events_between,
    is_disabled_by_literal,
    register_rule,
)
from ampcompare.source.lint.read.update_events import EventKind, TrainingEvent, name_in_source
from ampcompare.source.syntax import ForNode, argument, is_literal, names_bound_in

TRIALS = re.compile(r"fold|trial|run|seed|config|model|param|stage|client|dtype|device", re.IGNORECASE)


@register_rule(
    Mistake(
        "AMP223",
        "scaler-with-bf16",
        "a GradScaler is used although autocast uses bfloat16",
        "bf16 has the range of fp32: scaling has no benefit, and steps may be skipped",
        "leave the scaler out, or build it with `enabled=False`",
        """
import torch

scaler = torch.amp.GradScaler("cuda")  # AMP223  # wrong
scaler = torch.amp.GradScaler("cuda", enabled=False)  # right
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(batch)
""",
    ),
    needs=("bfloat16", "caler", "autocast"),
)
def scaler_with_bf16(module: LintModule) -> Iterator[Finding]:
    """A scaler that is always on, where each autocast is bf16 by a literal."""
    casts = [
        call for call in module.calls_of_functions(*AUTOCASTS) if not _is_autocast_literally_off(module, call)
    ]
    kinds = {_autocast_dtype(module, call) for call in casts}
    if kinds != {"torch.bfloat16"} or module.code_mentions_pattern(r"float16\b(?<!bfloat16)|\bhalf\b|fp16"):
        return
    for call in module.calls_making_scalers:
        choice = isinstance(module.parents[call], (ast.IfExp, ast.BoolOp, ast.Return))
        enabled = argument(call, "enabled")
        given = [_argument_node(module, cast, "enabled") for cast in casts]
        switches = {"" if one is None else ast.unparse(one) for one in given}
        # A scaler with the switch of each autocast is on where these are.
        is_on = enabled is None or switches == {ast.unparse(enabled)}
        if is_on and not choice and not module.is_under_if(call):
            yield module.make_finding("AMP223", call, "each autocast of this module has dtype bfloat16")


def _autocast_dtype(module: LintModule, call: ast.Call) -> str:
    position = 0 if module.resolve(call.func) == "torch.cpu.amp.autocast" else 1
    value = _argument_node(module, call, "dtype", position)
    return "" if value is None else module.resolve(value) or "unknown"


def _is_autocast_literally_off(module: LintModule, call: ast.Call) -> bool:
    position = None if module.resolve(call.func) in ("torch.autocast", "torch.amp.autocast") else 0
    return is_literal(argument(call, "enabled", position), False)


def _argument_node(
    module: LintModule, call: ast.Call, name: str, position: int | None = None
) -> ast.expr | None:
    """Return the value of an argument, also one of a dict that is passed as `**` and written out in the module."""
    value = argument(call, name, position)
    for spread in (one.value for one in call.keywords if one.arg is None):
        if value is None:
            value = next(
                (
                    found
                    for one in _dicts_of_expression(module, spread)
                    if (found := _dict_entry(one, name)) is not None
                ),
                None,
            )
    return value


def _dicts_of_expression(module: LintModule, node: ast.expr) -> list[ast.expr]:
    """Return the dicts that an expression is: what a name holds, or what a function of the module returns."""
    scope = module.scope_of[node]
    if isinstance(node, (ast.Name, ast.Attribute)):
        return module.values_of(dotted_text_of(node), scope) or []
    if isinstance(node, ast.Call):
        found = module.index.callee(node, scope)
        if isinstance(found, ProjectFunction) and found.module is module:
            return [
                one.value
                for one in own_nodes_of_scope(found.scope)
                if isinstance(one, ast.Return) and one.value is not None
            ]
    return [node]


def _dict_entry(node: ast.expr, name: str) -> ast.expr | None:
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return next((value for key, value in pairs if is_literal(key, name)), None)
    return (
        argument(node, name) if isinstance(node, ast.Call) and dotted_text_of(node.func) == "dict" else None
    )


@register_rule(
    Mistake(
        "AMP225",
        "scaler-in-loop",
        "a GradScaler is built for every step",
        "the loss scale starts from its initial value at each step and never adapts",
        "build it once, before the loop",
        """
import torch

for batch in loader:  # wrong
for fold in folds:  # right
    scaler = torch.amp.GradScaler("cuda")  # AMP225
    scaler.scale(model(batch)).backward()  # wrong
    scaler.step(optimizer)  # wrong
    scaler.update()  # wrong
    optimizer.zero_grad()  # wrong
    for batch in fold:  # right
        scaler.scale(model(batch)).backward()  # right
        scaler.step(optimizer)  # right
        scaler.update()  # right
        optimizer.zero_grad()  # right
""",
    ),
    needs=("caler", "backward"),
)
def scaler_in_loop(module: LintModule) -> Iterator[Finding]:
    """A scaler that is built in the loop of its own steps."""
    for trace, index, event in module.events(EventKind.NEW_SCALER):
        if not event.loops or not event.subject or is_disabled_by_literal(event.call):
            continue  # one that is off has no scale that it could forget
        passes = (
            one
            for one in trace[index + 1 :]
            if one.kind is EventKind.BACKWARD and one.scaler == event.subject
        )
        if any(one.loops == event.loops for one in passes) and _may_run_in_every_round(event):
            yield module.make_finding("AMP225", event.call, f"`{event.subject_name}` is new for each step")


def _may_run_in_every_round(event: TrainingEvent) -> bool:
    """Return whether a loop is over no trials, and no test that it changes, such as `if epoch == 0:`, decides."""
    loop = event.loops[-1]
    head = f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}" if isinstance(loop, ForNode) else ""
    return names_bound_in(loop).isdisjoint(
        re.findall(r"[\w.]+", " ".join(event.facts))
    ) and not TRIALS.search(head)


@register_rule(
    Mistake(
        "AMP227",
        "step-with-closure",
        "`scaler.step` is called with a closure",
        "it raises a RuntimeError: a GradScaler does not support optimizers that evaluate the loss again",
        "call the closure yourself before the step, or train this optimizer in fp32",
        """
def closure():  # wrong
    return model(batch)  # wrong
optimizer.step(closure)  # right


scaler.scale(closure()).backward()  # wrong
scaler.step(optimizer, closure)  # AMP227  # wrong
scaler.update()  # wrong
""",
    ),
    needs=("caler", "step"),
)
def scaler_step_with_closure(module: LintModule) -> Iterator[Finding]:
    """A closure for a step with a scaler."""
    for _, _, event in module.events(EventKind.SCALER_STEP):
        value = argument(event.call, "closure", 1)
        if value is not None and module.may_be_own_function(value):
            yield module.make_finding("AMP227", event.call, "a step with a scaler takes no closure")


@register_rule(
    Mistake(
        "AMP238",
        "scaler-state-discarded",
        "the state of a GradScaler is loaded, and then a new GradScaler takes its place",
        "training starts with the initial loss scale: a burst of skipped steps after every resume",
        "build the scaler once, load its state, and train with that one",
        """
import torch

scaler = torch.amp.GradScaler("cuda")
scaler.load_state_dict(checkpoint["scaler"])
scaler = torch.amp.GradScaler("cuda")  # AMP238  # wrong
for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    needs=("caler", "load_state_dict"),
)
def loaded_scaler_state_discarded(module: LintModule) -> Iterator[Finding]:
    """A new scaler in the place of one whose state was loaded."""
    loads = [event for trace in module.traces for event in trace if _loads_state_of_scaler(module, event)]
    for trace, index, event in module.events(EventKind.NEW_SCALER):
        if not event.subject or is_disabled_by_literal(event.call):
            continue
        later = [
            other
            for other in trace[index + 1 :]
            if other.subject == event.subject and other.may_share_run_with(event)
        ]
        if any(_loads_state_of_scaler(module, other) for other in later):
            continue
        before = [
            other
            for other in trace[:index]
            if other.subject == event.subject and other.may_share_run_with(event)
        ]
        made_before = any(other.call is event.call for other in before)
        lost = [other for other in before if _loads_state_of_scaler(module, other)]
        lost = [other for other in lost if not events_between(trace, other, event, EventKind.SCALER_STEP)]
        if lost and not made_before:
            yield _discarded_state_finding(module, event, lost[0])
        elif any(other.kind is EventKind.SCALER_STEP for other in later):
            load = _find_load_in_another_method(event, loads)
            if load is not None:
                yield _discarded_state_finding(module, event, load)


def _find_load_in_another_method(
    event: TrainingEvent, loads: Sequence[TrainingEvent]
) -> TrainingEvent | None:
    """Return a load of the scaler that a method makes as an attribute, by methods that all are other ones.

    One method of an object loads, another one makes and trains: whichever comes first.
    """
    if not event.subject.startswith("self.") or event.facts or event.loops or event.scope.owner is None:
        return None
    of_object = [
        one for one in loads if one.subject == event.subject and one.scope.owner is event.scope.owner
    ]
    return of_object[0] if of_object and all(one.scope is not event.scope for one in of_object) else None


def _loads_state_of_scaler(module: LintModule, event: TrainingEvent) -> bool:
    return (
        event.kind is EventKind.LOAD and module.kinds.kind_of_object(event.receiver, event.scope) == "scaler"
    )


def _discarded_state_finding(module: LintModule, event: TrainingEvent, load: TrainingEvent) -> Finding:
    """Return the finding that a new scaler replaces one whose state was loaded."""
    shown = (
        f"this replaces `{name_in_source(event.subject)}`, whose state is loaded in line {load.call.lineno}"
    )
    return module.make_finding("AMP238", event.call, shown)
