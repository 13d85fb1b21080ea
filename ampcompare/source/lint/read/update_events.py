"""The calls that a training is made of, such as backward passes and steps, in the order in which they run."""

from __future__ import annotations

import ast
import enum
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ampcompare.source.amp_names import AUTOCASTS, CLIPS, WRAPPERS
from ampcompare.source.branches import (
    Facts,
    conditions_contradict,
    expression_of_condition,
    facts_with_conditions_of_test,
)
from ampcompare.source.call_order import CallFollower, CallFrame
from ampcompare.source.index import Index, ProjectFunction
from ampcompare.source.module import Scope
from ampcompare.source.object_kinds import ObjectKinds
from ampcompare.source.syntax import (
    FunctionNode,
    WithNode,
    argument,
    argument_values,
    arguments,
    child_nodes,
    dotted_name,
    is_literal,
    strip_star,
)
from ampcompare.source.torch_methods import MOVING, is_gradient, receiver_of

# Conditions that ask whether numbers are finite.
FINITE = re.compile(r"finite|isnan|isinf|\bnan\b|\binf\b", re.IGNORECASE)
MAX_EVENTS = 1500
LIBRARIES = ("accelerator", "fabric", "trainer", "engine", "strategy", "plugin")
CROSS_ENTROPIES = ("torch.nn.functional.binary_cross_entropy",)
NORMS = ("torch.norm", "torch.linalg.norm", "torch.linalg.vector_norm", "torch.nn.utils.get_total_norm")
READS = ("norm", "pow", "square", "abs")
OF_GRADIENTS = re.compile(r"(?i)clip|grad_?norm|norm_?grad")


class EventKind(enum.Enum):
    """The kinds of events of a training, such as a backward pass, `unscale_` or a step."""

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
    SCALE_LOSS = "scale_loss"
    WRAP = "wrap"
    SYNC_BATCH_NORM = "sync batch norm"
    HALF = "half"
    CAST = "cast to another type, or new weights of a type"
    CUDA = "cuda"
    LOAD = "load_state_dict"
    NEW_SCALER = "GradScaler"
    SAVE = "torch.save"
    NEW_OPTIMIZER = "optimizer"
    GRADIENT = "read or change of a gradient"
    CROSS_ENTROPY = "binary_cross_entropy"
    OPAQUE = "call of something else"
    ELSEWHERE = "call of another file, with parameters"


@dataclass(frozen=True, eq=False)
class WithBlock:
    """A `with` block around events.

    Attributes:
        kind: `scale_loss`, `autocast` or `other`.
        node: the statement.
        name: canonical name of what `as` binds.
        call: of `scale_loss` or of autocast, if it is written there.
        enabled: False for an autocast that is switched off by a literal.
    """

    kind: str
    node: WithNode
    name: str = ""
    call: ast.Call | None = None
    enabled: bool = True


@dataclass(eq=False)
class TrainingEvent:
    """One call of interest.

    Attributes:
        kind: what it is.
        call: the call itself, or the assignment that changes a gradient.
        statement: the statement that contains it.
        subject: canonical name of the object: the loss, scaler, optimizer, scheduler or model.
        target: the optimizer of a scaler's call, or what the result is bound to.
        scaler: that has scaled the loss of a backward pass.
        sources: canonical names of what a new optimizer is made from.
        facts: conditions under which it runs.
        loops: around it, the outermost first.
        contexts: around it, the outermost first.
        scope: in which it stands.
    """

    kind: EventKind
    call: ast.Call
    statement: ast.stmt
    subject: str
    facts: Facts
    loops: tuple[ast.AST, ...]
    contexts: tuple[WithBlock, ...]
    scope: Scope
    target: str = ""
    scaler: str = ""
    sources: frozenset[str] = frozenset()

    @property
    def subject_name(self) -> str:
        """The subject as it is named in the source."""
        return name_in_source(self.subject)

    @property
    def receiver(self) -> ast.expr:
        """The object whose method is called."""
        assert isinstance(self.call.func, ast.Attribute)
        return self.call.func.value

    def may_share_run_with(self, other: TrainingEvent) -> bool:
        """Return whether one run of the code can meet both events."""
        return not conditions_contradict(self.facts, other.facts)

    def scale_loss_block(self) -> WithBlock | None:
        """Return the innermost `scale_loss` block around it."""
        return next((context for context in reversed(self.contexts) if context.kind == "scale_loss"), None)

    def active_autocast_block(self) -> WithBlock | None:
        """Return the innermost autocast block around it, unless that is switched off."""
        found = next((context for context in reversed(self.contexts) if context.kind == "autocast"), None)
        return found if found is not None and found.enabled else None


