"""A model that casts by itself, wherever it is called: what a file without a scaled loss initializes."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.sites import Initialize, Unsure
from ampcompare.source.syntax import dotted_name, elements, is_literal

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import Core

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


def gets_optimizers(initialize: Initialize) -> bool:
    """Return whether `amp.initialize` gets an optimizer, and so begins a training."""
    given = initialize.arguments.get("optimizers")
    return given is not None and not is_literal(given, None) and elements(given) != []


def casts_itself(core: Core) -> bool:
    """Return whether `forward` of the models gets autocast, as no scaled loss says which of its calls do."""
    return not any(each.block for each in core.sites.backwards)


def wrapped_models(core: Core, initialize: Initialize) -> list[str]:
    """Return lines that let `forward` of the models run under autocast wherever it is called, if no loss is scaled."""
    if not casts_itself(core):
        return []
    module = core.module
    if gets_optimizers(initialize):
        core.note(initialize.call, UNSCALED)
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
