"""Follow a function line by line, through the functions and methods of the module that it calls."""

from __future__ import annotations

import ast
import enum
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from ampcompare.lint.roles import Roles
from ampcompare.source.amp_names import AUTOCASTS, CLIPS, WRAPPERS
from ampcompare.source.branches import Facts, contradict, narrowed
from ampcompare.source.calls import argument, arguments, parameters, passed
from ampcompare.source.module import Module, Scope
from ampcompare.source.syntax import dotted

__all__ = ["FINITE", "Context", "Event", "Kind", "Tracer", "plain"]

# Conditions that ask whether numbers are finite.
FINITE = re.compile(r"finite|isnan|isinf|\bnan\b|\binf\b", re.IGNORECASE)
MAX_DEPTH = 5
MAX_EVENTS = 1500
MAX_CALLS = 4000
LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop)
APART = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, *LEAVES)  # hold no call of the expression
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
LIBRARIES = ("accelerator", "fabric", "trainer", "engine", "strategy", "plugin")
CROSS_ENTROPIES = ("torch.nn.functional.binary_cross_entropy",)
NORMS = ("torch.norm", "torch.linalg.norm", "torch.linalg.vector_norm", "torch.nn.utils.get_total_norm")
READS = ("norm", "pow", "square", "abs")


class Kind(enum.Enum):
    """What an event is."""

    BACKWARD = "backward"
    FOREIGN_BACKWARD = "backward of a library"
    UNSCALE = "unscale_"
    CLIP = "clip"
    SCALER_STEP = "scaler.step"
    STEP = "optimizer.step"
    UPDATE = "scaler.update"
    ZERO_GRAD = "zero_grad"
    SCHEDULE = "scheduler.step"
    SCALE = "scaler.scale"
    INITIALIZE = "amp.initialize"
    FP16_OPTIMIZER = "FP16_Optimizer"
    SCALE_LOSS = "scale_loss"
    WRAP = "wrap"
    SYNC_BATCH_NORM = "sync batch norm"
    HALF = "half"
    CUDA = "cuda"
    LOAD = "load_state_dict"
    NEW_SCALER = "GradScaler"
    SAVE = "torch.save"
    NEW_OPTIMIZER = "optimizer"
    GRADIENT = "read or change of a gradient"
    CROSS_ENTROPY = "binary_cross_entropy"
    OPAQUE = "call of something else"


@dataclass(frozen=True, eq=False)
class Context:
    """A `with` block around events.

    Attributes:
        kind: `scale_loss`, `autocast` or `other`.
        node: the statement.
        name: canonical name of what `as` binds.
        call: of `scale_loss` or of autocast, if it is written there.
        enabled: False for an autocast that is switched off by a literal.
    """

    kind: str
    node: ast.With | ast.AsyncWith
    name: str = ""
    call: ast.Call | None = None
    enabled: bool = True


@dataclass(eq=False)
class Event:
    """One call of interest.

    Attributes:
        kind: what it is.
        call: the call itself.
        statement: the statement that contains it.
        subject: canonical name of the object: the loss, scaler, optimizer, scheduler or model.
        target: the optimizer of a scaler's call, or what the result is bound to.
        scaler: that has scaled the loss of a backward pass.
        facts: conditions under which it runs.
        loops: around it, the outermost first.
        contexts: around it, the outermost first.
        scope: in which it stands.
    """

    kind: Kind
    call: ast.Call
    statement: ast.stmt
    subject: str
    facts: Facts
    loops: tuple[ast.AST, ...]
    contexts: tuple[Context, ...]
    scope: Scope
    target: str = ""
    scaler: str = ""

    @property
    def shown(self) -> str:
        """The subject as it is named in the source."""
        return plain(self.subject)

    def may_follow(self, other: Event) -> bool:
        """Return whether one run of the code can meet both events."""
        return not contradict(self.facts, other.facts)

    def apex_block(self) -> Context | None:
        """Return the innermost `scale_loss` block around it."""
        return next((context for context in reversed(self.contexts) if context.kind == "scale_loss"), None)

    def autocast(self) -> Context | None:
        """Return the innermost autocast block around it, unless that is switched off."""
        found = next((context for context in reversed(self.contexts) if context.kind == "autocast"), None)
        return found if found is not None and found.enabled else None


