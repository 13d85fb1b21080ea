"""Which trainings are ordinary: those of a closed list of forms; of others, the first thing that differs is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ampcompare.source.amp_names import CLIPS, CORE
from ampcompare.source.branches import never_run_together
from ampcompare.source.index import ProjectFunction, UnknownFunction, functions_of_callee
from ampcompare.source.migrate.core.casts import OF_O1
from ampcompare.source.migrate.core.context import ApexCore
from ampcompare.source.migrate.core.model_casts import puts_autocast_in_forward
from ampcompare.source.migrate.core.scalers import ifs_around_call
from ampcompare.source.migrate.ordinary.flow import arithmetic_differing_under_o1, refuse_unlisted_value_flow
from ampcompare.source.migrate.ordinary.forms import OrdinaryForm
from ampcompare.source.migrate.ordinary.words import (
    MAKERS,
    makes_fp32_number,
    networks_store_into_tensors,
    refusals_of_words,
    refuse_forbidden_words,
    unlisted_torch_name,
)
from ampcompare.source.migrate.read.apex_guards import (
    ANSWERED,
    is_only_tested_for_presence,
    tests_only_apex_presence,
)
from ampcompare.source.migrate.read.finding import Finding, UnsureRewrite, without_advice
from ampcompare.source.migrate.read.wide_numbers import ScalarTensorFinder
from ampcompare.source.object_kinds import ObjectKinds
from ampcompare.source.syntax import LoopNode, dotted_name, is_literal, last_name, walk
from ampcompare.source.torch_methods import MOVING_IN_FP32, receiver_of

if TYPE_CHECKING:
    from ampcompare.source.migrate.read.sites import BackwardPass, GradientRead, InitializeCall, OptimizerStep
    from ampcompare.source.migrate.rewrite import Migration
    from ampcompare.source.module import Module

# Options of amp.initialize, with the values that change nothing, and those of the level.
OPTIONS: dict[str, tuple[object, ...]] = {
    "opt_level": ("O0", "O1"),
    "loss_scale": (None, "dynamic"),
    "verbosity": (0, 1),
    "enabled": (True,),
    "num_losses": (1,),
    "keep_batchnorm_fp32": (None,),
    "master_weights": (None,),
    "cast_model_type": (None,),
    "patch_torch_functions": (None, True),
}
# What lint finds where the original saves no state of its loss scaler either.
OWN_STATE = ": AMP226: "
# What autocast only rounds in another way than O1; where types of results differ, nothing may depend on them.
ROUNDED = frozenset({"cross_entropy"})
OTHER_TYPES = frozenset({"gelu"})
CALLED = re.compile(r"(\w+) \(line \d+\)")
# What else of Apex may be in the file; what its options lose has a note.
BESIDE_CORE = ("apex.normalization.", "apex.parallel.")
MADE_BY = ("torch.nn.", "torchvision.", "torch.optim.")
# Functions and methods that only look at numbers, between a backward pass and its step.
SHOWING = frozenset({"item", "float", "print", "size", "len"})
STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.For, ast.Expr, ast.Assert, ast.Pass)

NOTED = "a rewrite changes this, or leaves open what it does: {0}"
SHARED_LINES = "statements about Apex share a line here"
SEVERAL = "there are {0} calls of {1}, and a rewrite is proven right for one"
NOT_SEEN = {
    "amp.scale_loss": "no call of amp.scale_loss is seen, so the loss is not scaled",
    "step": "no step of an optimizer is seen",
}
NOT_PLAIN = "{0} of amp.initialize is `{1}`, and no variable of its own"
OPTION = "amp.initialize gets {0}={1}; a rewrite has one level, O1 or O0 as text, and no option of its own"
FLOW = "amp.initialize runs {0}; in an ordinary training it does always, or behind one switch"
OTHER_TEST = "the loss is scaled if `{0}`, and amp.initialize runs in other cases"
OWN_BLOCK = "`{0}` computes on what comes from the autocast block, outside of it, and O1 cast there too"
NOT_LISTED = "{0} is in a block of autocast, and not on the list of what O1 and autocast compute alike"
UNKNOWN_TENSORS = "`{0}` computes with tensors whose types and sizes nothing shows here"
USES = "{0} is more of Apex than the core and its layers"
UNSEEN = "what makes `{0}` is not seen in this function"
MADE = "what makes `{0}` is `{1}`, and only networks of this project, of torch and of torchvision are read"
MADE_OPTIMIZER = "what makes `{0}` is `{1}`, and only calls of torch's own optimizers are read"
IMPORT = "Apex is imported under a condition, or where not all of the file sees it"
STAR = "a file with a star import, as here, is not rewritten: its names are not listed in it"
ASKED = "apex.amp is used as a value here, and where it goes is not followed"
IMPORTED_BY = "{0} imports this file, and what it does with it is not read"


def find_what_is_not_ordinary(core: ApexCore, migration: Migration, text: str) -> Finding | None:
    """Return the first reason why a training that is rewritten is not ordinary, with its place; None if it is.

    Args:
        migration: of the file, with the notes on it.
        text: of the file.
    """
    if (unproven := next(what_is_not_proven(core, text), None)) is not None:
        return unproven
    try:
        _refuse_note_beyond_rounding(core, migration)
    except UnsureRewrite as error:
        return Finding.of_node(error.node, "", str(error))
    return None


def what_is_not_proven(core: ApexCore, text: str) -> Iterator[Finding]:
    """Yield what keeps a text from proving a rewrite right: each word, and the first answer to each other question.

    Args:
        core: of the file.
        text: of the file.
    """
    if core.module.text != text:
        yield Finding.of_node(core.sites.initializes[0].call, "", SHARED_LINES)
        return
    held: set[Callable[[ApexCore], None]] = set()
    for refuse, needed in QUESTIONS:
        if needed is None or needed in held:
            try:
                refuse(core)
                held.add(refuse)
            except UnsureRewrite as error:
                refusals = refusals_of_words(core) if refuse is refuse_forbidden_words else iter([error])
                yield from (Finding.of_node(each.node, "", str(each)) for each in refusals)


def _refuse_note_beyond_rounding(core: ApexCore, migration: Migration) -> None:
    """Refuse a rewrite with a note that is no mere rounding."""
    beginning = OF_O1.partition("{0}")[0]
    allowed = ROUNDED if networks_store_into_tensors(core) else ROUNDED | OTHER_TYPES
    for each in migration.findings:
        place = ast.Pass(lineno=each.line, col_offset=each.column)
        if each.message == ANSWERED or OWN_STATE in each.message:
            continue
        if beginning not in each.message:
            raise UnsureRewrite(place, NOTED.format(without_advice(each.message)))
        names = set(CALLED.findall(each.message))
        if not names <= allowed:
            raise UnsureRewrite(
                place, NOTED.format(f"O1 and autocast compute {', '.join(sorted(names - allowed))} otherwise")
            )


def _require_plain_standalone_module(core: ApexCore) -> None:
    """Refuse imports of Apex that not all runs make, uses outside of the core, and a file that others import."""
    module = core.module
    for statement, _ in core.names.imports:
        if not _is_plain_import(module, statement):
            raise UnsureRewrite(statement, IMPORT)
    for statement, alias, _ in module.imports:
        if alias.name == "*":
            raise UnsureRewrite(statement, STAR)
    for node, meaning in core.names.uses:
        if meaning in ("apex", "apex.amp"):
            if isinstance(node.ctx, ast.Store) or is_only_tested_for_presence(module, node):
                continue  # what a failed import leaves, and the question for it
            raise UnsureRewrite(node, ASKED)
        is_core = meaning.startswith("apex.amp.") and meaning.removeprefix("apex.amp.") in CORE
        if not is_core and not meaning.startswith(BESIDE_CORE):
            raise UnsureRewrite(node, USES.format(meaning))
    for path, _ in core.around.modules_importing_transitively(core.module):
        raise UnsureRewrite(
            core.sites.initializes[0].call, IMPORTED_BY.format(core.around.relative_path_of(path))
        )


def _is_plain_import(module: Module, statement: ast.stmt) -> bool:
    """Return whether an import stands at the top of a module, or in a `try` that ends, complains or sets a flag."""
    outer = module.parent(statement)
    if not isinstance(outer, ast.Try):
        return outer is module.tree
    others = [each for handler in outer.handlers for each in handler.body] + outer.body + outer.orelse
    is_plain = all(
        isinstance(each, (ast.Raise, ast.Pass, ast.Expr, ast.Import, ast.ImportFrom))
        or (isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant))
        for each in others
    )
    return is_plain and not outer.finalbody and module.parent(outer) is module.tree


def _is_test_of_variable_or_apex(module: Module, test: ast.expr) -> bool:
    """Return whether a test asks for a variable, for whether Apex is there, or for both."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(_is_test_of_variable_or_apex(module, each) for each in test.values)
    return dotted_name(test) is not None or tests_only_apex_presence(module, test)


