"""Put the loss scaler in the place of `amp.initialize`."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampcompare.source.amp_names import OPT_LEVELS
from ampcompare.source.branches import never_run_together
from ampcompare.source.migrate.core.model_casts import lines_putting_autocast_in_forward
from ampcompare.source.migrate.core.scalers import ifs_around_call, is_constructor, runs_under_varying_tests
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.options import UNSEEN, expression_as_bool
from ampcompare.source.migrate.read.sites import InitializeCall
from ampcompare.source.module import Block, Module
from ampcompare.source.syntax import DefinitionNode, FunctionNode, is_literal

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import ApexCore

MAX_LENGTH = 100  # of a line; longer calls get a line for each argument
NO_GROWTH = "growth_interval=2**31 - 1"
NO_TWIN = (
    "{level} has no equivalent in torch.amp: autocast keeps fp32 weights and casts for each product, so weights take "
    "4 bytes instead of 2 and 4, and softmax, norms and losses inside the model run in fp32; to keep {level}, write "
    "import ampcompare.apex as apex; bf16 parameters with fp32 masters are the third way"
)
ONE_FOR_ALL = (
    "Apex has a loss scale for each loss_id; all losses share one here, so an overflow of "
    "one lowers it for all"
)
CONSTANT = "{0} is {1} wherever this file sets it, so the result is that of {1} and does not read it"
AGAIN = "Apex begins again at its first loss scale here; the scaler keeps the one it has"
AT_TIMES = "amp.initialize runs here in some rounds or calls only, or again; make one loss scaler by hand"


def rewrite_initialize_calls(core: ApexCore) -> None:
    """Rewrite every `amp.initialize`."""
    initializes = core.sites.initializes
    single = len(initializes) == 1 and any(each.block for each in core.sites.backwards)
    made = [(each, _scaler_settings(core.module, each, single=single)) for each in initializes]
    for each in initializes:
        _refuse_call_in_expression(core, each)
        if runs_under_varying_tests(core.index, each):
            raise UnsureRewrite(each.call, AT_TIMES)
    core.update = made[0][1].update if made else ""
    blocks = [each for each in core.sites.backwards if each.block]
    if made and len({"0" if each.loss_id is None else ast.unparse(each.loss_id) for each in blocks}) > 1:
        core.add_note(made[0][0].call, ONE_FOR_ALL)
    conditional = any(
        settings.enabled
        or (ifs_around_call(core.module, each) and _find_earlier_call_always_run(core, each) is None)
        for each, settings in made
    )
    core.always = bool(made) and not conditional and core.planned.home != "module"
    if core.planned.home == "module" and made and all(each.function is None for each, _ in made):
        core.always = not conditional
    for each, settings in made:
        _rewrite_initialize_call(core, each, settings)
        for message in settings.notes:
            core.add_note(each.call, message)


def _rewrite_initialize_call(core: ApexCore, initialize: InitializeCall, settings: _ScalerSettings) -> None:
    module, planned = core.module, core.planned
    function = initialize.function
    conditions = ifs_around_call(module, initialize)
    # A method may run again for another purpose: a default of its class does not take the scaler away.
    in_class = planned.home == "self" and bool(conditions) and not is_constructor(function)
    arguments = ['"cuda"', *settings.arguments]
    enabled = ["False"] if "False" in settings.enabled else settings.enabled
    if enabled:
        arguments.append(f"enabled={expression_as_bool(module, ' and '.join(enabled))}")
    construction = f"{core.torch}.amp.GradScaler"
    lines = lines_of_call(core, f"{planned.expression} = {construction}", arguments)
    in_module = planned.home == "module" and function is not None
    if in_module:
        declare_scaler_global(core, function)
    default = [f"{planned.expression} = {core.idle_scaler_expression}"]
    models = lines_putting_autocast_in_forward(core, initialize)
    if in_class:
        _declare_scaler_in_class(core, initialize)
    above = _find_earlier_call_always_run(core, initialize)
    if core.always and "optimizers" not in initialize.arguments and not core.sites.backwards:
        lines = []  # nothing uses it
    elif above is not None and core.made.get(above.call) == lines:
        lines = []
        core.add_note(initialize.call, AGAIN)
    else:
        core.made[initialize.call] = lines
    if conditions and not in_module and not in_class and above is None:
        _insert_disabled_scaler_if_missing(core, initialize, conditions[-1], default)
    replace_initialize_call(core, initialize, lines + models)


def _insert_disabled_scaler_if_missing(
    core: ApexCore, initialize: InitializeCall, condition: ast.If, default: list[str]
) -> None:
    """Put a scaler that does nothing above the first condition of a call, unless there is one."""
    module = core.module
    above = [each for each in core.defaults if each.lineno < condition.lineno]
    if condition in core.defaults or any(
        module.is_in_statements(condition, module.block_of(each)) for each in above
    ):
        return
    others = [each for each in core.sites.initializes if each.function is initialize.function]
    earlier = [each for each in others if each.call.lineno < initialize.call.lineno]
    if any(not never_run_together(module, each.call, initialize.call) for each in earlier):
        raise UnsureRewrite(initialize.call, AT_TIMES)
    core.defaults.add(condition)
    core.edits.insert_above(condition, default)


def _find_earlier_call_always_run(core: ApexCore, initialize: InitializeCall) -> InitializeCall | None:
    """Return an earlier call that always runs before another in its function, so that there is a scaler."""
    for each in core.sites.initializes:
        if each.function is initialize.function and each.statement.lineno < initialize.statement.lineno:
            if core.module.is_in_statements(initialize.statement, core.module.block_of(each.statement)):
                return each
    return None


def _refuse_call_in_expression(core: ApexCore, initialize: InitializeCall) -> None:
    """Refuse a call that a part of an expression decides on, or a `match`."""
    for outer in core.module.ancestors_up_to_function(initialize.call):
        if isinstance(outer, (ast.IfExp, ast.BoolOp, ast.match_case)):
            where = "a `match`" if isinstance(outer, ast.match_case) else "a conditional expression"
            raise UnsureRewrite(initialize.call, f"amp.initialize is called in {where}; write it as an `if`")


def _declare_scaler_in_class(core: ApexCore, initialize: InitializeCall) -> None:
    """Make a scaler that does nothing the default of a class, once."""
    holder = core.module.class_of(initialize.function)
    if holder is None or holder in core.defaults:
        return
    core.defaults.add(holder)
    first = _first_statement_below_docstring(holder.body)
    name = initialize.function.name if initialize.function is not None else ""
    core.edits.insert_above(
        first, [f"{core.planned.name} = {core.idle_scaler_expression}  # {name} sets it", ""]
    )


def _result_expression(module: Module, initialize: InitializeCall) -> str:
    """Return the expression that has the value of the call."""
    models, optimizers = initialize.arguments.get("models"), initialize.arguments.get("optimizers")
    if models is None:
        raise UnsureRewrite(initialize.call, "amp.initialize without models")
    if optimizers is None or is_literal(optimizers, None):
        return module.source(models)
    return f"{module.source(models)}, {module.source(optimizers)}"


def _targets_with_their_values(
    target: ast.expr, values: list[ast.expr]
) -> list[tuple[ast.expr, ast.expr]] | None:
    """Return each target of an assignment with the value that it gets; None if the text does not say which it is.

    A list that one name gets stays a list, as Apex returns it.
    """
    if len(values) == 1 and not isinstance(target, (ast.List, ast.Tuple)):
        return [(target, values[0])]
    if not isinstance(target, (ast.List, ast.Tuple)):
        return None
    if len(values) == 1 and isinstance(values[0], (ast.List, ast.Tuple)):
        values = values[0].elts
    if len(values) != len(target.elts) or any(
        isinstance(each, ast.Starred) for each in (*values, *target.elts)
    ):
        return None
    found = [_targets_with_their_values(one, [value]) for one, value in zip(target.elts, values, strict=True)]
    return None if None in found else [pair for each in found if each is not None for pair in each]


def replace_initialize_call(core: ApexCore, initialize: InitializeCall, lines: list[str]) -> None:
    """Put the value of `amp.initialize` in its place, and statements below or above it."""
    results = _result_expression(core.module, initialize)
    module = core.module
    edits = core.edits
    statement = initialize.statement
    if isinstance(statement, ast.Expr) and statement.value is initialize.call:
        edits.replace_statement(statement, lines)
        return
    if (
        isinstance(statement, ast.Assign)
        and statement.value is initialize.call
        and len(statement.targets) == 1
    ):
        models, optimizers = initialize.arguments["models"], initialize.arguments.get("optimizers")
        values = [models] if optimizers is None or is_literal(optimizers, None) else [models, optimizers]
        pairs = _targets_with_their_values(statement.targets[0], values)
        if pairs is not None:
            sources = [(module.source(target), module.source(value)) for target, value in pairs]
            renamed = {target: source for target, source in sources if target not in (source, "_")}
            assigned = [f"{', '.join(renamed)} = {', '.join(renamed.values())}"] * bool(renamed)
            edits.replace_statement(statement, assigned + lines)
            return
    if isinstance(statement, (ast.Assign, ast.Return, ast.AnnAssign, ast.Expr)):
        value = f"({results})" if initialize.arguments.get("optimizers") is not None else results
        edits.replace(initialize.call, value)
        if lines:
            edits.insert_above(statement, lines)
        return
    raise UnsureRewrite(
        initialize.call, "amp.initialize is inside another statement; move it to its own line"
    )


@dataclass
class _ScalerSettings:
    """How a scaler is made.

    Attributes:
        arguments: of `GradScaler` after the device, without `enabled`.
        enabled: expressions that all must hold; empty means always.
        update: the argument of `update()`, for a static scale.
        level: the literal opt level; None if it is known at run time only.
        notes: differences to know.
    """

    arguments: list[str] = field(default_factory=list)
    enabled: list[str] = field(default_factory=list)
    update: str = ""
    level: str | None = None
    notes: list[str] = field(default_factory=list)


def _scaler_settings(module: Module, initialize: InitializeCall, *, single: bool) -> _ScalerSettings:
    """Return the settings for a call."""
    given = initialize.arguments
    settings = _ScalerSettings()
    _set_opt_level_settings(module, given, settings)
    if initialize.level:
        settings.notes.append(CONSTANT.format(initialize.level, settings.level))
    enabled = given.get("enabled")
    if enabled is not None and not is_literal(enabled, True):
        settings.enabled.append(module.source(enabled))
    _set_loss_scale_settings(module, given, settings, single)
    if "min_loss_scale" in given and not is_literal(given["min_loss_scale"], None):
        settings.notes.append("GradScaler has no min_loss_scale: its scale can fall below the floor")
    limit = given.get("max_loss_scale")
    if limit is not None and not is_literal(limit, None):
        settings.notes.append("GradScaler has no max_loss_scale: its scale can grow above the ceiling")
        if not settings.arguments:
            settings.arguments.append(f"init_scale=min(2.0**16, {module.source(limit)})")
    if "cast_model_outputs" in given:
        settings.notes.append(
            "cast_model_outputs has no equivalent; cast the outputs where their type matters"
        )
    patched = given.get("patch_torch_functions")
    if is_literal(patched, False) and settings.level == "O1":
        raise UnsureRewrite(initialize.call, "O1 without casts is loss scaling alone; write that by hand")
    return settings


def _set_opt_level_settings(
    module: Module, given_arguments: dict[str, ast.expr], settings: _ScalerSettings
) -> None:
    level = given_arguments.get("opt_level")
    if level is None:
        settings.level = "O1"
    elif isinstance(level, ast.Constant):
        if level.value not in OPT_LEVELS:
            raise UnsureRewrite(
                level, f"opt_level is {level.value!r}; Apex knows O0, O1, O2 and O3, with the letter O"
            )
        settings.level = str(level.value)
        if settings.level == "O0":
            settings.enabled.append("False")
        elif settings.level in ("O2", "O3"):
            settings.notes.append(NO_TWIN.format(level=settings.level))
    else:
        text = module.source(level)
        settings.enabled.append(f'{text if _needs_no_parentheses(level) else f"({text})"} != "O0"')
        if _possible_opt_levels(level) <= {"O0", "O1"}:
            return
        settings.notes.append(
            "which opt level this is, is not known here: O0 trains in fp32 and O1 under autocast as before; "
            + NO_TWIN.format(level="O2 or O3").replace("O2 or O3 has", "O2 or O3 have")
            + "; models returned fp32 there, so that products of their outputs, outside of them, were fp32, and are "
            "fp16 now"
        )


def _possible_opt_levels(level: ast.expr) -> set[object]:
    """Return the values that an expression of constants and `if ... else` may have; `UNSEEN` stands for any other."""
    if isinstance(level, ast.IfExp):
        return _possible_opt_levels(level.body) | _possible_opt_levels(level.orelse)
    return {level.value if isinstance(level, ast.Constant) else UNSEEN}


def _set_loss_scale_settings(
    module: Module, given_arguments: dict[str, ast.expr], settings: _ScalerSettings, single: bool
) -> None:
    scale = given_arguments.get("loss_scale")
    if (
        scale is None
        or is_literal(scale, None)
        or (isinstance(scale, ast.Constant) and scale.value == "dynamic")
    ):
        return
    text = module.source(scale)
    if isinstance(scale, ast.Constant) and isinstance(scale.value, (int, float, str)):
        text = repr(float(scale.value))
        settings.arguments.append(f"init_scale={text}")
        if single:
            settings.update = f"new_scale={text}"
            settings.notes.append(
                "a static scale: GradScaler skips a step whose gradients overflow; Apex takes it"
            )
        else:  # what updates the scale in another place does not know it
            settings.arguments.append(NO_GROWTH)
            settings.notes.append("a static scale halves after an overflow, where Apex takes the step")
        return
    is_dynamic_by_test = (
        isinstance(scale, ast.IfExp)
        and isinstance(scale.body, ast.Constant)
        and scale.body.value == "dynamic"
    )
    if is_dynamic_by_test and isinstance(scale, ast.IfExp) and is_literal(scale.orelse, None):
        return  # dynamic in both cases, as is the default of a level
    if is_dynamic_by_test and isinstance(scale, ast.IfExp):
        dynamic, text = module.source(scale.test), module.source(scale.orelse)
    else:
        text = text if _needs_no_parentheses(scale) else f"({text})"
        dynamic = f'{text} in (None, "dynamic")'
    settings.arguments += [
        f"init_scale=2.0**16 if {dynamic} else float({text})",
        f"growth_interval=2000 if {dynamic} else 2**31 - 1",
    ]
    settings.notes.append(
        "a static scale given at run time halves after an overflow, where Apex takes the step"
    )


def _needs_no_parentheses(node: ast.expr) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.JoinedStr))


def lines_of_call(core: ApexCore, function: str, arguments: list[str]) -> list[str]:
    """Return the source of a call as lines: one, or one for each argument where that is too long."""
    text = f"{function}({', '.join(arguments)})"
    if len(text) <= MAX_LENGTH and "\n" not in text:
        return [text]
    return [f"{function}(", *(f"{core.module.indentation_unit}{each}," for each in arguments), ")"]


def declare_scaler_global(core: ApexCore, function: FunctionNode | None) -> None:
    """Make the scaler a global variable: a default at the top of the module, and `global` in the function."""
    assert function is not None
    module = core.module
    edits = core.edits
    name = core.planned.name
    if function not in core.declared:
        core.declared.add(function)
        edits.insert_above(_first_statement_below_docstring(function.body), [f"global {name}"])
    if len(core.declared) == 1 and not core.has_global:
        core.has_global = True
        outermost = module.outermost_statement(function)
        first_use = next(
            each for each in module.tree.body if isinstance(each, DefinitionNode) or each is outermost
        )
        edits.insert_above(
            first_use, [f"{name} = {core.idle_scaler_expression}  # {function.name} sets it", "", ""]
        )


def _first_statement_below_docstring(body: Block) -> ast.stmt:
    is_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1] if is_text and len(body) > 1 else body[0]
