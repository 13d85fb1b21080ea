"""In which order backward passes, reads of gradients and steps happen, across the functions and files of a project.

What the index cannot follow between a scaled backward pass and the step of its optimizer is not proven, and refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ampcompare.source.branches import (
    Facts,
    conditions_contradict,
    expression_of_condition,
    facts_with_conditions_of_test,
)
from ampcompare.source.call_order import DEFINITIONS, CallFollower, CallFrame
from ampcompare.source.index import (
    Answer,
    ImportedObject,
    Index,
    ProjectFunction,
    SoughtEvent,
    UnknownFunction,
    functions_of_callee,
    own_nodes_of_scope,
)
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.sites import (
    BackwardPass,
    GradientRead,
    OptimizerStep,
    Sites,
    is_clip_or_norm_call,
    model_names,
    reads_or_changes_gradient,
)
from ampcompare.source.module import Module, Scope
from ampcompare.source.object_kinds import SCHEDULER, may_be_optimizer_name
from ampcompare.source.syntax import (
    FunctionNode,
    argument,
    argument_values,
    arguments,
    dotted_name,
    elements,
    last_name,
    last_part,
    names_bound_in,
    walk,
)
from ampcompare.source.torch_methods import CLEARING, is_gradient, receiver_of

SCALE_LOSS = "apex.amp.scale_loss"
# Of an optimizer or a model, none of which reads a gradient.
QUIET = frozenset({
    "state_dict", "load_state_dict", "add_param_group", "parameters", "named_parameters", "modules", "named_modules",
    "children", "train", "eval", "cuda", "to", "keys", "items", "values", "get", "append", "update_lr", "get_lr",
    "set_lr", "no_sync", "buffers", "get_last_lr", "current_lr", "lr",
})  # fmt: skip
# What a method of any object does by its name, where nothing else is known of it: it shows, measures or keeps numbers.
# This is not proven. It counts only where a call gets neither an optimizer, nor gradients, nor an object that may hold
# both, by the names and by what went through Apex, and where its name does not speak of gradients.
SHOWS = re.compile(
    r"^_?(?:log|logs|logging|print|info|debug|warn\w*|error|write|writelines|report|record|display|show|add_scalars?|"
    r"add_\w+|set_\w+|get_\w+|is_\w+|has_\w+|format|append|extend|items?|keys|values|join|split|item|tolist|numpy|cpu|"
    r"detach|float|mean|sum|size|dim|view|time|tic|toc|start|stop|elapsed|now|refresh|close|flush|step_lr|sleep|"
    r"synchronize|empty_cache|len|range|max|min|abs|round|int|str|list|dict|tuple|zip|enumerate|sorted|isinstance|"
    r"update\w*|log_\w+|save\w*|write_\w+|all_reduce|reduce\w*|barrier|clone|pop|copy|next|state_dict)$"
)
# Names of what may hold gradients, and of what may hold an optimizer too, where the index knows no value. They only
# ever refuse: what went through `amp.initialize` or `scale_loss` counts under any name.
OBJECTS = re.compile(
    r"^_*(?:model|net|network|module|optim\w*|opt|param\w*|grads?|gradients?|trainer|runner|engine)s?$"
)
CARRIES_ALL = re.compile(r"^_*(?:self|trainer|runner|engine|state|ctx|context|learner|solver)$")
OF_GRADIENTS = re.compile(r"grad|clip|norm|unscale|backward|optim|step|hook|callback", re.IGNORECASE)
# A name that speaks of gradients: what it does to them is not known, whatever it gets; that it reads them is.
WORKS_ON_GRADIENTS = re.compile(
    r"^(?!.*(?:require|no_|enable|zero|clear|reset|is_|need)\w*grad).*grad(?!e|ual)|unscale", re.IGNORECASE
)

GIVING_PARAMETERS = frozenset({
    "parameters", "named_parameters", "modules", "named_modules", "master_params", "children",
})  # fmt: skip
JOINING = frozenset(
    {"list", "tuple", "iter", "filter", "chain", "sorted", "map", "zip", "vars", "reversed", "enumerate"}
)
ASKS_GRADIENTS = re.compile(r"^(?:\w*_)?(?:g?norm|grad_?norm|gradients?|grads?|overflow)s?$", re.IGNORECASE)
NEAR = 3  # levels of calls that are followed whatever they hold; deeper only what surely has an event
MAX_CHOICES = 6  # of functions that one call may name
SOMETIMES = (
    "the backward pass runs only if {0}, and this step in other cases too: scaler.step fails without one"
)
NOT_SEEN = (
    "it is not seen that a backward pass runs above this step in every case: scaler.step fails without one"
)
MOST_TOLD = 6  # conditions of backward passes that one reason tells
NO_TEST = re.compile(r"(?:not \()?(?:try|call) at ")  # keys of facts that are no conditions of the script
KEPT = (
    "gradients are cleared only{0}: what is kept over a step, or over one that is left out, would be unscaled by the "
    "scaler a second time"
)
SPELLED = "text of "  # before the name of a parameter: what the first function calls its argument


@dataclass
class GradientEventOrder:
    """What was proven from the order of backward passes, steps and reads: which steps are scaled, where to update.

    Attributes:
        updates: steps (by `id` of the call) after which the scale is updated.
        scaled: steps (by `id` of the call) that a backward pass for their optimizer precedes.
        pending: optimizers whose gradients are scaled and not yet used, at each read (by `id` of its node).
        seen: whether a block was met at all.
        guards: steps (by `id` of the call) with the tests of gradients that decide on them.
        unscaled_before: reads (by `id` of the node) in functions that a statement calls, which counts as the read.
        plain: backward passes (by `id` of the node) whose steps stay as they are, and so do they.
        named: what is taken to leave gradients alone by its name, each with the node of this module that leads there.
    """

    updates: dict[int, bool] = field(default_factory=dict)
    scaled: set[int] = field(default_factory=set)
    pending: dict[int, tuple[str, ...]] = field(default_factory=dict)
    guards: dict[int, set[str]] = field(default_factory=dict)
    plain: set[int] = field(default_factory=set)
    unscaled_before: set[int] = field(default_factory=set)
    seen: bool = False
    named: dict[str, ast.AST] = field(default_factory=dict)


@dataclass(eq=False)
class GradientEvent:
    """One backward pass, step, read or clearing of gradients, or a call that may be any of these.

    Attributes:
        kind: `backward`, `step`, `read`, `clear`, `unknown` for a call that may do any of these, or `shows` for one
            that gets a model and does none of them by its name alone.
        site: of the module that is rewritten; None for what is elsewhere, or no part of it.
        names: one text for each optimizer, the same in all functions; empty where it is not known.
        calls: the function and the call in it on each level down to this, the outermost first.
    """

    kind: str
    node: ast.AST
    scope: Scope
    site: BackwardPass | OptimizerStep | GradientRead | None
    names: tuple[str, ...]
    facts: Facts
    loops: tuple[ast.AST, ...]
    calls: tuple[tuple[Scope, ast.AST], ...]
    block: bool = False
    text: str = ""

    def may_share_run_with(self, other: GradientEvent) -> bool:
        """Return whether one run can meet both."""
        return not conditions_contradict(self.facts, other.facts)


def find_event_order(index: Index, sites: Sites) -> GradientEventOrder:
    """Return the order of events, of all that the index follows.

    Raises:
        UnsureRewrite: what happens between a scaled backward pass and its step is not proven.
    """
    return _OrderProof(index, sites).prove_order()


def is_scale_loss_call(module: Module, node: ast.AST) -> bool:
    """Return whether a node is a call of `scale_loss`."""
    return isinstance(node, ast.Call) and module.resolve(node.func) == SCALE_LOSS


def is_backward_pass(module: Module, node: ast.AST) -> bool:
    """Return whether a node is a backward pass."""
    return receiver_of(node, ("backward",)) is not None


def is_gradient_read(module: Module, node: ast.AST) -> bool:
    """Return whether a node reads or changes gradients."""
    return is_clip_or_norm_call(node) or reads_or_changes_gradient(module, node)


def is_optimizer_step(module: Module, node: ast.AST) -> bool:
    """Return whether a node is a step of something that is no scheduler by its name."""
    if (
        not isinstance(node, ast.Call)
        or last_name(node.func) != "step"
        or not isinstance(node.func, ast.Attribute)
    ):
        return False
    owner = node.func.value.value if isinstance(node.func.value, ast.Subscript) else node.func.value
    return SCHEDULER.search(last_name(owner).strip("_").lower()) is None


def is_step_or_read(module: Module, node: ast.AST) -> bool:
    """Return whether a node steps an optimizer, by its name, or reads gradients."""
    owner = _receiver_of_call(node)
    named = owner is not None and may_be_optimizer_name(last_name(owner))
    return is_gradient_read(module, node) or (named and is_optimizer_step(module, node))


def touches_no_gradient_by_name(module: Module, call: ast.Call) -> bool:
    """Return whether a call of an unknown function surely touches no gradient, by its name and arguments."""
    return not _may_touch_gradients(module, call)


BLOCK = SoughtEvent("scale_loss", is_scale_loss_call, lambda module, call: True)
BACKWARD = SoughtEvent("backward", is_backward_pass, touches_no_gradient_by_name)
READ = SoughtEvent("read", is_gradient_read, touches_no_gradient_by_name)
STEP = SoughtEvent("step", is_optimizer_step, touches_no_gradient_by_name)


def is_gradient_event(module: Module, node: ast.AST) -> bool:
    """Return whether a node is an event of any kind."""
    if isinstance(node, ast.Call) and last_name(node.func) in (*CLEARING, "backward"):
        return True
    return (
        is_optimizer_step(module, node) or is_gradient_read(module, node) or is_scale_loss_call(module, node)
    )


OF_INTEREST = SoughtEvent("of interest", is_gradient_event, touches_no_gradient_by_name)


def _may_touch_gradients(module: Module, call: ast.Call) -> bool:
    """Return whether a call that nothing is known of may read gradients, step or run a backward pass."""
    return bool(_kinds_of_gradient_holders_given(module, call)) or bool(
        OF_GRADIENTS.search(last_name(call.func))
    )


def _kinds_of_gradient_holders_given(module: Module, call: ast.Call) -> set[str]:
    """Return what a call gets that has gradients: `all`, `optimizer`, `parameters`, `gradients`."""
    found: set[str] = set()
    waiting = argument_values(call)
    while waiting:
        node = waiting.pop()
        name = last_name(node)
        if isinstance(node, ast.Call):
            maker = last_name(node.func)
            if maker in GIVING_PARAMETERS:
                found.add("parameters")
            elif maker in JOINING:
                waiting += argument_values(node)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            if name == "param_groups" or (name == "grad" and reads_or_changes_gradient(module, node)):
                found.add("gradients")
            elif CARRIES_ALL.search(name):
                found.add("all")
            elif may_be_optimizer_name(name):
                found.add("optimizer")
            elif OBJECTS.search(name):
                found.add("parameters")
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            waiting += [node.elt, node.generators[0].iter]
        elif isinstance(node, ast.Subscript):
            waiting.append(node.value)
        elif isinstance(node, ast.Lambda):
            waiting.append(node.body)
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred, ast.IfExp, ast.BoolOp)):
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
    return found


class _EventFollower(CallFollower):
    """The events of a function, with those of the functions that it calls, in whatever file they are."""

    kinds = (ast.Call, ast.Attribute)
    apart = (*DEFINITIONS, ast.Name, ast.Constant)
    max_reached = 40_000
    max_depth = 12

    def __init__(self, index: Index, sites: Sites) -> None:
        super().__init__(index)
        self._sites: dict[int, BackwardPass | OptimizerStep | GradientRead] = {}
        for backward in sites.backwards:
            self._sites[id(backward.node)] = backward
        for step in sites.steps:
            self._sites[id(step.call)] = step
        for read in sites.reads:
            self._sites[id(read.node)] = read
        self._calls: tuple[tuple[Scope, ast.AST], ...] = ()
        self._tails = {last_part(key) for key in sites.optimizers} | {
            last_part(each.optimizer) for each in sites.steps
        }
        self._models = model_names(index.module, sites)

    def events_of_scope(self, scope: Scope) -> list[GradientEvent]:
        """Return the events of a function or of the module."""
        self.found: list[GradientEvent] = []
        self._calls = ()
        self.follow_scope(scope)
        return self.found

    def handle_node(self, node: ast.AST, statement: ast.stmt, frame: CallFrame) -> None:
        module = frame.scope.module
        site = self._sites.get(id(node))
        if isinstance(site, BackwardPass):
            self._record_event(
                "backward", node, frame, site, self._optimizers_of_backward(site, frame), block=site.block
            )
        elif isinstance(site, OptimizerStep):
            self._record_event(
                "step", node, frame, site, (self.canonical_text_of(_receiver_of_call(node), frame),)
            )
        elif isinstance(site, GradientRead):
            self._record_event(
                "read", node, frame, site, tuple(self._canonical_key(key, frame) for key in site.optimizers)
            )
        elif is_scale_loss_call(module, node):
            assert isinstance(node, ast.Call)
            given = argument(node, "optimizers", 1)
            names = tuple(
                self.canonical_text_of(each, frame) for each in (elements(given) if given is not None else ())
            )
            self._record_event("backward", node, frame, None, names, block=True)
        elif isinstance(node, ast.Attribute):
            if reads_or_changes_gradient(module, node):
                self._record_event("read", node, frame)
        elif isinstance(node, ast.Call) and not self._follow_possible_callees(node, frame):
            self._record_outside_call(node, frame)

    def _follow_possible_callees(self, call: ast.Call, frame: CallFrame) -> bool:
        """Follow all functions that a call may name; return whether it names functions of the project alone."""
        callee = self.index.callee(call, frame.scope, frame.receiver)
        functions = [each for each in functions_of_callee(callee) if isinstance(each, ProjectFunction)]
        answers = {each: self.index.reaches_event(each, OF_INTEREST) for each in functions}
        known = not isinstance(callee, UnknownFunction) and all(
            isinstance(each, ProjectFunction) for each in functions_of_callee(callee)
        )
        functions = [each for each in functions if answers[each] is not Answer.NO]
        deep = len(frame.active) > NEAR and all(answers[each] is Answer.UNKNOWN for each in functions)
        if functions and (deep or len(functions) > MAX_CHOICES):
            self._record_event("unknown", call, frame, text="all")
            return True
        if not functions and answers and known:
            return True
        followed = False
        for number, each in enumerate(functions):
            inner = frame
            if len(functions) > 1:
                key = f"call at {call.lineno}:{call.col_offset}"
                inner = CallFrame(**{**vars(frame), "facts": {**frame.facts, key: number}})
            before, self._calls = self._calls, (*self._calls, (frame.scope, call))
            followed = self.follow_called_function(each, inner, call) or followed
            self._calls = before
        return bool(functions) and known

    def _record_outside_call(self, call: ast.Call, frame: CallFrame) -> None:
        """Record a call of something outside of the project, or of something that nobody knows."""
        module, owner = frame.scope.module, _receiver_of_call(call)
        if last_name(call.func) in CLEARING:
            self._record_event(
                "clear",
                call,
                frame,
                names=(self.canonical_text_of(owner, frame),) if owner is not None else (),
            )
        elif is_backward_pass(module, call):
            if not any(_is_scale_loss_block(module, each) for each in module.ancestors(call)):
                self._record_event("backward", call, frame)
        elif is_optimizer_step(module, call) and owner is not None:
            key = self.canonical_text_of(owner, frame)
            if last_part(key).rstrip("[]") in self._tails or may_be_optimizer_name(last_name(owner)):
                self._record_event("step", call, frame, names=(key,))
        elif is_gradient_read(module, call):
            self._record_event("read", call, frame)
        elif not _comes_from_gradient(
            module, owner
        ):  # that one is a tensor's; that its gradient is read is recorded alone
            self._record_other_call(call, frame)

    def _record_other_call(self, call: ast.Call, frame: CallFrame) -> None:
        """Record a call that is no event by its name, by what it gets and what is known of it."""
        name, callee = last_name(call.func), self.index.callee(call, frame.scope, frame.receiver)
        carried = _kinds_of_gradient_holders_given(frame.scope.module, call) | self._holders_given_by_origin(
            call, frame
        )
        if isinstance(callee, ImportedObject) and callee.name.partition(".")[0] in KNOWN_PACKAGES:
            if not carried - {"gradients"} or _is_harmless_callee(callee):
                return
        elif WORKS_ON_GRADIENTS.search(name):
            self._record_unknown_call(call, frame, carried or {"all" if "scale" in name else "gradients"})
            return
        if not carried and not _may_touch_gradients_by_name(
            call, unknown=isinstance(callee, UnknownFunction)
        ):
            return
        if SHOWS.search(name) and not carried & {"all", "optimizer", "gradients"} and name != "update":
            self._record_event("shows", call, frame)
        else:
            by_itself = "self" if _is_method_of_self(call) and not OF_GRADIENTS.search(name) else "all"
            self._record_unknown_call(call, frame, carried or {by_itself})

    def _record_unknown_call(self, call: ast.Call, frame: CallFrame, carried: set[str]) -> None:
        self._record_event("unknown", call, frame, text=",".join(sorted(carried)))

    def _holders_given_by_origin(self, call: ast.Call, frame: CallFrame) -> set[str]:
        """Return what a call gets of what went through Apex, whatever the names are."""
        found: set[str] = set()
        seen: set[str] = set()
        waiting = argument_values(call)
        while waiting:
            node = waiting.pop()
            if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Starred, ast.IfExp, ast.BoolOp)):
                waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
            elif isinstance(node, ast.Call) and last_name(node.func) in JOINING:
                waiting += argument_values(node)
            elif isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
                tail = last_part(self.canonical_text_of(node, frame).rpartition(":")[2]).rstrip("[]")
                if tail in self._tails:
                    found.add("optimizer")
                if tail in self._models:
                    found.add("parameters")
                if isinstance(node, ast.Name) and node.id not in seen:  # of a loop, or another name
                    seen.add(node.id)
                    waiting += [
                        each for each in frame.scope.values.get(node.id, ()) if isinstance(each, ast.expr)
                    ]
        return found

    def _record_event(
        self,
        kind: str,
        node: ast.AST,
        frame: CallFrame,
        site: BackwardPass | OptimizerStep | GradientRead | None = None,
        names: tuple[str, ...] = (),
        block: bool = False,
        text: str = "",
    ) -> None:
        calls = (*self._calls, (frame.scope, node))
        self.found.append(
            GradientEvent(kind, node, frame.scope, site, names, frame.facts, frame.loops, calls, block, text)
        )

    def _optimizers_of_backward(self, backward: BackwardPass, frame: CallFrame) -> tuple[str, ...]:
        if not backward.block:
            return ()
        given = backward.arguments.get("optimizers")
        return tuple(
            self.canonical_text_of(each, frame) for each in (elements(given) if given is not None else ())
        )

    def _canonical_key(self, key: str, frame: CallFrame) -> str:
        return (
            self.canonical_text_of(ast.parse(key, mode="eval").body, frame)
            if key.replace(".", "").isidentifier()
            else key
        )

    def canonical_text_of(self, node: ast.AST | None, frame: CallFrame, depth: int = 0) -> str:
        """Return one text for an object, the same in all functions that it is passed to."""
        if isinstance(node, ast.Subscript):
            return f"{self.canonical_text_of(node.value, frame, depth)}[]"
        text = dotted_name(node)
        if text is None or depth > 8:
            return ast.unparse(node) if isinstance(node, ast.expr) else ""
        head, dot, rest = text.partition(".")
        if head in frame.names:
            return frame.names[head] + dot + rest
        if head == "self" and frame.scope.owner is not None:
            return f"<{id(self.index.topmost_class_of(frame.receiver or frame.scope.owner))}>{dot}{rest}"
        for one in frame.scope.lookup_scopes():
            if head in one.parameters:
                return f"{id(one)}:{text}"
            values = one.values.get(head)
            if values:
                alias = dotted_name(values[0])
                if len(values) == 1 and alias is not None and alias.partition(".")[0] != head:
                    return (
                        self.canonical_text_of(
                            values[0], CallFrame(**{**vars(frame), "scope": one}), depth + 1
                        )
                        + dot
                        + rest
                    )
                if (
                    len(values) == 1
                    and isinstance(values[0], ast.Starred)
                    and dotted_name(values[0].value) is not None
                ):
                    inner = CallFrame(**{**vars(frame), "scope": one})
                    return f"{self.canonical_text_of(values[0].value, inner, depth + 1)}[]{dot}{rest}"
                return f"{id(one)}:{text}"
        return f"{id(frame.scope.module.top)}:{text}"

    def bind_arguments(self, function: ProjectFunction, call: ast.Call, frame: CallFrame) -> dict[str, str]:
        node = function.scope.node
        assert isinstance(node, FunctionNode)
        names = function.module.positional_parameters_without_self(node)
        found = {}
        for given in (*function.given, call):
            values = list(given.args[1:]) if given is not call else list(given.args)
            for name, value in zip(names, values, strict=False):
                found[name] = self.canonical_text_of(value, frame)
            names = names[len(values) :]
            found |= {
                one.arg: self.canonical_text_of(one.value, frame)
                for one in given.keywords
                if one.arg is not None
            }
        for name, value in arguments(call, function.module.positional_parameters_without_self(node)).items():
            if dotted_name(value) is not None or isinstance(value, ast.Constant):
                found[SPELLED + name] = ast.unparse(self.condition_with_caller_arguments(value, frame))
        return found

    def condition_part_in_root_names(self, test: ast.expr, frame: CallFrame) -> ast.expr:
        head, dot, rest = (dotted_name(test) or "").partition(".")
        text = frame.names.get(SPELLED + head)
        return test if text is None else expression_of_condition(text + dot + rest) or test


# Packages none of whose functions steps or clips by itself, except READERS; the index says that a call is of one.
KNOWN_PACKAGES = frozenset({
    "torch", "numpy", "np", "time", "logging", "os", "sys", "math", "json", "tqdm", "random", "datetime", "builtins",
    "print", "len", "range", "float", "int", "str", "max", "min", "sum", "isinstance", "getattr", "hasattr", "round",
    "list", "dict", "tuple", "set", "zip", "enumerate", "sorted", "abs", "any", "all", "format", "repr", "type", "iter",
    "next", "open", "vars", "id", "super", "object", "collections", "functools", "itertools", "re", "warnings", "copy",
    "apex", "tensorboardX", "wandb", "torchvision", "PIL", "cv2", "matplotlib", "pandas", "scipy", "sklearn", "pathlib",
    "contextlib", "argparse", "pickle", "gc", "psutil", "threading", "shutil", "map", "filter", "reversed", "bool",
    "setattr", "delattr", "callable", "slice", "divmod", "pow", "input", "exit", "quit", "bytes", "ord", "chr",
})  # fmt: skip
READERS = ("clip_grad", "total_norm", "all_reduce_coalesced", "parameters_to_vector", "foreach")


def _is_scale_loss_block(module: Module, node: ast.AST) -> bool:
    """Return whether a node is a `with` of `scale_loss`."""
    return isinstance(node, ast.With) and any(
        is_scale_loss_call(module, item.context_expr) for item in node.items
    )


def _is_method_of_self(call: ast.Call) -> bool:
    owner = _receiver_of_call(call)
    return isinstance(owner, ast.Name) and owner.id == "self"


def _may_touch_gradients_by_name(call: ast.Call, *, unknown: bool) -> bool:
    """Return whether a call that gets nothing with gradients may touch those of its object, by the names alone.

    Args:
        unknown: whether the index knows nothing of what is called.
    """
    name, owner = last_name(call.func), _receiver_of_call(call)
    of_object = owner is not None and OBJECTS.search(last_name(owner)) is not None and name not in QUIET
    if SHOWS.search(name) or not (of_object or _is_method_of_self(call) or isinstance(call.func, ast.Name)):
        return False
    return OF_GRADIENTS.search(name) is not None or (_is_method_of_self(call) and unknown)


def _is_harmless_callee(callee: object) -> bool:
    return isinstance(callee, ImportedObject) and not any(each in callee.name for each in READERS)


def _comes_from_gradient(module: Module, node: ast.expr | None) -> bool:
    """Return whether an expression is a gradient, or comes from one by its methods: `p.grad.detach()`."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        if is_gradient(node):
            return reads_or_changes_gradient(module, node)
        node = node.func if isinstance(node, ast.Call) else node.value
    return False


