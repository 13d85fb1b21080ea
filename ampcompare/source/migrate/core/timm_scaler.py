"""Scripts that scale their loss by `ApexScaler` of timm, which calls Apex: they get timm's `NativeScaler`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampcompare.source.branches import conditions_around
from ampcompare.source.migrate.core.across_files import wrapped_models
from ampcompare.source.migrate.core.initialize import replace_call
from ampcompare.source.migrate.finding import Unsure
from ampcompare.source.migrate.read.sites import Sites
from ampcompare.source.module import Module
from ampcompare.source.syntax import last_name

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import Core

__all__ = ["rewrite_timm", "uses_timm_scaler"]

APEX, TIMM_NATIVE = "ApexScaler", "NativeScaler"
CASTS = "torch.cuda.amp.autocast"
STATE = "NativeScaler saves its state under another key than ApexScaler, so files from before do not restore the scale"


def uses_timm_scaler(module: Module, sites: Sites) -> bool:
    """Return whether a module initializes Apex, and leaves the rest to `ApexScaler` of timm."""
    if sites.backwards or sites.masters or sites.saves or sites.loads or not sites.initializes:
        return False
    return APEX in module.text and any(True for _ in _timm_calls(module))


def _imports(module: Module) -> Iterator[ast.ImportFrom]:
    for node, alias, full in module.imports:
        if isinstance(node, ast.ImportFrom) and full.startswith("timm.utils"):
            if alias.name in (APEX, "*") and alias.asname is None:
                yield node


def _timm_calls(module: Module) -> Iterator[ast.Call]:
    """Yield the calls of the class, by its name or through a module, as in `utils.ApexScaler()`."""
    by_name = any(True for _ in _imports(module))
    for node in module.calls:
        if isinstance(node.func, ast.Name) and node.func.id == APEX and by_name:
            yield node
        elif isinstance(node.func, ast.Attribute) and node.func.attr == APEX:
            if (module.resolve(node.func) or "").startswith("timm."):
                yield node


def rewrite_timm(core: Core) -> None:
    """Replace the class, and let the forward passes of the branch of Apex run under autocast.

    Raises:
        Unsure: the class is used without being called, or `initialize` gives more than a level.
    """
    module, edits = core.module, core.edits
    calls = list(_timm_calls(module))
    names = [node for node in module.nodes if isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) == APEX]
    if len(names) > len(calls):
        raise Unsure(names[-1], f"{APEX} of timm is passed as a value; {TIMM_NATIVE} is its equivalent")
    for call in calls:
        owner = f"{module.source(call.func.value)}." if isinstance(call.func, ast.Attribute) else ""
        edits.replace(call.func, f"{owner}{TIMM_NATIVE}")
        core.note(call, STATE)
    for node in _imports(module):
        kept = [alias for alias in node.names if alias.name != APEX]
        if len(kept) < len(node.names):
            if not any(alias.name == TIMM_NATIVE for alias in kept):
                kept.append(ast.alias(TIMM_NATIVE))
            text = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in kept)
            edits.replace_statement(node, [f"from {node.module} import {text}"])
    core.always = True
    for each in core.sites.initializes:
        level = each.arguments.get("opt_level")
        fixed = level is None or isinstance(level, ast.Constant)
        fixed = fixed or f"{ast.unparse(level)} != 'O0'" in conditions_around(module, each.call)  # type: ignore[arg-type]
        if "enabled" in each.arguments or not fixed:
            raise Unsure(each.call, f"{TIMM_NATIVE} of timm scales always, but here a run chooses the level")
        casts = _casts(core, each.call)
        lines = wrapped_models(core, each) if casts is None else [casts]
        replace_call(core, each, lines)


def _casts(core: Core, call: ast.Call) -> str | None:
    """Return the statement by which another branch chooses autocast, `amp_autocast = torch.cuda.amp.autocast`."""
    for node in core.module.nodes:
        if isinstance(node, ast.Assign) and core.names.meaning(node.value) == CASTS:
            if core.module.function(node) is core.module.function(call):
                return core.module.source(node)
    return None
