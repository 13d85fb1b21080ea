"""Rewrite training by `FP16_Optimizer` and an fp16 model as `amp.initialize` at O2, from which the other rules go on.

Three classes of Apex have the name: those of `apex.fp16_utils`, of `apex.optimizers` up to 2019 and of
`apex.contrib.optimizers`. All keep fp32 master weights of a model that `half()` cast, as O2 does.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ampcompare.source.branches import Facts, facts_at
from ampcompare.source.edits import Edits
from ampcompare.source.migrate.finding import NOTE, Finding, origins_of_lines
from ampcompare.source.migrate.read.names import Names
from ampcompare.source.migrate.read.sites import Unsure
from ampcompare.source.module import Function, Module
from ampcompare.source.syntax import arguments, dotted, is_literal

__all__ = ["AtLevel2", "at_level_2"]

NAME = "FP16_Optimizer"
OPTIONS = ("init_optimizer", "static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args", "verbose")
# What the class has and the optimizer inside has not. Any other attribute is one of the optimizer without fp16 too.
OWN = (
    "all_fp16_params", "all_fp32_from_fp16_params", "cur_iter", "dynamic_loss_scale", "first_closure_call_this_step",
    "fp16_groups", "fp16_groups_flat", "fp32_from_fp16_groups", "fp32_from_fp32_groups", "fp32_groups_flat",
    "inspect_master_grad_data", "loss_scaler", "optimizer", "overflow", "scale_factor", "scale_window",
)  # fmt: skip
SCALE = ("loss_scale", "cur_scale")
CLIP = "clip_each_group"
GROWTH = (
    "FP16_Optimizer doubled its scale after 1000 steps without an overflow, and that of apex.fp16_utils began at "
    "2**32; now it is 2000 and 2**16"
)
STATE = (
    "state_dict() of FP16_Optimizer held the loss scale and the master weights; this is the state of the optimizer "
    "alone, and files that were saved before do not load"
)
CLIPPED = "FusedAdam clipped the gradients of each group below FP16_Optimizer; a hook does it before each step"
CONVERTERS = ("apex.fp16_utils.network_to_half", "apex.fp16_utils.convert_network")
OF_MODELS = ("parameters", "named_parameters", "train", "eval", "state_dict")


@dataclass(frozen=True)
class AtLevel2:
    """A module that uses `amp.initialize` instead.

    Attributes:
        text: not for running, only for the rules of `amp.initialize`.
        lines: the line of the original for each line, both from 1.
        notes: on lines of the original.
    """

    text: str
    lines: dict[int, int]
    notes: list[Finding]


@dataclass(frozen=True)
class _Wrapped:
    """A statement `key = FP16_Optimizer(inner, ...)`.

    Attributes:
        scale: the source of the `loss_scale` of `amp.initialize`.
    """

    call: ast.Call
    statement: ast.Assign
    key: str
    inner: str
    scale: str


def at_level_2(module: Module, names: Names, torch: str) -> AtLevel2 | None:
    """Return the module with `amp.initialize` in the place of `FP16_Optimizer`; None if it does not use it.

    Args:
        torch: the name by which the module knows torch.

    Raises:
        Unsure: it is used in a way that is not known.
    """
    uses = [node for node, meaning in names.uses if meaning.rpartition(".")[2] == NAME]
    if not uses:
        return None
    return _Rewriter(module, names, torch, [_wrapped(module, use) for use in uses]).rewrite()


def _wrapped(module: Module, use: ast.AST) -> _Wrapped:
    call = module.parent(use)
    statement = module.statement(use)
    if not isinstance(call, ast.Call) or not isinstance(statement, ast.Assign) or statement.value is not call:
        raise Unsure(use, f"{NAME} is not bound to a name where it is made")
    key = dotted(statement.targets[0])
    given = arguments(call, OPTIONS)
    inner = dotted(given.get("init_optimizer"))
    if key is None or inner is None or len(statement.targets) > 1:
        raise Unsure(call, f"{NAME} is not made from a plain name")
    if not set(given) <= set(OPTIONS) or not _begins_at_default(given.get("dynamic_loss_args")):
        raise Unsure(call, f"{NAME} has arguments that cannot be followed")
    return _Wrapped(call, statement, key, inner, _scale(module, given))


def _scale(module: Module, given: dict[str, ast.expr]) -> str:
    dynamic, static = given.get("dynamic_loss_scale"), given.get("static_loss_scale")
    fixed = module.source(static) if static is not None else "1.0"
    if dynamic is None or (isinstance(dynamic, ast.Constant) and not dynamic.value):
        return fixed
    return '"dynamic"' if isinstance(dynamic, ast.Constant) else f'"dynamic" if {module.source(dynamic)} else {fixed}'


def _begins_at_default(options: ast.expr | None) -> bool:
    """Return whether `dynamic_loss_args` are not given, or only name the first scale that GradScaler has anyway."""
    if options is None or is_literal(options, None):
        return True
    if not isinstance(options, ast.Dict):
        return False
    given = {ast.unparse(key): value for key, value in zip(options.keys, options.values, strict=True) if key}
    first = given.get("'init_scale'")
    return set(given) <= {"'init_scale'", "'scale_window'"} and (
        first is None or ast.unparse(first) in ("2 ** 16", "2.0 ** 16", "65536", "65536.0")
    )


class _Rewriter:
    """Puts the new calls into one module."""

    def __init__(self, module: Module, names: Names, torch: str, wrapped: list[_Wrapped]) -> None:
        self._module = module
        self._names = names
        self._torch = torch
        self._wrapped = wrapped
        self._key = wrapped[0].key
        self._edits = Edits(module)
        self._notes: list[Finding] = []
        self._batch_norm = True  # whether its weights stay in fp32, as network_to_half lets them

    def rewrite(self) -> AtLevel2:
        self._check()
        casts = _find_casts(self._module, self._names, self._wrapped[0].statement)
        for each in casts:
            self._batch_norm &= bool(each.call.args)
            self._drop_cast(each)
        self._initialize(list(dict.fromkeys(each.key for each in casts)))
        self._use_optimizer()
        self._clip_groups()
        self._import()
        if any("dynamic" in each.scale for each in self._wrapped):
            self._note(self._wrapped[0].call, GROWTH)
        text = self._edits.result()
        return AtLevel2(text, origins_of_lines(self._module.text, text), self._notes)

    def _note(self, node: ast.AST, message: str) -> None:
        self._notes.append(Finding(node.lineno, node.col_offset, NOTE, message))  # type: ignore[attr-defined]

    def _check(self) -> None:
        first = self._wrapped[0]
        if any((each.key, each.inner) != (first.key, first.inner) for each in self._wrapped):
            raise Unsure(self._wrapped[1].call, f"several optimizers go through {NAME}")
        if len({self._module.function(each.call) for each in self._wrapped}) > 1:
            raise Unsure(self._wrapped[1].call, f"{NAME} is made in two functions")
        if any(meaning.startswith("apex.amp.") for _, meaning in self._names.uses):
            raise Unsure(first.call, f"{NAME} is used together with apex.amp")
        for node in self._module.nodes:
            if isinstance(node, ast.Name) and node.id in ("scaled_loss", CLIP, "amp"):
                raise Unsure(node, f"{node.id} has another meaning here")

    def _drop_cast(self, cast: _ModelCast) -> None:
        call = cast.call
        inner = call.args[0] if call.args else call.func.value  # type: ignore[attr-defined]
        if cast.statement.value is call and isinstance(inner, (ast.Name, ast.Attribute)):  # type: ignore[attr-defined]
            self._edits.remove(cast.statement)
            return
        self._edits.replace(call, self._module.source(inner))

    def _initialize(self, models: list[str]) -> None:
        given = models[0] if len(models) == 1 else f"[{', '.join(models)}]"
        first = self._wrapped[0]
        pair = self._pair()
        if pair is not None:
            dynamic, fixed = self._wrapped[0].scale, self._wrapped[1].scale
            scale = f"{dynamic} if {self._module.source(pair.test)} else {fixed}"
            self._edits.replace_statement(pair, [self._call(first, given, scale)])
            return
        for each in self._wrapped:
            self._edits.replace_statement(each.statement, [self._call(each, given, each.scale)])

    def _call(self, each: _Wrapped, models: str, scale: str) -> str:
        options = f'opt_level="O2", keep_batchnorm_fp32={self._batch_norm}, loss_scale={scale}'
        return f"{models}, {each.key} = amp.initialize({models}, {each.inner}, {options})"

    def _pair(self) -> ast.If | None:
        """Return the `if` that chooses between a dynamic and a static scale and does nothing else."""
        outer = self._module.parent(self._wrapped[0].statement)
        if len(self._wrapped) != 2 or not isinstance(outer, ast.If) or self._wrapped[0].scale != '"dynamic"':
            return None
        alone = [each.statement for each in self._wrapped] == [*outer.body, *outer.orelse]
        return outer if alone and len(outer.body) == 1 else None

    # the optimizer

    def _use_optimizer(self) -> None:
        module, tail = self._module, self._key.rpartition(".")[2]
        backwards = 0
        for node in module.nodes:
            if not isinstance(node, ast.Attribute):
                continue
            key = dotted(node.value)
            call = module.parent(node)
            called = isinstance(call, ast.Call) and call.func is node
            if key is None or key.rpartition(".")[2] != tail:
                if node.attr == "backward" and called and call.args:  # type: ignore[attr-defined]
                    raise Unsure(node, f"this may be the backward pass of {NAME} under another name")
                continue
            if node.attr == "backward" and called:
                self._backward(call, key)  # type: ignore[arg-type]
                backwards += 1
            else:
                self._attribute(node, call if called else None, key)  # type: ignore[arg-type]
        if not backwards:
            raise Unsure(self._wrapped[0].call, f"no {self._key}.backward() is in this file")

    def _backward(self, call: ast.Call, key: str) -> None:
        statement = self._module.statement(call)
        kept = [each for each in call.keywords if each.arg == "retain_graph"]
        others = [each for each in call.keywords if each.arg not in ("retain_graph", "update_master_grads")]
        if len(call.args) != 1 or others or not isinstance(statement, ast.Expr) or statement.value is not call:
            raise Unsure(call, f"the arguments of backward of {NAME} cannot be followed")
        options = f"retain_graph={self._module.source(kept[0].value)}" if kept else ""
        lines = [
            f"with amp.scale_loss({self._module.source(call.args[0])}, {key}) as scaled_loss:",
            f"{self._module.unit}scaled_loss.backward({options})",
        ]
        if not self._module.is_alone(statement):
            raise Unsure(call, "the backward pass shares its line with another statement")
        self._edits.replace_statement(statement, lines)

    def _attribute(self, node: ast.Attribute, call: ast.Call | None, key: str) -> None:
        statement = self._module.statement(node)
        if node.attr in ("state_dict", "load_state_dict"):
            self._note(node, STATE)
        elif node.attr in SCALE and isinstance(node.ctx, ast.Load):
            self._edits.replace(node, "amp._amp_state.loss_scalers[0].loss_scale()")
        elif node.attr == "clip_master_grads" and call is not None and call.args:
            inside = ", ".join(self._module.source(each) for each in (*call.args, *call.keywords))
            self._edits.replace(call, f"{self._torch}.nn.utils.clip_grad_norm_(amp.master_params({key}), {inside})")
        elif node.attr == "update_master_grads" and isinstance(statement, ast.Expr):
            self._edits.remove(statement)
        elif node.attr == "zero_grad" and call is not None and (call.args or call.keywords):
            self._edits.replace(call, f"{key}.zero_grad()")
        elif node.attr in (*OWN, *SCALE, "clip_master_grads", "update_master_grads"):
            raise Unsure(node, f"{node.attr} of {NAME} has no equivalent")

    def _clip_groups(self) -> None:
        """Clip below the step where `FusedAdam` of 2019 did so: by the norm of each group of parameters."""
        module, unit = self._module, self._module.unit
        for node, meaning in self._names.uses:
            call, statement = module.parent(node), module.statement(node)
            if not meaning.endswith(".FusedAdam") or not isinstance(call, ast.Call):
                continue
            limit = next((each for each in call.keywords if each.arg == "max_grad_norm"), None)
            if limit is None:
                continue
            key = dotted(statement.targets[0]) if isinstance(statement, ast.Assign) else None
            if key != self._wrapped[0].inner or not isinstance(limit.value, ast.Constant):
                raise Unsure(call, "max_grad_norm of FusedAdam cannot be followed")
            kept = [module.source(each) for each in (*call.args, *call.keywords) if each is not limit]
            stays = any(each.arg == "bias_correction" and not getattr(each.value, "value", 1) for each in call.keywords)
            kept += ["fused=False"] if limit.value.value and not stays else []  # it would unscale after the hook below
            self._edits.replace(call, f"{module.source(call.func)}({', '.join(kept)})")
            if not limit.value.value:
                continue
            clip = f'{self._torch}.nn.utils.clip_grad_norm_(group["params"], {module.source(limit.value)})'
            hook = [f"def {CLIP}(optimizer, *_):", f"{unit}for group in optimizer.param_groups:", f"{unit * 2}{clip}"]
            self._edits.after(statement, ["", *hook, "", f"{key}.register_step_pre_hook({CLIP})"])
            self._note(call, CLIPPED)

    def _import(self) -> None:
        for statement, alias in self._names.imports:
            if isinstance(statement, ast.ImportFrom) and alias.name in (NAME, "*"):
                if len(statement.names) == 1 and alias.name == NAME:
                    self._edits.replace_statement(statement, ["from apex import amp"])
                else:
                    self._edits.after(statement, ["from apex import amp"])
                return
        raise Unsure(self._wrapped[0].call, f"{NAME} is not imported by name")


@dataclass(frozen=True)
class _ModelCast:
    """A call such as `model.half()` or `network_to_half(model)`.

    Attributes:
        key: of the model, where the optimizer is made.
    """

    call: ast.Call
    statement: ast.stmt
    key: str


def _find_casts(module: Module, names: Names, wrapped: ast.stmt) -> list[_ModelCast]:
    """Return the casts of the models that belong to the optimizer of a statement.

    Args:
        wrapped: makes the `FP16_Optimizer`.

    Raises:
        Unsure: there is none, or one under other conditions than those of the statement.
    """
    function = module.function(wrapped)
    tests = _tests(module, wrapped)
    found: list[_ModelCast] = []
    for node in module.calls:
        statement, key = module.statement(node), _cast(module, names, node)
        if key is None or not _is_model(module, key):
            continue
        if module.function(node) is function:
            if not _belongs(module, statement, wrapped, key, function):
                continue
        elif (own := _own(module, node, key, function)) is not None and _is_model(module, own):
            key = own
        else:
            continue
        if not _tests(module, statement).items() <= tests.items():
            raise Unsure(node, "the model is cast to fp16 here under another condition than FP16_Optimizer is made")
        found.append(_ModelCast(node, statement, key))
    if not found:
        raise Unsure(wrapped, "the fp16 model of FP16_Optimizer is not found; keep it in fp32, use autocast")
    return found


def _cast(module: Module, names: Names, call: ast.Call) -> str | None:
    """Return the key of the model that a call such as `model.half()` casts."""
    statement = module.statement(call)
    converts = names.meaning(call.func) in CONVERTERS and len(call.args) == 1 and not call.keywords
    halves = isinstance(call.func, ast.Attribute) and call.func.attr == "half" and not call.args
    if not converts and not halves:
        return None
    cast = call.args[0] if converts else call.func.value  # type: ignore[attr-defined]
    if isinstance(statement, ast.Expr):
        return dotted(cast) if statement.value is call else None
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1 or not _is_chain(statement.value, call):
        return None
    bound = dotted(statement.targets[0])
    return bound if converts or dotted(cast) == bound or _makes_module(cast) else None


def _own(module: Module, call: ast.Call, key: str, function: Function | None) -> str | None:
    """Return the attribute of the object to which another method of its class binds the model that it casts."""
    method = module.function(call)
    if method is None or function is None or module.class_of(method) is None:
        return None
    if module.class_of(method) is not module.class_of(function):
        return None
    if key.startswith("self."):  # not in a method such as `half`, which casts for another reason
        return key if method.name == "__init__" or _tests(module, module.statement(call)) else None
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and node.lineno > call.lineno and _mentions(node.value, key):
            bound = dotted(node.targets[0])
            return bound if bound is not None and bound.startswith("self.") else None
    return None


def _is_model(module: Module, key: str) -> bool:
    """Return whether the module uses a name as it does with models only, or puts it into a parallel wrapper."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in OF_MODELS and dotted(node.value) == key:
            return True
        if isinstance(node, ast.Call) and (dotted(node.func) or "").endswith("DataParallel"):
            if any(dotted(each) == key for each in node.args):
                return True
    return False