def _receiver_of_call(node: ast.AST) -> ast.expr | None:
    return node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


class _OrderProof:
    """Goes through all ways that lead to a scaled backward pass, and refuses those that it cannot follow."""

    def __init__(self, index: Index, sites: Sites) -> None:
        self._index = index
        self._sites = sites
        self._module = index.module
        self._order = GradientEventOrder()
        self._met: set[int] = set()
        self._steps_fed: dict[int, set[bool]] = {}

    def prove_order(self) -> GradientEventOrder:
        events = _EventFollower(self._index, self._sites)
        seen: set[int] = set()
        if not self._sites.backwards and not self._sites.steps:
            return self._order
        traces = []
        for scope in self._roots_leading_to_sites():
            found = events.events_of_scope(scope)
            if events.cut and (block := next((each for each in found if each.block), None)) is not None:
                raise UnsureRewrite(
                    self._own_node_leading_to(block),
                    "what comes before and after this block is too much to be followed",
                )
            traces.append(found)
            seen |= {id(each.node) for each in found}
        for scope in self._module.scopes:
            if isinstance(scope.node, (ast.ClassDef, ast.Lambda)):
                continue
            own: list[BackwardPass | OptimizerStep | GradientRead] = [
                *self._sites.backwards,
                *self._sites.steps,
                *self._sites.reads,
            ]
            if any(
                self._module.scope_of[_node_of_site(each)] is scope and id(_node_of_site(each)) not in seen
                for each in own
            ):
                found = events.events_of_scope(scope)
                traces.append(found)
                seen |= {id(each.node) for each in found}
        self._find_plain_passes_to_keep(traces)
        for trace in traces:
            self._prove_trace(trace)
        for trace in traces:
            self._refuse_mixed_steps(trace)
        for step in self._sites.steps:
            self._order.updates.setdefault(id(step.call), True)
        return self._order

    def _roots_leading_to_sites(self) -> Iterator[Scope]:
        """Yield the modules and functions that lead to a site of this module and that nothing is known to call."""
        own: list[BackwardPass | OptimizerStep | GradientRead] = [*self._sites.steps, *self._sites.backwards]
        waiting = [self._module.scope_of[_node_of_site(each)] for each in own]
        seen: set[Scope] = set()
        roots: list[Scope] = []
        while waiting:
            scope = waiting.pop(0)
            if scope in seen:
                continue
            seen.add(scope)
            if isinstance(scope.node, ast.Module):
                roots.append(scope)
                continue
            if isinstance(scope.node, (ast.ClassDef, ast.Lambda)):  # no block can be in them
                waiting.append(scope.module.top)
                continue
            calls, complete = self._index.possible_calls_and_completeness(scope)
            outer = [self._index.scope_around_call(call) for call in calls]
            waiting += outer
            if not outer or not complete:
                roots.append(scope)
        return iter(roots)

    # What follows from one way.

    def _find_plain_passes_to_keep(self, traces: list[list[GradientEvent]]) -> None:
        """Find plain backward passes whose only steps are not rewritten: in a branch of their own they stay."""
        for trace in traces:
            blocks = [each for each in trace if each.block]
            for each in trace:
                if each.kind != "backward" or each.block or each.site is None:
                    continue
                others = [one for one in self._steps_after(trace, each) if one.site is None]
                if not others or any(one.site is not None for one in self._steps_after(trace, each)):
                    if others:
                        raise UnsureRewrite(
                            each.node,
                            f"{self._event_and_place_text(others[0])} may step with this loss, and is not rewritten",
                        )
                    continue
                if all(not each.may_share_run_with(one) for one in blocks):
                    self._order.plain.add(id(each.node))
                else:
                    raise UnsureRewrite(
                        each.node,
                        f"{self._event_and_place_text(others[0])} steps with this loss, and is not rewritten",
                    )

    def _steps_after(self, trace: list[GradientEvent], backward: GradientEvent) -> list[GradientEvent]:
        """Return the next steps, or calls that may step, that a backward pass leads to: one for each branch."""
        found: list[GradientEvent] = []
        for each in self._events_after(trace, backward):
            # Behind a step that may run, what nobody knows belongs to the next round.
            steps = each.kind == "step" or (each.kind == "unknown" and "optimizer" in each.text and not found)
            if steps and each.may_share_run_with(backward):
                found.append(each)
                if set(each.facts.items()) <= set(backward.facts.items()):
                    break
        return found

    @staticmethod
    def _events_after(trace: list[GradientEvent], event: GradientEvent) -> list[GradientEvent]:
        """Return what comes behind an event, and in a loop what comes before it in the next round."""
        place = trace.index(event)
        behind = trace[place + 1 :]
        if event.loops:
            inside = [each for each in behind if each.loops[: len(event.loops)] == event.loops]
            rest = [each for each in behind if each not in inside]
            again = [each for each in trace[:place] if each.loops[: len(event.loops)] == event.loops]
            return [*inside, *again, *rest]
        return behind

    def _prove_trace(self, trace: list[GradientEvent]) -> None:
        """Prove each block of a way, and find which reads and steps its scaled gradients come to."""
        self._order.seen |= any(each.block for each in trace)
        for block in (each for each in trace if each.block and each.site is not None):
            for name in block.names:
                self._prove_block(trace, block, name)
        pending: list[tuple[str, GradientEvent]] = []
        for place, event in enumerate(trace):
            if event.kind == "backward":
                pending += [(name, event) for name in self._optimizers_fed(trace, event)]
            elif event.kind == "read" and isinstance(event.site, GradientRead):
                self._note_pending_optimizers(event, pending)
            elif event.kind == "step" and isinstance(event.site, OptimizerStep):
                pending = self._pending_after_step(event, pending, trace[place + 1 :])

    def _optimizers_fed(self, trace: list[GradientEvent], backward: GradientEvent) -> list[str]:
        """Return the optimizers whose gradients a backward pass adds to: for a plain one, those of its blocks."""
        if backward.block:
            return list(backward.names)
        if not isinstance(backward.site, BackwardPass) or id(backward.node) in self._order.plain:
            return []
        near = [each for each in trace if each.block and each.scope is backward.scope]
        same = [each for each in near if each.calls[:-1] == backward.calls[:-1]] or near
        return [name for each in same for name in each.names]

    def _note_pending_optimizers(self, read: GradientEvent, pending: list[tuple[str, GradientEvent]]) -> None:
        """Note the optimizers whose gradients are still scaled at a read."""
        texts = dict.fromkeys(
            self._optimizer_key_at(name, read) for name, one in pending if one.may_share_run_with(read)
        )
        if texts:
            self._order.pending[id(read.node)] = tuple(texts)

    def _pending_after_step(
        self, step: GradientEvent, pending: list[tuple[str, GradientEvent]], later_events: list[GradientEvent]
    ) -> list[tuple[str, GradientEvent]]:
        """Note whether a step uses scaled gradients, of the round before too, and is the last; return what waits."""
        order, own = self._order, step.names[0]
        fed_again = step.loops and any(
            each.block and own in each.names and each.loops[: len(step.loops)] == step.loops
            for each in later_events
        )
        if fed_again or any(name == own for name, _ in pending):
            order.scaled.add(id(step.node))
        left = [one for one in pending if one[0] != own]
        later = {each.names[0] for each in later_events if each.kind == "step" and each.names}
        is_last = not any(name in later for name, _ in left)
        if order.updates.setdefault(id(step.node), is_last) != is_last:
            raise UnsureRewrite(
                step.node, "this step comes last in one place and not in another; split it in two"
            )
        return left

    def _is_pass_rewritten(self, event: GradientEvent) -> bool:
        """Return whether the loss of a backward pass is scaled in the result, here or in another file."""
        if event.scope.module is self._module:
            return event.site is not None and id(event.node) not in self._order.plain
        return event.block or any(
            is_scale_loss_call(event.scope.module, node) for node in own_nodes_of_scope(event.scope)
        )

    def _own_node_leading_to(self, block: GradientEvent) -> ast.AST:
        """Return the node of this module that leads to a block."""
        return next(
            (node for scope, node in reversed(block.calls) if scope.module is self._module), self._module.tree
        )

    def _refuse_mixed_steps(self, trace: list[GradientEvent]) -> None:
        """Refuse a step that goes through the scaler and elsewhere follows a backward pass that is not scaled."""
        passes: list[GradientEvent] = []
        for event in trace:
            if event.kind == "backward":
                passes.append(event)
            elif event.kind == "step" and isinstance(event.site, OptimizerStep):
                mine = [each for each in passes if each.may_share_run_with(event)]
                scaled = [each for each in mine if event.names[0] in each.names]
                plain = [each for each in mine if not self._is_pass_rewritten(each)]
                if id(event.node) in self._order.scaled and plain and not scaled:
                    raise UnsureRewrite(
                        event.node,
                        f"this step also follows {self._event_and_place_text(plain[-1])}, whose loss is not scaled",
                    )
                passes = [each for each in passes if not each.may_share_run_with(event)]

    def _optimizer_key_at(self, name: str, event: GradientEvent) -> str:
        """Return an optimizer as the module spells it."""
        tail = last_part(name.rpartition(":")[2])
        for step in self._sites.steps:
            if last_part(step.optimizer) == tail and step.function is event.scope.function:
                return step.optimizer
        return next((step.optimizer for step in self._sites.steps if last_part(step.optimizer) == tail), tail)

    def _prove_block(self, trace: list[GradientEvent], block: GradientEvent, name: str) -> None:
        """Refuse a block for an optimizer whose gradients meet anything that is not known before its step."""
        window: list[GradientEvent] = []
        steps: list[GradientEvent] = []
        for event in self._events_after(trace, block):
            if not event.may_share_run_with(block):
                continue
            if event.kind == "step" and event.names and event.names[0] == name:
                steps.append(event)
                if event.site is None:
                    raise UnsureRewrite(
                        block.node,
                        f"{self._event_and_place_text(event)} steps {_name_in_source(name)}, and is not rewritten",
                    )
                if not (set(event.facts.items()) - set(block.facts.items())) or len(event.loops) < len(
                    block.loops
                ):
                    break
                continue
            window.append(event)
        if not steps:
            self._refuse_block_without_step(trace, block, name)
            return
        self._refuse_unscaled_gradients_before(trace, block, name)
        between = window if steps else []
        last = max(self._events_after(trace, block).index(step) for step in steps)
        inside = self._events_after(trace, block)[: last + 1]
        for event in between:
            if event in inside and self._is_before_step(inside, event, steps):
                self._refuse_unknown_between(block, event, steps, name, inside)
        for step in steps:
            self._refuse_steps_without_pass(trace, block, step, name)
        self._refuse_reads_after_some_steps(trace, block, name)

    def _refuse_reads_after_some_steps(
        self, trace: list[GradientEvent], block: GradientEvent, name: str
    ) -> None:
        """Refuse reads of gradients behind a step that not every round makes: in the others they are still scaled."""
        step: GradientEvent | None = None
        for event in self._events_after(trace, block):
            mine = bool(event.names) and event.names[0] == name
            is_sure = not set(event.facts.items()) - set(block.facts.items())
            if is_sure and (event.kind == "clear" or (event.kind == "step" and mine)):
                return
            if event.kind == "step" and mine:
                step = event
            is_later = step is not None and not set(step.facts.items()) <= set(event.facts.items())
            if event.kind == "read" and is_later and event.may_share_run_with(block):
                raise UnsureRewrite(
                    block.node,
                    f"{self._event_and_place_text(event)} reads gradients behind a step that not every round makes, "
                    "which are still scaled in the others; read them next to the step",
                )

    def _refuse_unscaled_gradients_before(
        self, trace: list[GradientEvent], block: GradientEvent, name: str
    ) -> None:
        """Refuse gradients that a backward pass without scale has left since they were cleared: a scaler divides them.

        Such as those of an attack on the inputs, which reach the weights too.
        """
        place = trace.index(block)
        above = trace[:place][::-1]
        if block.loops:
            again = [each for each in trace[place:] if each.loops[: len(block.loops)] == block.loops]
            above = (
                [each for each in above if each.loops[: len(block.loops)] == block.loops]
                + again[::-1]
                + above
            )
        for event in above:
            of_it = event.kind == "clear" and (
                not event.names
                or event.names[0] == name
                or not may_be_optimizer_name(last_part(event.names[0]))
            )
            if event.kind == "step" or (of_it and not set(event.facts.items()) - set(block.facts.items())):
                return
            is_plain = event.kind == "backward" and event.site is None and not self._is_pass_rewritten(event)
            if is_plain and event.may_share_run_with(block):
                raise UnsureRewrite(
                    block.node,
                    f"{self._event_and_place_text(event)} adds to the gradients of {_name_in_source(name)} before they "
                    "are scaled, and is not rewritten; clear them behind it",
                )

    def _is_before_step(
        self, inside: list[GradientEvent], event: GradientEvent, steps: list[GradientEvent]
    ) -> bool:
        place = inside.index(event)
        return any(inside.index(step) > place and step.may_share_run_with(event) for step in steps)

    def _refuse_block_without_step(self, trace: list[GradientEvent], block: GradientEvent, name: str) -> None:
        unknown = [
            each
            for each in self._events_after(trace, block)
            if each.kind == "unknown" and each.may_share_run_with(block)
        ]
        if unknown:
            raise UnsureRewrite(
                block.node,
                f"what {self._event_and_place_text(unknown[0])} does with these gradients is not known",
            )
        tail = last_part(_name_in_source(name))
        elsewhere = [each for each in self._sites.steps if last_part(each.optimizer) == tail]
        if elsewhere:
            raise UnsureRewrite(
                block.node,
                f"the way from here to a step of {_name_in_source(name)} cannot be followed; write the step "
                "where the block is",
            )

    def _computes_next_loss(
        self, event: GradientEvent, inside: list[GradientEvent], block: GradientEvent
    ) -> bool:
        """Return whether a call of something unknown computes the loss of a backward pass that comes next.

        That of the next round is the block itself, whose loss must come from it.
        """
        module, place = event.scope.module, inside.index(event)
        following = next((each for each in inside[place + 1 :] if each.kind in ("backward", "step")), None)
        statement = module.statement_around(event.node)
        if following is not None and following.kind == "backward":
            return isinstance(statement, (ast.Assign, ast.AugAssign)) or statement is module.statement_around(
                following.node
            )
        is_above = event.scope is block.scope and _line_of_event(event) < _line_of_event(block)
        if not is_above or not isinstance(block.site, BackwardPass):
            return False
        names, values = _names_in(block.site.loss), event.scope.values
        for name in (waiting := list(names)):  # which grows meanwhile
            behind = {each for value in values.get(name, []) for each in _names_in(value)} - names
            names |= behind
            waiting += behind
        return statement is module.statement_around(block.node) or not names.isdisjoint(
            names_bound_in(statement)
        )

    def _refuse_unknown_between(
        self,
        block: GradientEvent,
        event: GradientEvent,
        steps: list[GradientEvent],
        name: str,
        inside: list[GradientEvent],
    ) -> None:
        """Refuse what an event between a backward pass and its step may do with gradients that are still scaled.

        Args:
            name: of the optimizer.
            inside: all events from the pass up to the last of its steps.
        """
        if event.kind == "shows":
            self._name_shown_gradients(block, event)
        elif event.kind == "unknown":
            self._refuse_unknown_call(block, event, steps, inside)
        elif event.kind == "read" and (event.site is None or event.scope is not steps[0].scope):
            self._unscale_before_or_refuse_read(block, event, steps)
        elif event.kind == "step" and event.site is None:
            other = event.names[0] if event.names else name
            if other != name and last_part(other) == last_part(name):
                raise UnsureRewrite(
                    block.node,
                    f"{self._event_and_place_text(event)} may step the same optimizer, and is not rewritten",
                )
        elif event.kind == "backward" and event.site is None and not self._is_pass_rewritten(event):
            raise UnsureRewrite(
                block.node,
                f"the backward pass of {self._event_and_place_text(event)} adds to these gradients, and is not "
                "rewritten",
            )
        elif event.kind == "backward" and id(event.node) in self._order.plain:
            raise UnsureRewrite(event.node, "its step is not rewritten, and it may run with a scaled loss")

    def _name_shown_gradients(self, block: GradientEvent, event: GradientEvent) -> None:
        """Name, for a note, what shows gradients; inside of the block they are scaled as with Apex."""
        module = event.scope.module
        is_inside_block = module is self._module and (
            module.statement_around(block.node) in module.ancestors(event.node)
        )
        if not is_inside_block:
            self._order.named.setdefault(self._event_and_place_text(event), self._own_node_leading_to(event))

    def _refuse_unknown_call(
        self,
        block: GradientEvent,
        event: GradientEvent,
        steps: list[GradientEvent],
        inside: list[GradientEvent],
    ) -> None:
        """Refuse a call of something unknown, unless it computes the next loss or reads gradients that are unscaled."""
        gets_gradients = event.text in ("parameters", "gradients", "gradients,parameters")
        gets_parameters = event.text in ("self", "parameters", "gradients,parameters")
        if gets_parameters and self._computes_next_loss(event, inside, block):
            return
        if not gets_gradients or not self._does_each_step_function_lead_to(block, event, steps):
            raise UnsureRewrite(
                block.node,
                f"what {self._event_and_place_text(event)} does with the gradients, before the step, is not known",
            )
        self._record_read_by_step_function(event, steps)

    def _unscale_before_or_refuse_read(
        self, block: GradientEvent, event: GradientEvent, steps: list[GradientEvent]
    ) -> None:
        """Let gradients be unscaled before a read, where the function of each step leads to it; else refuse it."""
        if self._does_each_step_function_lead_to(block, event, steps):
            self._record_read_by_step_function(event, steps)
            self._order.unscaled_before.add(id(event.node))
        elif event.site is None:
            raise UnsureRewrite(
                block.node, f"{self._event_and_place_text(event)} reads gradients that are still scaled"
            )

    def _event_and_place_text(self, event: GradientEvent) -> str:
        """Return what an event is, and where."""
        line = _line_of_event(event)
        what = (
            f"{ast.unparse(event.node.func)}()"
            if isinstance(event.node, ast.Call)
            else ast.unparse(event.node)
        )
        file = (
            ""
            if event.scope.module is self._module
            else f" of {self._index.relative_path_of(event.scope.module)}"
        )
        return f"{what} in line {line}{file}"

    def _does_each_step_function_lead_to(
        self, block: GradientEvent, event: GradientEvent, steps: list[GradientEvent]
    ) -> bool:
        """Return whether a statement in the function of each step, in this module, leads to an event.

        It must come behind the backward pass: gradients are unscaled above it.
        """
        return all(
            step.scope.module is self._module and self._is_after_block(block, event, step.scope)
            for step in steps
        )

    def _is_after_block(self, block: GradientEvent, event: GradientEvent, scope: Scope) -> bool:
        leading = next((node for one, node in event.calls if one is scope), None)
        if leading is None:
            return False
        first = next((node for one, node in block.calls if one is scope), None)
        return first is None or self._module.statement_around(first) is not self._module.statement_around(
            leading
        )

    def _record_read_by_step_function(self, event: GradientEvent, steps: list[GradientEvent]) -> None:
        """Let the statement of a step's function that leads to a read of gradients count as the read."""
        scope = steps[0].scope
        node = next(node for one, node in event.calls if one is scope)
        optimizers = [each.site.optimizer for each in steps if isinstance(each.site, OptimizerStep)]
        statement = self._module.statement_around(node)
        within = {id(each) for each in walk(statement)}
        same = [each for each in self._sites.reads if each.node is node]
        if not same and any(
            id(read.node) in within and read.function is scope.function for read in self._sites.reads
        ):
            return
        if not same:
            self._sites.reads.append(GradientRead(node, statement, scope.function, ()))
        self._order.pending[id(node)] = tuple(
            dict.fromkeys([*self._order.pending.get(id(node), ()), *optimizers])
        )

    def _refuse_steps_without_pass(
        self, trace: list[GradientEvent], block: GradientEvent, step: GradientEvent, name: str
    ) -> None:
        """Refuse a step that may run without a backward pass, and gradients that a step leaves behind."""
        if not isinstance(step.site, OptimizerStep):
            return
        feeders = [
            each for each in trace if each.may_share_run_with(step) and self._feeds_optimizer(each, name)
        ]
        if not _does_one_surely_run(feeders, dict(step.facts)):
            raise UnsureRewrite(step.node, _text_on_conditions_without_pass(feeders or [block], step))
        guards = {
            key
            for key in step.facts
            if all(key not in each.facts for each in feeders)
            and self._condition_depends_on_gradients(step, key)
        }
        if guards:
            self._order.guards.setdefault(id(step.node), set()).update(guards)
        clears = [
            each for each in trace if _clears_gradients_of(each, name) and _share_loop_round(each, step)
        ]
        if _may_gradients_outlast_step(clears, block, step, guards):
            # a `try` is no condition of the script
            tests = {
                tuple(test for test in _conditions_step_lacks(each, step) if "try at" not in test)
                for each in clears
            }
            test = next(iter(tests))[0] if len(tests) == 1 and all(tests) else ""
            raise UnsureRewrite(step.node, KEPT.format(f" if `{test}`" if test else " in some rounds"))

    def _feeds_optimizer(self, event: GradientEvent, name: str) -> bool:
        """Return whether an event is a backward pass that gives an optimizer scaled gradients in the result."""
        return event.kind == "backward" and (
            name in event.names if event.block else self._is_pass_rewritten(event)
        )

    def _condition_depends_on_gradients(self, step: GradientEvent, key: str) -> bool:
        """Return whether a condition asks for something that is read from gradients."""
        test = expression_of_condition(key)
        if test is None or any(isinstance(each, ast.Mod) for each in ast.walk(test)):
            return False
        names, calls = _names_in(test), [each for each in ast.walk(test) if isinstance(each, ast.Call)]
        read = self._names_bound_by_reads(step)
        values = [value for name in names for value in step.scope.values.get(name, [])]
        return (
            not names.isdisjoint(read)
            or any(map(is_clip_or_norm_call, calls))
            or any(self._reads_gradients(value) or not _names_in(value).isdisjoint(read) for value in values)
            or any(
                ASKS_GRADIENTS.search(last_part(name)) and self._may_name_be_computed(name, step)
                for name in names
            )
        )

    @staticmethod
    def _may_name_be_computed(name: str, step: GradientEvent) -> bool:
        """Return whether a name may hold something else than the constants that its function gives it."""
        values = step.scope.values.get(name, [])
        return not values or not all(isinstance(each, ast.Constant) for each in values)

    def _names_bound_by_reads(self, step: GradientEvent) -> set[str]:
        """Return the names that the reads of gradients in the function of a step bind."""
        statements = [each.statement for each in self._sites.reads if each.function is step.scope.function]
        stored = [
            dotted_name(node)
            for each in statements
            for node in ast.walk(each)
            if isinstance(getattr(node, "ctx", None), ast.Store)
        ]
        return {each for each in stored if each is not None}

    def _reads_gradients(self, value: ast.expr) -> bool:
        return any(
            is_clip_or_norm_call(each) or reads_or_changes_gradient(self._module, each)
            for each in walk(value)
        )


