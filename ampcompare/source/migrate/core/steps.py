"""Step optimizers by their scaler, which unscales gradients before they are read or clipped, once per step."""

import ast

from ampcompare.source.amp_names import CLIPS
from ampcompare.source.branches import (
    branches_around,
    conditions_around,
    conditions_of_test,
    known_conditions_at,
    never_run_together,
)
from ampcompare.source.migrate.core.context import ApexCore
from ampcompare.source.migrate.read.finding import BY_HAND, Finding, UnsureRewrite
from ampcompare.source.migrate.read.sites import BackwardPass, GradientRead, OptimizerStep
from ampcompare.source.module import Module
from ampcompare.source.object_kinds import ObjectKinds
from ampcompare.source.syntax import (
    FunctionNode,
    LoopNode,
    argument_values,
    arguments,
    dotted_name,
    last_name,
    last_part,
    names_bound_in,
)

MASTERS = "apex.amp.master_params"
PACE = (
    "gradients are clipped here, or may be read, more often than the optimizer steps, while they are scaled: the "
    "limit, or the gradients, are scaled to match; GradScaler is designed for clipping once per step"
)
MIXED = (
    "gradients are read here, and another backward pass follows before the step; GradScaler unscales once between two "
    "steps"
)
STILL_SCALED = (
    "gradients of {0} may be scaled here still, where they are read, and no step of it is "
    "below in this function"
)
TOGETHER = (
    "after an overflow Apex skips {0}; GradScaler skips each by its own gradients, so one may step alone"
)
IN_EXPRESSION = "this step is a part of another statement; write it as a statement of its own"
HALF_LEAF = (
    "{0} is fp16 in the optimizer, and GradScaler refuses fp16 gradients; keep it in fp32, autocast casts it"
)
GUARDED = (
    "gradients decide on this step, and nothing above it unscales them: the scale would never be lowered after an "
    "overflow"
)
GUARDED_PATHS = (
    "gradients decide on this step, whose branches leave in several ways; update the scale on each by hand"
)
CAUGHT = (
    "an error of these lines is caught and the loop goes on: GradScaler would take gradients that it has unscaled for "
    "scaled ones in the next step, or none at all; the adapter does not"
)
LEAVING = (ast.Continue, ast.Break, ast.Return)
GUARDED_AFTER_OVERFLOW = (
    "Apex leaves out the next step that is called after an overflow: where this `if` leaves one out itself, Apex skips "
    "the first step with finite gradients behind it too; GradScaler takes that step"
)
APART = (
    "amp.initialize does not get {0}, so its gradients stay scaled, in a clip of all parameters too, as with Apex; if "
    "its parameters get gradients of the scaled loss, call scaler.unscale_({0}) and scaler.step({0})"
)


UNSCALED_WITH_APEX = (
    "{0}, which amp.initialize does not get, may step with a loss that Apex does not scale, and that is scaled in the "
    "result; the adapter scales what Apex scales"
)
SCALED_TOO = (
    "Apex does not scale this loss, so that its step neither moves the scale nor is left out after an overflow; here "
    "both happen"
)
SCALED_WITH_OTHER = (
    "Apex does not scale this loss, which runs next to one that it scales: its small gradients may become 0 there, and "
    "its overflow skips no step; here it is scaled as the other one"
)


def insert_unscale_and_replace_masters(core: ApexCore) -> None:
    """Put `scaler.unscale_(optimizer)` above the reads of gradients, and replace `amp.master_params`."""
    groups: dict[tuple[str, int], tuple[OptimizerStep, list[GradientRead]]] = {}
    blocks = {each.statement for each in core.sites.backwards if each.block}
    for read in core.sites.reads:
        if id(read.node) in core.order.unscaled_before or any(
            outer in blocks for outer in core.module.ancestors(read.statement)
        ):
            continue
        optimizers = read.optimizers or core.order.pending.get(id(read.node), ())
        for optimizer in optimizers:
            step = _find_step_after(core, read, optimizer)
            if step is not None:
                groups.setdefault((optimizer, id(step)), (step, []))[1].append(read)
            elif id(read.node) in core.order.pending:
                raise UnsureRewrite(read.node, STILL_SCALED.format(optimizer))
            elif read.optimizers:
                raise UnsureRewrite(
                    read.node, f"no {optimizer}.step() follows these gradients in the same function"
                )
    for (optimizer, _), (step, reads) in groups.items():
        _insert_unscale_of_step(core, optimizer, step, reads)
    for call in core.sites.masters:
        core.edits.replace(call, _replacement_of_master_params(core, call))


