"""Rules about checkpoints: the state of the loss scale is saved and loaded along with that of the optimizer."""

import ast
import re
from collections.abc import Iterator

from ampcompare.source.index import ProjectFunction, own_nodes_of_scope
from ampcompare.source.lint.read.module import (
    Finding,
    LintModule,
    Mistake,
    dotted_text_of,
    is_disabled_by_literal,
    register_rule,
    text_of_literal,
)
from ampcompare.source.lint.read.update_events import EventKind, name_in_source
from ampcompare.source.syntax import argument, argument_values

SCALER_STATE = re.compile(
    r"scaler\w*(?:\[[^\]]*\])?\.state_dict|scaler_state|scaler_dict|['\"]\w*scaler\w*['\"]\s*:"
)
AMP_STATE = re.compile(r"\bamp\w*\.state_dict|amp_state|['\"]amp['\"]\s*[:\]]")

SAVER = re.compile(r"_?save(?:_|$)")
STATE_SAVER = re.compile(r"_?save_(?:\w*_)?(?:checkpoint|ckpt|state|model|train|optim|snapshot|all)")
# Functions with such names, and classes, may keep an object that they get.
KEEPER = re.compile(
    r"^_*[A-Z]|(?i:trainer|runner|engine|manager|setup|prepare|regist|create|make|build|init|hook|wrap|save|state|ckpt)"
)


@register_rule(
    Mistake(
        "AMP119",
        "apex-state-unsaved",
        "a checkpoint holds the state of the optimizer, but the module never saves `amp.state_dict()`",
        "the loss scale starts again at 2**16 after a resume: a burst of skipped steps",
        "save `amp.state_dict()` too, and load it when resuming",
        """
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # AMP119  # wrong
torch.save({"optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)  # right
torch.save(model.state_dict(), weights)  # right
""",
        guard="amp-state-unsaved",
    ),
    Mistake(
        "AMP226",
        "amp-state-unsaved",
        "a checkpoint holds the state of an optimizer, but not that of amp or of the GradScaler",
        "the loss scale starts from its initial value after a resume: a burst of skipped steps, or "
        "gradients that underflow",
        "save `amp.state_dict()` or `scaler.state_dict()` too, and load it when resuming",
        """
import torch

scaler = torch.amp.GradScaler("cuda")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # AMP226  # wrong
torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)  # right
torch.save(model.state_dict(), weights)  # right
""",
    ),
    needs=("apex|caler", "save"),
)
def scale_state_unsaved(module: LintModule) -> Iterator[Finding]:
    """Checkpoints with the state of an optimizer, in a module that saves no state of the loss scale."""
    source = module.text_without_comments
    saves_apex = next(module.calls_of_functions("apex.amp.state_dict"), None) is not None
    apex = None if saves_apex else next(module.calls_of_functions("apex.amp.initialize"), None)
    scalers = [call for call in module.calls_making_scalers if not is_disabled_by_literal(call)]
    for code, maker, state in (
        ("AMP119", apex, AMP_STATE),
        ("AMP226", scalers[0] if scalers else None, SCALER_STATE),
    ):
        if maker is None or state.search(source) or _is_scaler_passed_to_saver(module):
            continue
        reported: set[ast.expr] = set()
        for call in _saving_calls(module):
            values = _saved_values(module, call)
            mappings = [_find_dict_of_value(module, value, call) for value in values]
            saved = next((one for one in mappings if one is not None), None)
            if saved in reported:
                continue
            saves_optimizer = any(
                _is_state_of_optimizer(module, value) or _holds_optimizer_state(module, value, call)
                for value in values
            ) or (code == "AMP226" and _is_optimizer_saved_elsewhere(module, call))
            if not saves_optimizer or not _does_save_need_scaler_state(module, maker, call, saved, code):
                continue
            shown = "the state of the optimizer is saved, but that of the loss scale is not"
            reported |= {saved} if saved is not None else set()
            yield module.make_finding(code, call, shown)


