"""Calls of models that no scaled loss comes from: evaluation, which is cast or named, and what may belong to a loss."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from typing import TYPE_CHECKING

from ampcompare.source.amp_names import APEX
from ampcompare.source.index import Answer, ImportedObject, ProjectFunction, functions_of_callee
from ampcompare.source.migrate.core.context import last_name_before_index, last_names_of_objects
from ampcompare.source.migrate.core.early_runs import PlaceAroundInitialize
from ampcompare.source.migrate.core.half_networks import (
    makes_fp16,
    refuse_half_weights,
    refuse_or_note_half_networks,
)
from ampcompare.source.migrate.core.model_calls import (
    calls_parameter,
    find_traced_network,
    is_computing_model_call,
    owner_name_of_method,
)
from ampcompare.source.migrate.core.model_casts import puts_autocast_in_forward
from ampcompare.source.migrate.core.outputs import CASTS, add_autocast_to_uses_of_outputs
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.order import BACKWARD, BLOCK, SHOWS, is_backward_pass
from ampcompare.source.syntax import (
    FunctionNode,
    argument_values,
    calls_in,
    dotted_name,
    last_name,
    last_part,
    names_bound_in,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ampcompare.source.migrate.core.context import ApexCore
    from ampcompare.source.module import Module

NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad")
NETWORKS = (
    "torch.nn.",
    "torchvision.models.",
    "torch.hub.",
    "timm.",
    "transformers.",
    "segmentation_models_pytorch.",
    "torch.optim.swa_utils.AveragedModel",
)
UPDATE_BN = "torch.optim.swa_utils.update_bn"  # runs an averaged network on all batches
MAX_DEPTH = 4
APPLYING = frozenset({"map", "filter"})  # builtins that call what they get
# Names of what gets a model and computes nothing with it, and of what does.
NO_PASS = re.compile(
    r"count|param|save|load|summary|watch|freez|init|optim|schedul|group|wrap|hook|seed|log|print",
    re.IGNORECASE,
)
EVALUATES = re.compile(
    r"^(?:run|eval|valid|test|infer|predict|score|forward|sample|generate|extract)", re.IGNORECASE
)
HALF_GIVEN = (
    "this runs outside of autocast, on weights that are fp32 in the result, and line {0} makes fp16 tensors; put it "
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
OF_TRANSFORMERS = frozenset(
    {"save_pretrained", "resize_token_embeddings", "get_input_embeddings", "tie_weights"}
)
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
    "{0} is not under autocast in the result, and it may belong to the training that Apex "
    "cast; the adapter casts it"
)
EVALUATES_ABOVE = "this also runs above amp.initialize, in fp32 with Apex; it is under autocast there, too"
EVALUATES_ABOVE_WITHOUT_SCALER = (
    "this also runs above amp.initialize, where Apex casts nothing, and no scaler is made yet that autocast could ask; "
    "the adapter knows when it runs"
)
METHOD = (
    "O2 and O3 cast nothing in {0}, only what forward gets; weights that it uses were fp16 and are fp32 now, and it is "
    "not under autocast"
)


def cast_or_refuse_uncovered_calls(core: ApexCore) -> None:
    """Put evaluation under autocast where that is sure, and note or refuse the calls of models that stay in fp32."""
    if core.is_all_fp32:
        return
    if not puts_autocast_in_forward(core):
        core.wrapped |= _add_autocast_to_evaluations(core) | _cast_own_forward(core)
        add_autocast_to_uses_of_outputs(core)
    refuse_half_weights(core)
    _refuse_or_note_fp16_inputs(core)
    refuse_or_note_half_networks(core)
    _note_methods_trusted_by_name(core)
    if not puts_autocast_in_forward(core):
        _CallsOutsideAutocast(core).note_or_refuse_calls()
        _note_uncast_computations(core)


def _add_autocast_to_evaluations(core: ApexCore) -> set[ast.AST]:
    """Add autocast to `with torch.no_grad():` around calls of a model.

    Returns:
        The statements that have autocast now.
    """
    tails = core.model_names
    wrapped: set[ast.AST] = set()
    for node in core.module.nodes:
        if (
            not isinstance(node, ast.With)
            or not _is_no_grad_block(core, node)
            or not _calls_of_models_in(node, tails)
        ):
            continue
        if any(outer in wrapped for outer in core.module.ancestors(node)) or not core.reaches_scaler(node):
            continue
        if core.is_in_disable_casts_block(node) or core.runs_only_before_initialize(node):
            continue
        if PlaceAroundInitialize.ABOVE in core.early_runs.places_of(node):
            if not core.always:
                raise UnsureRewrite(node, EVALUATES_ABOVE_WITHOUT_SCALER)
            core.add_note(node, EVALUATES_ABOVE)
        wrapped.add(node)
        header = core.autocast_line.removeprefix("with ").removesuffix(":")
        _, end = core.module.span(node.items[-1].optional_vars or node.items[-1].context_expr)
        core.edits.replace_span(end, end, f", {header}")
    return wrapped


def _cast_own_forward(core: ApexCore) -> set[ast.AST]:
    """Put `forward` of a class that trains under autocast, where it is called by another file, before the loss.

    Returns:
        The statements that have autocast now.
    """
    if core.planned.home != "self":
        return set()
    module = core.module
    tails = core.model_names
    trained = {each.function for each in core.sites.backwards if each.block}
    holders = {module.class_of(each) for each in trained} - {None}
    wrapped: set[ast.AST] = set()
    for function in (each for each in module.scope_from if isinstance(each, ast.FunctionDef)):
        if function.name != "forward" or function in trained or module.class_of(function) not in holders:
            continue
        inside = [
            each
            for each in function.body
            if any(is_computing_model_call(call, tails) for call in calls_in(each))
        ]
        if inside and core.reaches_scaler(inside[0]):
            core.edits.put_under_header(inside[0], inside[-1], core.autocast_line)
            first, last = (function.body.index(each) for each in (inside[0], inside[-1]))
            wrapped.update(function.body[first : last + 1])
    return wrapped


def _refuse_or_note_fp16_inputs(core: ApexCore) -> None:
    """Refuse calls of a model that stay outside of autocast and may get fp16 tensors, and note those of methods.

    The weights, which were fp16 or cast at each call, are fp32 in the result.
    """
    module = core.module
    tails = core.model_names
    halves = [node for node in module.nodes if makes_fp16(module, node)]
    noted: set[str] = set()
    for call in module.calls:
        name = last_name_before_index(call.func)
        is_method = name not in tails and is_computing_model_call(call, tails)
        if not is_method and (name not in tails or puts_autocast_in_forward(core)):
            continue
        statement = module.statement_around(call)
        if core.has_autocast(call) or core.runs_only_before_initialize(statement):
            continue
        function = module.function_around(call)
        for node in halves:
            if (
                module.function_around(node) is function
                and module.statement_around(node).lineno < statement.lineno
            ):
                raise UnsureRewrite(call, HALF_GIVEN.format(module.statement_around(node).lineno))
        if is_method and puts_autocast_in_forward(core) and name not in noted:
            noted.add(name)
            core.add_note(call, METHOD.format(f"{ast.unparse(call.func)}()"))


def _note_methods_trusted_by_name(core: ApexCore) -> None:
    """Note the methods of models outside of autocast of which only the name says that they do not compute."""
    noted: set[str] = set()
    for call in core.module.calls:
        name = last_name(call.func)
        if not isinstance(call.func, ast.Attribute) or name in KNOWN | core.model_names | noted:
            continue
        if owner_name_of_method(call.func) in core.model_names and not is_computing_model_call(
            call, core.model_names
        ):
            if not core.has_autocast(call) and not core.runs_only_before_initialize(
                core.module.statement_around(call)
            ):
                noted.add(name)
                methods = list(_methods_named_in_project(core, name))
                if not methods or any(
                    _method_surely_computes(core, module, each) for module, each in methods
                ):
                    seen = METHOD if puts_autocast_in_forward(core) else OUTSIDE
                    core.add_note(call, (seen if methods else TRUSTED).format(f"{ast.unparse(call.func)}()"))


def _methods_named_in_project(core: ApexCore, name: str) -> Iterator[tuple[Module, ast.FunctionDef]]:
    """Yield the methods of a name that classes of the project have, with their modules."""
    for module in core.index.modules:
        for each in module.scope_from:
            if isinstance(each, ast.FunctionDef) and each.name == name and module.class_of(each) is not None:
                yield module, each


def _method_surely_computes(core: ApexCore, module: Module, method: ast.FunctionDef, depth: int = 0) -> bool:
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
        inner = list(_methods_named_in_project(core, name))
        if not inner and owner == "self" and f"self.{name}" in names_bound_in(module.tree):
            return True  # a layer
        if depth < MAX_DEPTH and any(
            _method_surely_computes(core, home, each, depth + 1) for home, each in inner
        ):
            return True
    return False


def _note_uncast_computations(core: ApexCore) -> None:
    """Note what else may compute outside of autocast: other objects that are called, and what gets a model."""
    module = core.module
    homes = {module.function_around(first) for first, _ in core.forward.regions} | {
        module.function_around(each) for each in core.wrapped
    }
    homes |= {each.function for each in core.sites.backwards}
    found: dict[str, int] = {}
    for call in module.calls:
        if (
            not argument_values(call)
            or core.has_autocast(call)
            or core.runs_only_before_initialize(module.statement_around(call))
        ):
            continue
        name = ast.unparse(call.func)
        runs_average = module.resolve(call.func) == UPDATE_BN
        if (
            runs_average
            or (module.function_around(call) in homes and _is_call_of_other_network(core, call))
            or _passes_model_on(core, call)
            or _passes_model_out_of_sight(core, call)
        ):
            found.setdefault(name, call.lineno)
    if found and core.sites.initializes:
        named = ", ".join(f"{name}() (line {line})" for name, line in found.items())
        core.add_note(core.sites.initializes[0].call, ELSEWHERE.format(named))


def _is_forward_of_network(function: ProjectFunction | ImportedObject) -> bool:
    """Return whether a function is the forward pass of a network: `forward`, or `__call__` of torch's modules."""
    if isinstance(function, ProjectFunction):
        return function.name == "forward"
    return function.name.endswith("__call__") and function.name.startswith(NETWORKS)