def _line_of_event(event: GradientEvent) -> int:
    return getattr(event.node, "lineno", 0)


def _names_in(node: ast.AST) -> set[str]:
    """Return the names and chains of attributes in an expression."""
    named = (dotted_name(each) for each in walk(node) if isinstance(each, (ast.Name, ast.Attribute)))
    return {each for each in named if each is not None}


def _clears_gradients_of(event: GradientEvent, name: str) -> bool:
    """Return whether an event clears the gradients of an optimizer, or those of a model."""
    if event.kind != "clear" or not event.names:
        return False
    return event.names[0] == name or not may_be_optimizer_name(last_part(event.names[0]))


def _may_gradients_outlast_step(
    clears: list[GradientEvent], block: GradientEvent, step: GradientEvent, guards: set[str]
) -> bool:
    """Return whether gradients may outlast a step, or a round in which its guards leave it out."""
    if guards:  # where the step is left out, gradients that are unscaled stay
        return not _does_one_surely_run(
            clears, {key: value for key, value in step.facts.items() if key not in guards}
        )
    following = [each for each in clears if each.may_share_run_with(step)]
    in_turn = any("%" in key for key in step.facts)
    return bool(clears) and not _does_one_surely_run(
        following, {**step.facts, **block.facts}, remainders_count_as_met=in_turn
    )


