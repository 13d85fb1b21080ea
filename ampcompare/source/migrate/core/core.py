"""Rewrite the core of `apex.amp` for `torch.amp`: initialize, scale_loss, steps, gradients that are read, state."""

import ast
import re
from collections.abc import Iterator

from ampcompare.source.amp_names import AUTOCASTS, SCALERS, is_in_adapter_module
from ampcompare.source.branches import never_run_together
from ampcompare.source.edits import Edits
from ampcompare.source.index import Answer, ProjectFunction, functions_of_callee
from ampcompare.source.migrate.core.context import ApexCore
from ampcompare.source.migrate.core.early_runs import PlaceAroundInitialize
from ampcompare.source.migrate.core.initialize import rewrite_initialize_calls
from ampcompare.source.migrate.core.internals import AMP_STATE, rewrite_or_refuse_apex_internals
from ampcompare.source.migrate.core.model_casts import (
    fp16_level_of_file,
    initialize_gets_optimizer,
    puts_autocast_in_forward,
)
from ampcompare.source.migrate.core.outside import OUTSIDE, cast_or_refuse_uncovered_calls
from ampcompare.source.migrate.core.scalers import plan_scaler
from ampcompare.source.migrate.core.state_dict import rewrite_amp_state
from ampcompare.source.migrate.core.steps import (
    insert_unscale_and_replace_masters,
    note_joint_skips,
    note_or_refuse_scaled_steps,
    refuse_fp16_parameter_tensors,
    rewrite_steps,
)
from ampcompare.source.migrate.read.apex_callers import find_apex_callers
from ampcompare.source.migrate.read.apex_guards import (
    PASSED_ON,
    SWITCHED,
    apex_names_rebound_by_choice,
    is_only_tested_for_presence,
    places_replacing_apex,
    places_taking_apex_by_string,
)
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.forward import ForwardPasses, find_forward_passes
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.neighbors import Neighbors
from ampcompare.source.migrate.read.order import BLOCK, find_event_order, is_backward_pass, is_step_or_read
from ampcompare.source.migrate.read.rebinding import UNSEEN, names_bound_by_string
from ampcompare.source.migrate.read.sites import (
    BackwardPass,
    InitializeCall,
    OptimizerStep,
    Sites,
    collect_sites,
)
from ampcompare.source.module import Module
from ampcompare.source.syntax import argument_values, dotted_name, is_literal, last_name, last_part, walk

ONE_BY_ONE = (
    "{0} is stepped under another name, such as that of a loop; each step must become scaler.step(...), with one "
    "scaler.update() below all of them, together with this block"
)
NO_STEP = "no {0}.step() is seen in this file; it must become scaler.step({0}) together with this block"
CLIPPED_INSIDE = (
    "gradients are still scaled inside the block of scale_loss, so this clips almost everything; move it "
    "below the block"
)
CHANGED_INSIDE = (
    "{0} reads or changes gradients inside the block of scale_loss, where they are "
    "scaled; move it below the block"
)
HANDED_ON = "{0} gets the loss and the optimizer, and is no function of this file; what it does with them is not known"
NO_BACKWARD = (
    "no backward pass is in this file, so nothing here says what becomes of this optimizer; the adapter knows when it "
    "runs"
)
SEVERAL_FILES = (
    "a part of Apex's core is in {0} too, which may be of this training; only a run knows what a scaler and autocast "
    "must cover over several files, so they "
    "move together, with the adapter"
)
NO_INITIALIZE = (
    "amp.initialize is in no place of this file, so nothing here says which model and optimizer it got; files that "
    "train together move together, with the adapter"
)
FORWARD_UNSEEN = (
    "what computes this loss is not all in sight, so it cannot be put under autocast; the "
    "adapter casts where it runs"
)
UPDATES_ABOVE = (
    "`{0}` in line {1} of {2}, which imports this file, may belong to this training; files that train together move "
    "together, with the adapter"
)
MAY_BE_APEX = "{0} is called on what no import of this file makes apex.amp, and it may lead there"
TRAINS_ABOVE = (
    "this backward pass also runs above amp.initialize, where Apex casts and scales nothing, and no scaler is made; "
    "the adapter knows when it runs"
)
NATIVE_TOO = (
    "a GradScaler scales a loss of this file too, and which loss this step follows is not known; remove the branch of "
    "Apex by hand"
)
NAMES_UNSEEN = (
    "this binds names of the module that are not seen; what it puts in the place of Apex acts no longer"
)
TAKEN_BY_TEXT = "this is {0} by a text, so that what the script calls of it is not seen; import it instead"
REPLACED = "this puts another module in the place of Apex, whose functions the calls of this file may be"
NAMED = (
    "{0} gets a model, and nothing is known of it but its name, which does not speak of gradients: they are still "
    "scaled there; it must not read or change them"
)
PLURAL = re.compile(r"(?:optimizers|optims|opts)$", re.IGNORECASE)


