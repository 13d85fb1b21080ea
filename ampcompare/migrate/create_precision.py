"""Put `make_precision` and `prepare` in the place of `amp.initialize`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.migrate.elsewhere import attach, carried_keys, is_bound_above
from ampcompare.migrate.placing import call_lines, conditions_of, declare_global
from ampcompare.migrate.sites import Initialize, Unsure
from ampcompare.migrate.tree import Tree

if TYPE_CHECKING:
    from ampcompare.migrate.context import Core

__all__ = ["create_precision"]


def create_precision(core: Core, initialize: Initialize) -> None:
    """Put `make_precision` and `prepare` in the place of a call; what is above it makes fp32 the default."""
    tree, edits, given = core.tree, core.edits, initialize.arguments
    name = f"self.{core.scalers.names[0]}" if core.scalers.home == "self" else core.scalers.names[0]
    level = given.get("opt_level")
    arm = '"apex:O1"' if level is None else f'f"apex:{{{tree.source(level)}}}"'
    if isinstance(level, ast.Constant):
        arm = f'"apex:{level.value!s}"'
    elif level is not None and any(mark in tree.source(level) for mark in ('"', "'", "\n", "\\")):
        arm = f'"apex:" + {tree.source(level)}'
    enabled = given.get("enabled")
    if enabled is not None and not (isinstance(enabled, ast.Constant) and enabled.value is True):
        arm = f'{arm} if {tree.source(enabled)} else "fp32"'
    arguments = [arm, 'device="cuda"']
    for option in OPTIONS:
        value = given.get(option)
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            continue
        text = tree.source(value)
        if isinstance(value, ast.Constant) or _is_choice(value):
            arguments.append(f"{option}={text}")
        else:
            arguments.append(f"**({{}} if {text} is None else {{'{option}': {text}}})")
    for option in ("cast_model_type", "cast_model_outputs", "patch_torch_functions", "min_loss_scale", "num_losses"):
        if option in given:
            raise Unsure(
                initialize.call, f"{option} is not an option of ampcompare.make_precision; use ampcompare.apex"
            )
    if initialize.sometimes - {"verbosity"} or initialize.options is not None:
        raise Unsure(initialize.call, "its options depend on the run; write the options for --to precision by hand")
    models = given.get("models", None)
    if models is None:
        raise Unsure(initialize.call, "amp.initialize without models")
    optimizers = given.get("optimizers")
    if isinstance(optimizers, ast.Constant):
        optimizers = None
    several = [each for each in (models, optimizers) if isinstance(each, (ast.List, ast.Tuple))]
    lists = [_as_list(tree, each) for each in (models, optimizers)]
    lines = call_lines(core, f"{name} = ampcompare.make_precision", arguments)
    target = initialize.statement.targets[0] if isinstance(initialize.statement, ast.Assign) else None
    bound = list(target.elts) if isinstance(target, (ast.Tuple, ast.List)) and optimizers is not None else [target]
    if isinstance(initialize.statement, ast.Expr):
        lines.append(f"{name}.prepare({', '.join(lists)})")
    elif isinstance(initialize.statement, ast.Assign) and len(bound) == 1 + (optimizers is not None):
        names = [_as_list(tree, each) for each in bound] + ([] if optimizers is not None else ["_"])
        for each, given_value in zip(bound, (models, optimizers), strict=False):
            if given_value in several and not isinstance(each, (ast.List, ast.Tuple)):
                names[bound.index(each)] = tree.source(each)  # type: ignore[arg-type]
        lines.append(f"{', '.join(names)} = {name}.prepare({', '.join(lists)})")
    else:
        raise Unsure(initialize.call, "the result of amp.initialize is not bound to its own names")
    conditions = conditions_of(tree, initialize)
    in_module = core.scalers.home == "module" and initialize.function is not None
    if in_module:
        declare_global(core, initialize.function)
    elif conditions and conditions[-1] not in core.defaults:
        core.defaults.add(conditions[-1])
        edits.before(conditions[-1], [f"{name} = {core.off}"])
    carried = carried_keys(core, initialize)
    late = [each for each in carried if conditions and is_bound_above(conditions[-1], each)]
    if late:
        edits.after(conditions[-1], attach(core, initialize, late))
    lines += attach(core, initialize, [each for each in carried if each not in late])
    edits.replace_statement(initialize.statement, lines)


def _is_choice(value: ast.expr) -> bool:
    """Return whether a value is chosen by a test, and is not None at least in one case."""
    return isinstance(value, ast.IfExp) and isinstance(value.body, ast.Constant) and value.body.value == "dynamic"


OPTIONS = ("keep_batchnorm_fp32", "master_weights", "loss_scale", "max_loss_scale")


def _as_list(tree: Tree, node: ast.expr | None) -> str:
    if node is None:
        return "[]"
    text = tree.source(node)
    if isinstance(node, ast.Tuple):
        return f"[{text.removeprefix('(').removesuffix(')')}]"
    return text if isinstance(node, ast.List) else f"[{text}]"
