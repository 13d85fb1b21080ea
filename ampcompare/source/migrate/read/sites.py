"""Where a module uses the core of `apex.amp`: initialize, scale_loss, steps, gradients that are read."""

import ast
import functools
from dataclasses import dataclass, field

from ampcompare.source.amp_names import CORE
from ampcompare.source.branches import never_run_together
from ampcompare.source.index import Index, ProjectFunction, functions_of_callee
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.options import UNSEEN, bind_arguments_by_name
from ampcompare.source.module import Module
from ampcompare.source.syntax import (
    FunctionNode,
    argument_values,
    dotted_name,
    elements,
    is_literal,
    last_name,
    last_part,
    names_bound_in,
    walk,
)
from ampcompare.source.torch_methods import is_gradient, receiver_of

INITIALIZE = (
    "models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32",
    "master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale",
)  # fmt: skip
WRAPPERS = ("DistributedDataParallel", "DataParallel", "DDP", "FSDP", "BalancedDataParallel")
SCALE_LOSS = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")

OF_ANOTHER = "{0} is no backward pass of a loss by its name and arguments, and what it does is not followed"
NOT_GIVEN = "{0} steps with this loss, and amp.initialize does not get it"
AROUND = (
    "{0} steps with this loss, and holds {1}, for which losses are scaled: what its step does is not followed"
)
MEMBER = (
    "{0} steps with this loss, and whether it is one of the optimizers that amp.initialize gets is not known"
)
SCALED = (
    "this loss goes through .scale(), as of a GradScaler, next to Apex; remove the branch of Apex by hand"
)
CLOSURE = "a step with a closure: GradScaler cannot skip it; call step() without arguments"
CLOSURE_MAYBE = (
    "a step that gets **{0}, where a closure may be: GradScaler cannot skip that; call step() without "
    "arguments"
)


@dataclass
class InitializeCall:
    """A call of `amp.initialize`.

    Attributes:
        arguments: by name; a level that has one value in the file is that value.
        level: the name of such a level; empty where it is written in the call.
    """

    call: ast.Call
    statement: ast.stmt
    function: FunctionNode | None
    arguments: dict[str, ast.expr]
    level: str = ""


@dataclass
class BackwardPass:
    """A backward pass: a block of `amp.scale_loss`, or a plain `loss.backward()` that feeds the same step.

    Attributes:
        statement: the `with`, or the expression statement.
        optimizers: the keys of the optimizers; empty for a plain one.
        block: whether it is a block of `scale_loss`.
    """

    statement: ast.stmt
    function: FunctionNode | None
    loss: ast.expr
    optimizers: tuple[str, ...]
    block: bool
    loss_id: ast.expr | None = None
    name: str | None = None
    arguments: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def node(self) -> ast.AST:
        """The call by which it is made: of `scale_loss`, or of `backward`."""
        if isinstance(self.statement, ast.With):
            return self.statement.items[0].context_expr
        assert isinstance(self.statement, ast.Expr)
        return self.statement.value


@dataclass
class OptimizerStep:
    """A call of `optimizer.step()`."""

    call: ast.Call
    statement: ast.stmt
    function: FunctionNode | None
    optimizer: str
    options: tuple[str, ...] = ()


@dataclass
class GradientRead:
    """A statement that reads gradients between a backward pass and a step, such as clipping."""

    node: ast.AST
    statement: ast.stmt
    function: FunctionNode | None
    optimizers: tuple[str, ...]