def _refuse_unusual_initialize(core: ApexCore) -> None:
    """Refuse all but one call, for one model and one optimizer, with a literal level, behind one test at most."""
    sites, module = core.sites, core.module
    if len(sites.initializes) != 1:
        raise UnsureRewrite(
            sites.initializes[1].call, SEVERAL.format(len(sites.initializes), "amp.initialize")
        )
    (initialize,) = sites.initializes
    for name in ("models", "optimizers"):
        given = initialize.arguments.get(name)
        if not isinstance(given, ast.Name):
            shown = "missing" if given is None else ast.unparse(given)
            raise UnsureRewrite(initialize.call, NOT_PLAIN.format(f"the argument {name}", shown))
    target = initialize.statement.targets[0] if isinstance(initialize.statement, ast.Assign) else None
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    if len(parts) != 2 or not all(isinstance(each, ast.Name) for each in parts):
        raise OrdinaryForm.INITIALIZE.refusal_of(initialize.call)
    _refuse_initialize_options(initialize)
    if initialize.function is not None and (
        module.class_of(initialize.function) is not None
        or len(list(module.functions_around(initialize.call))) > 1
    ):
        raise UnsureRewrite(initialize.call, FLOW.format("in a method, or in a function inside of another"))
    for outer in module.ancestors_up_to_function(initialize.statement):
        if isinstance(outer, LoopNode):
            raise UnsureRewrite(initialize.call, FLOW.format("in a loop"))
        if not isinstance(outer, (ast.If, ast.FunctionDef, ast.Module)):
            raise UnsureRewrite(initialize.call, FLOW.format("inside of another statement than an `if`"))
    tests = [each.test for each in ifs_around_call(module, initialize) if not _is_test_for_main(each.test)]
    if len(tests) > 1 or not all(_is_test_of_variable_or_apex(module, each) for each in tests):
        raise UnsureRewrite(initialize.call, FLOW.format(f"if {' and '.join(map(ast.unparse, tests))}"))