def _is_call_of_other_network(core: ApexCore, call: ast.Call) -> bool:
    """Return whether a call is surely one of another network than the models, by what the object is made by."""
    if last_name_before_index(call.func) in core.model_names or core.module.resolve(call.func):
        return False
    scope = core.module.scope_of[call]
    choices = functions_of_callee(core.index.callee(call, scope))
    if choices:
        return any(_is_forward_of_network(each) for each in choices)
    key = dotted_name(call.func) or ""
    is_variable = "." not in key or (key.startswith("self.") and key.count(".") == 1)
    values = (core.module.values_of(key, scope) or []) if is_variable else []
    makers = [core.module.resolve(each.func) or "" for each in values if isinstance(each, ast.Call)]
    return any(each.startswith(NETWORKS) for each in makers)


def _passes_model_on(core: ApexCore, call: ast.Call) -> bool:
    """Return whether a call hands a model to a library that traces it, or a function of another file that calls it."""
    if (network := find_traced_network(core.module, call)) is not None and last_name_before_index(
        network
    ) in core.model_names:
        return True
    given = core.parameters_receiving(call, core.model_names)
    return any(
        each.module is not core.module and calls_parameter(core.index, each, name) for name, each in given
    )


def _passes_model_out_of_sight(core: ApexCore, call: ast.Call) -> bool:
    """Return whether a call gives a model, as it is or in a list or dict, to what may call it and is not read."""
    given = argument_values(call)
    if not any(core.model_names & last_names_of_objects(each) for each in given):
        return False
    module, name = core.module, last_name(call.func)
    statement = module.statement_around(call)
    bound = names_bound_in(statement) if isinstance(statement, ast.Assign) else set[str]()
    if SHOWS.search(name) or NO_PASS.search(name) or core.model_names & set(map(last_part, bound)):
        return False  # a model again, whose calls are asked for themselves
    choices = functions_of_callee(core.index.callee(call, module.scope_of[call]))
    if any(isinstance(each, ProjectFunction) for each in choices):
        is_plain = all(
            dotted_name(each) or not core.model_names & last_names_of_objects(each) for each in given
        )
        return not is_plain  # else its parameter is a model by its name, which is followed
    full = module.resolve(call.func) or ""
    package = full.partition(".")[0]
    if isinstance(call.func, ast.Name) and not full:
        return name in APPLYING or not hasattr(builtins, name)
    if name == "partial":
        return not all(_is_function_of_module(core, each) for each in call.args[:1])
    if not full:  # a method of an object of which nothing is known
        return name not in KNOWN and EVALUATES.search(name) is not None
    return package not in (*APEX, "torch", "copy") and package not in sys.stdlib_module_names