@dataclass
class Sites:
    """All sites of a module, in the order of the source.

    Attributes:
        natives: backward passes of a GradScaler in separate branches, which stay unchanged.
    """

    initializes: list[InitializeCall] = field(default_factory=list)
    backwards: list[BackwardPass] = field(default_factory=list)
    natives: list[ast.Call] = field(default_factory=list)
    steps: list[OptimizerStep] = field(default_factory=list)
    reads: list[GradientRead] = field(default_factory=list)
    masters: list[ast.Call] = field(default_factory=list)
    saves: list[ast.Call] = field(default_factory=list)
    loads: list[ast.Call] = field(default_factory=list)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The keys of all optimizers of a `scale_loss`, or else of an `initialize`, each once."""
        return tuple(dict.fromkeys(key for each in self.backwards for key in each.optimizers))


def collect_sites(module: Module, names: ModuleImports, index: Index) -> Sites:
    """Return the sites of a module."""
    sites = Sites()
    for node, meaning in names.uses:
        if not meaning.startswith("apex.amp."):
            continue
        call = module.parent(node)
        what = meaning.removeprefix("apex.amp.")
        if what not in CORE:
            continue
        if not isinstance(call, ast.Call) or call.func is not node:
            raise UnsureRewrite(node, f"amp.{what} is passed as a value; call it directly")
        if what == "initialize":
            bound = bind_arguments_by_name(call, INITIALIZE, module)
            kept = {name: value for name, value in bound.items() if value is not UNSEEN}
            level = _replace_name_of_opt_level(module, kept)
            sites.initializes.append(
                InitializeCall(call, module.statement_around(call), module.function_around(call), kept, level)
            )
        elif what == "scale_loss":
            sites.backwards.append(_make_pass_of_block(module, call))
        elif what == "master_params":
            sites.masters.append(call)
        else:
            (sites.saves if what == "state_dict" else sites.loads).append(call)
    known = set(sites.optimizers) | {
        key for each in sites.initializes for key in _optimizers_of_initialize(each)
    }
    _add_steps(module, sites, known)
    _add_plain_backwards(module, sites, known, names, index)
    _add_gradient_reads(module, sites, index)
    sites.backwards.sort(key=lambda each: each.statement.lineno)
    return sites


def _replace_name_of_opt_level(module: Module, given_arguments: dict[str, ast.expr]) -> str:
    """Put the only value that a file gives a name in the place of that name as the level; return the name, or ""."""
    level = given_arguments.get("opt_level")
    values = module.values_of(level.id, module.scope_of[level]) if isinstance(level, ast.Name) else None
    if (
        not isinstance(level, ast.Name)
        or values is None
        or len(values) != 1
        or not isinstance(values[0], ast.Constant)
    ):
        return ""
    given_arguments["opt_level"] = values[0]
    return level.id


def keys_of_initialized_models(module: Module, sites: Sites) -> set[str]:
    """Return the keys of the models that went through `amp.initialize`, and of their parallel wrappers."""
    found: set[str] = set()
    for each in sites.initializes:
        found |= _dotted_names_of(each.arguments.get("models"))
        if isinstance(each.statement, ast.Assign):
            target = each.statement.targets[0]
            optimizers = each.arguments.get("optimizers")
            if optimizers is None:
                found |= _dotted_names_of(target)
            elif isinstance(target, (ast.Tuple, ast.List)) and target.elts:
                found |= _dotted_names_of(target.elts[0])
    for node in module.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
            name = (dotted_name(node.value.func) or "").rpartition(".")[2]
            if name in WRAPPERS and dotted_name(node.value.args[0]) in found:
                found |= _dotted_names_of(node.targets[0])
    return found - {"_"}


def model_names(module: Module, sites: Sites) -> set[str]:
    """Return the last parts of `keys_of_initialized_models`, by which a call of a model is known in any function."""
    return {last_part(key) for key in keys_of_initialized_models(module, sites)}


def _dotted_names_of(node: ast.AST | None) -> set[str]:
    if node is None:
        return set()
    if isinstance(node, (ast.List, ast.Tuple)):
        return set().union(*(_dotted_names_of(each) for each in node.elts))
    key = dotted_name(node)
    return {key} if key is not None else set()


def _optimizers_of_initialize(initialize: InitializeCall) -> list[str]:
    value = initialize.arguments.get("optimizers")
    keys = [] if value is None else [dotted_name(each) for each in elements(value)]
    if isinstance(initialize.statement, ast.Assign):
        target = initialize.statement.targets[0]
        if isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == 2:
            keys += [dotted_name(each) for each in elements(target.elts[1])]
    return [key for key in keys if key is not None and key != "_"]


def _make_pass_of_block(module: Module, call: ast.Call) -> BackwardPass:
    bound = bind_arguments_by_name(call, SCALE_LOSS)
    statement = module.statement_around(call)
    if not isinstance(statement, ast.With) or all(item.context_expr is not call for item in statement.items):
        raise UnsureRewrite(call, "amp.scale_loss is used without a with statement of its own")
    if len(statement.items) > 1:
        raise UnsureRewrite(
            call,
            "amp.scale_loss shares a with statement with another context; give it its own with statement",
        )
    name = statement.items[0].optional_vars
    if name is not None and not isinstance(name, ast.Name):
        raise UnsureRewrite(call, "the scaled loss is bound to something that is not a plain name")
    optimizers = bound.get("optimizers")
    if "loss" not in bound or optimizers is None:
        raise UnsureRewrite(call, "amp.scale_loss needs a loss and its optimizers")
    keys = [_optimizer_key_of(module, each) for each in elements(optimizers)]
    as_name = None if name is None else name.id
    given = bound["loss"], tuple(keys), True, bound.get("loss_id"), as_name, bound
    return BackwardPass(statement, module.function_around(call), *given)


def _add_steps(module: Module, sites: Sites, scaled_optimizers: set[str]) -> None:
    tails = set(map(last_part, scaled_optimizers))
    for node, stepped in module.method_calls("step"):
        key = dotted_name(stepped)
        if key is None:
            key = module.source(stepped)
            if key not in scaled_optimizers:
                continue
        elif key not in scaled_optimizers and last_part(key) not in tails:
            continue
        elif key not in scaled_optimizers and any(each.startswith(f"{key}.") for each in scaled_optimizers):
            continue  # an object around an optimizer, as `task.optimizer` of `task.optimizer.optimizer`
        if node.args or any(each.arg in (None, "closure") for each in node.keywords):
            unseen = next((module.source(each.value) for each in node.keywords if each.arg is None), "")
            raise UnsureRewrite(node, CLOSURE_MAYBE.format(unseen) if unseen else CLOSURE)
        options = tuple(f"{each.arg}={module.source(each.value)}" for each in node.keywords)
        sites.steps.append(
            OptimizerStep(node, module.statement_around(node), module.function_around(node), key, options)
        )


def _add_plain_backwards(
    module: Module, sites: Sites, scaled_optimizers: set[str], names: ModuleImports, index: Index
) -> None:
    """Add each `loss.backward()` in a function that also has a block of `scale_loss`, for the same optimizers.

    So does one that calls such a function, or one that leads to it, and steps itself.
    """
    functions = {each.function for each in sites.backwards}
    callers = _functions_reaching(index, functions)
    functions |= {each.function for each in sites.steps if each.function in callers}
    bodies = {each.statement for each in sites.backwards}
    for node, loss in module.method_calls("backward"):
        statement = module.statement_around(node)
        if (
            module.function_around(node) not in functions
            or not isinstance(statement, ast.Expr)
            or statement.value is not node
        ):
            continue
        of_scaled = any(outer in bodies for outer in module.ancestors(statement))
        of_fp16_optimizer = last_part(dotted_name(loss) or "").startswith("optim")
        if of_scaled or of_fp16_optimizer or not functions.isdisjoint(_functions_of_call(index, node)):
            continue  # the last is a method with a block
        blocks = [each for each in sites.backwards if each.block]
        if _is_backward_of_other_object(node, scaled_optimizers, names):
            if not _excludes_all_blocks(module, node, blocks):
                raise UnsureRewrite(node, OF_ANOTHER.format(ast.unparse(node.func)))
        elif _is_scaled_loss(loss):
            if not _excludes_all_blocks(
                module, node, [each for each in blocks if each.function is module.function_around(node)]
            ):
                raise UnsureRewrite(node, SCALED)
            sites.natives.append(node)
        else:
            step = _find_optimizer_of_next_step(module, node)
            if step is not None and last_part(step) not in map(last_part, scaled_optimizers):
                raise UnsureRewrite(
                    node, _why_stepped_optimizer_is_not_scaled(module, sites, node, step, scaled_optimizers)
                )
            sites.backwards.append(BackwardPass(statement, module.function_around(node), loss, (), False))


def _why_stepped_optimizer_is_not_scaled(
    module: Module, sites: Sites, backward: ast.Call, step: str, scaled_optimizers: set[str]
) -> str:
    """Return why the optimizer of a step is none of those that are known to be scaled for, as far as that is sure."""
    inner = next((each for each in sorted(scaled_optimizers) if each.startswith(f"{step}.")), None)
    if inner is not None:
        return AROUND.format(step, inner)
    values = module.values_of(step, module.scope_of[backward]) or []
    is_own = bool(values) and all(isinstance(each, ast.Call) for each in values)  # and no other name of one
    return (NOT_GIVEN if is_own and sites.initializes else MEMBER).format(step)


def _excludes_all_blocks(module: Module, node: ast.AST, blocks: list[BackwardPass]) -> bool:
    """Return whether a place never runs together with any of some blocks."""
    return all(never_run_together(module, node, each.statement) for each in blocks)


def _is_scaled_loss(loss: ast.expr) -> bool:
    """Return whether a loss is one that `scale` of something returns, as of a GradScaler."""
    return receiver_of(loss, ("scale",)) is not None


def _is_backward_of_other_object(call: ast.Call, scaled_optimizers: set[str], names: ModuleImports) -> bool:
    """Return whether a call of `backward` is not that of a loss, but of a module or object that gets the loss."""
    owner = dotted_name(call.func.value) if isinstance(call.func, ast.Attribute) else None
    if owner is None:
        return False
    given = [dotted_name(each) or "" for each in call.args]
    return (
        owner.partition(".")[0] in names.modules
        or any(each in scaled_optimizers for each in given)
        or ("loss" not in owner.lower() and any("loss" in each.lower() for each in given))
    )


def _find_optimizer_of_next_step(module: Module, backward: ast.Call) -> str | None:
    """Return the optimizer of the next step below a plain backward pass in its function."""
    zeroed = {
        _optimizer_key_of(module, node.value)
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr == "zero_grad"
    }
    function = module.function_around(backward)
    below = []
    for call, stepped in module.method_calls("step"):
        name = _optimizer_key_of(module, stepped)
        is_below = call.lineno >= backward.lineno and function in (None, *module.functions_around(call))
        if is_below and name in zeroed and not never_run_together(module, call, backward):
            below.append((call.lineno, name))
    return min(below)[1] if below else None


def _optimizer_key_of(module: Module, optimizer: ast.expr) -> str:
    """Return the name of an optimizer, or else the expression for it, such as that of a member of a dict."""
    return dotted_name(optimizer) or module.source(optimizer)


def _add_gradient_reads(module: Module, sites: Sites, index: Index) -> None:
    masters = {id(call): call for call in sites.masters}
    functions = {each.function for each in sites.backwards} | {each.function for each in sites.steps}
    functions |= {
        each
        for call in module.calls
        if module.function_around(call) in functions
        for each in _functions_of_call(index, call)
    }
    updates = _nodes_leading_to_updates(module, sites, index)
    for node in module.nodes:
        if isinstance(node, ast.Call) and id(node) in masters:
            argument = dotted_name(node.args[0]) if len(node.args) == 1 else None
            if argument is None:
                raise UnsureRewrite(node, "the optimizer of amp.master_params is not a plain name")
            if _are_masters_only_copied(module, node):
                continue
            sites.reads.append(
                GradientRead(
                    node,
                    _loop_or_statement_reading(module, node, updates),
                    module.function_around(node),
                    (argument,),
                )
            )
        elif module.function_around(node) in functions and (
            is_clip_or_norm_call(node) or reads_or_changes_gradient(module, node)
        ):
            if any(isinstance(each, ast.Call) and id(each) in masters for each in walk(node)):
                continue
            sites.reads.append(
                GradientRead(
                    node, _loop_or_statement_reading(module, node, updates), module.function_around(node), ()
                )
            )


def _nodes_leading_to_updates(module: Module, sites: Sites, index: Index) -> set[ast.AST]:
    """Return the backward passes and steps of a module, and the calls that lead to one."""
    functions = {each.function for each in sites.backwards} | {each.function for each in sites.steps}
    functions = (functions | _functions_reaching(index, functions)) - {None}
    calls = {each for each in module.calls if not functions.isdisjoint(_functions_of_call(index, each))}
    return {each.statement for each in sites.backwards} | {each.call for each in sites.steps} | calls


def _functions_reaching(index: Index, functions: set[FunctionNode | None]) -> set[FunctionNode | None]:
    """Return the functions of the module that call some functions of it, or their callers."""
    module, found = index.module, set[FunctionNode | None]()
    waiting = [each for each in functions if each is not None]
    while waiting:
        calls, _ = index.possible_calls_and_completeness(module.scope_from[waiting.pop()])
        for call in calls:
            caller = module.function_around(call) if call in module.scope_of else None
            if call in module.scope_of and caller not in found:
                found.add(caller)
                waiting += [] if caller is None else [caller]
    return found


def _functions_of_call(index: Index, call: ast.Call) -> set[FunctionNode | None]:
    """Return the functions of the module that a call may name."""
    choices = functions_of_callee(index.callee(call, index.module.scope_of[call]))
    found = {
        each.scope.node
        for each in choices
        if isinstance(each, ProjectFunction) and each.module is index.module
    }
    return {each for each in found if isinstance(each, FunctionNode)}


def _are_masters_only_copied(module: Module, call: ast.Call) -> bool:
    """Return whether master weights are only saved, or go through a loop that only copies into them."""
    loop, outer = module.statement_around(call), module.parent(call)
    if (
        isinstance(outer, ast.Call)
        and dotted_name(outer.func) == "list"
        and isinstance(module.parent(outer), ast.Dict)
    ):
        save = loop.value if isinstance(loop, ast.Expr) else None
        return isinstance(save, ast.Call) and module.resolve(save.func) == "torch.save"
    if not isinstance(loop, ast.For) or call not in walk(loop.iter):
        return False
    return all(
        isinstance(each, ast.Expr)
        and receiver_of(each.value, ("copy_",)) is not None
        and not any(is_gradient(node) for node in walk(each))
        for each in loop.body
    )


def is_clip_or_norm_call(node: ast.AST) -> bool:
    """Return whether a node clips gradients or takes their norm, by its name."""
    if not isinstance(node, ast.Call):
        return False
    return last_name(node.func).startswith(("clip_grad", "get_grad_norm", "dispatch_clip_grad"))


def reads_or_changes_gradient(module: Module, node: ast.AST) -> bool:
    """Return whether a node reads or changes the gradient of a tensor that the script does not make itself."""
    if is_gradient(node):
        owner = node.value
    elif isinstance(node, ast.Call) and _is_getattr_of_grad(node):
        owner = node.args[0]
    else:
        return False
    if not isinstance(owner, (ast.Name, ast.Attribute)):
        return False
    statement = module.statement_around(node)
    if dotted_name(node) in ("torch.autograd.grad", "autograd.grad") or _is_tensor_made_in_function(
        module, owner
    ):
        return False
    if isinstance(statement, ast.Assign) and node in statement.targets:
        return not is_literal(statement.value, None)
    test = module.parent(node)  # whether there is a gradient is no matter of its scale
    return not (
        isinstance(test, ast.Compare) and any(isinstance(each, (ast.Is, ast.IsNot)) for each in test.ops)
    )


def _is_getattr_of_grad(call: ast.Call) -> bool:
    return dotted_name(call.func) == "getattr" and len(call.args) > 1 and is_literal(call.args[1], "grad")


def _is_tensor_made_in_function(module: Module, owner: ast.Name | ast.Attribute) -> bool:
    """Return whether a function makes the tensor whose gradient it reads, as attacks on inputs do.

    It is in no optimizer, so its gradient stays scaled, under Apex and under GradScaler.
    """
    key = dotted_name(owner)
    if key in _names_optimizers_may_hold(module):
        return False
    for node in walk(module.function_around(owner) or module.tree):
        if isinstance(node, ast.Assign):
            targets = [dotted_name(each) for each in node.targets]
            words = [str(getattr(each, "arg", getattr(each, "attr", ""))) for each in walk(node.value)]
            if f"{key}.requires_grad" in targets:
                return is_literal(node.value, True)
            if key in targets and any(word.startswith("requires_grad") for word in words):
                return True
        elif isinstance(node, ast.Call) and dotted_name(node.func) == f"{key}.requires_grad_":
            return True
    return False


@functools.lru_cache(maxsize=16)  # each read of a gradient asks for the same module
def _names_optimizers_may_hold(module: Module) -> frozenset[str]:
    """Return names of what may be among the parameters of an optimizer: in a list or dict, or given to a class."""
    found: set[str] = set()
    for node in module.nodes:
        held: list[ast.expr] = []
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)) and isinstance(
            getattr(node, "ctx", None), ast.Load
        ):
            held = node.elts
        elif isinstance(node, ast.Dict):
            held = node.values
        elif isinstance(node, ast.Call) and (
            last_name(node.func)[:1].isupper()
            or last_name(node.func) in ("append", "extend", "add_param_group")
        ):
            held = argument_values(node)
        found.update(name for each in held if (name := dotted_name(each)) is not None)
    return frozenset(found)


def _loop_or_statement_reading(module: Module, node: ast.AST, updates: set[ast.AST]) -> ast.stmt:
    """Return the outermost loop over what a use reads, or its statement.

    A loop counts if it binds what is read there, and has no part of an update: over parameters or their groups.

    Args:
        updates: nodes that run backward passes or steps.
    """
    statement = module.statement_around(node)
    found, names = statement, _names_of_gradients_read(statement, node)
    for outer in module.ancestors(statement):
        if isinstance(outer, ast.For):
            if not updates.isdisjoint(walk(outer)):
                break
            names |= _source_names_in_loop(outer, names)
            if not names.isdisjoint(names_bound_in(outer.target)):
                found = outer
                names |= _names_in_expression(outer.iter)
        elif not isinstance(outer, (ast.If, ast.With, ast.Try)):
            break
    return found


def _names_of_gradients_read(statement: ast.stmt, node: ast.AST) -> set[str]:
    """Return the names of what a use reads gradients of; all of the head of a loop where it stands there."""
    return _names_in_expression(statement.iter if isinstance(statement, ast.For) else node)


def _source_names_in_loop(loop: ast.For, names: set[str]) -> set[str]:
    """Return the names that those of a loop are computed from, in its body."""
    found = set(names)
    values = [each for each in walk(loop) if isinstance(each, ast.Assign)]
    while more := [each for each in values if not found.isdisjoint(map(dotted_name, each.targets))]:
        values = [each for each in values if each not in more]
        found |= set[str]().union(*(_names_in_expression(each.value) for each in more))
    return found


def _names_in_expression(node: ast.AST) -> set[str]:
    """Return the names in an expression."""
    return {each.id for each in walk(node) if isinstance(each, ast.Name)}
