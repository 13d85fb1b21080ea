"""A model that casts by itself, wherever it is called: that of O2 and O3, and of a file without a scaled loss."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.sites import InitializeCall, Sites
from ampcompare.source.syntax import dotted_name, elements, is_literal, last_name

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import ApexCore

REPLICAS = r"(?<!Distributed)DataParallel|\b(?:[Ee]ma|EMA)\b|ModelEma|ExponentialMovingAverage|AveragedModel"
COPIES = re.compile(rf"deepcopy|{REPLICAS}")
# In another file, to which the model may go: calls alone, and copies of what is called a model.
COPIES_ELSEWHERE = re.compile(rf"deepcopy\(\s*[\w.]*(?:model|net)\w*\s*\)|(?:{REPLICAS})\w*\(")
UNSCALED = (
    "no file calls scale_loss, so the loss is not scaled, as with Apex: the scaler only says whether autocast is on; "
    "gradients below 2**-24 become 0"
)
SUBCLASS = (
    "copies and replicas of a model share no wrapped forward, so the model gets a subclass of its class; torch.save of "
    "the whole model, rather than of its state_dict, cannot pickle that class"
)

RETURNS_FP32 = "returns_fp32"
FP32_FUNCTION = '''\
def {name}(forward):
    """Let a forward pass return its floating-point tensors in fp32, as that of a model of O2 or O3 does in Apex."""

    def to_fp32(value):
        if isinstance(value, {torch}.Tensor):
            return value.float() if value.is_floating_point() else value
        if isinstance(value, dict):
            return {{key: to_fp32(each) for key, each in value.items()}}
        if isinstance(value, (list, tuple)):
            values = [to_fp32(each) for each in value]
            return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
        if hasattr(value, "to"):
            return value.to({torch}.float32)
        if hasattr(value, "keys"):
            return {{key: to_fp32(value[key]) for key in value}}
        if isinstance(value, (str, bytes, range)) or hasattr(value, "dtype") or not hasattr(value, "__iter__"):
            return value
        return (iter if hasattr(value, "__next__") else type(value))(map(to_fp32, value))

    @functools.wraps(forward)
    def call(*args, **kwargs):
        return to_fp32(forward(*args, **kwargs))

    return call
'''
OF_FP16 = (
    "the model itself runs under autocast, wherever it is called, and returns fp32; what follows it is computed in "
    "fp32, as at {0} in Apex"
)
OF_O1 = (
    "the model itself runs under autocast, wherever it is called; a loss outside of it is computed in the type of "
    "its output"
)
NO_NAME = "the model is not a plain name, so its forward pass cannot be put under autocast here"


def initialize_gets_optimizer(initialize: InitializeCall) -> bool:
    """Return whether `amp.initialize` gets an optimizer, and so begins a training."""
    given = initialize.arguments.get("optimizers")
    return given is not None and not is_literal(given, None) and elements(given) != []


def fp16_level_of_file(sites: Sites) -> str:
    """Return the level, O2 or O3, at which all models of a file are initialized; empty where one may have another.

    Apex gives such a model a forward pass that returns fp32, and casts nothing outside of it.
    """
    levels = [each.arguments.get("opt_level") for each in sites.initializes]
    found = {str(each.value) if isinstance(each, ast.Constant) else "" for each in levels}
    return min(found) if found and found <= {"O2", "O3"} else ""


def puts_autocast_in_forward(core: ApexCore) -> bool:
    """Return whether `forward` of the models gets autocast, rather than the calls that a scaled loss comes from."""
    return bool(fp16_level_of_file(core.sites)) or not any(each.block for each in core.sites.backwards)


def lines_putting_autocast_in_forward(core: ApexCore, initialize: InitializeCall) -> list[str]:
    """Return lines that let `forward` of the models run under autocast wherever it is called; none where calls do."""
    if not puts_autocast_in_forward(core):
        return []
    module, level = core.module, fp16_level_of_file(core.sites)
    if initialize_gets_optimizer(initialize) and not any(each.block for each in core.sites.backwards):
        core.add_note(initialize.call, UNSCALED)
    # A copy or a replica would call the forward pass of the model that it is a copy of.
    is_copied = COPIES.search(module.text) is not None or any(
        COPIES_ELSEWHERE.search(each.text) is not None for each in core.index.modules if each is not module
    )
    lines: list[str] = []
    for each in _models_of_initialize(initialize):
        key = dotted_name(each)
        if key is None or _is_container_of_models(core, each):
            raise UnsureRewrite(initialize.call, NO_NAME)
        lines += (
            _autocast_subclass_lines(core, key, level)
            if is_copied
            else _wrapped_forward_lines(core, key, level)
        )
    if level:
        _define_fp32_function(core, initialize)
    if is_copied:
        core.add_note(initialize.call, SUBCLASS)
    core.add_note(initialize.call, OF_FP16.format(level) if level else OF_O1)
    return lines


def _models_of_initialize(initialize: InitializeCall) -> list[ast.expr]:
    """Return the models of a call: a single one under the name that gets the result, if there is one."""
    models = initialize.arguments.get("models")
    given = [] if models is None else elements(models)
    target = initialize.statement.targets[0] if isinstance(initialize.statement, ast.Assign) else None
    if len(given) == 1 and isinstance(target, ast.Name):
        return [target]
    if (
        len(given) == 1
        and isinstance(target, ast.Tuple)
        and len(target.elts) == 2
        and dotted_name(target.elts[0])
    ):
        return [target.elts[0]]  # `model, optimizer = amp.initialize(model.cuda(), optimizer)`
    return given


def _is_container_of_models(core: ApexCore, model: ast.expr) -> bool:
    """Return whether a name stands for several models."""
    scope = core.module.scope_of.get(model, core.module.top)
    values = core.module.values_of(dotted_name(model) or "", scope) or []
    makers = {last_name(each.func) for each in values if isinstance(each, ast.Call)}
    lists = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp)
    return any(isinstance(each, lists) for each in values) or not makers.isdisjoint({"list", "tuple", "dict"})


def _define_fp32_function(core: ApexCore, initialize: InitializeCall) -> None:
    """Put the function by which a forward pass returns fp32 above the code that uses it, once."""
    module, name = core.module, RETURNS_FP32
    if any(getattr(each, "id", getattr(each, "name", None)) == name for each in module.nodes):
        raise UnsureRewrite(
            initialize.call, f"this needs a function {name}, but the module has something else of that name"
        )
    if f"def {name}(" not in core.edits.inserted_text():
        text = FP32_FUNCTION.format(name=name, torch=core.torch).replace("    ", module.indentation_unit)
        statement = module.outermost_statement(initialize.statement)
        line = module.first_line(statement)
        blank = ["", ""] if line > 1 and module.line_text(line - 1).strip() else []
        core.edits.insert_above(statement, [*blank, *text.splitlines(), "", ""])


def _wrapped_forward_lines(core: ApexCore, key: str, level: str) -> list[str]:
    enabled = f"{core.planned.expression}.is_enabled()"
    options = "" if core.always or level else f", enabled={enabled}"
    forward = f'{core.torch}.autocast("cuda", dtype={core.torch}.float16{options})({key}.forward)'
    if not level:
        return [f"{key}.forward = {forward}"]
    line = f"{key}.forward = {RETURNS_FP32}({forward})"
    return [line] if core.always else [f"if {enabled}:", f"{core.module.indentation_unit}{line}"]


def _autocast_subclass_lines(core: ApexCore, key: str, level: str) -> list[str]:
    """Return lines that give a model a class with autocast, which copies and replicas of it have too."""
    unit, enabled = core.module.indentation_unit, f"{core.planned.expression}.is_enabled()"
    casts = "" if core.always or level else ", enabled=casts"
    context = f'{core.torch}.autocast("cuda", dtype={core.torch}.float16{casts})'
    lines = [
        f"class Autocast(type({key})):",
        *([f"{unit}@{RETURNS_FP32}"] if level else []),
        f"{unit}def forward(self, *args, **kwargs):",
        f"{unit * 2}with {context}:",
        f"{unit * 3}return super().forward(*args, **kwargs)",
        "",
        f"Autocast.__name__ = type({key}).__name__",
        f"{key}.__class__ = Autocast",
    ]
    if level and not core.always:
        return [f"if {enabled}:", *(f"{unit}{line}" if line else "" for line in lines)]
    return [*([f"casts = {enabled}"] if casts else []), "", *lines]