def _is_test_for_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and dotted_name(test.left) == "__name__"


def _refuse_initialize_options(initialize: InitializeCall) -> None:
    if any(each.arg is None for each in initialize.call.keywords) or initialize.level:
        raise UnsureRewrite(initialize.call, OPTION.format("opt_level", initialize.level or "**"))
    for name, value in initialize.arguments.items():
        if name in ("models", "optimizers"):
            continue
        values = OPTIONS.get(name, ())
        if not any(is_literal(value, each) for each in values):
            raise UnsureRewrite(initialize.call, OPTION.format(name, ast.unparse(value)))


def _refuse_several_updates(core: ApexCore) -> None:
    """Refuse all but one scaled loss and one step, and any other backward pass or step."""
    module, sites = core.module, core.sites
    blocks = [each for each in sites.backwards if each.block]
    for what, found in (("amp.scale_loss", blocks), ("step", sites.steps)):
        if len(found) != 1:
            place = found[-1].statement if found else sites.initializes[0].call
            raise UnsureRewrite(place, SEVERAL.format(len(found), what) if found else NOT_SEEN[what])
    if sites.natives or core.forward.inline or core.forward.apart:
        raise OrdinaryForm.LOSS_ABOVE.refusal_of(blocks[0].statement)
    kinds = ObjectKinds(module, core.index)
    for call, owner in module.method_calls("step"):
        if (
            call is not sites.steps[0].call
            and kinds.kind_of_object(owner, module.scope_of[call]) != "scheduler"
        ):
            raise UnsureRewrite(call, SEVERAL.format("several", "step"))
    known = {each.node for each in sites.backwards}
    for call, _ in module.method_calls("backward"):
        if call not in known and blocks[0].statement not in module.ancestors(call):
            raise UnsureRewrite(call, SEVERAL.format("several", "backward"))


