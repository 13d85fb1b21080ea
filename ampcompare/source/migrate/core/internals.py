"""Private state of Apex that scripts use, of optimizers where they resume, and of the loss scaler: it stays by hand."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampcompare.source.index import Index, ProjectFunction, functions_of_callee
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.syntax import dotted_name, names_bound_in

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import ApexCore

AMP_STATE = "apex.amp._amp_state"
NAMES = frozenset({
    "_amp_stash", "_amp_scale_adjustment", "_lazy_init_maybe_master_weights", "_amp_lazy_init",
    "_master_params_to_model_params", "_prepare_amp_backward", "_post_amp_backward",
})  # fmt: skip
INTERNALS = re.compile(rf"\b(?:{'|'.join(sorted(NAMES))})\b")
NO_EQUIVALENT = "{0} is private to Apex, whose amp.initialize gave it to the optimizer; it has no equivalent"
OF_APEX = "{0} is internal to Apex, and torch.amp has nothing of that kind"
OF_SCALE = (
    "{0} is internal to Apex; torch.amp sets the loss scale by GradScaler(init_scale=...) or scaler.update(new_scale), "
    "and scaler.get_scale() reads it"
)


def rewrite_or_refuse_apex_internals(core: ApexCore) -> None:
    """Rewrite reads of the loss scale, and refuse any other private state of Apex, which has no equivalent."""
    for node, name in find_apex_internals_uses(core.index):
        raise UnsureRewrite(node, NO_EQUIVALENT.format(name))
    for use, meaning in core.names.uses:
        if meaning.startswith(AMP_STATE) and not _rewrite_loss_scale_read(core, use, meaning):
            message = OF_SCALE if meaning == f"{AMP_STATE}.loss_scalers" else OF_APEX
            raise UnsureRewrite(use, message.format(meaning.removeprefix("apex.")))


def _rewrite_loss_scale_read(core: ApexCore, use: ast.expr, meaning: str) -> bool:
    """Rewrite `loss_scalers[0].loss_scale()`; return whether a use is that."""
    if meaning != f"{AMP_STATE}.loss_scalers":
        return False
    call = next(itertools.islice(core.module.ancestors(use), 2, None), None)
    if call is None or ast.unparse(call) != f"{ast.unparse(use)}[0].loss_scale()":
        return False
    core.edits.replace(call, f"{core.scaler_expression}.get_scale()")
    return True


def find_apex_internals_uses(index: Index) -> Iterator[tuple[ast.expr, str]]:
    """Yield each use of what `amp.initialize` gives an optimizer, as attribute or by `getattr` without a default.

    What a class of the project defines by such a name, as copies of Apex's older optimizers do, is none.
    """
    module = index.module
    for node in module.nodes:
        name: object = None
        if isinstance(node, ast.Call) and dotted_name(node.func) == "getattr" and len(node.args) == 2:
            name = getattr(node.args[1], "value", None)
        elif isinstance(node, ast.Attribute):
            name = node.attr
        if (
            name in NAMES
            and isinstance(node, ast.expr)
            and not _is_attribute_of_project(index, node, str(name))
        ):
            yield node, str(name)


def _is_attribute_of_project(index: Index, node: ast.expr, name: str) -> bool:
    """Return whether an attribute is one of a class of the project, by the index or as it is of `self`."""
    module = index.module
    if any(
        isinstance(each, ProjectFunction)
        for each in functions_of_callee(index.function_of_expression(node, module.scope_of[node]))
    ):
        return True
    owner = None
    if isinstance(node, ast.Attribute):
        owner = node.value
    elif isinstance(node, ast.Call):
        owner = node.args[0]
    holder = module.class_of(module.function_around(node))
    return dotted_name(owner) == "self" and holder is not None and f"self.{name}" in names_bound_in(holder)
