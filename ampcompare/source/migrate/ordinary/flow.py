"""Where the model, its optimizer and what comes out of the autocast block go: only to places of a closed list.

A value is followed from each use to what it becomes: through assignments, returns and the functions of the project.
Whatever is not on the list is refused, so nothing here decides what a call does.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ampcompare.source.amp_names import CLIPS, WRAPPERS
from ampcompare.source.index import ProjectFunction, UnknownFunction, functions_of_callee, own_nodes_of_scope
from ampcompare.source.migrate.ordinary.words import name_unfit_for_network
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.migrate.read.wide_numbers import ScalarTensorFinder
from ampcompare.source.migrate.read.wide_tensors import Fp32TensorFinder
from ampcompare.source.syntax import argument_values, arguments, dotted_name, is_literal, last_name, walk
from ampcompare.source.torch_methods import MOVING, PARAMETER_LISTS, WITH_INDICES

if TYPE_CHECKING:
    from ampcompare.source.index import Index
    from ampcompare.source.migrate.core.context import ApexCore
    from ampcompare.source.module import Module, Scope

VALUE = "what the model returns"
MODEL = "the model"
OPTIMIZER = "the optimizer"
PARAMETERS = "the list of its parameters"
# Of a tensor: what gives numbers, truth values, integers or sizes.
ENDS = frozenset({
    "item", "size", "dim", "numel", "nelement", "argmax", "argmin", "argsort", "eq", "ne", "ge", "gt", "le", "lt",
    "isnan", "isinf", "isfinite", "nonzero", "shape", "device", "ndim", "requires_grad", "is_cuda", "float", "long",
    "int", "bool", "is_floating_point", "get_device",
})  # fmt: skip
# Of a tensor: what keeps its elements.
SAME = frozenset({
    "detach", "clone", "contiguous", "view", "reshape", "squeeze", "unsqueeze", "flatten", "permute", "transpose", "t",
    "cuda", "expand", "expand_as", "view_as", "data", "T", "detach_", "narrow", "chunk", "split", "repeat",
})  # fmt: skip
# Under autocast as under O1 alike: all but what leaves the GPU or asks for a type.
LEAVE = frozenset(
    {"cpu", "numpy", "tolist", "to", "type", "double", "half", "bfloat16", "backward", "__array__"}
)
SHOWN = frozenset({
    "print", "str", "repr", "format", "float", "int", "bool", "round", "len", "isinstance", "type", "id", "hasattr",
    "callable",
})  # fmt: skip
SHOWN_ELSEWHERE = frozenset({
    "math.isnan", "math.isfinite", "math.isinf", "numpy.isnan", "numpy.isfinite", "numpy.isinf", "torch.isnan",
    "torch.isfinite", "torch.isinf", "torch.is_tensor", "torch.argmax", "torch.argmin", "torch.eq", "torch.ne",
    "torch.gt", "torch.ge", "torch.lt", "torch.le", "torch.argsort",
})  # fmt: skip
TALKS = frozenset({"torch.distributed.all_reduce", "torch.distributed.reduce", "torch.distributed.broadcast"})
STORE = frozenset({"torch.save", "torch.as_tensor", "torch.tensor", "torch.onnx.export"})
HOLDING = frozenset(
    {"list", "tuple", "zip", "enumerate", "sum", "reversed", "iter", "filter", "sorted", "min", "max"}
)
OF_MODEL = frozenset({
    "train", "eval", "state_dict", "load_state_dict", "zero_grad", "__class__", "training",
})  # fmt: skip
IN_BLOCK = frozenset({"train", "eval", "training", "state_dict", "module"})
OF_OPTIMIZER = frozenset({"zero_grad", "state_dict", "load_state_dict", "param_groups"})
SCHEDULES = ("torch.optim.lr_scheduler.",)
HOLDERS = (ast.IfExp, ast.UnaryOp, ast.Dict, ast.List, ast.Tuple, ast.Starred, ast.BinOp)
MAX_DEPTH = 6
POWERS = (ast.Pow, ast.MatMult)

GOES = "{0} goes into `{1}`, which is not on the list of what is right whatever its type"
OUTSIDE = "`{0}` is outside of the autocast block"
SEVERAL_INPUTS = "`{0}` gets more than one tensor, of which one may be a number"
UNDER_CASTS = "`{0}` runs under autocast here, and is not on the list of what O1 and autocast compute alike"
MEETS_NUMBER = (
    "`{0}` may have a tensor of one number in fp32: O1 computes this in fp32, torch in the other's type"
)
CHANGES_IN_PLACE = (
    "`{0}` works in place with a tensor that may be fp32: O1 makes both of one type before, torch keeps that of the "
    "first"
)
DEEP = "functions call each other too deeply here to be read"
ELSEWHERE = "line {0} of {1}: "


class _FollowedUse(NamedTuple):
    """An expression whose value is followed.

    Attributes:
        is_cast: whether it runs under autocast, as its caller does.
    """

    module: Module
    node: ast.expr
    kind: str
    is_cast: bool


def refuse_unlisted_value_flow(core: ApexCore) -> None:
    """Refuse a training whose model, optimizer or outputs go to a place that is not on the list.

    Raises:
        UnsureRewrite: one does.
    """
    _ValueFlow(core).follow_training_values()


def arithmetic_differing_under_o1(
    module: Module, index: Index, nodes: list[ast.AST]
) -> Iterator[tuple[ast.expr | ast.AugAssign, str]]:
    """Yield the arithmetic among nodes that O1 computes in another type than autocast, each with what is said of it."""
    for mixed in ScalarTensorFinder(module, index).nodes_mixing_scalar_tensors(nodes):
        yield mixed, MEETS_NUMBER.format(ast.unparse(mixed))
    for changed in Fp32TensorFinder(module).inplace_arithmetic_with_fp32_operand(nodes):
        yield changed, CHANGES_IN_PLACE.format(ast.unparse(changed))


class _ValueFlow:
    """Follows model, optimizer and outputs of a training through its files; a use that is not listed is refused."""

    def __init__(self, core: ApexCore) -> None:
        self._core = core
        self._waiting: list[_FollowedUse] = []
        self._seen: set[tuple[ast.AST, str, bool]] = set()
        self._sites = {each.statement for each in core.sites.initializes}
        self._losses = {id(each.loss) for each in core.sites.backwards}
        self._optimizers = {id(each.call.func) for each in core.sites.steps}
        self._optimizers |= {id(one) for each in core.sites.backwards for one in each.arguments.values()}
        self._masters = {id(each) for call in core.sites.masters for each in call.args}
        self._clips = {id(each.node) for each in core.sites.reads}
        self._inside: set[Scope] = set()
        self._stored: dict[Module, dict[Scope, set[str]]] = {}

    def follow_training_values(self) -> None:
        """Follow the model, the optimizer, and what is computed in the block; anything else is an UnsureRewrite."""
        core, module = self._core, self._core.module
        for each in core.sites.initializes:
            scope = module.scope_of[each.call]
            for name, kind in (("models", MODEL), ("optimizers", OPTIMIZER)):
                given = each.arguments[name]
                self._follow_name(module, scope, dotted_name(given) or "", kind, is_cast=False)
            assert isinstance(each.statement, ast.Assign)
            target = each.statement.targets[0]
            for one, kind in zip(getattr(target, "elts", []), (MODEL, OPTIMIZER), strict=False):
                self._follow_name(module, scope, dotted_name(one) or "", kind, is_cast=False)
        for first, last in core.forward.regions:
            for call in module.calls:
                if first.lineno <= call.lineno <= (
                    last.end_lineno or last.lineno
                ) and not self._only_shows_arguments(module, call):
                    self._add_use(_FollowedUse(module, call, VALUE, is_cast=True))
        for call in module.calls:
            if core.has_autocast(call):
                if self._calls_unseen_object(call):
                    self._add_use(_FollowedUse(module, call, VALUE, is_cast=True))
                self._refuse_functions_under_autocast(module, call, 0)
        while self._waiting:
            self._follow_use(self._waiting.pop())

    def _refuse_functions_under_autocast(self, module: Module, call: ast.Call, depth: int) -> None:
        """Refuse functions of the project that run under autocast with more than a network may have."""
        for each in functions_of_callee(self._core.index.callee(call, module.scope_of[call])):
            if not isinstance(each, ProjectFunction) or each.scope in self._inside:
                continue
            self._inside.add(each.scope)
            nodes = list(own_nodes_of_scope(each.scope))
            for mixed, message in arithmetic_differing_under_o1(each.module, self._core.index, nodes):
                value = mixed.value if isinstance(mixed, ast.AugAssign) else mixed
                use = _FollowedUse(each.module, value, VALUE, is_cast=True)
                self._refuse_use(use, mixed, message)
            for node in nodes:
                if isinstance(node, (ast.Name, ast.Attribute)):
                    name = name_unfit_for_network(each.module, node)
                    if name:
                        self._refuse_use(
                            _FollowedUse(each.module, node, VALUE, is_cast=True),
                            node,
                            UNDER_CASTS.format(name),
                        )
                elif isinstance(node, ast.Call):
                    if depth >= MAX_DEPTH:
                        self._refuse_use(_FollowedUse(each.module, node, VALUE, is_cast=True), node, DEEP)
                    self._refuse_functions_under_autocast(each.module, node, depth + 1)

    def _calls_unseen_object(self, call: ast.Call) -> bool:
        """Return whether an object is called, other than a function or class that is seen to be one."""
        module = self._core.module
        if not argument_values(call) or not isinstance(call.func, (ast.Name, ast.Attribute)):
            return False
        callee = self._core.index.callee(call, module.scope_of[call])
        if any(each.name.endswith(("forward", "__call__")) for each in functions_of_callee(callee)):
            return True
        is_builtin = hasattr(builtins, last_name(call.func)) and isinstance(call.func, ast.Name)
        return isinstance(callee, UnknownFunction) and isinstance(call.func, ast.Name) and not is_builtin

    # What is followed.

    def _add_use(self, use: _FollowedUse) -> None:
        key = (use.node, use.kind, use.is_cast)
        if key not in self._seen:
            self._seen.add(key)
            self._waiting.append(use)

    def _follow_name(self, module: Module, scope: Scope, name: str, kind: str, *, is_cast: bool) -> None:
        """Follow all uses of a variable."""
        home = self._scope_of_variable(module, scope, name)
        for node in module.nodes:
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            if (
                isinstance(node.ctx, ast.Load)
                and self._scope_of_variable(module, module.scope_of[node], name) is home
            ):
                self._add_use(_FollowedUse(module, node, kind, is_cast))
            elif kind == VALUE and isinstance(around := module.parent(node), ast.AugAssign):
                self._refuse_arithmetic_outside(
                    _FollowedUse(module, node, kind, is_cast), around, around.value
                )

    def _scope_of_variable(self, module: Module, scope: Scope, name: str) -> Scope:
        """Return the scope whose variable a name is."""
        if module not in self._stored:
            found: dict[Scope, set[str]] = defaultdict(set)
            for node in module.nodes:
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found[module.scope_of[node]].add(node.id)
            self._stored[module] = found
        for each in scope.lookup_scopes():
            if name in each.globals:
                return module.top
            if name in each.parameters or name in self._stored[module].get(each, ()):
                return each
        return module.top

    def _is_under_autocast(self, module: Module, node: ast.AST, is_cast: bool) -> bool:
        return (
            is_cast
            or self._core.is_all_fp32
            or (module is self._core.module and self._core.has_autocast(node))
        )

    def _refuse_use(self, use: _FollowedUse, place: ast.AST, message: str = "") -> None:
        """Refuse a use, with the place that it goes to."""
        text = ast.unparse(place).splitlines()[0]
        message = message or GOES.format(use.kind, text if len(text) <= 80 else f"{text[:77]}...")
        if use.module is self._core.module:
            raise UnsureRewrite(use.node, message)
        where = ELSEWHERE.format(use.node.lineno, self._core.index.relative_path_of(use.module))
        raise UnsureRewrite(self._core.sites.initializes[0].call, where + message)

    # One use.

    def _follow_use(self, use: _FollowedUse) -> None:
        module, node = use.module, use.node
        around = module.parent(node)
        if (
            module.statement_around(node) in self._sites
            or id(node) in self._losses | self._optimizers | self._masters
        ):
            return
        if isinstance(around, ast.keyword):
            around = module.parent(around)
        if (
            use.kind == PARAMETERS
            and self._is_under_autocast(module, node, use.is_cast)
            and not self._core.is_all_fp32
        ):
            self._refuse_use(use, around)  # which may write to weights of which autocast keeps the casts
        if isinstance(around, ast.Attribute):
            self._follow_attribute(use, around)
        elif isinstance(around, ast.Call):
            if around.func is node:
                self._follow_model_call(use, around)
            else:
                self._follow_argument(use, around)
        elif isinstance(around, ast.Assign):
            self._follow_targets(use, around.targets, around)
        elif isinstance(around, ast.AnnAssign):
            self._follow_targets(use, [around.target], around)
        elif isinstance(around, (ast.For, ast.comprehension)) and around.iter is node:
            if use.kind != PARAMETERS:
                self._follow_targets(use, [around.target], around)
        elif isinstance(around, ast.AugAssign):
            self._follow_arithmetic(use, around, [around.target])
        elif isinstance(around, ast.Return):
            self._follow_return(use, around)
        elif isinstance(around, (ast.Tuple, ast.List)) and isinstance(
            module.parent(around), (ast.Assign, ast.Return)
        ):
            self._add_use(use._replace(node=around))
        else:
            self._follow_part(use, around)

    def _follow_part(self, use: _FollowedUse, around: ast.AST) -> None:
        """Settle a part of an expression, or of a test."""
        if isinstance(around, (ast.Compare, ast.BoolOp, ast.If, ast.While, ast.Assert, ast.Expr, ast.Delete)):
            return
        if isinstance(around, (ast.FormattedValue, ast.JoinedStr)) or self._is_percent_formatting(
            use.module, around
        ):
            return
        is_value = use.kind == VALUE
        if isinstance(around, ast.IfExp) and around.test is use.node:
            return
        if isinstance(around, ast.UnaryOp) and isinstance(around.op, ast.Not):
            return
        if is_value and isinstance(around, ast.BinOp):
            self._follow_arithmetic(use, around, [])
        elif is_value and isinstance(around, ast.Subscript):
            if around.value is use.node:  # as an index, it chooses the same elements whatever its type
                self._add_use(use._replace(node=around))
        elif isinstance(around, HOLDERS if use.kind == PARAMETERS else (ast.IfExp, ast.UnaryOp)):
            self._add_use(use._replace(node=around))
        elif (
            is_value
            and isinstance(around, (ast.Tuple, ast.List))
            and self._is_under_autocast(*use[:2], use.is_cast)
        ):
            self._add_use(use._replace(node=around))  # as of torch.cat
        else:
            self._refuse_use(use, around)

    def _is_percent_formatting(self, module: Module, node: ast.AST) -> bool:
        """Return whether a node is the text that `%` makes, or the tuple for it."""
        if isinstance(node, ast.Tuple):
            node = module.parent(node)
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)):
            return False
        return isinstance(node.left, ast.JoinedStr) or isinstance(getattr(node.left, "value", None), str)

    def _follow_arithmetic(
        self, use: _FollowedUse, around: ast.BinOp | ast.AugAssign, targets: list[ast.expr]
    ) -> None:
        """Follow a value through arithmetic: refuse what stands outside of autocast, go on with the result."""
        if use.kind != VALUE:
            self._refuse_use(use, around)
        operands = [around.left, around.right] if isinstance(around, ast.BinOp) else [around.target]
        for other in operands:
            if other is not use.node:
                self._refuse_arithmetic_outside(use, around, other)
        if isinstance(around, ast.BinOp):
            self._add_use(use._replace(node=around))
        else:
            self._follow_targets(use, targets, around)

    def _refuse_arithmetic_outside(
        self, use: _FollowedUse, around: ast.BinOp | ast.AugAssign, other: ast.expr
    ) -> None:
        """Refuse all arithmetic of a value outside of autocast, except sums and products with a number as written."""
        is_plain = isinstance(other, ast.Constant) and not isinstance(around.op, POWERS)
        if not is_plain and not self._is_under_autocast(use.module, use.node, use.is_cast):
            self._refuse_use(use, around)

    def _follow_targets(self, use: _FollowedUse, targets: list[ast.expr], around: ast.AST) -> None:
        """Follow the names that something is assigned to."""
        module = use.module
        for target in targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                if use.kind not in (VALUE, MODEL, OPTIMIZER):
                    self._refuse_use(use, around)
                parts = target.elts
                if isinstance(use.node, (ast.Tuple, ast.List)) and len(parts) == len(use.node.elts):
                    parts = [
                        one
                        for one, value in zip(parts, use.node.elts, strict=True)
                        if self._was_use_seen(use, value)
                    ]
                elif use.kind != VALUE:
                    self._refuse_use(use, around)
                elif (
                    isinstance(use.node, ast.Call)
                    and last_name(use.node.func) in WITH_INDICES
                    and len(parts) == 2
                ):
                    parts = parts[:1]
                self._follow_targets(use, parts, around)
            elif isinstance(target, ast.Name):
                self._follow_name(module, module.scope_of[target], target.id, use.kind, is_cast=use.is_cast)
            elif not (isinstance(target, ast.Starred) and isinstance(target.value, ast.Name)):
                self._refuse_use(use, around)

    def _was_use_seen(self, use: _FollowedUse, node: ast.expr) -> bool:
        return (node, use.kind, use.is_cast) in self._seen

    def _follow_return(self, use: _FollowedUse, around: ast.Return) -> None:
        module = use.module
        function = module.function_around(around)
        scope = None if function is None else module.scope_from[function]
        calls, complete = (
            ([], False) if scope is None else self._core.index.possible_calls_and_completeness(scope)
        )
        if not complete or use.kind == PARAMETERS:
            self._refuse_use(use, around)
        for call in calls:
            home = self._core.index.scope_around_call(call).module
            self._add_use(
                _FollowedUse(
                    home, call, use.kind, is_cast=False if home is self._core.module else use.is_cast
                )
            )

    # Attributes and calls.

    def _follow_attribute(self, use: _FollowedUse, around: ast.Attribute) -> None:
        module, name = use.module, around.attr
        call = module.parent(around)
        called = call if isinstance(call, ast.Call) and call.func is around else None
        if use.kind == VALUE:
            self._follow_tensor_attribute(use, around, called)
        elif use.kind == OPTIMIZER:
            if name not in OF_OPTIMIZER and id(around) not in self._optimizers:
                self._refuse_use(use, called or around)
        elif use.kind == PARAMETERS:
            self._refuse_use(use, called or around)
        elif (
            self._is_under_autocast(module, around, use.is_cast)
            and not self._core.is_all_fp32
            and name not in IN_BLOCK
        ):
            self._refuse_use(use, called or around)  # autocast keeps the casts of the weights as they were
        elif name in PARAMETER_LISTS and called is not None:
            self._add_use(_FollowedUse(module, called, PARAMETERS, use.is_cast))
        elif name in MOVING and called is not None:
            self._add_use(use._replace(node=called))
        elif name == "module":
            self._add_use(use._replace(node=around))
        elif name not in OF_MODEL and not self._runs_before_initialize(module, around):
            self._refuse_use(use, called or around)

    def _runs_before_initialize(self, module: Module, node: ast.AST) -> bool:
        core = self._core
        return module is core.module and core.runs_only_before_initialize(module.statement_around(node))

    def _follow_tensor_attribute(
        self, use: _FollowedUse, around: ast.Attribute, called: ast.Call | None
    ) -> None:
        module, name = use.module, around.attr
        whole: ast.expr = called or around
        given = [] if called is None else argument_values(called)
        is_cast = self._is_under_autocast(module, around, use.is_cast)
        if name in ENDS:
            return
        if name in WITH_INDICES and called is not None:
            above = module.parent(called)
            if not (given and isinstance(above, ast.Subscript) and is_literal(above.slice, 1)):
                self._add_use(use._replace(node=whole))
            return
        is_move = name == "to" and bool(given) and all("device" in ast.unparse(each) for each in given)
        if not is_move and name not in SAME and (not is_cast or name in LEAVE):
            self._refuse_use(use, whole)
        self._add_use(use._replace(node=whole))

    def _follow_model_call(self, use: _FollowedUse, call: ast.Call) -> None:
        """Settle a call of the model itself; no other thing that is followed may be called."""
        if use.kind != MODEL:
            self._refuse_use(use, call)
        if not self._is_under_autocast(use.module, call, use.is_cast):
            self._refuse_use(use, call, OUTSIDE.format(ast.unparse(call)))
        if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
            self._refuse_use(use, call, SEVERAL_INPUTS.format(ast.unparse(call)))
        self._add_use(_FollowedUse(use.module, call, VALUE, use.is_cast))

    def _only_shows_arguments(self, module: Module, call: ast.Call) -> bool:
        """Return whether a call shows its arguments, or asks for truth values, integers or sizes."""
        name, full = last_name(call.func), module.resolve(call.func)
        if isinstance(call.func, ast.Name) and full is None and name in SHOWN and hasattr(builtins, name):
            return True
        if full is not None and full.startswith(("logging.", "time.")):
            return True
        is_text = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant)
        return full in SHOWN_ELSEWHERE or is_text or (isinstance(call.func, ast.Attribute) and name in ENDS)

    def _follow_argument(self, use: _FollowedUse, call: ast.Call) -> None:
        module, kind = use.module, use.kind
        name, full = last_name(call.func), module.resolve(call.func) or ""
        is_cast = self._is_under_autocast(module, call, use.is_cast)
        is_own = bool(self._core.index.project_functions_of(call, module.scope_of[call]))
        if not is_own and (
            self._only_shows_arguments(module, call) or self._consumes_value_without_result(kind, call, full)
        ):
            return
        is_builtin = not is_own and isinstance(call.func, ast.Name) and not full and hasattr(builtins, name)
        is_held = is_builtin and name in HOLDING and kind in (VALUE, PARAMETERS)
        if is_held or (kind == MODEL and full in WRAPPERS):
            self._add_use(use._replace(node=call))
        elif (
            kind == VALUE
            and full.startswith("torch.")
            and full not in STORE
            and (is_cast or _returns_pairs(full))
        ):
            above = module.parent(call)
            if not (isinstance(above, ast.Subscript) and is_literal(above.slice, 1) and name in WITH_INDICES):
                self._add_use(use._replace(node=call))
        else:
            self._follow_into_function(use, call, is_cast=is_cast)

    def _consumes_value_without_result(self, kind: str, call: ast.Call, full_name: str) -> bool:
        """Return whether a call of torch takes what it gets without a result to follow."""
        if kind == PARAMETERS:
            return full_name.startswith("torch.optim.") or (full_name in CLIPS and id(call) in self._clips)
        if kind == OPTIMIZER:
            return full_name.startswith(SCHEDULES)
        return full_name in TALKS if kind == VALUE else full_name == "torch.save"

    def _follow_into_function(self, use: _FollowedUse, call: ast.Call, *, is_cast: bool) -> None:
        """Follow an argument into the functions of the project that a call may name."""
        index, module = self._core.index, use.module
        callee = index.callee(call, module.scope_of[call])
        choices = functions_of_callee(callee)
        if isinstance(callee, UnknownFunction) or not choices or use.kind == PARAMETERS:
            self._refuse_use(use, call)
        for each in choices:
            if not isinstance(each, ProjectFunction):
                is_of_torch = use.kind == VALUE and is_cast and each.name.startswith("torch.nn.")
                if not is_of_torch:
                    self._refuse_use(use, call)
                self._add_use(use._replace(node=call))
                continue
            node = each.scope.node
            if each.name == "forward" and use.kind == VALUE and is_cast:
                self._add_use(use._replace(node=call))  # a criterion: it computes as under O1
                continue
            if not isinstance(node, ast.FunctionDef) or each.name == "__init__" or each.given:
                self._refuse_use(use, call)
            assert isinstance(node, ast.FunctionDef)
            bound = arguments(call, each.module.positional_parameters_without_self(node))
            keys = [key for key, value in bound.items() if use.node in walk(value)]
            if not keys or not set(keys) <= each.scope.parameters or node.decorator_list:
                self._refuse_use(use, call)
            for key in keys:
                self._follow_name(each.module, each.scope, key, use.kind, is_cast=is_cast)


def _returns_pairs(full_name: str) -> bool:
    return full_name.removeprefix("torch.") in WITH_INDICES