def name_in_source(name: str) -> str:
    """Return a canonical name as it stands in the source."""
    return name.rpartition(":")[2]


class FunctionEventSpec(NamedTuple):
    """Which kind of event a call of a function is, and the name of its first argument, which is the subject."""

    kind: EventKind
    keyword: str = ""  # empty where it is given by position only
    is_bound: bool = False  # the target of the event is the name that gets the result


FUNCTIONS = {
    **dict.fromkeys(CLIPS, FunctionEventSpec(EventKind.CLIP)),
    **dict.fromkeys(WRAPPERS, FunctionEventSpec(EventKind.WRAP, "module", is_bound=True)),
    "apex.amp.initialize": FunctionEventSpec(EventKind.INITIALIZE, "models", is_bound=True),
    "apex.amp.scale_loss": FunctionEventSpec(EventKind.SCALE_LOSS, "loss"),
    "apex.parallel.convert_syncbn_model": FunctionEventSpec(EventKind.SYNC_BATCH_NORM, is_bound=True),
    "torch.save": FunctionEventSpec(EventKind.SAVE),
    "torch.autograd.backward": FunctionEventSpec(EventKind.BACKWARD),
}
METHODS_OF_ROLES = {
    ("scaler", "scale"): EventKind.SCALE,
    ("scaler", "step"): EventKind.SCALER_STEP,
    ("scaler", "update"): EventKind.UPDATE,
    ("optimizer", "step"): EventKind.STEP,
    ("scheduler", "step"): EventKind.SCHEDULE,
}
SCHEDULERS = ("torch.optim.lr_scheduler.", "transformers.get_")
WITH_ARGUMENT = (EventKind.SCALE, EventKind.SCALER_STEP)  # that are no events without what they scale or step
QUIET_METHODS = ("state_dict", "add_param_group", "train", "eval")  # of an optimizer, that are no events
METHODS = {
    "unscale_": EventKind.UNSCALE,
    "zero_grad": EventKind.ZERO_GRAD,
    "half": EventKind.HALF,
    **dict.fromkeys(
        ("bfloat16", "float", "double", "type", "from_pretrained", "from_config"), EventKind.CAST
    ),
    "cuda": EventKind.CUDA,
    "to": EventKind.CUDA,
    "load_state_dict": EventKind.LOAD,
}