def _does_save_need_scaler_state(
    module: LintModule, maker: ast.Call, save: ast.Call, saved_mapping: ast.Dict | ast.Call | None, code: str
) -> bool:
    """Return whether what a call saves belongs to a loss scale that lasts until then, and scaled its steps."""
    if not _saves_training_of_scaler(module, maker, save, of_process=code == "AMP119"):
        return False
    if _is_scaler_new_each_round(module, maker, save):
        return False
    return code != "AMP226" or not _does_saved_optimizer_step_without_scaler(module, save, saved_mapping)


def _is_scaler_passed_to_saver(module: LintModule) -> bool:
    """Return whether a scaler is passed to something else than a function of the module that may save it."""
    for call in module.calls:
        name = dotted_text_of(call.func).rpartition(".")[2]
        if re.search(r"(?i)save|checkpoint|ckpt|state|dict|resume", name) and not module.may_be_own_function(
            call.func
        ):
            if any(
                module.kinds.kind_of_object(value, module.scope_of[call]) == "scaler"
                for value in argument_values(call)
            ):
                return True
    return False


def _is_optimizer_saved_elsewhere(module: LintModule, call: ast.Call) -> bool:
    """Return whether a function of another module gets an optimizer to save, and can reach no scaler of this one."""
    name = dotted_text_of(call.func)
    scope = module.scope_of[call]
    if (
        not STATE_SAVER.match(name.rpartition(".")[2])
        or module.may_be_own_function(call.func)
        or any(one.arg is None for one in call.keywords)
    ):
        return False
    if re.fullmatch(r"self\.\w+", name) or any(
        dotted_text_of(value) == "self" for value in argument_values(call)
    ):
        return False
    if not any(module.kinds.kind_of_object(value, scope) == "optimizer" for value in argument_values(call)):
        return False
    return all(
        _is_scaler_kept_nowhere_else(module, node)
        for node in module.scope_of
        if isinstance(node, (ast.Name, ast.Attribute))
    )


def _is_scaler_kept_nowhere_else(module: LintModule, node: ast.Name | ast.Attribute) -> bool:
    """Return whether a use of a scaler gives it to nothing that may keep it; other names are no matter."""
    if module.kinds.kind_of_object(node, module.scope_of[node]) != "scaler" or isinstance(
        node.ctx, ast.Store
    ):
        return True
    parent = module.parents[node]
    while isinstance(parent, (ast.keyword, ast.IfExp, ast.BoolOp)):
        parent = module.parents[parent]
    if isinstance(parent, ast.Call):
        return parent.func is node or not KEEPER.search(dotted_text_of(parent.func).rpartition(".")[2])
    return not isinstance(
        parent, (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Assign, ast.Return, ast.Starred)
    )


def _saving_calls(module: LintModule) -> Iterator[ast.Call]:
    """Yield the calls of `torch.save`, and of functions whose names say that they save."""
    known = {id(call): name for call, name in module.resolved_calls}
    for call in sorted(module.calls, key=lambda each: each.lineno):
        name = known.get(id(call)) or dotted_text_of(call.func)
        if name == "torch.save" or SAVER.match(name.rpartition(".")[2]):
            yield call


def _saves_training_of_scaler(
    module: LintModule, maker: ast.Call, save: ast.Call, *, of_process: bool
) -> bool:
    """Return whether a checkpoint belongs to the training of a loss scale; each method reaches one `of_process`."""
    home, here = module.scope_of[maker], module.scope_of[save]
    if of_process and home.owner is not None and home.owner is here.owner:
        return True
    kept = home.owner is not None and any(
        maker in values for name, values in home.owner.values.items() if name.startswith("self.")
    )
    if home in here.lookup_scopes() or (kept and home.owner is here.owner):
        return True
    return any({maker, save} <= {event.call for event in trace} for trace in module.traces)


def _saved_values(module: LintModule, call: ast.Call) -> list[ast.expr]:
    """Return what a call saves: the object of `torch.save`, and any argument of another function."""
    if module.resolve(call.func) != "torch.save":
        return argument_values(call)
    value = argument(call, "obj", 0)
    return [] if value is None else [value]