def _does_one_surely_run(
    events: Iterable[GradientEvent],
    known_facts: dict[str, object],
    *,
    remainders_count_as_met: bool = False,
    depth: int = 0,
) -> bool:
    """Return whether one of some events surely runs where conditions hold.

    Args:
        remainders_count_as_met: whether a condition on a remainder counts as met: what is cleared or kept in turn
            belongs together.
    """
    events = [each for each in events if not conditions_contradict(each.facts, known_facts)]

    def is_open(key: str) -> bool:
        is_met = key in known_facts or (remainders_count_as_met and "%" in key)
        return not is_met and not key.endswith("==") and not key.startswith("call at")

    keys: list[str] = []
    for each in events:
        left = list(filter(is_open, each.facts))
        if not left:
            return True
        keys += left
    if depth > 6 or not keys:
        return False
    found = {key: {each.facts[key] for each in events if key in each.facts} for key in keys}
    key = next((each for each in keys if len(found[each]) > 1), None)
    if key is None:
        return False
    values = found[key]
    return all(
        _does_one_surely_run(
            events,
            _facts_with_condition(known_facts, key, value),
            remainders_count_as_met=remainders_count_as_met,
            depth=depth + 1,
        )
        for value in values
    )


def _facts_with_condition(known_facts: dict[str, object], key: str, value: object) -> dict[str, object]:
    """Return facts with another one, and with what follows from it."""
    test = expression_of_condition(key)
    if isinstance(value, bool) and test is not None:
        return dict(facts_with_conditions_of_test({**known_facts, key: value}, test, value))
    return {**known_facts, key: value}