def _refuse_unusual_forward(core: ApexCore) -> None:
    """Refuse all but one block of autocast, right above the backward pass, of plain assignments."""
    module = core.module
    (block,) = [each for each in core.sites.backwards if each.block]
    outer = _statement_of_backward(core, block)
    above = [each for each in core.forward.regions if module.block_of(each[0]) is module.block_of(outer)]
    if puts_autocast_in_forward(core) or not above:
        raise OrdinaryForm.FORWARD_PLACE.refusal_of(block.statement)
    first, last = above[0]
    for other, _ in core.forward.regions:
        if other is not first:
            raise UnsureRewrite(other, OWN_BLOCK.format(ast.unparse(other).splitlines()[0]))
    _refuse_unlisted_in_autocast(core)
    body = module.block_of(first)
    if last not in body or outer not in body or body.index(last) >= body.index(outer):
        raise OrdinaryForm.FORWARD_PLACE.refusal_of(first)
    for statement in body[body.index(first) : body.index(last) + 1]:
        for node in walk(statement):
            is_open = isinstance(node, (ast.Lambda, ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr))
            if is_open or (isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS)):
                raise OrdinaryForm.FORWARD_STATEMENTS.refusal_of(node)
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                raise OrdinaryForm.FORWARD_TARGETS.refusal_of(node)


def _refuse_unlisted_in_autocast(core: ApexCore) -> None:
    """Refuse what is not on the list of torch in a block of autocast."""
    module = core.module
    blocks = [each for each in core.wrapped if isinstance(each, ast.With)]
    statements = [inner for each in blocks for inner in each.body]
    for first, last in core.forward.regions:
        body = module.block_of(first)
        statements += body[body.index(first) : body.index(last) + 1]
    nodes = [node for each in statements for node in walk(each)]
    for node in nodes:
        if (full := unlisted_torch_name(module, node)) and full not in MAKERS:
            raise UnsureRewrite(node, NOT_LISTED.format(full))
        if makes_fp32_number(module, node) and isinstance(module.parent(module.parent(node)), ast.BinOp):
            raise UnsureRewrite(node, NOT_LISTED.format(f"a number that {last_name(node)} makes"))
    for mixed, message in arithmetic_differing_under_o1(module, core.index, nodes):
        raise UnsureRewrite(mixed, message)
    for unknown in ScalarTensorFinder(module, core.index).arithmetic_without_python_number(nodes):
        raise UnsureRewrite(unknown, UNKNOWN_TENSORS.format(ast.unparse(unknown)))


def _statement_of_backward(core: ApexCore, block: BackwardPass) -> ast.stmt:
    """Return the statement of a backward pass: its block, or the `if` whose other branch has the plain one."""
    module = core.module
    outer = module.parent_statement(block.statement)
    plain = [each for each in core.sites.backwards if not each.block]
    if isinstance(outer, ast.If) and plain:
        if all(module.parent_statement(each.statement) is outer for each in plain) and len(plain) == 1:
            if never_run_together(
                module, plain[0].statement, block.statement
            ) and _is_test_of_variable_or_apex(module, outer.test):
                asked = [each.test for each in ifs_around_call(module, core.sites.initializes[0])]
                if _variables_in_tests(asked) != _variables_in_tests([outer.test]):
                    raise UnsureRewrite(block.statement, OTHER_TEST.format(ast.unparse(outer.test)))
                return outer
    if plain:
        raise UnsureRewrite(plain[0].statement, SEVERAL.format("several", "backward"))
    return block.statement


def _variables_in_tests(tests: list[ast.expr]) -> set[str]:
    """Return the variables that tests ask for, alone or with `and`."""
    parts = [part for each in tests for part in (each.values if isinstance(each, ast.BoolOp) else [each])]
    return {name for each in parts if (name := dotted_name(each)) is not None}