def plain(name: str) -> str:
    """Return a canonical name as it stands in the source."""
    return name.rpartition(":")[2]


METHODS = {
    "unscale_": Kind.UNSCALE,
    "zero_grad": Kind.ZERO_GRAD,
    "half": Kind.HALF,
    "cuda": Kind.CUDA,
    "to": Kind.CUDA,
    "load_state_dict": Kind.LOAD,
}
# Conditions of a part of an expression, each with whether it holds.
Tests: TypeAlias = tuple[tuple[ast.expr, bool], ...]


@dataclass(frozen=True)
class _Frame:
    """Where the tracer is."""

    scope: Scope
    facts: Facts
    loops: tuple[ast.AST, ...]
    contexts: tuple[Context, ...]
    names: dict[str, str]  # canonical name of each parameter
    prefix: str  # of local names
    active: tuple[Scope, ...]


class Tracer:
    """The events of one function or module, in the order of its lines.

    Every branch is followed, and each event knows the conditions under which it runs. Calls of functions of this module
    and of methods of `self` are followed too, with the caller's names for their arguments. The body of a loop is
    followed once.
    """

    def __init__(self, module: Module, roles: Roles) -> None:
        self._module = module
        self._roles = roles
        self._known: dict[ast.AST, list[tuple[ast.Call, Tests]]] = {}

    def trace(self, scope: Scope) -> list[Event]:
        """Return the events of a function or of the module."""
        assert not isinstance(scope.node, (ast.ClassDef, ast.Lambda))
        self._events: list[Event] = []
        self._scaled: dict[str, str] = {}
        self._calls = 0
        self._frames = itertools.count(1)
        self._block(scope.node.body, _Frame(scope, {}, (), (), {}, "", (scope,)))
        return self._events

    def _block(self, body: list[ast.stmt], frame: _Frame) -> Facts | None:
        """Follow statements; return what is known behind them, or None if that is not reached."""
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if len(self._events) > MAX_EVENTS or self._calls > MAX_CALLS:
                return None
            if isinstance(statement, ast.If):
                self._expression(statement.test, statement, frame)
                test = self._spelled_out(statement.test, frame)
                branches = ((statement.body, True), (statement.orelse, False))
                known = [
                    self._block(branch, replace(frame, facts=narrowed(frame.facts, test, holds)))
                    for branch, holds in branches
                ]
                reached = [facts for facts in known if facts is not None]
                if not reached:
                    return None
                if len(reached) == 1:
                    frame = replace(frame, facts=reached[0])
            elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
                head = statement.test if isinstance(statement, ast.While) else statement.iter
                self._expression(head, statement, frame)
                self._block(statement.body, replace(frame, loops=(*frame.loops, statement)))
                self._block(statement.orelse, frame)
            elif isinstance(statement, (ast.With, ast.AsyncWith)):
                facts = self._block(statement.body, self._enter(statement, frame))
                if facts is None:
                    return None
                frame = replace(frame, facts=facts)
            elif isinstance(statement, ast.Try) or type(statement).__name__ == "TryStar":
                self._try(statement, frame)  # type: ignore[arg-type]
            elif isinstance(statement, ast.Match):
                self._expression(statement.subject, statement, frame)
                key = f"match {ast.unparse(statement.subject)}"
                for number, case in enumerate(statement.cases):
                    self._block(case.body, replace(frame, facts={**frame.facts, key: number}))
            else:
                self._expression(statement, statement, frame)
                self._note_assignment(statement, frame)
                if isinstance(statement, ENDS):
                    return None
        return frame.facts

    def _try(self, statement: ast.Try, frame: _Frame) -> None:
        key = f"try at {statement.lineno}"
        self._block([*statement.body, *statement.orelse], replace(frame, facts={**frame.facts, key: True}))
        for handler in statement.handlers:
            self._block(handler.body, replace(frame, facts={**frame.facts, key: False}))
        self._block(statement.finalbody, frame)

    def _enter(self, statement: ast.With | ast.AsyncWith, frame: _Frame) -> _Frame:
        contexts = list(frame.contexts)
        for item in statement.items:
            self._expression(item.context_expr, statement, frame)
            bound = "" if item.optional_vars is None else self._canonical(item.optional_vars, frame)
            contexts.append(self._context(item.context_expr, statement, bound, frame))
        return replace(frame, contexts=tuple(contexts))

    def _context(self, node: ast.expr, statement: ast.With | ast.AsyncWith, bound: str, frame: _Frame) -> Context:
        choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
        text = dotted(node)
        if text is not None:
            choices += self._module.values_of(text, frame.scope) or []
        for choice in choices:
            if not isinstance(choice, ast.Call):
                continue
            full = self._module.resolve(choice.func, frame.scope) or ""
            if full == "apex.amp.scale_loss" or full.endswith("amp.scale_loss"):
                return Context("scale_loss", statement, bound, choice)
            if full in AUTOCASTS:
                enabled = argument(choice, "enabled", 0 if full == "torch.cuda.amp.autocast" else None)
                off = isinstance(enabled, ast.Constant) and not enabled.value
                return Context("autocast", statement, bound, choice, enabled=not off)
        return Context("other", statement, bound)

    def _expression(self, node: ast.AST, statement: ast.stmt, frame: _Frame) -> None:
        calls = self._known.get(node)
        if calls is None:
            calls = self._known[node] = list(_calls_of(node))
        for call, tests in calls:
            self._calls += 1
            inner = frame
            for test, holds in tests:
                inner = replace(inner, facts=narrowed(inner.facts, self._spelled_out(test, frame), holds))
            self._call(call, statement, inner)

    def _call(self, call: ast.Call, statement: ast.stmt, frame: _Frame) -> None:
        if self._inlined(call, frame):
            return
        full = self._module.resolve(call.func, frame.scope) or ""
        first = call.args[0] if call.args else None
        add = functools.partial(self._add, call, statement, frame)
        if full in CLIPS and isinstance(first, ast.IfExp):
            test = self._spelled_out(first.test, frame)
            for choice, holds in ((first.body, True), (first.orelse, False)):
                inner = replace(frame, facts=narrowed(frame.facts, test, holds))
                self._add(call, statement, inner, Kind.CLIP, choice)
        elif full in CLIPS:
            add(Kind.CLIP, first)
        elif full in WRAPPERS:
            add(Kind.WRAP, first or argument(call, "module"), self._bound(statement, frame))
        elif full == "apex.amp.initialize":
            add(Kind.INITIALIZE, first or argument(call, "models"), self._bound(statement, frame))
        elif full.startswith("apex.") and full.endswith(".FP16_Optimizer"):
            add(Kind.FP16_OPTIMIZER, self._bound(statement, frame))
        elif full == "apex.amp.scale_loss":
            optimizer = call.args[1] if len(call.args) > 1 else argument(call, "optimizers")
            add(Kind.SCALE_LOSS, first or argument(call, "loss"), optimizer)
        elif full == "apex.parallel.convert_syncbn_model":
            add(Kind.SYNC_BATCH_NORM, first, self._bound(statement, frame))
        elif full == "torch.save":
            add(Kind.SAVE, first)
        elif full == "torch.autograd.backward":
            add(Kind.BACKWARD, first, scaler=self._scaler_of(first, frame))
        elif self._roles.is_new_scaler(call, frame.scope):
            add(Kind.NEW_SCALER, self._bound(statement, frame))
        elif self._roles.is_new_optimizer(call, frame.scope):
            add(Kind.NEW_OPTIMIZER, self._bound(statement, frame))
        elif full in CROSS_ENTROPIES or self._makers(call.func, frame) == {"torch.nn.BCELoss"}:
            add(Kind.CROSS_ENTROPY, call.func)
        elif full in NORMS and any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(call)):
            add(Kind.GRADIENT, first)
        elif not isinstance(call.func, ast.Attribute) or not self._method(call, call.func, frame, add):
            for value in passed(call):
                if self._roles.of(value, frame.scope) in ("scaler", "optimizer"):
                    add(Kind.OPAQUE, value)

    def _add(
        self,
        call: ast.Call,
        statement: ast.stmt,
        frame: _Frame,
        kind: Kind,
        subject: ast.expr | str | None,
        target: ast.expr | str | None = "",
        scaler: str = "",
    ) -> None:
        subject = subject if isinstance(subject, str) else self._canonical(subject, frame)
        target = target if isinstance(target, str) else self._canonical(target, frame)
        facts, loops, contexts = frame.facts, frame.loops, frame.contexts
        self._events.append(Event(kind, call, statement, subject, facts, loops, contexts, frame.scope, target, scaler))

    def _method(self, call: ast.Call, function: ast.Attribute, frame: _Frame, add: Callable[..., None]) -> bool:
        """Record the call of a method that is an event; return whether it is one.

        Args:
            add: `_add` for this call.
        """
        receiver, name = function.value, function.attr
        if name == "backward":
            owner = (dotted(receiver) or "").rpartition(".")[2].lower()
            foreign = any(word in owner for word in LIBRARIES) or (call.args and "loss" not in owner)
            if foreign and not self._scaler_of(receiver, frame):
                add(Kind.FOREIGN_BACKWARD, receiver)
            else:
                add(Kind.BACKWARD, receiver, scaler=self._scaler_of(receiver, frame))
            return True
        role = self._roles.of(receiver, frame.scope)
        first = call.args[0] if call.args else argument(call, "optimizer")
        if name == "scale" and role == "scaler" and first is not None:
            add(Kind.SCALE, receiver, first)
        elif name == "step" and role == "scaler" and first is not None:
            add(Kind.SCALER_STEP, receiver, first)
        elif name == "step" and role == "optimizer":
            for value in call.args:
                self._inlined_function(value, frame)  # a closure
            add(Kind.STEP, receiver)
        elif name == "step" and role == "scheduler":
            add(Kind.SCHEDULE, receiver)
        elif name == "update" and role == "scaler":
            add(Kind.UPDATE, receiver)
        elif role == "optimizer" and name not in (*METHODS, "state_dict", "add_param_group", "train", "eval"):
            add(Kind.OPAQUE, receiver)  # a method of an optimizer of another kind
        elif name in METHODS:
            add(METHODS[name], receiver, first if name == "unscale_" else "")
        elif (name in READS or name.endswith("_")) and (gradient := _gradient_in(receiver)) is not None:
            add(Kind.GRADIENT, gradient)
        else:
            return False
        return True

    def _makers(self, node: ast.expr, frame: _Frame) -> set[str]:
        """Return the full names of what builds the objects that a name or attribute may be."""
        values = self._module.values_of(dotted(node) or "", frame.scope) or []
        return {
            self._module.resolve(one.func, frame.scope) or "" if isinstance(one, ast.Call) else "" for one in values
        }

    def _scaler_of(self, node: ast.expr | None, frame: _Frame) -> str:
        """Return the scaler that has scaled a loss."""
        if node is None:
            return ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale":
            if self._roles.of(node.func.value, frame.scope) == "scaler":
                return self._canonical(node.func.value, frame)
        return self._scaled.get(self._canonical(node, frame), "")

    def _note_assignment(self, statement: ast.stmt, frame: _Frame) -> None:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return
        name = self._canonical(statement.targets[0], frame)
        scaler = self._scaler_of(statement.value, frame)
        if scaler:
            self._scaled[name] = scaler
        else:
            self._scaled.pop(name, None)

    def _bound(self, statement: ast.stmt, frame: _Frame) -> str:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            first = target.elts[0] if isinstance(target, (ast.Tuple, ast.List)) and target.elts else target
            return self._canonical(first, frame)
        return ""

    def _canonical(self, node: ast.AST | None, frame: _Frame) -> str:
        """Return one text for an object, the same in the functions that it is passed to."""
        if node is None:
            return ""
        text = dotted(node)
        if text is None:
            if isinstance(node, ast.Subscript):
                return f"{self._canonical(node.value, frame)}[{ast.unparse(node.slice)}]"
            return ast.unparse(node) if isinstance(node, ast.expr) else ""
        head, dot, rest = text.partition(".")
        scope = frame.scope
        values = scope.values.get(head, ())
        if head in frame.names:
            return frame.names[head] + dot + rest
        if len(values) == 1 and head not in scope.parameters and (alias := dotted(values[0])) not in (None, head):
            if not str(alias).startswith(f"{head}.") and not any(head in one.imports for one in scope.enclosing()):
                return self._canonical(values[0], replace(frame, names={**frame.names, head: head})) + dot + rest
        if head in scope.parameters or head in scope.values:
            return f"{frame.prefix}{text}" if head != "self" else text
        return text

    def _spelled_out(self, test: ast.expr, frame: _Frame) -> ast.expr:
        """Return a condition in the words of the function that the trace began in.

        A parameter is spelled as the argument that it got, a name such as `is_last` as the test of a remainder.
        """
        if isinstance(test, ast.UnaryOp):
            return ast.UnaryOp(test.op, self._spelled_out(test.operand, frame))
        if isinstance(test, ast.BoolOp):
            return ast.BoolOp(test.op, [self._spelled_out(value, frame) for value in test.values])
        if isinstance(test, ast.Compare):
            return ast.Compare(self._spelled_out(test.left, frame), test.ops, test.comparators)
        head, dot, rest = (dotted(test) or "").partition(".")
        if head in frame.names and ":" not in frame.names[head] and frame.names[head] != head:
            try:
                return ast.parse(frame.names[head] + dot + rest, mode="eval").body
            except SyntaxError:
                return test
        values = frame.scope.values.get(test.id, []) if isinstance(test, ast.Name) else []
        if len(values) == 1 and isinstance(values[0], (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            return values[0] if any(isinstance(node, ast.Mod) for node in ast.walk(values[0])) else test
        return test

    def _inlined(self, call: ast.Call, frame: _Frame) -> bool:
        return self._inlined_function(call.func, frame, call)

    def _inlined_function(self, node: ast.expr, frame: _Frame, call: ast.Call | None = None) -> bool:
        """Follow a call of a function of this module; return whether it was followed."""
        callee = self._callee(node, frame)
        if callee is None or callee in frame.active or len(frame.active) > MAX_DEPTH:
            return False
        assert isinstance(callee.node, (ast.FunctionDef, ast.AsyncFunctionDef))
        names: dict[str, str] = {}
        home = callee.parent
        if (
            home is not None
            and home in frame.scope.enclosing()
            and not isinstance(home.node, (ast.Module, ast.ClassDef))
        ):
            names.update(frame.names)  # a nested function sees the names around it
        if call is not None:
            names.update(self._arguments(callee, call, frame))
        prefix = f"{next(self._frames)}:"
        self._block(
            callee.node.body,
            replace(frame, scope=callee, names=names, prefix=prefix, active=(*frame.active, callee)),
        )
        return True

    def _arguments(self, callee: Scope, call: ast.Call, frame: _Frame) -> dict[str, str]:
        assert isinstance(callee.node, (ast.FunctionDef, ast.AsyncFunctionDef))
        names = parameters(callee.node, positional=True)
        if callee.owner is not None and names[:1] == ["self"]:
            names = names[1:]
        found = {}
        for name, value in arguments(call, names).items():
            found[name] = self._canonical(value, frame)
            scaler = self._scaler_of(value, frame)
            if scaler:
                self._scaled[found[name]] = scaler
        return found

    def _callee(self, node: ast.expr, frame: _Frame) -> Scope | None:
        text = dotted(node)
        if text is None:
            return None
        if text.startswith("self.") and frame.scope.owner is not None:
            method = frame.scope.owner.functions.get(text.removeprefix("self."))
            return None if method is None or isinstance(method.node, ast.ClassDef) else method
        for scope in frame.scope.enclosing():
            if text in scope.functions:
                found = scope.functions[text]
                return None if isinstance(found.node, ast.ClassDef) else found
            if text in scope.parameters:
                return None
        return None


def _calls_of(node: ast.AST, tests: Tests = ()) -> Iterator[tuple[ast.Call, Tests]]:
    """Yield the calls of an expression, the inner ones first, without those of lambdas.

    With each call come the tests of conditional expressions, `and` and `or` under which it is made.
    """
    if isinstance(node, ast.IfExp):
        yield from _calls_of(node.test, tests)
        yield from _calls_of(node.body, (*tests, (node.test, True)))
        yield from _calls_of(node.orelse, (*tests, (node.test, False)))
        return
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _calls_of(value, tests)
            tests = (*tests, (value, isinstance(node.op, ast.And)))
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, APART):
            yield from _calls_of(child, tests)
    if isinstance(node, ast.Call):
        yield node, tests


def _gradient_in(node: ast.expr) -> ast.expr | None:
    """Return the `x.grad` on which a chain such as `x.grad.detach().norm()` is built."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return node
        node = node.func if isinstance(node, ast.Call) else node.value
    return None