def _find_step_after(core: ApexCore, read: GradientRead, optimizer: str) -> OptimizerStep | None:
    steps = (each for each in core.sites.steps if last_part(each.optimizer) == last_part(optimizer))
    after = [
        each
        for each in steps
        if each.function is read.function and each.statement.lineno > read.statement.lineno
    ]
    return min(after, key=lambda each: each.statement.lineno, default=None)


def _find_loop_or_function_around(module: Module, node: ast.AST) -> ast.AST | None:
    return next(
        (outer for outer in module.ancestors(node) if isinstance(outer, LoopNode | FunctionNode)), None
    )


def _may_test_vary(test: str, loop: ast.AST | None) -> bool:
    """Return whether a test can change between two rounds of a loop, or two calls of a function."""
    if not isinstance(loop, LoopNode):
        return True
    nodes = list(ast.walk(ast.parse(test, mode="eval")))
    return any(isinstance(node, ast.Mod) for node in nodes) or not names_bound_in(loop).isdisjoint(
        map(dotted_name, nodes)
    )


def _insert_unscale_of_step(
    core: ApexCore, optimizer: str, step: OptimizerStep, reads: list[GradientRead]
) -> None:
    module = core.module
    loop = _find_loop_or_function_around(module, step.statement)
    only_if: set[str] = set()
    guards = _gradient_guards_around(core, step)
    guarded = {ast.unparse(each.test) for each in guards} | {
        f"not ({ast.unparse(each.test)})" for each in guards
    }
    for read in reads:
        missing = set(
            conditions_around(module, step.statement, loop) - conditions_around(module, read.statement, loop)
        )
        missing -= guarded
        if _find_loop_or_function_around(module, read.statement) is not loop or any(
            _may_test_vary(test, loop) for test in missing
        ):
            for each in reads:
                _rewrite_read_of_scaled_gradients(core, optimizer, step, each)
            return
        only_if |= missing
    _refuse_adding_scaled_to_unscaled(core, optimizer, step, reads)
    statements = {_statement_to_unscale_above(core, read) for read in reads}
    scaler = core.scaler_expression
    lines = [f"{scaler}.unscale_({optimizer})"]
    # one of several may be None, or not step
    if only_if and len({each.optimizer for each in core.sites.steps}) > 1:
        lines = [f"if {' and '.join(sorted(only_if))}:", f"{module.indentation_unit}{lines[0]}"]
    ordered = sorted(statements, key=lambda each: each.lineno)
    _insert_unscale(core, lines, ordered)
    if not only_if:
        core.unscaled.add(id(step.call))
    for node in ast.walk(loop) if loop is not None else ():
        if isinstance(node, LEAVING) and ordered[0].lineno < node.lineno < step.statement.lineno:
            if module.function_around(node) is not step.function:
                continue
            if not isinstance(node, ast.Return) and _find_loop_or_function_around(module, node) is not loop:
                continue  # of a loop within, behind which the step comes
            if not conditions_around(module, step.statement, loop) - conditions_around(module, node, loop):
                core.edits.insert_above(
                    node, [f"{scaler}.update()"]
                )  # this step is skipped, its gradients were unscaled


def _gradient_guards_around(core: ApexCore, step: OptimizerStep) -> list[ast.If]:
    """Return the `if` statements around a step that ask for its gradients, the innermost first."""
    asked = core.order.guards.get(id(step.call), set())
    loop = _find_loop_or_function_around(core.module, step.statement)
    return [
        outer
        for outer, holds in branches_around(core.module, step.statement, loop)
        if asked & conditions_of_test(outer.test, holds).keys()
    ]


def _refuse_adding_scaled_to_unscaled(
    core: ApexCore, optimizer: str, step: OptimizerStep, reads: list[GradientRead]
) -> None:
    """Refuse to unscale where another backward pass would add scaled gradients to unscaled ones before the step."""
    first = min(read.statement.lineno for read in reads)
    for backward in core.sites.backwards:
        if backward.function is step.function and first < backward.statement.lineno < step.statement.lineno:
            if optimizer in backward.optimizers and not never_run_together(
                core.module, backward.statement, step.statement
            ):
                raise UnsureRewrite(reads[0].node, MIXED)


