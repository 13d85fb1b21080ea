"""What O1 cast and autocast does not, in a module and below it: corrected where that is sure, or noted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from ampcompare.source.index import Answer, Index
from ampcompare.source.migrate.core.context import ApexCore
from ampcompare.source.migrate.core.holders import access_path_of
from ampcompare.source.migrate.core.model_casts import fp16_level_of_file
from ampcompare.source.migrate.core.outputs import AutocastOutputs
from ampcompare.source.migrate.read.cast_lists import HALF_UNDER_BOTH, WIDE_LAYERS, WIDE_UNDER_AUTOCAST
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.fp64 import BY_AUTOCAST, find_fp64
from ampcompare.source.migrate.read.networks import network_classes
from ampcompare.source.migrate.read.wide_numbers import ScalarTensorFinder
from ampcompare.source.migrate.read.wide_tensors import Fp32TensorFinder
from ampcompare.source.module import Module
from ampcompare.source.syntax import (
    FunctionNode,
    argument_values,
    arguments,
    dotted_name,
    is_literal,
    last_name,
    last_part,
    names_bound_in,
    strip_star,
    walk,
)

# What O1 does with 16-bit inputs, and with others; then what autocast of CUDA does. By function of torch.nn.functional,
# of torch, or method; a test measures them.
KEPT = "the type of its inputs"
WIDE = "fp32"
LOWER = "fp16"
ROUNDED = "fp32 of a log-softmax in the type of its inputs"  # to which torch passes that type on
FUNCTIONAL = {
    "gelu": (WIDE, KEPT),
    "cross_entropy": (WIDE, ROUNDED),
    "grid_sample": (WIDE, KEPT),
    "rms_norm": (KEPT, WIDE),
    "pairwise_distance": (KEPT, WIDE),
    "pdist": (KEPT, WIDE),
    "huber_loss": (KEPT, WIDE),
    "affine_grid": (KEPT, LOWER),
    "prelu": (KEPT, LOWER),
    "scaled_dot_product_attention": (KEPT, LOWER),
}
PLAIN = {
    "std": (WIDE, KEPT),
    "var": (WIDE, KEPT),
    "softmax": (KEPT, WIDE),  # O1 lists those of torch.nn.functional, and no others
    "log_softmax": (KEPT, WIDE),
    "log1p": (KEPT, WIDE),
    "logsumexp": (KEPT, WIDE),
    "cdist": (KEPT, WIDE),
    "square": (KEPT, WIDE),  # a pow, to autocast
    "einsum": (KEPT, LOWER),
}
# Apex refused fp16 tensors in these, as it could not make them fp32 where they are; autocast leaves them alone.
IN_ITS_PLACE = dict.fromkeys(
    ("acos_", "asin_", "cosh_", "erfinv_", "exp_", "expm1_", "log_", "log10_", "log2_", "reciprocal_", "rsqrt_",
     "sinh_", "tan_", "pow_", "cumsum_", "cumprod_", "renorm_"),
    ("fp32 alone", KEPT),
)  # fmt: skip
LAYERS = {
    "GELU": "gelu", "RMSNorm": "rms_norm", "PairwiseDistance": "pairwise_distance", "HuberLoss": "huber_loss",
    "PReLU": "prelu", "CrossEntropyLoss": "cross_entropy",
}  # fmt: skip
OFTEN_OF_OTHERS = {
    "std",
    "var",
    "einsum",
    "cdist",
    "square",
    "sum",
    "prod",
    "norm",
    "pow",
    "normalize",
    "dist",
}
OF_O1 = "types that O1 and autocast compute in: {0}"
OF_O2 = (
    "in the model these were computed in fp16 where their inputs were, and are in fp32 under autocast; outside of it "
    "in fp32 both times: {0}"
)
NUMBERS = (
    "a tensor of one number may be fp32 in {0}: O1 computed such arithmetic in fp32, torch does in the type of the "
    "other tensor; write .float() behind that one where it matters"
)
WIDE_IN_PLACE = (
    "in place, with a tensor that may be fp32: {0}; O1 makes both of one type before, torch keeps that of the first; "
    "write x = x + y where it matters"
)
WRITTEN = (
    "a network writes weights, as it may in {0}: autocast keeps its casts of weights to the end of a forward pass of "
    "the model, so that what is written within one does not count there; O2 and O3 keep none: write "
    "cache_enabled=False into its torch.autocast"
)
WEIGHT_WRITERS = frozenset({"vector_to_parameters", "load_state_dict", "copy_", "set_"})
OUTSIDE_PRODUCTS = (
    "products of tensors that run outside of autocast: {0}; O1 cast these to fp16 too, and they are computed in the "
    'types that they get now: put them under torch.autocast("cuda", dtype=torch.float16) where it matters'
)
# Methods of networks that run while they are made or loaded.
BEFORE_TRAINING = frozenset(
    {"__init__", "load_state_dict", "reset_parameters", "init_weights", "_init_weights"}
)
METHODS_OF_PRODUCTS = frozenset({"mm", "matmul", "bmm", "mv", "addmm", "addmv", "addr", "baddbmm", "addbmm"})
FACTORS = frozenset({"mat1", "mat2", "mat", "vec", "vec1", "vec2", "batch1", "batch2"})
MADE_FP32 = (
    "what a model computes on tensors that it makes fp32 itself, as it may in {0}, was in fp32 at {1}; autocast casts "
    'products of them to fp16: keep these under torch.autocast("cuda", enabled=False)'
)
# Products in place: Apex cast their arguments to the type of the receiver, autocast leaves them as they are.
IN_PLACE = ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_")
INTO = frozenset({"addmm", "addmv", "addr", "addbmm", "baddbmm", "mm", "mv", "bmm", "matmul", "dot"})
PRODUCT = (
    "{0}: O1 cast its arguments to the type of what it works on; autocast leaves what works in place alone, and "
    "products of fp16 and fp32 fail: write x.{0}(a.to(x.dtype), b.to(x.dtype))"
)
PRODUCT_INTO = (
    "{0} with out=: O1 cast its arguments; autocast leaves what writes into a tensor alone, and products of fp16 and "
    "fp32 fail: write x = torch.{0}(...)"
)
PRODUCT_ELSEWHERE = "{0} calls {1} in line {2}, which may run under autocast here. {3}"
PRODUCT_REACHED = (
    "this training runs line {2} of {0}, with {1}, under autocast. {3}; or take the adapter, which casts"
)
PRODUCT_HERE = "{0}; or take the adapter, which casts"
CPU = "O1 cast to fp32 at .cpu(); this has the type of its tensor now: write .float() before it if that is an output"
CPU_ELSEWHERE = (
    "O1 cast to fp32 at .cpu(), as in {0}; what comes from autocast keeps fp16 there now: "
    "write .float() before .cpu()"
)
# Names of what is no integer.
FLOATS = re.compile(r"logit|feat|embed|prob|hidden", re.IGNORECASE)
# Methods that keep a tensor's type.
KEEP = frozenset({
    "detach", "contiguous", "view", "reshape", "squeeze", "unsqueeze", "flatten", "clone", "permute", "transpose", "t",
    "requires_grad_", "mean", "sum", "norm", "add", "mul", "div", "sub", "repeat", "expand", "sigmoid", "exp", "cuda",
})  # fmt: skip
# Methods and functions whose result is a number, integers or of another kind.
NO_FLOATS = frozenset({
    "argmax", "argmin", "argsort", "long", "int", "bool", "item", "topk", "eq", "ge", "gt", "le", "lt", "float",
    "double",
    "nonzero", "max", "min", "sort", "state_dict", "size", "numel", "to", "half", "sum", "mean", "byte",
})  # fmt: skip


def note_differing_casts(core: ApexCore, outputs: AutocastOutputs) -> None:
    """Note for each file of the project which functions it calls that autocast computes in another type than Apex."""
    is_half = bool(fp16_level_of_file(core.sites))
    for initialize in core.sites.initializes[:1] if not core.is_all_fp32 else []:
        for module in (core.module, *core.around.modules_imported_transitively(core.module)):
            found = (
                _functions_in_fp32_under_autocast(module)
                if is_half
                else _functions_cast_otherwise(core, module, outputs)
            )
            where = f"{core.index.relative_path_of(module)}: " if module is not core.module else ""
            if found:
                core.add_note(initialize.call, where + (OF_O2 if is_half else OF_O1).format(", ".join(found)))
            products = [] if is_half else list(_products_outside_autocast(core, module, outputs))
            if products:
                shown = ", ".join(dict.fromkeys(f"line {each.lineno}" for each in products))
                core.add_note(initialize.call, where + OUTSIDE_PRODUCTS.format(shown))
            for node in [] if is_half else islice(find_fp64(module), 1):
                core.add_note(initialize.call, BY_AUTOCAST.format(f"{where}line {node.lineno}"))
            for text, nodes in [] if is_half else _remarks_and_mixed_arithmetic(module, core.index):
                lines = [f"`{ast.unparse(each).splitlines()[0]}` (line {each.lineno})" for each in nodes]
                core.add_note(initialize.call, where + text.format(", ".join(dict.fromkeys(lines))))
        written = list(_weights_written_by_networks(core)) if is_half else []
        if written:
            core.add_note(initialize.call, WRITTEN.format(", ".join(written)))
        places = list(_first_fp32_conversions_in_models(core)) if is_half else []
        if places:
            core.add_note(
                initialize.call, MADE_FP32.format(", ".join(places), fp16_level_of_file(core.sites))
            )


def _products_outside_autocast(
    core: ApexCore, module: Module, outputs: AutocastOutputs
) -> Iterator[ast.expr]:
    """Yield the products that run below `amp.initialize` and under no autocast, outside of networks and optimizers."""
    apart = {node for each in network_classes(module) for node in walk(each)}
    for node in module.nodes:
        is_operator = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        if not is_operator and not (isinstance(node, ast.Call) and _is_product_call(module, node)):
            continue
        function = module.function_around(node)
        home = module.class_of(function)
        is_of_optimizer = home is not None and any("Optim" in last_name(each) for each in home.bases)
        if node in apart or is_of_optimizer or getattr(function, "name", "") == "__init__":
            continue
        if function is not None:
            calls, complete = core.index.possible_calls_and_completeness(module.scope_from[function])
            if not calls and complete:
                continue
        if module is core.module:
            statement = module.statement_around(node)
            if core.runs_only_before_initialize(statement) or core.is_in_disable_casts_block(node):
                continue
        elif function is None:
            continue
        if outputs.coverage.coverage_of_node(module, node) is Answer.NO:
            assert isinstance(node, ast.expr)
            yield node


def _is_product_call(module: Module, call: ast.Call) -> bool:
    """Return whether a call is a product of torch by O1's list: of `torch`, or a method of what may be a tensor."""
    name, full = last_name(call.func), module.resolve(call.func)
    if name not in HALF_UNDER_BOTH:
        return False
    if full is not None:
        return full.startswith("torch.")
    return isinstance(call.func, ast.Attribute) and name in METHODS_OF_PRODUCTS


