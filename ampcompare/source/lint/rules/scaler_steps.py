"""Rules about the calls of one GradScaler: scale, unscale_, step and update."""

import ast
from collections.abc import Iterator

from ampcompare.source.lint.read.module import (
    Finding,
    LintModule,
    Mistake,
    Trace,
    events_between,
    last_event_before,
    register_rule,
)
from ampcompare.source.lint.read.update_events import EventKind, TrainingEvent, name_in_source

UNKNOWN = (EventKind.OPAQUE, EventKind.FOREIGN_BACKWARD)


@register_rule(
    Mistake(
        "AMP202",
        "step-twice",
        "`optimizer.step()` and `scaler.step(optimizer)` for one backward pass",
        "the second step applies the gradients again, infinite ones included: the weights become NaN",
        "delete `optimizer.step()`: `scaler.step(optimizer)` calls it if the gradients are finite",
        """
scaler.scale(loss).backward()  # wrong
scaler.step(optimizer)  # wrong
optimizer.step()  # AMP202  # wrong
scaler.update()  # wrong
if use_amp:  # right
    scaler.scale(loss).backward()  # right
    scaler.step(optimizer)  # right
    scaler.update()  # right
else:  # right
    loss.backward()  # right
    optimizer.step()  # right
""",
    ),
    Mistake(
        "AMP203",
        "step-unscaled",
        "the loss is scaled, and the optimizer steps without the scaler",
        "the gradients are too large by the loss scale",
        "call `scaler.step(optimizer)` and `scaler.update()` instead of `optimizer.step()`",
        """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)  # right
optimizer.step()  # AMP203
scaler.update()  # wrong
""",
    ),
    needs=("caler", "backward", "step"),
)
def optimizer_steps_past_scaler(module: LintModule) -> Iterator[Finding]:
    """Steps of an optimizer with and without the scaler, and without it alone."""
    for trace, _, event in module.events(EventKind.STEP):
        same = [
            other
            for other in trace
            if other.kind is EventKind.SCALER_STEP
            and other.target == event.subject
            and other.may_share_run_with(event)
        ]
        twins = [other for other in same if other.loops == event.loops]
        for other in twins:
            first, last = sorted((event, other), key=trace.index)
            if events_between(
                trace, first, last, EventKind.BACKWARD, EventKind.FOREIGN_BACKWARD, EventKind.UPDATE
            ):
                if first is event or events_between(
                    trace, first, last, EventKind.BACKWARD, EventKind.FOREIGN_BACKWARD
                ):
                    continue
            backward = last_event_before(trace, first, EventKind.BACKWARD)
            if backward is None or not backward.scaler:
                continue
            message = (
                f"`{name_in_source(event.subject)}` steps in line {other.call.lineno} too, by the scaler"
            )
            yield module.make_finding("AMP202", event.call, message)
            break
        if not same:
            yield from _steps_without_scaler_findings(module, trace, event)


def _steps_without_scaler_findings(
    module: LintModule, trace: Trace, event: TrainingEvent
) -> Iterator[Finding]:
    last = last_event_before(trace, event, EventKind.BACKWARD, EventKind.FOREIGN_BACKWARD)
    if last is None or not last.scaler or last.loops != event.loops:
        return
    # Which optimizer a pass belongs to is known only where there is one.
    optimizers = {other.subject for other in trace if other.kind is EventKind.STEP}
    stepped = [other for other in trace if other.kind in (EventKind.SCALER_STEP, EventKind.UNSCALE, *UNKNOWN)]
    if (
        len(optimizers) > 1
        or stepped
        or module.code_mentions_pattern(r"get_scale|inv_scale|\.unscale_?\(|\w*scaler\.step\(")
    ):
        return
    yield module.make_finding(
        "AMP203", event.call, f"the gradients are scaled by `{name_in_source(last.scaler)}`"
    )