def _rewrite_read_of_scaled_gradients(
    core: ApexCore, optimizer: str, step: OptimizerStep, read: GradientRead
) -> None:
    """Let gradients that stay scaled until the step be read, or clipped, at another pace than that of the steps.

    A clip of torch gets a limit that is scaled as they are, and its norm is scaled back; around anything else the
    gradients are unscaled and scaled again.
    """
    scaler = core.scaler_expression
    core.add_note(read.node, PACE)
    call = getattr(read.statement, "value", None)
    limit = _limit_of_clip(core, call) if isinstance(call, ast.Call) else None
    if isinstance(call, ast.Call) and limit is not None:
        text = core.module.source(limit)
        plain = isinstance(limit, (ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Call))
        core.edits.replace(limit, f"{text if plain else f'({text})'} * {scaler}.get_scale()")
        if not isinstance(read.statement, ast.Expr):
            _, end = core.module.span(call)
            core.edits.replace_span(end, end, f" / {scaler}.get_scale()")
        return
    if any(isinstance(node, (ast.Return, ast.Yield, ast.Continue)) for node in ast.walk(read.statement)):
        raise UnsureRewrite(
            read.node, "gradients that stay scaled are read on a path that leaves this statement"
        )
    if read.statement in core.bracketed:
        return
    core.bracketed.add(read.statement)
    grads = f'[p.grad for group in {optimizer}.param_groups for p in group["params"] if p.grad is not None]'
    # Where there are none, as before the first backward pass, torch refuses the empty list.
    apart, again = (
        [
            "if scaled_grads:",
            f"{core.module.indentation_unit}{core.torch}._foreach_{each}_(scaled_grads, {scaler}.get_scale())",
        ]
        for each in ("div", "mul")
    )
    core.edits.insert_above(read.statement, [f"scaled_grads = {grads}", *apart])
    stored = (each for each in ast.walk(read.statement) if isinstance(getattr(each, "ctx", None), ast.Store))
    rebinds = any(last_name(each) == "grad" for each in stored)
    others = [f"scaled_grads = {grads}"] * rebinds  # which took the place of those that were unscaled
    core.edits.insert_below(read.statement, [*others, *again])


def _limit_of_clip(core: ApexCore, call: ast.Call) -> ast.expr | None:
    """Return the limit of a clip of torch; None for any other call."""
    if core.names.full_name_of(call.func) not in CLIPS:
        return None
    given = arguments(call, ("parameters", "limit"))
    return next((given[name] for name in ("limit", "max_norm", "clip_value") if name in given), None)


def _statement_to_unscale_above(core: ApexCore, read: GradientRead) -> ast.stmt:
    """Return the statement to unscale above: the `if` whose other branch does the same with the plain parameters."""
    module, branch = core.module, core.module.parent(read.statement)
    calls = [each for each in core.sites.masters if module.is_in_statements(each, [read.statement])]
    if (
        isinstance(branch, ast.If)
        and calls
        and all(_find_parameters_of_plain_branch(core, each) is not None for each in calls)
    ):
        if len(branch.body) == len(branch.orelse) == 1 and not module.is_elif(branch):
            return branch
    return read.statement


def _insert_unscale(core: ApexCore, lines: list[str], statements: list[ast.stmt]) -> None:
    """Unscale above the first of several statements that are read before one step, in each branch if need be."""
    module = core.module
    block = _common_block(module, statements)
    holders: dict[int, list[ast.stmt]] = {}
    for statement in statements:
        index = next(i for i, each in enumerate(block) if module.is_in_statements(statement, [each]))
        holders.setdefault(index, []).append(statement)
    holder, within = block[min(holders)], holders[min(holders)]
    backwards = {each.statement for each in core.sites.backwards}
    if holder in within or not any(node in backwards for node in ast.walk(holder)):
        core.edits.insert_above(holder, lines)
        return
    if len(holders) > 1:
        raise UnsureRewrite(
            statements[-1], "gradients are read in a branch and again after it; unscale them once, by hand"
        )
    for branch in module.child_blocks(holder):
        if inner := [each for each in within if module.is_in_statements(each, branch)]:
            _insert_unscale(core, lines, inner)


