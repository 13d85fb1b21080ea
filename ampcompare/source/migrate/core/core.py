"""Rewrite the core of `apex.amp` for `torch.amp`: initialize, scale_loss, steps, gradients that are read, state."""

import ast
import re
from collections.abc import Iterator

from ampcompare.source.amp_names import AUTOCASTS, SCALERS
from ampcompare.source.branches import branches_around, is_exclusive
from ampcompare.source.edits import Edits
from ampcompare.source.index import Answer, choices_of
from ampcompare.source.index import Function as Called
from ampcompare.source.migrate.core.across_files import casts_itself, is_list
from ampcompare.source.migrate.core.context import Core
from ampcompare.source.migrate.core.initialize import create_scalers
from ampcompare.source.migrate.core.internals import AMP_STATE, refuse_internals
from ampcompare.source.migrate.core.scalers import plan_scaler
from ampcompare.source.migrate.core.state_dict import is_in_reach, rewrite_state
from ampcompare.source.migrate.core.steps import (
    note_joint_steps,
    note_steps_apart,
    place_unscale,
    refuse_half_leaves,
    rewrite_steps,
)
from ampcompare.source.migrate.finding import Unsure
from ampcompare.source.migrate.read.forward import find_forward
from ampcompare.source.migrate.read.names import Names
from ampcompare.source.migrate.read.neighbors import CARRIED, Around
from ampcompare.source.migrate.read.order import BLOCK, Order, find_order
from ampcompare.source.migrate.read.sites import Backward, Initialize, Sites, Step, collect_sites, model_keys
from ampcompare.source.module import Function, Module
from ampcompare.source.syntax import argument_values, dotted_name, last_name, last_part, parameters, walk

ONE_BY_ONE = (
    "{0} is stepped under another name, such as that of a loop; each step must become scaler.step(...), with one "
    "scaler.update() below all of them, together with this block"
)
NO_STEP = "no {0}.step() is in this file; it must become scaler.step({0}) together with this block"
CLIPPED_INSIDE = (
    "gradients are still scaled inside the block of scale_loss, so this clips almost everything; move it "
    "below the block"
)
CHANGED_INSIDE = (
    "{0} reads or changes gradients inside the block of scale_loss, where they are scaled; move it below the block"
)
HANDED_ON = (
    "{0} gets the loss and the optimizer, and is no function of this file; if it scales the loss, the forward pass "
    "must run under torch.autocast here, or in the model"
)
CARRIED_HERE = (
    f"the optimizer carries the scaler here, as {CARRIED}; no file that initializes was found that imports this one, "
    "so set that attribute where it is made"
)
STATE_OF_NOBODY = (
    "no file that initializes was found that leads here, so nothing says which optimizer carries the scaler of this "
    "state, nor whether there is one"
)
MAY_BE_APEX = "{0} is called on something that may be apex.amp or not"
MISSING = (
    "the forward pass of this loss is in another file; it must run under torch.autocast (migrate does that where it "
    "finds amp.initialize)"
)
NAMED = (
    "{0} gets a model, and nothing is known of it but its name, which does not speak of gradients: they are still "
    "scaled there, so it must not read or change them"
)
NO_GRAD = ("torch.no_grad", "torch.inference_mode")
HALVES = ("torch.half", "torch.float16", "torch.cuda.HalfTensor")
HALF_GIVEN = (
    "this runs outside of autocast, on weights that are fp32 in the result, and line {0} makes fp16 tensors: put it "
    'under torch.autocast("cuda", dtype=torch.float16) and take that cast away'
)
# Methods of torch.nn.Module, and what is called so on models, none of which computes.
NO_COMPUTATION = re.compile(
    r"^_?(?:load|save|set|get|add|register|freeze|unfreeze|remove|named|init|initialize|reset|print|summary|export|apply|update|"
    r"zero_grad|parameters|modules|children|buffers|state_dict|train|eval|to|cpu|cuda|half|float|double|bfloat16|type|"
    r"requires_grad|share_memory|module|append|extend|insert|items|keys|values|copy|pop|format|join|no_sync|backward|"
    r"step|num|is|has|with|make|build|create|config|resize|tie|hook|log)(?:_|$)"
)
OUTSIDE = "Apex cast in {0} too; it is in fp32 now, unless under autocast"
METHOD = OUTSIDE + ", which covers forward alone"