def _remarks_and_mixed_arithmetic(
    module: Module, index: Index
) -> Iterator[tuple[str, list[ast.expr | ast.AugAssign]]]:
    """Yield what is said of arithmetic in networks that O1 computes in another type than torch, with its nodes."""
    # what a constructor computes runs before `amp.initialize`, with no casts of either
    nodes = [
        node
        for network in network_classes(module)
        for each in network.body
        if not (isinstance(each, ast.FunctionDef) and each.name == "__init__")
        for node in walk(each)
    ]
    for text, found in (
        (NUMBERS, ScalarTensorFinder(module, index).nodes_mixing_scalar_tensors(nodes)),
        (WIDE_IN_PLACE, Fp32TensorFinder(module).inplace_arithmetic_with_fp32_operand(nodes)),
    ):
        if found:
            yield text, found


def _weights_written_by_networks(core: ApexCore) -> Iterator[str]:
    """Yield the lines in which networks may write weights outside of their constructors, past what autocast watches."""
    for module in (core.module, *core.around.modules_imported_transitively(core.module)):
        where = f" of {core.index.relative_path_of(module)}" if module is not core.module else ""
        methods = [each for one in network_classes(module) for each in one.body]
        nodes = [
            node
            for each in methods
            if getattr(each, "name", "") not in BEFORE_TRAINING
            for node in walk(each)
        ]
        for node in nodes:
            if isinstance(node, ast.Assign) and any(
                isinstance(each, ast.Attribute) and each.attr == "data" for each in node.targets
            ):
                yield f"line {node.lineno}{where}"
            elif isinstance(node, ast.Call) and last_name(node.func) in WEIGHT_WRITERS:
                owner = node.func.value if isinstance(node.func, ast.Attribute) else None
                is_whole = last_name(node.func) not in ("copy_", "set_")
                if is_whole or (isinstance(owner, ast.Attribute) and owner.attr == "data"):
                    yield f"line {node.lineno}{where}"


