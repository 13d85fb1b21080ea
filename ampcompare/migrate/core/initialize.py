"""Put the loss scaler, or the precision, in the place of `amp.initialize`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampcompare.migrate.core.across_files import attach, carried_keys, is_bound_above, wrapped_models
from ampcompare.migrate.core.initialize_arguments import ScalerSettings, scaler_settings
from ampcompare.migrate.core.initialize_precision import create_precision
from ampcompare.migrate.core.placing import call_lines, conditions_of, declare_global
from ampcompare.migrate.read.booleans import as_bool
from ampcompare.migrate.read.sites import Initialize, Unsure
from ampcompare.migrate.read.tree import Function, Tree
from ampcompare.source.syntax import dotted

if TYPE_CHECKING:
    from ampcompare.migrate.core.context import Core

__all__ = ["create_scalers", "replace_call"]


def create_scalers(core: Core) -> None:
    """Rewrite every `amp.initialize`.

    Raises:
        Unsure: its results or arguments cannot be followed.
    """
    initializes = core.sites.initializes
    single = len(initializes) == 1
    made: list[tuple[Initialize, ScalerSettings]] = [
        (each, scaler_settings(core.tree, each, single=single)) for each in initializes
    ]
    core.update = made[0][1].update if made else ""
    conditional = any(conditions_of(core.tree, each) or settings.enabled for each, settings in made)
    core.always = bool(made) and not conditional and core.scalers.home not in ("module", "optimizer")
    if core.scalers.home == "module" and made and all(each.function is None for each, _ in made):
        core.always = not conditional
    for each, settings in made:
        _create(core, each, settings, single)
        for message in settings.notes if core.target == "torch" else []:
            core.note(each.call, message)


def _create(core: Core, initialize: Initialize, settings: ScalerSettings, single: bool) -> None:
    tree, edits, scalers = core.tree, core.edits, core.scalers
    function = initialize.function
    if core.target == "precision":
        create_precision(core, initialize)
        return
    inside = "self." if scalers.home == "self" else ""
    conditions = conditions_of(tree, initialize)
    enabled = list(settings.enabled)
    hoisted = not core.native and single and bool(conditions) and _can_hoist(core, initialize, conditions)
    hoisted &= initialize.options is None  # a dict that may be None where Apex is off
    at_times = scalers.home == "self" and bool(conditions) and _may_run_again(function, conditions)
    hoisted &= not at_times
    if hoisted:
        enabled = [_text_of_test(core, each.test) for each in reversed(conditions)] + enabled
        enabled = list({ast.unparse(ast.parse(each)): each for each in enabled if each}.values())
    arguments = ['"cuda"', *settings.arguments]
    if "False" in enabled:
        enabled = ["False"]
    if enabled:
        arguments.append(f"enabled={as_bool(tree, _joined(enabled))}")
    lines = [line for name in scalers.names for line in _construction(core, f"{inside}{name}", arguments)]
    in_module = scalers.home == "module" and function is not None
    if in_module:
        declare_global(core, function)
    default = [f"{inside}{name} = {core.off}" for name in scalers.names]
    carried = carried_keys(core, initialize)
    models = wrapped_models(core, initialize)
    if at_times:
        default = []
        _declare_in_class(core, initialize)
    place = (id(tree.block(initialize.statement)), tuple(lines))
    unused = core.always and "optimizers" not in initialize.arguments and not core.sites.backwards
    if unused or place in core.made or _is_made_above(core, initialize):
        lines = []
    core.made.add(place)
    if hoisted:
        late = [each for each in carried if not is_bound_above(conditions[-1], each)]
        early = [each for each in carried if each not in late]
        edits.before(conditions[-1], lines + attach(core, initialize, early))
        replace_call(core, initialize, attach(core, initialize, late) + models)
        return
    if conditions and not in_module and conditions[-1] not in core.defaults and not _is_again(core, initialize):
        core.defaults.add(conditions[-1])
        default += attach(core, initialize, [each for each in carried if is_bound_above(conditions[-1], each)])
        edits.before(conditions[-1], default)
    replace_call(core, initialize, lines + attach(core, initialize, carried) + models)


def _may_run_again(function: Function | None, conditions: list[ast.If]) -> bool:
    """Return whether a method may run again for another purpose, which an argument with a default says."""
    if function is None or function.name == "__init__":
        return False
    given = function.args.args
    modes = {each.arg for each in (*given[len(given) - len(function.args.defaults) :], *function.args.kwonlyargs)}
    asked = {part.id for each in conditions for part in _parts(each.test) if isinstance(part, ast.Name)}
    return bool(modes & asked)


def _declare_in_class(core: Core, initialize: Initialize) -> None:
    """Make a scaler that does nothing the default of a class, once."""
    holder = core.tree.class_of(initialize.function)
    if holder is None or holder in core.defaults:
        return
    core.defaults.add(holder)
    text = isinstance(holder.body[0], ast.Expr) and isinstance(holder.body[0].value, ast.Constant)
    first = holder.body[1] if text and len(holder.body) > 1 else holder.body[0]
    name = initialize.function.name if initialize.function is not None else ""
    lines = [f"{each} = {core.off}  # {name} sets it" for each in core.scalers.names]
    core.edits.before(first, [*lines, ""])


def _is_made_above(core: Core, initialize: Initialize) -> bool:
    """Return whether a call for a model alone follows one with an optimizer, whose scaler it shares."""
    if "optimizers" in initialize.arguments:
        return False
    around = [initialize.statement, *core.tree.ancestors(initialize.statement)]
    return any(
        "optimizers" in each.arguments
        and each.statement.lineno < initialize.statement.lineno
        and any(one in around for one in core.tree.block(each.statement))
        for each in core.sites.initializes
        if each.function is initialize.function
    )


def _is_again(core: Core, initialize: Initialize) -> bool:
    """Return whether the constructor of the same object has made its scaler already."""
    constructors = {each.function for each in core.sites.initializes if each.function is not initialize.function}
    return core.scalers.home == "self" and any(each is not None and each.name == "__init__" for each in constructors)


def _construction(core: Core, name: str, arguments: list[str]) -> list[str]:
    return call_lines(core, f"{name} = {core.torch}.amp.GradScaler", arguments)


def _joined(tests: list[str]) -> str:
    return " and ".join(tests)


def _parts(test: ast.expr) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _asks_for_apex(core: Core, test: ast.expr) -> bool | None:
    """Return whether a test is `amp` or `amp is not None`, which holds now; None if it uses Apex in another way."""
    uses = {id(node) for node, _ in core.names.uses}
    if not any(id(node) in uses for node in ast.walk(test)):
        return False
    asked = test
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot):
        asked = test.left
    return True if id(asked) in uses and not core.names.may_be_none(asked) else None


def _text_of_test(core: Core, test: ast.expr) -> str:
    """Return a test as text, without its parts that ask for Apex; empty if nothing remains."""
    kept = [part for part in _parts(test) if not _asks_for_apex(core, part)]
    if len(kept) < len(_parts(test)):
        return " and ".join(_text_of_test(core, part) for part in kept)
    text = core.tree.source(test)
    if "\n" in text:
        text = ast.unparse(test)
    return f"({text})" if isinstance(test, (ast.BoolOp, ast.IfExp, ast.NamedExpr, ast.Lambda)) else text


def _can_hoist(core: Core, initialize: Initialize, conditions: list[ast.If]) -> bool:
    """Return whether the tests around a call can be evaluated above the outermost one, with the same results."""
    tree = core.tree
    if any(_asks_for_apex(core, part) is None for each in conditions for part in _parts(each.test)):
        return False
    below: ast.stmt = initialize.statement
    for condition in conditions:
        chain = [below, *(each for each in tree.ancestors(below))]
        if not any(each in chain for each in condition.body):
            return False  # in an else or elif
        for node in ast.walk(condition.test):
            if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.Lambda)):
                return False
            if isinstance(node, ast.Call) and dotted(node.func) not in ("hasattr", "getattr", "isinstance", "len"):
                return False
    outermost = conditions[-1]
    if any(isinstance(each, ast.If) and outermost in each.orelse for each in [tree.parent(outermost)]):
        return False  # an elif
    used = {
        key
        for expression in (*(each.test for each in conditions), *initialize.arguments.values())
        for node in ast.walk(expression)
        if isinstance(node, ast.Name) and (key := node.id)
    }
    models = {
        node.id
        for name in ("models", "optimizers")
        if name in initialize.arguments
        for node in ast.walk(initialize.arguments[name])
        if isinstance(node, ast.Name)
    }
    for node in ast.walk(outermost):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in used - models:
            return False
    return True


def _results(tree: Tree, initialize: Initialize) -> str:
    """Return the expression that has the value of the call."""
    models, optimizers = initialize.arguments.get("models"), initialize.arguments.get("optimizers")
    if models is None:
        raise Unsure(initialize.call, "amp.initialize without models")
    if optimizers is None or (isinstance(optimizers, ast.Constant) and optimizers.value is None):
        return tree.source(models)
    return f"{tree.source(models)}, {tree.source(optimizers)}"


def _flat(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, (ast.List, ast.Tuple)):
        return [leaf for each in node.elts for leaf in _flat(each)]
    return [node]


def replace_call(core: Core, initialize: Initialize, lines: list[str]) -> None:
    """Put the value of `amp.initialize` in its place, and statements below or above it.

    Raises:
        Unsure: it stands inside another statement, or has no models.
    """
    results = _results(core.tree, initialize)
    tree, edits, statement = core.tree, core.edits, initialize.statement
    if isinstance(statement, ast.Expr) and statement.value is initialize.call:
        edits.replace_statement(statement, lines)
        return
    if isinstance(statement, ast.Assign) and statement.value is initialize.call and len(statement.targets) == 1:
        values = [initialize.arguments["models"], initialize.arguments.get("optimizers")]
        sources = [leaf for each in values if each is not None for leaf in _flat(each)]
        targets = _flat(statement.targets[0])
        if len(sources) == len(targets):
            pairs = [
                (tree.source(target), tree.source(source))
                for target, source in zip(targets, sources, strict=True)
                if tree.source(target) != tree.source(source) and tree.source(target) != "_"
            ]
            assigned = []
            if pairs:
                assigned = [f"{', '.join(t for t, _ in pairs)} = {', '.join(s for _, s in pairs)}"]
            edits.replace_statement(statement, assigned + lines)
            return
    if isinstance(statement, (ast.Assign, ast.Return, ast.AnnAssign, ast.Expr)):
        value = f"({results})" if initialize.arguments.get("optimizers") is not None else results
        edits.replace(initialize.call, value)
        if lines:
            edits.before(statement, lines)
        return
    raise Unsure(initialize.call, "amp.initialize is inside another statement; move it to its own line")