def _belongs(module: Module, statement: ast.stmt, wrapped: ast.stmt, key: str, function: Function | None) -> bool:
    """Return whether no other model is bound to the name between a cast and the optimizer."""
    first, last = sorted((statement.lineno, wrapped.lineno))
    for node in ast.walk(function or module.tree):
        if not isinstance(node, ast.Assign) or not first < node.lineno < last:
            continue
        if any(dotted(each) == key for each in node.targets) and not _mentions(node.value, key):
            return False
    return True


def _tests(module: Module, statement: ast.stmt) -> Facts:
    """Return what the tests around a statement say, up to its function."""
    return facts_at(module, statement, module.function(statement))


def _mentions(node: ast.AST, key: str) -> bool:
    return any(dotted(each) == key for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))


def _is_chain(value: ast.expr, call: ast.Call) -> bool:
    """Return whether a call is a link of a chain of method calls such as `Net().half().cuda()`."""
    while value is not call:
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return False
        value = value.func.value
    return True


def _makes_module(value: ast.expr) -> bool:
    """Return whether a chain of calls begins with the making of an object such as `Net()`, not with a tensor."""
    while (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call)
    ):
        value = value.func.value
    name = (dotted(value.func) or "").rpartition(".")[2] if isinstance(value, ast.Call) else ""
    return name[:1].isupper() or name.startswith(("get_model", "build_model", "from_pretrained"))