def _first_fp32_conversions_in_models(core: ApexCore) -> Iterator[str]:
    """Yield for each file the first place where a model makes a tensor fp32, to compute on it."""
    for module in (core.module, *core.around.modules_imported_transitively(core.module)):
        functions = [each for each in module.scope_from if isinstance(each, ast.FunctionDef)]
        holders = {module.class_of(each) for each in functions if each.name == "forward"} - {None}
        for call, owner in module.method_calls("float", "to", "type"):
            home = module.class_of(module.function_around(call))
            # Functions next to layers compute for these; those of the script may be metrics.
            is_near = home in holders or (bool(holders) and home is None and module is not core.module)
            if (
                is_near
                and module.function_around(call) is not None
                and _makes_tensor_fp32(module, call, owner)
            ):
                yield f"line {call.lineno}" + (
                    f" of {core.index.relative_path_of(module)}" if module is not core.module else ""
                )
                break


def _makes_tensor_fp32(module: Module, call: ast.Call, owner: ast.expr) -> bool:
    """Return whether a method makes a tensor fp32, other than a truth value or the whole model."""
    if isinstance(owner, (ast.Compare, ast.BoolOp)) or dotted_name(owner) == "self":
        return False
    given = argument_values(call)
    if last_name(call.func) == "float":
        return not given
    return any(
        module.resolve(each) in ("torch.float32", "torch.float", "torch.FloatTensor") for each in given
    )