def _conditions_step_lacks(event: GradientEvent, step: GradientEvent) -> list[str]:
    """Return the conditions, as text, that hold where an event is reached and on which its step does not depend."""
    tests = {
        key: value
        for key, value in event.facts.items()
        if key not in step.facts and not key.endswith("==") and isinstance(value, bool)
    }
    return [key if holds else f"not ({key})" for key, holds in tests.items()]


def _text_on_conditions_without_pass(feeders: list[GradientEvent], step: GradientEvent) -> str:
    """Return why a step may run without a backward pass: under which conditions they run, if the script names them."""
    apart = {
        frozenset(each for each in _conditions_step_lacks(event, step) if not NO_TEST.match(each))
        for event in feeders
    }
    for each in sorted(set().union(*apart)):  # what runs whether one holds or not does not depend on it
        for one in [one for one in apart if each in one and one - {each} | {f"not ({each})"} in apart]:
            apart = apart - {one, one - {each} | {f"not ({each})"}} | {one - {each}}
    if not all(apart) or len(apart) > MOST_TOLD:
        return NOT_SEEN
    texts = sorted("` and `".join(sorted(each)) for each in apart)
    return SOMETIMES.format(", or if ".join(f"`{each}`" for each in texts))


def _share_loop_round(one: GradientEvent, other: GradientEvent) -> bool:
    """Return whether two events are in the same innermost loop, or one of them in a loop of the other's round."""
    short, long = sorted((one.loops, other.loops), key=len)
    return long[: len(short)] == short


def _name_in_source(name: str) -> str:
    head, _, rest = name.rpartition(":")
    text = rest if head else name
    return re.sub(r"^<\d+>", "self", text)


def _node_of_site(site: BackwardPass | OptimizerStep | GradientRead) -> ast.AST:
    return site.call if isinstance(site, OptimizerStep) else site.node
