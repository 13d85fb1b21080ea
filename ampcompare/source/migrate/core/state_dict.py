"""`amp.state_dict` and `amp.load_state_dict` in checkpoints, with a branch that still reads files of Apex."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.syntax import dotted_name

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import ApexCore

FROM_APEX = "# saved with Apex"
UNSCALED = "# empty where the loss was not scaled"
ENTRY = re.compile(r"loss_scaler\d+")
OF_APEX = "the entries of Apex's state are read here; the state of a GradScaler has others, such as scale"


def rewrite_amp_state(core: ApexCore) -> None:
    """Rewrite saving and loading of the scalers."""
    for node in core.module.nodes if core.sites.saves or core.sites.loads else ():
        if isinstance(node, ast.Constant) and ENTRY.fullmatch(str(node.value)):
            raise UnsureRewrite(node, OF_APEX)
    for call in core.sites.saves:
        if isinstance(core.module.parent(call), ast.Attribute):
            raise UnsureRewrite(call, OF_APEX)
        core.edits.replace(call, _scaler_state_expression(core, call))
    for call in core.sites.loads:
        _rewrite_load_of_state(core, call)


def _scaler_state_expression(core: ApexCore, call: ast.Call) -> str:
    if call.args or call.keywords:
        raise UnsureRewrite(call, "amp.state_dict with a destination has no equivalent")
    return f"{core.scaler_expression}.state_dict()"


def _rewrite_load_of_state(core: ApexCore, call: ast.Call) -> None:
    module = core.module
    statement = module.statement_around(call)
    if not isinstance(statement, ast.Expr) or len(call.args) + len(call.keywords) != 1:
        raise UnsureRewrite(call, "amp.load_state_dict is not a statement of its own")
    value = call.args[0] if call.args else call.keywords[0].value
    text = module.source(value)
    scaler = core.scaler_expression
    lines: list[str] = []
    is_lookup = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant)
    if dotted_name(value.value if is_lookup else value) is None:  # type: ignore[attr-defined]
        lines, text = [f"amp_state = {text}"], "amp_state"
    unit = module.indentation_unit
    lines.append(f'if "loss_scaler0" in {text}:  {FROM_APEX}')
    entry = f'{text}["loss_scaler0"]'
    lines += [
        f"{unit}{scaler}.load_state_dict({{",
        f"{unit}{unit}**{scaler}.state_dict(),",
        f'{unit}{unit}"scale": {entry}["loss_scale"],',
        f'{unit}{unit}"_growth_tracker": {entry}["unskipped"],',
        f"{unit}}})",
        "else:" if core.always else f"elif {text}:  {UNSCALED}",
        f"{unit}{scaler}.load_state_dict({text})",
    ]
    core.edits.replace_statement(statement, lines)