def _functions_cast_otherwise(core: ApexCore, module: Module, outputs: AutocastOutputs) -> list[str]:
    """Return the functions that O1 and autocast compute in different types, each with its first line and both types."""
    found: dict[str, str] = {}
    for name, functional, call in _calls_of_torch_functions(module, LAYERS):
        if name in IN_ITS_PLACE and not _may_call_meet_autocast(core, module, call, outputs):
            continue
        types = IN_ITS_PLACE.get(name) or (FUNCTIONAL if functional else PLAIN).get(name)
        if types is not None:
            found.setdefault(name, f"{name} (line {call.lineno}) {types[0]}, now {types[1]}")
    return list(found.values())


def _may_call_meet_autocast(core: ApexCore, module: Module, call: ast.Call, outputs: AutocastOutputs) -> bool:
    """Return whether a method may run under autocast, or of what came from it."""
    if outputs.coverage.coverage_of_node(module, call) is not Answer.NO:
        return True
    return module is core.module and any(
        map(outputs.may_hold_output, [*argument_values(call), *_method_receiver_if_any(call)])
    )


def _functions_in_fp32_under_autocast(module: Module) -> list[str]:
    """Return the functions that autocast computes in fp32, each with its first line."""
    found: dict[str, str] = {}
    for name, _, call in _calls_of_torch_functions(module, WIDE_LAYERS):
        if name in WIDE_UNDER_AUTOCAST:
            found.setdefault(name, f"{name} (line {call.lineno})")
    return list(found.values())


def _calls_of_torch_functions(
    module: Module, layers: Mapping[str, str]
) -> Iterator[tuple[str, bool, ast.Call]]:
    """Yield calls of torch's functions, or of methods that are named so: name, whether it is functional, and the call.

    Args:
        layers: classes of torch.nn, with the functions that they call.
    """
    own = {last_part(key) for key in names_bound_in(module.tree) if "." in key}
    for call in module.calls:
        name, meaning = last_name(call.func), module.resolve(call.func) or ""
        if meaning.startswith("torch.nn.") and name in layers:
            if not _is_only_attribute_used(module, call):
                yield layers[name], True, call
        elif meaning.startswith("torch.nn.functional."):
            yield name, True, call
        elif meaning == f"torch.{name}" or (not meaning and _is_method_of_tensors_alone(call, own)):
            yield name, False, call


def _is_only_attribute_used(module: Module, made: ast.Call) -> bool:
    """Return whether of a layer that is made nothing is used but an attribute, as `CrossEntropyLoss().ignore_index`."""
    outer = module.parent(made)
    around = module.parent(outer)
    return isinstance(outer, ast.Attribute) and not (isinstance(around, ast.Call) and around.func is outer)


