"""Calls of models that no scaled loss comes from: evaluation, which is cast or named, and what may belong to a loss."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampcompare.source.amp_names import AUTOCASTS
from ampcompare.source.index import Answer, choices_of
from ampcompare.source.index import Function as Called
from ampcompare.source.migrate.casts import WIDE_UNDER_AUTOCAST
from ampcompare.source.migrate.core.model_casts import casts_itself
from ampcompare.source.migrate.finding import Unsure
from ampcompare.source.migrate.read.order import BACKWARD, BLOCK, is_backward
from ampcompare.source.migrate.read.sites import model_names
from ampcompare.source.syntax import argument_values, bound_in, dotted_name, last_name, last_part, walk

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import Core
    from ampcompare.source.module import Function

NO_GRAD = ("torch.no_grad", "torch.inference_mode")
HALVES = ("torch.half", "torch.float16", "torch.cuda.HalfTensor")
HALF_GIVEN = (
    "this runs outside of autocast, on weights that are fp32 in the result, and line {0} makes fp16 tensors: put it "
    'under torch.autocast("cuda", dtype=torch.float16) and take that cast away'
)
# Methods of torch.nn.Module, and what is called so on models, none of which computes.
NO_COMPUTATION = re.compile(
    r"^_?(?:load|save|set|get|add|register|freeze|unfreeze|remove|named|init|initialize|reset|print|summary|export|apply|update|"
    r"zero_grad|parameters|modules|children|buffers|state_dict|train|eval|to|cpu|cuda|half|float|double|bfloat16|type|"
    r"requires_grad|share_memory|module|append|extend|insert|items|keys|values|copy|pop|format|join|no_sync|backward|"
    r"step|num|is|has|with|make|build|create|config|resize|tie|hook|log)(?:_|$)"
)
OUTSIDE = "Apex cast in {0} too; it is in fp32 now, unless under autocast"
MAY_TRAIN = (
    "{0} is not under autocast in the result, and it may belong to the training that Apex cast; the adapter casts it"
)
WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
OF_LOSS = re.compile(r"loss|criterion|entropy", re.IGNORECASE)
METHOD = OUTSIDE + ", which covers forward alone"


def cast_other_calls(core: Core) -> None:
    """Put evaluation under autocast where that is sure, and note or refuse the calls of models that stay in fp32."""
    if core.is_off:
        return
    wrapped = _cast_evaluation(core) | _cast_own_forward(core)
    _refuse_half_outside(core, wrapped)
    if not casts_itself(core):
        _Outside(core, wrapped).settle()


def _cast_evaluation(core: Core) -> set[ast.AST]:
    """Add autocast to `with torch.no_grad():` around calls of a model.

    Returns:
        The statements that have autocast now.
    """
    if casts_itself(core):
        return set()  # the model itself runs under autocast, or nothing is trained here
    tails = model_names(core.module, core.sites)
    wrapped: set[ast.AST] = set()
    for node in core.module.nodes:
        if not isinstance(node, ast.With) or not _is_no_grad(core, node) or not _calls(node, tails):
            continue
        if any(outer in wrapped for outer in core.module.ancestors(node)) or not _reaches(core, node):
            continue
        if core.is_without_casts(node) or _leads_to_casts(core, node):
            continue
        wrapped.add(node)
        header = core.autocast.removeprefix("with ").removesuffix(":")
        _, end = core.module.span(node.items[-1].optional_vars or node.items[-1].context_expr)
        core.edits.replace_span(end, end, f", {header}")
    return wrapped


def _leads_to_casts(core: Core, node: ast.With) -> bool:
    """Return whether what a block computes goes on, below it, into what O1 casts to fp32: there it would stay fp16."""
    module = core.module
    function = module.function(node)
    names = bound_in(node)
    for call in module.calls:
        if module.function(call) is not function or call.lineno <= (node.end_lineno or node.lineno):
            continue
        name = last_name(call.func)
        if name in WIDE_UNDER_AUTOCAST or OF_LOSS.search(name):
            given = [*argument_values(call), *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
            if any(dotted_name(each) in names for value in given for each in walk(value)):
                return True
    return False


def _cast_own_forward(core: Core) -> set[ast.AST]:
    """Put `forward` of a class that trains under autocast, where it is called by another file, before the loss.

    Returns:
        The statements that have autocast now.
    """
    if casts_itself(core) or core.planned.home != "self":
        return set()
    module = core.module
    tails = model_names(module, core.sites)
    trained = {each.function for each in core.sites.backwards if each.block}
    holders = {module.class_of(each) for each in trained} - {None}
    wrapped: set[ast.AST] = set()
    for function in (each for each in module.scope_from if isinstance(each, ast.FunctionDef)):
        if function.name != "forward" or function in trained or module.class_of(function) not in holders:
            continue
        inside = [each for each in function.body if any(_computes(call, tails) for call in _calls_in(each))]
        if inside and _reaches(core, inside[0]):
            core.edits.wrap(inside[0], inside[-1], core.autocast)
            first, last = (function.body.index(each) for each in (inside[0], inside[-1]))
            wrapped.update(function.body[first : last + 1])
    return wrapped


def _calls_in(node: ast.AST) -> list[ast.Call]:
    return [each for each in walk(node) if isinstance(each, ast.Call)]


def _computes(call: ast.Call, tails: set[str]) -> bool:
    """Return whether a call is one of a model, or of a method of a model that may compute."""
    name = last_name(call.func)
    if name in tails:
        return True
    if not isinstance(call.func, ast.Attribute) or NO_COMPUTATION.search(name) or not (call.args or call.keywords):
        return False
    return last_part((dotted_name(call.func.value) or "").removesuffix(".module")) in tails


def _refuse_half_outside(core: Core, wrapped: set[ast.AST]) -> None:
    """Refuse calls of a model that stay outside of autocast and may get fp16 tensors, and note those of methods.

    The weights, which were fp16 or cast at each call, are fp32 in the result.

    Args:
        wrapped: statements that were put under autocast.
    """
    module = core.module
    tails = model_names(module, core.sites)
    halves = [node for node in module.nodes if _makes_half(core, node)]
    noted: set[str] = set()
    for call in module.calls:
        name = last_name(call.func)
        is_method = name not in tails and _computes(call, tails)
        if not is_method and (name not in tails or casts_itself(core)):
            continue
        statement = module.statement(call)
        if _is_covered(core, call, wrapped):
            continue
        function = module.function(call)
        for node in halves:
            if module.function(node) is function and module.statement(node).lineno < statement.lineno:
                raise Unsure(call, HALF_GIVEN.format(module.statement(node).lineno))
        if is_method and casts_itself(core) and name not in noted and not _runs_before(core, statement):
            noted.add(name)
            core.note(call, METHOD.format(f"{ast.unparse(call.func)}()"))


def _is_covered(core: Core, call: ast.Call, wrapped: set[ast.AST]) -> bool:
    """Return whether a call stands in a part of the text that has autocast now."""
    module = core.module
    statement = module.statement(call)
    if any(each in wrapped for each in (statement, *module.ancestors(call))):
        return True
    spans = ((first.lineno, last.end_lineno or last.lineno) for first, last in core.forward.regions)
    if any(first <= statement.lineno <= last for first, last in spans):
        return True
    above = [statement, *module.ancestors(call)]
    contexts = [item.context_expr for each in above if isinstance(each, ast.With) for item in each.items]
    if any(core.names.meaning(each.func) in AUTOCASTS for each in contexts if isinstance(each, ast.Call)):
        return True
    return any(each.statement in above for each in core.forward.inline)


def _runs_before(core: Core, statement: ast.stmt) -> bool:
    """Return whether a statement runs before `amp.initialize` alone, so that Apex casts nothing in it."""
    module = core.module
    if any(isinstance(each, (ast.For, ast.AsyncFor, ast.While)) for each in module.within_function(statement)):
        return False
    function = module.function(statement)
    return any(
        each.function is function and each.statement.lineno > statement.lineno for each in core.sites.initializes
    )


def _makes_half(core: Core, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "half" and not node.args
    is_name = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)
    return is_name and core.module.resolve(node, follow=False) in HALVES


def _is_no_grad(core: Core, node: ast.With) -> bool:
    contexts = [item.context_expr for item in node.items]
    return all(isinstance(each, ast.Call) and core.names.meaning(each.func) in NO_GRAD for each in contexts)


def _calls(node: ast.AST, tails: set[str]) -> list[ast.Call]:
    return [each for each in walk(node) if isinstance(each, ast.Call) and last_name(each.func) in tails]


def _reaches(core: Core, node: ast.AST) -> bool:
    """Return whether the scaler is in scope."""
    if core.always or core.planned.home == "module":
        return True
    function = core.module.function(node)
    if core.planned.home == "self":
        return function is not None and [each.arg for each in function.args.args[:1]] == ["self"]
    created = {each.function for each in core.sites.initializes}
    return any(each in created for each in (*core.module.functions_around(node), None))


class _Outside:
    """Goes from each call of a model that has no autocast to those that lead to it, until one has, or none is left."""

    def __init__(self, core: Core, wrapped: set[ast.AST]) -> None:
        self._core = core
        self._module = core.module
        self._wrapped = wrapped
        self._tails = model_names(core.module, core.sites)
        self._apart = {id(each) for each in core.forward.apart}
        self._noted: set[Function | None] = set()
        self._seen: set[int] = set()

    def settle(self) -> None:
        """Note the calls that only evaluate.

        Raises:
            Unsure: a call may belong to a loss, which Apex cast.
        """
        for call in self._module.calls:
            if _computes(call, self._tails):
                self._settle(call)

    def _settle(self, call: ast.Call) -> None:
        core, module = self._core, self._module
        if id(call) in self._seen or id(call) in self._apart or _is_covered(core, call, self._wrapped):
            return
        self._seen.add(id(call))
        if core.is_without_casts(call) or _runs_before(core, module.statement(call)):
            return
        function = module.function(call)
        if self._evaluates(call) or self._has_own_backward(function):
            if function not in self._noted:
                self._noted.add(function)
                core.note(call, OUTSIDE.format("this forward pass"))
            return
        callers, complete = ([], False) if function is None else core.index.callers(module.scope_from[function])
        inside = [each for each in callers if each in module.scope_of]
        for each in inside:
            self._settle(each)
        if not (inside and complete):
            raise Unsure(call, MAY_TRAIN.format(f"{ast.unparse(call.func)}()"))

    def _has_own_backward(self, function: Function | None) -> bool:
        """Return whether a function runs, or leads to, a backward pass that is not scaled, and none that is."""
        core, module = self._core, self._module
        if any(each.function is function for each in core.sites.backwards):
            return False
        calls = [each for each in module.calls if module.function(each) is function]
        led_to = [
            each
            for call in calls
            for each in choices_of(core.index.callee(call, module.scope_of[call]))
            if isinstance(each, Called)
        ]
        if any(core.index.reaches(each, BLOCK) is not Answer.NO for each in led_to):
            return False
        return any(is_backward(module, each) for each in calls) or any(
            core.index.reaches(each, BACKWARD) is Answer.YES for each in led_to
        )

    def _evaluates(self, call: ast.Call) -> bool:
        """Return whether a call computes no gradients, or stands in a function that says that it evaluates."""
        module = self._module
        function = module.function(call)
        within: ast.AST = module.tree if function is None else function
        decorators = [] if function is None else function.decorator_list
        blocks = [each for each in module.ancestors(call) if isinstance(each, ast.With)]
        contexts = [*decorators, *(item.context_expr for each in blocks for item in each.items)]
        if any(last_name(getattr(each, "func", each)) in WITHOUT_GRADIENTS for each in contexts):
            return True
        if any(each.function is function for each in self._core.sites.backwards):
            return False
        return any(
            isinstance(each, ast.Attribute) and each.attr in ("eval", *WITHOUT_GRADIENTS) for each in walk(within)
        )
