"""Hooks of gradients, and own autograd functions: O1 casts in them, and no autocast is on in a backward pass."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator

from ampcompare.source.index import Index, ProjectFunction, UnknownFunction, functions_of_callee
from ampcompare.source.migrate.core.context import ApexCore
from ampcompare.source.migrate.core.model_casts import fp16_level_of_file
from ampcompare.source.migrate.read.cast_lists import CAST_BY_O1
from ampcompare.source.module import Module, Scope
from ampcompare.source.syntax import argument, dotted_name, last_name, last_part, walk

REGISTERING = (
    "register_hook", "register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_post_accumulate_grad_hook", "register_multi_grad_hook",
)  # fmt: skip
# Of these, those that the adapter does not cast in: hooks of modules, and those behind an accumulation.
NOT_OF_TENSORS = (
    "register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_post_accumulate_grad_hook",
)  # fmt: skip
# Functions that register a hook of all modules.
OF_ALL_MODULES = tuple(
    f"torch.nn.modules.module.register_module_{each}_hook"
    for each in ("backward", "full_backward", "full_backward_pre")
)
FUNCTIONS = ("torch.autograd.Function", "torch.autograd.function.Function")
OPERATORS = {ast.MatMult: "@", ast.Pow: "**"}
HOOK = (
    "a hook of gradients runs {} here: O1 casts in it too, and no autocast is on in a backward pass, so that it "
    "computes in the types that it gets now"
)
HOOK_UNDER_ADAPTER = (
    "a hook of gradients runs {} {}: O1 casts in it too, and the adapter in hooks of tensors alone, so that it "
    "computes in the types that it gets, and products of fp16 and fp32 fail"
)
BACKWARD = (
    "the backward pass of {} runs {} here: O1 casts in it too, and no autocast is on there, so that it computes in the "
    "types that it gets now, and products of fp16 and fp32 fail: torch.amp.custom_fwd on its forward and "
    "torch.amp.custom_bwd on its backward keep autocast"
)
KEEPING_AUTOCAST = "custom_bwd"
UNSEEN = "what is not seen"


def note_hooks_of_gradients(core: ApexCore) -> None:
    """Note each hook of gradients that computes what O1 casts, or may do so, in all files that run with a module.

    So does `backward` of each own autograd function.
    """
    if core.is_all_fp32 or fp16_level_of_file(core.sites):
        return
    for module in (core.module, *core.around.modules_imported_transitively(core.module)):
        for call in [
            *(each for each, _ in module.method_calls(*REGISTERING)),
            *_calls_for_all_modules(module),
        ]:
            if names := list(dict.fromkeys(_computations_of_hook(core.index, module, call))):
                _add_note(core, module, call, HOOK.format(", ".join(names)))
        for home, scope in _autograd_backward_methods(module):
            if names := list(dict.fromkeys(_computations_of_functions(core.index, [scope]))):
                _add_note(core, module, scope.node, BACKWARD.format(home, ", ".join(names)))


def hooks_without_casts_under_adapter(module: Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield what registers hooks that the adapter does not cast in, with what they compute that O1 casts, or may."""
    index = Index(module)
    calls = [
        call
        for call, owner in module.method_calls(*NOT_OF_TENSORS, "register_hook", "register_prehook")
        if last_name(call.func) in NOT_OF_TENSORS or last_name(owner) == "grad_fn"
    ]
    for call in [*calls, *_calls_for_all_modules(module)]:
        if names := list(dict.fromkeys(_computations_of_hook(index, module, call))):
            yield call, ", ".join(names)


def _calls_for_all_modules(module: Module) -> Iterator[ast.Call]:
    """Yield the calls that register a hook of gradients for all modules."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and (module.resolve(node.func) or "") in OF_ALL_MODULES:
            yield node


def has_hooks_without_casts_under_adapter(module: Module) -> bool:
    """Return whether a module registers hooks that the adapter does not cast in, and O1 does."""
    return any(True for _ in hooks_without_casts_under_adapter(module))


def _add_note(core: ApexCore, module: Module, node: ast.AST, text: str) -> None:
    if module is core.module:
        core.add_note(node, text)
    elif core.sites.initializes:
        place = f"{core.index.relative_path_of(module)}: line {getattr(node, 'lineno', 0)}: "
        core.add_note(core.sites.initializes[0].call, place + text)


def _autograd_backward_methods(module: Module) -> Iterator[tuple[str, Scope]]:
    """Yield `backward` of each autograd function of a module that keeps no autocast, with the name of its class."""
    for node in module.nodes:
        if not isinstance(node, ast.ClassDef) or not any(
            (module.resolve(each) or "") in FUNCTIONS for each in node.bases
        ):
            continue
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "backward":
                decorators = [getattr(one, "func", one) for one in each.decorator_list]
                if KEEPING_AUTOCAST not in map(last_name, decorators):
                    yield node.name, module.scope_from[each]


def _computations_of_hook(index: Index, module: Module, call: ast.Call) -> Iterator[str]:
    """Yield what the hook that a call registers computes by O1's lists, and what of it is not seen."""
    is_of_several = last_name(call.func) == "register_multi_grad_hook"
    hook = argument(call, "fn" if is_of_several else "hook", 1 if is_of_several else 0)
    if hook is None:
        yield UNSEEN
        return
    waiting, others = _functions_and_outside_names_of(index, hook, module.scope_of[call])
    yield from others
    yield from _computations_of_functions(index, waiting)


def _computations_of_functions(index: Index, waiting: list[Scope]) -> Iterator[str]:
    """Yield what some functions compute by O1's lists, with those of the project that they call.

    Args:
        waiting: the functions, to which others are added.
    """
    seen = set[Scope]()
    for scope in waiting:  # which grows meanwhile
        if scope in seen:
            continue
        seen.add(scope)
        for node in walk(scope.node):
            if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
                yield OPERATORS[type(node.op)]
            elif isinstance(node, ast.Call):
                functions, others = _functions_and_outside_names_of(
                    index, node.func, scope.module.scope_of[node]
                )
                waiting += functions
                yield from others


def _functions_and_outside_names_of(
    index: Index, node: ast.expr, scope: Scope
) -> tuple[list[Scope], list[str]]:
    """Return the functions of the project that an expression may be, and the others that may cast, by name."""
    callee = index.function_of_expression(node, scope)
    found = functions_of_callee(callee)
    inside = [each.scope for each in found if isinstance(each, ProjectFunction)]
    names = [each.name for each in found if not isinstance(each, ProjectFunction)]
    others = [name for each in names if (name := _computation_of_outside_name(each))]
    if isinstance(callee, UnknownFunction) and not inside and not names:
        others += _unknown_computation(node)
    return inside, others


def _computation_of_outside_name(full_name: str) -> str:
    """Return what a function or layer that no file of the project defines may compute by O1's lists; "" for none."""
    package, _, rest = full_name.removesuffix(".__call__").partition(".")
    name = last_part(rest)
    if package == "torch":
        return name if name in CAST_BY_O1 or (rest.startswith("nn.") and name[:1].isupper()) else ""
    return "" if hasattr(builtins, package) or package in sys.stdlib_module_names | {"numpy"} else name


def _unknown_computation(node: ast.expr) -> list[str]:
    """Return what a call of which nothing is known may compute: a method of tensors by its name, others as text."""
    name, text = last_name(node), dotted_name(node) or ""
    if isinstance(node, ast.Attribute) and not text.startswith("self."):
        return [name] if name in CAST_BY_O1 else []
    return [] if name and hasattr(builtins, name) else [text or UNSEEN]