def _find_dict_of_value(module: LintModule, value: ast.expr, place: ast.expr) -> ast.Dict | ast.Call | None:
    """Return the dict that a value is above a place, written with braces or as a call of `dict` with keywords."""
    if isinstance(value, ast.Name):
        values = module.scope_of[value].values.get(value.id, [])
        above = [each for each in values if getattr(each, "lineno", place.lineno) < place.lineno]
        # A method that gets the dict may add entries to it.
        made = [
            each
            for each in above
            if not (isinstance(each, ast.Call) and value.id in map(dotted_text_of, each.args))
        ]
        nearest = max(made, key=lambda each: each.lineno, default=None)
        return None if nearest is None else _find_dict_of_value(module, nearest, nearest)
    if isinstance(value, ast.Call) and dotted_text_of(value.func) == "dict" and not value.args:
        return value
    return value if isinstance(value, ast.Dict) else None


def _is_scaler_new_each_round(module: LintModule, maker: ast.Call, save: ast.Call) -> bool:
    """Return whether each round of a loop, such as an epoch, has its own scaler: a resume changes nothing."""
    for trace in module.traces:
        made = [event.loops for event in trace if event.call is maker]
        if made and any(event.call is save and event.loops == made[0] != () for event in trace):
            return True
    return False


def _does_saved_optimizer_step_without_scaler(
    module: LintModule, call: ast.Call, saved_mapping: ast.Dict | ast.Call | None
) -> bool:
    """Return whether the optimizers that a call saves step by themselves, and others by the scaler."""
    states = [node for root in (call, saved_mapping) if root is not None for node in ast.walk(root)]
    owners = [node.value for node in states if isinstance(node, ast.Attribute) and node.attr == "state_dict"]
    names = {
        dotted_text_of(one)
        for one in owners
        if module.kinds.kind_of_object(one, module.scope_of[call]) == "optimizer"
    }
    events = [event for trace in module.traces for event in trace]
    scaled = {name_in_source(event.target) for event in events if event.kind is EventKind.SCALER_STEP}
    alone = {name_in_source(event.subject) for event in events if event.kind is EventKind.STEP}
    return bool(scaled) and bool(names) and names <= alone - scaled


def _holds_optimizer_state(module: LintModule, value: ast.expr, place: ast.expr) -> bool:
    """Return whether a mapping has the state of an optimizer: written in it, added to it, or returned by a function."""
    if isinstance(value, ast.Call) and value in module.scope_of:
        found = module.index.callee(value, module.scope_of[value])
        if isinstance(found, ProjectFunction) and found.module is module and found.name != "__init__":
            returned = [
                node.value for node in own_nodes_of_scope(found.scope) if isinstance(node, ast.Return)
            ]
            return (
                len(returned) == 1
                and returned[0] is not None
                and _holds_optimizer_state(module, returned[0], returned[0])
            )
    mapping = _find_dict_of_value(module, value, place)
    values: list[ast.expr | None] = [] if mapping is None else [*_values_of_mapping(mapping)]
    if isinstance(value, ast.Name):
        values += _values_added_to_dict(module, value.id, place)
    return None not in values and any(_is_state_of_optimizer(module, each) for each in values)


def _values_of_mapping(mapping: ast.Dict | ast.Call) -> list[ast.expr]:
    return mapping.values if isinstance(mapping, ast.Dict) else argument_values(mapping)


def _values_added_to_dict(module: LintModule, name: str, place: ast.expr) -> Iterator[ast.expr | None]:
    """Yield what is added to a dict, by keys above a place and by `update`; None for what cannot be seen."""
    for node in ast.walk(module.scope_of[place].node):
        if isinstance(node, ast.Assign) and node.lineno < place.lineno:
            target = node.targets[0]
            if isinstance(target, ast.Subscript) and dotted_text_of(target.value) == name:
                yield node.value
        elif isinstance(node, ast.Call) and dotted_text_of(node.func) == f"{name}.update":
            yield from (one.value if one.arg else None for one in node.keywords)
            for one in node.args:
                yield from _values_of_dict(module, one, node)
        elif (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.BitOr)
            and dotted_text_of(node.target) == name
        ):
            yield from _values_of_dict(module, node.value, node.value)


