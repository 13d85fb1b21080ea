"""Rules about a GradScaler: what it is built for, where, and what it steps."""

import ast
from collections.abc import Iterator

from ampcompare.source.amp_names import AUTOCASTS
from ampcompare.source.lint.module import Finding, LintModule, Mistake, events_between, is_off, rule
from ampcompare.source.lint.update_events import Event, Kind, plain
from ampcompare.source.syntax import argument


@rule(
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
    )
)
def scaler_with_bf16(module: LintModule) -> Iterator[Finding]:
    """A scaler that is always on, where each autocast is bf16 by a literal."""
    casts = list(module.calls_of(*AUTOCASTS))
    kinds = {_dtype(module, call) for call in casts}
    if kinds != {"torch.bfloat16"} or module.mentions(r"float16\b(?<!bfloat16)|\bhalf\b|fp16"):
        return
    for call in module.new_scalers:
        choice = isinstance(module.parents[call], (ast.IfExp, ast.BoolOp, ast.Return))
        if argument(call, "enabled") is None and not choice and not module.is_conditional(call):
            yield module.finding("AMP223", call, "each autocast of this module has dtype bfloat16")


def _dtype(module: LintModule, call: ast.Call) -> str:
    position = 0 if module.resolve(call.func) == "torch.cpu.amp.autocast" else 1
    value = argument(call, "dtype", position)
    return "" if value is None else module.resolve(value) or "unknown"


@rule(
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
    )
)
def state_discarded(module: LintModule) -> Iterator[Finding]:
    """A new scaler in the place of one whose state was loaded."""
    loads = [event for trace in module.traces for event in trace if _loads_scaler(module, event)]
    for trace, index, event in module.events(Kind.NEW_SCALER):
        if not event.subject or is_off(event.call):
            continue
        later = [other for other in trace[index + 1 :] if other.may_follow(event)]
        if any(_loads_scaler(module, other) and other.subject == event.subject for other in later):
            continue
        before = [other for other in trace[:index] if other.subject == event.subject and other.may_follow(event)]
        made_before = any(other.call is event.call for other in before)
        trained = any(other.kind is Kind.SCALER_STEP and other.subject == event.subject for other in later)
        for other in before if not made_before else ():
            if _loads_scaler(module, other) and not events_between(trace, other, event, Kind.SCALER_STEP):
                yield _discards(module, event, other)
                break
        else:
            # The one method of an object loads, another one makes and trains: whichever comes first.
            held = event.subject.startswith("self.") and not event.facts and trained and not event.loops
            elsewhere = [
                one
                for one in loads
                if one.subject == event.subject and one.scope.owner is event.scope.owner is not None
            ]
            if held and elsewhere and all(one.scope is not event.scope for one in elsewhere):
                yield _discards(module, event, elsewhere[0])


def _loads_scaler(module: LintModule, event: Event) -> bool:
    return event.kind is Kind.LOAD and module.kinds.of(event.receiver, event.scope) == "scaler"


def _discards(module: LintModule, event: Event, load: Event) -> Finding:
    shown = f"this replaces `{plain(event.subject)}`, whose state is loaded in line {load.call.lineno}"
    return module.finding("AMP238", event.call, shown)