def rewrite_core(module: Module, names: Names, edits: Edits, torch: str, around: Around) -> Core | None:
    """Rewrite the core of a module, all of it; return None where it has none.

    Args:
        around: what other modules have to do with it.

    Raises:
        Unsure: something cannot be rewritten surely; the edits are incomplete then and must not be used.
    """
    index = around.index(module)
    sites = collect_sites(module, names, index)
    asked = next((node for node, meaning in names.uses if meaning.startswith(AMP_STATE)), None)
    _refuse_passed_on(module, names)
    if not (sites.initializes or sites.backwards or sites.masters or sites.saves or sites.loads or asked):
        return None
    _refuse(module, names, sites)
    _refuse_native(module, names, sites)
    across = around.is_across(module)
    planned = plan_scaler(module, sites, across=across)
    order = find_order(index, sites)
    _refuse_without_step(module, sites, order)
    sites.backwards = [each for each in sites.backwards if id(each.node) not in order.plain]
    forward = find_forward(index, names, sites)
    core = Core(module, index, around, names, edits, torch, sites, planned, order, forward)
    core.across = across
    core.handed_on = list(find_handed_on(core))
    create_scalers(core)
    _name_carried(core)
    if planned.home == "optimizer" and not sites.initializes and not around.is_given(module):
        if sites.backwards:
            core.note(sites.backwards[0].statement, CARRIED_HERE)
        for state in (*sites.saves, *sites.loads):
            raise Unsure(state, STATE_OF_NOBODY)
    if not sites.initializes:  # where the model is made it casts by itself
        for each in forward.missing:
            if planned.home != "optimizer" or not around.is_given(module):
                core.note(each.statement, MISSING)  # else the model casts by itself, where it is initialized
        for call, name in core.handed_on:
            core.note(call, HANDED_ON.format(name))
    for first, last in forward.regions:
        if not core.is_without_casts(first):
            edits.wrap(first, last, core.autocast(first, optimizer_near(core, first)))
    for call in forward.apart if sites.initializes and not casts_itself(core) else ():
        core.note(call, OUTSIDE.format(f"{ast.unparse(call.func)}()"))
    _refuse_half_outside(core, _cast_evaluation(core) | _cast_own_forward(core))
    for place, node in order.named.items():
        core.note(node, NAMED.format(place))
    place_unscale(core)
    for backward in sites.backwards:
        _rewrite_backward(core, backward)
    rewrite_steps(core)
    note_steps_apart(core)
    note_joint_steps(core)
    refuse_half_leaves(core)
    rewrite_state(core)
    refuse_internals(core)
    return core


def _refuse(module: Module, names: Names, sites: Sites) -> None:
    for initialize in sites.initializes if not sites.backwards else []:
        _refuse_library(module, initialize)
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("scale_loss", "master_params"):
            if names.meaning(node) is None and isinstance(module.parent(node), ast.Call):
                raise Unsure(node, MAY_BE_APEX.format(node.attr))


def _refuse_passed_on(module: Module, names: Names) -> None:
    """Refuse a module that passes Apex on: what is called on it, and where, cannot be seen."""
    for use, name in names.uses:
        if name in ("apex", "apex.amp") and _is_passed_on(module, use):
            raise Unsure(use, f"{name} is passed as a value; what is called on it cannot be seen")


def _refuse_library(module: Module, initialize: Initialize) -> None:
    """Refuse a loss that a library scales by Apex: timm's `ApexScaler`, or the Trainer of transformers."""
    for call in module.calls:
        if last_name(call.func) == "ApexScaler" and (module.resolve(call.func) or "timm.").startswith("timm."):
            raise Unsure(call, "ApexScaler of timm scales the loss by Apex; take timm's NativeScaler, and autocast")
    holder = module.class_of(initialize.function)
    bases = {dotted_name(base) for base in holder.bases} if holder is not None else set()
    for _, alias, full in module.imports:
        if full.startswith("transformers.") and alias.name == "Trainer" and (alias.asname or alias.name) in bases:
            raise Unsure(
                initialize.call,
                "the backward pass is in transformers.Trainer, which is not migrated; let it use torch.amp, by the "
                "arguments of the Trainer, and remove this branch by hand",
            )