@register_rule(
    Mistake(
        "AMP204",
        "update-missing",
        "`scaler.step` without `scaler.update`",
        "the loss scale never changes, and the second `unscale_` or step of the optimizer is an error",
        "call `scaler.update()` once after the steps of all optimizers",
        """
scaler.scale(loss).backward()
scaler.step(optimizer)  # AMP204
scaler.update()  # right
""",
    ),
    needs=("caler", "backward", "step"),
)
def scaler_update_missing(module: LintModule) -> Iterator[Finding]:
    """A scaler that steps and is updated nowhere in the module."""
    if module.code_mentions_pattern(r"\.update\(|_maybe_opt_step|\.update\b(?!\()"):
        calls = list(module.method_calls("update"))
        for call, updated in calls:
            known = module.kinds.kind_of_object(updated, module.scope_of[call])
            if known == "scaler" or "scaler" in ast.unparse(updated).lower():
                return
        if not calls:
            return
    for trace in module.traces:
        steps = [event for event in trace if event.kind is EventKind.SCALER_STEP]
        for event in steps:
            last = last_event_before(trace, event, EventKind.BACKWARD)
            if last is None or last.scaler != event.subject:
                continue
            if any(other.kind is EventKind.OPAQUE and other.subject == event.subject for other in trace):
                continue
            yield module.make_finding(
                "AMP204", event.call, f"`{name_in_source(event.subject)}` is never updated"
            )
            break


@register_rule(
    "AMP204",
    needs=("caler", "step"),
)
def second_step_before_update(module: LintModule) -> Iterator[Finding]:
    """A second step of an optimizer before the scaler is updated."""
    for trace, _, event in module.events(EventKind.SCALER_STEP):
        if "[" in event.target:
            continue
        again = (EventKind.SCALER_STEP, EventKind.UPDATE, EventKind.OPAQUE)
        first = last_event_before(trace, event, *again)
        if first is None or first.kind is not EventKind.SCALER_STEP or first.call is event.call:
            continue
        if (first.subject, first.target, first.loops) == (event.subject, event.target, event.loops):
            shown = (
                f"`{name_in_source(event.target)}` steps again in line {event.call.lineno}, without an "
                "update between"
            )
            yield module.make_finding("AMP204", first.call, shown)


@register_rule(
    Mistake(
        "AMP205",
        "update-between-steps",
        "`scaler.update()` runs between the steps of two optimizers that share backward passes",
        "the second optimizer's gradients are unscaled with a different scale than they were scaled with",
        "call `scaler.update()` once, after the last step",
        """
scaler.scale(loss_a).backward()
scaler.scale(loss_b).backward()  # wrong
scaler.step(optimizer_a)
scaler.update()  # AMP205
scaler.scale(loss_b).backward()  # right
scaler.step(optimizer_b)
scaler.update()
""",
    ),
    needs=("caler", "step", "update"),
)
def update_between_optimizer_steps(module: LintModule) -> Iterator[Finding]:
    """An update between steps whose backward passes have all run before it."""
    for trace, index, event in module.events(EventKind.UPDATE):
        before = last_event_before(trace, event, EventKind.SCALER_STEP, EventKind.BACKWARD, EventKind.UPDATE)
        if before is None or before.kind is not EventKind.SCALER_STEP or before.loops != event.loops:
            continue
        if before.subject != event.subject:
            continue
        for other in trace[index + 1 :]:
            if not other.may_share_run_with(event) or not other.may_share_run_with(before):
                continue
            if other.kind in (EventKind.BACKWARD, EventKind.UPDATE, *UNKNOWN):
                break
            if (
                other.kind is EventKind.SCALER_STEP
                and other.loops == event.loops
                and other.subject == event.subject
            ):
                if other.target != before.target:
                    line = other.call.lineno
                    shown = f"`{name_in_source(other.target)}` steps in line {line}, without a backward pass between"
                    yield module.make_finding("AMP205", event.call, shown)
                break