def rewrite_core(
    module: Module, names: ModuleImports, edits: Edits, torch: str, around: Neighbors
) -> ApexCore | None:
    """Rewrite the core of a module, all of it; return None where it has none.

    Args:
        around: what other modules have to do with it.

    Raises:
        UnsureRewrite: something cannot be rewritten surely; the edits are incomplete then and must not be used.
    """
    index = around.index_of(module)
    sites = collect_sites(module, names, index)
    asked = next((node for node, meaning in names.uses if meaning.startswith(AMP_STATE)), None)
    _refuse_apex_passed_or_rebound(module, names)
    if not (sites.initializes or sites.backwards or sites.masters or sites.saves or sites.loads or asked):
        if names.imports:
            _refuse_calls_of_unseen_apex(module, names)
        return None
    _refuse_unsure_training(module, names, sites)
    _refuse_torch_amp(module, names, sites)
    _refuse_training_across_files(module, sites, asked, around)
    planned = plan_scaler(module, sites)
    order = find_event_order(index, sites)
    _refuse_loss_without_step(module, sites)
    sites.backwards = [each for each in sites.backwards if id(each.node) not in order.plain]
    forward = ForwardPasses() if fp16_level_of_file(sites) else find_forward_passes(index, names, sites)
    core = ApexCore(module, index, around, names, edits, torch, sites, planned, order, forward)
    for node in [each for each, text in names_bound_by_string(module) if text == UNSEEN]:
        core.add_note(node, NAMES_UNSEEN)
    for call, name in outside_calls_with_loss_and_optimizer(core):
        raise UnsureRewrite(call, HANDED_ON.format(name))
    for backward in forward.missing:
        raise UnsureRewrite(backward.statement, FORWARD_UNSEEN)
    _refuse_training_above_initialize(core)
    rewrite_initialize_calls(core)
    for call in () if puts_autocast_in_forward(core) else forward.apart:
        core.add_note(call, OUTSIDE.format(f"{ast.unparse(call.func)}()"))
    cast_or_refuse_uncovered_calls(core)
    for first, last in forward.regions:
        if not core.is_in_disable_casts_block(first):
            edits.put_under_header(first, last, core.autocast_line)
    for place, named in order.named.items():
        core.add_note(named, NAMED.format(place))
    insert_unscale_and_replace_masters(core)
    for backward in sites.backwards:
        _rewrite_backward(core, backward)
    rewrite_steps(core)
    note_or_refuse_scaled_steps(core)
    note_joint_skips(core)
    refuse_fp16_parameter_tensors(core)
    rewrite_amp_state(core)
    rewrite_or_refuse_apex_internals(core)
    return core


def _refuse_training_above_initialize(core: ApexCore) -> None:
    for backward in core.sites.backwards:
        if PlaceAroundInitialize.ABOVE in core.early_runs.places_of(backward.statement):
            raise UnsureRewrite(backward.statement, TRAINS_ABOVE)


