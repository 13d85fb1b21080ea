"""Training that begins in one file and goes on in another: the optimizer carries the scaler, the model autocast."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.neighbors import CARRIED, needs_scaler
from ampcompare.source.migrate.read.sites import Initialize, Unsure
from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted_name, elements, is_literal, last_name, parameters

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import Core

REPLICAS = r"(?<!Distributed)DataParallel|\b(?:[Ee]ma|EMA)\b|ModelEma|ExponentialMovingAverage|AveragedModel"
COPIES = re.compile(rf"deepcopy|{REPLICAS}")
# In another file, to which the model may go: calls alone, and copies of what is called a model.
COPIES_ELSEWHERE = re.compile(rf"deepcopy\(\s*[\w.]*(?:model|net)\w*\s*\)|(?:{REPLICAS})\w*\(")
PLURAL = re.compile(r"(?:optimizers|optims|opts)$", re.IGNORECASE)
UNSCALED = (
    "no file calls scale_loss, so the loss is not scaled, as with Apex: the scaler only says whether autocast is on; "
    "gradients below 2**-24 become 0"
)
ELSEWHERE = (
    f"scale_loss is called in another file: the optimizer carries the scaler there, as {CARRIED}; migrate that file too"
)
CARRIED_ON = (
    f"functions of another file may step or save this optimizer, so it carries the scaler, as {CARRIED}; migrate that "
    "file too"
)
SUBCLASS = (
    "copies and replicas of a model share no wrapped forward, so the model gets a subclass of its class; torch.save of "
    "the whole model, rather than of its state_dict, cannot pickle that class"
)


def casts_itself(core: Core) -> bool:
    """Return whether `forward` of the models gets autocast, as not all of its calls are in this module."""
    return bool(_trains_elsewhere(core) or core.forward.missing or core.handed_on)


def _trains_elsewhere(core: Core) -> bool:
    return not any(each.block for each in core.sites.backwards)


def is_scaled_nowhere(core: Core) -> bool:
    """Return whether no file around calls `scale_loss`, so that the loss is not scaled, with Apex either."""
    if any(each.block for each in core.sites.backwards):
        return False
    trains_here = any(True for _ in core.module.methods("backward"))
    known = core.around.path is not None or trains_here  # of a text alone nothing around is known
    return known and not any(map(needs_scaler, core.index.modules))


def carried_keys(core: Core, initialize: Initialize) -> list[str]:
    """Return the optimizers that carry the scaler to another file; none where all backward passes are in this one."""
    optimizers = initialize.arguments.get("optimizers")
    if not (core.across or _trains_elsewhere(core)) or optimizers is None:
        return []
    if not core.across and is_scaled_nowhere(core):
        core.note(initialize.call, UNSCALED)
        return []
    if is_literal(optimizers, None):
        return []
    given = elements(optimizers)
    keys = [dotted_name(each) for each in given]
    found = [key for key in keys if key is not None]
    if len(found) < len(keys):
        raise Unsure(initialize.call, "the optimizer is not a plain name, and scale_loss is not in this file")
    if any(is_list(core.module, each) for each in given):
        raise Unsure(initialize.call, "the optimizers are in a list, which cannot carry the scaler to scale_loss")
    if found:
        core.note(initialize.call, ELSEWHERE if _trains_elsewhere(core) else CARRIED_ON)
    return found


def is_list(module: Module, optimizers: ast.expr) -> bool:
    """Return whether a name stands for several optimizers: by what it is bound to, or else by its plural."""
    key, scope = dotted_name(optimizers) or "", module.scope_of.get(optimizers, module.top)
    values = [each for each in module.values_of(key, scope) or [] if not is_literal(each, None)]
    lists = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp)
    makers = [last_name(each.func) for each in values if isinstance(each, ast.Call)]
    if any(isinstance(each, lists) for each in values) or {"list", "tuple", "dict", "sorted"} & set(makers):
        return True
    return PLURAL.search(key) is not None and not any(name[:1].isupper() for name in makers)


def is_bound_above(condition: ast.If, key: str) -> bool:
    """Return whether an object is surely there above a condition: it is no part of another, and not made below it."""
    made = [each.targets for each in ast.walk(condition) if isinstance(each, ast.Assign)]
    return "." not in key.removeprefix("self.") and not any(key in map(dotted_name, targets) for targets in made)


def attach(core: Core, initialize: Initialize, keys: list[str]) -> list[str]:
    """Return lines that give optimizers what they carry; a parameter may be None where a model only predicts."""
    lines: list[str] = []
    function = initialize.function
    given = [] if function is None else parameters(function)
    for key in keys:
        line = f"{key}.{CARRIED} = {core.planned.expression}"
        optional = key in given
        lines += [f"if {key} is not None:", f"{core.module.unit}{line}"] if optional else [line]
    return lines


def wrapped_models(core: Core, initialize: Initialize) -> list[str]:
    """Return lines that let `forward` of the models run under autocast wherever it is called, if it is not here."""
    if not casts_itself(core):
        return []
    module = core.module
    models = initialize.arguments.get("models")
    given = [] if models is None else elements(models)
    lines: list[str] = []
    # A copy or a replica would call the forward pass of the model that it is a copy of.
    is_copied = COPIES.search(module.text) is not None or any(
        COPIES_ELSEWHERE.search(each.text) is not None for each in core.index.modules if each is not module
    )
    enabled = "" if core.always else f", enabled={core.planned.expression}.is_enabled()"
    target = initialize.statement.targets[0] if isinstance(initialize.statement, ast.Assign) else None
    if len(given) == 1 and isinstance(target, ast.Name):
        given = [target]
    elif len(given) == 1 and isinstance(target, ast.Tuple) and len(target.elts) == 2 and dotted_name(target.elts[0]):
        given = [target.elts[0]]  # `model, optimizer = amp.initialize(model.cuda(), optimizer)`
    for each in given:
        key = dotted_name(each)
        if key is None:
            raise Unsure(initialize.call, "the model is not a plain name, and its forward pass is not in this file")
        context = f'{core.torch}.autocast("cuda", dtype={core.torch}.float16{enabled})'
        lines += _subclass(core, key) if is_copied else [f"{key}.forward = {context}({key}.forward)"]
    if is_copied:
        core.note(initialize.call, SUBCLASS)
    core.note(
        initialize.call,
        "the model itself runs under autocast, wherever it is called; a loss outside of it is computed in the type of "
        "its output",
    )
    return lines


def _subclass(core: Core, key: str) -> list[str]:
    """Return lines that give a model a class with autocast, which copies and replicas of it have too."""
    unit, casts = core.module.unit, "" if core.always else ", enabled=casts"
    context = f'{core.torch}.autocast("cuda", dtype={core.torch}.float16{casts})'
    return [
        *([f"casts = {core.planned.expression}.is_enabled()"] if casts else []),
        "",
        f"class Autocast(type({key})):",
        f"{unit}def forward(self, *args, **kwargs):",
        f"{unit * 2}with {context}:",
        f"{unit * 3}return super().forward(*args, **kwargs)",
        "",
        f"Autocast.__name__ = type({key}).__name__",
        f"{key}.__class__ = Autocast",
    ]