@register_rule(
    Mistake(
        "AMP206",
        "unscale-twice",
        "`unscale_` is called twice for one optimizer and update",
        "the second call raises a RuntimeError",
        "call `scaler.unscale_(optimizer)` once per update",
        """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)  # wrong
scaler.unscale_(optimizer)  # AMP206  # wrong
scaler.step(optimizer)  # wrong
scaler.unscale_(optimizer_a)  # right
scaler.unscale_(optimizer_b)  # right
scaler.step(optimizer_a)  # right
scaler.step(optimizer_b)  # right
scaler.update()
""",
    ),
    Mistake(
        "AMP207",
        "unscale-after-step",
        "`unscale_` is called after the step of its optimizer",
        "it raises a RuntimeError; the step has unscaled the gradients itself",
        "call `scaler.unscale_(optimizer)` before `scaler.step(optimizer)`",
        """
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()  # right
scaler.scale(other_loss).backward()  # right
scaler.unscale_(optimizer)  # AMP207
scaler.step(optimizer)  # right
scaler.update()
""",
    ),
    needs=("unscale_",),
)
def misplaced_unscale(module: LintModule) -> Iterator[Finding]:
    """`unscale_` after `unscale_` or after the step, without an update between."""
    for trace, index, event in module.events(EventKind.UNSCALE):
        for other in reversed(trace[:index]):
            if not other.may_share_run_with(event) or other.loops != event.loops:
                if other.kind is EventKind.UPDATE:
                    break
                continue
            if other.kind is EventKind.UPDATE or (
                other.kind is EventKind.OPAQUE and other.subject == event.subject
            ):
                break
            if other.subject != event.subject or other.target != event.target or other.call is event.call:
                continue
            if "[" in event.target or not event.target:
                break
            if other.kind is EventKind.UNSCALE:
                shown = f"`{name_in_source(event.target)}` was unscaled in line {other.call.lineno}"
                yield module.make_finding("AMP206", event.call, shown)
                break
            if other.kind is EventKind.SCALER_STEP:
                shown = f"`{name_in_source(event.target)}` has stepped in line {other.call.lineno}"
                yield module.make_finding("AMP207", event.call, shown)
                break


@register_rule(
    Mistake(
        "AMP208",
        "scale-missing",
        "`scaler.step(optimizer)` after a backward pass of a loss that no scaler has scaled",
        "the step ends with an AssertionError, or the gradients are unscaled without having been scaled",
        "write `scaler.scale(loss).backward()`",
        """
loss.backward()  # AMP208  # wrong
scaled = scaler.scale(loss)  # right
scaled.backward()  # right
scaler.step(optimizer)
scaler.update()
""",
    ),
    Mistake(
        "AMP216",
        "scaled-and-unscaled",
        "gradients of a scaled loss and of an unscaled one add up before `scaler.step`",
        "the unscaled loss is divided by the loss scale, and has almost no effect",
        "scale both losses with the same scaler",
        """
scaler.scale(loss).backward()
penalty.backward()  # AMP216  # wrong
scaler.scale(penalty).backward()  # right
scaler.step(optimizer)
scaler.update()
""",
    ),
    needs=("caler", "backward", "step"),
)
def unscaled_losses(module: LintModule) -> Iterator[Finding]:
    """Backward passes of losses that the scaler of the next step has not scaled."""
    for trace, _, event in module.events(EventKind.SCALER_STEP):
        passes = _passes_since_last_step(trace, event)
        unscaled = [other for other in passes if not other.scaler and other.scale_loss_block() is None]
        if not unscaled or any(other.kind in UNKNOWN for other in passes):
            continue
        if any(other.kind is EventKind.STEP and other.may_share_run_with(event) for other in trace):
            continue
        scaled = [other for other in passes if other.scaler == event.subject]
        for other in unscaled:
            shown = f"`{name_in_source(other.subject)}` is not scaled by `{name_in_source(event.subject)}`"
            if len(passes) == 1 and not module.code_mentions_pattern(r"\.scale\("):
                yield module.make_finding("AMP208", other.call, shown)
            elif scaled and all(other.may_share_run_with(one) and other.loops == one.loops for one in scaled):
                yield module.make_finding("AMP216", other.call, shown)


def _passes_since_last_step(trace: Trace, event: TrainingEvent) -> list[TrainingEvent]:
    """Return the backward passes, and calls that no one knows, since the last step or cleared gradients."""
    found: list[TrainingEvent] = []
    for other in reversed(trace[: trace.index(event)]):
        if not other.may_share_run_with(event):
            continue
        if other.kind in (EventKind.SCALER_STEP, EventKind.STEP, EventKind.UPDATE) and found:
            break
        if other.kind is EventKind.ZERO_GRAD or other.loops != event.loops:
            if found:
                break
            continue
        if other.kind in (EventKind.BACKWARD, EventKind.FOREIGN_BACKWARD):
            found.append(other)
    return found