def _is_function_of_module(core: ApexCore, node: ast.expr) -> bool:
    """Return whether an expression names a function of the module itself, whose calls of models are asked for."""
    found = functions_of_callee(core.index.function_of_expression(node, core.module.scope_of[node]))
    return bool(found) and all(
        isinstance(each, ProjectFunction) and each.module is core.module for each in found
    )


def _is_no_grad_block(core: ApexCore, node: ast.With) -> bool:
    contexts = [item.context_expr for item in node.items]
    return all(
        isinstance(each, ast.Call) and core.names.full_name_of(each.func) in NO_GRAD for each in contexts
    )


def _calls_of_models_in(node: ast.AST, model_names: set[str]) -> list[ast.Call]:
    return [
        each
        for each in walk(node)
        if isinstance(each, ast.Call) and last_name_before_index(each.func) in model_names
    ]


class _CallsOutsideAutocast:
    """Goes from each call of a model that has no autocast to those that lead to it, until one has, or none is left."""

    def __init__(self, core: ApexCore) -> None:
        self._core = core
        self._module = core.module
        self._tails = core.model_names
        self._apart = {id(each) for each in core.forward.apart}
        self._noted: set[FunctionNode | None] = set()
        self._seen: set[int] = set()

    def note_or_refuse_calls(self) -> None:
        """Note the calls that only evaluate.

        Raises:
            UnsureRewrite: a call may belong to a loss, which Apex cast.
        """
        for call in self._module.calls:
            if is_computing_model_call(call, self._tails):
                self._note_or_refuse_call(call)

    def _note_or_refuse_call(self, call: ast.Call) -> None:
        core, module = self._core, self._module
        if id(call) in self._seen or id(call) in self._apart or core.has_autocast(call):
            return
        self._seen.add(id(call))
        if core.is_in_disable_casts_block(call) or core.runs_only_before_initialize(
            module.statement_around(call)
        ):
            return
        function = module.function_around(call)
        if self._only_evaluates(call) or self._has_unscaled_backward(function):
            if function not in self._noted:
                self._noted.add(function)
                core.add_note(call, OUTSIDE.format("this forward pass"))
            return
        callers, complete = (
            ([], False)
            if function is None
            else core.index.possible_calls_and_completeness(module.scope_from[function])
        )
        inside = [each for each in callers if each in module.scope_of]
        for each in inside:
            self._note_or_refuse_call(each)
        if not (inside and complete):
            raise UnsureRewrite(call, MAY_TRAIN.format(f"{ast.unparse(call.func)}()"))

    def _has_unscaled_backward(self, function: FunctionNode | None) -> bool:
        """Return whether a function runs, or leads to, a backward pass that is not scaled, and none that is."""
        core, module = self._core, self._module
        if any(each.function is function for each in core.sites.backwards):
            return False
        calls = [each for each in module.calls if module.function_around(each) is function]
        led_to = [
            each
            for call in calls
            for each in functions_of_callee(core.index.callee(call, module.scope_of[call]))
            if isinstance(each, ProjectFunction)
        ]
        if any(core.index.reaches_event(each, BLOCK) is not Answer.NO for each in led_to):
            return False
        return any(is_backward_pass(module, each) for each in calls) or any(
            core.index.reaches_event(each, BACKWARD) is Answer.YES for each in led_to
        )

    def _only_evaluates(self, call: ast.Call) -> bool:
        """Return whether a call computes no gradients, or stands in a function that says that it evaluates."""
        module = self._module
        function = module.function_around(call)
        within: ast.AST = module.tree if function is None else function
        decorators = [] if function is None else function.decorator_list
        blocks = [each for each in module.ancestors(call) if isinstance(each, ast.With)]
        contexts = [*decorators, *(item.context_expr for each in blocks for item in each.items)]
        if any(self._core.names.full_name_of(getattr(each, "func", each)) in NO_GRAD for each in contexts):
            return True
        if any(each.function is function for each in self._core.sites.backwards):
            return False
        return any(
            (isinstance(each, ast.Attribute) and each.attr == "eval")
            or self._core.names.full_name_of(each) in NO_GRAD
            for each in walk(within)
            if isinstance(each, (ast.Name, ast.Attribute))
        )