def _refuse_unsure_training(module: Module, names: ModuleImports, sites: Sites) -> None:
    for initialize in sites.initializes if not sites.backwards else []:
        _refuse_scaling_by_library(module, initialize)
    _refuse_calls_of_unseen_apex(module, names)


def _refuse_calls_of_unseen_apex(module: Module, names: ModuleImports) -> None:
    """Refuse calls by names that Apex alone has, of what is not seen to be Apex."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("scale_loss", "master_params"):
            is_known = names.full_name_of(node) is not None or is_in_adapter_module(
                module.resolve(node) or ""
            )
            if not is_known and isinstance(module.parent(node), ast.Call):
                raise UnsureRewrite(node, MAY_BE_APEX.format(node.attr))


def _refuse_training_across_files(
    module: Module, sites: Sites, asked: ast.AST | None, around: Neighbors
) -> None:
    """Refuse a training of which another file has a part: what lies between the parts is not all in sight.

    An inference without an optimizer is whole by itself.
    """
    scales = any(each.block for each in sites.backwards)
    trains = any(initialize_gets_optimizer(each) for each in sites.initializes)
    nodes: list[ast.AST] = [
        *(each.call for each in sites.initializes),
        *(each.node for each in sites.backwards),
        *(node for node in (*sites.masters, *sites.saves, *sites.loads, asked) if node is not None),
    ]
    for other in around.paths_sharing_training(module, everywhere=trains and not scales):
        raise UnsureRewrite(nodes[0], SEVERAL_FILES.format(around.relative_path_of(other)))
    if not sites.initializes:
        raise UnsureRewrite(nodes[0], NO_INITIALIZE)
    if trains and not scales and not any(True for _ in module.method_calls("backward")):
        raise UnsureRewrite(nodes[0], NO_BACKWARD)
    for path, above in around.modules_importing_transitively(module) if scales else ():
        updates = (
            each for each in above.nodes if is_backward_pass(above, each) or is_step_or_read(above, each)
        )
        if (found := next(updates, None)) is not None:
            line = getattr(found, "lineno", 0)
            raise UnsureRewrite(
                nodes[0], UPDATES_ABOVE.format(ast.unparse(found), line, around.relative_path_of(path))
            )


def holds_several_optimizers(module: Module, optimizers: ast.expr) -> bool:
    """Return whether a name stands for several optimizers: by what it is bound to, or else by its plural."""
    key, scope = dotted_name(optimizers) or "", module.scope_of.get(optimizers, module.top)
    values = [each for each in module.values_of(key, scope) or [] if not is_literal(each, None)]
    lists = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp)
    makers = [last_name(each.func) for each in values if isinstance(each, ast.Call)]
    if any(isinstance(each, lists) for each in values) or {"list", "tuple", "dict", "sorted"} & set(makers):
        return True
    return PLURAL.search(key) is not None and not any(name[:1].isupper() for name in makers)


def _refuse_apex_passed_or_rebound(module: Module, names: ModuleImports) -> None:
    """Refuse a module that passes Apex on, or binds its name to something else by the script's own choice."""
    for use, name in names.uses:
        if name in ("apex", "apex.amp") and _is_name_passed_on(module, use):
            raise UnsureRewrite(use, PASSED_ON.format(name))
    for statement, _ in names.imports:
        if isinstance(module.parent(statement), ast.ClassDef):
            raise UnsureRewrite(statement, PASSED_ON.format("apex"))
    for name, node in apex_names_rebound_by_choice(module, names).items():
        meanings = {names.full_name_of(node), *module.top.imports.get(name, ())}
        if any(each == "apex" or (each or "").startswith("apex.amp") for each in meanings):
            raise UnsureRewrite(node, SWITCHED.format(name))
    for place in places_replacing_apex(module):
        raise UnsureRewrite(place, REPLACED)
    for taken, text in places_taking_apex_by_string(module):
        raise UnsureRewrite(taken, TAKEN_BY_TEXT.format(text))