def _is_passed_on(module: Module, node: ast.AST) -> bool:
    """Return whether a name of a module is used as a value, other than in a test for `None`."""
    parent = module.parent(node)
    if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(parent, (ast.Compare, ast.Global)):
        return False
    return not (isinstance(parent, (ast.If, ast.BoolOp, ast.IfExp, ast.UnaryOp, ast.Assert)))


def _cast_evaluation(core: Core) -> set[ast.AST]:
    """Add autocast to `with torch.no_grad():` around calls of a model, and note the calls that stay in fp32.

    Returns:
        The statements that have autocast now.
    """
    if core.forward.missing or not core.sites.initializes or not any(each.block for each in core.sites.backwards):
        return set()  # the model itself runs under autocast, or nothing is trained here
    tails = {last_part(key) for key in model_keys(core.module, core.sites)}
    wrapped: set[ast.AST] = set()
    for node in core.module.nodes:
        if not isinstance(node, ast.With) or not _is_no_grad(core, node) or not _calls(node, tails):
            continue
        if any(outer in wrapped for outer in core.module.ancestors(node)) or not _reaches(core, node):
            continue
        if core.is_without_casts(node):
            continue
        wrapped.add(node)
        header = core.autocast(node, None).removeprefix("with ").removesuffix(":")
        _, end = core.module.span(node.items[-1].optional_vars or node.items[-1].context_expr)
        core.edits.replace_span(end, end, f", {header}")
    trained = {each.function for each in core.sites.backwards}
    for function in (
        node for node in core.module.scope_from if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ):
        if function in trained or any(each in wrapped for each in walk(function)):
            continue
        calls = _calls(function, tails)
        names = {each.attr for each in walk(function) if isinstance(each, ast.Attribute)}
        if calls and names & {"eval", "no_grad", "inference_mode"}:  # it looks like evaluation
            core.note(calls[0], "Apex cast in this forward pass too; it is in fp32 now, unless under autocast")
    return wrapped


def _cast_own_forward(core: Core) -> set[ast.AST]:
    """Put `forward` of a class that trains under autocast, where it is called by another file, before the loss.

    Returns:
        The statements that have autocast now.
    """
    if casts_itself(core) or core.planned.home != "self" or not core.sites.initializes:
        return set()
    module = core.module
    tails = {last_part(key) for key in model_keys(module, core.sites)}
    trained = {each.function for each in core.sites.backwards if each.block}
    holders = {module.class_of(each) for each in trained} - {None}
    wrapped: set[ast.AST] = set()
    for function in (each for each in module.scope_from if isinstance(each, ast.FunctionDef)):
        if function.name != "forward" or function in trained or module.class_of(function) not in holders:
            continue
        inside = [each for each in function.body if any(_computes(call, tails) for call in _calls_in(each))]
        if inside and _reaches(core, inside[0]):
            core.edits.wrap(inside[0], inside[-1], core.autocast(inside[0], None))
            first, last = (function.body.index(each) for each in (inside[0], inside[-1]))
            wrapped.update(function.body[first : last + 1])
    return wrapped


def _calls_in(node: ast.AST) -> list[ast.Call]:
    return [each for each in walk(node) if isinstance(each, ast.Call)]


def _computes(call: ast.Call, tails: set[str]) -> bool:
    """Return whether a call is one of a model, or of a method of a model that may compute."""
    name = last_name(call.func)
    if name in tails:
        return True
    if not isinstance(call.func, ast.Attribute) or NO_COMPUTATION.search(name) or not (call.args or call.keywords):
        return False
    return last_part((dotted_name(call.func.value) or "").removesuffix(".module")) in tails