def _values_of_dict(module: LintModule, value: ast.expr, place: ast.expr) -> list[ast.expr | None]:
    mapping = _find_dict_of_value(module, value, place)
    return [None] if mapping is None else [*_values_of_mapping(mapping)]


def _is_state_of_optimizer(module: LintModule, value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):
        return any(_is_state_of_optimizer(module, each) for each in (value.body, value.orelse))
    if isinstance(value, ast.Name):
        values = module.scope_of[value].values.get(value.id, [])
        return any(isinstance(each, ast.Call) and _is_state_of_optimizer(module, each) for each in values)
    return (
        value is not None
        and module.kinds.kind_of_method_owner(value, "state_dict", module.scope_of[value]) == "optimizer"
    )


@register_rule(
    Mistake(
        "AMP122",
        "apex-state-unloaded",
        "the state of Apex is saved, but never loaded along with that of the optimizer",
        "every resumed run starts with the initial loss scale: a burst of skipped steps",
        "call `amp.load_state_dict` where the state of the optimizer is loaded",
        """
torch.save({"optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)
optimizer.load_state_dict(torch.load(path)["optimizer"])  # AMP122
amp.load_state_dict(torch.load(path)["amp"])  # right
""",
    ),
    Mistake(
        "AMP231",
        "scaler-state-unloaded",
        "the state of the GradScaler is saved, but never loaded along with that of the optimizer",
        "every resumed run starts with the initial loss scale: a burst of skipped steps",
        "call `scaler.load_state_dict` where the state of the optimizer is loaded",
        """
torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
optimizer.load_state_dict(torch.load(path)["optimizer"])  # AMP231
scaler.load_state_dict(torch.load(path)["scaler"])  # right
""",
    ),
    needs=("apex|caler", "load_state_dict"),
)
def saved_scale_state_unloaded(module: LintModule) -> Iterator[Finding]:
    """Checkpoints whose optimizer state is loaded, in a module that saves a loss scale and loads it nowhere."""
    of_optimizer = _loads_of_optimizer_alone(module)
    if not of_optimizer:
        return
    if next(module.calls_of_functions("apex.amp.state_dict"), None) is not None:
        shown = "the state of the optimizer is loaded, but that of Apex is saved and never loaded"
        yield module.make_finding("AMP122", of_optimizer[0], shown)
    elif any(
        module.kinds.kind_of_method_owner(one, "state_dict", module.scope_of[one]) == "scaler"
        for one in module.calls
    ):
        shown = "the state of the optimizer is loaded, but that of the scaler is saved and never loaded"
        yield module.make_finding("AMP231", of_optimizer[0], shown)


def _loads_of_optimizer_alone(module: LintModule) -> list[ast.Call]:
    """Return the calls that load the state of an optimizer, in a module that surely loads none of a loss scale."""
    loads = [call for call in module.calls if dotted_text_of(call.func).endswith(".load_state_dict")]
    if any(_may_load_scale(module, call) for call in loads):
        return []
    kinds = module.kinds
    return [
        call
        for call in loads
        if kinds.kind_of_method_owner(call, "load_state_dict", module.scope_of[call]) == "optimizer"
    ]


def _may_load_scale(module: LintModule, call: ast.Call) -> bool:
    """Return whether a call may load the state of a loss scale: by its words, or because it loads many objects."""
    of_apex = module.resolve(call.func) == "apex.amp.load_state_dict"
    if of_apex or re.search(r"(?i)scaler|(?:\b|_)amp", ast.unparse(call)):
        return True
    assert isinstance(call.func, ast.Attribute)
    values = module.values_of(dotted_text_of(call.func.value), module.scope_of[call]) or []
    keys = [node.slice for node in ast.walk(call) if isinstance(node, ast.Subscript)]
    # An element of what a loop goes over; `model, optimizer = amp.initialize(...)` has none.
    elements = [value for value in values if isinstance(value, ast.Starred)]
    is_any = any(not isinstance(module.parent(value.value), ast.Assign) for value in elements)
    return is_any or any(text_of_literal(key) is None for key in keys)
