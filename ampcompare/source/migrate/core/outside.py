"""Calls of models that no scaled loss comes from: evaluation, which is cast or named, and what may belong to a loss."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.source.index import Answer, choices_of
from ampcompare.source.index import Function as Called
from ampcompare.source.migrate.core.context import called_name
from ampcompare.source.migrate.core.half_networks import makes_half, refuse_half_weights, settle_half_networks
from ampcompare.source.migrate.core.model_calls import calls_parameter, computes, find_traced, owner_of
from ampcompare.source.migrate.core.model_casts import casts_itself
from ampcompare.source.migrate.core.outputs import CASTS, cast_what_follows
from ampcompare.source.migrate.finding import Unsure
from ampcompare.source.migrate.read.order import BACKWARD, BLOCK, is_backward
from ampcompare.source.syntax import argument_values, bound_in, dotted_name, last_name, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ampcompare.source.migrate.core.context import Core
    from ampcompare.source.module import Function, Module

NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad")
NETWORKS = ("torch.nn.", "torchvision.models.", "torch.hub.", "timm.", "transformers.", "segmentation_models_pytorch.")
MAX_DEPTH = 4
HALF_GIVEN = (
    "this runs outside of autocast, on weights that are fp32 in the result, and line {0} makes fp16 tensors: put it "
    'under torch.autocast("cuda", dtype=torch.float16) and take that cast away'
)
# Methods of torch.nn.Module and of its parallel wrappers, none of which computes; a test asks torch for them.
OF_MODULE = frozenset({
    "add_module", "apply", "bfloat16", "buffers", "children", "compile", "cpu", "cuda", "double", "eval", "extra_repr",
    "float", "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "half", "ipu", "load_state_dict",
    "modules", "mtia", "named_buffers", "named_children", "named_modules", "named_parameters", "no_sync", "parameters",
    "register_backward_hook", "register_buffer", "register_forward_hook", "register_forward_pre_hook",
    "register_full_backward_hook", "register_full_backward_pre_hook", "register_load_state_dict_post_hook",
    "register_load_state_dict_pre_hook", "register_module", "register_parameter", "register_state_dict_post_hook",
    "register_state_dict_pre_hook", "requires_grad_", "set_extra_state", "set_submodule", "share_memory", "state_dict",
    "to", "to_empty", "train", "type", "xpu", "zero_grad", "join",
})  # fmt: skip
OF_TRANSFORMERS = frozenset({"save_pretrained", "resize_token_embeddings", "get_input_embeddings", "tie_weights"})
KNOWN = frozenset({*OF_MODULE, *OF_TRANSFORMERS, *dir(dict), *dir(list)})  # lists and dicts hold models, too
TRUSTED = (
    "{0} is outside of autocast, and nothing here shows what it computes; if it does, it is in fp32 now, where Apex "
    "cast"
)
ELSEWHERE = (
    "O1 cast all over the process, in every file; autocast covers its blocks alone, so what else computes is in fp32 "
    "now, as by: {0}"
)
OUTSIDE = "Apex cast in {0} too; it is in fp32 now, unless under autocast"
MAY_TRAIN = (
    "{0} is not under autocast in the result, and it may belong to the training that Apex cast; the adapter casts it"
)
METHOD = (
    "O2 and O3 cast nothing in {0}, only what forward gets; weights that it uses were fp16 and are fp32 now, and it is "
    "not under autocast"
)


def cast_other_calls(core: Core) -> None:
    """Put evaluation under autocast where that is sure, and note or refuse the calls of models that stay in fp32."""
    if core.is_off:
        return
    if not casts_itself(core):
        core.wrapped |= _cast_evaluation(core) | _cast_own_forward(core)
        cast_what_follows(core)
    refuse_half_weights(core)
    _refuse_half_outside(core)
    settle_half_networks(core)
    _note_trusted(core)
    if not casts_itself(core):
        _Outside(core).settle()
        _note_elsewhere(core)


def _cast_evaluation(core: Core) -> set[ast.AST]:
    """Add autocast to `with torch.no_grad():` around calls of a model.

    Returns:
        The statements that have autocast now.
    """
    tails = core.models
    wrapped: set[ast.AST] = set()
    for node in core.module.nodes:
        if not isinstance(node, ast.With) or not _is_no_grad(core, node) or not _calls(node, tails):
            continue
        if any(outer in wrapped for outer in core.module.ancestors(node)) or not core.reaches_scaler(node):
            continue
        if core.is_without_casts(node) or core.runs_before(node):
            continue
        wrapped.add(node)
        header = core.autocast.removeprefix("with ").removesuffix(":")
        _, end = core.module.span(node.items[-1].optional_vars or node.items[-1].context_expr)
        core.edits.replace_span(end, end, f", {header}")
    return wrapped


def _cast_own_forward(core: Core) -> set[ast.AST]:
    """Put `forward` of a class that trains under autocast, where it is called by another file, before the loss.

    Returns:
        The statements that have autocast now.
    """
    if core.planned.home != "self":
        return set()
    module = core.module
    tails = core.models
    trained = {each.function for each in core.sites.backwards if each.block}
    holders = {module.class_of(each) for each in trained} - {None}
    wrapped: set[ast.AST] = set()
    for function in (each for each in module.scope_from if isinstance(each, ast.FunctionDef)):
        if function.name != "forward" or function in trained or module.class_of(function) not in holders:
            continue
        inside = [each for each in function.body if any(computes(call, tails) for call in _calls_in(each))]
        if inside and core.reaches_scaler(inside[0]):
            core.edits.wrap(inside[0], inside[-1], core.autocast)
            first, last = (function.body.index(each) for each in (inside[0], inside[-1]))
            wrapped.update(function.body[first : last + 1])
    return wrapped


def _calls_in(node: ast.AST) -> list[ast.Call]:
    return [each for each in walk(node) if isinstance(each, ast.Call)]


def _refuse_half_outside(core: Core) -> None:
    """Refuse calls of a model that stay outside of autocast and may get fp16 tensors, and note those of methods.

    The weights, which were fp16 or cast at each call, are fp32 in the result.
    """
    module = core.module
    tails = core.models
    halves = [node for node in module.nodes if makes_half(module, node)]
    noted: set[str] = set()
    for call in module.calls:
        name = called_name(call.func)
        is_method = name not in tails and computes(call, tails)
        if not is_method and (name not in tails or casts_itself(core)):
            continue
        statement = module.statement(call)
        if core.is_covered(call):
            continue
        function = module.function(call)
        for node in halves:
            if module.function(node) is function and module.statement(node).lineno < statement.lineno:
                raise Unsure(call, HALF_GIVEN.format(module.statement(node).lineno))
        if is_method and casts_itself(core) and name not in noted and not core.runs_before(statement):
            noted.add(name)
            core.note(call, METHOD.format(f"{ast.unparse(call.func)}()"))


def _note_trusted(core: Core) -> None:
    """Note the methods of models outside of autocast of which only the name says that they do not compute."""
    noted: set[str] = set()
    for call in core.module.calls:
        name = last_name(call.func)
        if not isinstance(call.func, ast.Attribute) or name in KNOWN | core.models | noted:
            continue
        if owner_of(call.func) in core.models and not computes(call, core.models):
            if not core.is_covered(call) and not core.runs_before(core.module.statement(call)):
                noted.add(name)
                methods = list(_methods_of_project(core, name))
                if not methods or any(_is_seen_to_compute(core, module, each) for module, each in methods):
                    seen = METHOD if casts_itself(core) else OUTSIDE
                    core.note(call, (seen if methods else TRUSTED).format(f"{ast.unparse(call.func)}()"))


def _methods_of_project(core: Core, name: str) -> Iterator[tuple[Module, ast.FunctionDef]]:
    """Yield the methods of a name that classes of the project have, with their modules."""
    for module in core.index.modules:
        for each in module.scope_from:
            if isinstance(each, ast.FunctionDef) and each.name == name and module.class_of(each) is not None:
                yield module, each


def _is_seen_to_compute(core: Core, module: Module, method: ast.FunctionDef, depth: int = 0) -> bool:
    """Return whether a method calls a layer of its object, a forward pass, or a function whose type O1 decides."""
    for call in module.calls:
        if method not in list[ast.AST](module.functions_around(call)):
            continue
        name, full = last_name(call.func), module.resolve(call.func) or ""
        if name == "forward" or (full.startswith("torch.") and name in CASTS):
            return True
        owner = dotted_name(call.func.value) or "" if isinstance(call.func, ast.Attribute) else ""
        if owner.partition(".")[0] != "self" or name in KNOWN:
            continue
        inner = list(_methods_of_project(core, name))
        if not inner and owner == "self" and f"self.{name}" in bound_in(module.tree):
            return True  # a layer
        if depth < MAX_DEPTH and any(_is_seen_to_compute(core, home, each, depth + 1) for home, each in inner):
            return True
    return False


def _note_elsewhere(core: Core) -> None:
    """Note what else may compute outside of autocast: other objects that are called, and what gets a model."""
    module = core.module
    homes = {module.function(first) for first, _ in core.forward.regions} | {
        module.function(each) for each in core.wrapped
    }
    homes |= {each.function for each in core.sites.backwards}
    found: dict[str, int] = {}
    for call in module.calls:
        if not argument_values(call) or core.is_covered(call) or core.runs_before(module.statement(call)):
            continue
        name = ast.unparse(call.func)
        if (module.function(call) in homes and _is_network(core, call)) or _gets_model(core, call):
            found.setdefault(name, call.lineno)
    if found and core.sites.initializes:
        named = ", ".join(f"{name}() (line {line})" for name, line in found.items())
        core.note(core.sites.initializes[0].call, ELSEWHERE.format(named))


def _is_network(core: Core, call: ast.Call) -> bool:
    """Return whether a call is surely one of another network than the models, by what the object is made by."""
    if called_name(call.func) in core.models or core.module.resolve(call.func):
        return False
    scope = core.module.scope_of[call]
    choices = choices_of(core.index.callee(call, scope))
    if choices:
        return any(
            each.name == "forward"
            if isinstance(each, Called)
            else each.name.endswith("__call__") and each.name.startswith(NETWORKS)
            for each in choices
        )
    key = dotted_name(call.func) or ""
    is_variable = "." not in key or (key.startswith("self.") and key.count(".") == 1)
    values = (core.module.values_of(key, scope) or []) if is_variable else []
    makers = [core.module.resolve(each.func) or "" for each in values if isinstance(each, ast.Call)]
    return any(each.startswith(NETWORKS) for each in makers)


def _gets_model(core: Core, call: ast.Call) -> bool:
    """Return whether a call hands a model to a library that traces it, or a function of another file that calls it."""
    if (network := find_traced(core.module, call)) is not None and called_name(network) in core.models:
        return True
    given = core.parameters_given(call, core.models)
    return any(each.module is not core.module and calls_parameter(core.index, each, name) for name, each in given)


def _is_no_grad(core: Core, node: ast.With) -> bool:
    contexts = [item.context_expr for item in node.items]
    return all(isinstance(each, ast.Call) and core.names.meaning(each.func) in NO_GRAD for each in contexts)


def _calls(node: ast.AST, tails: set[str]) -> list[ast.Call]:
    return [each for each in walk(node) if isinstance(each, ast.Call) and called_name(each.func) in tails]


class _Outside:
    """Goes from each call of a model that has no autocast to those that lead to it, until one has, or none is left."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._module = core.module
        self._tails = core.models
        self._apart = {id(each) for each in core.forward.apart}
        self._noted: set[Function | None] = set()
        self._seen: set[int] = set()

    def settle(self) -> None:
        """Note the calls that only evaluate.

        Raises:
            Unsure: a call may belong to a loss, which Apex cast.
        """
        for call in self._module.calls:
            if computes(call, self._tails):
                self._settle(call)

    def _settle(self, call: ast.Call) -> None:
        core, module = self._core, self._module
        if id(call) in self._seen or id(call) in self._apart or core.is_covered(call):
            return
        self._seen.add(id(call))
        if core.is_without_casts(call) or core.runs_before(module.statement(call)):
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
        if any(self._core.names.meaning(getattr(each, "func", each)) in NO_GRAD for each in contexts):
            return True
        if any(each.function is function for each in self._core.sites.backwards):
            return False
        return any(
            (isinstance(each, ast.Attribute) and each.attr == "eval") or self._core.names.meaning(each) in NO_GRAD
            for each in walk(within)
            if isinstance(each, (ast.Name, ast.Attribute))
        )
