"""What O1 cast and autocast does not, in a module and below it: corrected where that is sure, or noted."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from ampcompare.source.migrate.core.context import Core
from ampcompare.source.migrate.core.model_casts import level_of_fp16
from ampcompare.source.module import Module
from ampcompare.source.syntax import argument_values, dotted_name, last_name

# What O1 does with 16-bit inputs, and with others; then what autocast of CUDA does. By function of torch.nn.functional,
# of torch, or method; a test measures them.
KEPT, WIDE, LOWER = "the type of its inputs", "fp32", "fp16"
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
# What a model of O2 computes in fp16, and autocast of CUDA in fp32.
WIDE_UNDER_AUTOCAST = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "square", "cumsum", "cumprod", "sum", "prod", "norm", "dist", "cdist", "logsumexp", "softmax",
    "log_softmax", "softmin", "softplus", "layer_norm", "group_norm", "rms_norm", "cosine_similarity", "normalize",
    "pairwise_distance", "pdist",
})  # fmt: skip
WIDE_LAYERS = {
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "Softmin": "softmin", "Softplus": "softplus",
    "LayerNorm": "layer_norm", "GroupNorm": "group_norm", "RMSNorm": "rms_norm",
    "CosineSimilarity": "cosine_similarity", "PairwiseDistance": "pairwise_distance",
}  # fmt: skip
OFTEN_OF_OTHERS = {"std", "var", "einsum", "cdist", "square", "sum", "prod", "norm", "pow", "normalize", "dist"}
OF_O1 = "types that O1 and autocast compute in: {0}"
OF_O2 = (
    "in the model these were computed in fp16 where their inputs were, and are in fp32 under autocast; outside of it "
    "in fp32 both times: {0}"
)
MADE_FP32 = (
    "what a model computes on tensors that it makes fp32 itself, as it may in {0}, was in fp32 at {1}; autocast casts "
    'products of them to fp16: keep these under torch.autocast("cuda", enabled=False)'
)
# Products in place: Apex cast their arguments, autocast leaves them as they are.
IN_PLACE = ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_")
PRODUCT = (
    "{0}: Apex cast its arguments to one type; autocast leaves what works in place alone, and products of fp16 and "
    "fp32 fail: write it without the last _, as in x = x.{1}(...)"
)
CPU = "O1 cast to fp32 at .cpu(); this has the type of its tensor now: write .float() before it if that is an output"
CPU_ELSEWHERE = (
    "O1 cast to fp32 at .cpu(), as in line {1} of {0}; what comes from autocast keeps fp16 there now: write .float() "
    "before .cpu()"
)
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


def note_casts(core: Core) -> None:
    """Note for each file of the project which functions it calls that autocast computes in another type than Apex."""
    is_half = bool(level_of_fp16(core.sites))
    for initialize in core.sites.initializes[:1] if not core.is_off else []:
        for module in (core.module, *core.around.modules_below(core.module)):
            found = _wide_calls(module) if is_half else _other_casts(module)
            if found:
                where = f"{core.index.name_of(module)}: " if module is not core.module else ""
                core.note(initialize.call, where + (OF_O2 if is_half else OF_O1).format(", ".join(found)))
        places = list(_fp32_places(core)) if is_half else []
        if places:
            core.note(initialize.call, MADE_FP32.format(", ".join(places), level_of_fp16(core.sites)))


def _fp32_places(core: Core) -> Iterator[str]:
    """Yield for each file the first place where a model makes a tensor fp32, to compute on it."""
    for module in (core.module, *core.around.modules_below(core.module)):
        functions = [each for each in module.scope_from if isinstance(each, ast.FunctionDef)]
        holders = {module.class_of(each) for each in functions if each.name == "forward"} - {None}
        for call, owner in module.methods("float", "to", "type"):
            home = module.class_of(module.function(call))
            # Functions next to layers compute for these; those of the script may be metrics.
            is_near = home in holders or (bool(holders) and home is None and module is not core.module)
            if is_near and module.function(call) is not None and _makes_fp32(module, call, owner):
                yield f"line {call.lineno}" + (f" of {core.index.name_of(module)}" if module is not core.module else "")
                break


def _makes_fp32(module: Module, call: ast.Call, owner: ast.expr) -> bool:
    """Return whether a method makes a tensor fp32, other than a truth value or the whole model."""
    if isinstance(owner, (ast.Compare, ast.BoolOp)) or dotted_name(owner) == "self":
        return False
    given = argument_values(call)
    if last_name(call.func) == "float":
        return not given
    return any(module.resolve(each) in ("torch.float32", "torch.float", "torch.FloatTensor") for each in given)


def _other_casts(module: Module) -> list[str]:
    """Return the functions that O1 and autocast compute in different types, each with its first line and both types."""
    found: dict[str, str] = {}
    for name, functional, call in _calls(module, LAYERS):
        types = IN_ITS_PLACE.get(name) or (FUNCTIONAL if functional else PLAIN).get(name)
        if types is not None:
            found.setdefault(name, f"{name} (line {call.lineno}) {types[0]}, now {types[1]}")
    return list(found.values())


def _wide_calls(module: Module) -> list[str]:
    """Return the functions that autocast computes in fp32, each with its first line."""
    found: dict[str, str] = {}
    for name, _, call in _calls(module, WIDE_LAYERS):
        if name in WIDE_UNDER_AUTOCAST:
            found.setdefault(name, f"{name} (line {call.lineno})")
    return list(found.values())


def _calls(module: Module, layers: Mapping[str, str]) -> Iterator[tuple[str, bool, ast.Call]]:
    """Yield calls of torch's functions, or of methods that are named so: name, whether it is functional, and the call.

    Args:
        layers: classes of torch.nn, with the functions that they call.
    """
    for call in module.calls:
        name, meaning = last_name(call.func), module.resolve(call.func) or ""
        if meaning.startswith("torch.nn.") and name in layers:
            yield layers[name], True, call
        elif meaning.startswith("torch.nn.functional."):
            yield name, True, call
        elif meaning == f"torch.{name}" or (not meaning and _is_of_tensor(call)):
            yield name, False, call


def _is_of_tensor(call: ast.Call) -> bool:
    """Return whether a call by an unknown name is one of a method that only tensors have."""
    return isinstance(call.func, ast.Attribute) and call.func.attr not in OFTEN_OF_OTHERS


def keep_fp32(core: Core) -> None:
    """Let outputs that go to the CPU be fp32, as under O1, and note products in place, in all files of the project."""
    if core.is_off:
        return
    _note_products(core)
    if level_of_fp16(core.sites):
        return  # whose models return fp32, here too
    tails = core.models
    for call, owner in core.module.methods("cpu"):
        if call.args or call.keywords or not tails:
            continue
        origin = _origin(core, owner, tails)
        if origin == "output":
            _, end = core.module.span(owner)
            core.edits.replace_span(end, end, ".float()")
        elif origin == "made from one":
            core.note(call, CPU)
    for initialize in core.sites.initializes[:1]:
        for module in core.around.modules_below(core.module):
            moved = [each for each, owner in module.methods("cpu") if _origin_by_name(module, owner)]
            if moved:
                core.note(initialize.call, CPU_ELSEWHERE.format(core.index.name_of(module), moved[0].lineno))
                break


def _note_products(core: Core) -> None:
    for call, _ in core.module.methods(*IN_PLACE):
        name = last_name(call.func)
        core.note(call, PRODUCT.format(name, name.removesuffix("_")))
    for initialize in core.sites.initializes[:1]:
        for module in core.around.modules_below(core.module):
            for call, _ in module.methods(*IN_PLACE):
                name, file = last_name(call.func), core.index.name_of(module)
                text = f"{file} calls {name} in line {call.lineno}. {PRODUCT.format(name, name.removesuffix('_'))}"
                core.note(initialize.call, text)


def _origin(core: Core, node: ast.expr, tails: set[str], depth: int = 0) -> str:
    """Return whether a tensor is an `output` of a model, as it is; is `made from one`; or neither, as an empty text."""
    kept = True
    while True:
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name in tails:
                return "output" if kept else "made from one"
            if not isinstance(node.func, ast.Attribute) or name in NO_FLOATS - KEEP:
                return ""
            meaning = core.names.meaning(node.func) or ""
            if meaning.startswith("torch."):
                return ""
            kept = kept and name in KEEP
            node = node.func.value
        elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
            node = node.value
        else:
            break
    text = dotted_name(node)
    values = [] if text is None or depth > 2 else core.module.values_of(text, core.module.scope_of[node]) or []
    found = {_origin(core, each, tails, depth + 1) for each in values if not isinstance(each, ast.Starred)}
    found |= {
        "made from one"
        for each in values
        if isinstance(each, ast.Starred) and isinstance(each.value, ast.Call) and last_name(each.value.func) in tails
    }
    if found == {"output"} and kept:
        return "output"
    return "made from one" if found - {""} else ""


def _origin_by_name(module: Module, node: ast.expr) -> bool:
    """Return whether a tensor of another file is called as outputs of models are."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call) and last_name(node.func) in NO_FLOATS - KEEP:
            return False
        node = node.func if isinstance(node, ast.Call) else node.value
    return any(word in last_name(node) for word in ("output", "feat", "logit", "pred", "embed", "score"))