def _refuse_half_outside(core: Core, wrapped: set[ast.AST]) -> None:
    """Refuse calls of a model that stay outside of autocast and may get fp16 tensors, and note those of methods.

    The weights, which were fp16 or cast at each call, are fp32 in the result.

    Args:
        wrapped: statements that were put under autocast.
    """
    module = core.module
    tails = {last_part(key) for key in model_keys(module, core.sites)}
    halves = [node for node in module.nodes if _makes_half(core, node)]
    noted: set[str] = set()
    for call in module.calls if core.sites.initializes else ():
        name = last_name(call.func)
        is_method = name not in tails and _computes(call, tails)
        if not is_method and (name not in tails or casts_itself(core)):
            continue
        statement = module.statement(call)
        if any(each in wrapped for each in (statement, *module.ancestors(call))) or any(
            first.lineno <= statement.lineno <= last.lineno for first, last in core.forward.regions
        ):
            continue
        function = module.function(call)
        for node in halves:
            if module.function(node) is function and module.statement(node).lineno < statement.lineno:
                raise Unsure(call, HALF_GIVEN.format(module.statement(node).lineno))
        if is_method and casts_itself(core) and name not in noted and not _runs_before(core, statement):
            noted.add(name)
            core.note(call, METHOD.format(f"{ast.unparse(call.func)}()"))


def _runs_before(core: Core, statement: ast.stmt) -> bool:
    """Return whether a statement runs before `amp.initialize` alone, so that Apex casts nothing in it."""
    module = core.module
    if any(isinstance(each, (ast.For, ast.AsyncFor, ast.While)) for each in module.within_function(statement)):
        return False
    function = module.function(statement)
    return any(
        each.function is function and each.statement.lineno > statement.lineno for each in core.sites.initializes
    )


def _makes_half(core: Core, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "half" and not node.args
    is_name = isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)
    return is_name and core.module.resolve(node, follow=False) in HALVES


def _is_no_grad(core: Core, node: ast.With) -> bool:
    contexts = [item.context_expr for item in node.items]
    return all(isinstance(each, ast.Call) and core.names.meaning(each.func) in NO_GRAD for each in contexts)


def _calls(node: ast.AST, tails: set[str]) -> list[ast.Call]:
    return [each for each in walk(node) if isinstance(each, ast.Call) and last_name(each.func) in tails]


def _reaches(core: Core, node: ast.AST) -> bool:
    """Return whether the scaler is in scope."""
    if core.planned.home == "optimizer":
        return False
    if core.always or core.planned.home == "module":
        return True
    function = core.module.function(node)
    if core.planned.home == "self":
        return function is not None and [each.arg for each in function.args.args[:1]] == ["self"]
    created = {each.function for each in core.sites.initializes}
    return any(each in created for each in (*core.module.functions_around(node), None))


def _name_carried(core: Core) -> None:
    """Bind the carried scaler to a variable in each function where a test of the script says whether there is one.

    Where the script trains in fp32 no `amp.initialize` ran, so the optimizer carries nothing.
    """
    if core.planned.home != "optimizer":
        return
    passes = core.sites.backwards
    tests = {each.function: _test(core.module, each, passes) for each in passes if each.block}
    common = next(iter(tests.values())) if len(set(tests.values())) == 1 else None
    nodes: dict[Function | None, list[ast.stmt]] = {}
    statements = [each.statement for each in passes] + [each.statement for each in core.sites.steps]
    for statement in (*statements, *(first for first, _ in core.forward.regions)):
        nodes.setdefault(core.module.function(statement), []).append(statement)
    for function, statements in nodes.items():
        test = tests.get(function, common)
        key = optimizer_near(core, statements[0])
        if function is None or test is None or key is None:
            continue
        first = min(statements, key=lambda each: each.lineno)
        place = next(each for each in function.body if each is first or each in core.module.ancestors(first))
        if _is_known(core.module, f"{key}, {test}", function, place):
            name = core.planned.name
            core.local[function] = name
            core.edits.before(place, [f"{name} = {key}.{CARRIED} if {test} else {core.off}"], outside=True)
        else:
            core.note(first, f"the optimizer must carry {CARRIED} here even where {test} does not hold")


