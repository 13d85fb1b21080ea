"""What O1 cast and autocast does not, in a module and below it: corrected where that is sure, or noted."""

from __future__ import annotations

import ast

from ampcompare.source.migrate.core.context import Core
from ampcompare.source.migrate.finding import NOTE, Finding
from ampcompare.source.migrate.read.forward import model_keys
from ampcompare.source.migrate.read.names import Names
from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted_name, last_name, last_part

# By name: what O1 does, what autocast does.
DIFFERENT = {
    "gelu": ("fp32", "the type of the input"),
    "std": ("fp32", "the type of the input"),
    "var": ("fp32", "the type of the input"),
    "softmax": ("the type of the input", "fp32"),
    "log_softmax": ("the type of the input", "fp32"),
    "log1p": ("the type of the input", "fp32"),
    "logsumexp": ("the type of the input", "fp32"),
    "cdist": ("the type of the input", "fp32"),
    "square": ("the type of the input", "fp32"),  # a pow, to autocast
    "einsum": ("the type of the input", "fp16"),
    "scaled_dot_product_attention": ("the type of the input", "fp16"),
}
ONLY_FUNCTIONAL = ("gelu",)
NOT_FUNCTIONAL = ("softmax", "log_softmax")  # O1 lists those of torch.nn.functional, and no others
# Products in place: Apex cast their arguments, autocast leaves them as they are.
IN_PLACE = ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_")
PRODUCT = (
    "{0}: Apex cast its arguments to one type; autocast leaves what works in place alone, and products of fp16 and "
    "fp32 fail: write it without the last _, as in x = x.{1}(...)"
)
CPU = "O1 cast to fp32 at .cpu(); this has the type of its tensor now: write .float() before it if that is an output"
CPU_ELSEWHERE = (
    "O1 cast to fp32 at .cpu(), as in line {1} of {0}; outputs keep fp16 there now: write .float() before .cpu()"
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


def note_casts(module: Module, names: Names) -> list[Finding]:
    """Return one note for each function with other casts, at its first call."""
    if not any(meaning == "apex.amp.initialize" for _, meaning in names.uses):
        return []
    found: dict[str, Finding] = {}
    for node, _ in module.methods(*DIFFERENT):
        name = last_name(node.func)
        if name in found:
            continue
        meaning = names.meaning(node.func) or ""
        functional = meaning.startswith("torch.nn.functional.")
        if (name in ONLY_FUNCTIONAL and not functional) or (name in NOT_FUNCTIONAL and functional):
            continue
        if not meaning.startswith("torch.") and name in ("std", "var", "einsum", "cdist", "square"):
            continue  # may be of numpy
        before, after = DIFFERENT[name]
        found[name] = Finding.at(node, NOTE, f"{name}: O1 computes it in {before}, autocast in {after}")
    return list(found.values())


def keep_fp32(core: Core) -> None:
    """Let outputs that go to the CPU be fp32, as under O1, and note products in place, in all files of the project."""
    _note_products(core)
    tails = {last_part(key) for key in model_keys(core.module, core.sites)}
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