def _is_method_of_tensors_alone(call: ast.Call, own_names: set[str]) -> bool:
    """Return whether a call by an unknown name is one of a method that only tensors have, and no attribute is that."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr in OFTEN_OF_OTHERS:
        return False
    return dotted_name(call.func.value) != "self" and call.func.attr not in own_names


def keep_types_of_outputs_and_products(core: ApexCore, outputs: AutocastOutputs) -> None:
    """Let outputs that go to the CPU be fp32, as under O1, and products in place work, in all files of the project.

    Raises:
        UnsureRewrite: a product in place surely runs under autocast, and its arguments cannot be cast.
    """
    if core.is_all_fp32:
        return
    _cast_or_note_inplace_products(core, outputs)
    if fp16_level_of_file(core.sites):
        return  # whose models return fp32, here too
    for call, owner in core.module.method_calls("cpu"):
        if call.args or call.keywords or not core.model_names:
            continue
        origin = _origin_of_tensor(core, owner, outputs)
        if origin == "output":
            _, end = core.module.span(owner)
            core.edits.replace_span(end, end, ".float()")
        elif origin == "made from one":
            core.add_note(call, CPU)
    _note_cpu_moves_elsewhere(core, outputs)


def _note_cpu_moves_elsewhere(core: ApexCore, outputs: AutocastOutputs) -> None:
    """Note for each other file the first line that moves to the CPU what may come from autocast."""
    lines: dict[Module, int] = {}
    for module, call in outputs.method_calls_elsewhere("cpu"):
        lines[module] = min(call.lineno, lines.get(module, call.lineno))
    for module in core.around.modules_imported_transitively(core.module):
        for call, owner in module.method_calls("cpu"):
            if module not in lines and _is_named_like_output_elsewhere(module, owner):
                if outputs.coverage.coverage_of_node(module, call) is not Answer.NO:
                    lines[module] = call.lineno
    if lines and core.sites.initializes:
        places = sorted(
            f"line {line} of {core.index.relative_path_of(module)}" for module, line in lines.items()
        )
        core.add_note(core.sites.initializes[0].call, CPU_ELSEWHERE.format(", ".join(places)))


def _cast_or_note_inplace_products(core: ApexCore, outputs: AutocastOutputs) -> None:
    """Cast the arguments of products in place that run under autocast as O1 did, or note them where they may."""
    for call, text in _inplace_products_and_remarks(core.module):
        if not _may_call_meet_autocast(core, core.module, call, outputs) or _cast_product_arguments(
            core, call
        ):
            continue
        if outputs.coverage.coverage_of_node(core.module, call) is Answer.YES:
            raise UnsureRewrite(call, PRODUCT_HERE.format(text))
        core.add_note(call, text)
    for _, module in core.around.other_modules_of_program(core.module) if core.sites.initializes else ():
        for call, text in _inplace_products_and_remarks(module):
            answer, name = outputs.coverage.coverage_of_node(module, call), last_name(call.func)
            if answer is Answer.NO:
                continue
            words, first = (
                (core.index.relative_path_of(module), name, call.lineno, text),
                core.sites.initializes[0].call,
            )
            if answer is Answer.YES:
                raise UnsureRewrite(first, PRODUCT_REACHED.format(*words))
            core.add_note(first, PRODUCT_ELSEWHERE.format(*words))


def _inplace_products_and_remarks(module: Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield the products that write into a tensor, each with what is said of it."""
    for call, _ in module.method_calls(*IN_PLACE):
        yield call, PRODUCT.format(last_name(call.func))
    for call in module.calls:
        name = last_name(call.func)
        if name in INTO and any(
            each.arg == "out" and not is_literal(each.value, None) for each in call.keywords
        ):
            if module.resolve(call.func) == f"torch.{name}":
                yield call, PRODUCT_INTO.format(name)


def _method_receiver_if_any(call: ast.Call) -> list[ast.expr]:
    return [call.func.value] if isinstance(call.func, ast.Attribute) else []