def _refuse_unusual_update(core: ApexCore) -> None:
    """Refuse all but a backward pass, clips, a step and zero_grad in one block."""
    module = core.module
    (block,) = [each for each in core.sites.backwards if each.block]
    (step,) = core.sites.steps
    _refuse_unusual_block(block)
    outer = _statement_of_backward(core, block)
    if any(isinstance(each, ast.Try) for each in module.ancestors_up_to_function(outer)):
        raise OrdinaryForm.NO_TRY.refusal_of(block.statement)
    body = module.block_of(outer)
    if step.function is not block.function or step.options or step.statement not in body:
        raise OrdinaryForm.STEP_PLACE.refusal_of(step.call)
    if body.index(step.statement) <= body.index(outer):
        raise OrdinaryForm.STEP_BELOW.refusal_of(step.call)
    between = body[body.index(outer) + 1 : body.index(step.statement)]
    for each in between:
        _refuse_between_backward_and_step(core, each)
    _refuse_gradient_reads(core, between)
    _refuse_unusual_clears(core, step, outer)


def _refuse_unusual_block(block: BackwardPass) -> None:
    """Refuse all but a block with one backward pass, of a variable."""
    inside = block.statement.body if isinstance(block.statement, ast.With) else []
    call = getattr(inside[0], "value", None) if len(inside) == 1 else None
    is_plain = (
        isinstance(call, ast.Call) and last_name(call.func) == "backward" and not (call.args or call.keywords)
    )
    if not is_plain or set(block.arguments) != {"loss", "optimizers"}:
        raise OrdinaryForm.BLOCK.refusal_of(block.statement)
    if any(isinstance(each, ast.Call) for each in walk(block.loss)) or len(block.optimizers) != 1:
        raise OrdinaryForm.LOSS_NAME.refusal_of(block.statement)


def _refuse_between_backward_and_step(core: ApexCore, statement: ast.stmt) -> None:
    """Refuse what stands between the backward pass and the step, but clips and numbers."""
    reads = [each for each in core.sites.reads if core.module.is_in_statements(each.node, [statement])]
    if isinstance(statement, ast.If) and reads:
        for each in (*statement.body, *statement.orelse):
            _refuse_between_backward_and_step(core, each)
        return
    if not isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign)):
        raise OrdinaryForm.ONLY_CLIPS.refusal_of(statement)
    clips = [each for each in (_find_clip_of_read(core, read) for read in reads) if each is not None]
    allowed = {id(one) for each in clips for one in walk(each)}
    for call in (each for each in walk(statement) if isinstance(each, ast.Call)):
        is_own = bool(core.index.project_functions_of(call, core.module.scope_of[call]))
        if id(call) not in allowed and (is_own or last_name(call.func) not in SHOWING):
            raise OrdinaryForm.ONLY_CLIPS.refusal_of(call)


def _find_clip_of_read(core: ApexCore, read: GradientRead) -> ast.Call | None:
    """Return the clip of torch that reads gradients; None if something else does."""
    calls = [each for each in (read.node, *core.module.ancestors(read.node)) if isinstance(each, ast.Call)]
    return next((each for each in calls if core.names.full_name_of(each.func) in CLIPS), None)


def _refuse_gradient_reads(core: ApexCore, statements_between: list[ast.stmt]) -> None:
    """Refuse reads of gradients that are no clips between the backward pass and the step."""
    for read in core.sites.reads:
        call = _find_clip_of_read(core, read)
        if call is None or not core.module.is_in_statements(call, statements_between):
            raise OrdinaryForm.CLIPS_OF_TORCH.refusal_of(read.node)