def _refuse_scaling_by_library(module: Module, initialize: InitializeCall) -> None:
    """Refuse a loss that a library scales by Apex, such as timm's `ApexScaler`, or the Trainer of transformers."""
    for each in find_apex_callers(module):
        raise UnsureRewrite(each.node, each.message_naming_apex("Apex"))
    holder = module.class_of(initialize.function)
    bases = {dotted_name(base) for base in holder.bases} if holder is not None else set()
    for _, alias, full in module.imports:
        if (
            full.startswith("transformers.")
            and alias.name == "Trainer"
            and (alias.asname or alias.name) in bases
        ):
            raise UnsureRewrite(
                initialize.call,
                "the backward pass is in transformers.Trainer, which is not migrated; let it use torch.amp, by the "
                "arguments of the Trainer, and remove this branch by hand",
            )


def _is_name_passed_on(module: Module, node: ast.AST) -> bool:
    """Return whether a name of a module is used as a value, other than in a test for `None`."""
    return not isinstance(getattr(node, "ctx", None), ast.Store) and not is_only_tested_for_presence(
        module, node
    )


def _refuse_torch_amp(module: Module, names: ModuleImports, sites: Sites) -> None:
    """Refuse uses of torch.amp that may meet those of Apex."""
    for step in sites.steps if sites.natives else []:
        if not sites.initializes or not _is_stepped_by_scaler_elsewhere(module, step):
            raise UnsureRewrite(step.call, NATIVE_TOO)
    trains_here = bool(sites.backwards or sites.masters or not sites.steps)
    for node in module.nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and _is_use_of_torch_amp(names, node):
            apart = _is_harmless_torch_amp_use(module, names, node) or _is_in_function_without_apex(
                module, sites, node
            )
            if not (apart and trains_here):
                raise UnsureRewrite(
                    node, "the file uses torch.amp as well as Apex; remove the branch of Apex by hand"
                )


def _is_use_of_torch_amp(names: ModuleImports, node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Store) and names.full_name_of(node) in AUTOCASTS | SCALERS


def _is_harmless_torch_amp_use(module: Module, names: ModuleImports, node: ast.Name | ast.Attribute) -> bool:
    """Return whether a use is an annotation, or an autocast that cannot switch another one off."""
    below: ast.AST = node
    for outer in module.ancestors(node):
        if below in (getattr(outer, "annotation", None), getattr(outer, "returns", None)):
            return True
        if isinstance(outer, ast.stmt):
            break
        below = outer
    meaning = str(names.full_name_of(node))
    if not meaning.endswith(".autocast"):
        return False
    call = module.parent(node)
    if not (isinstance(call, ast.Call) and call.func is node):
        return isinstance(call, ast.Assign)
    before_enabled = 2 if meaning in ("torch.autocast", "torch.amp.autocast") else 0
    return len(call.args) <= before_enabled and not any(
        each.arg is None
        or (each.arg == "enabled" and not (isinstance(each.value, ast.Constant) and each.value.value))
        for each in call.keywords
    )


def _is_in_function_without_apex(module: Module, sites: Sites, node: ast.AST) -> bool:
    """Return whether the outermost function around a use has nothing of Apex in it."""
    functions = list(module.functions_around(node))
    if not functions:
        return False
    statements: list[ast.AST] = [*sites.masters, *sites.saves, *sites.loads]
    statements += [each.statement for each in sites.initializes]
    statements += [each.statement for each in sites.backwards] + [each.statement for each in sites.steps]
    return not any(functions[-1] in module.ancestors(each) for each in statements)


def _is_stepped_by_scaler_elsewhere(module: Module, step: OptimizerStep) -> bool:
    """Return whether another branch steps the same optimizer through a GradScaler, so that this one is not for it."""
    return any(
        call.args
        and dotted_name(call.args[0]) == step.optimizer
        and module.function_around(call) is step.function
        and never_run_together(module, call, step.statement)
        for call, _ in module.method_calls("step")
    )


