"""Rewrite the core of `apex.amp` for `torch.amp`: initialize, scale_loss, steps, gradients that are read, state."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from ampcompare.migrate.edits import Edits
from ampcompare.migrate.evaluation import cast_evaluation
from ampcompare.migrate.finding import NOTE, Finding
from ampcompare.migrate.forward import Forward, find_forward, model_keys
from ampcompare.migrate.names import Names
from ampcompare.migrate.order import Order, find_order
from ampcompare.migrate.reads import place_unscale
from ampcompare.migrate.scalers import ATTRIBUTE, Scalers, plan_scalers
from ampcompare.migrate.settings import ScalerSettings, scaler_settings
from ampcompare.migrate.sites import Backward, Initialize, Sites, Unsure, collect_sites
from ampcompare.migrate.state import rewrite_state
from ampcompare.migrate.tree import Function, Tree, key_of

__all__ = ["Core", "rewrite_core"]

MAX_LENGTH = 100  # of a line; longer calls get a line for each argument
NATIVE = ("torch.cuda.amp", "torch.amp", "torch.autocast", "torch.cpu.amp")


@dataclass
class Core:
    """A core that can be rewritten; `rewrite_core` fills it.

    Attributes:
        edits: gets the changes.
        torch: the name by which the module knows torch.
        findings: notes on what differs.
    """

    tree: Tree
    names: Names
    edits: Edits
    torch: str
    sites: Sites
    scalers: Scalers
    order: Order
    forward: Forward
    findings: list[Finding] = field(default_factory=list)
    always: bool = False
    update: str = ""
    consumed: list[Backward] = field(default_factory=list)
    replaced: list[ast.If] = field(default_factory=list)
    declared: set[Function] = field(default_factory=set)
    has_global: bool = False
    defaults: set[ast.stmt] = field(default_factory=set)

    def note(self, node: ast.AST, message: str) -> None:
        """Add a note on the line of a node."""
        self.findings.append(Finding(node.lineno, node.col_offset, NOTE, message))  # type: ignore[attr-defined]

    def scaler(self, node: ast.AST, optimizer: str | None) -> str:
        """Return the expression for a scaler.

        Raises:
            Unsure: no optimizer is in reach that carries it.
        """
        try:
            return self.scalers.reference(optimizer)
        except LookupError:
            raise Unsure(node, "the scaler is made in another file, and no optimizer that carries it is in reach") from None

    def autocast(self, node: ast.AST, optimizer: str | None) -> str:
        """Return the `with` line for a forward pass."""
        enabled = "" if self.always else f", enabled={self.scaler(node, optimizer)}.is_enabled()"
        return f'with {self.torch}.autocast("cuda", dtype={self.torch}.float16{enabled}):'


def rewrite_core(tree: Tree, names: Names, edits: Edits, torch: str) -> list[Finding]:
    """Rewrite the core of a module, all of it.

    Raises:
        Unsure: something cannot be rewritten surely; the edits are incomplete then and must not be used.
    """
    sites = collect_sites(tree, names)
    if not (sites.initializes or sites.backwards or sites.masters or sites.saves or sites.loads):
        return []
    _refuse(tree, names, sites)
    scalers = plan_scalers(tree, sites, "scaler")
    order = find_order(tree, sites, scalers.name)
    core = Core(tree, names, edits, torch, sites, scalers, order, find_forward(tree, names, sites))
    _initialize(core)
    _forward(core)
    cast_evaluation(core)
    place_unscale(core)
    for backward in sites.backwards:
        _backward(core, backward)
    _steps(core)
    rewrite_state(core)
    return core.findings


def _refuse(tree: Tree, names: Names, sites: Sites) -> None:
    for node, meaning in names.uses:
        if meaning in ("apex", "apex.amp") and _is_passed_on(tree, node):
            raise Unsure(node, f"{meaning} is passed on as a value; what is called on it cannot be seen")
    for node in tree.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("scale_loss", "master_params"):
            if names.meaning(node) is None and isinstance(tree.parent(node), ast.Call):
                raise Unsure(node, f"{node.attr} is called on something that may be apex.amp or not")
        if isinstance(node, (ast.Name, ast.Attribute)) and (meaning := names.meaning(node)) is not None:
            tail = meaning.rpartition(".")[2]
            if meaning.startswith(NATIVE) and tail in ("autocast", "GradScaler"):
                raise Unsure(node, "the file uses torch.amp as well as Apex; remove the branch of Apex by hand")
    stepped = {each.optimizer.rpartition(".")[2] for each in sites.steps}
    for backward in sites.backwards:
        for key in backward.optimizers:
            if key.rpartition(".")[2] not in stepped:
                raise Unsure(
                    backward.statement,
                    f"no {key}.step() is in this file; it must become scaler.step({key}) together with this block",
                )


def _is_passed_on(tree: Tree, node: ast.AST) -> bool:
    """Return whether a name of a module is used as a value, other than in a test for `None`."""
    parent = tree.parent(node)
    if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(parent, (ast.Compare, ast.Global)):
        return False
    return not (isinstance(parent, (ast.If, ast.BoolOp, ast.IfExp)) or isinstance(parent, ast.UnaryOp))


# initialize


def _initialize(core: Core) -> None:
    initializes = core.sites.initializes
    single = len(initializes) == 1
    made: list[tuple[Initialize, ScalerSettings]] = [
        (each, scaler_settings(core.tree, each, single=single)) for each in initializes
    ]
    core.update = made[0][1].update if made else ""
    conditional = any(_conditions(core.tree, each) or settings.enabled for each, settings in made)
    core.always = bool(made) and not conditional and core.scalers.home != "module"
    if core.scalers.home == "module" and made and all(each.function is None for each, _ in made):
        core.always = not conditional
    for each, settings in made:
        _create(core, each, settings, single)
        for message in settings.notes:
            core.note(each.call, message)


def _conditions(tree: Tree, initialize: Initialize) -> list[ast.If]:
    """Return the `if` statements around a call, the innermost first, up to its function or loop."""
    found = []
    below: ast.AST = initialize.statement
    for outer in tree.ancestors(initialize.statement):
        if isinstance(outer, ast.If):
            found.append(outer)
        elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While, ast.ClassDef)):
            break
        below = outer
    return found


def _create(core: Core, initialize: Initialize, settings: ScalerSettings, single: bool) -> None:
    tree, edits, scalers = core.tree, core.edits, core.scalers
    function = initialize.function
    inside = "self." if scalers.home == "self" else ""
    conditions = _conditions(tree, initialize)
    enabled = list(settings.enabled)
    hoisted = single and bool(conditions) and _can_hoist(tree, initialize, conditions, settings)
    if hoisted:
        enabled = [_text_of_test(tree, each.test) for each in reversed(conditions)] + enabled
    arguments = ['"cuda"', *settings.arguments]
    if "False" in enabled:
        enabled = ["False"]
    if enabled:
        arguments.append(f"enabled={_joined(enabled)}")
    lines = [line for name in scalers.names for line in _construction(core, f"{inside}{name}", arguments)]
    in_module = scalers.home == "module" and function is not None
    if in_module:
        _declare(core, function)
    default = [f'{inside}{name} = {core.torch}.amp.GradScaler("cuda", enabled=False)' for name in scalers.names]
    results = _results(tree, initialize)
    carried = _carried(core, initialize)
    if hoisted:
        edits.before(conditions[-1], lines + carried)
        _replace_call(core, initialize, results, [])
        return
    if conditions and not in_module and conditions[-1] not in core.defaults:
        core.defaults.add(conditions[-1])
        edits.before(conditions[-1], default)
    _replace_call(core, initialize, results, lines + carried)


def _construction(core: Core, name: str, arguments: list[str]) -> list[str]:
    text = f"{name} = {core.torch}.amp.GradScaler({', '.join(arguments)})"
    if len(text) <= MAX_LENGTH and "\n" not in text:
        return [text]
    unit = core.tree.unit
    return [f"{name} = {core.torch}.amp.GradScaler(", *(f"{unit}{each}," for each in arguments), ")"]


def _joined(tests: list[str]) -> str:
    return " and ".join(tests)


def _text_of_test(tree: Tree, test: ast.expr) -> str:
    text = tree.source(test)
    if "\n" in text:
        text = ast.unparse(test)
    return f"({text})" if isinstance(test, (ast.BoolOp, ast.IfExp, ast.NamedExpr, ast.Lambda)) else text


def _can_hoist(tree: Tree, initialize: Initialize, conditions: list[ast.If], settings: ScalerSettings) -> bool:
    """Return whether the tests around a call can be evaluated above the outermost one, with the same results."""
    below: ast.stmt = initialize.statement
    for condition in conditions:
        chain = [below, *(each for each in tree.ancestors(below))]
        if not any(each in chain for each in condition.body):
            return False  # in an else or elif
        for node in ast.walk(condition.test):
            if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.Lambda)):
                return False
            if isinstance(node, ast.Call) and key_of(node.func) not in ("hasattr", "getattr", "isinstance", "len"):
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


def _declare(core: Core, function: Function | None) -> None:
    """Make the scaler a global variable: a default at the top of the module, and `global` in the function."""
    assert function is not None
    tree, edits, scalers = core.tree, core.edits, core.scalers
    if function not in core.declared:
        core.declared.add(function)
        body = function.body
        first = body[1] if _is_docstring(body[0]) and len(body) > 1 else body[0]
        edits.before(first, [f"global {', '.join(scalers.names)}"])
    if len(core.declared) == 1 and not core.has_global:
        core.has_global = True
        default = [f'{name} = {core.torch}.amp.GradScaler("cuda", enabled=False)' for name in scalers.names]
        outermost: ast.AST = function
        while not isinstance(tree.parent(outermost), ast.Module):
            outermost = tree.parent(outermost)
        first_use = next(
            each for each in tree.module.body if isinstance(each, (ast.FunctionDef, ast.ClassDef)) or each is outermost
        )
        edits.before(first_use, [f"{default[0]}  # {function.name} sets it", *default[1:], "", ""])


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _carried(core: Core, initialize: Initialize) -> list[str]:
    """Return what an optimizer needs to carry the scaler to another file, and the model to run under autocast."""
    lines: list[str] = []
    tree, sites = core.tree, core.sites
    optimizers = initialize.arguments.get("optimizers")
    inside = "self." if core.scalers.home == "self" else ""
    elsewhere = not any(each.block for each in sites.backwards)
    if elsewhere and optimizers is not None and not (isinstance(optimizers, ast.Constant) and optimizers.value is None):
        elements = optimizers.elts if isinstance(optimizers, (ast.List, ast.Tuple)) else [optimizers]
        for each in elements:
            key = key_of(each)
            if key is None:
                raise Unsure(initialize.call, "the optimizer is not a plain name, and scale_loss is not in this file")
            lines.append(f"{key}.{ATTRIBUTE} = {inside}{core.scalers.names[0]}")
        if elements:
            core.note(
                initialize.call,
                f"scale_loss is called in another file: the optimizer carries the scaler there, as {ATTRIBUTE}; "
                "migrate that file too",
            )
    if elsewhere or core.forward.missing:
        lines += _wrapped_models(core, initialize)
    return lines


def _wrapped_models(core: Core, initialize: Initialize) -> list[str]:
    """Return lines that let `forward` of the models run under autocast wherever it is called."""
    tree = core.tree
    for node in tree.nodes:
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if name == "DataParallel" and isinstance(node, (ast.Name, ast.Attribute)):
            raise Unsure(
                initialize.call,
                "the forward pass is not found in this file, and its replicas under DataParallel cannot share a wrapped "
                "forward; put the forward pass under torch.autocast by hand",
            )
    models = initialize.arguments.get("models")
    elements = models.elts if isinstance(models, (ast.List, ast.Tuple)) else [models]
    lines = []
    enabled = "" if core.always else f", enabled={core.scaler(initialize.call, None)}.is_enabled()"
    for each in elements:
        key = key_of(each)
        if key is None:
            raise Unsure(initialize.call, "the model is not a plain name, and its forward pass is not in this file")
        lines.append(
            f'{key}.forward = {core.torch}.autocast("cuda", dtype={core.torch}.float16{enabled})({key}.forward)'
        )
    core.note(
        initialize.call,
        "the forward pass is called in another place: the model itself runs under autocast; a loss outside of the model "
        "is computed in the type of its output",
    )
    return lines


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


def _replace_call(core: Core, initialize: Initialize, results: str, lines: list[str]) -> None:
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
    raise Unsure(initialize.call, "amp.initialize stands inside another statement; give it a line of its own")


# forward, backward, step


def _forward(core: Core) -> None:
    missing = core.forward.missing
    if missing and not core.sites.initializes:
        for each in missing:
            core.note(
                each.statement,
                "the forward pass of this loss is in another file; it must run under torch.autocast "
                "(migrate does that where it finds amp.initialize)",
            )
    for first, last in core.forward.regions:
        core.edits.wrap(first, last, core.autocast(first, _optimizer_near(core, first)))


def _optimizer_near(core: Core, node: ast.AST) -> str | None:
    function = core.tree.function(node)
    for backward in core.sites.backwards:
        if backward.optimizers and backward.function is function:
            return backward.optimizers[0]
    return core.sites.optimizers[0] if core.sites.optimizers else None


def _optimizer_of(core: Core, backward: Backward) -> str | None:
    """Return the optimizer of a plain backward pass: that of the nearest block in its function."""
    if backward.optimizers:
        return backward.optimizers[0]
    blocks = [each for each in core.sites.backwards if each.block and each.function is backward.function]
    near = min(blocks, key=lambda each: abs(each.statement.lineno - backward.statement.lineno), default=None)
    return near.optimizers[0] if near is not None and near.optimizers else _optimizer_near(core, backward.statement)


def _backward(core: Core, backward: Backward) -> None:
    tree, edits, statement = core.tree, core.edits, backward.statement
    if backward in core.consumed:
        return
    scaler = core.scaler(statement, _optimizer_of(core, backward))
    loss = tree.source(backward.loss)
    inline: list[str] = []
    if backward in core.forward.inline:
        inline = [core.autocast(statement, _optimizer_of(core, backward)), f"{tree.unit}loss = {loss}"]
        loss = "loss"
    if not backward.block:
        if inline:
            raise Unsure(statement, "the forward pass is inside the call of backward; give the loss a name")
        edits.replace(backward.loss, f"{scaler}.scale({loss})")
        return
    assert isinstance(statement, ast.With)
    if "delay_overflow_check" in backward.arguments:
        core.note(statement, "delay_overflow_check has no twin: GradScaler checks at the step")
    _refuse_inside(core, statement)
    uses = [
        node
        for node in tree.nodes
        if isinstance(node, ast.Name) and node.id == backward.name and tree.function(node) is backward.function
        and isinstance(node.ctx, ast.Load)
    ]
    inside = [node for node in uses if statement in tree.ancestors(node)]
    others = [
        each for each in core.sites.backwards if each is not backward and each.name == backward.name
        and each.function is backward.function
    ]
    later = [
        node for node in uses
        if node not in inside and not any(each.statement in tree.ancestors(node) for each in others)
    ]
    if len(inside) == 1 and not later and _backward_receiver(tree, inside[0]):
        call = tree.parent(tree.parent(inside[0]))
        _maybe_collapse(core, backward, statement, call, scaler, loss, inline)
        return
    header = [*inline, f"{backward.name} = {scaler}.scale({loss})"] if backward.name else inline
    edits.unwrap(statement, statement.body, header)


def _backward_receiver(tree: Tree, name: ast.Name) -> bool:
    attribute = tree.parent(name)
    return isinstance(attribute, ast.Attribute) and attribute.attr == "backward"


def _maybe_collapse(
    core: Core, backward: Backward, statement: ast.With, call: ast.AST, scaler: str, loss: str, inline: list[str]
) -> None:
    """Inline the scaled loss; where the other branch of an `if` is the plain backward pass, the `if` goes."""
    tree, edits = core.tree, core.edits
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    branch = tree.parent(statement)
    alone = len(statement.body) == 1 and isinstance(statement.body[0], ast.Expr) and statement.body[0].value is call
    _, end = tree.span(call.func)
    scaled = f"{scaler}.scale({loss}).backward{tree.text[end : tree.span(call)[1]]}"
    if isinstance(branch, ast.If) and alone and len(branch.body) == 1 and len(branch.orelse) == 1:
        pair = {branch.body[0], branch.orelse[0]} - {statement}
        other = next((each for each in core.sites.backwards if each.statement in pair), None)
        if other is not None and not other.block and ast.unparse(other.loss) == ast.unparse(backward.loss):
            core.consumed.append(other)
            lines = [*inline, scaled]
            if tree.text.startswith("elif", tree.span(branch)[0]):
                lines = ["else:", *(f"{tree.unit}{each}" for each in lines)]
            edits.replace_statement(branch, lines)
            return
    edits.replace(call.func.value, f"{scaler}.scale({loss})")
    edits.unwrap(statement, statement.body, inline)


def _refuse_inside(core: Core, statement: ast.With) -> None:
    for read in core.sites.reads:
        if statement in core.tree.ancestors(read.statement) and isinstance(read.node, ast.Call):
            raise Unsure(
                read.node,
                "gradients are still scaled inside the block of scale_loss, so this clips almost everything; move it "
                "below the block",
            )
    for step in core.sites.steps:
        if statement in core.tree.ancestors(step.statement):
            raise Unsure(step.call, "the step is inside the block of scale_loss, where gradients are still scaled")


def _steps(core: Core) -> None:
    for step in core.sites.steps:
        if not _is_scaled(core, step.function, step.optimizer):
            continue
        scaler = core.scaler(step.call, step.optimizer)
        core.edits.replace(step.call, f"{scaler}.step({step.optimizer})")
        if core.order.updates.get(id(step.call), True):
            core.edits.after(step.statement, [f"{scaler}.update({core.update})"])


def _is_scaled(core: Core, function: Function | None, optimizer: str) -> bool:
    """Return whether a step uses scaled gradients: not in a function that has plain backward passes only."""
    blocks = [each for each in core.sites.backwards if each.block]
    if any(each.function is function for each in blocks):
        return True
    tree = core.tree
    inside = [node for node in tree.nodes if isinstance(node, ast.Call) and tree.function(node) is function]
    return not any(isinstance(each.func, ast.Attribute) and each.func.attr == "backward" for each in inside)
