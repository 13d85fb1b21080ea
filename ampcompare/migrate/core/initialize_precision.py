"""Put `make_precision` and `prepare` in the place of `amp.initialize`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.migrate.core.across_files import attach, carried_keys, is_bound_above
from ampcompare.migrate.core.placing import call_lines, conditions_of, declare_global
from ampcompare.migrate.read.sites import Initialize, Unsure
from ampcompare.migrate.read.tree import Tree

if TYPE_CHECKING:
    from ampcompare.migrate.core.context import Core

__all__ = ["create_precision"]


OPTIONS = ("keep_batchnorm_fp32", "master_weights", "loss_scale", "max_loss_scale")
NO_OPTIONS = ("cast_model_type", "cast_model_outputs", "patch_torch_functions", "min_loss_scale", "num_losses")


def create_precision(core: Core, initialize: Initialize) -> None:
    """Put `make_precision` and `prepare` in the place of a call; what is above it makes fp32 the default."""
    tree, edits = core.tree, core.edits
    name = f"self.{core.scalers.names[0]}" if core.scalers.home == "self" else core.scalers.names[0]
    arguments = [_arm(tree, initialize), 'device="cuda"', *_options(tree, initialize)]
    _require_known_options(initialize)
    preparation = _preparation(tree, initialize, name)
    lines = [*call_lines(core, f"{name} = ampcompare.make_precision", arguments), preparation]
    conditions = conditions_of(tree, initialize)
    if core.scalers.home == "module" and initialize.function is not None:
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


def _arm(tree: Tree, initialize: Initialize) -> str:
    """Return an expression for the arm: that of the opt level, or fp32 where Apex is not enabled."""
    level = initialize.arguments.get("opt_level")
    arm = '"apex:O1"' if level is None else f'f"apex:{{{tree.source(level)}}}"'
    if isinstance(level, ast.Constant):
        arm = f'"apex:{level.value!s}"'
    elif level is not None and any(mark in tree.source(level) for mark in ('"', "'", "\n", "\\")):
        arm = f'"apex:" + {tree.source(level)}'  # before Python 3.12 these may not stand in an f-string
    enabled = initialize.arguments.get("enabled")
    if enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True):
        return arm
    return f'{arm} if {tree.source(enabled)} else "fp32"'


def _options(tree: Tree, initialize: Initialize) -> list[str]:
    """Return the arguments for the options of the arm; None stands for the default of the opt level and is left out."""
    arguments = []
    for option in OPTIONS:
        value = initialize.arguments.get(option)
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            continue
        text = tree.source(value)
        if isinstance(value, ast.Constant) or _is_choice(value):
            arguments.append(f"{option}={text}")
        else:
            arguments.append(f"**({{}} if {text} is None else {{'{option}': {text}}})")
    return arguments


def _require_known_options(initialize: Initialize) -> None:
    """Check that each option of a call is known and has a counterpart.

    Raises:
        Unsure: one has none, or it depends on the run which there are.
    """
    for option in NO_OPTIONS:
        if option in initialize.arguments:
            raise Unsure(
                initialize.call, f"{option} is not an option of ampcompare.make_precision; use ampcompare.apex"
            )
    if initialize.sometimes - {"verbosity"} or initialize.options is not None:
        raise Unsure(initialize.call, "its options depend on the run; write the options for --to precision by hand")


def _preparation(tree: Tree, initialize: Initialize, name: str) -> str:
    """Return the line that prepares models and optimizers; its results are bound as those of the call were.

    Raises:
        Unsure: the call has no models, or its result is bound otherwise.
    """
    models = initialize.arguments.get("models")
    if models is None:
        raise Unsure(initialize.call, "amp.initialize without models")
    optimizers = initialize.arguments.get("optimizers")
    if isinstance(optimizers, ast.Constant):
        optimizers = None
    prepare = f"{name}.prepare({_as_list(tree, models)}, {_as_list(tree, optimizers)})"
    if isinstance(initialize.statement, ast.Expr):
        return prepare
    target = initialize.statement.targets[0] if isinstance(initialize.statement, ast.Assign) else None
    bound = list(target.elts) if isinstance(target, (ast.Tuple, ast.List)) and optimizers is not None else [target]
    if target is None or len(bound) != 1 + (optimizers is not None):
        raise Unsure(initialize.call, "the result of amp.initialize is not bound to its own names")
    names = [_bound_to(tree, each, given) for each, given in zip(bound, (models, optimizers), strict=False)]
    return f"{', '.join([*names, '_'][:2])} = {prepare}"


def _bound_to(tree: Tree, target: ast.expr | None, given: ast.expr | None) -> str:
    """Return what `prepare` is unpacked into: a name that stands for several of them takes the list itself."""
    is_whole = isinstance(given, (ast.List, ast.Tuple)) and not isinstance(target, (ast.List, ast.Tuple))
    return tree.source(target) if is_whole and target is not None else _as_list(tree, target)


def _is_choice(value: ast.expr) -> bool:
    """Return whether a value is chosen by a test, and is not None at least in one case."""
    return isinstance(value, ast.IfExp) and isinstance(value.body, ast.Constant) and value.body.value == "dynamic"


def _as_list(tree: Tree, node: ast.expr | None) -> str:
    if node is None:
        return "[]"
    text = tree.source(node)
    if isinstance(node, ast.Tuple):
        return f"[{text.removeprefix('(').removesuffix(')')}]"
    return text if isinstance(node, ast.List) else f"[{text}]"