def _test(module: Module, backward: Backward, others: list[Backward]) -> str | None:
    """Return the test of the nearest `if` that has the block in one branch and a plain backward pass in the other."""
    for outer, positive in branches_around(module, backward.statement):
        other = outer.orelse if positive else outer.body
        if any(not each.block and module.is_in(each.statement, other) for each in others):
            text = ast.unparse(outer.test)
            return text if positive else f"not ({text})"
    return None


def _is_known(module: Module, expression: str, function: Function, place: ast.stmt) -> bool:
    """Return whether all names of an expression have the value above a statement that they have below it."""
    names = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
    known = set(parameters(function))
    for node in module.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names:
            if module.function(node) is function:
                if node.lineno >= place.lineno:
                    return False
                known.add(node.id)
            elif module.function(node) is None:
                known.add(node.id)
    return names <= known | module.top.imports.keys()


def _refuse_native(module: Module, names: Names, sites: Sites) -> None:
    """Refuse uses of torch.amp that may meet those of Apex."""
    for step in sites.steps if sites.natives else []:
        if not sites.initializes or not _steps_apart(module, step):
            raise Unsure(step.call, "this step may follow a GradScaler or Apex; remove the branch of Apex by hand")
    trains_here = bool(sites.backwards or sites.masters or not sites.steps)
    for node in module.nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and _is_native(names, node):
            apart = _is_harmless(module, names, node) or _is_elsewhere(module, sites, node)
            if not (apart and trains_here):
                raise Unsure(node, "the file uses torch.amp as well as Apex; remove the branch of Apex by hand")


def _is_native(names: Names, node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Store) and names.meaning(node) in AUTOCASTS | SCALERS


def _is_harmless(module: Module, names: Names, node: ast.Name | ast.Attribute) -> bool:
    """Return whether a use is an annotation, or an autocast that cannot switch another one off."""
    below: ast.AST = node
    for outer in module.ancestors(node):
        if below in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
            return True
        if isinstance(outer, ast.stmt):
            break
        below = outer
    meaning = str(names.meaning(node))
    if not meaning.endswith(".autocast"):
        return False
    call = module.parent(node)
    if not (isinstance(call, ast.Call) and call.func is node):
        return isinstance(call, ast.Assign)
    before_enabled = 2 if meaning in ("torch.autocast", "torch.amp.autocast") else 0
    return len(call.args) <= before_enabled and not any(
        each.arg is None or (each.arg == "enabled" and not (isinstance(each.value, ast.Constant) and each.value.value))
        for each in call.keywords
    )


def _is_elsewhere(module: Module, sites: Sites, node: ast.AST) -> bool:
    """Return whether the outermost function around a use has nothing of Apex in it."""
    functions = list(module.functions_around(node))
    if not functions:
        return False
    statements: list[ast.AST] = [*sites.masters, *sites.saves, *sites.loads]
    statements += [each.statement for each in sites.initializes]
    statements += [each.statement for each in sites.backwards] + [each.statement for each in sites.steps]
    return not any(functions[-1] in module.ancestors(each) for each in statements)


def _steps_apart(module: Module, step: Step) -> bool:
    """Return whether another branch steps the same optimizer through a GradScaler, so that this one is not for it."""
    return any(
        call.args
        and dotted_name(call.args[0]) == step.optimizer
        and module.function(call) is step.function
        and is_exclusive(module, call, step.statement)
        for call, _ in module.methods("step")
    )


def _optimizer_of(core: Core, backward: Backward) -> str | None:
    """Return the optimizer of a plain backward pass: that of the nearest block in its function."""
    if backward.optimizers:
        return backward.optimizers[0]
    blocks = [each for each in core.sites.backwards if each.block and each.function is backward.function]
    near = min(blocks, key=lambda each: abs(each.statement.lineno - backward.statement.lineno), default=None)
    return near.optimizers[0] if near is not None and near.optimizers else optimizer_near(core, backward.statement)