def _refuse_unusual_clears(core: ApexCore, step: OptimizerStep, outer: ast.stmt) -> None:
    """Refuse gradients that are not cleared as often as the optimizer steps, above the forward pass or below the step.

    Args:
        outer: the backward pass, or the `if` around it.
    """
    module = core.module
    body = module.block_of(step.statement)
    (stepped,) = [owner for call, owner in module.method_calls("step") if call is step.call]
    calls = [
        each
        for each, owner in module.method_calls("zero_grad")
        if module.function_around(each) is step.function and dotted_name(owner) == dotted_name(stepped)
    ]
    if not any(module.statement_around(each) in body for each in calls):
        raise OrdinaryForm.CLEARED_BY_STEP.refusal_of(step.call)
    for call in calls:
        statement = module.statement_around(call)
        place = next(
            (number for number, each in enumerate(body) if module.is_in_statements(statement, [each])), None
        )
        if place is None:  # above the loop
            continue
        is_apart = place < body.index(outer) or place > body.index(step.statement)
        if statement not in body or not is_apart:
            raise OrdinaryForm.CLEARED_APART.refusal_of(call)


def _refuse_unread_model_or_optimizer(core: ApexCore) -> None:
    """Refuse a network or an optimizer that is made by what is not read."""
    module, (initialize,) = core.module, core.sites.initializes
    scope = module.scope_of[initialize.call]
    for name in ("models", "optimizers"):
        given = initialize.arguments[name]
        values = module.values_of(dotted_name(given) or "", scope)
        made = (
            []
            if values is None
            else [each for each in values if not _is_variable_itself(each, ast.unparse(given), core)]
        )
        if not made:
            raise UnsureRewrite(initialize.call, UNSEEN.format(ast.unparse(given)))
        for each in made:
            if not _is_known_maker(core, each, is_optimizer=name == "optimizers"):
                why = MADE_OPTIMIZER if name == "optimizers" else MADE
                node = each if hasattr(each, "lineno") else given
                raise UnsureRewrite(node, why.format(ast.unparse(given), ast.unparse(each)))


def _is_variable_itself(value: ast.expr, name: str, core: ApexCore) -> bool:
    """Return whether a value is the variable itself: moved, wrapped, or from amp.initialize."""
    value = value.value if isinstance(value, ast.Starred) else value
    if isinstance(value, ast.Call):
        if core.names.full_name_of(value.func) == "apex.amp.initialize":
            return True
        if (moved := receiver_of(value, MOVING_IN_FP32)) is not None:
            return _is_variable_itself(moved, name, core)
        full = core.module.resolve(value.func) or ""
        if full.endswith((".DistributedDataParallel", "convert_syncbn_model", "convert_sync_batchnorm")):
            return bool(value.args) and _is_variable_itself(value.args[0], name, core)
    return dotted_name(value) == name


def _is_known_maker(core: ApexCore, value: ast.expr, *, is_optimizer: bool) -> bool:
    if isinstance(value, ast.Starred) or not isinstance(value, ast.Call):
        return False
    function = value.func
    if (moved := receiver_of(value, MOVING_IN_FP32)) is not None:
        return _is_known_maker(core, moved, is_optimizer=is_optimizer)
    while isinstance(function, ast.Subscript):  # models.__dict__[name]
        function = function.value
    full = core.module.resolve(function) or ""
    if is_optimizer:
        return full.startswith("torch.optim.") and ".lr_scheduler." not in full
    if full.startswith(MADE_BY):
        return True
    callee = core.index.callee(value, core.module.scope_of[value])
    choices = functions_of_callee(callee)
    known = all(isinstance(each, ProjectFunction) or each.name.startswith(MADE_BY) for each in choices)
    is_named = bool(choices) and not isinstance(callee, UnknownFunction) and known
    # A class whose base is not read has no known constructor, and is a class of the project all the same.
    return is_named or bool(core.index.classes_of_expression(value.func, core.module.scope_of[value]))


# Each raises UnsureRewrite for what it does not find proven; behind it what must hold before it can be asked.
QUESTIONS: tuple[tuple[Callable[[ApexCore], None], Callable[[ApexCore], None] | None], ...] = (
    (_require_plain_standalone_module, None),
    (_refuse_unusual_initialize, None),
    (_refuse_several_updates, None),
    (_refuse_unusual_forward, _refuse_several_updates),
    (_refuse_unusual_update, _refuse_several_updates),
    (_refuse_unread_model_or_optimizer, _refuse_unusual_initialize),
    (refuse_forbidden_words, None),
    (refuse_unlisted_value_flow, _refuse_unusual_initialize),
)