def _common_block(module: Module, statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return the innermost block that all statements are in, or below."""
    block = module.block_of(statements[0])
    while not all(module.is_in_statements(each, block) for each in statements):
        block = module.block_of(module.statement_around(module.parent(block[0])))
    return block


def _find_parameters_of_plain_branch(core: ApexCore, call: ast.Call) -> str | None:
    """Return the parameters that the other branch of an `if`, for fp32, has in the place of `amp.master_params`."""
    module = core.module
    if _steps_without_apex(core, module.function_around(call)):
        return None
    statement = module.statement_around(call)
    for outer, parse_positive in branches_around(module, statement):
        here, there = (outer.body, outer.orelse) if parse_positive else (outer.orelse, outer.body)
        ours = [
            each
            for each in module.calls
            if core.names.full_name_of(each.func) == MASTERS and module.is_in_statements(each, here)
        ]
        theirs = [
            each for each, _ in module.method_calls("parameters") if module.is_in_statements(each, there)
        ]
        if not any(_differ_in_calls_only(module, call, each) for each in theirs):
            continue
        # One for each optimizer, in the same order: with one more or less nothing says which belongs to which.
        optimizers = list(dict.fromkeys(ast.unparse(each) for each in ours))
        parameters = list(dict.fromkeys(module.source(each) for each in theirs))
        if len(optimizers) != len(parameters):
            return None
        found = parameters[optimizers.index(ast.unparse(call))]
        return found if _does_optimizer_hold_only(core, call, found) else None
    return None


def _does_optimizer_hold_only(core: ApexCore, call: ast.Call, parameters: str) -> bool:
    """Return whether the optimizer of `amp.master_params` surely holds the parameters of an expression, and no other.

    It is built of the same text, in each place that gives it a value, and gets no group later; nor does the name of
    the model stand for several objects, apart from what wraps it.
    """
    module, scope = core.module, core.module.scope_of[call]
    key = dotted_name(call.args[0]) or ""
    kinds = ObjectKinds(module, core.index)
    initialized = {id(each.call) for each in core.sites.initializes}
    built = [
        each
        for each in module.values_of(key, scope) or []
        if not (isinstance(each, ast.Starred) and id(each.value) in initialized)
        and id(each) not in initialized
    ]
    given = [
        arguments(each, ("params",)).get("params")
        for each in built
        if isinstance(each, ast.Call) and kinds.is_new_object("optimizer", each, scope)
    ]
    grown = (last_part(dotted_name(each) or "") for _, each in module.method_calls("add_param_group"))
    return (
        bool(built)
        and len(given) == len(built)
        and all(each is not None and module.source(each) == parameters for each in given)
        and last_part(key) not in grown
    )


def _differ_in_calls_only(module: Module, call: ast.Call, other: ast.Call) -> bool:
    """Return whether the statements of two calls differ in these calls only."""
    texts = [
        ast.unparse(module.statement_around(each)).replace(ast.unparse(each), "PARAMETERS")
        for each in (call, other)
    ]
    return texts[0] == texts[1]


def _replacement_of_master_params(core: ApexCore, call: ast.Call) -> str:
    """Return what replaces `amp.master_params(optimizer)`."""
    if (plain := _find_parameters_of_plain_branch(core, call)) is not None:
        return plain
    return f'(param for group in {dotted_name(call.args[0])}.param_groups for param in group["params"])'


def rewrite_steps(core: ApexCore) -> None:
    """Step each optimizer with scaled gradients by its scaler."""
    for step in core.sites.steps:
        if not _is_step_scaled(core, step):
            continue
        if getattr(step.statement, "value", None) is not step.call or isinstance(step.statement, ast.Return):
            raise UnsureRewrite(step.call, IN_EXPRESSION)
        if _is_step_before_backward(core, step):
            continue
        _refuse_step_retried_after_error(core.module, step)
        scaler = core.scaler_expression
        core.edits.replace(step.call, f"{scaler}.step({', '.join([step.optimizer, *step.options])})")
        if core.order.updates.get(id(step.call), True):
            _insert_scale_update(core, step, f"{scaler}.update({core.update})")


def _refuse_step_retried_after_error(module: Module, step: OptimizerStep) -> None:
    """Refuse a step in a `try` within a loop that goes on after an error, such as one of memory."""
    around = list(module.ancestors_up_to_function(step.statement))
    for place, outer in enumerate(around):
        loops = [each for each in around[place:] if isinstance(each, LoopNode)]
        if isinstance(outer, ast.Try) and loops and module.is_in_statements(step.statement, outer.body):
            if any(
                not isinstance(each.body[-1], (ast.Raise, ast.Break, ast.Return)) for each in outer.handlers
            ):
                raise UnsureRewrite(step.call, CAUGHT)


def _insert_scale_update(core: ApexCore, step: OptimizerStep, line: str) -> None:
    """Update the scale behind a step, and where its gradients leave it out."""
    last = _statement_to_update_after(core, step)
    guards = _gradient_guards_around(core, step)
    if guards:
        core.add_note(step.call, GUARDED_AFTER_OVERFLOW)
    if not isinstance(last, ast.If) or last not in guards or not _leaves_loop_round_or_function(last):
        core.edits.insert_below(last, [line])
        return
    here, other = (
        (last.body, last.orelse)
        if core.module.is_in_statements(step.call, last.body)
        else (last.orelse, last.body)
    )
    if len(guards) > 1 or step.statement not in here:
        raise UnsureRewrite(step.call, GUARDED_PATHS)
    core.edits.insert_below(step.statement, [line])
    if other:
        core.edits.insert_above(other[0], [line])
    elif isinstance(here[-1], LEAVING):
        core.edits.insert_below(last, [line])
    else:
        raise UnsureRewrite(step.call, GUARDED_PATHS)


def _leaves_loop_round_or_function(statement: ast.If) -> bool:
    """Return whether a branch leaves its round or function."""
    return any(isinstance(node, LEAVING) for node in ast.walk(statement))


def _steps_without_apex(
    core: ApexCore, function: FunctionNode | None, *, below_unscaled_passes: bool = False
) -> list[tuple[ast.Call, str]]:
    """Return the steps, below a backward pass of a function, of optimizers that Apex has nothing to do with.

    Args:
        below_unscaled_passes: ask for passes that Apex does not scale, and whose scaler may be on; by default for
            those that it does.
    """
    module, sites = core.module, core.sites
    known = {last_part(each.optimizer) for each in sites.steps}
    passes = [
        each.statement
        for each in sites.backwards
        if each.function is function
        and (
            not below_unscaled_passes
            if each.block
            else below_unscaled_passes and not _is_scaler_off_at(core, each)
        )
    ]
    found, kinds = [], ObjectKinds(module, core.index)
    for node, stepped in module.method_calls("step"):
        key = dotted_name(stepped)
        if (
            key is None
            or node.args
            or last_part(key) in known
            or module.function_around(node) is not function
        ):
            continue
        if kinds.kind_of_object(stepped, module.scope_of[node]) == "optimizer":
            if any(
                each.lineno < node.lineno and not never_run_together(module, each, node) for each in passes
            ):
                found.append((node, key))
    return found


def note_joint_skips(core: ApexCore) -> None:
    """Note optimizers that skip together in Apex after an overflow, because they share a loss."""
    for each in [] if core.is_all_fp32 else core.sites.backwards:
        if each.block and len(each.optimizers) > 1:
            core.add_note(each.statement, TOGETHER.format(" and ".join(each.optimizers)))
            return


def refuse_fp16_parameter_tensors(core: ApexCore) -> None:
    """Leave fp16 tensors of the script's own by hand, which an optimizer has next to, or in place of, a model's."""
    module, kinds = core.module, ObjectKinds(core.module, core.index)
    for call in module.calls:
        scope = module.scope_of[call]
        if not call.args or not kinds.is_new_object("optimizer", call, scope):
            continue
        for each in _members_of_parameters(call.args[0]):
            values = module.values_of(dotted_name(each) or "", scope) or [each]
            if any(_makes_fp16_tensor(core, value) for value in values):
                message = HALF_LEAF.format(module.source(each))
                core.findings.append(Finding.of_node(each, BY_HAND, message))


def _members_of_parameters(parameters: ast.expr) -> list[ast.expr]:
    """Return what a list of parameters holds, or a list of groups of them."""
    inside = parameters.values if isinstance(parameters, ast.Dict) else getattr(parameters, "elts", None)
    return (
        [parameters] if inside is None else [leaf for each in inside for leaf in _members_of_parameters(each)]
    )


def _makes_fp16_tensor(core: ApexCore, value: ast.expr | None) -> bool:
    """Return whether an expression makes an fp16 tensor, by its last cast."""
    while isinstance(value, ast.Call):
        name, function = last_name(value.func), value.func
        types = {core.names.full_name_of(each) for each in argument_values(value)}
        if name in ("half", "HalfTensor") or types & {"torch.half", "torch.float16"}:
            return True
        if name in ("float", "double") or types & {"torch.float", "torch.float32", "torch.bfloat16"}:
            return False
        inner = (
            function.value
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call)
            else None
        )
        value = inner or (value.args[0] if value.args else None)
    return False


def note_or_refuse_scaled_steps(core: ApexCore) -> None:
    """Note the optimizers that may step with gradients that are still scaled, and plain losses that are scaled now.

    Raises:
        UnsureRewrite: an optimizer that Apex does not know may step with a loss that Apex does not scale.
    """
    for function in dict.fromkeys(each.function for each in core.sites.backwards if each.block):
        for call, key in _steps_without_apex(core, function, below_unscaled_passes=True):
            raise UnsureRewrite(call, UNSCALED_WITH_APEX.format(key))
        for call, key in _steps_without_apex(core, function):
            core.add_note(call, APART.format(key))
        plain = [each for each in core.sites.backwards if each.function is function and not each.block]
        for each in plain:
            loop = _find_loop_or_function_around(core.module, each.statement)
            tests = conditions_around(core.module, each.statement, loop)
            if isinstance(loop, LoopNode) and any(_may_test_vary(test, loop) for test in tests):
                core.add_note(each.statement, SCALED_TOO)
            elif _runs_next_to_scaled_loss(core, each):
                core.add_note(each.statement, SCALED_WITH_OTHER)


def _runs_next_to_scaled_loss(core: ApexCore, plain: BackwardPass) -> bool:
    """Return whether one run may have a plain backward pass and a scaled one of its function."""
    return any(
        each.block
        and each.function is plain.function
        and not never_run_together(core.module, each.statement, plain.statement)
        for each in core.sites.backwards
    )


def _is_scaler_off_at(core: ApexCore, backward: BackwardPass) -> bool:
    """Return whether a backward pass only runs where the scaler does nothing, by what decides on `amp.initialize`."""
    facts = known_conditions_at(core.module, backward.statement)
    return all(
        never_run_together(core.module, each.statement, backward.statement)
        or ("enabled" in each.arguments and facts.get(ast.unparse(each.arguments["enabled"])) is False)
        for each in core.sites.initializes
    )


def _statement_to_update_after(core: ApexCore, step: OptimizerStep) -> ast.stmt:
    """Return the statement to update the scale after: the `if` around the step, where others wait for it above."""
    module = core.module
    waiting = [each for each in core.sites.steps if not core.order.updates.get(id(each.call), True)]
    others = [each.statement for each in waiting if each.optimizer != step.optimizer]
    found: ast.stmt = step.statement
    if guards := _gradient_guards_around(core, step):
        if id(step.call) not in core.unscaled:
            raise UnsureRewrite(step.call, GUARDED)
        return guards[-1]
    for outer in module.ancestors(step.statement):
        if not isinstance(outer, ast.If):
            break
        if any(each in others and each.lineno < outer.lineno for each in module.block_of(outer)):
            found = outer
    return found


def _is_step_before_backward(core: ApexCore, step: OptimizerStep) -> bool:
    """Return whether a step comes before all backward passes of its function: GradScaler refuses such a step."""
    backwards = [each.statement for each in core.sites.backwards if each.function is step.function]
    around = [each for each in core.module.ancestors(step.statement) if isinstance(each, LoopNode)]
    repeated = any(outer in core.module.ancestors(each) for outer in around for each in backwards)
    return bool(backwards) and not repeated and all(each.lineno > step.statement.lineno for each in backwards)


def _is_step_scaled(core: ApexCore, step: OptimizerStep) -> bool:
    """Return whether a step uses scaled gradients: on a way from a block, where the module has one."""
    if id(step.call) in core.order.scaled:
        return True
    if core.order.seen:
        return False
    return not any(
        core.module.function_around(call) is step.function for call, _ in core.module.method_calls("backward")
    )