def _rewrite_backward(core: Core, backward: Backward) -> None:
    """Scale the loss of a backward pass by its scaler."""
    module, edits, statement = core.module, core.edits, backward.statement
    loss = module.source(backward.loss)
    inline: list[str] = []
    if backward in core.forward.inline and not core.is_without_casts(statement):
        inline = [core.autocast(statement, _optimizer_of(core, backward)), f"{module.unit}loss = {loss}"]
        loss = "loss"
    scaler = core.scaler(statement, _optimizer_of(core, backward))
    if not backward.block:
        if inline:
            edits.before(statement, inline)
        edits.replace(backward.loss, f"{scaler}.scale({loss})")
        return
    assert isinstance(statement, ast.With)
    if "delay_overflow_check" in backward.arguments:
        core.note(statement, "delay_overflow_check has no equivalent: GradScaler checks at the step")
    _refuse_inside(core, statement)
    named = [node for node in module.nodes if isinstance(node, ast.Name) and node.id == backward.name]
    uses = [node for node in named if isinstance(node.ctx, ast.Load) and module.function(node) is backward.function]
    inside = [node for node in uses if statement in module.ancestors(node)]
    # Blocks that bind the name for themselves.
    blocks = {each.statement for each in core.sites.backwards if each.name == backward.name}
    later = [node for node in uses if blocks.isdisjoint(module.ancestors(node))]
    if len(inside) == 1 and not later and getattr(module.parent(inside[0]), "attr", "") == "backward":
        edits.replace(inside[0], f"{scaler}.scale({loss})")
        edits.unwrap(statement, statement.body, inline)
        return
    header = [*inline, f"{backward.name} = {scaler}.scale({loss})"] if backward.name else inline
    edits.unwrap(statement, statement.body, header)


def _refuse_inside(core: Core, statement: ast.With) -> None:
    for each in walk(statement):
        if isinstance(each, (ast.Yield, ast.YieldFrom)):
            raise Unsure(each, "the caller of this generator runs in the block of scale_loss, and cannot be seen")
    for read in core.sites.reads:
        if statement in core.module.ancestors(read.statement) and isinstance(read.node, ast.Call):
            name = ast.unparse(read.node.func)
            raise Unsure(read.node, CLIPPED_INSIDE if "clip" in name else CHANGED_INSIDE.format(f"{name}()"))
    for step in core.sites.steps:
        if statement in core.module.ancestors(step.statement):
            raise Unsure(step.call, "the step is inside the block of scale_loss, where gradients are still scaled")


def _refuse_without_step(module: Module, sites: Sites, order: Order) -> None:
    """Refuse a loss that is scaled for an optimizer without a step in the file, or in another one that leads there."""
    stepped = {last_part(each.optimizer) for each in sites.steps}
    for backward in sites.backwards:
        for key in backward.optimizers:
            if last_part(key) not in stepped and id(backward.node) not in order.stepped:
                given = backward.arguments.get("optimizers")
                is_several = not key.replace(".", "").isidentifier() or (given is not None and is_list(module, given))
                raise Unsure(backward.statement, (ONE_BY_ONE if is_several else NO_STEP).format(key))


def find_handed_on(core: Core) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of functions of other files that get a loss with an optimizer, and may scale it."""
    known = {last_part(key) for key in core.sites.optimizers} | {last_part(each.optimizer) for each in core.sites.steps}
    for node in core.module.calls:
        key = dotted_name(node.func)
        if key is None or core.names.meaning(node.func) is not None:
            continue
        given = {last_part(name) for each in argument_values(node) if (name := dotted_name(each)) is not None}
        if not given & known:
            continue
        callee = core.index.callee(node, core.module.scope_of[node])
        functions = [each for each in choices_of(callee) if isinstance(each, Called)]
        if any(each.module is core.module for each in functions):
            continue
        if any(core.index.reaches(each, BLOCK) is Answer.YES for each in functions) or (
            not functions and any("loss" in each.lower() for each in given)
        ):
            yield node, key


def optimizer_near(core: Core, node: ast.AST) -> str | None:
    """Return an optimizer of the function around a node, else of the module."""
    function = core.module.function(node)
    for backward in core.sites.backwards:
        if backward.optimizers and backward.function is function:
            return backward.optimizers[0]
    if function in core.order.keys:
        return core.order.keys[function]
    if core.planned.home != "optimizer":
        return core.sites.optimizers[0] if core.sites.optimizers else None
    return next((key for key in core.sites.optimizers if is_in_reach(core, node, key)), None)