def _cast_product_arguments(core: ApexCore, call: ast.Call) -> bool:
    """Cast the factors of a product in place to the type of its receiver; return whether that can be written."""
    names = [dotted_name(each) for each in _method_receiver_if_any(call)]
    factors = [each.value for each in call.keywords if each.arg in FACTORS]
    factors = [*call.args[max(0, len(call.args) - 2 + len(factors)) :], *factors]
    if last_name(call.func) not in IN_PLACE or None in names or len(factors) != 2:
        return False
    if any(isinstance(each, ast.Starred) for each in call.args) or any(
        each.arg is None for each in call.keywords
    ):
        return False
    for each in factors:
        start, end = core.module.span(each)
        if not isinstance(each, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            core.edits.replace_span(start, start, "(")
            core.edits.replace_span(end, end, f").to({names[0]}.dtype)")
        else:
            core.edits.replace_span(end, end, f".to({names[0]}.dtype)")
    return True


class _ChainBeginning(NamedTuple):
    """Where a chain of methods and items begins.

    Attributes:
        passed: the expressions of the chain, from the whole to its beginning.
        is_call: it begins with a call of a model.
        is_kept: nothing on the way makes another tensor of it.
    """

    passed: list[ast.expr]
    is_call: bool
    is_kept: bool


def _find_beginning_of_chain(core: ApexCore, node: ast.expr) -> _ChainBeginning | None:
    """Return what `x` in `x.detach()[0].data` begins with; None if something on the way returns no floats of it."""
    passed, kept = [node], True
    while True:
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in core.model_names:
                return _ChainBeginning(passed, is_call=True, is_kept=kept)
            if not isinstance(node.func, ast.Attribute) or name in NO_FLOATS - KEEP:
                return None
            if (core.names.full_name_of(node.func) or "").startswith("torch."):
                return None
            kept = kept and name in KEEP
            node = node.func.value
        elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
            node = node.value
        else:
            return _ChainBeginning(passed, is_call=False, is_kept=kept)
        passed.append(node)


def _origin_of_tensor(core: ApexCore, node: ast.expr, outputs: AutocastOutputs, depth: int = 0) -> str:
    """Return whether a tensor is an `output` of a model, as it is; is `made from one`; or neither, as an empty text."""
    begun = _find_beginning_of_chain(core, node)
    if begun is None:
        return ""
    base = next((each for each in begun.passed if access_path_of(each)), None)
    node, kept = begun.passed[-1], begun.is_kept
    if begun.is_call:
        return "output" if kept else "made from one"
    text = dotted_name(node)
    values = (
        [] if text is None or depth > 2 else core.module.values_of(text, core.module.scope_of[node]) or []
    )
    # a part of what a model returns may hold integers
    is_float = FLOATS.search(last_part(text or "")) is not None
    found = set()
    for each in values:
        if node in walk(each):  # as in `logits = logits.cpu()`
            continue
        may_be_integers = isinstance(each, ast.Starred) and not is_float
        origin = "" if may_be_integers else _origin_of_tensor(core, strip_star(each), outputs, depth + 1)
        found.add(origin)
    if found == {"output"} and kept:
        return "output"
    if depth <= 2 and _may_parameter_hold_output(core, node, outputs, depth):
        return "made from one"
    is_held = base is not None and not depth and outputs.may_hold_output(base) and not outputs.is_loss(base)
    return "made from one" if is_held or found - {""} else ""


def _may_parameter_hold_output(core: ApexCore, node: ast.expr, outputs: AutocastOutputs, depth: int) -> bool:
    """Return whether a name is a parameter for which a call in the module may give what a model returned."""
    for given in _arguments_for_parameter(core, node):
        if outputs.may_hold_output(given) and not outputs.is_loss(given):
            return True
        if _origin_of_tensor(core, given, outputs, depth + 1):
            return True
    return False


def _arguments_for_parameter(core: ApexCore, node: ast.expr) -> Iterator[ast.expr]:
    """Yield what calls in the module give for a parameter that a name is; nothing for any other expression."""
    scope = core.module.scope_of[node]
    if not isinstance(node, ast.Name) or node.id not in scope.parameters:
        return
    if isinstance(scope.node, FunctionNode):
        for call in core.index.possible_calls_and_completeness(scope)[0]:
            if call in core.module.scope_of:
                given = arguments(call, core.module.positional_parameters_without_self(scope.node)).get(
                    node.id
                )
                if given is not None:
                    yield given


def _is_named_like_output_elsewhere(module: Module, node: ast.expr) -> bool:
    """Return whether a tensor of another file is called as outputs of models are."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call) and last_name(node.func) in NO_FLOATS - KEEP:
            return False
        node = node.func if isinstance(node, ast.Call) else node.value
    return any(word in last_name(node) for word in ("output", "feat", "logit", "pred", "embed", "score"))
