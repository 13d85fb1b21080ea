"""Which calls run a model, or a part of one, and which functions run what they get."""

from __future__ import annotations

import ast
import re

from ampcompare.source.index import Index, ProjectFunction
from ampcompare.source.migrate.core.context import last_name_before_index, parameters_receiving
from ampcompare.source.module import Module
from ampcompare.source.syntax import last_name

MAX_DEPTH = 4
# What is called so on models, and does not compute, by its words; which notes say.
NO_COMPUTATION = re.compile(
    r"^_?(?:load|save|set|get|add|register|freeze|unfreeze|remove|named|init|initialize|reset|print|summary|export|apply|update|"
    r"zero_grad|parameters|modules|children|buffers|state_dict|train|eval|to|cpu|cuda|half|float|double|bfloat16|type|"
    r"requires_grad|share_memory|module|append|extend|insert|items|keys|values|copy|pop|format|join|no_sync|backward|"
    r"step|num|is|has|with|make|build|create|config|resize|tie|hook|log)(?:_|$)"
)

# Functions that run the network that they get first.
RUNNERS = frozenset({
    "torch.jit.trace", "torch.jit.trace_module", "torch.onnx.export", "torch.onnx.dynamo_export", "torch.export.export",
    "torch.fx.experimental.proxy_tensor.make_fx", "torch.utils.checkpoint.checkpoint", "torchsummary.summary",
    "torchinfo.summary", "thop.profile", "torch2trt.torch2trt",
})  # fmt: skip


def is_computing_model_call(call: ast.Call, model_names: set[str]) -> bool:
    """Return whether a call is one of a model, or of a method of a model that may compute."""
    name = last_name(call.func)
    if last_name_before_index(call.func) in model_names:
        return True
    if is_called_item_of_model(call.func, model_names):
        return bool(call.args or call.keywords)
    if (
        not isinstance(call.func, ast.Attribute)
        or NO_COMPUTATION.search(name)
        or not (call.args or call.keywords)
    ):
        return False
    return owner_name_of_method(call.func) in model_names


def owner_name_of_method(method: ast.Attribute) -> str:
    """Return the last part of the name of the object whose method it is, or of that around its module."""
    owner = method.value
    return last_name_before_index(
        owner.value if isinstance(owner, ast.Attribute) and owner.attr == "module" else owner
    )


def is_called_item_of_model(node: ast.expr, model_names: set[str]) -> bool:
    """Return whether what is called is an item of an attribute of a model, as of `model.layers["head"](x)`."""
    if not isinstance(node, ast.Subscript):
        return False
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
        if isinstance(node, (ast.Attribute, ast.Name)) and last_name(node) in model_names:
            return True
    return False


def find_traced_network(module: Module, call: ast.Call) -> ast.expr | None:
    """Return the network that a call of a library runs, as it traces or exports it."""
    return call.args[0] if call.args and module.resolve(call.func) in RUNNERS else None


def calls_parameter(index: Index, function: ProjectFunction, parameter: str, depth: int = 0) -> bool:
    """Return whether a function calls one of its parameters, or hands it to one of the project that does."""
    module, names = function.module, {parameter}
    for call in module.calls:
        if function.scope.node not in list[ast.AST](module.functions_around(call)):
            continue
        network = find_traced_network(module, call)
        if is_computing_model_call(call, names) or (
            network is not None and last_name_before_index(network) in names
        ):
            return True
        given = parameters_receiving(index.index_seen_from(module), call, names) if depth < MAX_DEPTH else []
        if any(calls_parameter(index, each, key, depth + 1) for key, each in given):
            return True
    return False
