"""Rules about autocast, about the life of a GradScaler, and about checkpoints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcompare.lint.event import Context, Event, Kind, conditions, contradict, plain
from ampcompare.lint.finding import Edit, Finding
from ampcompare.lint.module import LintModule, keyword, name_of, rule
from ampcompare.lint.roles import AUTOCASTS

__all__: list[str] = []

SCALER_STATE = re.compile(
    r"scaler\w*(?:\[[^\]]*\])?\.state_dict|scaler_state|scaler_dict|['\"]\w*scaler\w*['\"]\s*:|\bscaler\w*=\w*scaler"
)
AMP_STATE = re.compile(r"\bamp\w*\.state_dict|amp_state|['\"]amp['\"]\s*[:\]]")


@rule("AMP221")
def backward_in_autocast(module: LintModule) -> Iterator[Finding]:
    """Backward passes inside an autocast block."""
    for trace in module.traces:
        for event in trace:
            block = event.autocast() if event.kind is Kind.BACKWARD else None
            if block is not None and _may_be_on(block, event):
                shown = f"the autocast block begins in line {block.node.lineno}"
                yield module.finding("AMP221", event.call, shown, _moved_out(module, event, block))


def _may_be_on(block: Context, event: Event) -> bool:
    """Return whether the argument `enabled` of an autocast can be true under the conditions of an event."""
    enabled = None if block.call is None else keyword(block.call, "enabled")
    return enabled is None or not contradict(conditions(enabled, True), event.facts)


def _moved_out(module: LintModule, event: Event, block: Context) -> tuple[Edit, ...]:
    """Return the edits that end an autocast block before the backward pass, if only plain lines follow it there."""
    text, body = module.text, block.node.body
    if event.statement not in body[1:] or len(block.node.items) > 1:
        return ()
    rest = body[body.index(event.statement) :]
    plain = all(isinstance(one, ast.Expr) and one.lineno == one.end_lineno and text.stands_alone(one) for one in rest)
    outer, inner = text.indent(block.node), text.indent(event.statement)
    if (
        not plain
        or not inner.startswith(outer)
        or text.text[text.start(block.node) - len(outer) : text.start(block.node)] != outer
    ):
        return ()
    starts = [text.line_start(line) for line in range(rest[0].lineno, (rest[-1].end_lineno or 0) + 1)]
    extra = len(inner) - len(outer)
    if extra <= 0 or not all(
        text.text.startswith(inner, start) or not text.text[start : start + 1].strip() for start in starts
    ):
        return ()
    return tuple(Edit(start, start + extra, "") for start in starts if text.text.startswith(inner, start))


@rule("AMP222")
def autocast_not_entered(module: LintModule) -> Iterator[Finding]:
    """Autocast that no `with` enters, and autocast that `with` enters without a call."""
    for call in module.calls_of(*AUTOCASTS):
        if isinstance(module.names.parents[call], ast.Expr):
            yield module.finding("AMP222", call, "this autocast is not entered")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.withitem) and isinstance(node.context_expr, (ast.Name, ast.Attribute)):
            full = module.names.resolve_here(node.context_expr)
            if full in AUTOCASTS:
                yield module.finding("AMP222", node.context_expr, f"`{name_of(node.context_expr)}` is not called")


@rule("AMP223")
def scaler_with_bf16(module: LintModule) -> Iterator[Finding]:
    """A scaler that is always on, where each autocast is bf16 by a literal."""
    casts = list(module.calls_of(*AUTOCASTS))
    kinds = {_dtype(module, call) for call in casts}
    if kinds != {"torch.bfloat16"} or module.mentions(r"float16\b(?<!bfloat16)|\bhalf\b|fp16"):
        return
    for call in module.new_scalers:
        choice = isinstance(module.names.parents[call], (ast.IfExp, ast.BoolOp, ast.Return))
        if keyword(call, "enabled") is None and not choice and not _is_conditional(module, call):
            yield module.finding("AMP223", call, "each autocast of this module has dtype bfloat16")


def _dtype(module: LintModule, call: ast.Call) -> str:
    position = 0 if module.names.resolve_here(call.func) == "torch.cpu.amp.autocast" else 1
    value = keyword(call, "dtype", position)
    return "" if value is None else module.names.resolve_here(value) or "unknown"


def _is_conditional(module: LintModule, node: ast.AST) -> bool:
    while node in module.names.parents:
        node = module.names.parents[node]
        if isinstance(node, ast.If):
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
    return False


@rule("AMP224")
def half_with_scaler(module: LintModule) -> Iterator[Finding]:
    """A model that is cast to half before it is trained with a scaler."""
    for trace in module.traces:
        for index, event in enumerate(trace):
            if event.kind is not Kind.HALF or not event.subject or "(" in event.subject:
                continue
            in_place = isinstance(event.statement, ast.Expr) and event.statement.value is event.call
            name = event.shown
            if not in_place or module.mentions(rf"{re.escape(name)}\.float\(\)"):
                continue
            later = [other for other in trace[index + 1 :] if other.may_follow(event)]
            trains = any(other.kind is Kind.SCALER_STEP for other in later)
            # Optimizers of other packages may keep master weights, and take fp16 gradients.
            unscaled = any(other.kind is Kind.UNSCALE for other in later) or module.mentions(r"\boptim\.[A-Z]\w+\(")
            if trains and unscaled and module.mentions(rf"{re.escape(name)}\.(?:named_)?parameters\(\)"):
                yield module.finding("AMP224", event.call, f"`{name}` is trained with a GradScaler below")


@rule("AMP225")
def scaler_in_loop(module: LintModule) -> Iterator[Finding]:
    """A scaler that is built in the loop of its own steps."""
    for trace in module.traces:
        for index, event in enumerate(trace):
            if event.kind is not Kind.NEW_SCALER or not event.loops or (not event.target and not event.subject):
                continue
            name = event.subject or event.target
            for other in trace[index + 1 :]:
                if other.kind is Kind.BACKWARD and other.scaler == name and other.loops == event.loops:
                    if _is_batch_loop(event):
                        yield module.finding("AMP225", event.call, f"`{plain(name)}` is new for each step")
                    break


def _is_batch_loop(event: Event) -> bool:
    """Return whether a loop runs over something else than trials."""
    loop = event.loops[-1]
    head = ast.unparse(loop.iter) if isinstance(loop, (ast.For, ast.AsyncFor)) else ""
    target = ast.unparse(loop.target) if isinstance(loop, (ast.For, ast.AsyncFor)) else ""
    return not re.search(
        r"fold|trial|run|seed|config|model|param|stage|client|dtype|device", f"{target} {head}", re.IGNORECASE
    )


@rule("AMP119", "AMP226")
def state_unsaved(module: LintModule) -> Iterator[Finding]:
    """Checkpoints with the state of an optimizer, in a module that saves no state of the loss scale."""
    source = module.text.text
    apex = next(module.calls_of("apex.amp.initialize"), None)
    scalers = [call for call in module.new_scalers if not _is_off(call)]
    for code, maker, state in (("AMP119", apex, AMP_STATE), ("AMP226", scalers[0] if scalers else None, SCALER_STATE)):
        if maker is None or state.search(source):
            continue
        reported: set[ast.Dict] = set()
        for call in _saving_calls(module):
            saved = _saved_dict(module, call)
            if saved in reported:
                continue
            alone = _is_state_of_optimizer(module, keyword(call, "obj", 0))
            if not (alone or (saved is not None and _holds_optimizer(module, saved))):
                continue
            if not _reached(module, maker, call, of_process=code == "AMP119"):
                continue
            shown = "the state of the optimizer is saved, and that of the loss scale is not"
            edits = () if saved is None else _added_state(module, code, maker, call, saved)
            reported |= {saved} if saved is not None else set()
            yield module.finding(code, call, shown, edits)


def _saving_calls(module: LintModule) -> Iterator[ast.Call]:
    """Yield the calls of `torch.save`, and of functions of the script whose names say that they save a checkpoint."""
    known = {id(call): name for call, name in module.resolved}
    for call in sorted(module.names.calls, key=lambda each: each.lineno):
        name = known.get(id(call)) or name_of(call.func)
        if name == "torch.save" or name.rpartition(".")[2].startswith(("save_checkpoint", "save_ckpt")):
            yield call


def _reached(module: LintModule, maker: ast.Call, save: ast.Call, *, of_process: bool) -> bool:
    """Return whether a checkpoint belongs to the training for which the loss scale was made.

    Args:
        of_process: whether the loss scale is one of the process, which every method of a class reaches.
    """
    home, here = module.names.scope_of[maker], module.names.scope_of[save]
    if of_process and home.owner is not None and home.owner is here.owner:
        return True
    kept = home.owner is not None and any(
        maker in values for name, values in home.owner.values.items() if name.startswith("self.")
    )
    if home in here.enclosing() or (kept and home.owner is here.owner):
        return True
    return any({maker, save} <= {event.call for event in trace} for trace in module.traces)


def _is_off(call: ast.Call) -> bool:
    value = keyword(call, "enabled")
    return isinstance(value, ast.Constant) and value.value is False


def _saved_dict(module: LintModule, call: ast.Call) -> ast.Dict | None:
    value = keyword(call, "obj", 0)
    if isinstance(value, ast.Name):
        values = module.names.scope_of[call].values.get(value.id, [])
        above = [each for each in values if getattr(each, "lineno", call.lineno) < call.lineno]
        nearest = max(above, key=lambda each: each.lineno, default=None)
        value = nearest if not module.mentions(rf"\b{value.id}\.update\(") else None
    return value if isinstance(value, ast.Dict) else None


def _holds_optimizer(module: LintModule, saved: ast.Dict) -> bool:
    return any(_is_state_of_optimizer(module, value) for value in saved.values)


def _is_state_of_optimizer(module: LintModule, value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):
        return any(_is_state_of_optimizer(module, each) for each in (value.body, value.orelse))
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "state_dict":
        return False
    return module.roles.of(value.func.value, module.names.scope_of[value]) == "optimizer"


def _added_state(module: LintModule, code: str, maker: ast.Call, call: ast.Call, saved: ast.Dict) -> tuple[Edit, ...]:
    """Return the edit that adds the state to the dict, where its object is surely there."""
    scope = module.names.scope_of[call]
    if code == "AMP119":
        if (
            not isinstance(maker.func, ast.Attribute)
            or _is_conditional(module, maker)
            or scope is not module.names.scope_of[maker]
        ):
            return ()
        owner, key = module.text.source(maker.func.value), "amp"
    else:
        statement = module.names.parents[maker]
        if not isinstance(statement, ast.Assign) or _is_conditional(module, maker):
            return ()
        owner, key = name_of(statement.targets[0]), "scaler"
        home = module.names.scope_of[maker]
        of_class = owner.startswith("self.") and scope.owner is not None and scope.owner is home.owner
        if not owner or not (of_class or home is scope):
            return ()
    last = saved.values[-1]
    quote = module.text.source(saved.keys[-1])[0] if isinstance(saved.keys[-1], ast.Constant) else '"'
    quote = quote if quote in "'\"" else '"'
    entry = f"{quote}{key}{quote}: {owner}.state_dict()"
    end = module.text.end(last)
    if last.end_lineno == saved.end_lineno or saved.keys[-1] is None:
        return (Edit(end, end, f", {entry}"),)
    line = module.text.line_start(saved.keys[-1].lineno)
    written = module.text.text[line : module.text.start(saved.keys[-1])]
    if written.strip():
        return (Edit(end, end, f", {entry}"),)
    return (Edit(end, end, f",{module.text.newline()}{written}{entry}"),)


@rule("AMP227")
def step_with_closure(module: LintModule) -> Iterator[Finding]:
    """A closure for a step with a scaler."""
    for trace in module.traces:
        for event in trace:
            if event.kind is Kind.SCALER_STEP:
                value = keyword(event.call, "closure", 1)
                if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
                    function = isinstance(value, ast.Name) and any(
                        value.id in one.functions for one in event.scope.enclosing()
                    )
                    if function or isinstance(value, ast.Lambda):
                        yield module.finding("AMP227", event.call, "a step with a scaler takes no closure")