def _rewrite_backward(core: ApexCore, backward: BackwardPass) -> None:
    """Scale the loss of a backward pass by its scaler."""
    module = core.module
    edits = core.edits
    statement = backward.statement
    loss = module.source(backward.loss)
    inline: list[str] = []
    if backward in core.forward.inline and not core.is_in_disable_casts_block(statement):
        inline = [core.autocast_line, f"{module.indentation_unit}loss = {loss}"]
        loss = "loss"
    scaler = core.scaler_expression
    if not backward.block:
        if inline:
            edits.insert_above(statement, inline)
        edits.replace(backward.loss, f"{scaler}.scale({loss})")
        return
    assert isinstance(statement, ast.With)
    if "delay_overflow_check" in backward.arguments:
        core.add_note(statement, "delay_overflow_check has no equivalent: GradScaler checks at the step")
    _refuse_misuse_in_block(core, statement)
    named = [node for node in module.nodes if isinstance(node, ast.Name) and node.id == backward.name]
    uses = [
        node
        for node in named
        if isinstance(node.ctx, ast.Load) and module.function_around(node) is backward.function
    ]
    inside = [node for node in uses if statement in module.ancestors(node)]
    # Blocks that bind the name for themselves.
    blocks = {each.statement for each in core.sites.backwards if each.name == backward.name}
    later = [node for node in uses if blocks.isdisjoint(module.ancestors(node))]
    if len(inside) == 1 and not later and getattr(module.parent(inside[0]), "attr", "") == "backward":
        edits.replace(inside[0], f"{scaler}.scale({loss})")
        edits.replace_statement_by_body(statement, statement.body, inline)
        return
    header = [*inline, f"{backward.name} = {scaler}.scale({loss})"] if backward.name else inline
    edits.replace_statement_by_body(statement, statement.body, header)


def _refuse_misuse_in_block(core: ApexCore, statement: ast.With) -> None:
    for each in walk(statement):
        if isinstance(each, (ast.Yield, ast.YieldFrom)):
            raise UnsureRewrite(
                each, "the caller of this generator runs in the block of scale_loss, and cannot be seen"
            )
    for read in core.sites.reads:
        if statement in core.module.ancestors(read.statement) and isinstance(read.node, ast.Call):
            name = ast.unparse(read.node.func)
            raise UnsureRewrite(
                read.node, CLIPPED_INSIDE if "clip" in name else CHANGED_INSIDE.format(f"{name}()")
            )
    for step in core.sites.steps:
        if statement in core.module.ancestors(step.statement):
            raise UnsureRewrite(
                step.call, "the step is inside the block of scale_loss, where gradients are still scaled"
            )


def _refuse_loss_without_step(module: Module, sites: Sites) -> None:
    """Refuse a loss that is scaled for an optimizer without a step in the file."""
    stepped = {last_part(each.optimizer) for each in sites.steps}
    for backward in sites.backwards:
        for key in backward.optimizers:
            if last_part(key) not in stepped:
                given = backward.arguments.get("optimizers")
                is_several = not key.replace(".", "").isidentifier() or (
                    given is not None and holds_several_optimizers(module, given)
                )
                raise UnsureRewrite(backward.statement, (ONE_BY_ONE if is_several else NO_STEP).format(key))


def outside_calls_with_loss_and_optimizer(core: ApexCore) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of functions of other files that get a loss with an optimizer, and may scale it."""
    known = {last_part(key) for key in core.sites.optimizers} | {
        last_part(each.optimizer) for each in core.sites.steps
    }
    for node in core.module.calls:
        key = dotted_name(node.func)
        if key is None or core.names.full_name_of(node.func) is not None:
            continue
        given = {last_part(name) for each in argument_values(node) if (name := dotted_name(each)) is not None}
        if not given & known:
            continue
        callee = core.index.callee(node, core.module.scope_of[node])
        functions = [each for each in functions_of_callee(callee) if isinstance(each, ProjectFunction)]
        if any(each.module is core.module for each in functions):
            continue
        if any(core.index.reaches_event(each, BLOCK) is Answer.YES for each in functions) or (
            not functions and any("loss" in each.lower() for each in given)
        ):
            yield node, key