class EventTracer(CallFollower):
    """The events of one function or module: calls of interest, with the caller's names for what is passed."""

    def __init__(self, index: Index, kinds: ObjectKinds) -> None:
        super().__init__(index)
        self._kinds = kinds

    def trace_scope(self, scope: Scope) -> list[TrainingEvent]:
        """Return the events of a function or of the module."""
        self._events: list[TrainingEvent] = []
        self._scaled: dict[str, str] = {}
        self.follow_scope(scope)
        return self._events

    def is_done_following(self) -> bool:
        return len(self._events) > MAX_EVENTS

    def context_of_with_item(self, item: ast.withitem, statement: WithNode, frame: CallFrame) -> WithBlock:
        bound = "" if item.optional_vars is None else self._canonical_text(item.optional_vars, frame)
        return self._context_of_event(item.context_expr, statement, bound, frame)

    def _context_of_event(
        self, node: ast.expr, statement: WithNode, bound: str, frame: CallFrame
    ) -> WithBlock:
        choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
        text = dotted_name(node)
        if text is not None:
            choices += self.module.values_of(text, frame.scope) or []
        for choice in choices:
            if not isinstance(choice, ast.Call):
                continue
            full = self.module.resolve(choice.func, frame.scope) or ""
            if full == "apex.amp.scale_loss" or full.endswith("amp.scale_loss"):
                return WithBlock("scale_loss", statement, bound, choice)
            if full in AUTOCASTS:
                enabled = argument(choice, "enabled", 0 if full == "torch.cuda.amp.autocast" else None)
                off = isinstance(enabled, ast.Constant) and not enabled.value
                return WithBlock("autocast", statement, bound, choice, enabled=not off)
        return WithBlock("other", statement, bound)

    def handle_node(self, node: ast.AST, statement: ast.stmt, frame: CallFrame) -> None:
        assert isinstance(node, ast.Call)
        if not self.follow_named_function(node.func, frame, node):
            self._record_call(node, statement, frame)

    def _record_call(self, call: ast.Call, statement: ast.stmt, frame: CallFrame) -> None:
        """Record a call of a function, of a class or of a method, if it is an event."""
        full = self.module.resolve(call.func, frame.scope) or ""
        add = functools.partial(self._add_event, call, statement, frame)
        if full in FUNCTIONS:
            self._add_function_event(call, FUNCTIONS[full], statement, frame)
        elif self._kinds.is_new_object("scaler", call, frame.scope):
            add(EventKind.NEW_SCALER, self._name_bound_by(statement, frame))
        elif self._kinds.is_new_object("optimizer", call, frame.scope):
            weights = call.args[0] if call.args else argument(call, "params")
            sources = (
                frozenset()
                if weights is None
                else frozenset(self._names_expression_is_made_from(weights, frame))
            )
            add(EventKind.NEW_OPTIMIZER, self._name_bound_by(statement, frame), sources=sources)
        elif full in CROSS_ENTROPIES or self._constructor_names_of_object(call.func, frame) == {
            "torch.nn.BCELoss"
        }:
            add(EventKind.CROSS_ENTROPY, call.func)
        elif full in NORMS and any(is_gradient(node) for node in ast.walk(call)):
            add(EventKind.GRADIENT, call.args[0] if call.args else None)
        elif not isinstance(call.func, ast.Attribute) or not self._add_method_event(
            call, call.func, statement, frame, add
        ):
            self._record_objects_passed_outside(call, full, frame, add)

    def _add_function_event(
        self, call: ast.Call, event: FunctionEventSpec, statement: ast.stmt, frame: CallFrame
    ) -> None:
        """Record the call of a function that is an event."""
        subject = call.args[0] if call.args else argument(call, event.keyword)
        if event.kind is EventKind.CLIP and isinstance(subject, ast.IfExp):
            test = self.condition_with_caller_arguments(subject.test, frame)
            for choice, holds in ((subject.body, True), (subject.orelse, False)):
                inner = replace(frame, facts=facts_with_conditions_of_test(frame.facts, test, holds))
                self._add_event(call, statement, inner, EventKind.CLIP, choice)
            return
        target: ast.expr | str | None = self._name_bound_by(statement, frame) if event.is_bound else ""
        if event.kind is EventKind.SCALE_LOSS:
            target = call.args[1] if len(call.args) > 1 else argument(call, "optimizers")
        scaler = self._scaler_of_loss(subject, frame) if event.kind is EventKind.BACKWARD else ""
        self._add_event(call, statement, frame, event.kind, subject, target, scaler)

    def _record_objects_passed_outside(
        self, call: ast.Call, full_name: str, frame: CallFrame, add: Callable[..., None]
    ) -> None:
        """Record what a call of something else gets: a scaler, an optimizer, or parameters in another file."""
        for value in argument_values(call):
            if full_name.startswith(
                SCHEDULERS
            ):  # which read the optimizer, and step nothing as they are made
                break
            if self._kinds.kind_of_object(value, frame.scope) in ("scaler", "optimizer"):
                add(EventKind.OPAQUE, value)
        if full_name and OF_GRADIENTS.search(full_name) and not full_name.startswith(("torch.", "apex.")):
            add(EventKind.ELSEWHERE, call.args[0] if call.args else None)

    def _add_event(
        self,
        call: ast.Call,
        statement: ast.stmt,
        frame: CallFrame,
        kind: EventKind,
        subject: ast.expr | str | None,
        target: ast.expr | str | None = "",
        scaler: str = "",
        sources: frozenset[str] = frozenset(),
    ) -> None:
        subject = subject if isinstance(subject, str) else self._canonical_text(subject, frame)
        target = target if isinstance(target, str) else self._canonical_text(target, frame)
        where = frame.facts, frame.loops, frame.contexts, frame.scope
        self._events.append(TrainingEvent(kind, call, statement, subject, *where, target, scaler, sources))

    def _add_method_event(
        self,
        call: ast.Call,
        function: ast.Attribute,
        statement: ast.stmt,
        frame: CallFrame,
        add: Callable[..., None],
    ) -> bool:
        """Record the call of a method that is an event; return whether it is one."""
        receiver, name = function.value, function.attr
        if name == "backward":
            self._add_backward_event(call, receiver, frame, add)
            return True
        role = self._kinds.kind_of_object(receiver, frame.scope)
        kind = METHODS_OF_ROLES.get((role, name))
        first = call.args[0] if call.args else argument(call, "optimizer")
        if kind in WITH_ARGUMENT and first is None:
            return False
        if kind is not None:
            for value in call.args if kind is EventKind.STEP else ():
                self.follow_named_function(value, frame)  # a closure
            add(kind, receiver, first if kind in WITH_ARGUMENT else "")
        elif role == "optimizer" and name not in METHODS and name not in QUIET_METHODS:
            add(EventKind.OPAQUE, receiver)  # a method of an optimizer of another kind
        elif name in METHODS:
            add(
                METHODS[name],
                receiver,
                first if name == "unscale_" else self._name_bound_to_chain(call, statement, frame),
            )
        elif (name in READS or name.endswith("_")) and (gradient := _gradient_in(receiver)) is not None:
            add(EventKind.GRADIENT, gradient)
        else:
            return False
        return True

    def _add_backward_event(
        self, call: ast.Call, receiver: ast.expr, frame: CallFrame, add: Callable[..., None]
    ) -> None:
        """Record a backward pass: of a loss, or by a library, which may scale it."""
        scaler = self._scaler_of_loss(receiver, frame)
        owner = (dotted_name(receiver) or "").rpartition(".")[2].lower()
        is_foreign = any(word in owner for word in LIBRARIES) or (call.args and "loss" not in owner)
        if is_foreign and not scaler:
            add(EventKind.FOREIGN_BACKWARD, receiver)
        else:
            add(EventKind.BACKWARD, receiver, scaler=scaler)

    def _constructor_names_of_object(self, node: ast.expr, frame: CallFrame) -> set[str]:
        """Return the full names of what builds the objects that a name or attribute may be."""
        text = dotted_name(node)
        values = [node] if text is None else self.module.values_of(text, frame.scope) or []
        return {self._constructor_name_of_object(one, frame) for one in values}

    def _constructor_name_of_object(self, node: ast.expr, frame: CallFrame) -> str:
        """Return the full name of what builds an object, which may be moved to a device there; "" if unknown."""
        while (moved := receiver_of(node, MOVING)) is not None:
            node = moved
        return self.module.resolve(node.func, frame.scope) or "" if isinstance(node, ast.Call) else ""

    def _scaler_of_loss(self, node: ast.expr | None, frame: CallFrame) -> str:
        """Return the scaler that has scaled a loss."""
        if node is None:
            return ""
        scaler = receiver_of(node, ("scale",))
        if scaler is not None and self._kinds.kind_of_object(scaler, frame.scope) == "scaler":
            return self._canonical_text(scaler, frame)
        return self._scaled.get(self._canonical_text(node, frame), "")

    def after_statement(self, statement: ast.stmt, frame: CallFrame) -> None:
        if not isinstance(statement, (ast.Assign, ast.AugAssign)):
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if (gradient := _gradient_in(target)) is not None and not is_literal(statement.value, None):
                self._add_event(statement, statement, frame, EventKind.GRADIENT, gradient)  # type: ignore[arg-type]
        if isinstance(statement, ast.AugAssign) or len(targets) != 1:
            return
        name = self._canonical_text(targets[0], frame)
        scaler = self._scaler_of_loss(statement.value, frame)
        if scaler:
            self._scaled[name] = scaler
        else:
            self._scaled.pop(name, None)

    def _name_bound_by(self, statement: ast.stmt, frame: CallFrame) -> str:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            first = target.elts[0] if isinstance(target, (ast.Tuple, ast.List)) and target.elts else target
            return self._canonical_text(first, frame)
        return ""

    def _name_bound_to_chain(self, call: ast.Call, statement: ast.stmt, frame: CallFrame) -> str:
        """Return the name that gets the result of a chain such as `compile(Net().half()).cuda()` with a call in it."""
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return ""
        pairs = [(statement.targets[0], statement.value)]
        if isinstance(statement.targets[0], ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = list(zip(statement.targets[0].elts, statement.value.elts, strict=False))
        for target, value in pairs:
            node: ast.expr | None = value
            while isinstance(node, ast.Call) and node is not call:
                if self.module.resolve(node.func, frame.scope) in (*WRAPPERS, "torch.compile"):
                    node = node.args[0] if node.args else None
                else:
                    node = node.func.value if isinstance(node.func, ast.Attribute) else None
            if node is not None and node is call:
                return self._canonical_text(target, frame)
        return ""

    def _names_expression_is_made_from(
        self, node: ast.expr, frame: CallFrame, known: frozenset[str] = frozenset()
    ) -> set[str]:
        """Return the canonical names that an expression is made from, through names that are assigned above it."""
        found: set[str] = set()
        waiting: list[ast.AST] = [node]
        while waiting:
            each = waiting.pop()
            text = dotted_name(each)
            if isinstance(each, ast.Call):
                receiver = [each.func.value] if isinstance(each.func, ast.Attribute) else []
                waiting += [*receiver, *argument_values(each)]
            elif text is None:
                waiting += child_nodes(each)
            elif text not in known and self.module.resolve(each, frame.scope, follow=False) is None:
                assert isinstance(each, ast.expr)
                found.add(self._canonical_text(each, frame))
                for value in self._values_given_to_name(text, frame.scope):
                    if value.lineno < node.lineno:
                        found |= self._names_expression_is_made_from(value, frame, known | {text})
        return found

    def _values_given_to_name(self, text: str, scope: Scope) -> list[ast.expr]:
        """Return what a name of a scope is assigned, or gets by `append`, `extend` and `update`."""
        values = list(map(strip_star, scope.values.get(text, ())))
        if any(isinstance(value, (ast.List, ast.Dict, ast.ListComp)) for value in values):
            for call, receiver in self.module.method_calls("append", "extend", "update", "insert"):
                if dotted_name(receiver) == text and self.module.scope_of[call] is scope:
                    values += argument_values(call)
        return values

    def _canonical_text(self, node: ast.AST | None, frame: CallFrame) -> str:
        """Return one text for an object, the same in the functions that it is passed to."""
        if node is None:
            return ""
        text = dotted_name(node)
        if isinstance(node, ast.expr) and (text is None or text.partition(".")[0] not in frame.names):
            model = self._kinds.model_of_parameters(node, frame.scope)
            if model is not None:
                return f"{self._canonical_text(model, frame)}.parameters()"
        if text is None:
            if isinstance(node, ast.Subscript):
                return f"{self._canonical_text(node.value, frame)}[{ast.unparse(node.slice)}]"
            return ast.unparse(node) if isinstance(node, ast.expr) else ""
        head, dot, rest = text.partition(".")
        scope = frame.scope
        values = scope.values.get(head, ())
        if head in frame.names:
            return frame.names[head] + dot + rest
        if (
            len(values) == 1
            and head not in scope.parameters
            and (alias := dotted_name(values[0])) not in (None, head)
        ):
            if not str(alias).startswith(f"{head}.") and not any(
                head in one.imports for one in scope.lookup_scopes()
            ):
                return (
                    self._canonical_text(values[0], replace(frame, names={**frame.names, head: head}))
                    + dot
                    + rest
                )
        if head in scope.parameters or head in scope.values:
            return f"{frame.prefix}{text}" if head != "self" else text
        return text

    def condition_part_in_root_names(self, test: ast.expr, frame: CallFrame) -> ast.expr:
        # A name such as `is_last` is the test of a remainder.
        head, dot, rest = (dotted_name(test) or "").partition(".")
        if head in frame.names and ":" not in frame.names[head] and frame.names[head] != head:
            return expression_of_condition(frame.names[head] + dot + rest) or test
        values = frame.scope.values.get(test.id, []) if isinstance(test, ast.Name) else []
        if len(values) == 1 and isinstance(values[0], (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            return values[0] if any(isinstance(node, ast.Mod) for node in ast.walk(values[0])) else test
        return test

    def bind_arguments(self, function: ProjectFunction, call: ast.Call, frame: CallFrame) -> dict[str, str]:
        node = function.scope.node
        assert isinstance(node, FunctionNode)
        found = {}
        for name, value in arguments(call, self.module.positional_parameters_without_self(node)).items():
            found[name] = self._canonical_text(value, frame)
            scaler = self._scaler_of_loss(value, frame)
            if scaler:
                self._scaled[found[name]] = scaler
        return found


def _gradient_in(node: ast.expr) -> ast.expr | None:
    """Return the `x.grad` on which a chain such as `x.grad.detach().norm()` is built."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        if is_gradient(node):
            return node
        node = node.func if isinstance(node, ast.Call) else node.value
    return None
